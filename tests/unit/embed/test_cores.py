"""Which cores embed a text."""

import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.clock import HandClock
from worker.embed.cores import (
    FIRST_TRIAL,
    LAST_TRIAL,
    LOOK_AGAIN,
    MEMORY_SECONDS,
    WARM_UP,
    BudgetedWidth,
    CoreShares,
    available_cores,
)


def embed(cores: CoreShares, clock: HandClock, seconds: float, pause: float) -> int | None:
    """Embed one text alone, then rest; return which share it had."""
    share = cores.take()
    clock.now += seconds
    cores.give_back(share)
    clock.now += pause
    return share


def busy_cores(shares: int, clock: HandClock) -> CoreShares:
    """Return cores that have been in use for long."""
    cores = CoreShares(shares, clock)
    share = cores.take()
    clock.now += 10 * MEMORY_SECONDS
    cores.give_back(share)
    return cores


def test_texts_that_come_one_by_one_get_all_cores() -> None:
    clock = HandClock(7.0)
    cores = CoreShares(2, clock)
    assert [embed(cores, clock, 0.02, 0.08) for _ in range(100)] == [None] * 100


def test_a_lone_text_s_share_counts_as_what_it_is() -> None:
    clock = HandClock(7.0)
    cores = busy_cores(2, clock)
    shares = [embed(cores, clock, 0.08, 0.02) for _ in range(400)]  # 80 % of the time, on half of the cores: 0.4
    assert shares[0] is not None
    assert None in shares[-20:]


def test_under_load_texts_get_a_share_each() -> None:
    cores = busy_cores(3, HandClock(7.0))
    shares = [cores.take() for _ in range(3)]
    assert sorted(share for share in shares if share is not None) == [0, 1, 2]
    cores.give_back(shares[1])
    assert cores.take() == shares[1]


def test_while_it_is_quiet_a_text_waits_for_one_that_has_all_cores() -> None:
    cores = CoreShares(2, HandClock(7.0))
    assert cores.take() is None
    with ThreadPoolExecutor(1) as thread:
        second = thread.submit(cores.take)
        with pytest.raises(TimeoutError):
            second.result(0.05)
        cores.give_back(None)
        assert second.result(10) is None


def test_under_load_a_text_alone_gets_a_share_until_it_is_quiet_again() -> None:
    clock = HandClock(7.0)
    cores = CoreShares(2, clock)
    shares = [embed(cores, clock, 0.049, 0.0) for _ in range(500)]  # all of the time, on half of the cores
    assert shares[0] is None
    assert None not in shares[250:]
    clock.now += 3 * MEMORY_SECONDS
    assert cores.take() is None


def test_one_by_one_each_text_waits_for_all_cores() -> None:
    cores = busy_cores(2, HandClock(7.0))
    first = cores.take()
    assert first is not None
    cores.sharing = False
    with ThreadPoolExecutor(1) as thread:
        second = thread.submit(cores.take)
        with pytest.raises(TimeoutError):
            second.result(0.05)
        cores.give_back(first)
        assert second.result(10) is None
    cores.give_back(None)
    cores.sharing = True
    assert cores.take() is not None


BUDGET = 0.1


def evaluations(width: BudgetedWidth, count: int, alone: float, rng: random.Random) -> tuple[int, int]:
    """Texts that take `alone` seconds on all cores and 1.8 times that side by side, some more, some less.

    Return how many exceeded the budget, and how many ran side by side.
    """
    over = together = 0
    for _ in range(count):
        seconds = alone * rng.uniform(0.8, 1.1) * (1.8 if width.side_by_side else 1.0)
        together += width.side_by_side
        over += seconds > BUDGET
        width.observe(seconds)
    return over, together


def test_texts_run_side_by_side_only_while_the_budget_holds(seed: int) -> None:
    rng = random.Random(seed)
    width = BudgetedWidth(BUDGET)
    assert evaluations(width, WARM_UP, 0.04, rng)[1] == 0
    assert evaluations(width, 3000, 0.04, rng) == (0, 3000)
    over, together = evaluations(width, 3000, 0.08, rng)
    assert 4 <= over <= 0.005 * 3000
    assert together == over
    assert evaluations(width, 2 * LAST_TRIAL, 0.04, rng)[1] >= LAST_TRIAL  # they are shorter again
    assert evaluations(width, 10, 0.04, rng) == (0, 10)


def test_a_trial_that_fails_makes_the_next_one_rarer(seed: int) -> None:
    width, rng = BudgetedWidth(BUDGET), random.Random(seed)
    over, together = evaluations(width, 200_000, 0.06, rng)
    assert 30 <= over <= 0.001 * 200_000
    assert over <= together <= 0.002 * 200_000
    short = BudgetedWidth(BUDGET)
    assert evaluations(short, WARM_UP + 50, 0.06, rng)[1] < 50
    assert not short.side_by_side
    evaluations(short, FIRST_TRIAL + 1, 0.04, rng)
    assert short.side_by_side


def test_without_hope_there_is_no_trial(seed: int) -> None:
    width, rng = BudgetedWidth(BUDGET), random.Random(seed)
    assert evaluations(width, 5000, 0.085, rng)[1] == 0
    assert evaluations(width, 1000, 0.04, rng)[1] >= 1000 - 2 * LOOK_AGAIN  # they are shorter now


def test_neither_a_pause_of_the_machine_nor_the_allowed_share_ends_the_time_side_by_side() -> None:
    width = BudgetedWidth(BUDGET)
    evaluations(width, WARM_UP, 0.01, random.Random(1))
    for number in range(20_000):
        width.observe(1.0 if number % 200 == 0 else 0.05)
        assert width.side_by_side
    width.observe(1.0)
    width.observe(1.0)
    assert width.side_by_side


def test_no_share_is_held_twice_and_none_is_lost() -> None:
    clock = HandClock(7.0)
    cores = busy_cores(2, clock)
    held: list[int | None] = []
    for step in range(1000):
        if len(held) < 2 and step % 3 != 2:
            held.append(cores.take())
            assert len(set(held)) == len(held)
        elif held:
            cores.give_back(held.pop(0))
        clock.now += 0.01


def test_the_cores_of_this_process_count_not_those_of_the_machine() -> None:
    allowed = os.sched_getaffinity(0)
    assert available_cores() == len(allowed)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert available_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)

"""Which cores embed a text."""

import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.clock import HandClock
from worker.embed.cores import LAST_PART, LEAD_SECONDS, LONGEST, MEMORY_SECONDS, CoreShares, available_cores


def embed(cores: CoreShares, clock: HandClock, seconds: float, pause: float, tokens: int = 100) -> int | None:
    """Embed one text alone, then rest; return which share it had."""
    share = cores.take(tokens)
    clock.now += seconds
    cores.give_back(share)
    clock.now += pause
    return share


def busy_cores(shares: int, clock: HandClock) -> CoreShares:
    """Return cores that have been in use for long."""
    cores = CoreShares(shares, clock=clock)
    share = cores.take(100)
    clock.now += 10 * MEMORY_SECONDS
    cores.give_back(share)
    return cores


def test_texts_that_come_one_by_one_get_all_cores() -> None:
    clock = HandClock(7.0)
    cores = CoreShares(2, clock=clock)
    assert [embed(cores, clock, 0.02, 0.08) for _ in range(100)] == [None] * 100


def test_a_lone_text_s_share_counts_as_what_it_is() -> None:
    clock = HandClock(7.0)
    cores = busy_cores(2, clock)
    shares = [embed(cores, clock, 0.08, 0.02) for _ in range(400)]  # 80 % of the time, on half of the cores: 0.4
    assert shares[0] is not None
    assert None in shares[-20:]


def test_under_load_texts_get_a_share_each() -> None:
    cores = busy_cores(3, HandClock(7.0))
    shares = [cores.take(100) for _ in range(3)]
    assert sorted(share for share in shares if share is not None) == [0, 1, 2]
    cores.give_back(shares[1])
    assert cores.take(100) == shares[1]


def test_while_it_is_quiet_a_text_waits_for_one_that_has_all_cores() -> None:
    cores = CoreShares(2, clock=HandClock(7.0))
    assert cores.take(100) is None
    with ThreadPoolExecutor(1) as thread:
        second = thread.submit(cores.take, 100)
        with pytest.raises(TimeoutError):
            second.result(0.05)
        cores.give_back(None)
        assert second.result(10) is None


def test_under_load_a_text_alone_gets_a_share_until_it_is_quiet_again() -> None:
    clock = HandClock(7.0)
    cores = CoreShares(2, clock=clock)
    shares = [embed(cores, clock, 0.049, 0.0) for _ in range(500)]  # all of the time, on half of the cores
    assert shares[0] is None
    assert None not in shares[250:]
    clock.now += 3 * MEMORY_SECONDS
    assert cores.take(100) is None


BUDGET = 0.1
A_TOKEN = 0.0004
SHORT = 100
LONG = 240


def settle(cores: CoreShares, clock: HandClock, tokens: int, a_token: float, slower: float = 1.8) -> None:
    """Embed 100 texts, one after the other; on a share, each takes `slower` times as long as on all cores."""
    for _ in range(100):
        share = cores.take(tokens)
        clock.now += tokens * a_token / (slower if share is None else 1)
        cores.give_back(share)


def loaded_cores(clock: HandClock) -> CoreShares:
    """Return two cores with a budget that have been in use for long, where a token takes A_TOKEN on a share."""
    cores = CoreShares(2, BUDGET, clock)
    for _ in range(4):
        settle(cores, clock, SHORT, A_TOKEN)
    return cores


def permitted(cores: CoreShares) -> int:
    """Return how many of the latest texts were permitted side by side; fail if they differed."""
    assert min(cores.permitted - 1, 2 - cores.permitted) < 0.01
    return round(cores.permitted)


def test_a_text_that_is_too_long_for_the_budget_gets_all_cores() -> None:
    clock = HandClock(7.0)
    cores = loaded_cores(clock)
    assert permitted(cores) == 2
    assert embed(cores, clock, LONG * A_TOKEN / 2, 0.0, LONG) is None
    assert embed(cores, clock, SHORT * A_TOKEN, 0.0, SHORT) is not None
    settle(cores, clock, LONG, A_TOKEN)
    assert permitted(cores) == 1
    settle(cores, clock, SHORT, A_TOKEN)
    assert permitted(cores) == 2


def test_without_a_budget_texts_of_any_length_share_the_cores() -> None:
    clock = HandClock(7.0)
    cores = busy_cores(2, clock)
    settle(cores, clock, 100_000, A_TOKEN)
    assert permitted(cores) == 2


def test_a_too_long_text_waits_for_its_neighbour_where_it_is_done_earlier_so() -> None:
    clock = HandClock(7.0)
    cores = loaded_cores(clock)
    neighbour = cores.take(SHORT)
    clock.now += SHORT * A_TOKEN / 2  # .020 s left, and .048 on all cores: less than .096
    with ThreadPoolExecutor(2) as threads:
        long = threads.submit(cores.take, LONG)
        with pytest.raises(TimeoutError):
            long.result(0.05)
        short = threads.submit(cores.take, SHORT)  # does not overtake
        with pytest.raises(TimeoutError):
            short.result(0.05)
        cores.give_back(neighbour)
        assert long.result(10) is None
        cores.give_back(None)
        short.result(10)


def test_a_too_long_text_shares_the_cores_where_it_is_done_earlier_so() -> None:
    clock = HandClock(7.0)
    cores = loaded_cores(clock)
    neighbour = cores.take(180)  # .072 s, and then .048 on all cores: more than .096
    share = cores.take(LONG)
    assert share is not None
    assert share != neighbour


def test_how_long_a_token_takes_is_observed() -> None:
    clock = HandClock(7.0)
    cores = loaded_cores(clock)
    for _ in range(2):
        settle(cores, clock, SHORT, 3 * A_TOKEN)  # a neighbour takes the cores: .120 s on a share
    assert permitted(cores) == 1
    for _ in range(2):
        settle(cores, clock, SHORT, A_TOKEN)
    assert permitted(cores) == 2


def test_texts_near_the_limit_do_not_move_to_and_fro(seed: int) -> None:
    clock, rng = HandClock(7.0), random.Random(seed)
    cores = loaded_cores(clock)
    before, changes = False, 0
    for _ in range(3000):
        tokens = round(LONGEST * BUDGET / A_TOKEN)
        alone = (share := cores.take(tokens)) is None
        clock.now += tokens * A_TOKEN * rng.uniform(0.95, 1.05) / (1.8 if alone else 1)
        cores.give_back(share)
        changes += alone != before
        before = alone
    assert changes <= 1


def test_a_pause_of_the_machine_does_not_count_as_slow() -> None:
    clock = HandClock(7.0)
    cores = loaded_cores(clock)
    for _ in range(20):
        embed(cores, clock, 2.0, 0.0, SHORT)
        settle(cores, clock, SHORT, A_TOKEN, 2.0)
        assert permitted(cores) == 2


def test_the_next_text_waits_elsewhere_while_one_has_all_cores() -> None:
    clock = HandClock(7.0)
    cores = CoreShares(2, BUDGET, clock)
    assert cores.pause(0) == 0.0
    share = cores.take(LONG)
    assert cores.pause(1) > 0.0  # nothing is known yet
    cores.give_back(share)
    cores = loaded_cores(clock)
    assert cores.pause(0) == 0.0
    for _ in range(4):
        settle(cores, clock, LONG, A_TOKEN, 2.0)
    expected = LONG * A_TOKEN / 2
    assert cores.take(LONG) is None
    assert cores.pause(1) == pytest.approx(expected * (1 - LAST_PART) - LEAD_SECONDS)
    clock.now += 0.01
    assert cores.pause(1) == pytest.approx(expected * (1 - LAST_PART) - LEAD_SECONDS - 0.01)
    assert cores.pause(2) > 0.0  # how long the second one is, is not known yet
    clock.now += 1.0
    assert cores.pause(1) == 0.0


def test_no_share_is_held_twice_and_none_is_lost() -> None:
    clock = HandClock(7.0)
    cores = busy_cores(2, clock)
    held: list[int | None] = []
    for step in range(1000):
        if len(held) < 2 and step % 3 != 2:
            held.append(cores.take(100))
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

"""The pace against the registry's own bucket, in simulated time: no 429, and nearly the whole rate."""

import heapq
import random
from dataclasses import dataclass
from math import inf

import pytest

from tests.support.registry import TokenBuckets
from worker.contribute.delivery import AFTER_429_SECONDS, LONGEST_PAUSE, Pauses, RequestPace

STEP = 0.5


@dataclass
class Outcome:
    sent: int
    limited: int
    seconds: float

    def share(self, limit: int) -> float:
        return self.sent / (limit / 60 * self.seconds)


def simulate(
    rng: random.Random, limit: int, processes: int, *, tasks: int = 2, latency: float = 0.02, seconds: float = 600.0,
    tokens_before: int = 0, idle_until: float = 0.0, most: float = inf,
) -> Outcome:  # fmt: skip
    """Let processes with `tasks` requests in flight at most send as fast as their paces allow."""
    buckets = TokenBuckets()
    for _ in range(tokens_before):
        buckets.take("agent", limit, 0.0)
    paces = [RequestPace(0.0, most) for _ in range(processes)]
    outcome = Outcome(0, 0, seconds - idle_until)
    moment = 0
    events: list[tuple[float, int, str, int]] = []
    for process in range(processes):
        for _ in range(tasks):
            heapq.heappush(events, (idle_until + rng.random() * 0.1, moment := moment + 1, "try", process))
    while events and events[0][0] < seconds:
        now, _, kind, process = heapq.heappop(events)
        pace = paces[process]
        if kind == "try":
            wait = pace.wait_seconds(now)
            if wait > 0:
                heapq.heappush(events, (now + min(wait, STEP) + 1e-6, moment := moment + 1, "try", process))
                continue
            pace.spend(now)
            heapq.heappush(events, (now + latency * rng.uniform(0.2, 1), moment := moment + 1, "arrive", process))
        elif kind == "arrive":
            allowance = buckets.take("agent", limit, now)
            outcome.limited += allowance.retry_after is not None
            outcome.sent += allowance.retry_after is None
            # The answer's way back takes its time, too.
            back = now + latency * rng.uniform(0.2, 1)
            heapq.heappush(events, (back, moment := moment + 1, f"answer {allowance.remaining}", process))
        else:
            pace.finished()
            pace.learn(limit, int(kind.split()[1]), now)
            heapq.heappush(events, (now, moment := moment + 1, "try", process))
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("limit", [30, 200, 2000])
@pytest.mark.parametrize("latency", [0.002, 0.1, 2.0])
def test_one_process_has_nearly_the_whole_rate_and_no_429(limit: int, latency: float, seed: int, long: bool) -> None:
    rng = random.Random(seed)
    enough = max(2, int(limit / 60 * latency * 3))
    outcome = simulate(rng, limit, 1, tasks=enough, latency=latency, seconds=600 if long or limit < 2000 else 150)
    assert outcome.limited == 0
    assert outcome.share(limit) >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("limit", [30, 200, 2000])
@pytest.mark.parametrize("processes", [2, 3])
def test_processes_that_share_a_key_share_the_rate_without_a_429(limit: int, processes: int, seed: int) -> None:
    rng = random.Random(seed)
    outcome = simulate(rng, limit, processes, tasks=4, latency=0.1, seconds=1800)
    assert outcome.limited == 0
    assert outcome.share(limit) >= 0.95  # the bucket is full at the start, so it may also be more than 1


@pytest.mark.slow
@pytest.mark.parametrize("limit", [30, 200, 2000])
def test_a_nearly_empty_bucket_at_the_start_causes_no_429(limit: int, seed: int) -> None:
    """As after a crash, when nobody knows what was sent before."""
    rng = random.Random(seed)
    outcome = simulate(rng, limit, 1, tokens_before=limit - 2, tasks=4)
    assert outcome.limited == 0
    assert outcome.share(limit) >= 0.85  # it fills half of the bucket meanwhile


def test_a_setting_limits_one_process(seed: int) -> None:
    outcome = simulate(random.Random(seed), 200, 1, tasks=4, most=50)
    assert outcome.limited == 0
    assert 0.95 <= outcome.share(50) <= 1.05


def test_an_idle_hour_saves_up_no_burst() -> None:
    pace = RequestPace(0.0)
    pace.spend(0.0)
    pace.finished()
    pace.learn(2000, 1999, 0.1)
    sent = 0
    while pace.wait_seconds(3600.0) == 0:
        pace.spend(3600.0)
        sent += 1
    assert 1 < sent <= 2000 / 60 * 2 + 1


def test_before_the_first_answer_one_request_is_in_flight() -> None:
    pace = RequestPace(0.0)
    assert pace.wait_seconds(0.0) == 0
    pace.spend(0.0)
    assert pace.wait_seconds(1000.0) > 0
    pace.finished()  # without an answer
    assert pace.wait_seconds(1001.0) > 0
    assert pace.wait_seconds(1003.0) == 0


def test_a_registry_that_states_no_limit_gets_the_lowest_tiers_rate_or_that_of_the_setting() -> None:
    for fallback, seconds in ((None, 2.0), (600.0, 0.1)):
        pace = RequestPace(0.0, fallback or inf, fallback)
        pace.spend(0.0)
        pace.finished()
        pace.unstated = True
        assert pace.wait_seconds(0.0) == pytest.approx(seconds)
        pace.learn(60, 59, 0.0)
        assert pace.wait_seconds(0.0) == pytest.approx(1.0)


def test_what_is_given_back_may_be_used_again() -> None:
    pace = RequestPace(0.0)
    pace.spend(0.0)
    pace.finished()
    pace.learn(60, 59, 0.0)
    pace.wait_seconds(10.0)
    before = (pace.tokens, pace.left)
    pace.spend(10.0)
    pace.give_back(10.0)
    assert (pace.tokens, pace.left, pace.in_flight) == (*before, 0)


def test_pauses_grow_up_to_a_minute_and_differ() -> None:
    pauses = Pauses()
    for whole in (1, 2, 4, 8, 16, 32, *[LONGEST_PAUSE] * 40):
        assert whole / 2 <= pauses.next_seconds() <= whole
    assert len({Pauses(6).next_seconds() for _ in range(40)}) > 20
    assert Pauses().next_seconds(at_least=20) == 20
    assert Pauses().next_seconds(at_least=1e6) == LONGEST_PAUSE


def test_after_a_429_three_within_an_hour_are_impossible() -> None:
    assert 2 * AFTER_429_SECONDS > 3600

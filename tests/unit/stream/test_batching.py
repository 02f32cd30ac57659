"""When a batch is committed: every case of the policy, without Kafka and without a clock."""

import itertools

import pytest

from worker.stream.batching import (
    BUSY_LINGER_SECONDS,
    LINGER_SECONDS_EACH,
    MAX_COMMIT_BYTES,
    MAX_COMMIT_RECORDS,
    Upstream,
    batch_length,
    linger_seconds,
    seconds_left,
)

INTERVAL = 1.0


@pytest.mark.parametrize(
    ("upstream", "expected"),
    [
        (Upstream(busy=False, waiting=0, has_turn=False, undecided=False), 0.0),
        (Upstream(busy=False, waiting=0, has_turn=True, undecided=True), 0.0),  # nothing waits anywhere
        (Upstream(busy=True, waiting=1, has_turn=True, undecided=False), BUSY_LINGER_SECONDS),
        (Upstream(busy=True, waiting=20, has_turn=True, undecided=True), 20 * LINGER_SECONDS_EACH),
        (Upstream(busy=True, waiting=10**6, has_turn=True, undecided=False), INTERVAL),
        (Upstream(busy=True, waiting=5, has_turn=False, undecided=True), INTERVAL),  # they leave the embedder soon
        (Upstream(busy=True, waiting=0, has_turn=False, undecided=True), INTERVAL),
        (Upstream(busy=True, waiting=5, has_turn=False, undecided=False), 0.0),  # the turn is over
        (Upstream(busy=True, waiting=0, has_turn=False, undecided=False), BUSY_LINGER_SECONDS),  # others wait
    ],
    ids=str,
)
def test_how_long_a_batch_lingers(upstream: Upstream, expected: float) -> None:
    assert linger_seconds(upstream, INTERVAL) == pytest.approx(expected)


def test_no_batch_lingers_longer_than_the_interval_and_more_load_never_commits_earlier() -> None:
    for busy, has_turn, undecided in itertools.product([False, True], repeat=3):
        for interval in (0.0, 0.05, 1.0):
            lingers = [linger_seconds(Upstream(busy, n, has_turn, undecided), interval) for n in range(1, 60)]
            assert all(0.0 <= seconds <= interval for seconds in lingers)
            assert lingers == sorted(lingers)


def test_the_time_counts_from_the_first_record_and_from_the_last_commit() -> None:
    alone = Upstream(busy=True, waiting=0, has_turn=False, undecided=False)
    assert seconds_left(10.0, 9.95, 0.0, 1, alone, INTERVAL) == pytest.approx(BUSY_LINGER_SECONDS - 0.05)
    assert seconds_left(10.0, 5.0, 9.98, 1, alone, INTERVAL) == pytest.approx(BUSY_LINGER_SECONDS - 0.02)
    assert seconds_left(10.0, 5.0, 5.0, 1, alone, INTERVAL) < 0
    behind = Upstream(busy=True, waiting=10**6, has_turn=True, undecided=True)
    assert seconds_left(10.0, 10.0, 10.0, MAX_COMMIT_RECORDS - 1, behind, INTERVAL) == INTERVAL
    assert seconds_left(10.0, 10.0, 10.0, MAX_COMMIT_RECORDS, behind, INTERVAL) <= 0


def test_a_batch_has_at_least_one_record_and_ends_with_the_one_that_reaches_a_bound() -> None:
    assert batch_length([MAX_COMMIT_BYTES * 2, 1]) == 1
    assert batch_length([1] * (MAX_COMMIT_RECORDS + 1)) == MAX_COMMIT_RECORDS
    assert batch_length([MAX_COMMIT_BYTES - 1, 1, 1]) == 2
    assert batch_length([MAX_COMMIT_BYTES - 1, 5, 1]) == 2
    assert batch_length([1, 2, 3]) == 3
    assert batch_length([]) == 0

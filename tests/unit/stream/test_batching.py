"""When a batch is committed: every case of the policy, without Kafka and without a clock."""

import itertools

import pytest

from worker.stream.partition import (
    BUSY_LINGER_SECONDS,
    MAX_COMMIT_BYTES,
    MAX_COMMIT_RECORDS,
    Upstream,
    batch_length,
    linger_seconds,
    seconds_left,
)

INTERVAL = 1.0


def so(true: str) -> Upstream:
    return Upstream(**{field: field in true.split() for field in Upstream._fields})


@pytest.mark.parametrize(
    ("upstream", "expected"),
    [
        ("", 0.0),
        ("has_turn undecided ahead", 0.0),  # nothing waits anywhere
        ("busy waiting ahead has_turn", INTERVAL),  # its own backlog becomes one batch
        ("busy waiting ahead has_turn undecided", INTERVAL),
        ("busy waiting has_turn", BUSY_LINGER_SECONDS),  # what waits came later
        ("busy waiting has_turn undecided", BUSY_LINGER_SECONDS),
        ("busy waiting ahead undecided", INTERVAL),  # they leave the embedder soon
        ("busy undecided", INTERVAL),
        ("busy waiting ahead", 0.0),  # the turn is over
        ("busy waiting", 0.0),
        ("busy", BUSY_LINGER_SECONDS),  # others wait
    ],
)
def test_how_long_a_batch_lingers(upstream: str, expected: float) -> None:
    assert linger_seconds(so(upstream), INTERVAL) == pytest.approx(expected)


def test_no_batch_lingers_longer_than_the_interval_and_more_ahead_never_commits_earlier() -> None:
    for busy, waiting, has_turn, undecided in itertools.product([False, True], repeat=4):
        for interval in (0.0, 0.05, 1.0):
            lingers = [
                linger_seconds(Upstream(busy, waiting, ahead, has_turn, undecided), interval) for ahead in (False, True)
            ]
            assert all(0.0 <= seconds <= interval for seconds in lingers)
            assert lingers == sorted(lingers)


def test_the_time_counts_from_the_first_record_and_from_the_last_commit() -> None:
    alone = so("busy")
    assert seconds_left(10.0, 9.95, 0.0, 1, alone, INTERVAL) == pytest.approx(BUSY_LINGER_SECONDS - 0.05)
    assert seconds_left(10.0, 5.0, 9.98, 1, alone, INTERVAL) == pytest.approx(BUSY_LINGER_SECONDS - 0.02)
    assert seconds_left(10.0, 5.0, 5.0, 1, alone, INTERVAL) < 0
    behind = so("busy waiting ahead has_turn undecided")
    assert seconds_left(10.0, 10.0, 10.0, MAX_COMMIT_RECORDS - 1, behind, INTERVAL) == INTERVAL
    assert seconds_left(10.0, 10.0, 10.0, MAX_COMMIT_RECORDS, behind, INTERVAL) <= 0


def test_a_batch_has_at_least_one_record_and_ends_with_the_one_that_reaches_a_bound() -> None:
    assert batch_length([MAX_COMMIT_BYTES * 2, 1]) == 1
    assert batch_length([1] * (MAX_COMMIT_RECORDS + 1)) == MAX_COMMIT_RECORDS
    assert batch_length([MAX_COMMIT_BYTES - 1, 1, 1]) == 2
    assert batch_length([MAX_COMMIT_BYTES - 1, 5, 1]) == 2
    assert batch_length([1, 2, 3]) == 3
    assert batch_length([]) == 0

"""When a partition's decided records are committed, and how many at once: a pure policy. Time is an argument, s.

A transaction costs a third of an embedding's CPU, whether it carries one record or hundreds. So decided records linger
while others can still join them, and are committed at once otherwise. Scoring continues meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

MAX_COMMIT_RECORDS: Final = 512
"""Most records of one transaction. A commit costs the same for 1 or 500; more would only cost memory and latency."""

MAX_COMMIT_BYTES: Final = 8 << 20
"""Most bytes of one transaction (SourceRecord.size and output values), so that large documents do not accumulate."""

BUSY_LINGER_SECONDS: Final = 0.1
"""While records of any partition wait, it lingers at least this long: 44 traces a second of 4 partitions then make 20
transactions a second, not 44."""


class Upstream(NamedTuple):
    """What can still join a partition's batch.

    `busy`: records of any partition wait to be taken. `waiting`: some of this one do. `ahead`: some that waited when
    the batch began are not decided yet. `has_turn`: the partition's records are taken next. `undecided`: some are
    taken, and not decided yet.
    """

    busy: bool
    waiting: bool
    ahead: bool
    has_turn: bool
    undecided: bool


def linger_seconds(upstream: Upstream, interval_seconds: float) -> float:
    """Return how long a batch waits for further records; `interval_seconds` is the longest time.

    A backlog of the partition's own becomes one batch, as far as it is decided within the interval: with a time for
    each record instead, a slower machine had more transactions. Records that come later are not waited for.
    """
    if not upstream.busy:
        return 0.0
    if upstream.waiting and upstream.has_turn:
        return interval_seconds if upstream.ahead else min(interval_seconds, BUSY_LINGER_SECONDS)
    if upstream.undecided:  # they leave the embedder soon
        return interval_seconds
    # After its turn, nothing else can join the batch.
    return 0.0 if upstream.waiting else min(interval_seconds, BUSY_LINGER_SECONDS)


def seconds_left(
    now: float, first: float, last_commit: float, records: int, upstream: Upstream, interval_seconds: float
) -> float:
    """Return the time until a batch is to be committed; 0 or less: now.

    `first`: when its first record was decided; `last_commit`: when the last transaction began; `records`: how many are
    decided.
    """
    if records >= MAX_COMMIT_RECORDS:
        return 0.0
    return max(last_commit, first) + linger_seconds(upstream, interval_seconds) - now


def batch_length(sizes: Iterable[int]) -> int:
    """Return how many of the decided records are the next batch, given their sizes (bytes): at least one."""
    length = total = 0
    for size in sizes:
        if length >= MAX_COMMIT_RECORDS or total >= MAX_COMMIT_BYTES:
            break
        total += size
        length += 1
    return length

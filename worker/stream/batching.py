"""When to commit a partition's decided records, and how many at once. Pure; time is an argument, in seconds.

A transaction costs a third of an embedding's CPU, however many records it carries. So decided records linger while
others can still join them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

MAX_COMMIT_RECORDS: Final = 512
"""Most records of one transaction. A commit costs the same for 1 or 500; more would only cost memory and latency."""

MAX_COMMIT_BYTES: Final = 8 << 20
"""Most bytes of one transaction (SourceRecord.size and output values), so that large documents do not accumulate."""

BUSY_LINGER_SECONDS: Final = 0.1
"""Least linger while records of any partition wait: 44 traces/s of 4 partitions then make 20 transactions/s, not 44."""


class Upstream(NamedTuple):
    """What can still join a partition's batch."""

    busy: bool  # records of any partition wait to be taken
    waiting: bool  # some of this one do
    ahead: bool  # some that waited when the batch began are not decided yet
    has_turn: bool  # the partition's records are taken next
    undecided: bool  # some are taken, and not decided yet


def linger_seconds(upstream: Upstream, interval_seconds: float) -> float:
    """Return how long a batch waits for further records: at most `interval_seconds`.

    It waits for the partition's backlog at its start, not for records that come later. A time for each record instead
    would give a slower machine more transactions.
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
    """Return the time until a batch is committed; 0 or less: now.

    `first`: when its first record was decided; `last_commit`: when the last transaction began.
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

"""The fetch buffer: fetched records that wait to be taken, one partition after the other.

Lives here: the queues between fetching and scoring, and their bounds. Must not live here: Kafka clients, scoring.

The bounds limit memory: a partition is fetched again only when its queue is below them, so that a topic full of large
documents uses a few MiB per partition. A share of the memory budget limits all partitions together; a record counts
there from its fetch until its commit.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from worker.core.records import SourceRecord
from worker.kafka.budget import Share

LOW_WATER_RECORDS = 256
"""Fetch again when fewer records wait: enough for the duration of one fetch (a few ms) at the rate without a model."""

LOW_WATER_BYTES = 1 << 20
"""The same in bytes. One fetch adds at most 1 MiB, or a single larger record."""


class _Queue:
    def __init__(self) -> None:
        self.records: deque[SourceRecord] = deque()
        self.bytes = 0
        self.room = asyncio.Event()
        self.room.set()

    def update(self) -> None:
        if len(self.records) < LOW_WATER_RECORDS and self.bytes < LOW_WATER_BYTES:
            self.room.set()
        else:
            self.room.clear()


class FetchBuffer:
    """The waiting records of all assigned partitions, counted in the `share`; who takes them gives it back."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._queues: dict[int, _Queue] = {}
        self._turns: deque[int] = deque()  # the partitions with waiting records
        self._last: int | None = None

    def __bool__(self) -> bool:
        """Whether any record waits."""
        return bool(self._turns)

    def __len__(self) -> int:
        """Return the number of waiting records."""
        return sum(len(queue.records) for queue in self._queues.values())

    def oldest(self, partition: int) -> SourceRecord | None:
        """Return the partition's first waiting record."""
        queue = self._queues.get(partition)
        return queue.records[0] if queue is not None and queue.records else None

    def assign(self, partitions: Iterable[int]) -> None:
        """Replace the partitions. Waiting records are dropped: they are not committed, and will be read again."""
        former, self._queues = self._queues, {partition: _Queue() for partition in partitions}
        self._turns = deque()
        for queue in former.values():
            self._share.give_back(queue.bytes)
            queue.room.set()  # a fetch that waits here checks the new queue

    def clear(self) -> None:
        """Drop all waiting records, keep the partitions."""
        self.assign(self._queues)

    def add(self, partition: int, records: Sequence[SourceRecord]) -> None:
        """Queue fetched records; those of a partition that is not assigned are dropped."""
        queue = self._queues.get(partition)
        if queue is None:
            return
        if not queue.records:
            self._turns.append(partition)
        size = sum(record.size for record in records)
        queue.records.extend(records)
        queue.bytes += size
        self._share.take(size)
        if not queue.records:
            self._turns.remove(partition)
        queue.update()

    def next(self, accepts: Callable[[int], bool], *, stay: bool = False) -> SourceRecord | None:
        """Take the next record, one partition after the other, skipping partitions for which `accepts` is false.

        `stay`: prefer the partition of the last record, if it has another.
        """
        if stay and self._turns and self._turns[-1] == self._last:
            self._turns.rotate(1)
        for _ in range(len(self._turns)):
            partition = self._turns.popleft()
            if not accepts(partition):
                self._turns.append(partition)
                continue
            queue = self._queues[partition]
            record = queue.records.popleft()
            queue.bytes -= record.size
            queue.update()
            if queue.records:
                self._turns.append(partition)
            self._last = partition
            return record
        return None

    async def room(self, partition: int) -> None:
        """Wait until the partition may be fetched again; forever if it is not assigned."""
        while True:
            queue = self._queues.get(partition)
            if queue is None:
                await asyncio.Event().wait()  # the caller's fetch is about to be cancelled
            else:
                await queue.room.wait()
                if self._queues.get(partition) is queue:
                    return

"""The fetch buffer: fetched records that wait to be taken.

The bounds limit memory: a partition is fetched again only when its queue is below them, so that a topic full of large
documents uses a few MiB per partition. A share of the memory budget limits all partitions together; a record counts
there from its fetch until its commit.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from worker.core.records import SourceRecord
from worker.kafka.reading.budget import Share
from worker.stream.turns import Turns

LOW_WATER_RECORDS = 256
"""Fetch again when fewer records wait: enough for the duration of one fetch (a few ms) at the rate without a model."""

LOW_WATER_BYTES = 1 << 20
"""The same in bytes. One fetch adds at most 1 MiB, or a single larger record."""


class _Queue:
    def __init__(self) -> None:
        self.records: deque[SourceRecord] = deque()
        self.bytes = 0
        self.full = False
        self.room = asyncio.Event()
        self.room.set()

    def update(self) -> None:
        self.full = len(self.records) >= LOW_WATER_RECORDS or self.bytes >= LOW_WATER_BYTES
        if self.full:
            self.room.clear()
        else:
            self.room.set()


class FetchBuffer:
    """The waiting records of all assigned partitions, counted in the `share`; who takes them gives it back.

    `on_turn` is called when a turn begins, with the seconds for which the partition has waited for it.
    """

    def __init__(
        self,
        share: Share,
        on_turn: Callable[[float], None] = lambda _: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._share = share
        self._on_turn = on_turn
        self._clock = clock
        self._queues: dict[int, _Queue] = {}
        self._turns = Turns()

    def __bool__(self) -> bool:
        """Whether any record waits."""
        return bool(self._turns)

    def __len__(self) -> int:
        """Return the number of waiting records."""
        return sum(len(queue.records) for queue in self._queues.values())

    def waiting(self, partition: int) -> int:
        """Return the number of the partition's waiting records."""
        queue = self._queues.get(partition)
        return 0 if queue is None else len(queue.records)

    def has_turn(self, partition: int) -> bool:
        """Whether the next records are taken from this partition."""
        return self._turns.current == partition

    def oldest(self, partition: int) -> SourceRecord | None:
        """Return the partition's first waiting record."""
        queue = self._queues.get(partition)
        return queue.records[0] if queue is not None and queue.records else None

    def assign(self, partitions: Iterable[int]) -> None:
        """Replace the partitions. Waiting records are dropped: they are not committed, and will be read again."""
        former, self._queues = self._queues, {partition: _Queue() for partition in partitions}
        self._turns = Turns()
        for queue in former.values():
            self._share.give_back(queue.bytes)
            queue.room.set()  # a fetch that waits here checks the new queue

    def clear(self) -> None:
        """Drop all waiting records, keep the partitions."""
        self.assign(self._queues)

    def add(self, partition: int, records: Sequence[SourceRecord]) -> None:
        """Queue fetched records; those of a partition that is not assigned are dropped."""
        queue = self._queues.get(partition)
        if queue is None or not records:
            return
        if not queue.records:
            self._turns.join(partition, self._clock())
        size = sum([record.size for record in records])
        queue.records.extend(records)
        queue.bytes += size
        self._share.take(size)
        queue.update()

    def next(self, accepts: Callable[[int], bool]) -> SourceRecord | None:
        """Take the next record of the partition whose turn it is; None if `accepts` is false for all that wait."""
        waited = self._turns.choose(accepts, self._clock())
        if waited is not None:
            self._on_turn(waited)
        partition = self._turns.current
        if partition is None:
            return None
        queue = self._queues[partition]
        record = queue.records.popleft()
        queue.bytes -= record.size
        if queue.full:  # otherwise there is room already
            queue.update()
        if not queue.records:
            self._turns.leave()
        return record

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

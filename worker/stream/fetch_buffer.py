"""The fetch buffer: fetched records that wait to be taken, and whose turn it is.

A partition is fetched again only when its queue is below the bounds. A share of the memory budget limits all partitions
together; a record counts there from its fetch until its commit.

With a backlog a partition keeps its turn for a while, so that its next transaction carries many records.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from worker.core.records import SourceRecord
from worker.kafka.budget import Share

LOW_WATER_RECORDS: Final = 256
"""Fetch again when fewer records wait: enough for the duration of one fetch (a few ms) at the rate without a model."""

LOW_WATER_BYTES: Final = 1 << 20  # the same in bytes. One fetch adds at most 1 MiB, or a single larger record


TURN_SECONDS: Final = 0.25
"""Least length of a turn while another partition waits. A partition with a backlog waits for at most two turns of each
other one; one that has just received records waits for at most two turns of each that has just received some, too."""

TURN_RECORDS: Final = 16
LONGEST_TURN_SECONDS: Final = 2.0
"""A turn with fewer records lasts longer, up to this time: a transaction costs 4 % of the embedding of 16 traces."""


class Turns:
    """The partitions with waiting records.

    One queue has those that had none before, another those left after their turn. They alternate, so neither starves.
    """

    def __init__(self) -> None:
        self._new: deque[int] = deque()
        self._left: deque[int] = deque()
        self._since: dict[int, float] = {}
        self._from_new = False
        self._began = 0.0
        self._records = 0
        self.current: int | None = None  # the partition that has the turn

    def __bool__(self) -> bool:
        """Whether any partition has waiting records."""
        return self.current is not None or bool(self._new) or bool(self._left)

    def join(self, partition: int, now: float) -> None:
        """Note that a partition without waiting records has received some."""
        self._new.append(partition)
        self._since[partition] = now

    def leave(self) -> None:
        """Note that the partition that has the turn has no waiting record left."""
        self.current = None

    def choose(self, held: Collection[int], now: float) -> float | None:
        """Set `current` to the partition to take from, None if all that wait are held.

        Return how long it has waited for its turn, s; None if it had the turn already, or there is none.
        """
        former = self.current
        if former is not None and self._lasts(now) and former not in held:
            self._records += 1
            return None
        following = self._following(held)
        if following is None and former is not None and former not in held:
            return None  # no other partition can use the turn
        if former is not None:
            self._left.append(former)
            self._since[former] = now
        self.current = following
        if following is None:
            return None
        self._began, self._records = now, 1
        return now - self._since.pop(following)

    def _lasts(self, now: float) -> bool:
        lasted = now - self._began
        return lasted < TURN_SECONDS or (self._records < TURN_RECORDS and lasted < LONGEST_TURN_SECONDS)

    def _following(self, held: Collection[int]) -> int | None:
        for queue in (self._left, self._new) if self._from_new else (self._new, self._left):
            for _ in range(len(queue)):
                partition = queue.popleft()
                if partition not in held:
                    self._from_new = queue is self._new
                    return partition
                queue.append(partition)
        return None


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
    """The waiting records of all assigned partitions; they count in the `share` until they are given back.

    `on_turn` is called with the seconds that a partition has waited, when its turn begins.
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
        self._held: set[int] = set()
        self._released = asyncio.Event()
        self._added = asyncio.Event()

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
        self._held.clear()
        self._released.set()
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
        self._added.set()

    async def filled(self) -> None:
        """Wait until any record waits."""
        while not self:
            self._added.clear()
            await self._added.wait()

    def hold(self, partition: int) -> None:
        """Let no record of a partition be taken until `release`, or the next assignment."""
        self._held.add(partition)

    def release(self, partition: int) -> None:
        """Let records of a partition be taken again."""
        self._held.discard(partition)
        self._released.set()

    async def released(self) -> None:
        """Wait until a partition is released, or the partitions change."""
        self._released.clear()
        await self._released.wait()

    def give_back(self, size: int) -> None:
        """Subtract the bytes (SourceRecord.size) of records that were taken, and are committed or dropped."""
        self._share.give_back(size)

    def next(self) -> SourceRecord | None:
        """Take the next record of the partition whose turn it is; None if all that wait are held."""
        waited = self._turns.choose(self._held, self._clock())
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

"""The batches of a fetch response, one after the other: bounded in memory, and continuing after unreadable parts.

Lives here: what aiokafka's consumers use in place of `MemoryRecords`. Must not live here: one batch (batch.py), the
records that a consumer gets (fetch_results.py), counting of memory (budget.py).

aiokafka still handles transactions and parses each record in C. The differences:
- a compressed batch is unpacked here, into bounded memory, and its records are parsed from there;
- if aiokafka's parser fails, record_parser.py parses the batch again and continues after the broken part. A record with
  a `Fault` replaces a record that cannot be read. The fault is in `ConsumerRecord.checksum`, which is otherwise None;
- a fetch is limited by `Reading.fetch_bytes` as well as by number; the record that exceeds the limit is its last;
- a batch is only unpacked when the memory budget has room for it. It is dropped while other partitions wait for room,
  and unpacked again when its turn comes: fairness costs that CPU time.
"""

from __future__ import annotations

import struct

from worker.kafka.batch import LEAST_BYTES, LOG_OVERHEAD, MAGIC, FetchedBatch, Reader, open_batch
from worker.kafka.budget import NoRoom
from worker.kafka.reading import Reading, UnreadableError, current_reading, place
from worker.kafka.record_parser import HEADER


class Batches:
    """The batches of one partition's fetch response, one after the other (aiokafka's MemoryRecords)."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._position = 0  # of the batch that comes next
        self._begin = 0  # of the one before it
        self._reading = current_reading()
        self._owner: Reader | None = None
        self._next: FetchedBatch | None = None
        self._current: FetchedBatch | None = None
        self.no_room: NoRoom | None = None

    def size_in_bytes(self) -> int:
        """Return the size of the response."""
        return len(self._data)

    @property
    def reading(self) -> Reading:
        """How its consumer reads."""
        return self._reading

    def belong_to(self, owner: Reader) -> None:
        """Set the reader, which knows partition and position. Before this call, `has_next` opens no batch."""
        self._owner = owner

    def has_next(self) -> bool:
        """Whether another batch can be read now. If not, `no_room` is set when only memory is missing."""
        if self._owner is None:
            return self._end() is not None
        self.no_room = None
        if self._next is None:
            if self._owner.missed():
                self.read_slowly()
                return True
            self.let_go()
            try:
                self._next = self._open(self._owner)
            except NoRoom as error:
                self.no_room = error.with_traceback(None)
        return self._next is not None

    def next_batch(self) -> FetchedBatch | None:
        """Return the batch that has_next has found."""
        self._current, self._next = self._next, None
        return self._current

    def let_go(self) -> None:
        """Drop the unpacked content of the last batch."""
        if self._current is not None:
            self._current.close()
            self._current = None

    def close(self) -> None:
        """Drop everything, the response too.

        The reader and its batches refer to each other, and would keep the response until the garbage collector runs,
        which counts objects and not bytes.
        """
        if self._next is not None:
            self._next.close()
        self._next = self._owner = None
        self.let_go()
        self._data, self._position = memoryview(b""), 0

    def make_room(self) -> bool:
        """Drop the batch if it was read to its end, or if another partition waits for room; it is then opened again."""
        budget, batch = self._reading.budget, self._current
        if batch is not None and self._owner is not None and self._owner.next_fetch_offset >= batch.next_offset:
            self.let_go()
            return True
        if batch is None or not batch.held or budget is None or not len(budget.batches):
            return False
        self.let_go()
        self._position = self._begin
        return True

    def at_end(self) -> bool:
        """Whether no batch is left."""
        return self._next is None and self._current is None and self._end() is None

    def read_slowly(self) -> bool:
        """Read the batch on which aiokafka's parser failed again with ours; return False if that was done before."""
        batch = self._current
        if batch is None or batch.slow or batch.is_control_batch:
            return False
        batch.slow = True
        self._next, self._current = batch, None
        return True

    def _end(self) -> int | None:
        """Return where the next batch ends; None if the response does not contain all of it."""
        if len(self._data) - self._position < LOG_OVERHEAD:
            return None
        (length,) = struct.unpack_from(">i", self._data, self._position + 8)
        end = self._position + LOG_OVERHEAD + int(length)
        return end if end <= len(self._data) else None

    def _open(self, owner: Reader) -> FetchedBatch | None:
        """Return the next batch, ready to be iterated. Raises NoRoom, and then changes nothing."""
        end = self._end()
        if end is None:
            return None
        size = end - self._position
        if size < LEAST_BYTES or (self._data[self._position + MAGIC] >= 2 and size < HEADER.size):
            if self._reading.fetch_again(owner.tp, self._position):
                return None
            raise UnreadableError(f"{place(owner.tp, owner.next_fetch_offset)}: the batch there has no whole header")
        batch = open_batch(self._reading, owner, self._data[self._position : end], self._data[end:])
        if batch is not None:
            self._begin, self._position = self._position, end
        return batch

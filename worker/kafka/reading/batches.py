"""One record batch out of a fetch response: checked, unpacked within its bounds, ready to be iterated."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final, Protocol

from aiokafka import TopicPartition

from worker.core.trace import Reason
from worker.kafka.aiokafka_private import LegacyBatch, RecordBatch
from worker.kafka.reading.budget import NoRoom
from worker.kafka.reading.faults import Reading, UnreadableError, current_reading, place
from worker.kafka.reading.record_parser import HEADER, MAX_HEADERS, Head, Parsed, count_headers, parse, varint
from worker.kafka.reading.unpack import NAMES, CorruptError, TooLargeError, unpack

LOG_OVERHEAD: Final = 12
"""Bytes of a batch before those that its length counts: its offset and the length."""

MAGIC: Final = 16
"""Offset of the byte with the version of the batch's format."""

LEAST_BYTES: Final = 26
"""The smallest batch: a message of magic 0 without key and value."""

WALKED_BYTES: Final = 1 << 20
"""A record can have (about) more headers than allowed only in a larger batch: there they are counted before parsing."""

_CODEC, _CONTROL = 0x07, 0x20
_ABORT: Final = b"\0\0\0\0"


class Reader(Protocol):
    """Reads the batches of one partition (fetch_results.PartitionReader)."""

    tp: TopicPartition
    next_fetch_offset: int

    def expect(self, batch: FetchedBatch) -> None:
        """Prepare for the offsets of the batch."""
        ...

    def missed(self) -> bool:
        """Whether the last batch had other offsets than its header says; the position is reset then."""
        ...


class FetchedBatch:
    """One batch, with the attributes and methods that aiokafka's PartitionRecords uses."""

    __slots__ = (
        "base_offset", "data", "head", "held", "inner", "is_control_batch", "is_transactional", "next_offset",
        "owner", "producer_id", "reading", "records", "slow",
    )  # fmt: skip

    def __init__(self, owner: Reader, head: Head, inner: Any, data: memoryview, reading: Reading) -> None:
        self.owner = owner
        self.reading = reading
        self.held = 0  # bytes of the memory budget
        self.head = head
        self.inner = inner
        self.data = data
        self.records: list[Any] | None = None
        self.slow = False
        self.base_offset = head.base_offset
        self.next_offset = head.last_offset + 1
        self.producer_id = inner.producer_id
        self.is_transactional = inner.is_transactional
        self.is_control_batch = inner.is_control_batch

    def replace(self, reason: Reason, message: str) -> None:
        """Replace the batch, or its rest from the position on, by one record with a fault."""
        first = max(self.base_offset, self.owner.next_fetch_offset)
        self.records = [self.head.stand_in(reason, message, first, self.next_offset - 1)]
        self.slow = True
        self.data = memoryview(b"")

    def close(self) -> None:
        """Drop the bytes, and give them back to the memory budget."""
        self.inner = self.records = None
        self.data = memoryview(b"")
        held, self.held = self.held, 0
        if held and self.reading.budget is not None:
            self.reading.budget.batches.give_back(held)

    def validate_crc(self) -> bool:
        """Return True: `open_batch` has replaced a batch with a wrong CRC."""
        return True

    def __next__(self) -> Any:
        """Return a control batch's record. A broken one counts as an abort: in any case it ends a transaction."""
        try:
            record = next(self.inner)
            if len(record.key) >= len(_ABORT):
                return record
        except Exception:
            record = self.head.stand_in(Reason.UNREADABLE, "a control record is broken", self.base_offset)
        return Parsed(record.offset, record.timestamp, record.timestamp_type, _ABORT, record.value, [])

    def __iter__(self) -> Iterator[Any]:
        self.owner.expect(self)
        if self.records is not None:
            return iter(self.records)
        if self.slow:
            if self.head.magic < 2:
                return iter(self.inner)
            return parse(self.head, self.data, self.owner.next_fetch_offset)
        if len(self.data) > WALKED_BYTES:
            return self._walk()
        return iter(self.inner)

    def _walk(self) -> Iterator[Any]:
        """Yield the records, after counting the headers of each. Raises ValueError for too many."""
        data, position = self.data, HEADER.size
        inner = iter(self.inner)
        for _ in range(self.head.records):
            length, start = varint(data, position)
            if length > WALKED_BYTES and count_headers(data, start, start + length) > MAX_HEADERS:
                raise ValueError("too many headers")
            yield next(inner)
            position = start + length
        yield from inner  # it checks that no bytes are left


def open_batch(reading: Reading, owner: Reader, data: memoryview, rest: memoryview) -> FetchedBatch | None:
    """Return a batch, ready to be iterated; None: it is damaged and must be fetched again.

    `rest`: the bytes after it in the response. Raises NoRoom, and then changes nothing.
    """
    return _of_magic_2(reading, owner, data, rest) if data[MAGIC] >= 2 else _legacy(reading, owner, data)


def _of_magic_2(reading: Reading, owner: Reader, data: memoryview, rest: memoryview) -> FetchedBatch | None:
    inner = RecordBatch(data)
    head = Head._make(HEADER.unpack_from(data))
    batch = FetchedBatch(owner, head, inner, data, reading)
    batch.slow = head.records > head.last_delta + 1  # more records than offsets; a broker should have refused it
    if not inner.validate_crc():
        if reading.fetch_again(owner.tp, head.base_offset):
            return None
        if len(rest) >= 8:  # its header may be damaged: use the next batch's
            (following,) = struct.unpack_from(">q", rest)
        else:
            following = head.last_offset + 1
        batch.next_offset = max(owner.next_fetch_offset + 1, following)
        batch.replace(Reason.UNREADABLE, "the batch's checksum (CRC) is wrong: it is damaged on the broker's disk")
    elif head.attributes & _CODEC and not head.attributes & _CONTROL and len(data) > HEADER.size:
        _unpack(batch, head.attributes & _CODEC)  # a compacted batch may be empty
    return batch


def _unpack(batch: FetchedBatch, codec: int) -> None:
    """Replace a batch's content by its unpacked bytes, or by a fault. Raises NoRoom."""
    limit = batch.reading.max_batch_bytes
    size = len(batch.data)
    try:
        unpacked = _unpacked(batch, codec, limit)
    except TooLargeError:
        batch.replace(
            Reason.BATCH_TOO_LARGE,
            f"the batch of {size} bytes ({NAMES[codec]}) unpacks to more than {limit} bytes (KP_MAX_BATCH_BYTES)",
        )
    except CorruptError as error:
        batch.replace(Reason.UNREADABLE, f"the batch cannot be unpacked: {error}")
    else:
        batch.data = unpacked
        batch.inner = RecordBatch(unpacked)


def _unpacked(batch: FetchedBatch, codec: int, limit: int) -> memoryview:
    """Return the unpacked batch. Raises TooLargeError beyond the limit, NoRoom beyond the memory available now."""
    head = bytearray(batch.data[: HEADER.size])
    head[22] &= ~_CODEC
    payload = batch.data[HEADER.size :]
    budget, tp = batch.reading.budget, batch.owner.tp
    if budget is None:
        return unpack(payload, codec, limit, bytes(head))
    room = budget.batches.room(tp, len(payload))
    bound = limit if room is None else min(limit, room)
    unpacked: memoryview | None = None
    try:
        unpacked = unpack(payload, codec, bound, bytes(head))
    except TooLargeError:
        if bound == limit:
            raise
    if unpacked is None:  # raised here, because an error's context would keep what was unpacked
        raise budget.batches.refuse(tp, min(limit, 2 * bound))
    batch.held = len(unpacked)
    budget.batches.take(batch.held)
    return unpacked


def _legacy(reading: Reading, owner: Reader, data: memoryview) -> FetchedBatch:
    """Return a batch of magic 0 or 1 (before Kafka 0.11): aiokafka's, after a check of the size that it unpacks to."""
    magic = data[MAGIC]
    inner = LegacyBatch(data, magic)
    first = last = inner.next_offset - 1
    head = Head(first, 0, 0, magic, 0, 0, last - first, -1, -1, -1, -1, -1, 1)
    batch = FetchedBatch(owner, head, inner, data, reading)
    batch.slow = True  # there is no other parser
    codec = data[MAGIC + 1] & _CODEC
    limit = reading.max_batch_bytes
    try:
        if not inner.validate_crc():
            batch.replace(Reason.UNREADABLE, "the message's checksum (CRC) is wrong")
        elif codec:
            at = MAGIC + (10 if magic else 2)
            (key,) = struct.unpack_from(">i", data, at)
            payload = data[at + 8 + max(0, key) :]
            if not (codec == 3 and magic == 0):  # lz4 frames of magic 0 have a wrong checksum; aiokafka corrects it
                unpack(payload, codec, limit)
            batch.records = list(inner)
    except TooLargeError:
        batch.replace(Reason.BATCH_TOO_LARGE, f"the message set unpacks to more than {limit} bytes")
    except Exception as error:
        batch.replace(Reason.UNREADABLE, f"the message set cannot be read: {type(error).__name__}")
    return batch


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

"""Readers of fetch responses, in place of aiokafka's: bounded in memory, and able to skip unreadable data.

A `Consumer` reads with them. `PartitionReader` reads one partition's fetch response (`PartitionFetch`) and gets batches
from `Batches`: checked, decompressed within their bounds, and parsed. What cannot be read becomes a record with a fault
in its place; without `Reading.tolerant`, an UnreadableError, because `tail` and `report` must not use a substitute.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from worker.core.records import SourceRecord, memory_size
from worker.core.trace import Reason
from worker.kafka import aiokafka_private as private
from worker.kafka.aiokafka_private import FetchResult, PartitionRecords, RecordBatch
from worker.kafka.budget import Budget, NoRoom
from worker.kafka.record_batch import (
    HEADER,
    MAX_HEADERS,
    NAMES,
    CorruptError,
    Head,
    Parsed,
    TooLargeError,
    count_headers,
    decompress,
    parse,
    varint,
)

MAX_BATCH_BYTES: Final = 64 << 20  # the default limit of one batch's unpacked size

FETCH_BYTES: Final = 16 << 20
"""Bytes of one fetch from one partition; the worker's own fetches are smaller (faust_consumer.py)."""

LOG_OVERHEAD: Final = 12  # bytes of a batch before those that its length counts: its offset and the length
MAGIC: Final = 16  # offset of the byte with the version of the batch's format

WALKED_BYTES: Final = 1 << 20
"""A record can have (about) more headers than allowed only in a larger batch: there they are counted before parsing."""

_CODEC, _TRANSACTIONAL, _CONTROL = 0x07, 0x10, 0x20
_ABORT: Final = b"\0\0\0\0"


class UnreadableError(KafkaError):  # type: ignore[misc]
    """A record or batch cannot be read, and its reader does not accept a fault; the message says where and why."""


def place(tp: TopicPartition, offset: int, first: int | None = None) -> str:
    """Return topic, partition and offset, or the range of offsets from `first` on, as text."""
    offsets = f"offset {offset}" if first in (None, offset) else f"offsets {first} to {offset}"
    return f"{tp.topic}/{tp.partition} {offsets}"


@dataclass(eq=False, slots=True)
class Reading:
    """How one consumer reads; used in the consumer's thread only."""

    max_batch_bytes: int = MAX_BATCH_BYTES
    tolerant: bool = False
    fetch_bytes: int = FETCH_BYTES
    budget: Budget | None = None  # None: no bound on all partitions together
    attempts: Counter[tuple[TopicPartition, int]] = field(default_factory=Counter)  # of fetching a damaged batch
    open: dict[TopicPartition, PartitionFetch] = field(default_factory=dict)  # what is fetched, not consumed

    def forget(self) -> None:
        """Drop all records fetched and not consumed yet; they are fetched again if they are still needed."""
        for fetched in list(self.open.values()):
            fetched.drop()
        self.attempts.clear()

    def fetch_again(self, tp: TopicPartition, offset: int) -> bool:
        """Whether to fetch a damaged batch again: after three attempts, the disk damaged it, not the network."""
        self.attempts[tp, offset] += 1
        if self.attempts[tp, offset] < 3:
            return True
        del self.attempts[tp, offset]
        return False


class End(NamedTuple):
    """The end of a partition, as a fetch saw it."""

    stable: int  # the last stable offset: committed records before it can be read
    high: int  # the high watermark; offsets in between wait for the end of a producer's transaction
    read_ms: int  # when, ms since 1970


class Consumer(private.Consumer):
    """aiokafka's consumer with the reader of this module: it gives SourceRecords."""

    def __init__(self, *topics: str, reading: Reading, **arguments: Any) -> None:
        names = {
            "MemoryRecords": partial(Batches, reading),
            "PartitionRecords": PartitionReader,
            "FetchResult": PartitionFetch,
        }
        super().__init__(*topics, names=names, **arguments)
        self.reading = reading

    def end_of(self, tp: TopicPartition) -> End | None:
        """Return where a partition ended by the last answer to a fetch; None: not known."""
        if tp not in self.assignment():
            return None
        stable, high, read_ms = self.last_stable_offset(tp), self.highwater(tp), self.last_poll_timestamp(tp)
        return None if stable is None or stable < 0 else End(stable, high, read_ms)


class FetchedBatch:
    """One batch, with the attributes and methods that aiokafka's PartitionRecords uses."""

    __slots__ = (
        "base_offset", "data", "head", "held", "inner", "is_control_batch", "is_transactional", "next_offset",
        "owner", "producer_id", "reading", "records", "slow",
    )  # fmt: skip

    def __init__(self, owner: PartitionReader, head: Head, inner: Any, data: memoryview, reading: Reading) -> None:
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
        self.producer_id = head.producer_id
        self.is_transactional = head.attributes & _TRANSACTIONAL
        self.is_control_batch = head.attributes & _CONTROL

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
        return Parsed(record.offset, record.timestamp, _ABORT, record.value, [])

    def __iter__(self) -> Iterator[Any]:
        self.owner.expect(self)
        if self.records is not None:
            return iter(self.records)
        if self.slow:
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


def open_batch(reading: Reading, owner: PartitionReader, data: memoryview, rest: memoryview) -> FetchedBatch | None:
    """Return a batch, ready to be iterated; None: it is damaged and must be fetched again.

    `rest`: the bytes after it in the response. Raises NoRoom, and then changes nothing.
    """
    if data[MAGIC] < 2:
        return _of_old_format(reading, owner, data)
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
        _decompress(batch, head.attributes & _CODEC)  # a compacted batch may be empty
    return batch


def _decompress(batch: FetchedBatch, codec: int) -> None:
    """Replace a batch's content by its unpacked bytes, or by a fault. Raises NoRoom."""
    limit = batch.reading.max_batch_bytes
    size = len(batch.data)
    try:
        unpacked = _decompressed(batch, codec, limit)
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


def _decompressed(batch: FetchedBatch, codec: int, limit: int) -> memoryview:
    """Return the unpacked batch. Raises TooLargeError beyond the limit, NoRoom beyond the memory available now."""
    head = bytearray(batch.data[: HEADER.size])
    head[22] &= ~_CODEC
    payload = batch.data[HEADER.size :]
    budget, tp = batch.reading.budget, batch.owner.tp
    if budget is None:
        return decompress(payload, codec, limit, bytes(head))
    room = budget.batches.room(tp, len(payload))
    bound = limit if room is None else min(limit, room)
    unpacked: memoryview | None = None
    try:
        unpacked = decompress(payload, codec, bound, bytes(head))
    except TooLargeError:
        if bound == limit:
            raise
    if unpacked is None:  # raised here, because an error's context would keep what was unpacked
        raise budget.batches.no_room(tp, min(limit, 2 * bound))
    batch.held = len(unpacked)
    budget.batches.take(batch.held)
    return unpacked


def _of_old_format(reading: Reading, owner: PartitionReader, data: memoryview) -> FetchedBatch:
    """Return the one record that stands for a message, or a compressed set of them, of format 0 or 1 (magic)."""
    (last,) = struct.unpack_from(">q", data)  # of a set, the offset of its last message
    head = Head(last, 0, 0, data[MAGIC], 0, 0, 0, -1, -1, -1, -1, -1, 1)
    batch = FetchedBatch(owner, head, None, data, reading)
    batch.base_offset = min(last, owner.next_fetch_offset)
    batch.replace(
        Reason.UNREADABLE, f"message format {data[MAGIC]}, of producers before Kafka 0.11, is not read any more"
    )
    return batch


class Batches:
    """The batches of one partition's fetch response, one after the other (aiokafka's MemoryRecords)."""

    def __init__(self, reading: Reading, data: bytes) -> None:
        self._data = memoryview(data)
        self._position = 0  # of the batch that comes next
        self._begin = 0  # of the one before it
        self.reading = reading  # how its consumer reads
        self._owner: PartitionReader | None = None
        self._next: FetchedBatch | None = None
        self._current: FetchedBatch | None = None
        self.no_room: NoRoom | None = None

    def size_in_bytes(self) -> int:
        """Return the size of the response."""
        return len(self._data)

    def belong_to(self, owner: PartitionReader) -> None:
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
        """Drop everything, also the response: in a cycle with its reader, it would wait for the collector."""
        if self._next is not None:
            self._next.close()
        self._next = self._owner = None
        self.let_go()
        self._data, self._position = memoryview(b""), 0

    def make_room(self) -> bool:
        """Drop the batch if it was read to its end, or if another partition waits for room; it is then opened again."""
        budget, batch = self.reading.budget, self._current
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

    def _open(self, owner: PartitionReader) -> FetchedBatch | None:
        """Return the next batch, ready to be iterated. Raises NoRoom, and then changes nothing."""
        end = self._end()
        if end is None:
            return None
        size = end - self._position
        if size <= MAGIC or (self._data[self._position + MAGIC] >= 2 and size < HEADER.size):
            if self.reading.fetch_again(owner.tp, self._position):
                return None
            raise UnreadableError(
                f"{place(owner.tp, owner.next_fetch_offset)}: the header of the batch there is incomplete"
            )
        batch = open_batch(self.reading, owner, self._data[self._position : end], self._data[end:])
        if batch is not None:
            self._begin, self._position = self._position, end
        return batch


class PartitionReader(PartitionRecords):
    """Reads the batches of one partition, and continues where aiokafka's reader would stop."""

    def __init__(self, tp: TopicPartition, records: Batches, *rest: Any) -> None:
        super().__init__(tp, records, *rest)
        self.tp = tp
        self.batches = records
        self._expected = self._end = 0
        self._complete = False
        self._tolerant = records.reading.tolerant
        records.belong_to(self)

    def recovers(self, error: Exception) -> bool:
        """Whether the batch on which aiokafka's parser failed can be read again, by ours."""
        return not isinstance(error, UnreadableError) and self.batches.read_slowly()

    def expect(self, batch: FetchedBatch) -> None:
        """Prepare for the batch's offsets: a wrong one would let aiokafka skip records."""
        self._end = batch.next_offset
        self._complete = not batch.slow and batch.head.records == batch.head.last_delta + 1
        self._expected = max(batch.base_offset, self.next_fetch_offset)

    def missed(self) -> bool:
        """Whether the batch that was read had other offsets than its header says; the position is reset then."""
        missed = self._complete and self._expected < self._end
        self._complete = False
        if missed:
            self.next_fetch_offset = self._expected
        return missed

    def consumer_record(self, tp: TopicPartition, record: Any) -> SourceRecord:
        """Return the consumer's record for a parsed one. Raises ValueError, UnreadableError."""
        offset = record.offset
        if offset != self._expected and (self._complete or not self._expected < offset < self._end):
            self._complete = False
            raise ValueError("a record's offset does not follow the one before")
        self._expected = offset + 1
        fault = record.fault if type(record) is Parsed else None  # aiokafka's parser finds none: it fails
        if fault is not None and not self._tolerant:
            raise UnreadableError(f"{place(tp, offset, fault.first_offset)}: {fault.reason}: {fault.message}")
        key, value, headers = record.key, record.value, tuple(record.headers)
        size = memory_size(key, value, headers)
        return SourceRecord(tp.topic, tp.partition, offset, record.timestamp, key, value, headers, size, fault)

    def restart(self) -> None:
        """Continue at the position, with the batch that comes next."""
        self._complete = False
        self.begin_again()

    def close(self) -> None:
        """Drop everything."""
        self.end()
        self.batches.close()


class PartitionFetch(FetchResult):
    """The records fetched from one partition, returned in portions that are also bounded in bytes."""

    def __init__(self, tp: TopicPartition, *, partition_records: PartitionReader, **rest: Any) -> None:
        super().__init__(tp, partition_records=partition_records, **rest)
        self._reading = partition_records.batches.reading
        if (former := self._reading.open.get(tp)) is not None:
            former.drop()
        self._reading.open[tp] = self

    def drop(self) -> None:
        """Drop the rest; aiokafka fetches from the position on."""
        records, self.records = self.records, None
        if records is not None:
            records.close()
        if self._reading.budget is not None:
            self._reading.budget.batches.leave(self.tp)
        if self._reading.open.get(self.tp) is self:
            del self._reading.open[self.tp]

    def check_assignment(self, tp: TopicPartition) -> bool:
        """Whether the fetched records are still needed; otherwise drop them."""
        records = self.records
        wanted = records is not None and super().check_assignment(tp)
        if not wanted:
            self.records = records
            self.drop()
        return wanted

    def getone(self) -> SourceRecord | None:
        """Return the next record; None at the end."""
        records = self.getall(1)
        return records[0] if records else None

    def getall(self, max_records: int | None = None) -> list[SourceRecord]:
        """Return the next records, up to the number or about the bytes allowed. Raises NoRoom."""
        reading, records = self._reading, self.records
        if records is None or not self.check_assignment(self.tp):
            return []
        if reading.budget is not None:
            reading.budget.records.room(self.tp)
        taken: list[SourceRecord] = []
        size = 0
        for record in records:
            taken.append(record)
            size += record.size
            if size >= reading.fetch_bytes or (max_records is not None and len(taken) >= max_records):
                self.update_position()
                if records.batches.make_room():
                    if records.batches.at_end():
                        self.drop()  # now: the response is released and the next one fetched
                    else:
                        records.restart()
                return taken
        self.update_position()
        no_room = records.batches.no_room
        if no_room is None:
            self.drop()
        elif not taken:
            raise NoRoom(no_room.share, no_room.key)
        return taken

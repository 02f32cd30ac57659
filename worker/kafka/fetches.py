"""Readers of fetch responses, in place of aiokafka's: bounded in memory, and able to skip unreadable data.

A `Consumer` reads with them. A `PartitionReader` reads a `Response`, one batch after the other: it is checked, unpacked
within its bounds, and parsed by aiokafka's parser, or, where that fails, by ours (record_batch.py). What cannot be read
becomes a record with a fault in its place; without `Reading.tolerant`, an UnreadableError, because `tail` and `report`
must not use a substitute. A `PartitionFetch` hands the records to the consumer, in portions.
"""

from __future__ import annotations

import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from worker.core.records import SourceRecord, memory_size
from worker.core.trace import Reason
from worker.kafka import aiokafka_private as private
from worker.kafka.aiokafka_private import RecordBatch
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

_CODEC, _TRANSACTIONAL, _CONTROL = 0x07, 0x10, 0x20  # bits of a batch's attributes


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
    """aiokafka's consumer with the reader of this module: it gives SourceRecords, of committed transactions only."""

    def __init__(self, *topics: str, reading: Reading, **arguments: Any) -> None:
        names = {
            "MemoryRecords": Response,
            "PartitionRecords": partial(PartitionReader, reading),
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


class Response:
    """One partition's part of a fetch response (aiokafka's MemoryRecords)."""

    def __init__(self, data: bytes) -> None:
        self.data = memoryview(data)

    def has_next(self) -> bool:
        """Whether it contains a whole batch."""
        return _batch_end(self.data, 0) is not None

    def size_in_bytes(self) -> int:
        """Return its size."""
        return len(self.data)


def _batch_end(data: memoryview, start: int) -> int | None:
    """Return where the batch ends that begins at `start`; None if the data does not contain all of it."""
    if len(data) - start < LOG_OVERHEAD:
        return None
    (length,) = struct.unpack_from(">i", data, start + 8)
    end = start + LOG_OVERHEAD + int(length)
    return end if end <= len(data) else None


class _Batch:
    """A batch that is being read. `slow`: by our parser, which reads what aiokafka's cannot."""

    __slots__ = ("data", "head", "held", "next_offset", "records", "slow", "start")

    def __init__(self, head: Head, data: memoryview, start: int) -> None:
        self.head = head
        self.data = data
        self.start = start  # in the response
        self.next_offset = head.last_offset + 1
        self.slow = head.records > head.last_delta + 1  # more records than offsets; a broker should have refused it
        self.records: Iterator[Any] | None = None  # those that were not read yet; None: begin at the position
        self.held = 0  # bytes of the memory budget

    @property
    def complete(self) -> bool:
        """Whether it should have a record for each offset."""
        return not self.slow and self.head.records == self.head.last_delta + 1

    def iterate(self, position: int) -> Iterator[Any]:
        """Return its records, those that begin at `position` or later if it is slow."""
        if self.slow:
            return parse(self.head, self.data, position)
        if len(self.data) > WALKED_BYTES:
            return self._walk()
        return chain(RecordBatch(self.data))  # its own iterator could not be continued

    def _walk(self) -> Iterator[Any]:
        """Yield the records, after counting the headers of each. Raises ValueError for too many."""
        data, position = self.data, HEADER.size
        records = iter(RecordBatch(data))
        for _ in range(self.head.records):
            length, start = varint(data, position)
            if length > WALKED_BYTES and count_headers(data, start, start + length) > MAX_HEADERS:
                raise ValueError("too many headers")
            yield next(records)
            position = start + length
        yield from records  # it checks that no bytes are left

    def replace(self, position: int, reason: Reason, message: str) -> None:
        """Replace the batch, or its rest from `position` on, by one record with a fault."""
        first = min(max(self.head.base_offset, position), self.next_offset - 1)
        self.records = iter([self.head.stand_in(reason, message, first, self.next_offset - 1)])
        self.slow = True
        self.data = memoryview(b"")


class PartitionReader:
    """Reads one partition's response, from a position on (aiokafka's PartitionRecords)."""

    def __init__(
        self, reading: Reading, tp: TopicPartition, response: Response, aborted: Sequence[tuple[int, int]] | None,
        position: int, *_: Any,
    ) -> None:  # fmt: skip
        self.reading = reading
        self.tp = tp
        self.next_fetch_offset = position
        self.no_room = False  # whether the last `read` ended because a batch had no room in the memory budget
        self._data = response.data
        self._start = 0  # of the batch that comes next
        self._batch: _Batch | None = None
        # (producer id, first offset), the first transaction last: a response may have thousands.
        self._aborted = sorted(aborted or (), key=lambda transaction: transaction[1], reverse=True)
        self._aborted_producers: set[int] = set()

    @property
    def ended(self) -> bool:
        """Whether no batch is left."""
        return self._batch is None and _batch_end(self._data, self._start) is None

    def close(self) -> None:
        """Drop everything."""
        self._close_batch()
        self._data, self._start = memoryview(b""), 0

    def read(self, most: int) -> list[SourceRecord]:
        """Return the next records: at most so many, and up to about `Reading.fetch_bytes`. Raises UnreadableError."""
        records: list[SourceRecord] = []
        topic, partition = self.tp
        left = self.reading.fetch_bytes
        self.no_room = False
        while True:
            try:
                batch = self._batch = self._batch or self._open()
            except NoRoom:
                self.no_room = True
                return records
            if batch is None:
                return records
            complete = batch.complete
            try:
                if batch.records is None:
                    batch.records = batch.iterate(self.next_fetch_offset)
                for record in batch.records:
                    offset = record.offset
                    if offset < self.next_fetch_offset:
                        continue
                    if offset >= batch.next_offset or (complete and offset != self.next_fetch_offset):
                        raise ValueError("a record's offset does not follow the one before")
                    fault = record.fault if type(record) is Parsed else None  # aiokafka's parser finds none: it fails
                    if fault is not None and not self.reading.tolerant:
                        where = place(self.tp, offset, fault.first_offset)
                        raise UnreadableError(f"{where}: {fault.reason}: {fault.message}")
                    key, value, headers = record.key, record.value, tuple(record.headers)
                    size = memory_size(key, value, headers)
                    records.append(
                        SourceRecord(topic, partition, offset, record.timestamp, key, value, headers, size, fault)
                    )
                    self.next_fetch_offset = offset + 1
                    left -= size
                    if left <= 0 or len(records) >= most:
                        self._make_room(batch)
                        return records
                if complete and self.next_fetch_offset < batch.next_offset:
                    raise ValueError("its last records are missing")
            except UnreadableError:
                raise
            except Exception:
                if batch.slow:
                    raise
                batch.slow, batch.records = True, None
            else:
                self.next_fetch_offset = batch.next_offset
                self._close_batch()

    def _open(self) -> _Batch | None:
        """Return the next batch that has records to read; None at the end. Raises NoRoom, and then changes nothing."""
        while (end := _batch_end(self._data, self._start)) is not None:
            batch = self._check(self._data[self._start : end], following=self._data[end : end + 8])
            if batch is None:
                self.close()
                return None
            if self._is_aborted(batch) or batch.head.attributes & _CONTROL:
                self.next_fetch_offset = batch.next_offset
                self._start = end
                continue
            if batch.records is None:
                self._unpack(batch)
            if batch.complete:
                self.next_fetch_offset = max(self.next_fetch_offset, batch.head.base_offset)
            self._start = end
            return batch
        return None

    def _check(self, data: memoryview, following: memoryview) -> _Batch | None:
        """Return a batch, or what replaces a damaged one; None: it must be fetched again.

        `following`: the base offset of the next batch. Raises UnreadableError for an incomplete header.
        """
        if len(data) <= MAGIC or (data[MAGIC] >= 2 and len(data) < HEADER.size):
            if self.reading.fetch_again(self.tp, self._start):
                return None
            where = place(self.tp, self.next_fetch_offset)
            raise UnreadableError(f"{where}: the header of the batch there is incomplete")
        if data[MAGIC] < 2:  # a message, or a compressed set of them with the offset of the last
            (last,) = struct.unpack_from(">q", data)
            first = min(last, self.next_fetch_offset)
            head = Head(first, 0, 0, data[MAGIC], 0, 0, last - first, -1, -1, -1, -1, -1, 1)
            batch = _Batch(head, data, self._start)
            message = f"message format {data[MAGIC]}, of producers before Kafka 0.11, is not read any more"
            batch.replace(self.next_fetch_offset, Reason.UNREADABLE, message)
            return batch
        head = Head._make(HEADER.unpack_from(data))
        batch = _Batch(head, data, self._start)
        if not RecordBatch(data).validate_crc():
            if self.reading.fetch_again(self.tp, head.base_offset):
                return None
            if len(following) == 8:  # its header may be damaged: use the next batch's
                (batch.next_offset,) = struct.unpack(">q", following)
            batch.next_offset = max(self.next_fetch_offset + 1, batch.next_offset)
            message = "the batch's checksum (CRC) is wrong: it is damaged on the broker's disk"
            batch.replace(self.next_fetch_offset, Reason.UNREADABLE, message)
        return batch

    def _is_aborted(self, batch: _Batch) -> bool:
        """Whether a batch belongs to an aborted transaction; the transaction's marker ends it."""
        head = batch.head
        while self._aborted and self._aborted[-1][1] <= head.base_offset:
            self._aborted_producers.add(self._aborted.pop()[0])
        if head.attributes & _CONTROL and _marks_abort(batch.data):
            self._aborted_producers.discard(head.producer_id)
        return bool(head.attributes & _TRANSACTIONAL) and head.producer_id in self._aborted_producers

    def _unpack(self, batch: _Batch) -> None:
        """Decompress a batch, or replace it by a fault. Raises NoRoom beyond the memory available now."""
        codec, size, limit = batch.head.attributes & _CODEC, len(batch.data), self.reading.max_batch_bytes
        if not codec or size <= HEADER.size:  # a compacted batch may be empty
            return
        head = bytearray(batch.data[: HEADER.size])
        head[22] &= ~_CODEC
        payload = batch.data[HEADER.size :]
        share = None if self.reading.budget is None else self.reading.budget.batches
        room = None if share is None else share.room(self.tp, len(payload))
        bound = limit if room is None else min(limit, room)
        unpacked = memoryview(b"")
        try:
            unpacked = decompress(payload, codec, bound, bytes(head))
        except CorruptError as error:
            message = f"the batch cannot be unpacked: {error}"
            batch.replace(self.next_fetch_offset, Reason.UNREADABLE, message)
            return
        except TooLargeError:
            if bound == limit:
                message = (
                    f"the batch of {size} bytes ({NAMES[codec]}) unpacks to more than {limit} bytes "
                    "(KP_MAX_BATCH_BYTES)"
                )
                batch.replace(self.next_fetch_offset, Reason.BATCH_TOO_LARGE, message)
                return
        if share is not None:
            if not unpacked:  # raised here, because an error's context would keep what was unpacked
                raise share.no_room(self.tp, min(limit, 2 * bound))
            batch.held = len(unpacked)
            share.take(batch.held)
        batch.data = unpacked

    def _make_room(self, batch: _Batch) -> None:
        """Close a batch that was read to its end; also another one, to open it again, if a partition waits for room."""
        budget = self.reading.budget
        if self.next_fetch_offset >= batch.next_offset:
            self._close_batch()
        elif batch.held and budget is not None and len(budget.batches):
            self._start = batch.start
            self._close_batch()

    def _close_batch(self) -> None:
        """Drop the batch's content, and give its bytes back to the memory budget."""
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.records, batch.data = None, memoryview(b"")
            if batch.held and self.reading.budget is not None:
                self.reading.budget.batches.give_back(batch.held)


def _marks_abort(data: memoryview) -> bool:
    """Whether a control batch ends a transaction by aborting it. A broken one does: in any case it ends it."""
    try:
        version, kind = struct.unpack_from(">hh", next(iter(RecordBatch(data))).key)
    except Exception:
        return True
    return (version, kind) == (0, 0)


class PartitionFetch:
    """The records fetched from one partition, returned in portions (aiokafka's FetchResult)."""

    def __init__(
        self, tp: TopicPartition, *, assignment: Any, partition_records: PartitionReader, backoff: float
    ) -> None:
        self._tp = tp
        self._reader: PartitionReader | None = partition_records
        self._reading = partition_records.reading
        self._assignment = assignment
        self._keep_until = time.monotonic() + backoff
        if (former := self._reading.open.get(tp)) is not None:
            former.drop()
        self._reading.open[tp] = self

    def calculate_backoff(self) -> float:
        """Return how long the broker is not asked for more while this is not consumed (s)."""
        return max(0.0, self._keep_until - time.monotonic())

    def has_more(self) -> bool:
        """Whether records may be left. If not, aiokafka fetches from the position on."""
        return self._reader is not None

    def drop(self) -> None:
        """Drop the rest."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
        if self._reading.budget is not None:
            self._reading.budget.batches.leave(self._tp)
        if self._reading.open.get(self._tp) is self:
            del self._reading.open[self._tp]

    def getone(self) -> SourceRecord | None:
        """Return the next record; None at the end."""
        records = self.getall(1)
        return records[0] if records else None

    def getall(self, max_records: int | None = None) -> list[SourceRecord]:
        """Return the next records, up to the number or about the bytes allowed. Raises NoRoom, UnreadableError."""
        reader, budget = self._reader, self._reading.budget
        if reader is None:
            return []
        state = self._assignment.state_value(self._tp) if self._assignment.active else None
        if state is None or state.paused or state.position != reader.next_fetch_offset:  # not needed any more
            self.drop()
            return []
        if budget is not None:
            budget.records.room(self._tp)
        records = reader.read(sys.maxsize if max_records is None else max_records)
        state.consumed_to(reader.next_fetch_offset)
        if reader.ended:
            self.drop()  # now: the response is released and the next one fetched
        elif reader.no_room and not records and budget is not None:
            raise NoRoom(budget.batches, self._tp)
        return records

"""Reading record batches out of a fetch response: bounded in memory, and past whatever cannot be read.

Lives here: what aiokafka's consumers use in place of its own `MemoryRecords`, `PartitionRecords` and `FetchResult`, and
the one module that leans on those names (`use` puts them in; test_batches.py fails when one changes). Must not
live here: decompression (unpack.py), counting of memory (budget.py), what becomes of a record that cannot be read.

aiokafka keeps what it does well: transactions, and its parser in C for each record. What differs:
- a compressed batch is unpacked here, into bounded memory, and its records are parsed out of that;
- when the parser fails, the batch is parsed again by `parse`, which goes on behind what is broken. In the place of a
  record that cannot be read comes one with a `Fault`, in `ConsumerRecord.checksum` (which is always None otherwise);
- a fetch ends with the record that makes it larger than `Reading.fetch_bytes`, as well as by number;
- a batch is only unpacked when the memory budget has room for it. It is dropped again while others wait for room, and
  unpacked once more when its turn comes: the CPU's time for that is what fairness costs.

Who does not say that it understands faults (`Reading.tolerant`) gets an UnreadableError instead: the worker's restore,
`tail` and `report` must not take a substitute for a record.
"""

from __future__ import annotations

import contextlib
import struct
from collections import Counter
from collections.abc import Generator, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from aiokafka import TopicPartition
from aiokafka.consumer import fetcher
from aiokafka.errors import KafkaError
from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.record.legacy_records import LegacyRecordBatch
from aiokafka.structs import ConsumerRecord

from worker.core.pipeline import Fault
from worker.core.records import RECORD_OVERHEAD, memory_size
from worker.core.trace import Reason
from worker.kafka.budget import Budget, NoRoom
from worker.kafka.unpack import NAMES, CorruptError, TooLargeError, unpack

MAX_BATCH_BYTES: Final = 64 << 20
"""What one batch may unpack to, where the settings say nothing."""

FETCH_BYTES: Final = 16 << 20
"""Bytes of one fetch of one partition; the worker's own fetches are smaller (faust_io.py)."""

MAX_HEADERS: Final = 1 << 20
"""Headers of one record. Two bytes in a batch make a header of some 130 bytes in memory: without a bound, a batch of
64 MiB is 4 GiB."""

WALKED_BYTES: Final = 1 << 20
"""Only in a batch of more bytes can a record have more headers than allowed, about; so only there are they counted
before the record is parsed."""

CRC_ATTEMPTS: Final = 3
"""How often a batch with a wrong CRC is fetched: the network may have damaged it. Then it is damaged on the disk."""

_HEADER: Final = struct.Struct(">qiibIhiqqqhii")
_LOG_OVERHEAD: Final = 12
_MAGIC: Final = 16
_LEAST: Final = 26  # a message of magic 0 without key and value
_CODEC, _LOG_APPEND, _TRANSACTIONAL, _CONTROL = 0x07, 0x08, 0x10, 0x20
_SHOWN: Final = 60
_ABORT: Final = b"\0\0\0\0"


class UnreadableError(KafkaError):  # type: ignore[misc]
    """A record or batch that cannot be read, for a reader that has no place for it; the message says where and why."""


@dataclass(eq=False, slots=True)
class Reading:
    """How one consumer reads. `budget` None: partitions are not bounded together. For the consumer's thread alone."""

    max_batch_bytes: int = MAX_BATCH_BYTES
    tolerant: bool = False
    fetch_bytes: int = FETCH_BYTES
    budget: Budget | None = None
    attempts: Counter[tuple[TopicPartition, int]] = field(default_factory=Counter)
    open: dict[TopicPartition, _Result] = field(default_factory=dict)

    def forget(self) -> None:
        """Drop everything that is fetched and not yet taken; it is fetched again where it is still wanted."""
        for result in list(self.open.values()):
            result.drop()
        self.attempts.clear()


_default = Reading()
_reading: ContextVar[Reading | None] = ContextVar("reading", default=None)


def use(max_batch_bytes: int = MAX_BATCH_BYTES) -> None:
    """Let every consumer of this process read this way; again with another bound, it holds for new fetches."""
    _default.max_batch_bytes = max_batch_bytes
    fetcher.MemoryRecords = Batches
    fetcher.PartitionRecords = _Records
    fetcher.FetchResult = _Result


def read_as(reading: Reading) -> None:
    """Let the consumers that this task starts from now on read so (aiokafka's fetching task inherits it)."""
    _reading.set(reading)


@contextlib.contextmanager
def tolerant(max_batch_bytes: int = MAX_BATCH_BYTES) -> Iterator[None]:
    """Let the consumers that are started within get faults in place of records, in `ConsumerRecord.checksum`."""
    token = _reading.set(Reading(max_batch_bytes, tolerant=True))
    try:
        yield
    finally:
        _reading.reset(token)


class Parsed(NamedTuple):
    """A record as aiokafka's own; with a fault, what is left of one (offset: the last that it stands for)."""

    offset: int
    timestamp: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    checksum: Fault | None = None


class Head(NamedTuple):
    """A batch's header (magic 2)."""

    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_delta: int
    first_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    records: int

    @property
    def last_offset(self) -> int:
        """Return the offset of the last record, also where compaction has removed that."""
        return self.base_offset + self.last_delta

    def stand_in(self, reason: Reason, message: str, first: int, last: int | None = None) -> Parsed:
        """Return the one record that stands for those from `first` to `last` (None: the batch's last offset)."""
        kind = 1 if self.attributes & _LOG_APPEND else 0
        last = self.last_offset if last is None else last
        return Parsed(last, self.max_timestamp, kind, None, None, [], Fault(reason, message, first))


class Batches:
    """The batches of one partition's fetch response, one after the other (aiokafka's MemoryRecords)."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._position = 0  # of the batch that comes next
        self._begin = 0  # of the one before it
        self._reading = _reading.get() or _default
        self._owner: _Records | None = None
        self._next: _Batch | None = None
        self._current: _Batch | None = None
        self._held = 0
        self.no_room: NoRoom | None = None

    def size_in_bytes(self) -> int:
        """Return the size of the response."""
        return len(self._data)

    @property
    def reading(self) -> Reading:
        """How its consumer reads."""
        return self._reading

    def belong_to(self, owner: _Records) -> None:
        """Tell for which partition this is, and who knows the position. Before, `has_next` only looks."""
        self._owner = owner

    def has_next(self) -> bool:
        """Whether another batch can be read now. Without room for it `no_room` is set; without that, it is the end."""
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

    def next_batch(self) -> _Batch | None:
        """Return the batch that has_next has found."""
        self._current, self._next = self._next, None
        return self._current

    def let_go(self) -> None:
        """Drop what the last batch was unpacked to."""
        if self._current is not None:
            self._current.close()
            self._current = None
        held, self._held = self._held, 0
        if held and self._reading.budget is not None:
            self._reading.budget.batches.give_back(held)

    def close(self) -> None:
        """Drop everything; nothing comes any more.

        The response too: who reads and what is read hold each other, and would keep it until the garbage collector
        comes, which counts objects and not bytes.
        """
        self._next = self._owner = None
        self.let_go()
        self._data, self._position = memoryview(b""), 0

    def make_room(self) -> bool:
        """Drop the batch if it is read to its end, or if another partition waits for its room: then it comes again."""
        budget, batch = self._reading.budget, self._current
        if batch is not None and self._owner is not None and self._owner.next_fetch_offset >= batch.next_offset:
            self.let_go()
            return True
        if not self._held or budget is None or not len(budget.batches):
            return False
        self.let_go()
        self._position = self._begin
        return True

    def at_end(self) -> bool:
        """Whether no batch is left."""
        return self._next is None and self._current is None and self._end() is None

    def read_slowly(self) -> bool:
        """Put the batch that the parser failed on in place again, for `parse`; False where that has been done."""
        batch = self._current
        if batch is None or batch.slow or batch.is_control_batch:
            return False
        batch.slow = True
        self._next, self._current = batch, None
        return True

    def _end(self) -> int | None:
        """Return where the next batch ends; None where the response does not hold all of it."""
        if len(self._data) - self._position < _LOG_OVERHEAD:
            return None
        (length,) = struct.unpack_from(">i", self._data, self._position + 8)
        end = self._position + _LOG_OVERHEAD + int(length)
        return end if end <= len(self._data) else None

    def _open(self, owner: _Records) -> _Batch | None:
        """Return the next batch, ready to be iterated. Raises NoRoom; then nothing has changed."""
        end = self._end()
        if end is None:
            return None
        if end - self._position < _LEAST or (self._data[self._position + _MAGIC] >= 2 and end - self._position < 61):
            if self._again(owner, self._position):
                return None
            raise UnreadableError(f"{_place(owner.tp, owner.next_fetch_offset)}: the batch there has no whole header")
        data = self._data[self._position : end]
        batch = self._of_magic_2(owner, data, end) if data[_MAGIC] >= 2 else self._legacy(owner, data)
        if batch is not None:
            self._begin, self._position = self._position, end
        return batch

    def _of_magic_2(self, owner: _Records, data: memoryview, end: int) -> _Batch | None:
        inner = DefaultRecordBatch(data)
        head = Head._make(_HEADER.unpack_from(data))
        batch = _Batch(owner, head, inner, data)
        batch.slow = head.records > head.last_delta + 1  # more records than offsets; a broker should have refused it
        if not inner.validate_crc():
            if self._again(owner, head.base_offset):
                return None
            if len(self._data) - end >= 8:  # the header may be what is damaged: trust the next batch's
                (following,) = struct.unpack_from(">q", self._data, end)
            else:
                following = head.last_offset + 1
            batch.next_offset = max(owner.next_fetch_offset + 1, following)
            batch.replace(Reason.UNREADABLE, "the batch's checksum (CRC) is wrong: it is damaged on the broker's disk")
            return batch
        codec = head.attributes & _CODEC
        if not codec or len(data) == _HEADER.size or head.attributes & _CONTROL:  # compaction leaves empty batches
            return batch
        limit = self._reading.max_batch_bytes
        try:
            unpacked = self._unpack(owner.tp, data, codec, limit)
        except TooLargeError:
            batch.replace(
                Reason.BATCH_TOO_LARGE,
                f"the batch of {len(data)} bytes ({NAMES[codec]}) unpacks to more than {limit} bytes "
                "(KP_MAX_BATCH_BYTES)",
            )
        except CorruptError as error:
            batch.replace(Reason.UNREADABLE, f"the batch cannot be unpacked: {error}")
        else:
            batch.data = unpacked
            batch.inner = DefaultRecordBatch(unpacked)
        return batch

    def _unpack(self, tp: TopicPartition, data: memoryview, codec: int, limit: int) -> memoryview:
        """Raise TooLargeError for what exceeds the limit, NoRoom for what exceeds the room there is now."""
        head = bytearray(data[: _HEADER.size])
        head[22] &= ~_CODEC
        payload = data[_HEADER.size :]
        budget = self._reading.budget
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
        if unpacked is None:  # raised out here, because an error's context keeps what was unpacked
            raise budget.batches.refuse(tp, min(limit, 2 * bound))
        self._held = len(unpacked)
        budget.batches.take(self._held)
        return unpacked

    def _legacy(self, owner: _Records, data: memoryview) -> _Batch:
        """Return a batch of magic 0 or 1, from before Kafka 0.11: aiokafka's, after a look at what it unpacks to."""
        magic = data[_MAGIC]
        inner = LegacyRecordBatch(data, magic)
        first = last = inner.next_offset - 1
        head = Head(first, 0, 0, magic, 0, 0, last - first, -1, -1, -1, -1, -1, 1)
        batch = _Batch(owner, head, inner, data)
        batch.slow = True  # there is no other parser
        codec = data[_MAGIC + 1] & _CODEC
        limit = self._reading.max_batch_bytes
        try:
            if not inner.validate_crc():
                batch.replace(Reason.UNREADABLE, "the message's checksum (CRC) is wrong")
            elif codec:
                at = _MAGIC + (10 if magic else 2)
                (key,) = struct.unpack_from(">i", data, at)
                payload = data[at + 8 + max(0, key) :]
                if not (codec == 3 and magic == 0):  # its lz4 frames have a wrong checksum; aiokafka mends that
                    unpack(payload, codec, limit)
                batch.records = list(inner)
        except TooLargeError:
            batch.replace(Reason.BATCH_TOO_LARGE, f"the message set unpacks to more than {limit} bytes")
        except Exception as error:
            batch.replace(Reason.UNREADABLE, f"the message set cannot be read: {type(error).__name__}")
        return batch

    def _again(self, owner: _Records, offset: int) -> bool:
        """Whether to fetch again what came damaged."""
        attempts = self._reading.attempts
        attempts[owner.tp, offset] += 1
        if attempts[owner.tp, offset] < CRC_ATTEMPTS:
            return True
        del attempts[owner.tp, offset]
        return False


class _Batch:
    """One batch, as PartitionRecords looks at it."""

    __slots__ = (
        "base_offset", "data", "head", "inner", "is_control_batch", "is_transactional", "next_offset", "owner",
        "producer_id", "records", "slow",
    )  # fmt: skip

    def __init__(self, owner: _Records, head: Head, inner: Any, data: memoryview) -> None:
        self.owner = owner
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
        """Let one record with a fault stand for the whole batch, or for what is left of it from the position on."""
        first = max(self.base_offset, self.owner.next_fetch_offset)
        self.records = [self.head.stand_in(reason, message, first, self.next_offset - 1)]
        self.slow = True
        self.data = memoryview(b"")

    def close(self) -> None:
        """Drop the bytes."""
        self.inner = self.records = None
        self.data = memoryview(b"")

    def validate_crc(self) -> bool:
        """Say that it was validated: a batch with a wrong one is none."""
        return True

    def __next__(self) -> Any:
        """Return a control batch's record. A broken one is taken for an abort: it ends a transaction, in any case."""
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
        """Yield the records, each after a look at how many headers it has. Raises ValueError for too many."""
        data, position = self.data, _HEADER.size
        inner = iter(self.inner)
        for _ in range(self.head.records):
            length, start = varint(data, position)
            if length > WALKED_BYTES and _count_headers(data, start, start + length) > MAX_HEADERS:
                raise ValueError("too many headers")
            yield next(inner)
            position = start + length
        yield from inner  # it checks that nothing is left


def varint(data: memoryview, position: int) -> tuple[int, int]:
    """Return a zigzag number and the position behind it. Raises IndexError at the end, ValueError beyond 64 bits."""
    shift = result = 0
    while True:
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (result >> 1) ^ -(result & 1), position
        shift += 7
        if shift > 63:
            raise ValueError("a number has more than 64 bits")


def _content(data: memoryview, position: int, end: int) -> tuple[bytes | None, int]:
    size, position = varint(data, position)
    if size < 0:
        return None, position
    if position + size > end:
        raise ValueError("a length reaches beyond the record")
    return bytes(data[position : position + size]), position + size


def _skip(data: memoryview, position: int, end: int) -> int:
    size, position = varint(data, position)
    position += max(0, size)
    if position > end:
        raise ValueError("a length reaches beyond the record")
    return position


def _count_headers(data: memoryview, position: int, end: int) -> int:
    """Return the number of headers that a record says it has. Raises as `varint` does."""
    position += 1
    for _ in range(2):
        _, position = varint(data, position)
    return varint(data, _skip(data, _skip(data, position, end), end))[0]


def parse(head: Head, data: memoryview, position: int = 0) -> Iterator[Parsed]:
    """Yield the batch's records whatever is in them; `data` begins with the header and is not compressed.

    A record that is broken comes with a fault. Where the next one cannot be found, one fault stands for the rest. Each
    offset is greater than the one before, and none is beyond the batch's last. `position`: the first that is wanted.
    Linear in the size; a record's content is copied once.
    """
    at, done = _HEADER.size, head.base_offset - 1
    complete = head.records == head.last_delta + 1  # compaction has removed nothing: the place tells the offset
    for index in range(head.records):
        try:
            length, start = varint(data, at)
            if length < 0 or start + length > len(data):
                raise ValueError("its length does not fit")
        except (IndexError, ValueError) as error:
            reason = str(error) if isinstance(error, ValueError) else "it ends early"
            break
        end = start + length
        expected = head.base_offset + index if complete else None
        record = _record(head, data[start:end], done, expected)
        if done < record.offset <= head.last_offset:
            done = record.offset
            if done >= position:
                yield record
        at = end
    else:
        reason = "more bytes follow its last record"
        if at == len(data):
            done = head.last_offset
    if done < head.last_offset:
        first = max(done + 1, position)
        message = f"the batch of offsets {head.base_offset} to {head.last_offset} is broken at byte {at}: {reason}"
        if first <= head.last_offset:
            yield head.stand_in(Reason.UNREADABLE, message, first)


def _record(head: Head, data: memoryview, done: int, expected: int | None) -> Parsed:
    """Parse one record. A broken one gets the expected offset (None: the next after `done`)."""
    end = len(data)
    by_append = 1 if head.attributes & _LOG_APPEND else 0
    offset = done + 1 if expected is None else expected
    timestamp = head.max_timestamp
    try:
        delta, at = varint(data, 1)
        timestamp = head.max_timestamp if by_append else head.first_timestamp + delta
        if not -1 <= timestamp < 1 << 63:
            timestamp = head.max_timestamp
        delta, at = varint(data, at)
        if expected is None and done < head.base_offset + delta <= head.last_offset:
            offset = head.base_offset + delta
        elif head.base_offset + delta != expected:
            raise ValueError("its offset does not follow the one before")
        key, at = _content(data, at, end)
        value, at = _content(data, at, end)
        count, at = varint(data, at)
        if not 0 <= count <= (end - at) // 2:
            raise ValueError("its headers do not fit")
        if count > MAX_HEADERS:
            message = f"the record has {count} headers, the limit is {MAX_HEADERS}; they are left out here"
            return Parsed(offset, timestamp, by_append, key, value, [], Fault(Reason.TOO_LARGE, message))
        headers: list[tuple[str, bytes | None]] = []
        fault: Fault | None = None
        for number in range(count):
            raw, at = _content(data, at, end)
            if raw is None:
                raise ValueError("a header has no name")
            content, at = _content(data, at, end)
            try:
                name = raw.decode()
            except UnicodeDecodeError:
                name = raw.decode("utf-8", "backslashreplace")
                if fault is None:
                    shown = name if len(name) <= _SHOWN else f"{name[:_SHOWN]}..."
                    message = (
                        f"the name of header {number + 1} of {count} is not UTF-8; it is escaped here: {shown!r}. "
                        "Let the producer write header names as UTF-8"
                    )
                    fault = Fault(Reason.BAD_HEADER, message)
            headers.append((name, content))
        if at != end:
            raise ValueError(f"{end - at} bytes are left at its end")
        return Parsed(offset, timestamp, by_append, key, value, headers, fault)
    except (IndexError, ValueError) as error:
        why = str(error) if isinstance(error, ValueError) else "it ends early"
        message = f"the record does not follow Kafka's format: {why}"
        return Parsed(offset, timestamp, by_append, None, None, [], Fault(Reason.UNREADABLE, message))


class _Records(fetcher.PartitionRecords):  # type: ignore[misc]
    """aiokafka's way through the batches, which goes on where it would end."""

    def __init__(self, tp: TopicPartition, records: Batches, *rest: Any) -> None:
        super().__init__(tp, records, *rest)
        self.tp = tp
        self.batches = records
        self._records_iterator: Generator[ConsumerRecord, None, None] = self._unpack_records()
        self._expected = self._end = 0
        self._complete = False
        records.belong_to(self)

    def __next__(self) -> ConsumerRecord:
        while True:
            try:
                return next(self._records_iterator)
            except StopIteration:
                self._records_iterator = self._unpack_records()
                raise
            except UnreadableError:
                raise
            except Exception:
                if not self.batches.read_slowly():
                    raise
                self._records_iterator = self._unpack_records()

    def expect(self, batch: _Batch) -> None:
        """Prepare for the batch's offsets: broken ones would make others be passed over."""
        self._end = batch.next_offset
        self._complete = not batch.slow and batch.head.records == batch.head.last_delta + 1
        self._expected = max(batch.base_offset, self.next_fetch_offset)

    def missed(self) -> bool:
        """Whether the batch that was read had other offsets than its head says; the position is put back then."""
        missed = self._complete and self._expected < self._end
        self._complete = False
        if missed:
            self.next_fetch_offset = self._expected
        return missed

    def _consumer_record(self, tp: TopicPartition, record: Any) -> ConsumerRecord:
        offset = record.offset
        if offset != self._expected and (self._complete or not self._expected < offset < self._end):
            self._complete = False
            raise ValueError("a record's offset does not follow the one before")
        self._expected = offset + 1
        fault = record.checksum
        if isinstance(fault, Fault) and not self.batches.reading.tolerant:
            raise UnreadableError(f"{_place(tp, offset, fault.first_offset)}: {fault.reason}: {fault.message}")
        if self._key_deserializer or self._value_deserializer:
            return super()._consumer_record(tp, record)
        key, value, headers = record.key, record.value, record.headers
        return ConsumerRecord(
            tp.topic,
            tp.partition,
            offset,
            record.timestamp,
            record.timestamp_type,
            key,
            value,
            fault,
            -1 if key is None else len(key),
            -1 if value is None else len(value),
            tuple(headers) if headers else (),
        )

    def restart(self) -> None:
        """Go on from the position, at the begin of the batch that is there now."""
        self._records_iterator.close()
        self._complete = False
        self._records_iterator = self._unpack_records()

    def close(self) -> None:
        """Drop everything."""
        self._records_iterator.close()
        self.batches.close()


class _Result(fetcher.FetchResult):  # type: ignore[misc]
    """What was fetched of one partition, taken in portions that are bounded in bytes too."""

    _partition_records: _Records | None

    def __init__(self, tp: TopicPartition, *, partition_records: _Records, **rest: Any) -> None:
        super().__init__(tp, partition_records=partition_records, **rest)
        self._reading = partition_records.batches.reading
        if (former := self._reading.open.get(tp)) is not None:
            former.drop()
        self._reading.open[tp] = self

    def drop(self) -> None:
        """Drop what is left; aiokafka fetches on from the position."""
        records, self._partition_records = self._partition_records, None
        if records is not None:
            records.close()
        if self._reading.budget is not None:
            self._reading.budget.batches.leave(self._topic_partition)
        if self._reading.open.get(self._topic_partition) is self:
            del self._reading.open[self._topic_partition]

    def check_assignment(self, tp: TopicPartition) -> bool:
        """Whether what was fetched is still wanted; otherwise it is dropped."""
        records = self._partition_records
        wanted = records is not None and super().check_assignment(tp)
        if not wanted:
            self._partition_records = records
            self.drop()
        return wanted

    def getone(self) -> ConsumerRecord | None:
        """Return the next record; None at the end."""
        found = self.getall(1)
        return found[0] if found else None

    def getall(self, max_records: int | None = None) -> list[ConsumerRecord]:
        """Return the next records, up to the number or about as many bytes as allowed. Raises NoRoom."""
        reading, records = self._reading, self._partition_records
        if records is None or not self.check_assignment(self._topic_partition):
            return []
        if reading.budget is not None:
            reading.budget.records.room(self._topic_partition)
        found: list[ConsumerRecord] = []
        size = 0
        for record in records:
            found.append(record)
            size += record.serialized_value_size + record.serialized_key_size + RECORD_OVERHEAD
            if record.headers:
                size += memory_size(None, None, record.headers)
            if size >= reading.fetch_bytes or (max_records is not None and len(found) >= max_records):
                self._update_position()
                if records.batches.make_room():
                    if records.batches.at_end():
                        self.drop()  # now, so that the response is not kept and the next one is fetched
                    else:
                        records.restart()
                return found
        self._update_position()
        no_room = records.batches.no_room
        if no_room is None:
            self.drop()
        elif not found:
            raise NoRoom(no_room.share, no_room.key)
        return found


def _place(tp: TopicPartition, offset: int, first: int | None = None) -> str:
    offsets = f"offset {offset}" if first in (None, offset) else f"offsets {first} to {offset}"
    return f"{tp.topic}/{tp.partition} {offsets}"

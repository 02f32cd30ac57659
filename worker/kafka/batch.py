"""One record batch out of a fetch response: checked, unpacked within its bounds, ready to be iterated.

Lives here: the CRC, the bounds on what a batch unpacks to, batches from before Kafka 0.11, and which parser reads the
records. Must not live here: decompression (unpack.py), the format of records (record_parser.py), the other batches of
the response (batches.py).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final, Protocol

from aiokafka import TopicPartition

from worker.core.trace import Reason
from worker.kafka.aiokafka_private import LegacyBatch, RecordBatch
from worker.kafka.reading import Reading
from worker.kafka.record_parser import HEADER, MAX_HEADERS, Head, Parsed, count_headers, parse, varint
from worker.kafka.unpack import NAMES, CorruptError, TooLargeError, unpack

LOG_OVERHEAD: Final = 12
"""Bytes of a batch before those that its length counts: its offset and the length."""

MAGIC: Final = 16
"""Where a batch has the version of its format."""

LEAST_BYTES: Final = 26
"""The smallest batch: a message of magic 0 without key and value."""

WALKED_BYTES: Final = 1 << 20
"""Only in a batch of more bytes can a record have more headers than allowed, about; so only there are they counted
before the record is parsed."""

_CODEC, _CONTROL = 0x07, 0x20
_ABORT: Final = b"\0\0\0\0"


class Reader(Protocol):
    """Who reads the batches of one partition (fetch_results.PartitionReader)."""

    tp: TopicPartition
    next_fetch_offset: int

    def expect(self, batch: Batch) -> None:
        """Prepare for the batch's records."""
        ...

    def missed(self) -> bool:
        """Whether the last batch had other offsets than its header says; the position is put back then."""
        ...


class Batch:
    """One batch, as aiokafka's PartitionRecords looks at it."""

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
        """Let one record with a fault stand for the whole batch, or for what is left of it from the position on."""
        first = max(self.base_offset, self.owner.next_fetch_offset)
        self.records = [self.head.stand_in(reason, message, first, self.next_offset - 1)]
        self.slow = True
        self.data = memoryview(b"")

    def close(self) -> None:
        """Drop the bytes, and give back what they hold of the memory budget."""
        self.inner = self.records = None
        self.data = memoryview(b"")
        held, self.held = self.held, 0
        if held and self.reading.budget is not None:
            self.reading.budget.batches.give_back(held)

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
        data, position = self.data, HEADER.size
        inner = iter(self.inner)
        for _ in range(self.head.records):
            length, start = varint(data, position)
            if length > WALKED_BYTES and count_headers(data, start, start + length) > MAX_HEADERS:
                raise ValueError("too many headers")
            yield next(inner)
            position = start + length
        yield from inner  # it checks that nothing is left


def open_batch(reading: Reading, owner: Reader, data: memoryview, rest: memoryview) -> Batch | None:
    """Return a batch, ready to be iterated; None: it came damaged, and is to be fetched again.

    `rest`: what follows in the response. Raises NoRoom; then nothing has changed.
    """
    return _of_magic_2(reading, owner, data, rest) if data[MAGIC] >= 2 else _legacy(reading, owner, data)


def _of_magic_2(reading: Reading, owner: Reader, data: memoryview, rest: memoryview) -> Batch | None:
    inner = RecordBatch(data)
    head = Head._make(HEADER.unpack_from(data))
    batch = Batch(owner, head, inner, data, reading)
    batch.slow = head.records > head.last_delta + 1  # more records than offsets; a broker should have refused it
    if not inner.validate_crc():
        if reading.fetch_again(owner.tp, head.base_offset):
            return None
        if len(rest) >= 8:  # the header may be what is damaged: trust the next batch's
            (following,) = struct.unpack_from(">q", rest)
        else:
            following = head.last_offset + 1
        batch.next_offset = max(owner.next_fetch_offset + 1, following)
        batch.replace(Reason.UNREADABLE, "the batch's checksum (CRC) is wrong: it is damaged on the broker's disk")
    elif head.attributes & _CODEC and not head.attributes & _CONTROL and len(data) > HEADER.size:
        _unpack(batch, head.attributes & _CODEC)  # compaction leaves batches without records
    return batch


def _unpack(batch: Batch, codec: int) -> None:
    """Put what a batch unpacks to, or a fault, in its place. Raises NoRoom."""
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


def _unpacked(batch: Batch, codec: int, limit: int) -> memoryview:
    """Raise TooLargeError for what exceeds the limit, NoRoom for what exceeds the room there is now."""
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
    if unpacked is None:  # raised out here, because an error's context keeps what was unpacked
        raise budget.batches.refuse(tp, min(limit, 2 * bound))
    batch.held = len(unpacked)
    budget.batches.take(batch.held)
    return unpacked


def _legacy(reading: Reading, owner: Reader, data: memoryview) -> Batch:
    """Return a batch of magic 0 or 1, from before Kafka 0.11: aiokafka's, after a look at what it unpacks to."""
    magic = data[MAGIC]
    inner = LegacyBatch(data, magic)
    first = last = inner.next_offset - 1
    head = Head(first, 0, 0, magic, 0, 0, last - first, -1, -1, -1, -1, -1, 1)
    batch = Batch(owner, head, inner, data, reading)
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
            if not (codec == 3 and magic == 0):  # its lz4 frames have a wrong checksum; aiokafka mends that
                unpack(payload, codec, limit)
            batch.records = list(inner)
    except TooLargeError:
        batch.replace(Reason.BATCH_TOO_LARGE, f"the message set unpacks to more than {limit} bytes")
    except Exception as error:
        batch.replace(Reason.UNREADABLE, f"the message set cannot be read: {type(error).__name__}")
    return batch

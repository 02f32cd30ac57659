"""The records of one record batch (magic 2), valid or not; aiokafka's parser reads only valid ones."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from worker.core.records import Fault
from worker.core.trace import Reason

HEADER: Final = struct.Struct(">qiibIhiqqqhii")  # a batch's header; `Head` names its fields
LOG_APPEND: Final = 0x08  # the attribute bit of a batch whose timestamps are the broker's

MAX_HEADERS: Final = 1 << 20
"""Headers of one record: two bytes in a batch make one of some 130 bytes in memory, so a batch of 64 MiB needed 4
GiB."""

_SHOWN: Final = 60


class Parsed(NamedTuple):
    """A record with aiokafka's attributes; with a fault, what could be read, and the last offset it stands for."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    fault: Fault | None = None


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
        """Return the offset of the last record, even if compaction has removed it."""
        return self.base_offset + self.last_delta

    def stand_in(self, reason: Reason, message: str, first: int, last: int | None = None) -> Parsed:
        """Return the one record that stands for those from `first` to `last` (None: the batch's last offset)."""
        last = self.last_offset if last is None else last
        return Parsed(last, self.max_timestamp, None, None, [], Fault(reason, message, first))


def parse(head: Head, data: memoryview, position: int = 0) -> Iterator[Parsed]:
    """Yield the batch's records; `data` begins with the header and is not compressed.

    A broken record has a fault; if the next record cannot be found, one fault stands for the rest. Offsets rise, and
    none is beyond the batch's last. `position`: the first offset that is needed. Linear time; contents are copied once.
    """
    at, done = HEADER.size, head.base_offset - 1
    complete = head.records == head.last_delta + 1  # nothing was compacted: the index gives the offset
    for index in range(head.records):
        try:
            length, start = varint(data, at)
            if length < 0 or start + length > len(data):
                raise ValueError("its length does not fit")
        except (IndexError, ValueError) as error:
            reason = _why(error)
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
    offset = done + 1 if expected is None else expected
    timestamp = head.max_timestamp
    try:
        delta, at = varint(data, 1)
        timestamp = head.max_timestamp if head.attributes & LOG_APPEND else head.first_timestamp + delta
        if not -1 <= timestamp < 1 << 63:
            timestamp = head.max_timestamp
        delta, at = varint(data, at)
        if expected is None and done < head.base_offset + delta <= head.last_offset:
            offset = head.base_offset + delta
        elif head.base_offset + delta != expected:
            raise ValueError("its offset does not follow the one before")
        key, at = _content(data, at, end)
        value, at = _content(data, at, end)
        headers, fault = _headers(data, at, end)
    except (IndexError, ValueError) as error:
        message = f"the record does not follow Kafka's format: {_why(error)}"
        return Parsed(offset, timestamp, None, None, [], Fault(Reason.UNREADABLE, message))
    return Parsed(offset, timestamp, key, value, headers, fault)


def _headers(data: memoryview, at: int, end: int) -> tuple[list[tuple[str, bytes | None]], Fault | None]:
    """Parse a record's headers, up to its end; with a fault if a name was changed or all were dropped."""
    count, at = varint(data, at)
    if not 0 <= count <= (end - at) // 2:
        raise ValueError("its headers do not fit")
    if count > MAX_HEADERS:
        message = f"the record has {count} headers, the limit is {MAX_HEADERS}; they are dropped here"
        return [], Fault(Reason.TOO_LARGE, message)
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
            fault = fault or _bad_name(name, number, count)
        headers.append((name, content))
    if at != end:
        raise ValueError(f"{end - at} bytes are left at its end")
    return headers, fault


def _bad_name(name: str, number: int, count: int) -> Fault:
    shown = name if len(name) <= _SHOWN else f"{name[:_SHOWN]}..."
    message = (
        f"the name of header {number + 1} of {count} is not UTF-8; it is escaped here: {shown!r}. "
        "Let the producer write header names as UTF-8"
    )
    return Fault(Reason.BAD_HEADER, message)


def _why(error: IndexError | ValueError) -> str:
    return str(error) if isinstance(error, ValueError) else "it is truncated"


def varint(data: memoryview, position: int) -> tuple[int, int]:
    """Return a zigzag number and the position after it. Raises IndexError at the end, ValueError beyond 64 bits."""
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


def count_headers(data: memoryview, position: int, end: int) -> int:
    """Return a record's number of headers, as it states it. Raises as `varint` does."""
    position += 1
    for _ in range(2):
        _, position = varint(data, position)
    return varint(data, _skip(data, _skip(data, position, end), end))[0]

"""One record batch (magic 2), valid or not: it is decompressed within bounds, and its records are parsed.

aiokafka reads only valid batches, and here no input may use more memory than the caller allows.
"""

import contextlib
import mmap
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import cramjam

from worker.core.records import Fault
from worker.core.trace import Reason

# -- decompression. A large result is written to an anonymous memory map, whose pages use no memory before they are
# written. The first write to a page takes microseconds, so a small result is written to a buffer that each thread
# keeps, and copied.

GZIP, SNAPPY, LZ4, ZSTD = 1, 2, 3, 4
NAMES: Final = {GZIP: "gzip", SNAPPY: "snappy", LZ4: "lz4", ZSTD: "zstd"}

_IN_BYTES: Final = 1 << 16
_SMALL_BYTES: Final = 1 << 20
_kept = threading.local()


class TooLargeError(Exception):
    """The payload unpacks to more than the limit."""


class CorruptError(Exception):
    """The payload is not valid for its codec; the message is the decompressor's, without content."""


def decompress(payload: memoryview, codec: int, limit: int, head: bytes = b"") -> memoryview:
    """Return `head` and then the payload, unpacked to at most `limit` bytes. Raises TooLargeError, CorruptError."""
    try:
        into = _CODECS[codec]
    except KeyError:
        raise CorruptError(f"unknown codec {codec}") from None
    if len(payload) <= _SMALL_BYTES // 4 and limit >= _SMALL_BYTES:
        with contextlib.suppress(TooLargeError):
            return _decompress_small(payload, into, head)
    memory = mmap.mmap(-1, max(1, len(head) + limit))
    memory[: len(head)] = head
    view = memoryview(memory)
    room = view[len(head) :]
    size = 0
    try:
        size = len(head) + into(payload, room)
    finally:
        room.release()
        view.release()
        if not size:
            with contextlib.suppress(BufferError):  # a frame of the error may still refer to it
                memory.close()  # now, not when the error is released
    with contextlib.suppress(SystemError):  # if maps cannot be shrunk, only address space is wasted
        memory.resize(max(1, size))
    return memoryview(memory)[:size]


def _decompress_small(payload: memoryview, into: Callable[[memoryview, memoryview], int], head: bytes) -> memoryview:
    room: memoryview | None = getattr(_kept, "room", None)
    if room is None:
        room = _kept.room = memoryview(bytearray(_SMALL_BYTES))
    size = len(head) + into(payload, room[len(head) :])
    room[: len(head)] = head
    return memoryview(bytes(room[:size]))


def _gzip(payload: memoryview, room: memoryview) -> int:
    """Unpack all members. The input is passed in pieces, because zlib copies what is left of each."""
    limit, written, read = len(room), 0, 0
    piece: bytes | memoryview = b""
    member = zlib.decompressobj(31)
    try:
        while True:
            portion = min(1 << 20, limit - written + 1)
            out = member.decompress(piece, portion)
            if written + len(out) > limit:
                raise TooLargeError
            room[written : written + len(out)] = out
            written += len(out)
            piece = member.unconsumed_tail
            if member.eof:
                piece = member.unused_data or payload[read : read + _IN_BYTES]
                read += 0 if member.unused_data else len(piece)
                if not bytes(piece[:1]).strip(b"\0"):  # the end, or padding with zeros
                    return written
                member = zlib.decompressobj(31)
            elif not piece and len(out) < portion:
                piece = payload[read : read + _IN_BYTES]
                read += len(piece)
                if not piece:
                    raise CorruptError("truncated gzip data")
    except zlib.error as error:
        raise CorruptError(f"gzip: {error}") from None


def _snappy(payload: memoryview, room: memoryview) -> int:
    """Unpack xerial's framing (Java's producers) or one raw block. A block states its size, which is checked first."""
    if bytes(payload[:8]) != b"\x82SNAPPY\x00":
        return _snappy_block(payload, room)
    position, written = 16, 0  # behind the framing's head
    while position < len(payload):
        if position + 4 > len(payload):
            raise CorruptError("truncated snappy data")
        (size,) = struct.unpack_from(">i", payload, position)
        position += 4
        if size <= 0 or position + size > len(payload):
            raise CorruptError("snappy: a block does not fit")
        written += _snappy_block(payload[position : position + size], room[written:])
        position += size
    return written


def _snappy_block(block: memoryview, room: memoryview) -> int:
    try:
        if cramjam.snappy.decompress_raw_len(block) > len(room):
            raise TooLargeError
        return int(cramjam.snappy.decompress_raw_into(block, room))
    except cramjam.DecompressionError as error:
        raise CorruptError(f"snappy: {error}") from None


def _framed(name: str, decompress_into: Callable[[Any, Any], int]) -> Callable[[memoryview, memoryview], int]:
    def into(payload: memoryview, room: memoryview) -> int:
        try:
            return int(decompress_into(payload, room))
        except cramjam.DecompressionError as error:
            if "failed to write whole buffer" in str(error):  # cramjam has no type for a full output buffer
                raise TooLargeError from None
            raise CorruptError(f"{name}: {error}") from None

    return into


_CODECS: Final[dict[int, Callable[[memoryview, memoryview], int]]] = {
    GZIP: _gzip,
    SNAPPY: _snappy,
    LZ4: _framed("lz4", cramjam.lz4.decompress_into),
    ZSTD: _framed("zstd", cramjam.zstd.decompress_into),
}


# -- the records

HEADER: Final = struct.Struct(">qiibIhiqqqhii")  # a batch's header; `Head` names its fields

MAX_HEADERS: Final = 1 << 20
"""Headers of one record: two bytes in a batch make one of some 130 bytes in memory, so a batch of 64 MiB needed 4
GiB."""


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
        of_broker = head.attributes & 0x08  # LogAppendTime
        timestamp = head.max_timestamp if of_broker else head.first_timestamp + delta
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
    shown = name if len(name) <= 60 else f"{name[:60]}..."
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

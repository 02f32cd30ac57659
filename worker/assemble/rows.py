"""The bytes on the two topics of `assemble`: spans by trace id with time marks, and the state of the open runs.

On the intermediate topic a record's key is the trace id (hex); a mark has no key. On the state topic (compacted) the
keys are `open:ID:NUMBER` for a part of an open run, `closed:ID` for a closed run, and `times`.
"""

from __future__ import annotations

import re
import zlib
from typing import Annotated, Final

import msgspec
from msgspec import Meta

Milliseconds = Annotated[int, Meta(ge=0, le=253_402_300_799_999)]
"""ms since 1970, up to the year 9999; also for durations."""

Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]

MAX_RUN_BYTES: Final = 64 << 20
"""Maximum size of a run, uncompressed. Each model call repeats everything said before: a hundred calls with 100,000
tokens each are 40 MB."""

MAX_RUN_PARTS: Final = 20_000
"""Maximum number of parts (records that contain some of its spans) of a run."""

Size = Annotated[int, Meta(ge=0, le=MAX_RUN_BYTES)]
Topic = Annotated[str, Meta(max_length=249)]

Place = tuple[str, int]
"""A partition of a span topic."""

STREAM: Final[Place] = ("", 0)
"""The place in the marks with which the first partition of the intermediate topic sends stream time to the others."""


class Part(msgspec.Struct, frozen=True, array_like=True, tag="part1", gc=False):
    """The spans of one trace in one record: OTLP in protobuf, compressed by `packed`.

    Topic, partition and offset are the record's.
    """

    time_ms: Milliseconds  # the record's time, within the bounds of steps.Spread
    topic: Topic
    partition: Number
    offset: Number
    size: Size  # bytes of the uncompressed content
    content: bytes


class Mark(msgspec.Struct, frozen=True, array_like=True, tag="mark1", gc=False):
    """How far a partition of a topic of spans has been read. Times are those of records, ms since 1970."""

    topic: Topic
    partition: Number
    time_ms: Milliseconds | None  # the greatest so far; None: no record had a time
    read_ms: Milliseconds | None = None  # everything up to here has been read; None: further records may be waiting
    waited_ms: Milliseconds = 0  # how long no record has arrived
    seen_ms: Milliseconds | None = None  # in the state only: the greatest time of any partition when this mark arrived

    @property
    def place(self) -> Place:
        """Return the partition."""
        return self.topic, self.partition


class Held(msgspec.Struct, frozen=True, array_like=True, tag="open1", gc=False):
    """A part of an open run."""

    time_ms: Milliseconds  # stream time at which it was taken
    size: Size  # as in Part
    content: bytes


class Remembered(msgspec.Struct, frozen=True, array_like=True, tag="closed1", gc=False):
    """A closed run."""

    time_ms: Milliseconds  # stream time at which it closed


class Times(msgspec.Struct, frozen=True, array_like=True, tag="times1"):
    """Stream time and the marks behind it."""

    time_ms: Milliseconds | None  # None: none yet
    marks: list[Mark]  # the last one of each partition


class RowError(ValueError):
    """The bytes are not a row of this version; the message says why."""


TIMES_KEY: Final = b"times"

_TRACE_ID: Final = rb"[0-9a-f]{1,64}"
TRACE_ID: Final = re.compile(_TRACE_ID)
_OPEN: Final = re.compile(rb"open:(%s):([0-9]{1,18})" % _TRACE_ID)
_CLOSED: Final = re.compile(rb"closed:(%s)" % _TRACE_ID)

_encoder = msgspec.msgpack.Encoder()
_taken = msgspec.msgpack.Decoder(Part | Mark)
_state = msgspec.msgpack.Decoder(Held | Remembered | Times)

encode = _encoder.encode


def open_key(trace_id: str, number: int) -> bytes:
    """Return the key of a part of an open run."""
    return f"open:{trace_id}:{number}".encode()


def closed_key(trace_id: str) -> bytes:
    """Return the key of a closed run."""
    return f"closed:{trace_id}".encode()


def decode(value: bytes | None) -> Part | Mark:
    """Read a record of the intermediate topic. Raises RowError."""
    try:
        row: Part | Mark = _taken.decode(value or b"")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RowError(f"not a record of kp-worker assemble: {error}") from error
    return row


def decode_state(key: bytes, value: bytes) -> tuple[str, int, Held] | tuple[str, Remembered] | Times:
    """Read a record of the state topic: a part with its trace id and number, a closed run with its id, or the times.

    Raises RowError.
    """
    try:
        row = _state.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RowError(f"not a record of the state of kp-worker assemble: {error}") from error
    if isinstance(row, Held) and (found := _OPEN.fullmatch(key)) and int(found[2]) < MAX_RUN_PARTS:
        return found[1].decode(), int(found[2]), row
    if isinstance(row, Remembered) and (found := _CLOSED.fullmatch(key)):
        return found[1].decode(), row
    if isinstance(row, Times) and key == TIMES_KEY:
        return row
    raise RowError("the key does not fit the record")


def packed(content: bytes) -> bytes:
    """Compress a content. Spans repeat what an agent has said, so about a quarter is left."""
    return zlib.compress(content, 1)


def unpacked(content: bytes, size: int = MAX_RUN_BYTES) -> bytes:
    """Undo `packed`, up to `size` bytes. Raises RowError."""
    unpacking = zlib.decompressobj()
    try:
        found = unpacking.decompress(content, size + 1)
    except zlib.error as error:
        raise RowError(f"the content of a part cannot be unpacked: {error}") from error
    if len(found) > size or not unpacking.eof:
        raise RowError(f"the content of a part is cut off, or has more than the {size} bytes that its row names")
    return found

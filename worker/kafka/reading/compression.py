"""Bounded decompression of a record batch's payload: no input makes it use more memory than the caller allows.

A large result is written to an anonymous memory map, whose pages use no memory before they are written. The first write
to a page takes microseconds, so a small result is written to a buffer that each thread keeps, and copied.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
import threading
import zlib
from collections.abc import Callable
from typing import Any, Final

import cramjam

GZIP, SNAPPY, LZ4, ZSTD = 1, 2, 3, 4
NAMES: Final = {GZIP: "gzip", SNAPPY: "snappy", LZ4: "lz4", ZSTD: "zstd"}

_IN_BYTES: Final = 1 << 16
_OUT_BYTES: Final = 1 << 20
_SMALL_BYTES: Final = 1 << 20
_SMALL_PAYLOAD: Final = _SMALL_BYTES // 4
_kept = threading.local()
_XERIAL: Final = b"\x82SNAPPY\x00"
_XERIAL_HEAD: Final = 16
_FULL: Final = "failed to write whole buffer"
"""cramjam's message when the output buffer is full; it has no error type (tests/unit/kafka/test_compression.py)."""


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
    if len(payload) <= _SMALL_PAYLOAD and limit >= _SMALL_BYTES:
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
            portion = min(_OUT_BYTES, limit - written + 1)
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
    if bytes(payload[: len(_XERIAL)]) != _XERIAL:
        return _snappy_block(payload, room)
    position, written = _XERIAL_HEAD, 0
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
            if _FULL in str(error):
                raise TooLargeError from None
            raise CorruptError(f"{name}: {error}") from None

    return into


_CODECS: Final[dict[int, Callable[[memoryview, memoryview], int]]] = {
    GZIP: _gzip,
    SNAPPY: _snappy,
    LZ4: _framed("lz4", cramjam.lz4.decompress_into),
    ZSTD: _framed("zstd", cramjam.zstd.decompress_into),
}

"""Bytes of one cache entry on the changelog topic: key, value, version. No I/O (that is store.py's).

The topic is compacted. The key is a slot, sequence % slots, with slots = capacity + slack: a slot is only written
again when its old entry is out of every cache that a restart could need, as long as no more than `slack` traces are
past the committed offset (lane.py enforces that bound).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from worker.novelty import Vector

VERSION: Final = 1
"""Raise it when a field changes its meaning: an entry of another version is skipped on restore, never guessed at."""

SLACK: Final = 1024
"""Most traces of one partition that may be past the committed offset, and the spare slots that cover them.

More costs 1.7 kB of changelog each; less makes traces wait for a commit. At 1 ms a trace it spans one second, a long
commit."""


class CorruptEntry(ValueError):
    """The bytes are not an entry of this version; the message says why."""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One embedding: where it came from, when it was inserted, and what model made it.

    `stream_time_ms`: the partition's stream time at insertion. `vector`: little-endian float32, unit length.
    """

    version: int
    sequence: int
    source_offset: int
    stream_time_ms: int
    trace_id: str
    model: str
    vector: bytes

    def array(self) -> Vector:
        """Return the vector, shape (dimensions,)."""
        return np.frombuffer(self.vector, dtype="<f4")


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Entry)


def slot_key(sequence: int, capacity: int) -> bytes:
    """Return the record key of an entry: its slot, in decimal digits."""
    return b"%d" % (sequence % (capacity + SLACK))


def encode(
    *, sequence: int, source_offset: int, stream_time_ms: int, trace_id: str, model: str, vector: Vector
) -> bytes:
    """Return the record value of an entry."""
    raw = np.ascontiguousarray(vector, dtype="<f4").tobytes()
    return _encoder.encode(Entry(VERSION, sequence, source_offset, stream_time_ms, trace_id, model, raw))


def decode(value: bytes | None) -> Entry:
    """Read an entry. Raises CorruptEntry for anything that `encode` of this version did not write."""
    if not value:
        raise CorruptEntry("empty value")
    try:
        entry = _decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptEntry(f"not a changelog entry: {error}") from error
    if entry.version != VERSION:
        raise CorruptEntry(f"entry version {entry.version}, this worker reads version {VERSION}")
    if entry.sequence < 0 or entry.source_offset < 0 or not entry.vector or len(entry.vector) % 4:
        raise CorruptEntry("sequence, source offset or vector length out of range")
    if not np.isfinite(entry.array()).all():
        raise CorruptEntry("the vector holds values that are not finite")
    return entry


def one_pass(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries of the latest pass over the source, in rising order of sequence and offset.

    `entries`: those of committed traces, in the log's order. Two things can disturb it. After a reset to an older
    offset the entries of the first pass are still there, with sequences above the second's. And at least once, a
    worker that was frozen may write older entries again, behind newer ones. Both show against the entry with the
    greatest source offset, which is the last that was committed: in one pass, sequence and offset rise together.
    """
    if not entries:
        return []
    latest = {entry.sequence: entry for entry in entries}
    newest = max(enumerate(entries), key=lambda item: (item[1].source_offset, item[0]))[1]
    result = [newest]
    for sequence in sorted((it for it in latest if it < newest.sequence), reverse=True):
        if latest[sequence].source_offset < result[-1].source_offset:
            result.append(latest[sequence])
    return result[::-1]

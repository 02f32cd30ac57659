"""Passes over the source: which entries of the changelog belong to what is being read now.

A pass is one run of a group over a source partition, from the offset where it began. A restart goes on with the pass
that is committed; a reset of the offset, or a source topic that was made anew, begins another. Each cache entry names
its pass, and so does the metadata committed beside the offset. The chain of passes, which entries of which pass still
count, stands in one record on the changelog partition, the marker.

Lives here: the rules, and the bytes of metadata and marker. Must not live here: entries (changelog.py), I/O (store.py).
Everything follows from what is committed and what is on the topic: no clock and no chance.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

MARKER_KEY: Final = b"passes"
MARKER_VERSION: Final = 1

MAX_SEGMENTS: Final = 64
"""Passes that a chain may name. Each has entries of its own below the next one's start, and a changelog partition holds
some 2000: only a group whose offset is moved again and again within them loses the oldest."""

_KP1: Final = re.compile(r"kp1:(-?[0-9]{1,18})")
_KP2: Final = re.compile(r"kp2:(-?[0-9]{1,18})?:([A-Za-z0-9_-]{22})?:([0-9]{1,18})?:([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class Pass:
    """The pass that a lane works on, as its entries and its committed metadata name it.

    `topic_id`: Kafka's id of the source topic, in the form of Kafka's tools; None where the broker knows none.
    `number`: None without an embedder, which reads and writes no entries. `start`: the source offset where it began.
    """

    topic_id: str | None = None
    number: int | None = None
    start: int = 0

    def metadata(self, stream_time_ms: int | None) -> str:
        """Return the metadata to commit beside the offset, at most 90 characters."""
        number, time = self.number, stream_time_ms
        return (
            f"kp2:{'' if time is None else time}:{self.topic_id or ''}:{'' if number is None else number}:{self.start}"
        )


NO_PASS: Final = Pass()
"""Of whoever does not say: nothing is known of the topic."""


@dataclass(frozen=True, slots=True)
class Committed:
    """What committed metadata says. `start` None: 0.1.0 wrote it, which knew no passes and went on with any."""

    stream_time_ms: int | None
    topic_id: str | None = None
    number: int | None = None
    start: int | None = None


def committed_from(metadata: str) -> Committed | None:
    """Read committed metadata; None for what is not ours: Kafka's tools leave it empty when they move an offset."""
    if found := _KP1.fullmatch(metadata):
        return Committed(int(found[1]))
    if found := _KP2.fullmatch(metadata):
        time, topic_id, number, start = found.groups()
        return Committed(
            None if time is None else int(time), topic_id, None if number is None else int(number), int(start)
        )
    return None


class Segment(NamedTuple):
    """A pass in a chain: its number, the source offset where it began, and the changelog's end at that time.

    `since` tells to which pass an entry belongs that names none (0.1.0 wrote it): that under which it was written.
    """

    number: int
    start: int
    since: int


Chain = tuple[Segment, ...]
"""Passes with rising starts: each counts from its start to the next one's."""

BEFORE_PASSES: Final[Chain] = (Segment(0, 0, 0),)
"""The chain of a changelog without a marker: all that 0.1.0 wrote counts as one pass."""


class Marker(msgspec.Struct, frozen=True, array_like=True):
    """The record on the changelog partition that names the passes. `topic_id`: the source's, "" where not known."""

    version: int
    topic_id: str
    chain: Chain


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Marker)

UNREADABLE: Final = Marker(MARKER_VERSION, "", ())
"""Stands for a marker that cannot be read (a later version's, or damaged): no pass is known, nothing is inherited."""


def encode_marker(marker: Marker) -> bytes:
    """Return the marker's record value."""
    return _encoder.encode(marker)


def decode_marker(value: bytes) -> Marker:
    """Read a marker. Raises ValueError for anything that `encode_marker` of this version did not write."""
    try:
        marker = _decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not the record of the passes: {error}") from error
    if marker.version != MARKER_VERSION:
        raise ValueError(f"passes of version {marker.version}, this worker reads version {MARKER_VERSION}")
    starts = [segment.start for segment in marker.chain]
    if any(min(segment) < 0 for segment in marker.chain) or starts != sorted(set(starts)):
        raise ValueError("the chain of passes is out of order")
    return marker


def cut(chain: Chain, start: int) -> Chain:
    """Return what a pass that begins at an offset inherits: the passes that began below it."""
    return tuple(segment for segment in chain if segment.start < start)


def at_offset(chain: Chain, offset: int) -> Segment | None:
    """Return the pass whose entry of a source offset counts; None below the first."""
    return next((segment for segment in reversed(chain) if segment.start <= offset), None)


def written_at(chain: Chain, position: int) -> int | None:
    """Return the number of the pass under which the record at an offset of the changelog was written."""
    return next((segment.number for segment in reversed(chain) if segment.since <= position), None)


@dataclass(frozen=True, slots=True)
class Found:
    """Where a partition goes on, and all that is known of its past.

    `offset`: the next source offset. `has_offset`: one was committed. `committed`: the metadata beside it, where it is
    ours. `recreated`: it was committed for another topic of this name. `topic_id`: of the topic that is there now.
    """

    offset: int
    has_offset: bool = True
    committed: Committed | None = None
    topic_id: str | None = None
    recreated: bool = False


@dataclass(frozen=True, slots=True)
class Resolved:
    """How to go on: the pass, and the chain by which entries count. `begins`: why the pass is a new one, or None."""

    current: Pass
    chain: Chain
    begins: str | None = None

    def marker(self) -> Marker:
        """Return the marker that says so."""
        return Marker(MARKER_VERSION, self.current.topic_id or "", self.chain)


def resolve(found: Found, marker: Marker | None, greatest: int, end: int) -> Resolved:
    """Decide which pass goes on, or begin one.

    `greatest`: the greatest pass number on the changelog, 0 where none is. `end`: the changelog's end.

    A pass begins where the committed metadata is missing or not ours (the offset was moved from outside), where no
    offset is committed, after a time without an embedder, and where the source was made anew. It takes the next number
    and inherits the entries below its start, from the same topic alone. A committed pass goes on, also where an
    earlier worker (kp1) has committed since.
    """
    committed = None if found.recreated else found.committed
    base, foreign = _inherited(found, marker)
    if committed is not None and committed.start is not None and committed.start <= found.offset:
        if committed.number is not None:
            chain = cut(base, committed.start)
            same = [it for it in base if (it.number, it.start) == (committed.number, committed.start)]
            last = Segment(committed.number, committed.start, 0 if marker is None else end)
            chain = _bounded((*chain, *(same or [last])))
            return Resolved(Pass(found.topic_id, committed.number, committed.start), chain)
        start, why = committed.start, "the embedder is back"
    elif committed is not None and committed.start is None and base and base[-1].start <= found.offset:
        return Resolved(Pass(found.topic_id, base[-1].number, base[-1].start), base)  # 0.1.0 has gone on with it
    else:
        start, why = found.offset, "the offset was moved" if found.has_offset else "no offset is committed"
    if foreign:
        why = "the source topic was made anew"
    number = 1 + max([greatest, 0 if committed is None else committed.number or 0, *(it.number for it in base)])
    chain = _bounded((*cut(base, start), Segment(number, start, end)))
    return Resolved(Pass(found.topic_id, number, start), chain, why)


def _inherited(found: Found, marker: Marker | None) -> tuple[Chain, bool]:
    """Return the chain of the passes over this very topic, and whether what is there is another topic's."""
    if found.recreated:
        return (), True
    known, now = "" if marker is None else marker.topic_id, found.topic_id
    if known and now and known != now:
        return (), True
    if not found.has_offset and not (known and known == now):
        return (), False  # a deleted topic's offsets are deleted with it: only equal ids tell that it is the same one
    if marker is not None:
        return marker.chain, False
    return BEFORE_PASSES, False


def _bounded(chain: Chain) -> Chain:
    return chain[-MAX_SEGMENTS:]


def without_embedder(found: Found) -> Pass:
    """Return the pass of a worker without an embedder: an embedder that comes back begins another at its start."""
    committed = None if found.recreated else found.committed
    start = found.offset
    if committed is not None and committed.number is None and committed.start is not None:
        start = min(committed.start, start)
    return Pass(found.topic_id, None, start)

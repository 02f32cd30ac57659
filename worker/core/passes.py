"""Passes over the source: which entries of the changelog belong to the current reading.

A restart continues the committed pass; a reset of the offset, or a recreated source topic, begins another. Each cache
entry names its pass, and so does the metadata of the committed offset. One record on the changelog partition, the
marker, has the chain of passes, with the offsets at which each one counts.

Everything depends on committed data and the topic alone, not on a clock or on chance.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from worker.core.trace import EARLIEST_MS, LATEST_MS

MARKER_KEY: Final = b"passes"
MARKER_VERSION: Final = 1

MAX_SEGMENTS: Final = 64
"""Most passes of a chain. A partition has about 2000 entries: only an offset moved often within those loses a pass."""

MAX_PASS: Final = 10**18 - 1  # the greatest pass number that fits the committed metadata

LAST_OFFSET: Final = 2**63 - 1
Offset = Annotated[int, Meta(ge=0, le=LAST_OFFSET)]
PassNumber = Annotated[int, Meta(ge=0, le=MAX_PASS)]
StreamTime = Annotated[int, Meta(ge=EARLIEST_MS, le=LATEST_MS)]
"""Numbers in records of the changelog: offsets and what cannot exceed one, pass numbers, stream times (ms since 1970).
A record with any other is damaged, or somebody else's, and skipped."""

_KP1: Final = re.compile(r"kp1:(-?[0-9]{1,18})")
_KP2: Final = re.compile(r"kp2:(-?[0-9]{1,18})?:([A-Za-z0-9_-]{22})?:([0-9]{1,18})?:([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class Pass:
    """The pass of a partition, as its entries and its committed metadata name it."""

    topic_id: str | None = None  # Kafka's, in the form of its tools; None if the broker has none
    number: int | None = None  # None without an embedder, which reads and writes no entries
    start: int = 0  # the source offset where it began

    def metadata(self, stream_time_ms: int | None) -> str:
        """Return the metadata to commit with the offset, at most 90 characters."""
        number, time = self.number, stream_time_ms
        return (
            f"kp2:{'' if time is None else time}:{self.topic_id or ''}:{'' if number is None else number}:{self.start}"
        )


NO_PASS: Final = Pass()  # the default pass: nothing is known about the topic


@dataclass(frozen=True, slots=True)
class Committed:
    """The committed metadata. `start` is None if 0.1.0 wrote it, which had no passes."""

    stream_time_ms: int | None
    topic_id: str | None = None
    number: int | None = None
    start: int | None = None


def committed_from(metadata: str) -> Committed | None:
    """Read committed metadata; None if it is not ours. Kafka's tools leave it empty when they move an offset."""
    if found := _KP1.fullmatch(metadata):
        committed = Committed(int(found[1]))
    elif found := _KP2.fullmatch(metadata):
        time, topic_id, number, start = found.groups()
        committed = Committed(
            None if time is None else int(time), topic_id, None if number is None else int(number), int(start)
        )
    else:
        return None
    known = committed.stream_time_ms is None or EARLIEST_MS <= committed.stream_time_ms <= LATEST_MS
    return committed if known else None


class Segment(NamedTuple):
    """A pass in a chain. Entries of 0.1.0 have no number: they belong to the pass that was current then (`since`)."""

    number: PassNumber
    start: Offset  # of the source, where it began
    since: Offset  # the changelog's end at that time


Chain = tuple[Segment, ...]  # passes with rising starts: each counts from its start to the next one's

BEFORE_PASSES: Final[Chain] = (Segment(0, 0, 0),)
"""The chain of a changelog without a marker: all that 0.1.0 wrote counts as one pass."""


class Marker(msgspec.Struct, frozen=True, array_like=True):
    """The record on the changelog partition that names the passes. `topic_id`: the source's, "" if unknown."""

    version: int
    topic_id: Annotated[str, Meta(max_length=22)]
    chain: Annotated[Chain, Meta(max_length=MAX_SEGMENTS)]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Marker)

UNREADABLE: Final = Marker(MARKER_VERSION, "", ())
"""Replaces a marker that cannot be read (damaged, or of a later version): no pass is known, none is inherited."""


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
    if starts != sorted(set(starts)):
        raise ValueError("the chain of passes is out of order")
    return marker


def cut(chain: Chain, start: int) -> Chain:
    """Return the passes that a pass beginning at an offset inherits: those that began below it."""
    return tuple(segment for segment in chain if segment.start < start)


def at_offset(chain: Chain, offset: int) -> Segment | None:
    """Return the pass whose entry of a source offset counts; None below the first."""
    for segment in reversed(chain):
        if segment.start <= offset:
            return segment
    return None


def written_at(chain: Chain, position: int) -> int | None:
    """Return the number of the pass under which the record at an offset of the changelog was written."""
    for segment in reversed(chain):
        if segment.since <= position:
            return segment.number
    return None


@dataclass(frozen=True, slots=True)
class Found:
    """Where a partition continues, and what is known about its past."""

    offset: int  # of the source, the next one
    has_offset: bool = True  # one was committed
    committed: Committed | None = None  # its metadata, if it is ours
    topic_id: str | None = None  # of the current topic
    recreated: bool = False  # it was committed for another topic of this name


@dataclass(frozen=True, slots=True)
class Resolved:
    """How to continue: the pass, and the chain that decides which entries count. `begins`: why the pass is new."""

    current: Pass
    chain: Chain
    begins: str | None = None

    def marker(self) -> Marker:
        """Return the marker of this chain."""
        return Marker(MARKER_VERSION, self.current.topic_id or "", self.chain)


def resolve(found: Found, marker: Marker | None, greatest: int, end: int) -> Resolved:
    """Decide which pass continues, or begin one.

    `greatest`: the greatest pass number on the changelog, 0 if there is none. `end`: the changelog's end.

    A pass begins if the committed metadata is missing or not ours (somebody moved the offset), if no offset is
    committed, after a time without an embedder, and if the source topic was recreated. It gets the next number (the
    least free one where somebody has written the greatest), and inherits the entries below its start if they are of the
    same topic. Otherwise the committed pass continues, even when an earlier worker (kp1) has committed meanwhile.
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
        start, why = committed.start, "an embedder is configured again"
    elif committed is not None and committed.start is None and base and base[-1].start <= found.offset:
        return Resolved(Pass(found.topic_id, base[-1].number, base[-1].start), base)  # 0.1.0 continued it
    else:
        start, why = found.offset, "the committed offset was moved" if found.has_offset else "no offset is committed"
    if foreign:
        why = "the source topic was recreated"
    used = {greatest, 0 if committed is None else committed.number or 0, *(it.number for it in base)}
    number = 1 + max(used)
    if number > MAX_PASS:
        number = next(it for it in itertools.count(1) if it not in used)
    chain = _bounded((*cut(base, start), Segment(number, start, end)))
    return Resolved(Pass(found.topic_id, number, start), chain, why)


def _inherited(found: Found, marker: Marker | None) -> tuple[Chain, bool]:
    """Return the chain of passes over this topic, and whether the marker belongs to another topic."""
    if found.recreated:
        return (), True
    known, now = "" if marker is None else marker.topic_id, found.topic_id
    if known and now and known != now:
        return (), True
    if not found.has_offset and not (known and known == now):
        return (), False  # Kafka deletes the offsets of a deleted topic: only equal ids show that it is the same topic
    if marker is not None:
        return marker.chain, False
    return BEFORE_PASSES, False


def _bounded(chain: Chain) -> Chain:
    return chain[-MAX_SEGMENTS:]


def without_embedder(found: Found) -> Pass:
    """Return the pass of a worker without an embedder; configuring one again begins another pass."""
    committed = None if found.recreated else found.committed
    start = found.offset
    if committed is not None and committed.number is None and committed.start is not None:
        start = min(committed.start, start)
    return Pass(found.topic_id, None, start)

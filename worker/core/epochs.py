"""Epochs of the source: which changelog entries belong to the current reading.

A restart continues the committed epoch; a reset offset or a recreated source topic begins a new one. Each cache entry
names its epoch, and so does the metadata of the committed offset. One record on the changelog partition, the marker,
holds the chain of epochs and the offsets from which each one counts.

Every decision follows from committed data and the topic alone, never from a clock or from chance.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from worker.core.trace import EARLIEST_MS, LATEST_MS

MARKER_KEY: Final = b"passes"  # as 0.2.0 called the epochs
MARKER_VERSION: Final = 1

MAX_SEGMENTS: Final = 64
"""Longest chain. A partition has about 2000 entries, so an epoch is lost only if its offset moves within them often."""

MAX_EPOCH: Final = 10**18 - 1  # the greatest epoch number that fits the committed metadata

LAST_OFFSET: Final = 2**63 - 1
Offset = Annotated[int, Meta(ge=0, le=LAST_OFFSET)]
EpochNumber = Annotated[int, Meta(ge=0, le=MAX_EPOCH)]
StreamTime = Annotated[int, Meta(ge=EARLIEST_MS, le=LATEST_MS)]
"""Ranges of numbers in changelog records: offsets and anything bounded by one, epoch numbers, stream times (ms since
1970). A record with a number out of range is damaged or foreign, and is skipped."""

_METADATA: Final = re.compile(r"kp2:(-?[0-9]{1,18})?:([A-Za-z0-9_-]{22})?:([0-9]{1,18})?:([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class SourceEpoch:
    """An epoch of a source partition, as its entries and its committed metadata name it."""

    topic_id: str | None = None  # Kafka's, as its tools print it; None if the broker has no topic ids
    number: int | None = None  # None without an embedder: then no entries are read or written
    start: int = 0  # the source offset where it began

    def metadata(self, stream_time_ms: int | None) -> str:
        """Return the metadata to commit with the offset, at most 90 characters."""
        number, time = self.number, stream_time_ms
        return (
            f"kp2:{'' if time is None else time}:{self.topic_id or ''}:{'' if number is None else number}:{self.start}"
        )


NO_EPOCH: Final = SourceEpoch()  # the default epoch: nothing is known about the topic


@dataclass(frozen=True, slots=True)
class Committed:
    """The metadata of a committed offset."""

    stream_time_ms: int | None
    topic_id: str | None = None
    number: int | None = None
    start: int = 0


def committed_from(metadata: str) -> Committed | None:
    """Read committed metadata; return None if it is not ours. Kafka's tools leave it empty when they move an offset."""
    match = _METADATA.fullmatch(metadata)
    if match is None:
        return None
    time, topic_id, number, start = match.groups()
    committed = Committed(
        None if time is None else int(time), topic_id, None if number is None else int(number), int(start)
    )
    known = committed.stream_time_ms is None or EARLIEST_MS <= committed.stream_time_ms <= LATEST_MS
    return committed if known else None


class Segment(NamedTuple):
    """An epoch in a chain."""

    number: EpochNumber
    start: Offset  # the source offset where it began
    since: Offset  # the changelog's end when it began


Chain = tuple[Segment, ...]  # epochs with rising starts: each counts from its start to the next one's


class Marker(msgspec.Struct, frozen=True, array_like=True):
    """The record on the changelog partition that names the epochs."""

    version: int
    topic_id: Annotated[str, Meta(max_length=22)]  # the source topic's; "" if unknown
    chain: Annotated[Chain, Meta(max_length=MAX_SEGMENTS)]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Marker)

UNREADABLE: Final = Marker(MARKER_VERSION, "", ())
"""Replaces an unreadable marker (damaged, or of a later version): no epoch is known or inherited."""


def encode_marker(marker: Marker) -> bytes:
    """Return the marker's record value."""
    return _encoder.encode(marker)


def decode_marker(value: bytes) -> Marker:
    """Read a marker. Raises ValueError for anything not written by this version's `encode_marker`."""
    try:
        marker = _decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not the record of the epochs: {error}") from error
    if marker.version != MARKER_VERSION:
        raise ValueError(f"epochs of version {marker.version}, this worker reads version {MARKER_VERSION}")
    starts = [segment.start for segment in marker.chain]
    if starts != sorted(set(starts)):
        raise ValueError("the chain of epochs is out of order")
    return marker


def cut(chain: Chain, start: int) -> Chain:
    """Return the epochs that an epoch starting at an offset inherits: those that started below it."""
    return tuple(segment for segment in chain if segment.start < start)


def at_offset(chain: Chain, offset: int) -> Segment | None:
    """Return the epoch whose entries count at a source offset; None below the first."""
    for segment in reversed(chain):
        if segment.start <= offset:
            return segment
    return None


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """The committed position of a partition."""

    offset: int  # the next source offset to read
    has_offset: bool = True  # whether an offset is committed
    committed: Committed | None = None  # its metadata, if ours
    topic_id: str | None = None  # the current topic's
    recreated: bool = False  # whether the offset was committed for another topic of this name


@dataclass(frozen=True, slots=True)
class Resolved:
    """How a partition continues."""

    current: SourceEpoch
    chain: Chain  # decides which entries count
    begins: str | None = None  # why the epoch is new; None: the committed epoch continues

    def marker(self) -> Marker:
        """Return the marker of this chain."""
        return Marker(MARKER_VERSION, self.current.topic_id or "", self.chain)


def resolve(position: SourcePosition, marker: Marker | None, greatest: int, end: int) -> Resolved:
    """Continue the committed epoch, or begin a new one.

    `greatest`: the greatest epoch number on the changelog, 0 if there is none. `end`: the changelog's end, 0 if it is
    empty.

    A new epoch begins if the committed metadata is missing or not ours (somebody moved the offset), if no offset is
    committed, if an embedder is configured again, if the changelog is new, or if the source topic was recreated. It
    gets the next number (the least free one if `MAX_EPOCH` is taken) and inherits the entries below its start if they
    are of the same topic. Otherwise the committed epoch continues.
    """
    committed = None if position.recreated else position.committed
    base, foreign = _inherited(position, marker)
    if committed is not None and committed.start <= position.offset:
        if committed.number is not None and not end:
            start, why = position.offset, "the changelog is new"
        elif committed.number is not None:
            chain = cut(base, committed.start)
            same = [it for it in base if (it.number, it.start) == (committed.number, committed.start)]
            last = Segment(committed.number, committed.start, end)
            chain = _bounded((*chain, *(same or [last])))
            return Resolved(SourceEpoch(position.topic_id, committed.number, committed.start), chain)
        else:
            start, why = committed.start, "an embedder is configured again"
    else:
        start = position.offset
        why = "the committed offset was moved" if position.has_offset else "no offset is committed"
    if foreign:
        why = "the source topic was recreated"
    used = {greatest, 0 if committed is None else committed.number or 0, *(it.number for it in base)}
    number = 1 + max(used)
    if number > MAX_EPOCH:
        number = next(it for it in itertools.count(1) if it not in used)
    chain = _bounded((*cut(base, start), Segment(number, start, end)))
    return Resolved(SourceEpoch(position.topic_id, number, start), chain, why)


def _inherited(position: SourcePosition, marker: Marker | None) -> tuple[Chain, bool]:
    """Return the chain of epochs over this topic, and whether the marker belongs to another topic."""
    if position.recreated:
        return (), True
    known, now = "" if marker is None else marker.topic_id, position.topic_id
    if known and now and known != now:
        return (), True
    if not position.has_offset and not (known and known == now):
        return (), False  # Kafka deletes a deleted topic's offsets, so only equal ids prove that the topic is the same
    return () if marker is None else marker.chain, False


def _bounded(chain: Chain) -> Chain:
    return chain[-MAX_SEGMENTS:]


def without_embedder(position: SourcePosition) -> SourceEpoch:
    """Return the epoch of a worker without an embedder. Configuring one again begins a new epoch."""
    committed = None if position.recreated else position.committed
    start = position.offset
    if committed is not None and committed.number is None:
        start = min(committed.start, start)
    return SourceEpoch(position.topic_id, None, start)

"""The records of the changelog topic: their kinds, their keys, the bytes of cache entries, and when each is deleted.

The topic is compacted. A key names an epoch, the number of slots (capacity + slack), and a slot: sequence %
slots. Within an epoch and a capacity, a slot is overwritten only when no restart can need its old entry, as at most
`slack` traces are past the committed offset (stream/partition.py). A new epoch or capacity has new keys: each former
entry is deleted by a tombstone once it is not among the newest `slots`. So at most `slots` entries are live.
"""

import enum
import hashlib
import math
import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from worker.core.novelty import CACHED_ID_LENGTH, LENGTH_TOLERANCE, Vector
from worker.core.records import IdentityKey, Row
from worker.core.trace import EARLIEST_MS, LATEST_MS

MAX_EPOCH: Final = 10**18 - 1  # the greatest epoch number that fits the committed metadata

LAST_OFFSET: Final = 2**63 - 1
Offset = Annotated[int, Meta(ge=0, le=LAST_OFFSET)]
EpochNumber = Annotated[int, Meta(ge=0, le=MAX_EPOCH)]
StreamTime = Annotated[int, Meta(ge=EARLIEST_MS, le=LATEST_MS)]
"""Ranges of numbers in changelog records: offsets and anything bounded by one, epoch numbers, stream times (ms since
1970). A record with a number out of range is damaged or foreign, and is skipped."""


# -- the kinds of records

VERSION: Final = 1
"""Raise this when a field changes its meaning: a restore skips entries of another version. Fields added at the end need
no new version, as an older worker ignores them."""

SLACK: Final = 1024
"""Most traces of a partition that may be past the committed offset, and the spare slots that cover them. A slot costs
1.7 kB of changelog; with fewer slots, traces wait for a commit. At 1 ms per trace they cover a commit of one second."""

HASH_BYTES: Final = 16
MAX_DIMENSIONS: Final = 16_384  # more than any embedder's vector has

PROBE_DISTANCE: Final = 0.05
"""Greatest distance between the vector of a fixed text and the kept one, for the same model: bf16 differs from fp32 by
up to .019, and by .017 from batch to batch; two texts that are nine tenths equal differ by .1."""

MARKER_KEY: Final = b"passes"  # as 0.2.0 called the epochs
RECORD_PREFIX: Final = b"record:"  # and the hash of agent and domain (track_record.py)
_PROBE_PREFIX: Final = b"probe:"


class Kind(enum.Enum):
    """The kinds of changelog records."""

    ENTRY = enum.auto()  # of the cache
    MARKER = enum.auto()  # the epochs
    TRACK_RECORD = enum.auto()  # an agent's verdicts in a domain
    PROBE = enum.auto()  # a vector that identifies an embedding service's model
    OBSOLETE = enum.auto()  # a request to forget, which earlier builds kept; the first commit deletes it


_PREFIXES: Final = {RECORD_PREFIX: Kind.TRACK_RECORD, _PROBE_PREFIX: Kind.PROBE, b"forgotten:": Kind.OBSOLETE}


def kind_of(key: bytes | None) -> Kind:
    """Return a record's kind. A key of no known kind is damaged, or of a later release: its value may be an entry."""
    if key is None or key[:1].isdigit():
        return Kind.ENTRY
    if key == MARKER_KEY:
        return Kind.MARKER
    return next((kind for prefix, kind in _PREFIXES.items() if key.startswith(prefix)), Kind.ENTRY)


class CorruptRecord(ValueError):
    """The bytes are not a record of this version."""


class OlderEntry(CorruptRecord):
    """The bytes are an entry of 0.1.0, which names no epoch; the first commit deletes it."""


class _Versioned(Protocol):
    @property
    def version(self) -> int: ...


AnyRecord = TypeVar("AnyRecord", bound=_Versioned)


def unpack(decoder: msgspec.msgpack.Decoder[AnyRecord], value: bytes, version: int, what: str) -> AnyRecord:
    """Read a record of this version; `what` names it. Raises CorruptRecord."""
    try:
        record = decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptRecord(f"not {what}: {error}") from error
    if record.version != version:
        raise CorruptRecord(f"{what} of version {record.version}, this worker reads version {version}")
    return record


# -- entries of the cache


CachedId = Annotated[str, Meta(max_length=CACHED_ID_LENGTH)]


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One embedding and its origin."""

    version: int
    sequence: Offset
    source_offset: Offset
    stream_time_ms: StreamTime  # the partition's, at insertion
    trace_id: CachedId
    model: IdentityKey
    vector: Annotated[bytes, Meta(min_length=4, max_length=4 * MAX_DIMENSIONS)]  # <f4, unit length (or zero)
    epoch: EpochNumber | None  # None: of a probe
    text_hash: bytes  # of the embedded text (`text_hash`); empty: of a probe
    agent_id: CachedId = ""  # an entry of 0.2.0 has none

    def array(self) -> Vector:
        """Return the vector, shape (dimensions,)."""
        return np.frombuffer(self.vector, dtype="<f4")


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Entry)


def slot_key(sequence: int, capacity: int, epoch: int = 0) -> bytes:
    """Return an entry's record key: epoch, number of slots, and slot, in decimal digits."""
    slots = number_of_slots(capacity)
    return b"%d:%d:%d" % (epoch, slots, sequence % slots)


def number_of_slots(capacity: int) -> int:
    """Return the number of slots of a cache, the most entries that are live on the changelog."""
    return capacity + SLACK


def text_hash(text: str) -> bytes:
    """Return the 16-byte hash that binds an entry to its embedded text."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES).digest()


def encode(
    *,
    sequence: int,
    source_offset: int,
    stream_time_ms: int,
    trace_id: str,
    model: str,
    vector: Vector,
    epoch: int | None = None,
    text_hash: bytes = b"",
    agent_id: str = "",
) -> bytes:
    """Return the record value of an entry."""
    raw = np.ascontiguousarray(vector, dtype="<f4").tobytes()
    return _encoder.encode(
        Entry(VERSION, sequence, source_offset, stream_time_ms, trace_id, model, raw, epoch, text_hash, agent_id)
    )


def decode(value: bytes | None) -> Entry:
    """Read an entry. Raises CorruptRecord for anything that is none of this version."""
    entry = decode_all([value])[0]
    if isinstance(entry, CorruptRecord):
        raise entry
    return entry


def decode_all(values: Iterable[bytes | None]) -> list[Entry | CorruptRecord]:
    """Decode all values, ten times as fast as one by one; an error takes its entry's place."""
    decoded: list[Entry | CorruptRecord] = []
    entries: dict[int, list[tuple[int, Entry]]] = {}  # with their places in `decoded`, by the size of the vector
    for place, value in enumerate(values):
        try:
            entry = _decode(value)
        except CorruptRecord as error:
            decoded.append(error)
        else:
            decoded.append(entry)
            entries.setdefault(len(entry.vector), []).append((place, entry))
    for equals in entries.values():
        rows = np.frombuffer(b"".join([entry.vector for _, entry in equals]), dtype="<f4").reshape(len(equals), -1)
        with np.errstate(over="ignore", invalid="ignore"):
            squares = np.einsum("ij,ij->i", rows, rows)
        for row in np.flatnonzero(~(np.abs(squares - 1.0) <= LENGTH_TOLERANCE)):
            place, entry = equals[row]
            try:
                _check_length(entry)
            except CorruptRecord as error:
                decoded[place] = error
    return decoded


def _check_length(entry: Entry) -> None:
    """Raise CorruptRecord if the vector's length is neither 0 nor about 1, or not finite."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        length = float(np.linalg.norm(entry.array().astype(np.float64)))
    if length != 0.0 and not abs(length - 1.0) <= LENGTH_TOLERANCE:
        raise CorruptRecord(f"the vector has the length {length:.6g} instead of 1 (or 0)")


def _decode(value: bytes | None) -> Entry:
    if not value:
        raise CorruptRecord("empty value")
    if value.startswith(b"\x97\x01"):  # an array of seven, version 1
        raise OlderEntry("an entry of 0.1.0")
    entry = unpack(_decoder, value, VERSION, "a changelog entry")
    if len(entry.vector) % 4 or len(entry.text_hash) not in (0, HASH_BYTES):
        raise CorruptRecord("size of the vector or of the text's hash out of range")
    return entry


# -- epochs of the source
#
# A restart continues the committed epoch; a reset offset or a recreated source topic begins a new one. Each entry names
# its epoch, and so does the metadata of the committed offset. One record, the marker, holds the chain of epochs and the
# offsets from which each one counts.

MARKER_VERSION: Final = 1

MAX_SEGMENTS: Final = 64
"""Longest chain. A partition has about 2000 entries, so an epoch is lost only if its offset moves within them often."""

_METADATA: Final = re.compile(r"kp2:(-?[0-9]{1,18})?:([A-Za-z0-9_-]{22})?:([0-9]{1,18})?:([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class SourceEpoch:
    """An epoch of a source partition, as its entries and its committed metadata name it."""

    topic_id: str | None = None  # Kafka's, as its tools print it; None if the broker has no topic ids
    number: int | None = None  # None without an embedder: then no entries are read or written
    start: int = 0  # the source offset where it began

    def metadata(self, stream_time_ms: int | None) -> str:
        """Return the metadata to commit with the offset, at most 90 characters."""
        time = "" if stream_time_ms is None else stream_time_ms
        return f"kp2:{time}:{self.topic_id or ''}:{'' if self.number is None else self.number}:{self.start}"


NO_EPOCH: Final = SourceEpoch()  # the default epoch: nothing is known about the topic


@dataclass(frozen=True, slots=True)
class Committed(SourceEpoch):
    """The metadata of a committed offset."""

    stream_time_ms: int | None = None


def committed_from(metadata: str) -> Committed | None:
    """Read committed metadata; return None if it is not ours. Kafka's tools leave it empty when they move an offset."""
    match = _METADATA.fullmatch(metadata)
    if match is None:
        return None
    text, topic_id, number, start = match.groups()
    time = None if text is None else int(text)
    if time is not None and not EARLIEST_MS <= time <= LATEST_MS:
        return None
    return Committed(topic_id, None if number is None else int(number), int(start), time)


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


_marker_decoder = msgspec.msgpack.Decoder(Marker)

UNREADABLE: Final = Marker(MARKER_VERSION, "", ())
"""Replaces an unreadable marker (damaged, or of a later version): no epoch is known or inherited."""


def encode_marker(marker: Marker) -> bytes:
    """Return the marker's record value."""
    return _encoder.encode(marker)


def decode_marker(value: bytes) -> Marker:
    """Read a marker. Raises CorruptRecord for anything not written by this version's `encode_marker`."""
    marker = unpack(_marker_decoder, value, MARKER_VERSION, "the record of the epochs")
    starts = [segment.start for segment in marker.chain]
    if starts != sorted(set(starts)):
        raise CorruptRecord("the chain of epochs is out of order")
    return marker


# -- probes, and housekeeping


def probe_distance(kept: Vector, now: Vector) -> float:
    """Return the distance between two unit vectors, 0 to 2; infinity if their dimensions differ."""
    return float(np.linalg.norm(kept.astype(np.float64) - now)) if kept.shape == now.shape else math.inf


class OtherModelError(Exception):
    """The embedding service's model is not the one that made the entries; the message says what to do."""


class Probes(NamedTuple):
    """The vectors that an embedding service's model gives for a few fixed texts: they identify the model.

    Each is kept as an entry with its own key, `probe:HASH OF THE NAME:NUMBER`, past all offsets.
    """

    name: str  # of the model (KP_MODEL)
    model: str  # the key of the embedder's identity
    vectors: tuple[Vector, ...]

    def keys(self) -> list[bytes]:
        """Return the record keys, in the order of the vectors."""
        name = hashlib.blake2b(self.name.encode(), digest_size=8).hexdigest().encode()
        return [b"%s%s:%d" % (_PROBE_PREFIX, name, number) for number in range(len(self.vectors))]

    def row(self, key: bytes, vector: Vector) -> Row:
        """Return the record that keeps a vector."""
        value = encode(
            sequence=0, source_offset=LAST_OFFSET, stream_time_ms=0, trace_id="", model=self.model, vector=vector
        )
        return key, value

    def check(self, vector: Vector, value: bytes) -> None:
        """Compare a vector with the record that keeps it. Raises OtherModelError, CorruptRecord."""
        kept = decode(value).array()
        distance = probe_distance(kept, vector)
        if distance <= PROBE_DISTANCE:
            return
        change = f"has moved by {distance:.3g} (at most {PROBE_DISTANCE:g})"
        if math.isinf(distance):
            change = f"had {len(kept)} dimensions, and has {len(vector)}"
        raise OtherModelError(
            f"the service's model {self.name} is not the one that made the cache: the vector of a fixed text {change}. "
            "Bring the former model back, or give the new one its own name (KP_MODEL), or a new "
            "KP_CHANGELOG_TOPIC: the caches then start empty (docs/models.md)"
        )


class Housekeeping:
    """The rows that accompany a partition's entries: they keep the changelog bounded and name the epochs that count.

    `leaving`: entries whose keys are no longer written; each is deleted when an entry of that sequence is written.
    `ahead`: entries past the committed offset. Such an entry is written again, or deleted with its offset if its record
    becomes a dead letter.
    """

    def __init__(
        self,
        first: Sequence[Row] = (),  # rows of the first commit, before all entries
        leaving: Iterable[tuple[int, bytes]] = (),  # (sequence, key)
        ahead: Iterable[tuple[int, bytes]] = (),  # (source offset, key)
    ) -> None:
        self._first = [*first]
        self._leaving = deque(sorted(leaving))
        self._ahead = deque(sorted(ahead))
        self._again: set[bytes] = set()

    def rows(self, entries: list[Row], newest: int | None, next_offset: int) -> list[Row]:
        """Return the rows of the next batch: its entries and their housekeeping.

        `entries` have consecutive sequences, up to `newest` (None: there is none), with track records in their places.
        `next_offset` is committed with them.

        The order makes the rows safe even without a transaction, wherever the process dies:
         1. tombstones of entries that count in no epoch, and the marker. Both follow from committed data, so the next
            restore has the same result;
         2. the entries, each preceded by the tombstone that is due with it. The deleted entry is `slots` behind: no
            cache of an offset up to `slack` traces back needs it, and it is the oldest, so no gap opens;
         3. tombstones of entries that were ahead and whose records were not scored again.
        """
        first, self._first = self._first, []
        if not (first or self._leaving or self._ahead):
            return entries
        rows = first
        sequence = -1 if newest is None else newest - sum(map(_writes_entry, entries))
        for entry in entries:
            sequence += _writes_entry(entry)
            while self._leaving and self._leaving[0][0] <= sequence:
                rows.append((self._leaving.popleft()[1], None))
            rows.append(entry)
        if self._ahead:
            self._again.update(key for key, _ in entries)
            while self._ahead and self._ahead[0][0] < next_offset:
                key = self._ahead.popleft()[1]
                if key not in self._again:
                    rows.append((key, None))
            if not self._ahead:
                self._again.clear()
        return rows


def _writes_entry(row: Row) -> bool:
    return row[1] is not None and kind_of(row[0]) is Kind.ENTRY

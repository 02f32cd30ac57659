"""Cache entries on the changelog topic: their keys and bytes, which of them count, and which must be deleted.

The topic is compacted. A key names a pass (passes.py), the number of slots (capacity + slack), and a slot: sequence %
slots. Within a pass and a capacity, a slot is overwritten only when no restart can need its old entry, as at most
`slack` traces are past the committed offset (stream/partition.py). A new pass or capacity has new keys: each entry that
it found is deleted by a tombstone once it is not among the newest `slots`. So at most `slots` entries are live.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from worker.core.novelty import CACHED_ID_LENGTH, LENGTH_TOLERANCE, Vector
from worker.core.passes import (
    LAST_OFFSET,
    MARKER_KEY,
    NO_PASS,
    UNREADABLE,
    Chain,
    Found,
    Marker,
    Offset,
    Pass,
    PassNumber,
    StreamTime,
    at_offset,
    decode_marker,
    encode_marker,
    resolve,
)
from worker.core.records import Fault, IdentityKey, Row
from worker.core.track_record import RECORD_PREFIX, Stored, read_stored

VERSION: Final = 1
"""Raise this when a field changes its meaning: a restore skips entries of another version. Fields added at the end need
no new version, as an older worker ignores them."""

SLACK: Final = 1024
"""Most traces of a partition that may be past the committed offset, and the spare slots that cover them. A slot costs
1.7 kB of changelog; with fewer slots, traces wait for a commit. At 1 ms per trace they cover a commit of one second."""

HASH_BYTES: Final = 16

DECODED: Final = 1024  # values that a restore decodes at once
MAX_DIMENSIONS: Final = 16_384  # more than any embedder's vector has

PROBE_PREFIX: Final = b"probe:"

OBSOLETE_PREFIX: Final = b"forgotten:"  # requests to forget, which earlier builds kept; the first commit deletes them

PROBE_DISTANCE: Final = 0.05
"""Greatest distance between the vector of a fixed text and the kept one, for the same model: bf16 differs from fp32 by
up to .019, and by .017 from batch to batch; two texts that are nine tenths equal differ by .1."""

_KEY: Final = re.compile(rb"([0-9]+:[0-9]+:)?[0-9]+")  # 0.1.0: only the slot
_OF_0_1_0: Final = b"\x97\x01"  # its entries: an array of seven, version 1


class CorruptEntry(ValueError):
    """The bytes are not an entry of this version."""


class OlderEntry(CorruptEntry):
    """The bytes are an entry of 0.1.0, which names no pass; the first commit deletes it."""


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
    pass_number: PassNumber | None  # None: of a probe
    text_hash: bytes  # of the embedded text (`text_hash`); empty: of a probe
    agent_id: CachedId = ""  # an entry of 0.2.0 has none

    def array(self) -> Vector:
        """Return the vector, shape (dimensions,)."""
        return np.frombuffer(self.vector, dtype="<f4")


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Entry)


def slot_key(sequence: int, capacity: int, pass_number: int = 0) -> bytes:
    """Return an entry's record key: pass, number of slots, and slot, in decimal digits."""
    slots = capacity + SLACK
    return b"%d:%d:%d" % (pass_number, slots, sequence % slots)


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
    pass_number: int | None = None,
    text_hash: bytes = b"",
    agent_id: str = "",
) -> bytes:
    """Return the record value of an entry."""
    raw = np.ascontiguousarray(vector, dtype="<f4").tobytes()
    return _encoder.encode(
        Entry(VERSION, sequence, source_offset, stream_time_ms, trace_id, model, raw, pass_number, text_hash, agent_id)
    )


def decode(value: bytes | None) -> Entry:
    """Read an entry. Raises CorruptEntry for anything that is none of this version."""
    entry = _decode(value)
    vector = entry.array()
    with np.errstate(over="ignore", invalid="ignore"):
        square = float(np.dot(vector, vector))
    if not abs(square - 1.0) <= LENGTH_TOLERANCE:
        _check_length(entry)
    return entry


def decode_all(values: Iterable[bytes]) -> list[Entry | CorruptEntry]:
    """Decode all values, ten times as fast as one by one; an error takes its entry's place."""
    found: list[Entry | CorruptEntry] = []
    entries: dict[int, list[tuple[int, Entry]]] = {}  # with their places in `found`, by the size of the vector
    for place, value in enumerate(values):
        try:
            entry = _decode(value)
        except CorruptEntry as error:
            found.append(error)
        else:
            found.append(entry)
            entries.setdefault(len(entry.vector), []).append((place, entry))
    for equals in entries.values():
        rows = np.frombuffer(b"".join([entry.vector for _, entry in equals]), dtype="<f4").reshape(len(equals), -1)
        with np.errstate(over="ignore", invalid="ignore"):
            squares = np.einsum("ij,ij->i", rows, rows)
        for row in np.flatnonzero(~(np.abs(squares - 1.0) <= LENGTH_TOLERANCE)):
            place, entry = equals[row]
            try:
                _check_length(entry)
            except CorruptEntry as error:
                found[place] = error
    return found


def _check_length(entry: Entry) -> None:
    """Raise CorruptEntry if the vector's length is neither 0 nor about 1, or not finite."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        length = float(np.linalg.norm(entry.array().astype(np.float64)))
    if length != 0.0 and not abs(length - 1.0) <= LENGTH_TOLERANCE:
        raise CorruptEntry(f"the vector has the length {length:.6g} instead of 1 (or 0)")


def _decode(value: bytes | None) -> Entry:
    if not value:
        raise CorruptEntry("empty value")
    try:
        entry = _decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        kind = OlderEntry if value.startswith(_OF_0_1_0) else CorruptEntry
        raise kind(f"not a changelog entry: {error}") from error
    if entry.version != VERSION:
        raise CorruptEntry(f"entry version {entry.version}, this worker reads version {VERSION}")
    if len(entry.vector) % 4 or len(entry.text_hash) not in (0, HASH_BYTES):
        raise CorruptEntry("size of the vector or of the text's hash out of range")
    return entry


def impossible(entry: Entry, where: Found) -> str | None:
    """Return why no worker of this model can have written the entry, although each field is valid; None if one can.

    `where`: where its partition continues.
    """
    if entry.sequence > entry.source_offset:  # each entry has its own offset
        return f"sequence {entry.sequence} at source offset {entry.source_offset}"
    if where.committed is not None and entry.source_offset < where.offset:
        latest = where.committed.stream_time_ms
        if latest is not None and entry.stream_time_ms > latest:
            return f"stream time {entry.stream_time_ms}, later than {latest}, which was committed after it"
    return None


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
        return [b"%s%s:%d" % (PROBE_PREFIX, name, number) for number in range(len(self.vectors))]

    def row(self, key: bytes, vector: Vector) -> Row:
        """Return the record that keeps a vector."""
        value = encode(
            sequence=0, source_offset=LAST_OFFSET, stream_time_ms=0, trace_id="", model=self.model, vector=vector
        )
        return key, value

    def check(self, key: bytes, value: bytes) -> None:
        """Compare a kept record with its key's vector, if there is one. Raises OtherModelError, CorruptEntry."""
        vector = dict(zip(self.keys(), self.vectors, strict=True)).get(key)
        if vector is None:
            return
        kept = decode(value).array()
        distance = probe_distance(kept, vector)
        if distance <= PROBE_DISTANCE:
            return
        told = f"has moved by {distance:.3g} (at most {PROBE_DISTANCE:g})"
        if math.isinf(distance):
            told = f"had {len(kept)} dimensions, and has {len(vector)}"
        raise OtherModelError(
            f"the service's model {self.name} is not the one that made the cache: the vector of a fixed text {told}. "
            "Bring the former model back, or give the new one its own name (KP_MODEL), or a new "
            "KP_CHANGELOG_TOPIC: the caches then start empty (docs/models.md)"
        )


class Housekeeping:
    """The rows that accompany a partition's entries: they keep the changelog bounded and name the passes that count.

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
        self._first = list(first)
        self._leaving = deque(sorted(leaving))
        self._ahead = deque(sorted(ahead))
        self._again: set[bytes] = set()

    def first(self, rows: Iterable[Row]) -> None:
        """Add rows of the first commit."""
        self._first += rows

    def rows(self, entries: list[Row], newest: int | None, next_offset: int) -> list[Row]:
        """Return the rows of the next batch: its entries and their housekeeping.

        `entries` have consecutive sequences, up to `newest` (None: there is none), with track records in their places.
        `next_offset` is committed with them.

        The order makes the rows safe even without a transaction, wherever the process dies:
         1. tombstones of entries that count in no pass, and the marker. Both follow from committed data, so the next
            restore has the same result;
         2. the entries, each preceded by the tombstone that is due with it. The deleted entry is `slots` behind: no
            cache of an offset up to `slack` traces back needs it, and it is the oldest, so no gap opens;
         3. tombstones of entries that were ahead and whose records were not scored again.
        """
        first, self._first = self._first, []
        if not (first or self._leaving or self._ahead):
            return entries
        rows = first
        sequence = -1 if newest is None else newest - sum(map(_is_entry, entries))
        for entry in entries:
            sequence += _is_entry(entry)
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


@dataclass(slots=True)
class Restored:
    """The state of a partition as restored from its changelog."""

    entries: list[Entry] = field(default_factory=list)
    """The cache: entries of committed traces in the passes that count, rising in sequence and offset."""
    replay: dict[int, Entry] = field(default_factory=dict)
    """Entries at or past the committed offset, by source offset, for traces that are read again with the same text."""
    skipped: Counter[str] = field(default_factory=Counter)  # by cause: other_model, corrupt, older, "model NAME"
    current: Pass = NO_PASS  # the pass that continues or begins
    housekeeping: Housekeeping = field(default_factory=Housekeeping)
    overridden: int = 0  # entries of this model whose pass no longer counts
    begins: str | None = None  # why the pass is new; None: the committed pass continues
    problem: str = ""  # the first unreadable record, and why
    records: list[Stored] = field(default_factory=list)  # the track records, as stored

    def cache(self) -> list[tuple[int, int, str, Vector]]:
        """Return the cache's entries as PartitionScorer.restore expects them."""
        return [(it.sequence, it.stream_time_ms, it.trace_id, it.array()) for it in self.entries]


_Live = tuple[bytes, Entry | None]
"""A live record with an entry's key; None: its value is unreadable."""


class Log:
    """The live records of one changelog partition: the last one of each key, as compaction leaves them."""

    def __init__(self) -> None:
        self._values: dict[bytes | None, tuple[int, bytes]] = {}
        self._faults: list[tuple[int, Fault]] = []
        self.end = 0

    def apply(self, key: bytes | None, value: bytes | None, position: int) -> None:
        """Apply the next record, in the order of the log; `position` is its offset there."""
        self._values.pop(key, None)  # a key's place in the order is that of its last write
        if value is not None:
            self._values[key] = position, value
        self.end = position + 1

    def skip(self, fault: Fault, position: int) -> None:
        """Note that the next record, or several up to `position`, cannot be read; they change nothing."""
        self._faults.append((position, fault))
        self.end = position + 1

    def live(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield key and value of the live records, in the order of writing."""
        for key, (_, value) in self._values.items():
            if key is not None:
                yield key, value

    def faults(self) -> list[str]:
        """Return the reasons why records could not be read."""
        return [fault.message for _, fault in self._faults]

    def latest(self, committed: int) -> Entry | None:
        """Return the last-written entry below the committed source offset; None if there is none."""
        for _, value in reversed(self._values.values()):
            try:
                entry = decode(value)
            except CorruptEntry:
                continue  # or another kind of record, such as the marker; probes are past all offsets
            if entry.source_offset < committed:
                return entry
        return None

    def restore(
        self, found: Found, model: str, dimensions: int, capacity: int, probes: Probes | None = None
    ) -> Restored:
        """Decide which pass continues, which entries count, and which must be deleted.

        An entry counts if its source offset is below the committed one, its model is ours, and its pass counts at its
        offset. `probes`: those of an embedding service's model; raises OtherModelError if different ones are kept.
        """
        result = Restored()
        self.restore_records(result)
        marker = self._marker(result)
        sorting = _Sorted(dead=[key for key, _ in self.live() if key.startswith(OBSOLETE_PREFIX)])
        live = self._entries(result, sorting, found, model)
        result.skipped.update("older" for _ in sorting.dead)
        greatest = max((entry.pass_number or 0 for _, entry in live if entry is not None), default=0)
        resolved = resolve(found, marker, greatest, self.end)
        result.current, result.begins = resolved.current, resolved.begins
        _sort(result, sorting, live, resolved.chain, found.offset, model, dimensions)
        slots = capacity + SLACK
        own = b"%d:%d:" % (resolved.current.number or 0, slots)
        first, leaving = _select(result, sorting, own, slots)
        if resolved.marker() != marker:
            first.append((MARKER_KEY, encode_marker(resolved.marker())))
        if probes is not None:
            first += self._missing(probes, result)
        result.housekeeping = Housekeeping(first, leaving, sorting.ahead)
        return result

    def restore_records(self, result: Restored) -> None:
        """Restore the track records: all that there is without an embedder."""
        for position, fault in self._faults:
            _corrupt(result, position, fault.message)
        for key, (position, value) in self._values.items():
            if key is not None and key.startswith(RECORD_PREFIX):
                try:
                    result.records.append(read_stored(key, value))
                except ValueError as error:
                    _corrupt(result, position, str(error))

    def _marker(self, result: Restored) -> Marker | None:
        if MARKER_KEY not in self._values:
            return None
        position, value = self._values[MARKER_KEY]
        try:
            return decode_marker(value)
        except ValueError as error:
            _corrupt(result, position, str(error))
            return UNREADABLE

    def _missing(self, probes: Probes, result: Restored) -> Iterator[Row]:
        """Yield the rows of probes that are not kept yet. Raises OtherModelError if a kept one differs."""
        for key, vector in zip(probes.keys(), probes.vectors, strict=True):
            position, value = self._values.get(key, (0, None))
            if value is None:
                yield probes.row(key, vector)
                continue
            try:
                probes.check(key, value)
            except CorruptEntry as error:
                _corrupt(result, position, str(error))
                yield probes.row(key, vector)

    def _entries(self, result: Restored, sorting: _Sorted, where: Found, model: str) -> list[_Live]:
        live: list[_Live] = []
        records = [(key, position, value) for key, (position, value) in self._values.items() if _may_be_entry(key)]
        for start in range(0, len(records), DECODED):
            part = records[start : start + DECODED]
            for (key, position, _), found in zip(part, decode_all(value for _, _, value in part), strict=True):
                if isinstance(found, OlderEntry) and key is not None:
                    sorting.dead.append(key)
                    continue
                entry, problem = (None, str(found)) if isinstance(found, CorruptEntry) else (found, None)
                if entry is not None and entry.model == model:
                    problem = impossible(entry, where)
                if problem is not None:
                    _corrupt(result, position, problem)
                    entry = None
                if key is not None and _KEY.fullmatch(key):  # keep other records: a later release may have written them
                    live.append((key, entry))
        return live


def _may_be_entry(key: bytes | None) -> bool:
    return key is None or (key != MARKER_KEY and not key.startswith((OBSOLETE_PREFIX, PROBE_PREFIX, RECORD_PREFIX)))


def _is_entry(row: Row) -> bool:
    """Return whether a row writes an entry, and is no tombstone or track record."""
    return row[1] is not None and not row[0].startswith(RECORD_PREFIX)


def _corrupt(result: Restored, position: int, problem: str) -> None:
    result.skipped["corrupt"] += 1
    result.problem = result.problem or f"offset {position}: {problem}"


@dataclass(slots=True)
class _Sorted:
    counting: list[tuple[bytes, Entry]] = field(default_factory=list)
    strange: list[bytes] = field(default_factory=list)  # of other models, or unreadable: kept while slots are free
    ahead: list[tuple[int, bytes]] = field(default_factory=list)  # (source offset, key), from the committed offset on
    dead: list[bytes] = field(default_factory=list)


def _sort(
    result: Restored,
    found: _Sorted,
    live: Sequence[_Live],
    chain: Chain,
    committed: int,
    model: str,
    dimensions: int,
) -> None:
    """Sort the live records; put the counts of skipped ones, and the entries that can be replayed, into `result`."""
    for key, entry in live:
        if entry is None:
            found.strange.append(key)
            continue
        ours = entry.model == model and len(entry.vector) == 4 * dimensions
        if not ours:
            result.skipped["other_model"] += 1
            result.skipped[f"model {entry.model}"] += 1
        segment = at_offset(chain, entry.source_offset)
        if ours and entry.source_offset >= committed:
            result.replay[entry.source_offset] = entry
        if segment is None or entry.pass_number != segment.number:
            found.dead.append(key)
            result.overridden += ours
        elif not ours:
            found.strange.append(key)
        elif entry.source_offset < committed:
            found.counting.append((key, entry))
        else:
            found.ahead.append((entry.source_offset, key))


def _select(result: Restored, found: _Sorted, own: bytes, slots: int) -> tuple[list[Row], list[tuple[int, bytes]]]:
    """Put the cache's entries into `result`; return the tombstones due at once, and those due later (Housekeeping).

    `own`: the prefix of the keys of this pass and capacity.
    """
    dead = found.dead
    chosen = one_pass([entry for _, entry in found.counting])
    newest = chosen[-1].sequence if chosen else -1
    result.entries = [entry for entry in chosen if entry.sequence > newest - slots]
    stays = {id(entry) for entry in result.entries}
    leaving = [(newest + slots, key) for key in found.strange if not key.startswith(own)]
    for key, entry in found.counting:
        if id(entry) not in stays:
            dead.append(key)
        elif not key.startswith(own):
            leaving.append((entry.sequence + slots, key))
    return [(key, None) for key in dead], leaving


def one_pass(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries of the latest pass over the source, rising in sequence and offset.

    `entries`: those of committed traces in the passes that count, in the order of the log. With at-least-once delivery,
    a worker that was frozen writes older entries after newer ones. Within a pass, sequence and offset rise together, so
    a comparison with the entry of the greatest source offset, which was committed last, reveals them.
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

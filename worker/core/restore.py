"""What a partition restores from its changelog: which records count, and which must be deleted.

`Log` has the live records of one partition. `restore` decides from them and from the committed offset alone.
"""

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from worker.core.changelog import (
    MARKER_KEY,
    MARKER_VERSION,
    MAX_EPOCH,
    MAX_SEGMENTS,
    UNREADABLE,
    Chain,
    Committed,
    CorruptRecord,
    Entry,
    Housekeeping,
    Kind,
    Marker,
    OlderEntry,
    Probes,
    Segment,
    SourceEpoch,
    decode,
    decode_all,
    decode_marker,
    encode_marker,
    kind_of,
    number_of_slots,
)
from worker.core.novelty import Vector
from worker.core.records import Fault, Row
from worker.core.track_record import TrackRecord, read_record

# -- which epoch continues


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

    @property
    def stream_time_ms(self) -> int | None:
        """The stream time that was committed with the offset; None if it is not known."""
        return None if self.committed is None else self.committed.stream_time_ms


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
            chain = (*chain, *(same or [last]))[-MAX_SEGMENTS:]
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
    chain = (*cut(base, start), Segment(number, start, end))[-MAX_SEGMENTS:]
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


def without_embedder(position: SourcePosition) -> SourceEpoch:
    """Return the epoch of a worker without an embedder. Configuring one again begins a new epoch."""
    committed = None if position.recreated else position.committed
    start = position.offset
    if committed is not None and committed.number is None:
        start = min(committed.start, start)
    return SourceEpoch(position.topic_id, None, start)


# -- which records count

_ENTRY_KEY = re.compile(rb"([0-9]+:[0-9]+:)?[0-9]+")  # 0.1.0: only the slot

Value = TypeVar("Value")


class Live(NamedTuple):
    """A live record."""

    key: bytes | None
    position: int  # its offset on the changelog
    value: bytes

    def damage(self, problem: object) -> str:
        """Return where and why the record cannot be used."""
        return f"offset {self.position}: {problem}"


class Log:
    """The live records of one changelog partition: the last one of each key, as compaction leaves them."""

    def __init__(self) -> None:
        self._values: dict[bytes | None, tuple[int, bytes]] = {}
        self.faults: list[str] = []  # where and why records could not be read
        self.end = 0

    def apply(self, key: bytes | None, value: bytes | None, position: int) -> None:
        """Apply the next record, in the order of the log; `position` is its offset there."""
        self._values.pop(key, None)  # a key's place in the order is that of its last write
        if value is not None:
            self._values[key] = position, value
        self.end = position + 1

    def skip(self, fault: Fault, position: int) -> None:
        """Note that the next record, or several up to `position`, cannot be read; they change nothing."""
        self.faults.append(f"offset {position}: {fault.message}")
        self.end = position + 1

    def clear(self) -> None:
        """Drop the live records: their values need as much memory as what is restored from them."""
        self._values.clear()

    def live(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield key and value of the live records, in the order of writing."""
        for key, (_, value) in self._values.items():
            if key is not None:
                yield key, value

    def by_kind(self) -> Mapping[Kind, Sequence[Live]]:
        """Return the live records of each kind, in the order of writing."""
        kinds: dict[Kind, list[Live]] = defaultdict(list)
        for key, (position, value) in self._values.items():
            kinds[kind_of(key)].append(Live(key, position, value))
        return kinds

    def latest(self, committed: int) -> Entry | None:
        """Return the last-written entry below the committed source offset; None if there is none."""
        for key, (_, value) in reversed(self._values.items()):
            if kind_of(key) is not Kind.ENTRY:
                continue
            try:
                entry = decode(value)
            except CorruptRecord:
                continue
            if entry.source_offset < committed:
                return entry
        return None


class ModelCache(NamedTuple):
    """The cache that a worker keeps."""

    model: str  # the key of the embedder's identity
    dimensions: int
    capacity: int
    probes: Probes | None = None  # of an embedding service's model


@dataclass(frozen=True, slots=True)
class Report:
    """What the log and the metrics say of a restore."""

    current: SourceEpoch  # the epoch that continues or begins
    begins: str | None = None  # why the epoch is new; None: the committed epoch continues
    entries: int = 0  # that the cache may need
    overridden: int = 0  # entries of this model whose epoch no longer counts
    skipped: Counter[str] = field(default_factory=Counter)  # by cause: other_model, corrupt, older, "model NAME"
    problem: str = ""  # the first damaged record, and why
    ahead: int | None = None
    """The greatest source offset of an entry past the committed offset, in the epoch that continues; None: no such one.
    Only at least once may there be any: a transaction commits its entries with an offset past them."""


@dataclass(frozen=True, slots=True)
class Restored:
    """The state of a partition as restored from its changelog."""

    report: Report
    track_record: TrackRecord
    housekeeping: Housekeeping
    entries: Sequence[Entry] = ()
    """For the cache: of committed traces in the epochs that count, rising in sequence and offset."""
    replay: Mapping[int, Entry] = field(default_factory=dict)
    """Entries at or past the committed offset, by source offset, for traces that are read again with the same text."""

    def cache(self) -> list[tuple[int, int, str, Vector]]:
        """Return the cache's entries as PartitionScorer.restore expects them."""
        return [(it.sequence, it.stream_time_ms, it.trace_id, it.array()) for it in self.entries]


def restore(log: Log, where: SourcePosition, cache: ModelCache | None) -> Restored:
    """Decide which epoch continues, which entries count, and which must be deleted.

    `where`: the partition's committed position. An entry counts if its source offset is below that one, its model is
    the cache's, and its epoch counts at its offset. `cache`: None without an embedder; then entries must not change,
    and only the track records are restored. Raises OtherModelError if other probes are kept than the cache's.
    """
    kinds = log.by_kind()
    stored, damaged_records = _read(kinds[Kind.TRACK_RECORD], lambda it: read_record(it.key or b"", it.value))
    track_record = TrackRecord(where.topic_id or "", known_from=0)
    changes = track_record.restore(stored, where.offset)
    damage = [*log.faults, *damaged_records]
    if cache is None:
        report = Report(without_embedder(where), skipped=+Counter(corrupt=len(damage)), problem="".join(damage[:1]))
        return Restored(report, track_record, Housekeeping(changes))

    markers, damaged_markers = _read(kinds[Kind.MARKER], lambda it: decode_marker(it.value))
    marker = UNREADABLE if damaged_markers else next(iter(markers), None)
    live, older, damaged_entries = _read_entries(kinds[Kind.ENTRY], where, cache.model)
    older = [it.key for it in kinds[Kind.OBSOLETE] if it.key is not None] + older
    probe_rows, damaged_probes = _check_probes(cache.probes, kinds[Kind.PROBE])
    damage += [*damaged_markers, *damaged_entries, *damaged_probes]

    greatest = max((entry.epoch or 0 for _, entry in live if entry is not None), default=0)
    resolved = resolve(where, marker, greatest, log.end)
    track_record.known_from = resolved.chain[0].start
    slots = number_of_slots(cache.capacity)

    counting: list[tuple[bytes, Entry]] = []
    replay: dict[int, Entry] = {}
    ahead: list[tuple[int, bytes]] = []  # (source offset, key), from the committed offset on
    strange: list[bytes] = []  # keys of entries of other models, or unreadable: kept while slots are free
    dead: list[bytes] = []  # keys of entries whose epoch does not count
    skipped, overridden = +Counter(corrupt=len(damage), older=len(older)), 0
    for key, entry in live:
        if entry is None:
            strange.append(key)
            continue
        ours = entry.model == cache.model and len(entry.vector) == 4 * cache.dimensions
        if not ours:
            skipped.update(("other_model", f"model {entry.model}"))
        elif entry.source_offset >= where.offset:
            replay[entry.source_offset] = entry
        segment = at_offset(resolved.chain, entry.source_offset)
        if segment is None or entry.epoch != segment.number:
            dead.append(key)
            overridden += ours
        elif not ours:
            strange.append(key)
        elif entry.source_offset < where.offset:
            counting.append((key, entry))
        else:
            ahead.append((entry.source_offset, key))

    chosen = rising([entry for _, entry in counting])
    newest = chosen[-1].sequence if chosen else -1
    entries = [entry for entry in chosen if entry.sequence > newest - slots]
    stays = set(map(id, entries))
    beyond = [key for key, entry in counting if id(entry) not in stays]
    first: list[Row] = [(key, None) for key in (*older, *dead, *beyond)]
    if resolved.marker() != marker:
        first.append((MARKER_KEY, encode_marker(resolved.marker())))
    due = [(entry.sequence + slots, key) for key, entry in counting if id(entry) in stays]
    due += [(newest + slots, key) for key in strange]
    own = b"%d:%d:" % (resolved.current.number or 0, slots)  # these keys are written again
    leaving = [(sequence, key) for sequence, key in due if not key.startswith(own)]
    return Restored(
        Report(
            resolved.current, resolved.begins, len(entries), overridden, skipped, "".join(damage[:1]),
            max((offset for offset, _ in ahead), default=None),
        ),
        track_record,
        Housekeeping([*first, *probe_rows, *changes], leaving, ahead),
        entries,
        replay,
    )  # fmt: skip


def _read(records: Sequence[Live], read: Callable[[Live], Value]) -> tuple[list[Value], list[str]]:
    """Return what `read` returns for each record, and the damage of those for which it raises ValueError."""
    values, damage = [], []
    for record in records:
        try:
            values.append(read(record))
        except ValueError as error:
            damage.append(record.damage(error))
    return values, damage


def _read_entries(
    records: Sequence[Live], where: SourcePosition, model: str
) -> tuple[list[tuple[bytes, Entry | None]], list[bytes], list[str]]:
    """Return the entries with their keys (None: unreadable), the keys of entries of 0.1.0, and the damage."""
    live: list[tuple[bytes, Entry | None]] = []
    older, damage = [], []
    for start in range(0, len(records), 1024):  # copies of 1.5 MB
        part = records[start : start + 1024]
        for record, decoded in zip(part, decode_all(it.value for it in part), strict=True):
            key = record.key
            if isinstance(decoded, OlderEntry) and key is not None:
                older.append(key)
                continue
            entry, problem = (None, str(decoded)) if isinstance(decoded, CorruptRecord) else (decoded, None)
            if entry is not None and entry.model == model:
                problem = impossible(entry, where)
            if problem is not None:
                damage.append(record.damage(problem))
                entry = None
            if key is not None and _ENTRY_KEY.fullmatch(key):  # others stay: a later release may have written them
                live.append((key, entry))
    return live, older, damage


def _check_probes(probes: Probes | None, kept: Sequence[Live]) -> tuple[list[Row], list[str]]:
    """Return the rows of probes that are not kept yet, and the damage. Raises OtherModelError if a kept one differs."""
    if probes is None:
        return [], []
    rows, damage = [], []
    records = {record.key: record for record in kept}
    for key, vector in zip(probes.keys(), probes.vectors, strict=True):
        record = records.get(key)
        if record is not None:
            try:
                probes.check(vector, record.value)
                continue
            except CorruptRecord as error:
                damage.append(record.damage(error))
        rows.append(probes.row(key, vector))
    return rows, damage


def impossible(entry: Entry, where: SourcePosition) -> str | None:
    """Return why no worker of this model can have written the entry, although each field is valid; None if one can."""
    if entry.sequence > entry.source_offset:  # each entry has its own offset
        return f"sequence {entry.sequence} at source offset {entry.source_offset}"
    if where.committed is not None and entry.source_offset < where.offset:
        latest = where.committed.stream_time_ms
        if latest is not None and entry.stream_time_ms > latest:
            return f"stream time {entry.stream_time_ms}, later than {latest}, which was committed after it"
    return None


def rising(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries of the latest epoch of the source, rising in sequence and offset.

    `entries`: those of committed traces in the epochs that count, in the order of the log. With at-least-once delivery,
    a worker that was frozen writes older entries after newer ones. Within an epoch, sequence and offset rise together,
    so a comparison with the entry of the greatest source offset, which was committed last, reveals them.
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

"""The open runs of one partition, and when they close. Deterministic: the same records give the same decisions.

Stream time is the time of the slowest span partition, according to its marks. So no span is late because a partition
is read late, or by nobody. No clock counts: at its second mark in a row, an idle partition counts as read up to the
time that the others had reached at its first one; while all are idle, time advances by the wait. Marks are records, so
a restart reads the same ones.

A run closes the grace period after the stream time of its last new part if its root has ended, otherwise the gap after
it, and at once if it is too large. Its id is remembered for some time, so that later spans make no second trace.

Here are also the bytes on the two topics of `assemble`. On the intermediate topic a record's key is the trace id (hex);
a mark has no key. On the state topic (compacted) the keys are `open:ID:NUMBER` for a part of an open run, `closed:ID`
for a closed run, and `times`.
"""

import heapq
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

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

    time_ms: Milliseconds  # the record's time, within the bounds of steps.SpanPartition
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

_taken = msgspec.msgpack.Decoder(Part | Mark)
_state = msgspec.msgpack.Decoder(Held | Remembered | Times)

encode = msgspec.msgpack.Encoder().encode


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


def packed(content: bytes) -> bytes:
    """Compress a content. Spans repeat what an agent has said, so about a quarter is left."""
    return zlib.compress(content, 1)


def unpacked(content: bytes, size: int = MAX_RUN_BYTES) -> bytes:
    """Undo `packed`, up to `size` bytes. Raises RowError."""
    unpacking = zlib.decompressobj()
    try:
        whole = unpacking.decompress(content, size + 1)
    except zlib.error as error:
        raise RowError(f"the content of a part cannot be unpacked: {error}") from error
    if len(whole) > size or not unpacking.eof:
        raise RowError(f"the content of a part is cut off, or has more than the {size} bytes that its row names")
    return whole


Cause = Literal["root_ended", "gap", "too_large", "memory"]

MAX_CLOSED: Final = 256
MAX_CLOSED_BYTES: Final = 16 << 20
"""Maximum number of runs that one batch closes, and the bytes of their parts (uncompressed) after which it closes no
further one: after a pause, thousands may be due at once."""

MAX_REMEMBERED: Final = 200_000
"""Maximum number of closed runs that a partition remembers (40 MB in memory); the oldest are forgotten first."""

PART_OVERHEAD: Final = 160
RUN_OVERHEAD: Final = 800
"""Bytes of the Python objects of a part and of a run (measured with sys.getsizeof)."""


@dataclass(frozen=True, slots=True)
class ClosedRun:
    """A run that was closed."""

    trace_id: str
    cause: Cause
    parts: Mapping[bytes, int]  # compressed, in order of arrival, each with its size uncompressed
    last_ms: int  # stream time of the last part


@dataclass(slots=True)
class Effects:
    """The effects of a batch of records."""

    rows: dict[bytes, bytes | None] = field(default_factory=dict)  # of the state
    closed: list[ClosedRun] = field(default_factory=list)
    late: list[tuple[str, Part]] = field(default_factory=list)
    repeated: int = 0  # parts that came again
    closed_bytes: int = 0  # of the closed runs, uncompressed

    @property
    def full(self) -> bool:
        """Return whether the batch should close no further run."""
        return len(self.closed) >= MAX_CLOSED or self.closed_bytes >= MAX_CLOSED_BYTES


@dataclass(slots=True)
class _Run:
    """An open run; times are ms since 1970, by the records."""

    first_ms: int
    last_ms: int
    due_ms: int  # when to look at it next: when it is due to close, or earlier
    parts: dict[bytes, int] = field(default_factory=dict)  # compressed, each with its size uncompressed
    numbers: int = 0  # parts in the state: their keys have the numbers below this
    size: int = 0
    held: int = RUN_OVERHEAD
    checked: bool = False  # its root had not ended at last_ms


@dataclass(slots=True)
class HeldBytes:
    """The approximate memory of all open runs of a process, bytes."""

    total: int = 0


class OpenRuns:
    """The open runs of a partition. Durations are in ms.

    `sources`: the span partitions. `has_root`: whether a run's root has ended, given the run's contents. It is
    called once after each pause of `grace_ms`, so the cost of a run depends on its pauses, not on its parts.
    """

    def __init__(
        self, sources: Collection[Place], has_root: Callable[[Iterable[bytes]], bool], grace_ms: int, gap_ms: int,
        memory_ms: int, held: HeldBytes,
    ) -> None:  # fmt: skip
        self.time_ms: int | None = None
        self.remembered: dict[str, int] = {}
        self.held_bytes = 0  # approximate memory of the open runs
        self._sources = frozenset(sources)
        self._has_root = has_root
        self._grace_ms = grace_ms
        self._gap_ms = max(gap_ms, grace_ms)
        self._memory_ms = memory_ms
        self._held = held
        self._marks: dict[Place, Mark] = {}
        self._runs: dict[str, _Run] = {}  # oldest first
        self._due: list[tuple[int, str]] = []  # a heap of `due_ms`; stale entries are ignored

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def oldest_ms(self) -> int:
        """Return the age of the oldest open run, ms of stream time."""
        oldest = next(iter(self._runs.values()), None)
        return 0 if oldest is None or self.time_ms is None else max(0, self.time_ms - oldest.first_ms)

    def restore(self, rows: Iterable[tuple[bytes, bytes]]) -> list[str]:
        """Restore the live rows of the state, in log order; return the problems of invalid ones."""
        problems = []
        parts: list[tuple[str, int, Held]] = []
        closed: list[tuple[int, str]] = []
        for key, value in rows:
            try:
                row = _state.decode(value)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                problems.append(f"{key[:80]!r}: not a record of the state of kp-worker assemble: {error}")
                continue
            if isinstance(row, Held) and (match := _OPEN.fullmatch(key)) and int(match[2]) < MAX_RUN_PARTS:
                parts.append((match[1].decode(), int(match[2]), row))
            elif isinstance(row, Remembered) and (match := _CLOSED.fullmatch(key)):
                closed.append((row.time_ms, match[1].decode()))
            elif isinstance(row, Times) and key == TIMES_KEY:
                self.time_ms = row.time_ms
                self._marks = {mark.place: mark for mark in row.marks if mark.place in self._sources}
            else:
                problems.append(f"{key[:80]!r}: the key does not fit the record")
        self.remembered = {trace_id: time_ms for time_ms, trace_id in sorted(closed)}
        parts.sort(key=lambda part: part[1])
        first = {trace_id: held.time_ms for trace_id, _, held in reversed(parts)}
        for trace_id, number, held in sorted(parts, key=lambda part: (first[part[0]], part[0])):  # oldest runs first
            if trace_id not in self.remembered:
                self._add(trace_id, number, held)
        return problems

    def add_part(self, trace_id: str, part: Part, effects: Effects) -> None:
        """Add a part to its run."""
        if trace_id in self.remembered:
            effects.late.append((trace_id, part))
            return
        run = self._runs.get(trace_id)
        if run is not None and part.content in run.parts:
            effects.repeated += 1
            return
        time_ms = part.time_ms if self.time_ms is None else max(part.time_ms, self.time_ms)
        held = Held(time_ms, part.size, part.content)
        number = 0 if run is None else run.numbers
        effects.rows[open_key(trace_id, number)] = encode(held)
        run = self._add(trace_id, number, held)
        if run.size > MAX_RUN_BYTES or len(run.parts) >= MAX_RUN_PARTS:
            self._close(trace_id, "too_large", effects)

    def closed_ms(self, trace_id: str) -> int:
        """Return the stream time at which a run closed, or an upper bound if that is forgotten; 0: it is open."""
        if trace_id in self._runs or self.time_ms is None:
            return 0
        return self.remembered.get(trace_id, self.time_ms - max(self._memory_ms, self._gap_ms))

    def mark(self, mark: Mark, effects: Effects) -> bool:
        """Note how far a partition is read, advance stream time, and close due runs.

        Returns whether that is complete. If not, the batch is full: commit it, and call this again with the same mark
        before taking anything else.
        """
        if mark.place not in self._sources:
            return True  # of a topic that is no longer read
        self._marks[mark.place] = self._as_read(mark)
        time_ms = self._slowest_ms()
        if time_ms is None:
            return True
        self.time_ms = time_ms if self.time_ms is None else max(time_ms, self.time_ms)
        if not self._close_due(self.time_ms, effects):
            return False
        while self.remembered and next(iter(self.remembered.values())) + self._memory_ms <= self.time_ms:
            self._forget_first(effects)
        return True

    def shed(self, most: int, effects: Effects) -> None:
        """Close the oldest runs while all open runs of the process hold more than `most` bytes."""
        while self._runs and self._held.total > most and not effects.full:
            self._close(next(iter(self._runs)), "memory", effects)

    def times(self) -> tuple[bytes, bytes]:
        """Return the state's row with the times."""
        return TIMES_KEY, encode(Times(self.time_ms, [self._marks[place] for place in sorted(self._marks)]))

    def _as_read(self, mark: Mark) -> Mark:
        """Return a mark whose `read_ms` is the time that the others had reached at its previous idle mark.

        The partition was read again since then, so anything written before is known. 0: nothing is known yet.
        """
        if mark.read_ms is None:
            return mark
        before, known = self._marks.get(mark.place), mark.time_ms or 0
        if before is not None and before.read_ms is not None:
            if before.waited_ms == mark.waited_ms:
                return before  # the same mark again (see `mark`)
            known = max(known, before.read_ms, before.seen_ms or 0)
        reached = max((other.time_ms for other in self._marks.values() if other.time_ms is not None), default=None)
        return msgspec.structs.replace(mark, read_ms=known, seen_ms=reached)

    def _slowest_ms(self) -> int | None:
        """Return stream time according to the marks; None: a partition has no mark yet, or no record has a time."""
        marks = self._marks.values()
        if len(marks) < len(self._sources) or any(mark.read_ms == 0 for mark in marks):
            return None
        if all(mark.read_ms is not None for mark in marks):  # all are idle: time advances by the wait
            last_ms = max((mark.time_ms for mark in marks if mark.time_ms is not None), default=None)
            return None if last_ms is None else last_ms + min(mark.waited_ms for mark in marks)
        bounds = [mark.time_ms if mark.read_ms is None else mark.read_ms for mark in marks]
        return min((bound for bound in bounds if bound is not None), default=None)

    def _add(self, trace_id: str, number: int, held: Held) -> _Run:
        run = self._runs.get(trace_id)
        if run is None:
            run = self._runs[trace_id] = _Run(held.time_ms, held.time_ms, 0)
            self._hold(RUN_OVERHEAD)
            self._look_again(trace_id, run)
        size = len(held.content) + PART_OVERHEAD
        run.parts[held.content] = held.size
        run.numbers = number + 1
        run.size += held.size
        run.held += size
        self._hold(size)
        run.last_ms = max(run.last_ms, held.time_ms)
        if run.checked:
            run.checked = False
            self._look_again(trace_id, run)
        return run

    def _hold(self, size: int) -> None:
        self.held_bytes += size
        self._held.total += size

    def _deadline(self, run: _Run) -> int:
        return run.last_ms + (self._gap_ms if run.checked else self._grace_ms)

    def _look_again(self, trace_id: str, run: _Run) -> None:
        """Schedule the next look at a run, as far as its deadline is known."""
        run.due_ms = self._deadline(run)
        heapq.heappush(self._due, (run.due_ms, trace_id))

    def _close_due(self, time_ms: int, effects: Effects) -> bool:
        due = self._due
        while due and due[0][0] <= time_ms:
            if effects.full:
                return False
            due_ms, trace_id = heapq.heappop(due)
            run = self._runs.get(trace_id)
            if run is None or run.due_ms != due_ms:
                continue  # closed, or rescheduled
            if self._deadline(run) > due_ms:  # keeps the order of deadlines, also among runs that are due together
                self._look_again(trace_id, run)
            elif run.checked:
                self._close(trace_id, "gap", effects)
            elif self._has_root(run.parts):
                self._close(trace_id, "root_ended", effects)
            else:
                run.checked = True
                self._look_again(trace_id, run)
        return True

    def _close(self, trace_id: str, cause: Cause, effects: Effects) -> None:
        run = self._runs.pop(trace_id)
        self._hold(-run.held)
        for number in range(run.numbers):
            effects.rows[open_key(trace_id, number)] = None
        time_ms = run.last_ms if self.time_ms is None else max(run.last_ms, self.time_ms)
        self.remembered[trace_id] = time_ms
        effects.rows[closed_key(trace_id)] = encode(Remembered(time_ms))
        effects.closed.append(ClosedRun(trace_id, cause, run.parts, run.last_ms))
        effects.closed_bytes += run.size
        if len(self.remembered) > MAX_REMEMBERED:
            self._forget_first(effects)

    def _forget_first(self, effects: Effects) -> None:
        trace_id = next(iter(self.remembered))
        del self.remembered[trace_id]
        effects.rows[closed_key(trace_id)] = None

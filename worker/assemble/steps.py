"""The two steps on a batch of records: spread them by trace id, and assemble runs. No Kafka, no clock.

`Spreading` reads a span topic. `Assembling` reads the intermediate topic, keyed by trace id, or a span topic if its
records already have that key.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from worker.assemble.open_runs import (
    MAX_RUN_BYTES,
    STREAM,
    TRACE_ID,
    Effects,
    Mark,
    OpenRuns,
    Part,
    RowError,
    decode,
    encode,
    packed,
)
from worker.assemble.traces import Tally, TraceWriter, has_no_span, refusal
from worker.core.dead_letters import dead_letter
from worker.core.records import BATCH_OVERHEAD, SPANS, OutputRecord, SourceRecord, encoded_size
from worker.core.trace import InvalidTrace, Reason
from worker.runs.otlp.spans import InvalidSpans, Refused, split

log = logging.getLogger(__name__)

AHEAD_MS: Final = 3_600_000
"""How far ahead of the clock a record's timestamp may be and still count (as now): Kafka's default limit since 4.0
(log.message.timestamp.after.max.ms). So a clock that is some minutes fast makes no difference."""

EARLIEST_MS: Final = 946_684_800_000
"""The year 2000. Earlier timestamps come from producers that set none."""


def partition_of(trace_id: str, partitions: int) -> int:
    """Return a trace's partition of the intermediate topic."""
    return zlib.crc32(trace_id.encode()) % partitions


class Spread:
    """The time of one span partition, and its records by trace id. Times are ms since 1970.

    The partition's time comes from the records' timestamps, as their producer (the Collector) set them. A record from
    the far future, or without a time, does not advance it. The future begins at the clock or, if the clock is behind
    the records, at the last record's time plus the time since then.
    """

    def __init__(self, topic: str, partition: int, time_ms: int | None) -> None:
        self.time_ms = time_ms
        self._set_ms: int | None = None
        self._warned = False
        self._topic = topic
        self._partition = partition

    def take(self, record: SourceRecord, now_ms: int, refused: list[Refused] | None = None) -> dict[str, Part]:
        """Return a record's parts by trace id; add its bad spans to `refused`.

        Raises InvalidTrace for an unreadable record, whatever its reader raises.
        """
        time_ms = self._time(record.timestamp_ms, now_ms)
        if record.fault is not None:
            raise InvalidTrace(record.fault.reason, "", record.fault.message)
        try:
            contents = split(record.value or b"", refused)
            if max(map(len, contents.values()), default=0) > MAX_RUN_BYTES:
                words = f"the spans of one trace have more than {MAX_RUN_BYTES} bytes; send them in several records"
                raise InvalidSpans("too_large", "", words)
            return {
                trace_id: Part(time_ms, self._topic, self._partition, record.offset, len(content), packed(content))
                for trace_id, content in contents.items()
            }
        except InvalidSpans as error:
            raise InvalidTrace(Reason(error.reason), error.path, error.message) from error
        except Exception as error:  # one record must not stop the others
            log.exception("%s/%d offset %d: the record cannot be read", record.topic, record.partition, record.offset)
            words = f"{type(error).__name__} while the spans were read; report it with this record"
            raise InvalidTrace(Reason.ASSEMBLY_FAILED, "", words) from error

    def mark(self, read_ms: int | None = None, waited_ms: int = 0) -> Mark:
        """Return how far the partition is read; `read_ms` and `waited_ms` as in Mark."""
        return Mark(self._topic, self._partition, self.time_ms, read_ms, waited_ms)

    def _time(self, timestamp_ms: int | None, now_ms: int) -> int:
        """Return the time of a record, and advance the partition's time. The clock must not go back."""
        clock_ms = now_ms
        if self._set_ms is None:
            self._set_ms = now_ms
        if self.time_ms is not None:
            now_ms = max(now_ms, self.time_ms + now_ms - self._set_ms)
        if timestamp_ms is not None and timestamp_ms > now_ms + AHEAD_MS and not self._warned:
            self._warned = True
            log.warning(
                "%s/%d: a record is dated more than an hour ahead of this machine's clock, so its time is ignored; "
                "correct this clock, or the producer's. No run closes until a record's time counts "
                "(docs/opentelemetry.md)",
                self._topic,
                self._partition,
            )
        if timestamp_ms is None or not EARLIEST_MS <= timestamp_ms <= now_ms + AHEAD_MS:
            return now_ms if self.time_ms is None else self.time_ms
        time_ms = timestamp_ms if self.time_ms is None else min(timestamp_ms, now_ms)
        if self.time_ms is None or time_ms > self.time_ms:
            self.time_ms, self._set_ms = time_ms, clock_ms
        return time_ms


MAX_BATCH_BYTES: Final = 16 << 20
"""Bytes of parts (compressed) after which a batch takes no further record: each trace in a record gets its own copy of
the resource, so a small record may yield many bytes."""

QUEUED: Final = (
    "log events of runs that are already closed are ignored: their topic was added to KP_SPANS_TOPIC later, or is "
    "read again"
)

KEY_ROOM: Final = 128
"""An upper bound of the bytes that a part's key in the state, and the rest of its row, add to its content."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of polling a partition. Times are by the clock, ms since 1970."""

    records: Sequence[SourceRecord]
    now_ms: int
    read_ms: int | None = None  # everything that was there at this time has been read; None: more may be waiting
    waited_ms: int = 0  # since the last record


@dataclass(slots=True)
class Outcome:
    """What a batch publishes."""

    outputs: list[OutputRecord] = field(default_factory=list)
    sources: list[SourceRecord] = field(default_factory=list)
    """For each output: the record that a dead letter shows if its topic refuses the output."""
    rows: dict[bytes, bytes | None] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    time_ms: int | None = None
    done: int = 0  # how many records of the batch it covers
    more: bool = False  # call the step again with the other records before any further ones
    urgent: bool = False  # commit it soon; otherwise it only records how far time has advanced

    def add(self, output: OutputRecord, source: SourceRecord) -> None:
        """Add a record to publish."""
        self.outputs.append(output)
        self.sources.append(source)


class Shown(NamedTuple):
    """Figures of the open runs for the metrics, as of the last batch: a thread may be working on the next one."""

    open_runs: int = 0
    held_bytes: int = 0
    oldest_ms: int = 0
    remembered: int = 0
    time_ms: int = 0


class Spreading:
    """Writes each record's spans to the partition of their trace, and to the first one a mark of how far it has read.

    The first partition's `Assembling` sends the time to the others: so marks of n partitions cost n records, not n * n.
    """

    def __init__(self, spread: Spread, partitions: int) -> None:
        self._spread = spread
        self._partitions = partitions

    def process(self, reading: Reading) -> Outcome:
        """Process a reading."""
        outcome, size = Outcome(), 0
        for record in reading.records:
            if size > MAX_BATCH_BYTES:
                outcome.more = True
                break
            outcome.done += 1
            for trace_id, part in _parts(self._spread, record, reading.now_ms, outcome).items():
                key, number = trace_id.encode(), partition_of(trace_id, self._partitions)
                size += len(part.content)
                outcome.add(OutputRecord(SPANS, key, encode(part), [], None, partition=number), record)
        mark = self._spread.mark(reading.read_ms, reading.waited_ms)
        source = SourceRecord(mark.topic, mark.partition, 0, None, None, None)
        outcome.add(OutputRecord(SPANS, None, encode(mark), [], None, partition=0), source)
        outcome.time_ms = self._spread.time_ms
        outcome.urgent = True
        return outcome


class Assembling:
    """Collects the spans of each run, and writes its traces when it closes.

    `spread`: set if the partition belongs to a span topic. `most_held`: limit of the bytes held by all open runs of
    the process. `largest_row`: limit of the state topic, bytes. `others`: the partitions that are sent stream time
    whenever it has advanced by `tell_ms`.
    """

    def __init__(
        self, runs: OpenRuns, writer: TraceWriter, most_held: int, largest_row: int, spread: Spread | None = None,
        others: Sequence[int] = (), tell_ms: float = 0,
    ) -> None:  # fmt: skip
        self.runs = runs
        self._others = others
        self._tell_ms = tell_ms
        self._told_ms = -math.inf
        self.shown = Shown()
        self._newest_ms: int | None = None
        self._writer = writer
        self._most_held = most_held
        self.largest_row = largest_row
        self._spread = spread

    def process(self, reading: Reading) -> Outcome:
        """Process a reading."""
        outcome, effects = Outcome(), Effects()
        before = self.runs.held_bytes
        for record in reading.records:
            full = effects.full or self.runs.held_bytes - before > MAX_BATCH_BYTES
            if full or not self._process(record, reading.now_ms, effects, outcome):
                outcome.more = True
                break
            outcome.done += 1
        else:
            if self._spread is not None:
                outcome.more = not self.runs.mark(self._spread.mark(reading.read_ms, reading.waited_ms), effects)
        self.runs.shed(self._most_held, effects)
        offset = reading.records[max(0, outcome.done - 1)].offset if reading.records else 0
        for trace_id, part in effects.late:
            outcome.add(*self._writer.late(trace_id, part, outcome.tally))
        for run in effects.closed:
            for output, source in self._writer.written(run, offset, self._newest_ms, outcome.tally):
                outcome.add(output, source)
        self._tell(outcome)
        outcome.tally.add("repeated", "", effects.repeated)
        outcome.urgent = bool(effects.rows or outcome.outputs or outcome.tally.counts)
        outcome.rows = effects.rows
        key, value = self.runs.times()
        outcome.rows[key] = value
        outcome.time_ms = self.runs.time_ms
        self.shown = Shown(
            len(self.runs), self.runs.held_bytes, self.runs.oldest_ms, len(self.runs.remembered),
            self.runs.time_ms or 0,
        )  # fmt: skip
        return outcome

    def _tell(self, outcome: Outcome) -> None:
        """Send stream time to the other partitions, after everything that it counts as read."""
        time_ms = self.runs.time_ms
        if time_ms is None or time_ms < self._told_ms + self._tell_ms:
            return
        self._told_ms = time_ms
        source = SourceRecord(*self._writer.source, 0, None, None, None)
        for number in self._others:
            outcome.add(OutputRecord(SPANS, None, encode(Mark(*STREAM, time_ms)), [], None, partition=number), source)

    def may_not_fit(self, records: Sequence[SourceRecord]) -> bool:
        """Return whether a record may be too large for the state topic: no part is larger than its record."""
        return any(_row_size(record.value or b"") > self.largest_row for record in records)

    def _process(self, record: SourceRecord, now_ms: int, effects: Effects, outcome: Outcome) -> bool:
        """Take one record; return whether that is complete (OpenRuns.mark)."""
        if self._spread is not None:
            for trace_id, part in _parts(self._spread, record, now_ms, outcome).items():
                self._take(trace_id, part, record, effects, outcome)
            self._newest_ms = self._spread.time_ms
            return True
        if record.timestamp_ms is not None:  # the broker's time, as set up in topics.py
            self._newest_ms = max(self._newest_ms or 0, record.timestamp_ms)
        try:
            if record.fault is not None:
                raise InvalidTrace(record.fault.reason, "", record.fault.message)
            row = decode(record.value)
            if isinstance(row, Part) and TRACE_ID.fullmatch(record.key or b"") is None:
                raise RowError("the key of a part is not a trace id")
        except RowError as error:
            message = f"{error}; nothing else may write to its topic"
            _refuse(record, InvalidTrace(Reason.NOT_OTLP, "", message), outcome)
        except InvalidTrace as error:
            _refuse(record, error, outcome)
        else:
            if isinstance(row, Mark):
                return self.runs.mark(row, effects)
            self._take((record.key or b"").decode(), row, record, effects, outcome)
        return True

    def _take(self, trace_id: str, part: Part, record: SourceRecord, effects: Effects, outcome: Outcome) -> None:
        size = _row_size(part.content)
        if size > self.largest_row:
            words = (
                f"the spans of a trace have {size} bytes; the topic of the state takes {self.largest_row}: raise its "
            )
            _refuse(record, InvalidTrace(Reason.TOO_LARGE, "", f"{words}max.message.bytes"), outcome)
            return
        outcome.tally.add("parts")
        if part.time_ms < self.runs.closed_ms(trace_id) and has_no_span(part):
            # Nothing was lost: the topic was added to KP_SPANS_TOPIC later, or is read again.
            outcome.tally.hints.add(f"{part.topic}: {QUEUED}")
            return
        self.runs.take(trace_id, part, effects)


def _row_size(content: bytes) -> int:
    return encoded_size(None, content, ()) + KEY_ROOM + BATCH_OVERHEAD


def _parts(spread: Spread, record: SourceRecord, now_ms: int, outcome: Outcome) -> dict[str, Part]:
    """Return a record's parts by trace id; an unreadable record becomes a dead letter."""
    outcome.tally.add("records")
    refused: list[Refused] = []
    try:
        parts = spread.take(record, now_ms, refused)
    except InvalidTrace as error:
        _refuse(record, error, outcome)
        return {}
    for bad in refused:
        _refuse(record._replace(value=bad.value), refusal(bad), outcome)
    return parts


def _refuse(record: SourceRecord, error: InvalidTrace, outcome: Outcome) -> None:
    outcome.tally.refuse(error)
    outcome.add(dead_letter(record, error), record)

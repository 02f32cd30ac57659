"""The two steps on a batch of records: spread them by trace id, and make traces of runs. No Kafka, no clock.

`Spreading` reads a span topic. `Assembling` reads the intermediate topic, keyed by trace id, or a span topic if its
records already have that key; it collects the spans of each run, and writes its traces when the run closes.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from worker.assemble.open_runs import (
    MAX_RUN_BYTES,
    STREAM,
    TRACE_ID,
    ClosedRun,
    Effects,
    Mark,
    OpenRuns,
    Part,
    RowError,
    decode,
    encode,
    packed,
    unpacked,
)
from worker.config import ConfigError, Settings
from worker.core.dead_letters import dead_letter
from worker.core.records import ASSEMBLED, BATCH_OVERHEAD, SPANS, OutputRecord, SourceRecord, encoded_size
from worker.core.trace import InvalidTrace, Reason
from worker.kafka.rows import key_partition
from worker.runs.otlp.mapping import MAX_UNREAD, Assembled, assembled
from worker.runs.otlp.rules import Rules, parse_rules
from worker.runs.otlp.spans import (
    COUNTED_BYTES,
    MAX_FIELDS,
    InvalidSpans,
    LogEvent,
    Refused,
    Span,
    decoded,
    fields_in,
    is_complete,
    links,
    split,
)

log = logging.getLogger(__name__)

AHEAD_MS: Final = 3_600_000
"""How far ahead of the clock a record's timestamp may be and still count (as now): Kafka's default limit since 4.0
(log.message.timestamp.after.max.ms). So a clock that is some minutes fast makes no difference."""

MAX_BATCH_BYTES: Final = 16 << 20
"""Bytes of parts (compressed) after which a batch takes no further record: each trace in a record gets its own copy of
the resource, so a small record may yield many bytes."""


@dataclass(frozen=True, slots=True)
class Poll:
    """The result of polling a partition. Times are by the clock, ms since 1970."""

    records: Sequence[SourceRecord]
    now_ms: int
    read_ms: int | None = None  # everything that was there at this time has been read; None: more may be waiting
    waited_ms: int = 0  # since the last record


@dataclass(slots=True)
class StepResult:
    """What a batch publishes and counts; metrics and log get the counts when it is committed."""

    outputs: list[OutputRecord] = field(default_factory=list)
    sources: list[SourceRecord] = field(default_factory=list)  # of each output: what its dead letter shows if refused
    rows: dict[bytes, bytes | None] = field(default_factory=dict)  # of the state
    time_ms: int | None = None
    done: int = 0  # how many records of the batch it covers
    more: bool = False  # call the step again with the other records before any further ones
    urgent: bool = False  # commit it soon; otherwise it only records how far time has advanced
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # by attribute of AssembleMetrics, and label
    ends: list[float] = field(default_factory=list)  # of published runs, s since 1970
    hints: set[str] = field(default_factory=set)  # settings that would capture the missing content
    refusals: dict[str, str] = field(default_factory=dict)  # by reason: the message of the first dead letter
    shortened: str = ""  # the first trace whose texts were cut, and by how much
    unread: list[tuple[tuple[str, str], ...]] = field(default_factory=list)  # `Assembled.unread` of runs that have any

    def add(self, output: OutputRecord, source: SourceRecord) -> None:
        """Add a record to publish."""
        self.outputs.append(output)
        self.sources.append(source)

    def count(self, name: str, label: str = "", number: int = 1) -> None:
        """Count something: `name` is an attribute of AssembleMetrics."""
        if number:
            self.counts[name, label] += number

    def count_letter(self, error: InvalidTrace) -> None:
        """Count a dead letter, and keep its message for the log."""
        self.count("dead_letters", str(error.reason))
        self.refusals.setdefault(str(error.reason), f"{error.path or 'record'}: {error.message}")

    def refuse(self, source: SourceRecord, error: InvalidTrace) -> None:
        """Add a dead letter."""
        self.count_letter(error)
        self.add(dead_letter(source, error), source)


def partition_of(trace_id: str, partitions: int) -> int:
    """Return a trace's partition of the intermediate topic."""
    return zlib.crc32(trace_id.encode()) % partitions


@dataclass(eq=False)
class SpanPartition:
    """The time of one partition of a span topic, and its records by trace id. Times are ms since 1970.

    The partition's time comes from the records' timestamps, as their producer (the Collector) set them. A record from
    the far future, or without a time, does not advance it. The future begins at the clock or, if the clock is behind
    the records, at the last record's time plus the time since then.
    """

    topic: str
    partition: int
    time_ms: int | None
    set_ms: int | None = None  # by the clock, when `time_ms` was set
    warned: bool = False

    def mark(self, poll: Poll) -> Mark:
        """Return how far the partition is read."""
        return Mark(self.topic, self.partition, self.time_ms, poll.read_ms, poll.waited_ms)

    def parts(self, record: SourceRecord, now_ms: int, result: StepResult) -> dict[str, Part]:
        """Return a record's parts by trace id; an unreadable record, or its bad spans, become a dead letter."""
        result.count("records")
        time_ms = self._time(record.timestamp_ms, now_ms)
        refused: list[Refused] = []
        try:
            if record.fault is not None:
                raise InvalidTrace(record.fault.reason, "", record.fault.message)
            contents = split(record.value or b"", refused)
            if max(map(len, contents.values()), default=0) > MAX_RUN_BYTES:
                words = f"the spans of one trace have more than {MAX_RUN_BYTES} bytes; send them in several records"
                raise InvalidTrace(Reason.TOO_LARGE, "", words)
            parts = {
                trace_id: Part(time_ms, self.topic, self.partition, record.offset, len(content), packed(content))
                for trace_id, content in contents.items()
            }
        except Exception as error:
            where = f"{record.topic}/{record.partition} offset {record.offset}: the record cannot be read"
            result.refuse(record, _invalid(error, where, "the spans were read"))
            return {}
        for bad in refused:
            result.refuse(record._replace(value=bad.value), _refusal(bad))
        return parts

    def _time(self, timestamp_ms: int | None, now_ms: int) -> int:
        """Return the time of a record, and advance the partition's time. The clock must not go back."""
        clock_ms = now_ms
        if self.set_ms is None:
            self.set_ms = now_ms
        if self.time_ms is not None:
            now_ms = max(now_ms, self.time_ms + now_ms - self.set_ms)
        if timestamp_ms is not None and timestamp_ms > now_ms + AHEAD_MS and not self.warned:
            self.warned = True
            log.warning(
                "%s/%d: a record is dated more than an hour ahead of this machine's clock, so its time is ignored; "
                "correct this clock, or the producer's. No run closes until a record's time counts "
                "(docs/opentelemetry.md)",
                self.topic,
                self.partition,
            )
        # Timestamps before the year 2000 come from producers that set none.
        if timestamp_ms is None or not 946_684_800_000 <= timestamp_ms <= now_ms + AHEAD_MS:
            return now_ms if self.time_ms is None else self.time_ms
        time_ms = timestamp_ms if self.time_ms is None else min(timestamp_ms, now_ms)
        if self.time_ms is None or time_ms > self.time_ms:
            self.time_ms, self.set_ms = time_ms, clock_ms
        return time_ms


@dataclass(eq=False)
class Spreading:
    """Writes each record's spans to the partition of their trace, and to the first one a mark of how far it has read.

    The first partition's `Assembling` sends the time to the others: so marks of n partitions cost n records, not n * n.
    """

    source: SpanPartition
    partitions: int

    def process(self, poll: Poll) -> StepResult:
        """Process what was polled."""
        result, size = StepResult(urgent=True), 0
        for record in poll.records:
            if size > MAX_BATCH_BYTES:
                result.more = True
                break
            result.done += 1
            for trace_id, part in self.source.parts(record, poll.now_ms, result).items():
                key, number = trace_id.encode(), partition_of(trace_id, self.partitions)
                size += len(part.content)
                result.add(OutputRecord(SPANS, key, encode(part), [], None, partition=number), record)
        mark = self.source.mark(poll)
        output = OutputRecord(SPANS, None, encode(mark), [], None, partition=0)
        result.add(output, SourceRecord(mark.topic, mark.partition, 0, None, None, None))
        result.time_ms = self.source.time_ms
        return result


@dataclass(eq=False)
class Assembling:
    """Collects the spans of each run, and writes its traces when it closes."""

    runs: OpenRuns
    writer: TraceWriter
    most_held: int  # limit of the bytes held by all open runs of the process
    largest_row: int  # limit of the state topic, bytes
    source: SpanPartition | None = None  # of a partition that belongs to a span topic
    others: Sequence[int] = ()  # the partitions that are sent stream time whenever it has advanced by `send_ms`
    send_ms: float = 0
    sent_ms: float = -math.inf
    newest_ms: int | None = None  # the greatest time of a record so far
    gauges: dict[str, float] = field(default_factory=dict)  # after the last batch, by attribute of AssembleMetrics

    def process(self, poll: Poll) -> StepResult:
        """Process what was polled."""
        result, effects, runs = StepResult(), Effects(), self.runs
        before = runs.held_bytes
        for record in poll.records:
            full = effects.full or runs.held_bytes - before > MAX_BATCH_BYTES
            if full or not self._process(record, poll.now_ms, effects, result):
                result.more = True
                break
            result.done += 1
        else:
            if self.source is not None:
                result.more = not runs.mark(self.source.mark(poll), effects)
        runs.shed(self.most_held, effects)
        offset = poll.records[max(0, result.done - 1)].offset if poll.records else 0
        for trace_id, part in effects.late:
            _refuse_late(trace_id, part, result)
        for run in effects.closed:
            self.writer.write(run, offset, self.newest_ms, result)
        if runs.time_ms is not None and runs.time_ms >= self.sent_ms + self.send_ms:
            # To the other partitions, after everything that it counts as read.
            self.sent_ms, value = runs.time_ms, encode(Mark(*STREAM, runs.time_ms))
            source = SourceRecord(*self.writer.source, 0, None, None, None)
            for number in self.others:
                result.add(OutputRecord(SPANS, None, value, [], None, partition=number), source)
        result.count("repeated", "", effects.repeated)
        result.urgent = bool(effects.rows or result.outputs or result.counts)
        result.rows = effects.rows
        key, value = runs.times()
        result.rows[key] = value
        result.time_ms = runs.time_ms
        self.gauges = {
            "open_runs": len(runs), "open_bytes": runs.held_bytes, "oldest": runs.oldest_ms / 1000,
            "remembered": len(runs.remembered), "stream_time": (runs.time_ms or 0) / 1000,
        }  # fmt: skip
        return result

    def may_not_fit(self, records: Sequence[SourceRecord]) -> bool:
        """Return whether a record may be too large for the state topic: no part is larger than its record."""
        return any(_row_size(record.value or b"") > self.largest_row for record in records)

    def _process(self, record: SourceRecord, now_ms: int, effects: Effects, result: StepResult) -> bool:
        """Process one record; return whether that is complete (OpenRuns.mark)."""
        if self.source is not None:
            for trace_id, part in self.source.parts(record, now_ms, result).items():
                self._add(trace_id, part, record, effects, result)
            self.newest_ms = self.source.time_ms
            return True
        if record.timestamp_ms is not None:  # the broker's time, as set up in topics.py
            self.newest_ms = max(self.newest_ms or 0, record.timestamp_ms)
        if record.fault is not None:
            result.refuse(record, InvalidTrace(record.fault.reason, "", record.fault.message))
            return True
        try:
            row = decode(record.value)
            if isinstance(row, Part) and TRACE_ID.fullmatch(record.key or b"") is None:
                raise RowError("the key of a part is not a trace id")
        except RowError as error:
            message = f"{error}; nothing else may write to its topic"
            result.refuse(record, InvalidTrace(Reason.NOT_OTLP, "", message))
            return True
        if isinstance(row, Mark):
            return self.runs.mark(row, effects)
        self._add((record.key or b"").decode(), row, record, effects, result)
        return True

    def _add(self, trace_id: str, part: Part, record: SourceRecord, effects: Effects, result: StepResult) -> None:
        size = _row_size(part.content)
        if size > self.largest_row:
            words = (
                f"the spans of a trace have {size} bytes; the topic of the state takes {self.largest_row}: raise its "
                "max.message.bytes"
            )
            result.refuse(record, InvalidTrace(Reason.TOO_LARGE, "", words))
            return
        result.count("parts")
        if part.time_ms < self.runs.closed_ms(trace_id) and has_no_span(part):
            # Nothing was lost: the topic was added to KP_SPANS_TOPIC later, or is read again.
            result.hints.add(
                f"{part.topic}: log events of runs that are already closed are ignored: their topic was added to "
                "KP_SPANS_TOPIC later, or is read again"
            )
            return
        self.runs.add_part(trace_id, part, effects)


def _row_size(content: bytes) -> int:
    """Return an upper bound of the bytes of a row of the state: 128 are more than its key and its numbers take."""
    return encoded_size(None, content, ()) + 128 + BATCH_OVERHEAD


# -- the traces of a closed run, or the reason why it has none


def rules_from(settings: Settings) -> Rules:
    """Return the rules from KP_ASSEMBLE_CONFIDENCE, _DOMAIN, _VISIBILITY, _PRIVACY, _AGENT. Raises ConfigError."""
    texts = {name: getattr(settings, f"assemble_{name}") for name in ("confidence", "domain", "visibility", "privacy")}
    if unset := [f"KP_ASSEMBLE_{name.upper()}" for name, text in texts.items() if text is None]:
        raise ConfigError(
            f"assemble needs {', '.join(unset)}: no library says this in its spans; set a constant, or "
            "attribute:NAME|CONSTANT (docs/opentelemetry.md)"
        )
    try:
        return parse_rules(**texts, limits=settings.limits, agent=settings.assemble_agent)
    except ValueError as error:
        raise ConfigError(f"KP_ASSEMBLE_...: {error}") from None


@dataclass(frozen=True, slots=True)
class TraceWriter:
    """Makes the records of closed runs."""

    rules: Rules
    by_agent: bool  # the record's key is the agent's id; otherwise the trace's
    partitions: int  # of the source topic
    kept_ms: float  # the source topic accepts and keeps records of this age
    source: tuple[str, int]  # topic and partition that dead letters name

    def write(self, run: ClosedRun, offset: int, newest_ms: int | None, result: StepResult) -> None:
        """Add a run's traces to the result, and dead letters of its unreadable parts and of runs that are too large.

        `offset`: of the record that closed the run. `newest_ms`: the greatest time of a record so far.
        """
        source = SourceRecord(*self.source, offset, run.last_ms, run.trace_id.encode(), None)
        contents: list[bytes] = []  # as far as they can be unpacked
        result.count("closed", run.cause)
        try:
            spans, logs = _read(run, contents, source, result)
            traces = assembled(spans, logs, self.rules)
            made = [(trace, None if trace.value is None else self._output(trace, run, newest_ms)) for trace in traces]
        except Exception as error:
            where = f"trace {run.trace_id}: no trace could be made of its spans"
            why = _invalid(error, where, "a trace was made of the spans")
            result.refuse(source._replace(value=b"".join(contents)), why)
            return
        result.count("spans", "", len(spans))
        for trace, output in made:
            _count(trace, result)
            if output is not None:
                result.add(output, source._replace(key=output.key, value=output.value))
            elif trace.missing == "too_large":
                message = (
                    f"run {run.trace_id} exceeds KP_MAX_MESSAGE_BYTES (even with its texts cut), KP_MAX_STEPS or "
                    "KP_MAX_DEPTH; raise it"
                )
                why = InvalidTrace(Reason.TOO_LARGE, "", message)
                result.refuse(source._replace(value=b"".join(contents)), why)

    def _output(self, trace: Assembled, run: ClosedRun, newest_ms: int | None) -> OutputRecord:
        key = (trace.key if self.by_agent else run.trace_id).encode("utf-8", "replace")
        timestamp_ms = min(trace.end_ns // 1_000_000, run.last_ms)  # not in the future
        if newest_ms is not None and timestamp_ms < newest_ms - self.kept_ms:
            timestamp_ms = newest_ms  # by the records' time: the local clock may be wrong
        partition = key_partition(key, self.partitions)
        return OutputRecord(ASSEMBLED, key, trace.value, [], timestamp_ms, partition=partition)


def _count(trace: Assembled, result: StepResult) -> None:
    for convention in trace.conventions:
        result.count("conventions", convention)
    result.hints.update(trace.hints)
    if trace.unread:
        result.unread.append(trace.unread)
        result.count("unread_runs")
    if trace.missing is not None:
        result.count("without_trace", trace.missing)
    if trace.value is not None:
        result.count("traces")
        result.ends.append(trace.end_ns / 1e9)
    if trace.cut and trace.document is not None:
        result.count("shortened")
        result.shortened = result.shortened or f"{trace.document['id']}, by {trace.cut} characters"


def _read(
    run: ClosedRun, contents: list[bytes], source: SourceRecord, result: StepResult
) -> tuple[list[Span], list[LogEvent]]:
    """Return the spans and log events of a run; damaged parts become dead letters. `contents` gets what is unpacked."""
    spans: list[Span] = []
    logs: list[LogEvent] = []
    for packed_content, size in run.parts.items():
        try:
            contents.append(unpacked(packed_content, size))
        except RowError as error:
            words = f"{error}; only kp-worker assemble may write to the topics of assemble"
            result.refuse(source._replace(value=packed_content), InvalidTrace(Reason.NOT_OTLP, "", words))
    room, counted = MAX_FIELDS, sum(map(len, contents)) > COUNTED_BYTES
    for content in contents:
        room -= fields_in(content, room) if counted else 0
        try:
            if room < 0:
                words = f"the run has more than {MAX_FIELDS} spans, events, attributes and values; this is the rest"
                raise InvalidSpans("too_large", "", words)
            part = decoded(content)
        except InvalidSpans as error:
            result.refuse(source._replace(value=content), _invalid(error))
            continue
        spans += part.spans
        logs += part.logs
        if part.refused is not None:
            result.refuse(source._replace(value=part.refused.value), _refusal(part.refused))
    return spans, logs


def _invalid(error: Exception, where: str = "", doing: str = "") -> InvalidTrace:
    """Return why a dead letter is one. A defect here is logged, and costs its record or its run alone."""
    if isinstance(error, InvalidTrace):
        return error
    if isinstance(error, InvalidSpans):
        return InvalidTrace(Reason(error.reason), error.path, error.message)
    log.error("%s", where, exc_info=error)
    words = f"{type(error).__name__} while {doing}; report it with this record"
    return InvalidTrace(Reason.ASSEMBLY_FAILED, "", words)


def _refusal(bad: Refused) -> InvalidTrace:
    """Return the error for a dead letter that holds only the bad spans of a record."""
    error = bad.error
    words = f"{error.message} (bad spans of this record: {bad.count}; this dead letter holds them, the others are used)"
    return InvalidTrace(Reason(error.reason), error.path, words)


def _refuse_late(trace_id: str, part: Part, result: StepResult) -> None:
    """Add the dead letter of spans that belong to a closed run."""
    try:
        content = unpacked(part.content, part.size)
    except RowError:
        content = part.content
    source = SourceRecord(part.topic, part.partition, part.offset, part.time_ms, trace_id.encode(), content)
    message = (
        "the run is closed, and its trace published without these; raise KP_ASSEMBLE_GRACE_SECONDS or _GAP_SECONDS"
    )
    result.count("late")
    result.count("dead_letters", str(Reason.LATE_SPAN))
    result.add(dead_letter(source, InvalidTrace(Reason.LATE_SPAN, "", message)), source)


def has_root(contents: Iterable[bytes]) -> bool:
    """Return whether the root of a run has ended, given its packed contents; not if its spans cannot be read."""
    try:
        return is_complete(link for content in contents for link in links(unpacked(content)))
    except Exception as error:
        log.debug("the spans of a run cannot be read: %s", type(error).__name__)
        return False


def has_no_span(part: Part) -> bool:
    """Return whether a part holds only log events."""
    try:
        return not decoded(unpacked(part.content, part.size)).spans
    except Exception as error:
        log.debug("a part cannot be read: %s", type(error).__name__)
        return False


class UnreadContent:
    """Span attributes that look like content and are not read.

    The first MAX_SCOPES scopes are named, and the first MAX_UNREAD names of each.
    """

    MAX_SCOPES = 20

    def __init__(self) -> None:
        self.scopes: dict[str, Counter[str]] = {}  # scope -> name -> runs

    def add(self, unread: Iterable[tuple[str, str]]) -> list[str]:
        """Add the attributes of one run; return the scopes that are new."""
        before = len(self.scopes)
        for scope, name in unread:
            if scope not in self.scopes and len(self.scopes) == self.MAX_SCOPES:
                continue
            names = self.scopes.setdefault(scope, Counter())
            if name in names or len(names) < MAX_UNREAD:
                names[name] += 1
        return list(self.scopes)[before:]

    def lines(self) -> Iterator[str]:
        """Yield a line for each scope, with its names and the number of runs with each."""
        for scope, names in self.scopes.items():
            listed = ", ".join(f"{name} ({count} runs)" for name, count in names.most_common())
            yield f"not read, and looks like content: {scope or 'no scope'}: {listed}"

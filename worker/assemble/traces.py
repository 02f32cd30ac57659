"""The outcome of a closed run: its traces, or the reason why it has none."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from worker.assemble.open_runs import MAX_RUN_BYTES, ClosedRun, Part, RowError, unpacked
from worker.config import ConfigError, Settings
from worker.core.dead_letters import dead_letter
from worker.core.records import ASSEMBLED, OutputRecord, SourceRecord
from worker.core.trace import InvalidTrace, Reason
from worker.kafka.writing.rows import key_partition
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
    links,
)
from worker.runs.otlp.tree import is_complete

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Tally:
    """What a batch did; the metrics take it when the batch is committed."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    ends: list[float] = field(default_factory=list)  # of published runs, s since 1970
    hints: set[str] = field(default_factory=set)  # settings that would capture the missing content
    refusals: dict[str, str] = field(default_factory=dict)  # by reason: the message of the first dead letter
    shortened: str = ""  # the first trace whose texts were cut, and by how much
    unread: list[tuple[tuple[str, str], ...]] = field(default_factory=list)
    """`Assembled.unread` of each run that has any."""

    def add(self, name: str, label: str = "", number: int = 1) -> None:
        """Count something: `name` is an attribute of AssembleMetrics."""
        if number:
            self.counts[name, label] += number

    def refuse(self, error: InvalidTrace) -> None:
        """Count a dead letter, and keep its message for the log."""
        self.add("dead_letters", str(error.reason))
        self.refusals.setdefault(str(error.reason), f"{error.path or 'record'}: {error.message}")

    def join(self, other: Tally) -> None:
        """Add the counts of another tally."""
        self.counts.update(other.counts)
        self.ends += other.ends
        self.hints |= other.hints
        self.unread += other.unread
        self.refusals = {**other.refusals, **self.refusals}
        self.shortened = self.shortened or other.shortened


@dataclass(slots=True)
class UnreadContent:
    """Span attributes that look like content and are not read.

    The first MAX_SCOPES scopes are named, and the first MAX_UNREAD names of each.
    """

    MAX_SCOPES: ClassVar[int] = 20

    runs: int = 0
    scopes: dict[str, Counter[str]] = field(default_factory=dict)  # scope -> name -> runs

    def add(self, unread: Iterable[tuple[str, str]]) -> list[str]:
        """Add the attributes of one run; return the scopes that are new."""
        self.runs += 1
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


NEEDED: Final = ("confidence", "domain", "visibility", "privacy")


def rules_from(settings: Settings) -> Rules:
    """Return the rules from KP_ASSEMBLE_CONFIDENCE, _DOMAIN, _VISIBILITY, _PRIVACY, _AGENT. Raises ConfigError."""
    texts = {name: getattr(settings, f"assemble_{name}") for name in NEEDED}
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

    def written(
        self, run: ClosedRun, offset: int, newest_ms: int | None, tally: Tally
    ) -> list[tuple[OutputRecord, SourceRecord]]:
        """Return a run's traces, and dead letters of unreadable parts, each with the record that a dead letter shows.

        `offset`: of the record that closed the run. `newest_ms`: the greatest time of a record so far.
        """
        tally.add("closed", run.cause)
        whole = SourceRecord(*self.source, offset, run.last_ms, run.trace_id.encode(), None)
        read = _Read()
        try:
            read.take(run.contents, run.sizes)
            whole = whole._replace(value=b"".join(read.contents))
            made = assembled(read.spans, read.logs, self.rules)
            done = Tally()
            records = self._records(made, run, whole, newest_ms, done)
        except Exception as error:  # one run must not stop the others
            log.exception("trace %s: no trace could be made of its spans", run.trace_id)
            words = f"{type(error).__name__} while a trace was made of the spans; report it with this record"
            whole = whole._replace(value=b"".join(read.contents))
            return [
                self._letter(whole, InvalidTrace(Reason.ASSEMBLY_FAILED, "", words), tally),
                *self._bad(whole, read, tally),
            ]
        tally.join(done)
        tally.add("spans", "", len(read.spans))
        return [*self._bad(whole, read, tally), *records]

    def _bad(self, whole: SourceRecord, read: _Read, tally: Tally) -> list[tuple[OutputRecord, SourceRecord]]:
        return [self._letter(whole._replace(value=value), error, tally) for value, error in read.refused]

    def _records(
        self, made: Sequence[Assembled], run: ClosedRun, whole: SourceRecord, newest_ms: int | None, tally: Tally
    ) -> list[tuple[OutputRecord, SourceRecord]]:
        records = []
        for each in made:
            self._count(each, tally)
            if each.value is not None:
                records.append(self._trace(each, each.value, run, whole, newest_ms, tally))
            elif each.missing == "too_large":
                message = (
                    f"run {run.trace_id} exceeds KP_MAX_MESSAGE_BYTES (even with its texts cut), KP_MAX_STEPS or "
                    "KP_MAX_DEPTH; raise it"
                )
                records.append(self._letter(whole, InvalidTrace(Reason.TOO_LARGE, "", message), tally))
        return records

    def late(self, trace_id: str, part: Part, tally: Tally) -> tuple[OutputRecord, SourceRecord]:
        """Return the dead letter of spans that belong to a closed run."""
        try:
            content = unpacked(part.content, part.size)
        except RowError:
            content = part.content
        source = SourceRecord(part.topic, part.partition, part.offset, part.time_ms, trace_id.encode(), content)
        message = (
            "the run is closed, and its trace published without these; raise KP_ASSEMBLE_GRACE_SECONDS or _GAP_SECONDS"
        )
        tally.add("late")
        tally.add("dead_letters", str(Reason.LATE_SPAN))
        return dead_letter(source, InvalidTrace(Reason.LATE_SPAN, "", message)), source

    def _letter(self, source: SourceRecord, error: InvalidTrace, tally: Tally) -> tuple[OutputRecord, SourceRecord]:
        tally.refuse(error)
        return dead_letter(source, error), source

    def _count(self, each: Assembled, tally: Tally) -> None:
        for convention in each.conventions:
            tally.add("conventions", convention)
        tally.hints.update(each.hints)
        if each.unread:
            tally.unread.append(each.unread)
            tally.add("unread_runs")
        if each.missing is not None:
            tally.add("without_trace", each.missing)
        if each.cut and each.document is not None:
            tally.add("shortened")
            tally.shortened = tally.shortened or f"{each.document['id']}, by {each.cut} characters"

    def _trace(
        self, each: Assembled, value: bytes, run: ClosedRun, whole: SourceRecord, newest_ms: int | None, tally: Tally
    ) -> tuple[OutputRecord, SourceRecord]:
        key = (each.key if self.by_agent else run.trace_id).encode("utf-8", "replace")
        timestamp_ms = min(each.end_ns // 1_000_000, run.last_ms)  # not in the future
        if newest_ms is not None and timestamp_ms < newest_ms - self.kept_ms:
            timestamp_ms = newest_ms  # by the records' time: the local clock may be wrong
        tally.add("traces")
        tally.ends.append(each.end_ns / 1e9)
        output = OutputRecord(ASSEMBLED, key, value, [], timestamp_ms, partition=key_partition(key, self.partitions))
        return output, whole._replace(key=key, value=value)


def has_root(contents: Sequence[bytes]) -> bool:
    """Return whether the root of a run has ended, given its packed contents.

    If the spans of a run cannot be read, its root counts as not ended: when the run closes, they become dead letters
    with the reason.
    """
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


@dataclass(slots=True)
class _Read:
    """All parts of a run together."""

    contents: list[bytes] = field(default_factory=list)  # as far as they can be unpacked
    spans: list[Span] = field(default_factory=list)
    logs: list[LogEvent] = field(default_factory=list)
    refused: list[tuple[bytes, InvalidTrace]] = field(default_factory=list)

    def take(self, contents: Sequence[bytes], sizes: Sequence[int]) -> None:
        """Read the packed contents. Damaged ones are refused, and the rest is read."""
        for content, size in zip(contents, sizes or [MAX_RUN_BYTES] * len(contents), strict=True):
            try:
                self.contents.append(unpacked(content, size))
            except RowError as error:
                words = f"{error}; only kp-worker assemble may write to the topics of assemble"
                self.refused.append((content, InvalidTrace(Reason.NOT_OTLP, "", words)))
        room, counted = MAX_FIELDS, sum(map(len, self.contents)) > COUNTED_BYTES
        for content in self.contents:
            room -= fields_in(content, room) if counted else 0
            try:
                if room < 0:
                    words = f"the run has more than {MAX_FIELDS} spans, events, attributes and values; this is the rest"
                    raise InvalidSpans("too_large", "", words)
                found = decoded(content)
            except InvalidSpans as error:
                self.refused.append((content, InvalidTrace(Reason(error.reason), error.path, error.message)))
                continue
            self.spans += found.spans
            self.logs += found.logs
            if found.refused is not None:
                self.refused.append((found.refused.value, refusal(found.refused)))


def refusal(bad: Refused) -> InvalidTrace:
    """Return the error for a dead letter that holds only the bad spans of a record."""
    error = bad.error
    words = f"{error.message} (bad spans of this record: {bad.count}; this dead letter holds them, the others are used)"
    return InvalidTrace(Reason(error.reason), error.path, words)

"""What becomes of a closed run: its traces, or why it has none."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from aiokafka.partitioner import murmur2

from worker.assemble.open_runs import ClosedRun
from worker.assemble.rows import Part, unpacked
from worker.config import ConfigError, Settings
from worker.core.documents import dead_letter
from worker.core.records import ASSEMBLED, OutputRecord, SourceRecord
from worker.core.trace import InvalidTrace, Reason
from worker.runs.otlp.mapping import Assembled, assembled
from worker.runs.otlp.rules import Rules, parse_rules
from worker.runs.otlp.spans import Decoded, InvalidSpans, LogEvent, Span, decoded, links
from worker.runs.otlp.tree import is_complete

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Tally:
    """What a batch did, for the metrics once it is committed.

    `ends`: the ends of published runs, s since 1970. `hints`: how content that is missing can be had.
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    ends: list[float] = field(default_factory=list)
    hints: set[str] = field(default_factory=set)

    def add(self, name: str, label: str = "", number: int = 1) -> None:
        """Count something: `name` is an attribute of AssembleMetrics."""
        if number:
            self.counts[name, label] += number


NEEDED: Final = ("confidence", "domain", "visibility", "privacy")


def rules_from(settings: Settings) -> Rules:
    """Return the rules of KP_ASSEMBLE_CONFIDENCE, _DOMAIN, _VISIBILITY, _PRIVACY, _AGENT. Raises ConfigError."""
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
    """Makes records of closed runs. `by_agent`: the agent's id is the key, otherwise the trace's id.

    `partitions`: of the topic of traces. `kept_ms`: it takes and keeps records that are so old. `source`: topic and
    partition that dead letters name.
    """

    rules: Rules
    by_agent: bool
    partitions: int
    kept_ms: float
    source: tuple[str, int]

    def written(
        self, run: ClosedRun, offset: int, now_ms: int, tally: Tally
    ) -> list[tuple[OutputRecord, SourceRecord]]:
        """Return a run's traces, and dead letters of what cannot be read; each with what a dead letter shows of it.

        `offset`: of the record that closed the run.
        """
        tally.add("closed", run.cause)
        contents = [unpacked(content) for content in run.contents]
        whole = SourceRecord(*self.source, offset, run.last_ms, run.trace_id.encode(), b"".join(contents))
        try:
            read, problems = _read(contents)
            made = assembled(read.spans, read.logs, self.rules)
        except Exception as error:  # no run may stop the others
            log.exception("trace %s: no trace could be made of its spans", run.trace_id)
            words = f"{type(error).__name__} while a trace was made of the spans; report it with this record"
            return [(self._letter(whole, InvalidTrace(Reason.ASSEMBLY_FAILED, "", words), tally), whole)]
        tally.add("spans", "", len(read.spans))
        records = []
        for number, problem in problems:
            part = whole._replace(value=contents[number])
            letter = self._letter(part, InvalidTrace(Reason(problem.reason), problem.path, problem.message), tally)
            records.append((letter, part))
        for each in made:
            self._count(each, tally)
            if each.value is not None:
                records.append(self._trace(each, each.value, run, whole, now_ms, tally))
            elif each.missing == "too_large":
                message = "the trace exceeds KP_MAX_MESSAGE_BYTES, KP_MAX_STEPS or KP_MAX_DEPTH; raise it"
                records.append((self._letter(whole, InvalidTrace(Reason.TOO_LARGE, "", message), tally), whole))
        return records

    def late(self, trace_id: str, part: Part, tally: Tally) -> tuple[OutputRecord, SourceRecord]:
        """Return the dead letter of spans of a closed run."""
        content = unpacked(part.content)
        source = SourceRecord(part.topic, part.partition, part.offset, part.time_ms, trace_id.encode(), content)
        message = (
            "the run is closed, and its trace published without these; raise KP_ASSEMBLE_GRACE_SECONDS or _GAP_SECONDS"
        )
        tally.add("late")
        return self._letter(source, InvalidTrace(Reason.LATE_SPAN, "", message), tally), source

    def _letter(self, source: SourceRecord, error: InvalidTrace, tally: Tally) -> OutputRecord:
        tally.add("dead_letters", str(error.reason))
        return dead_letter(source, error)

    def _count(self, each: Assembled, tally: Tally) -> None:
        for convention in each.conventions:
            tally.add("conventions", convention)
        tally.hints.update(each.hints)
        if each.missing is not None:
            tally.add("without_trace", each.missing)

    def _trace(
        self, each: Assembled, value: bytes, run: ClosedRun, whole: SourceRecord, now_ms: int, tally: Tally
    ) -> tuple[OutputRecord, SourceRecord]:
        key = (each.key if self.by_agent else run.trace_id).encode("utf-8", "replace")
        timestamp_ms = min(each.end_ns // 1_000_000, run.last_ms)  # not of the future
        if timestamp_ms < now_ms - self.kept_ms:
            timestamp_ms = now_ms
        tally.add("traces")
        tally.ends.append(each.end_ns / 1e9)
        output = OutputRecord(ASSEMBLED, key, value, [], timestamp_ms, partition=key_partition(key, self.partitions))
        return output, whole._replace(key=key, value=value)


def has_root(contents: Sequence[bytes]) -> bool:
    """Return whether the root of a run has ended, given its packed contents."""
    return is_complete(link for content in contents for link in links(unpacked(content)))


def key_partition(key: bytes, partitions: int) -> int:
    """Return the partition of a key as Java's producer, and aiokafka's, choose it."""
    return int((murmur2(key) & 0x7FFFFFFF) % partitions)


def _read(contents: Sequence[bytes]) -> tuple[Decoded, list[tuple[int, InvalidSpans]]]:
    """Return what the contents hold together, and which ones cannot be read."""
    spans: list[Span] = []
    logs: list[LogEvent] = []
    problems = []
    for number, content in enumerate(contents):
        try:
            found = decoded(content)
        except InvalidSpans as error:
            problems.append((number, error))
            continue
        spans += found.spans
        logs += found.logs
    return Decoded(tuple(spans), tuple(logs)), problems

"""OTLP files, as written by the Collector's file exporter: their agents' runs as traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from io import BufferedReader
from typing import BinaryIO, Final, cast

from worker.commands.convert.report import FileReport
from worker.commands.shared.json_lines import line_limit, read_lines, too_long
from worker.commands.shared.run_traces import Options
from worker.core.terminal import number_of
from worker.runs.fields import Counts, RunRefused, fault
from worker.runs.otlp.mapping import CUT_OFF, Assembled, assembled
from worker.runs.otlp.rules import Rule, Rules
from worker.runs.otlp.spans import InvalidSpans, LogEvent, Span, decoded

_WORDS: Final = {
    "no_content": "the content of its messages was not captured",
    "no_objective": "no text of a user",
    "no_steps": "nothing but an objective",
    "no_value": "no span has an attribute that an option names",
    "too_large": "more than KP_MAX_MESSAGE_BYTES, KP_MAX_STEPS or KP_MAX_DEPTH",
}


def convert_spans(source: BinaryIO, options: Options, report: FileReport) -> Iterator[tuple[bytes, Counts]]:
    """Yield the trace of each run, and what became of its parts; runs without a trace go to the report.

    The whole file is read first, because a run's spans may be anywhere in it.
    """
    spans: dict[str, list[Span]] = {}
    logs: dict[str, list[LogEvent]] = {}
    for line, value, problem in _records(source, options.limits.max_bytes):
        try:
            if problem is not None:
                raise RunRefused("too_large", problem)
            read = decoded(value)
        except Exception as error:
            report.add_run()
            report.refuse(line, _refusal(error))
            continue
        if read.refused is not None:
            bad = read.refused
            report.add_refused(
                line, bad.error.reason, f"{bad.error}; {number_of(bad.count, 'span is', 'spans are')} left out"
            )
        for span in read.spans:
            spans.setdefault(span.trace_id, []).append(span)
        for log in read.logs:
            logs.setdefault(log.trace_id, []).append(log)
    rules = _rules(options)
    lost = Counts()
    for trace_id, found in spans.items():
        try:
            runs = assembled(found, logs.get(trace_id, []), rules)
        except Exception as error:
            report.add_run()
            report.refuse(None, fault(error), f"trace {trace_id}")
            continue
        for run in runs:
            if run.missing == "not_a_run":
                lost.drop("traces without a span of a model, a tool or an agent")
                continue
            report.add_run()
            if run.value is None or run.document is None:
                report.refuse(None, RunRefused(run.missing or "", _why(run)), f"trace {trace_id}")
                continue
            counts = Counts(Counter(step["type"] for step in run.document["steps"]))
            counts.change("messages cut off by OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", CUT_OFF in run.hints)
            if run.cut:
                counts.change("characters of long texts, cut to fit KP_MAX_MESSAGE_BYTES", run.cut)
            yield run.value, counts
    report.counts.dropped.update(lost.dropped)


def _refusal(error: Exception) -> RunRefused:
    """Return why a record cannot be read."""
    if isinstance(error, RunRefused):
        return error
    return RunRefused(error.reason, str(error)) if isinstance(error, InvalidSpans) else fault(error)


def _why(run: Assembled) -> str:
    """Return why a run has no trace, in words."""
    why = _WORDS[run.missing or ""]
    if run.unread and run.missing in ("no_content", "no_objective", "no_steps"):
        named = ", ".join(f"{scope} {name}" for scope, name in run.unread)
        why = f"its content seems to be in attributes that nothing reads: {named}"
    return "; ".join([why, *run.hints])


def _rules(options: Options) -> Rules:
    rules = {
        name: Rule(value.constant, value.check, ".".join(value.path or ())) for name, value in options.fields.items()
    }
    return Rules(
        rules["confidence"], rules["domain"], rules["visibility"], rules["privacy"], rules.get("success"),
        options.limits,
    )  # fmt: skip


def _records(source: BinaryIO, largest_trace: int) -> Iterator[tuple[int, bytes, str | None]]:
    """Yield the records with their numbers (from 1): JSON lines, or protobuf messages prefixed by a 4-byte length.

    The third value is set if a record is too long to be read.
    """
    head = cast("BufferedReader", source).peek(1)
    if head[:1] != b"\x00":
        if head[:1] == b"\x0a" and head.lstrip()[:1] not in (b"{", b""):
            yield 1, source.read(line_limit(largest_trace)), None
            return
        for line in read_lines(source, largest_trace):
            if line.problem is not None or line.data.strip():
                yield line.number, line.data, line.problem
        return
    number, most = 0, line_limit(largest_trace)
    while prefix := source.read(4):
        number += 1
        size = int.from_bytes(prefix, "big")
        if size > most:
            yield number, b"", too_long(most)
            return
        yield number, source.read(size), None

"""OTLP files, as the Collector's file exporter writes them: the runs of agents in them as traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from io import BufferedReader
from typing import BinaryIO, Final, cast

from worker.commands.convert.options import Options
from worker.commands.convert.report import FileReport
from worker.commands.shared.json_lines import line_limit, read_lines, too_long
from worker.runs.fields import Counts, RunRefused, fault
from worker.runs.otlp.mapping import Assembled, assembled
from worker.runs.otlp.rules import Rule, Rules
from worker.runs.otlp.spans import InvalidSpans, LogEvent, Span, decoded

_WORDS: Final = {
    "no_content": "the content of its messages was not captured",
    "no_objective": "no text of a user",
    "no_steps": "nothing but an objective",
    "no_value": "no span has an attribute that an option names",
    "too_large": "more than KP_MAX_MESSAGE_BYTES, KP_MAX_STEPS or KP_MAX_DEPTH",
}


def convert_spans(source: BinaryIO, options: Options, report: FileReport) -> Iterator[tuple[bytes | None, str, str]]:
    """Yield the trace of each run, its trace id and ""; or None, its trace id and why there is none.

    The whole file is read first, because a run's spans may be anywhere in it.
    """
    spans: dict[str, list[Span]] = {}
    logs: dict[str, list[LogEvent]] = {}
    for line, value, problem in _records(source, options.limits.max_bytes):
        try:
            if problem is not None:
                raise RunRefused("too_large", problem)
            read = decoded(value)
        except Exception as raised:
            error = raised if isinstance(raised, InvalidSpans | RunRefused) else fault(raised)
            report.add_run()
            report.add_refused(line, error.reason, str(error))
            yield None, f"{line}", f"{error.reason}: {error}"
            continue
        if read.refused is not None:
            bad = read.refused
            report.add_refused(line, bad.error.reason, f"{bad.error}; {bad.count} spans are left out")
        for span in read.spans:
            spans.setdefault(span.trace_id, []).append(span)
        for log in read.logs:
            logs.setdefault(log.trace_id, []).append(log)
    rules = _rules(options)
    counts = Counts()
    for trace_id, found in spans.items():
        try:
            runs = assembled(found, logs.get(trace_id, []), rules)
        except Exception as error:
            refusal = fault(error)
            report.add_run()
            report.add_refused(None, refusal.reason, f"trace {trace_id}: {refusal}")
            yield None, f"trace {trace_id}", f"{refusal.reason}: {refusal}"
            continue
        for run in runs:
            yield from _result(run, trace_id, report, counts)
    report.counts.dropped.update(counts.dropped)


def _result(
    run: Assembled, trace_id: str, report: FileReport, counts: Counts
) -> Iterator[tuple[bytes | None, str, str]]:
    if run.missing == "not_a_run":
        counts.drop("traces without a span of a model, a tool or an agent")
        return
    report.add_run()
    if run.value is None or run.document is None:
        reason = run.missing or ""
        words = "; ".join([_WORDS[reason], *run.hints])
        report.add_refused(None, reason, f"trace {trace_id}: {words}")
        yield None, f"trace {trace_id}", f"{reason}: {words}"
        return
    report.add_written(Counts(steps=Counter(step["type"] for step in run.document["steps"])))
    yield run.value, trace_id, ""


def _rules(options: Options) -> Rules:
    rules = {
        name: Rule(value.constant, value.check, ".".join(value.path or ())) for name, value in options.fields.items()
    }
    return Rules(
        rules["confidence"],
        rules["domain"],
        rules["visibility"],
        rules["privacy"],
        rules.get("success"),
        options.limits,
    )


def _records(source: BinaryIO, largest_trace: int) -> Iterator[tuple[int, bytes, str | None]]:
    """Yield the records with their numbers (from 1): JSON lines, or protobuf messages after their length in 4 bytes.

    The third value says that a record is too long, and is not read.
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

"""`kp-worker convert`: agents' logs as reasoning traces on standard output, and a report of the losses."""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import BufferedReader, RawIOBase
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

import click

from worker.commands.shared.console import (
    BadLines,
    Command,
    CommandError,
    JsonOutput,
    naming,
    open_argument,
    require_extra,
    say,
)
from worker.commands.shared.json_lines import Line, begins_list, line_limit, read_lines, too_long
from worker.commands.shared.options import read_settings, settings_options
from worker.commands.shared.run_traces import (
    Group,
    Options,
    group_name,
    option_name,
    parse_options,
    trace_of_request,
    traces_of,
)
from worker.commands.shared.session_files import session_files_below
from worker.core.terminal import number_of
from worker.core.trace import InvalidTrace
from worker.runs.fields import Counts, RunRefused, fault, parse_json
from worker.runs.sessions.formats import Format
from worker.runs.sessions.session import FORMATS as SESSIONS
from worker.runs.sessions.session import AgentSession, Request, format_of, line_values

if TYPE_CHECKING:
    from worker.runs.otlp.mapping import Assembled
    from worker.runs.otlp.spans import LogEvent, Span


class _Convert(Command):
    """Also reports a missing --created-at, since messages have no time."""

    def missing(self, given: Mapping[str, Any]) -> list[str]:
        """Return the required options that are missing."""
        return [*super().missing(given), *_lacking(given.get("form", "auto"), given)]


def _lacking(form: str, given: Mapping[str, Any]) -> list[str]:
    """Return the missing options that a form needs besides those that all forms need, as an error names them."""
    lacking = []
    if form != "otlp" and form not in SESSIONS and given.get("success") is None:
        lacking.append("--success (not for OTLP and sessions)" if form == "auto" else "--success")
    if form not in ("atif", "otlp", *SESSIONS) and given.get("created_at") is None:
        others = "not for ATIF, OTLP and sessions, which have times"
        others = others if form == "auto" else f"messages of {form} have no time"
        lacking.append(f"--created-at ({others})")
    return lacking


@click.command(cls=_Convert)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, readable=True, allow_dash=True))
@click.option("--from", "form", default="auto", show_default=True,
              type=click.Choice(["auto", "chat", "anthropic", "responses", "langchain", "atif", "otlp", *SESSIONS]),
              help="Form of FILES: messages (OpenAI chat, Anthropic, OpenAI Responses, LangChain), ATIF v1.x, OTLP, "
              "or a coding agent's sessions.")  # fmt: skip
@click.option("--success", metavar="VALUE", help="true, false or @path; @path=TEXT: true if the field is TEXT. "
              "Required, except for OTLP and sessions.")  # fmt: skip
@click.option("--confidence", required=True, metavar="VALUE", help="0 to 1, or @path.")
@click.option("--domain", required=True, metavar="VALUE", help="metadata.task_domain.")
@click.option("--visibility", required=True, metavar="VALUE", help="private, org, network or @path.")
@click.option("--privacy", required=True, metavar="VALUE", help="metadata.privacy_level: aggregated, federated, "
              "private or @path.")  # fmt: skip
@click.option("--created-at", metavar="VALUE", help="ISO 8601 with a zone, or @path (also seconds since 1970). "
              "Required for messages [the last timestamp; OTLP: the first span's start].")  # fmt: skip
@click.option("--agent-id", metavar="VALUE", help="metadata.agent_id, the record's key in publish [sessions: the "
              "agent's name].")  # fmt: skip
@click.option("--framework", metavar="VALUE", help="metadata.framework [ATIF, sessions: the agent's name].")
@click.option("--objective", metavar="VALUE", help="task.objective [the user's first text].")
@click.option("--result-summary", metavar="VALUE", help="outcome.result_summary [the agent's last text].")
@click.option("--messages", metavar="@PATH", help="Where an object has its messages [@messages; Responses API: @input "
              "and @output].")  # fmt: skip
@click.option("--append", metavar="@PATH", help="Where the response is, in a log of requests and responses.")
@click.option("--group-by", metavar="@PATH", help="Each line is one call; lines with the same value here are one "
              "conversation.")  # fmt: skip
@click.option("--keep", multiple=True, metavar="NAME=@PATH", help="Copy a field of the run to the trace as NAME; may "
              "be repeated.")  # fmt: skip
@click.option("--error-prefix", "error_prefixes", multiple=True, metavar="TEXT",
              help="A tool result that starts with TEXT is an error; may be repeated.")  # fmt: skip
@click.option("--max-content", type=click.IntRange(1), metavar="N", help="Truncate each step's content at N "
              "characters.")  # fmt: skip
@click.option("--report", type=click.Path(dir_okay=False, path_type=Path),
              help="Also write the report to FILE, as JSON.")  # fmt: skip
@settings_options
def convert(
    files: tuple[str, ...], form: str, messages: str | None, append: str | None, group_by: str | None,
    keep: tuple[str, ...], error_prefixes: tuple[str, ...], max_content: int | None, report: Path | None,
    **values: str | None,
) -> None:  # fmt: skip
    """Convert agents' logs to reasoning traces: JSON Lines on standard output, to be piped to publish.

    \b
    kp-worker convert runs.jsonl --success @ok ... | kp-worker publish -

    A line is a run; so is a file of one pretty-printed document; - is standard input, and of a folder the session
    files (*.jsonl) below it are read. In a coding agent's session, each request of the user is a run. A VALUE is a
    constant, or @path.to.field of each run. Texts are copied with any secrets in them; content that has no place in
    a trace is counted on standard error. Exit code 1: a run was refused, a line of a session was not read, or there
    was no run.
    """  # noqa: D301 click's mark for text that it must not wrap
    settings = read_settings()
    if group_by is not None and not group_by.startswith("@"):
        group_by = f"@{group_by}"
    fields = {"messages": messages, "append": append, "group_by": group_by}
    if form != "auto" and (lacking := _lacking(form, values)):
        raise click.UsageError(f"Missing: {', '.join(lacking)}.")
    if form in ("atif", *SESSIONS) and any(fields.values()):
        first = next(option_name(name) for name, path in fields.items() if path is not None)
        raise click.UsageError(f"{first} requires --from chat, or another form of messages")
    if form == "otlp":
        others = fields | {"keep": keep, "error_prefix": error_prefixes, "max_content": max_content}
        names = ("created_at", "agent_id", "framework", "objective", "result_summary", *others)  # the spans have these
        if given := [option_name(name) for name in names if (values | others)[name]]:
            raise click.UsageError(f"{', '.join(given)}: spans have no place for it; leave it out with --from otlp")
    try:
        options = parse_options(values, keep, form, max_content, settings.limits, error_prefixes, fields)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    output, seen, done = JsonOutput(sys.stdout.buffer), set[str](), list[Conversion]()
    paths = [path for file in files for path in (_session_paths(file) if Path(file).is_dir() else [file])]
    for file in paths:
        of_file = Conversion("standard input" if file == "-" else file, output, options, seen)
        done.append(of_file)
        with _open(file) as runs, naming(file):
            try:
                of_file.convert(runs)
            except click.UsageError as error:
                if len(paths) == 1:
                    raise
                of_file.lose(of_file.refused, 0, RunRefused("missing_option", error.message))
        of_file.bad.say_rest(f"--report FILE.json lists the first {MAX_EXAMPLES}")
        say("\n".join(of_file.lines()))
    if report is not None:
        with naming(report):
            documents = {"files": [of_file.as_dict() for of_file in done]}
            report.write_bytes(json.dumps(documents, indent=2, ensure_ascii=False).encode() + b"\n")
    if any(of_file.refused or of_file.unread for of_file in done) or not any(of_file.written for of_file in done):
        sys.exit(1)


def _session_paths(folder: str) -> list[str]:
    files, unreadable = session_files_below(folder)
    for error in unreadable.values():
        raise error
    if not files:
        raise CommandError(f"{folder}: no session file (*.jsonl) is below this folder; give other files by their names")
    return [*files]


def _open(file: str) -> BufferedReader:
    source = open_argument("FILES", file)
    return cast("BufferedReader", source if hasattr(source, "peek") else BufferedReader(cast("RawIOBase", source)))


MAX_EXAMPLES: Final = 100
"""Refused runs that a report lists; all are counted."""


@dataclass
class Conversion:
    """The conversion of one file, and its losses; the first of these are named on standard error."""

    file: str
    output: JsonOutput
    options: Options
    seen: set[str]  # keys of session requests already read; a copy of a session has them too
    written: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # runs
    unread: Counter[str] = field(default_factory=Counter)  # lines of a session; their runs are converted without them
    counts: Counts = field(default_factory=Counts)
    examples: list[dict[str, object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bad = BadLines(self.file)

    def convert(self, source: BufferedReader) -> None:
        """Write the traces of all runs, and report the others."""
        options = self.options
        if options.form == "otlp" or (options.form == "auto" and _begins_as_otlp(source)):
            self._convert_spans(source)
            return
        lines, first = _lines(source, self.file, options.limits.max_bytes), None
        form = SESSIONS.get(options.form)
        if options.form == "auto" and not (options.messages or options.append or options.group_by):
            begin, first = _begin(lines)
            lines, form = chain(begin, lines), format_of(first)
        if form is not None:
            for request in self._requests(lines, form):
                if request.key in self.seen:
                    self._drop(Counter(["requests that were read before"]))
                    continue
                self.seen.add(request.key)
                with self._reporting(request.first):
                    self._write(*trace_of_request(request, options))
            return
        if "success" not in options.fields and not _is_trace(first):
            lacking = ", ".join(_lacking("auto", options.fields))
            raise click.UsageError(f"Missing: {lacking}. {self.file} is neither OTLP nor a session.")
        groups: dict[str, Group] = {}
        for line in lines:
            with self._reporting(line.number):
                run = _parsed(line)
                if options.group_by is None:
                    for trace, counts in traces_of(run, options):
                        self._write(trace, counts)
                else:
                    name = group_name(run, options.group_by)
                    group = groups.get(name) or Group(options)
                    group.add(run, line.number)
                    groups[name] = group
            if line.number == 1 and self.refused and begins_list(line.data):
                say("each line must hold one run: jq -c '.[]' writes an array of runs as one run on each line")
                return
        for group in groups.values():
            with self._reporting(group.line):
                self._write(*group.trace())

    def _convert_spans(self, source: BufferedReader) -> None:
        """Convert a file of the Collector's file exporter. It is read first: a run's spans may be anywhere in it."""
        require_extra("otlp")
        from worker.runs.otlp.mapping import CUT_OFF, assembled
        from worker.runs.otlp.rules import Rule, Rules
        from worker.runs.otlp.spans import InvalidSpans, decoded

        limits = self.options.limits
        spans: dict[str, list[Span]] = defaultdict(list)
        logs: dict[str, list[LogEvent]] = defaultdict(list)
        for line in _otlp_records(source, limits.max_bytes):
            with self._reporting(line.number):
                try:
                    record = decoded(line.content())
                except InvalidSpans as error:
                    raise RunRefused(error.reason, str(error)) from None
                for span in record.spans:
                    spans[span.trace_id].append(span)
                for log in record.logs:
                    logs[log.trace_id].append(log)
                if (bad := record.refused) is not None:
                    left_out = number_of(bad.count, "span is", "spans are")
                    raise RunRefused(bad.error.reason, f"{bad.error}; {left_out} left out")
        given = {
            name: Rule(value.constant, value.check, ".".join(value.path or ()))
            for name, value in self.options.fields.items()
        }
        rules = Rules(
            given["confidence"], given["domain"], given["visibility"], given["privacy"], given.get("success"), limits
        )
        for trace_id, of_trace in spans.items():
            place = f"trace {trace_id}"
            with self._reporting(0, place):
                for run in assembled(of_trace, logs.get(trace_id, []), rules):
                    if run.missing == "not_a_run":
                        self._drop(Counter(["traces without a span of a model, a tool or an agent"]))
                    elif run.value is None or run.document is None:
                        self.lose(self.refused, 0, RunRefused(run.missing or "", _why(run)), place)
                    else:
                        counts = Counts(Counter(step["type"] for step in run.document["steps"]))
                        cut_off = "messages cut off by OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT"
                        counts.change(cut_off, CUT_OFF in run.hints)
                        counts.change("characters of long texts, cut to fit KP_MAX_MESSAGE_BYTES", run.cut)
                        self._write(run.value, counts)

    def _requests(self, lines: Iterable[Line], form: Format) -> Iterator[Request]:
        """Yield the requests of a session as they close, and report what cannot be read."""
        session = AgentSession(form)
        for line in lines:
            values, error = (
                line_values(line.data) if line.problem is None else ([], RunRefused("too_large", line.problem))
            )
            for value in values:
                inner = form.lines(value) if isinstance(value, dict) else None
                for at, entry in enumerate([value] if inner is None else inner):
                    try:
                        yield from session.add(entry, line.number if inner is None else at)
                    except RunRefused as refused:
                        self.lose(self.unread, line.number, refused, "" if inner is None else f"entry {at}")
            if error is not None:
                session.skip(line.number)
                self.lose(self.unread, line.number, error)
        yield from session.close()
        self._drop(session.counts.dropped)

    @contextmanager
    def _reporting(self, line: int, place: str = "") -> Iterator[None]:
        """Report a run that the code inside cannot convert, whatever is wrong, but raise the errors of files."""
        try:
            yield
        except OSError:
            raise
        except InvalidTrace as error:  # of a line that is too long
            self.lose(self.refused, line, RunRefused(str(error.reason), str(error)), place)
        except Exception as error:
            self.lose(self.refused, line, error if isinstance(error, RunRefused) else fault(error), place)

    def _write(self, trace: bytes, counts: Counts) -> None:
        self.output.write(trace + b"\n")
        self.output.flush()  # the next command in a pipe gets each trace at once
        self.written += 1
        self.counts.steps.update(counts.steps)
        self._drop(counts.dropped)
        _add_bounded(self.counts.changed, counts.changed)

    def _drop(self, parts: Counter[str]) -> None:
        """Count parts that have no place in a trace."""
        _add_bounded(self.counts.dropped, parts)

    def lose(self, losses: Counter[str], line: int, error: RunRefused, place: str = "") -> None:
        """Count and name a loss, in `refused` or `unread`. `line`: 0 if unknown; `place`: in the line, or the trace."""
        losses[error.reason] += 1
        where = (f"{line}:" if line else "") + (f" {place}:" if place else "")
        self.bad.name(f"{where} {error.reason}: {error}")
        if len(self.examples) < MAX_EXAMPLES:
            message = f"{place}: {error}" if place else str(error)
            self.examples.append({"line": line or None, "reason": error.reason, "message": message})

    def as_dict(self) -> dict[str, object]:
        """Return the report as JSON data; counts in descending order."""
        runs = {"written": self.written, "refused": self.refused.total()}
        return {
            "file": self.file, "runs": {"read": sum(runs.values()), **runs},
            "steps": dict(self.counts.steps.most_common()), "dropped": _sorted(self.counts.dropped),
            "changed": _sorted(self.counts.changed), "unread_lines": _sorted(self.unread),
            "refused": {"by_reason": _sorted(self.refused), "first": self.examples},
        }  # fmt: skip

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        refused = self.refused.total()
        runs = f"{number_of(self.written + refused, 'run')} read, {self.written} written, {refused} refused"
        if unread := self.unread.total():
            runs += f", {number_of(unread, 'line')} not read"
        steps = [f"{count} {kind}" for kind, count in self.counts.steps.most_common()]
        lines = [f"{self.file}: {runs}" + (f" ({', '.join(steps)})" if steps else "")]
        for title, counts in (("not in the traces", self.counts.dropped), ("changed", self.counts.changed)):
            if counts:
                lines.append(f"  {title}:")
                width = len(str(max(counts.values())))
                lines += [f"    {count:>{width}}  {kind}" for kind, count in _sorted(counts).items()]
        return lines


def _begin(lines: Iterator[Line]) -> tuple[list[Line], Any]:
    """Return the lines up to the first JSON value, and this; None if there is none in 20 lines (it may be a pipe)."""
    begin: list[Line] = []
    for line in islice(lines, 20):
        begin.append(line)
        with suppress(ValueError):
            return begin, parse_json(line.data)
    return begin, None


def _is_trace(value: Any) -> bool:
    return isinstance(value, dict) and value.get("@type") == "ReasoningTrace"


def _parsed(line: Line) -> Any:
    raw = line.content()
    try:
        value = parse_json(raw)
    except ValueError as error:
        raise RunRefused("not_json", f"{error}; a run is one JSON document on one line") from None
    if _is_trace(value):
        raise RunRefused("already_a_trace", "it is already a trace: give it to score or publish")
    return value


def _begins_as_otlp(source: BufferedReader) -> bool:
    """Return whether a file is OTLP: JSON by its first key, protobuf by its first byte."""
    head = source.peek(64)
    text = head.lstrip()
    if text[:1] in (b"{", b"["):
        return text[1:].lstrip().startswith((b'"resourceSpans"', b'"resourceLogs"'))
    return head[:1] in (b"\x00", b"\x0a") and text != b""


def _lines(source: BinaryIO, file: str, largest_trace: int) -> Iterator[Line]:
    """Yield the lines that are not blank; the whole file, as line 0, if its name ends with .json."""
    if file.endswith(".json"):
        most = line_limit(largest_trace)
        raw = source.read(most + 1)
        yield Line(0, raw, len(raw), too_long(most) if len(raw) > most else None)
        return
    yield from (line for line in read_lines(source, largest_trace) if not line.blank)


def _otlp_records(source: BufferedReader, largest_trace: int) -> Iterator[Line]:
    """Yield OTLP records: JSON lines, one protobuf message, or several, each behind its length in 4 bytes."""
    head, most = source.peek(1), line_limit(largest_trace)
    if head[:1] != b"\x00":
        if head[:1] == b"\x0a" and head.lstrip()[:1] not in (b"{", b""):
            raw = source.read(most)
            yield Line(1, raw, len(raw))
        else:
            yield from _lines(source, "", largest_trace)
        return
    number = 0
    while prefix := source.read(4):
        number += 1
        size = int.from_bytes(prefix, "big")
        if size > most:
            yield Line(number, b"", size, too_long(most))
            return
        yield Line(number, source.read(size), size)


def _why(run: Assembled) -> str:
    """Return why a run has no trace, in words."""
    from worker.runs.otlp.mapping import LACKS

    why = LACKS[run.missing or ""]
    if run.unread and run.missing in ("no_content", "no_objective", "no_steps"):
        named = ", ".join(f"{scope} {name}" for scope, name in run.unread)
        why = f"its content seems to be in attributes that nothing reads: {named}"
    return "; ".join([why, *run.hints])


def _add_bounded(total: Counter[str], more: Counter[str]) -> None:
    """Add counts of losses, of at most 100 kinds: a log with ids as field names must not exhaust the memory."""
    for kind, count in more.items():
        short = kind if len(kind) <= 60 else kind[:60] + "..."
        total[short if short in total or len(total) < 100 else "other fields"] += count


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

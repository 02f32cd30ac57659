"""`kp-worker convert`: agents' logs as reasoning traces on standard output, and a report of what they lost."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import click

from worker.commands.convert.options import Options, parse_options
from worker.commands.convert.report import MAX_EXAMPLES, FileReport
from worker.commands.convert.trace import Group, group_name, new_group, traces_of
from worker.commands.shared.console import (
    ArgumentError,
    BadLines,
    Command,
    CommandError,
    discard_buffered,
    file_problem,
    json_output,
    naming,
    open_file,
    require_extra,
    say,
)
from worker.commands.shared.json_lines import is_pretty_printed, line_limit, read_lines, too_long
from worker.commands.shared.options import read_settings, settings_options
from worker.runs.fields import Counts, RunRefused, fault
from worker.runs.steps import parse_json

FORMS: Final = ("auto", "chat", "anthropic", "responses", "langchain", "atif", "otlp")

_WITHOUT_TIME: Final = ("chat", "anthropic", "responses", "langchain")

_OF_SPANS: Final = ("created_at", "agent_id", "framework", "objective", "result_summary")
"""Options whose values spans have themselves."""


class _Convert(Command):
    """Names --created-at among what is missing: messages have no time of their own."""

    def missing(self, given: Mapping[str, Any]) -> list[str]:
        """Return what is required and not given."""
        return [*super().missing(given), *_lacking(given.get("form", "auto"), given)]


def _lacking(form: str, given: Mapping[str, Any]) -> list[str]:
    """Return which options a form needs besides those that all need, and are not given; as an error names them."""
    lacking = []
    if form != "otlp" and given.get("success") is None:
        lacking.append("--success (not for OTLP)" if form == "auto" else "--success")
    if form in ("auto", *_WITHOUT_TIME) and given.get("created_at") is None:
        others = "not for ATIF and OTLP, which have times" if form == "auto" else f"messages of {form} have no time"
        lacking.append(f"--created-at ({others})")
    return lacking


@click.command(cls=_Convert)
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, readable=True, allow_dash=True)
)
@click.option("--from", "form", type=click.Choice(FORMS), default="auto", show_default=True,
              help="Form of FILES: chat messages in OpenAI's style, messages of Anthropic's API, items of OpenAI's "
              "Responses API, messages of LangChain, ATIF trajectories (v1.x), or OTLP.")  # fmt: skip
@click.option("--success", metavar="VALUE",
              help="true, false, or @path; @path=TEXT is true if the field is TEXT. Required, except for OTLP, where "
              "spans have a status.")  # fmt: skip
@click.option("--confidence", required=True, metavar="VALUE", help="A number from 0 to 1, or @path.")
@click.option("--domain", required=True, metavar="VALUE", help="metadata.task_domain.")
@click.option("--visibility", required=True, metavar="VALUE", help="private, org or network, or @path.")
@click.option("--privacy", required=True, metavar="VALUE",
              help="metadata.privacy_level: aggregated, federated or private, or @path.")  # fmt: skip
@click.option("--created-at", metavar="VALUE", help="ISO 8601 with its zone, or @path (also seconds since 1970) [ATIF: "
              "the last timestamp; OTLP: the first span's start; required for the others].")  # fmt: skip
@click.option("--agent-id", metavar="VALUE", help="metadata.agent_id; publish uses it as the record's key [none].")
@click.option("--framework", metavar="VALUE", help="metadata.framework [ATIF: the agent's name; chat: none].")
@click.option("--objective", metavar="VALUE", help="task.objective [the first text of the user].")
@click.option("--result-summary", metavar="VALUE", help="outcome.result_summary [the last text of the agent].")
@click.option("--messages", metavar="@PATH",
              help="The list of messages in a run that is an object [@messages; Responses API: @input and @output].",
              )  # fmt: skip
@click.option("--append", metavar="@PATH",
              help="Where the response is, in a log of requests and responses.")  # fmt: skip
@click.option("--group-by", metavar="@PATH",
              help="Each line is one call; lines with the same value in this field are one conversation.")  # fmt: skip
@click.option("--keep", multiple=True, metavar="NAME=@PATH",
              help="Copy a field of the run to the trace as NAME, such as a label; may be repeated.")  # fmt: skip
@click.option("--error-prefix", "error_prefixes", multiple=True, metavar="TEXT",
              help="A tool result that starts with TEXT is an error; may be repeated.")  # fmt: skip
@click.option(
    "--max-content", type=click.IntRange(1), metavar="N", help="Truncate the content of a step at N characters."
)
@click.option(
    "--report", type=click.Path(dir_okay=False, path_type=Path), help="Write the report to this file, as JSON."
)
@settings_options
def convert(
    files: tuple[str, ...], form: str, messages: str | None, append: str | None, group_by: str | None,
    keep: tuple[str, ...], error_prefixes: tuple[str, ...], max_content: int | None, report: Path | None,
    **values: str | None,
) -> None:  # fmt: skip
    """Convert agents' logs to reasoning traces: JSON Lines on standard output, to be piped to publish.

    \b
    kp-worker convert runs.jsonl --success @ok ... | kp-worker publish -

    One run per line; a file whose name ends with .json is one run; - is standard input. A VALUE is a constant, or
    @path.to.field of each run; nothing is guessed. What has no place in a trace is counted for each file on standard
    error. Texts are copied as they are, with any secrets in them. Exit codes: 0 all runs written; 1 some refused, or
    none read; 2 wrong options.
    """  # noqa: D301 click's mark for text that it must not wrap
    settings = read_settings()
    if group_by is not None and not group_by.startswith("@"):
        group_by = f"@{group_by}"
    paths = {"messages": messages, "append": append, "group_by": group_by}
    if form != "auto" and (lacking := _lacking(form, values)):
        raise click.UsageError(f"Missing: {', '.join(lacking)}.")
    if form == "atif" and any(paths.values()):
        raise click.UsageError(f"--{_first_of(paths)} requires --from chat, or another form of messages")
    if form == "otlp":
        _check_spans(values | paths | {"keep": keep, "error_prefix": error_prefixes, "max_content": max_content})
    try:
        options = parse_options(values, keep, paths, form, error_prefixes, max_content, settings.limits)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    output, reports = sys.stdout.buffer, []
    try:
        for file in files:
            reports.append(FileReport("standard input" if file == "-" else file))
            bad = BadLines(reports[-1].file)
            with _open(file) as runs, naming(file):
                _convert_file(_peekable(runs), json_output(output), options, reports[-1], bad)
            bad.say_rest(f"--report FILE.json lists the first {MAX_EXAMPLES}")
            say("\n".join(reports[-1].lines()))
        output.flush()
        if report is not None:
            with naming(report):
                report.write_bytes(_as_json(reports))
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_buffered(output)
        raise CommandError(file_problem(error)) from None
    if any(each.refused for each in reports) or not any(each.written for each in reports):
        sys.exit(1)


def _check_spans(values: Mapping[str, object]) -> None:
    """Refuse options that spans leave no room for. Raises UsageError."""
    names = (*_OF_SPANS, "messages", "append", "group_by", "keep", "error_prefix", "max_content")
    given = [f"--{name.replace('_', '-')}" for name in names if values[name]]
    if given:
        raise click.UsageError(f"{', '.join(given)}: OTLP has no place for it; leave it out with --from otlp")


def _first_of(paths: Mapping[str, str | None]) -> str:
    return next(name.replace("_", "-") for name, path in paths.items() if path is not None)


def _peekable(source: BinaryIO) -> BinaryIO:
    return source if hasattr(source, "peek") else cast("BinaryIO", BufferedReader(cast("RawIOBase", source)))


def _open(file: str) -> BinaryIO:
    try:
        return open_file(file, "rb")
    except OSError as error:
        raise ArgumentError("FILES", f"{file}: {error.strerror}") from None


def _convert_file(source: BinaryIO, output: BinaryIO, options: Options, report: FileReport, bad: BadLines) -> None:
    if options.form == "otlp" or (options.form == "auto" and _begins_as_otlp(source)):
        _convert_otlp(source, output, options, report, bad)
        return
    if "success" not in options.fields:
        raise click.UsageError(f"Missing: {', '.join(_lacking('auto', options.fields))}.")
    groups: dict[str, Group] = {}
    for line, raw, problem in _runs(source, report.file, options.limits.max_bytes):
        if options.group_by is None:
            report.add_run()
        written = 0
        try:
            if problem is not None:
                raise RunRefused("too_large", problem)
            run = _parsed(raw)
            if options.group_by is not None:
                _add_call(groups, run, line, options)
                continue
            for trace, counts in _traces(run, options):
                if written:
                    report.add_run()  # of a subagent
                written += 1
                report.add_written(counts)
                _write(output, trace)
        except RunRefused as error:
            if written or options.group_by is not None:
                report.add_run()
            _refuse(report, bad, line, error)
            if line == 1 and is_pretty_printed(raw):
                say(
                    "one run a line is expected: jq -c . makes it one line (jq -c '.[]' where it is an array of runs); "
                    "or name the file of one run .json"
                )
                return
    for group in groups.values():
        report.add_run()
        try:
            trace, counts = group.trace(options)
        except RunRefused as error:
            _refuse(report, bad, group.line, error)
        except Exception as error:
            _refuse(report, bad, group.line, fault(error))
        else:
            report.add_written(counts)
            _write(output, trace)


def _traces(run: Any, options: Options) -> Iterator[tuple[bytes, Counts]]:
    """Yield as traces_of. Raises RunRefused, whatever that raises."""
    try:
        yield from traces_of(run, options)
    except RunRefused:
        raise
    except Exception as error:
        raise fault(error) from error


def _parsed(raw: bytes) -> Any:
    try:
        return parse_json(raw)
    except ValueError as error:
        raise RunRefused("not_json", f"{error}; a run is one JSON document") from None


def _add_call(groups: dict[str, Group], run: Any, line: int | None, options: Options) -> None:
    """Add a call to its conversation. Raises RunRefused."""
    name = group_name(run, options.group_by or ())
    group = groups.get(name) or new_group(options)
    try:
        group.add(run, line, options)
    except RunRefused:
        raise
    except Exception as error:
        raise fault(error) from error
    groups[name] = group


def _refuse(report: FileReport, bad: BadLines, line: int | None, error: RunRefused) -> None:
    report.add_refused(line, error.reason, str(error))
    bad.name(f"{'' if line is None else f'{line}:'} {error.reason}: {error}")


def _write(output: BinaryIO, trace: bytes) -> None:
    output.write(trace + b"\n")
    sys.stdout.buffer.flush()  # the next command of a pipe gets each trace when it is there


def _begins_as_otlp(source: BinaryIO) -> bool:
    """Return whether a file is OTLP: in JSON by its first key, in protobuf by its first byte."""
    head = cast("BufferedReader", source).peek(64)
    text = head.lstrip()
    if text[:1] in (b"{", b"["):
        return text[1:].lstrip().startswith((b'"resourceSpans"', b'"resourceLogs"'))
    return head[:1] in (b"\x00", b"\x0a") and text != b""


def _convert_otlp(source: BinaryIO, output: BinaryIO, options: Options, report: FileReport, bad: BadLines) -> None:
    require_extra("otlp")
    from worker.commands.convert.otlp import convert_spans

    for trace, where, problem in convert_spans(source, options, report):
        if trace is None:
            bad.name(f" {where}: {problem}")
        else:
            _write(output, trace)


def _runs(source: BinaryIO, file: str, largest_trace: int) -> Iterator[tuple[int | None, bytes, str | None]]:
    """Yield the runs with their lines (from 1): one run a line, or the whole file if its name ends with .json.

    The third value says that a run is too long, and is not read.
    """
    if file.endswith(".json"):
        most = line_limit(largest_trace)
        raw = source.read(most + 1)
        yield None, raw, too_long(most) if len(raw) > most else None
        return
    for line in read_lines(source, largest_trace):
        if line.problem is not None or line.data.strip():
            yield line.number, line.data, line.problem


def _as_json(reports: Sequence[FileReport]) -> bytes:
    return json.dumps({"files": [each.as_dict() for each in reports]}, indent=2, ensure_ascii=False).encode() + b"\n"

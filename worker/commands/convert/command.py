"""`kp-worker convert`: agents' logs as reasoning traces on standard output, and a report of what they lost."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

from worker.commands.convert.atif import read_atif
from worker.commands.convert.chat import read_chat
from worker.commands.convert.options import FieldPath, RunRefused, find_field, unused_fields
from worker.commands.convert.options import Options as ConvertOptions
from worker.commands.convert.report import FileReport
from worker.commands.convert.trace import Transcript, parse_json, trace_of
from worker.commands.shared.console import ArgumentError, CommandError, discard_buffered, json_output, open_file, say
from worker.commands.shared.json_lines import is_pretty_printed, line_limit, read_lines, too_long

LogFormat = Literal["chat", "atif"]

READERS: Final[dict[LogFormat, Callable[[Any, Transcript], None]]] = {"chat": read_chat, "atif": read_atif}


def run_convert(files: Sequence[str], source: LogFormat, options: ConvertOptions, report: Path | None) -> int:
    """Convert files (- is standard input) and return the exit code. Raises CommandError, ArgumentError."""
    output, reports = sys.stdout.buffer, []
    try:
        for file in files:
            reports.append(FileReport("standard input" if file == "-" else file))
            with _open(file) as runs:
                _convert_file(runs, json_output(output), READERS[source], options, reports[-1])
            say("\n".join(reports[-1].lines()))
        output.flush()
        if report is not None:
            report.write_bytes(_as_json(reports))
    except OSError as error:
        discard_buffered(output)
        if isinstance(error, BrokenPipeError):  # the reader of the pipe has closed it
            sys.exit(1)
        raise CommandError(f"cannot read or write: {error}") from None
    return 1 if any(each.refused for each in reports) or not any(each.written for each in reports) else 0


def _open(file: str) -> BinaryIO:
    try:
        return open_file(file, "rb")
    except OSError as error:
        raise ArgumentError("FILES", f"{file}: {error.strerror}") from None


def _convert_run(
    raw: bytes, read: Callable[[Any, Transcript], None], options: ConvertOptions
) -> tuple[bytes, Transcript]:
    """Return the trace of a run as JSON, and what became of its parts. Raises RunRefused."""
    try:
        run = parse_json(raw)
    except ValueError as error:
        raise RunRefused("not_json", f"{error}; a run is one JSON document") from None
    transcript = Transcript(options)
    if "objective" in options.fields:
        transcript.objective = options.fields["objective"].value(run)
    read(run, transcript)
    transcript.finish()
    trace = trace_of(run, transcript, options)
    if isinstance(run, dict):
        for name in unused_fields(run, transcript.used | _paths_in(run, options)):
            transcript.counts.drop(name)
    return trace, transcript


def _paths_in(run: dict[str, Any], options: ConvertOptions) -> set[FieldPath]:
    paths = [field.path for field in (*options.fields.values(), *options.keep.values()) if field.path is not None]
    return {found[0] for path in paths if (found := find_field(run, path)) is not None}


def _convert_file(
    source: BinaryIO, output: BinaryIO, read: Callable[[Any, Transcript], None], options: ConvertOptions,
    report: FileReport,
) -> None:  # fmt: skip
    for line, raw, problem in _runs(source, report.file, options.limits.max_bytes):
        report.add_run()
        try:
            if problem is not None:
                raise RunRefused("too_large", problem)
            trace, transcript = _convert_run(raw, read, options)
        except RunRefused as error:
            report.add_refused(line, error.reason, str(error))
            say(f"{report.file}:{'' if line is None else f'{line}:'} {error.reason}: {error}")
            if line == 1 and is_pretty_printed(raw):
                say("one run a line is expected: jq -c . makes it one line; or name the file of one run .json")
                return
        else:
            report.add_written(transcript.counts)
            output.write(trace + b"\n")
            sys.stdout.buffer.flush()  # the next command of a pipe gets each trace when it is there


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

"""`kp-worker report`: one HTML page on scored traces, from a file or from the topics.

Lives here: where the documents come from, and what standard error says at the end. Must not live here: numbers
(report_columns.py, report_summary.py), the page (report_page.py).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from rich.console import Console

from worker.commands.console import CommandError, SettingsError, open_file, read_settings, say
from worker.commands.report_columns import Traces
from worker.commands.report_numbers import ReportNumbers
from worker.commands.report_summary import EmptyReport, summarize
from worker.config import ConfigError
from worker.version import install_extra


def run_report(
    file: BinaryIO | None,
    output: Path,
    *,
    since: datetime | None,
    last: int | None,
    similarity: float,
    hide_texts: bool,
) -> None:
    """Write the page on the documents of a file; None: on those of the topics. Raises CommandError."""
    render = _renderer()
    traces = Traces(hide_texts=hide_texts)
    console = Console(stderr=True)
    source = ""
    try:
        with console.status("reading"):
            source, complete_from = _read_topics(traces, since, last) if file is None else _read_file(traces, file)
        with console.status("making the page"):
            numbers = summarize(traces, similarity, last, complete_from)
            page = render(numbers, source).encode()
    except EmptyReport as error:
        raise CommandError(f"{source}: {error}") from None
    except OSError as error:
        raise CommandError(str(error)) from None
    try:
        with open_file(os.fspath(output), "wb") as stream:
            stream.write(page)
    except OSError as error:
        raise CommandError(f"{output} cannot be written: {error.strerror}; choose another file (-o)") from None
    say(
        f"{numbers.total.count} traces: {numbers.total.accepted} accepted, "
        f"{numbers.total.count - numbers.total.accepted} rejected, {numbers.bad} cannot be read, "
        f"{numbers.repeated} repeated; {len(page) // 1000} kB to {output}"
    )
    for where, reason in numbers.bad_shown:
        say(f"  {where}: {reason}")


def _renderer() -> Callable[[ReportNumbers, str], str]:
    try:
        from worker.commands.report_page import render
    except ModuleNotFoundError as error:
        if error.name not in ("matplotlib", "jinja2", "markupsafe"):
            raise
        raise CommandError(f"{error.name} is not installed; {install_extra('report')}") from None
    return render


def _read_file(traces: Traces, file: BinaryIO) -> tuple[str, int]:
    """Read JSON Lines; return what was read, for the page, and 0: they are complete from the beginning on."""
    name = str(getattr(file, "name", "<stdin>"))
    source = "standard input" if name == "<stdin>" else Path(name).name  # without its folders: the page may be shared
    for number, line in enumerate(file, 1):
        if line.strip():
            traces.add(line, f"line {number}")
    return source, 0


def _read_topics(traces: Traces, since: datetime | None, last: int | None) -> tuple[str, int]:
    """Read the worker's outputs; return what was read, for the page, and from which time (ms) on it is complete."""
    from worker.commands.report_kafka import read_outputs

    settings = read_settings()
    since_ms = None if since is None else round(since.replace(tzinfo=UTC).timestamp() * 1000)
    try:
        complete_from = asyncio.run(read_outputs(settings, traces, since_ms, last))
    except ConfigError as error:
        raise SettingsError(str(error)) from None
    bounds = [*([f"since {since:%Y-%m-%d %H:%M:%S} UTC"] if since else []), *([f"the last {last}"] if last else [])]
    return ", ".join([f"{settings.accepted_topic} and {settings.rejected_topic}", *bounds]), complete_from

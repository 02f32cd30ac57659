"""`kp-worker report`: one HTML page on scored traces, from a file or from the topics."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from worker.commands.report.columns import Traces
from worker.commands.report.summary import Summary as ReportNumbers
from worker.commands.report.summary import summarize
from worker.commands.shared.console import CommandError, open_file, report_libraries, say
from worker.commands.shared.scored import NoDocuments, ScoredInput
from worker.config import Settings


def run_report(
    documents: ScoredInput, output: Path, settings: Settings, *, similarity: float, hide_texts: bool
) -> None:
    """Write the page on scored documents. Raises CommandError."""
    render = _renderer()
    traces = Traces(hide_texts=hide_texts)
    console = Console(stderr=True)
    source = documents.described(settings)
    try:
        with console.status("reading"):
            complete_from = documents.read(settings, traces.add, traces.unreadable.add)
        with console.status("making the page"):
            numbers = summarize(traces, similarity, documents.last, complete_from, settings.scoring_profiles())
            page = render(numbers, source).encode()
    except NoDocuments as error:
        raise CommandError(f"{source}: {error}") from None
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
    with report_libraries():
        from worker.commands.report.page import render
    return render

"""`kp-worker report`: one HTML page on scored traces, from a file or from the topics."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

import click

from worker.commands.analysis.source import scored_documents_options, scored_input
from worker.commands.shared.console import Command, CommandError, open_file, require_extra, say
from worker.commands.shared.options import read_settings, settings_options


@click.command(cls=Command)
@scored_documents_options
@click.option("--output", "-o", default="report.html", show_default=True, type=click.Path(dir_okay=False,
              allow_dash=True, path_type=Path), help="File to write; - is standard output.")  # fmt: skip
@click.option("--similarity", type=click.FloatRange(-1, 1), default=0.9, show_default=True,
              help="Lowest similarity at which two traces count as near-duplicates.")  # fmt: skip
@click.option(
    "--hide-texts", is_flag=True, help="Omit the objectives, so that you can share the page; ids and domains stay."
)
@settings_options
def report(
    file: BinaryIO | None, from_kafka: bool, since: datetime | None, last: int | None, output: Path, similarity: float,
    hide_texts: bool,
) -> None:  # fmt: skip
    """Make an HTML page about scored traces, from which to choose a threshold.

    FILE has output documents of kp-worker, as JSON Lines (- is standard input). Lines that cannot be read are skipped
    and counted, on the page and on standard error.
    """
    documents = scored_input(file, from_kafka=from_kafka, since=since, last=last)
    settings = read_settings()
    require_extra("report")
    from rich.console import Console

    from worker.commands.analysis.documents import NoDocuments
    from worker.commands.analysis.page import render_report
    from worker.commands.analysis.report_numbers import Traces, summarize

    traces = Traces(hide_texts=hide_texts)
    console = Console(stderr=True)
    source = documents.described(settings)
    try:
        with console.status("reading"):
            complete_from = documents.read(settings, traces.add, traces.unreadable.add)
        with console.status("making the page"):
            numbers = summarize(traces, similarity, documents.last, complete_from, settings.scoring_profiles())
            page = render_report(numbers, source).encode()
    except NoDocuments as error:
        raise CommandError(f"{source}: {error}") from None
    try:
        with open_file(os.fspath(output), "wb") as stream:
            stream.write(page)
            stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandError(f"{output} cannot be written: {error.strerror}; choose another file (-o)") from None
    say(
        f"{numbers.total.count} traces: {numbers.total.accepted} accepted, "
        f"{numbers.total.count - numbers.total.accepted} rejected, {numbers.bad} cannot be read, "
        f"{numbers.repeated} repeated; {len(page) // 1000} kB to {output}"
    )
    for where, reason in numbers.bad_shown:
        say(f"  {where}: {reason}")

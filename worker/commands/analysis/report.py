"""`kp-worker report`: one HTML page on scored traces, from a file or from the topics."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

import click

from worker.commands.analysis.source import scored_documents_options, scored_input
from worker.commands.shared.console import Command, CommandError, require_extra, say, writing
from worker.commands.shared.options import read_settings, settings_options
from worker.core.terminal import number_of


@click.command(cls=Command)
@scored_documents_options
@click.option("--output", "-o", default="report.html", show_default=True, type=click.Path(dir_okay=False,
              allow_dash=True, path_type=Path), help="File to write; - is standard output.")  # fmt: skip
@click.option("--similarity", type=click.FloatRange(-1, 1), default=0.9, show_default=True, metavar="N",
              help="Lowest similarity of near-duplicates.")  # fmt: skip
@click.option("--hide-texts", is_flag=True, help="Omit the objectives, to share the page; ids and domains stay.")
@settings_options
def report(
    file: BinaryIO | None, from_kafka: bool, since: datetime | None, last: int | None, output: Path, similarity: float,
    hide_texts: bool,
) -> None:  # fmt: skip
    """Make an HTML page about scored traces, for choosing a threshold.

    FILE has kp-worker's output documents as JSON Lines (- is standard input). Unreadable lines are skipped and counted,
    on the page and on standard error. Exit code 1: nothing to count, or a file failed.
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
    with writing(os.fspath(output), "-o") as stream:
        stream.write(page)
    say(
        f"{number_of(numbers.total.count, 'trace')}: {numbers.total.accepted} accepted, "
        f"{numbers.total.count - numbers.total.accepted} rejected, {numbers.bad} cannot be read, "
        f"{numbers.repeated} repeated; {len(page) // 1000} kB to {output}"
    )
    for where, reason in numbers.bad_shown:
        say(f"  {where}: {reason}")

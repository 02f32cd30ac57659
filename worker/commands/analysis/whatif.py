"""`kp-worker whatif`: what other weights, thresholds or profiles would change in scored documents."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from worker.commands.analysis.source import scored_documents_options, scored_input
from worker.commands.shared.console import (
    ArgumentError,
    Command,
    CommandError,
    open_file,
    require_extra,
    say,
    write_line,
)
from worker.commands.shared.options import (
    json_option,
    read_settings,
    settings_options,
)

if TYPE_CHECKING:
    from worker.commands.analysis.whatif_numbers import BeforeAndAfter, WhatIf

CSV = "csv"
"""The word for --export that means standard output."""


@click.command(cls=Command)
@scored_documents_options
@click.option("--flips", type=click.IntRange(0), help="Show at most this many traces whose decision changes [20].")
@click.option("--export", metavar="FILE|csv", help="Write one CSV row for each trace to FILE; the word csv writes them "
              "to standard output, instead of the summary.")  # fmt: skip
@click.option("--share", metavar="SHARE", help="Propose a threshold for each domain that accepts this share of its "
              "traces (0.1 or 10%), instead of the summary.")  # fmt: skip
@click.option("--label", metavar="FIELD", help="With --share: the field that says which traces have the same task, "
              "such as metadata.ticket; shows what is accepted of firsts and of repeats.")  # fmt: skip
@click.option("--page", type=click.Path(dir_okay=False, path_type=Path), help="Also write an HTML page with plots.")
@json_option
@settings_options
def whatif(
    file: BinaryIO | None, from_kafka: bool, since: datetime | None, last: int | None, flips: int | None,
    export: str | None, share: str | None, label: str | None, page: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Show what other weights, thresholds or profiles would change, without embedding anything again.

    FILE has output documents of kp-worker, as JSON Lines (- is standard input). The settings are the candidate:
    --config candidate.toml, or --set threshold=0.7. The result is exact: each document contains its novelty, and no
    decision changes the novelty of a later trace. Documents whose score does not follow from their own figures are
    skipped and named. Exit code 1: there is nothing to count, or a file cannot be read or written.
    """
    if share is None and label is not None:
        raise click.UsageError("--label goes with --share")
    if share is not None and (flips is not None or export is not None):
        raise click.UsageError("--share goes without --flips and --export")
    documents = scored_input(file, from_kafka=from_kafka, since=since, last=last)
    candidate = read_settings()
    if page is not None:  # before the documents are read
        require_extra("report")
    from rich.console import Console

    from worker.commands.analysis.documents import NoDocuments
    from worker.commands.analysis.thresholds import parse_share
    from worker.commands.analysis.whatif_numbers import BeforeAndAfter, Proposal, RescoredTraces, propose
    from worker.commands.analysis.whatif_view import headline, left_out, print_found, whatif_json

    try:
        wanted = None if share is None else parse_share(share)
    except ValueError as error:
        raise ArgumentError("--share", str(error)) from None
    traces = RescoredTraces(candidate.scoring_profiles(), candidate.threshold, label)
    source = documents.described(candidate)
    with Console(stderr=True).status("reading"):
        complete_from = documents.read(candidate, traces.add, traces.unreadable.add)
    found: WhatIf | Proposal
    try:
        if wanted is not None:
            found = propose(traces, wanted, source, documents.last, complete_from)
        else:
            changes = BeforeAndAfter(traces, documents.last, complete_from)
            found = changes.summary(source, 20 if flips is None else flips)
    except NoDocuments as error:
        raise CommandError(f"{source}: {error}") from None
    for line in left_out(found):
        say(line)
    if export is not None:
        _export(changes, "-" if export == CSV else export)
    if export == CSV and not isinstance(found, Proposal):
        say(headline(found))
    elif as_json:
        write_line(whatif_json(found))
    else:
        print_found(found)
    if page is not None:
        from worker.commands.analysis.page import render_whatif, write_page

        write_page(render_whatif(found), page)


def _export(result: BeforeAndAfter, path: str) -> None:
    from worker.commands.analysis.export import write_csv

    try:
        with open_file(path, "wb") as file:
            write_csv(result, file)
            file.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}; choose another file (--export)") from None

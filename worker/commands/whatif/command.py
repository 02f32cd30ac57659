"""`kp-worker whatif`: what other weights, thresholds or profiles would change in scored documents."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from worker.commands.shared.console import (
    ArgumentError,
    Command,
    CommandError,
    open_file,
    require_extra,
    say,
    text_console,
    write_line,
)
from worker.commands.shared.options import (
    json_option,
    read_settings,
    scored_documents_options,
    scored_input,
    settings_options,
)

if TYPE_CHECKING:
    from worker.commands.shared.scored import ScoredInput
    from worker.commands.whatif.share import Proposal
    from worker.commands.whatif.summary import BeforeAndAfter, WhatIf
    from worker.config import Settings

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
    if share is not None:
        found: WhatIf | Proposal = _propose_thresholds(documents, candidate, share, label, as_json=as_json)
    else:
        found = _show_changes(documents, candidate, 20 if flips is None else flips, export, as_json=as_json)
    if page is not None:
        from worker.commands.shared.page import write_page
        from worker.commands.whatif.page import render_whatif

        write_page(render_whatif(found), page)


def _show_changes(
    documents: ScoredInput, candidate: Settings, flips: int, export: str | None, *, as_json: bool
) -> WhatIf:
    """Score the documents again with the candidate's weights and thresholds; show and return it. Raises CommandError.

    `flips`: how many traces with another decision are named. `export`: the CSV file to write; "csv" is standard output,
    which then has no summary.
    """
    from rich.console import Console

    from worker.commands.shared.scored import NoDocuments
    from worker.commands.whatif.rows import RescoredTraces
    from worker.commands.whatif.summary import BeforeAndAfter
    from worker.commands.whatif.view import can_show_bars, headline, left_out, print_config, whatif_json, whatif_text

    traces = RescoredTraces(candidate.scoring_profiles(), candidate.threshold)
    source = documents.described(candidate)
    with Console(stderr=True).status("reading"):
        complete_from = documents.read(candidate, traces.add, traces.unreadable.add)
    try:
        result = BeforeAndAfter(traces, documents.last, complete_from)
    except NoDocuments as error:
        raise CommandError(f"{source}: {error}") from None
    summary = result.summary(source, flips)
    for line in left_out(summary):
        say(line)
    if export is not None:
        _export(result, "-" if export == CSV else export)
    if export == CSV:
        say(headline(summary))
    elif as_json:
        write_line(whatif_json(summary))
    else:
        console = text_console()
        console.print(whatif_text(summary, bars=can_show_bars(console)))
        print_config(console, summary.config)
    return summary


def _propose_thresholds(
    documents: ScoredInput, candidate: Settings, share: str, label: str | None, *, as_json: bool
) -> Proposal:
    """Propose thresholds that accept a share of each domain's traces; show and return them.

    `label`: the field that says which traces have the same task; the shares of firsts and of repeats are shown then.
    Raises CommandError and ArgumentError.
    """
    from rich.console import Console

    from worker.commands.shared.scored import NoDocuments
    from worker.commands.shared.target_share import parse_share
    from worker.commands.whatif.rows import RescoredTraces
    from worker.commands.whatif.share import propose
    from worker.commands.whatif.view import left_out, print_config, share_text, whatif_json, without_label

    try:
        wanted = parse_share(share)
    except ValueError as error:
        raise ArgumentError("--share", str(error)) from None
    traces = RescoredTraces(candidate.scoring_profiles(), candidate.threshold, label)
    source = documents.described(candidate)
    with Console(stderr=True).status("reading"):
        complete_from = documents.read(candidate, traces.add, traces.unreadable.add)
    try:
        proposal = propose(traces, wanted, source, documents.last, complete_from)
    except NoDocuments as error:
        raise CommandError(f"{source}: {error}") from None
    for line in (*left_out(proposal), *without_label(proposal)):
        say(line)
    if as_json:
        write_line(whatif_json(proposal))
    else:
        console = text_console()
        console.print(share_text(proposal))
        print_config(console, proposal.config)
    return proposal


def _export(result: BeforeAndAfter, path: str) -> None:
    from worker.commands.whatif.export import write_csv

    try:
        with open_file(path, "wb") as file:
            write_csv(result, file)
            file.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}; choose another file (--export)") from None

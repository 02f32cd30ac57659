"""`kp-worker whatif`: what other weights, thresholds or profiles would change in scored documents."""

from __future__ import annotations

import sys

from rich.console import Console

from worker.commands.shared.console import ArgumentError, CommandError, discard_buffered, open_file, say, write_line
from worker.commands.shared.scored import NoDocuments, ScoredInput
from worker.commands.shared.target_share import parse_share
from worker.commands.whatif.export import write_csv
from worker.commands.whatif.rows import RescoredTraces
from worker.commands.whatif.share import propose
from worker.commands.whatif.summary import BeforeAndAfter
from worker.commands.whatif.view import (
    can_show_bars,
    headline,
    left_out,
    print_config,
    share_text,
    whatif_json,
    whatif_text,
    without_label,
)
from worker.config import Settings

CSV = "csv"
"""The word for --export that means standard output."""


def run_whatif(documents: ScoredInput, candidate: Settings, *, flips: int, export: str | None, as_json: bool) -> None:
    """Score the documents again with the candidate's weights and thresholds. Raises CommandError.

    `flips`: how many traces with another decision are named. `export`: the CSV file to write; "csv" is standard output,
    which then has no summary.
    """
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
        console = Console(highlight=False)
        console.print(whatif_text(summary, bars=can_show_bars(console)))
        print_config(console, summary.config)


def run_share(documents: ScoredInput, candidate: Settings, *, share: str, label: str | None, as_json: bool) -> None:
    """Propose thresholds that accept a share of each domain's traces. Raises CommandError and ArgumentError.

    `label`: the field that says which traces have the same task; the shares of firsts and of repeats are shown then.
    """
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
        console = Console(highlight=False)
        console.print(share_text(proposal))
        print_config(console, proposal.config)


def _export(result: BeforeAndAfter, path: str) -> None:
    try:
        with open_file(path, "wb") as file:
            write_csv(result, file)
            file.flush()
    except BrokenPipeError:
        discard_buffered(sys.stdout.buffer)
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}; choose another file (--export)") from None

"""`kp-worker whatif`: what other weights, thresholds or profiles would change in scored documents."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from worker.commands.analysis.source import scored_documents_options, scored_input
from worker.commands.shared.console import (
    ArgumentError,
    Command,
    CommandError,
    SettingsError,
    require_extra,
    say,
    write_json,
    writing,
)
from worker.commands.shared.options import InputFile, json_option, page_option, read_settings, settings_options
from worker.core.terminal import number_of

if TYPE_CHECKING:
    from worker.commands.analysis.whatif_numbers import WhatIf
    from worker.commands.shared.scored_document import ScoredDocument
    from worker.config import Settings

CSV = "csv"
"""The value of --export that means standard output."""


@click.command(cls=Command)
@scored_documents_options
@click.option("--flips", type=click.IntRange(0), metavar="N", help="Show at most N traces whose decision changes [20].")
@click.option("--export", metavar="FILE|csv", help="Write one CSV row per trace to FILE; csv writes them to standard "
              "output, instead of the summary.")  # fmt: skip
@click.option("--share", metavar="SHARE", help="Instead of the summary, propose thresholds that accept this share of "
              "each domain's traces (0.1 or 10%).")  # fmt: skip
@click.option("--label", metavar="FIELD", help="With --share: the field that names a trace's task, such as "
              "metadata.ticket; shows the accepted shares of firsts and repeats.")  # fmt: skip
@click.option("--verdicts", type=InputFile(), metavar="FILE", help="With --set confidence=record and a file: "
              "verdicts, as kp-worker verdict takes them, or records of KP_JUDGED_TOPIC.")  # fmt: skip
@page_option
@json_option
@settings_options
def whatif(
    file: BinaryIO | None, from_kafka: bool, since: datetime | None, last: int | None, flips: int | None,
    export: str | None, share: str | None, label: str | None, verdicts: BinaryIO | None,
    page: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Show what other weights, thresholds or profiles would change, without embedding anything again.

    FILE has kp-worker's output documents as JSON Lines (- is standard input). The settings are the candidate: --config
    candidate.toml, or --set threshold=0.7. The result is exact: each document contains its novelty, and no decision
    changes the novelty of a later trace. The outcome confidence is the one that was used; with confidence=record,
    a document scored without the record gets it from the verdicts in --verdicts or, with --from-kafka, in
    KP_JUDGED_TOPIC. Documents whose score does not follow from their own figures are skipped and named. Exit code 1:
    nothing to count, or a file failed.
    """
    if share is None and label is not None:
        raise click.UsageError("--label requires --share")
    if share is not None and (flips is not None or export is not None):
        raise click.UsageError("--share cannot be used with --flips or --export")
    documents = scored_input(file, from_kafka=from_kafka, since=since, last=last)
    candidate = read_settings()
    by_record = "confidence" in candidate.model_fields_set and candidate.confidence == "record"
    if verdicts is not None and (from_kafka or not by_record):
        raise click.UsageError("--verdicts requires a file of scored traces and --set confidence=record")
    if verdicts is not None and file is not None and verdicts.name == file.name:
        raise click.UsageError("FILE and --verdicts are the same file")
    if page is not None:  # before the documents are read
        require_extra("report")
    from rich.console import Console

    from worker.commands.analysis.documents import NoDocuments
    from worker.commands.analysis.whatif_numbers import BeforeAndAfter, Proposal, RescoredTraces, propose
    from worker.commands.analysis.whatif_view import headline, left_out, print_found
    from worker.commands.shared.thresholds import parse_share

    try:
        wanted = None if share is None else parse_share(share)
    except ValueError as error:
        raise ArgumentError("--share", str(error)) from None
    source = documents.described(candidate)
    traces = RescoredTraces(
        candidate.scoring_profiles(), candidate.threshold, label, *_confidence(candidate, verdicts, from_kafka)
    )
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
        from worker.commands.analysis.export import write_csv

        with writing("-" if export == CSV else export, "--export") as stream:
            write_csv(changes, stream)
    if export == CSV and not isinstance(found, Proposal):
        say(headline(found))
    elif as_json:
        write_json(found)
    else:
        print_found(found)
    if page is not None:
        from worker.commands.analysis.page import render_whatif, write_page

        write_page(render_whatif(found), page)


def _confidence(
    candidate: Settings, verdicts: BinaryIO | None, from_kafka: bool
) -> tuple[Callable[[ScoredDocument], float | None], ...]:
    """Return the function for a document's outcome confidence, if a setting names one; say how many verdicts count."""
    if "confidence" not in candidate.model_fields_set:
        return ()
    if candidate.confidence == "stated":
        return (lambda document: None,)
    from worker.commands.shared.placed_verdicts import Standings, read_verdicts

    if from_kafka:
        import asyncio

        from worker.commands.shared.scored_topics import read_judged
        from worker.config import ConfigError
        from worker.kafka.cluster.topic_plan import MissingTopicsError

        try:
            standings = asyncio.run(read_judged(candidate))
        except MissingTopicsError:  # no verdict was ever counted
            standings = Standings()
        except ConfigError as error:
            raise SettingsError(str(error)) from None
    elif verdicts is not None:
        standings = Standings(read_verdicts(verdicts, verdicts.name, candidate.max_message_bytes, as_scored=True))
    else:
        standings = Standings()
    say(
        f"{number_of(standings.verdicts, 'verdict')} read"
        + ("" if standings.verdicts else "; without verdicts, a trace that claims success gets 0.5")
    )
    return (standings.used,)

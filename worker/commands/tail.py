"""`kp-worker tail`: scored traces and dead letters as they arrive, as table rows or JSON Lines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain
from typing import TYPE_CHECKING

import click

from worker.commands.shared.console import Command, say
from worker.commands.shared.options import json_option, read_settings, settings_options

if TYPE_CHECKING:
    from worker.commands.shared.scored_rows import TailFilter, TailRecord
    from worker.commands.shared.session import Session


@click.command(cls=Command)
@click.option("--accepted", is_flag=True, help="Accepted traces [with --rejected, the default].")
@click.option("--rejected", is_flag=True, help="Rejected traces.")
@click.option("--dead-letters", is_flag=True, help="Dead letters.")
@click.option("--domain", help="Only traces with this metadata.task_domain.")
@click.option("--min-score", type=click.FloatRange(0, 1), metavar="N", help="Only traces with at least this score.")
@click.option("--last", type=click.IntRange(0), metavar="N", help="Start with the last N that match [10].")
@click.option("--from-beginning", is_flag=True, help="Start with the oldest.")
@click.option("--follow/--no-follow", default=True, help="Wait for more, until Ctrl-C [follow].")
@click.option("--objective", is_flag=True, help="Show each trace's objective below its row; JSON always contains it.")
@json_option
@settings_options
def tail(
    accepted: bool, rejected: bool, dead_letters: bool, domain: str | None, min_score: float | None,
    last: int | None, from_beginning: bool, follow: bool, objective: bool, as_json: bool,
) -> None:  # fmt: skip
    """Show scored traces as they arrive: a table on a terminal, JSON Lines in a pipe.

    Reads committed records only, and joins no group, so it takes no records from other consumers.
    """
    if from_beginning and last is not None:
        raise click.UsageError("--from-beginning and --last cannot be used together")
    if dead_letters and (domain is not None or min_score is not None):
        raise click.UsageError("dead letters have neither domain nor score: remove --domain and --min-score")
    if not (accepted or rejected or dead_letters):
        accepted = rejected = True
    settings = read_settings()
    topics = [settings.accepted_topic] * accepted + [settings.rejected_topic] * rejected
    topics += [settings.dead_letter_topic] * dead_letters
    from worker.commands.shared.scored_rows import TailFilter, table_writer, write_lines
    from worker.commands.shared.session import Session, run_session

    chosen = TailFilter(settings.dead_letter_topic, domain, min_score)
    first = None if from_beginning else 10 if last is None else last
    table = table_writer(only_dead_letters=not (accepted or rejected), objectives=objective, follow=follow)
    try:
        with nullcontext(write_lines) if as_json else table as show:
            run_session(show_records(Session(settings), topics, chosen, show, last=first, follow=follow))
    except KeyboardInterrupt:
        sys.exit(0)


async def show_records(
    session: Session, names: list[str], chosen: TailFilter, show: Callable[[list[TailRecord]], None], *,
    last: int | None, follow: bool,
) -> None:  # fmt: skip
    """Show records in portions: the `last` ones (None: all), then with `follow` new ones, until interrupted."""
    from worker.commands.shared.scored_rows import in_commit_order
    from worker.commands.shared.session import read_to

    topics = await session.existing(*names)
    # Subscribed, not assigned: partitions added later are read too, from their beginning.
    async with session.connected(session.reader(*names)) as follower, session.connected(session.reader()) as reader:
        tps = [tp for topic in topics for tp in topic.tps]
        starts, ends = await reader.beginning_offsets(tps), await reader.end_offsets(tps)
        if last is not None:
            stride, begins = 3 * last, ends  # commit markers take offsets too, on an idle stream one per record
            records: list[TailRecord] = []
            while len(records) < last and begins != starts:
                chosen.others.clear()  # each look further back reads the later records again
                begins = {tp: max(starts[tp], end - stride) for tp, end in ends.items()}
                records = [one async for record in read_to(reader, begins, ends) if (one := chosen.read(record))]
                stride *= 8
            show(in_commit_order(records)[-last:] if last else [])
            if last and not records:
                _say_other_domains(chosen)
            starts = ends
        if not follow:
            seen = last is not None
            async for record in read_to(reader, starts, ends):
                if one := chosen.read(record):
                    seen = True
                    show([one])
            if not seen:
                _say_other_domains(chosen)
            return
        for tp, offset in starts.items():
            follower.seek(tp, offset)
        while True:
            batches = await follower.getmany(timeout_ms=1000)
            if records := in_commit_order(filter(None, map(chosen.read, chain.from_iterable(batches.values())))):
                show(records)


def _say_other_domains(chosen: TailFilter) -> None:
    """Name the existing domains if there is no trace of the requested one."""
    from worker.commands.shared.shown import shown_name

    if chosen.domain is None or not chosen.others:
        return
    named = chosen.others.most_common(10)
    shown = ", ".join(f"{shown_name(name)} ({count})" for name, count in named)
    more = f" and {len(chosen.others) - len(named)} more" if len(chosen.others) > len(named) else ""
    say(f"no trace of the domain {shown_name(chosen.domain)} so far (case counts); there are: {shown}{more}")

"""`kp-worker cache`: a look into the caches of a group, from the changelog. Read only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from worker.commands.shared.console import CommandError, CommandGroup, say, write_line
from worker.commands.shared.options import json_option, read_settings, settings_options
from worker.core.terminal import clean_json

if TYPE_CHECKING:
    from worker.commands.cache.caches import CachedPartition, PartitionLog
    from worker.config import Settings


@click.group(cls=CommandGroup)
def cache() -> None:
    """Show the novelty caches of a group, without changing anything.

    Restores the caches from the committed offsets and the changelog, as a worker does, but joins no group. Exit codes:
    0 done; 1 nothing is committed, the entries are of another model, or it failed; 2 wrong settings, topics or options.
    """


_partition_option = click.option("--partition", type=click.IntRange(0), metavar="N", help="Only this partition [all].")


@cache.command("list")
@_partition_option
@click.option("--limit", type=click.IntRange(0), default=20, show_default=True, help="At most this many; 0: all.")
@click.option("--agent", metavar="ID", help="Only entries of this agent (metadata.agent_id).")
@click.option("--trace", metavar="ID", help="Only entries of this trace: its id, or the beginning of it.")
@json_option
@settings_options
def list_entries(partition: int | None, limit: int, agent: str | None, trace: str | None, as_json: bool) -> None:
    """List the live entries, newest first, and then the agents' track records, if there are any."""
    settings = read_settings()
    from worker.commands.cache.caches import newest_rows, record_rows, restore_latest
    from worker.commands.cache.view import print_entries, print_records

    reads = _read(settings, partition)
    rows = newest_rows([restore_latest(settings, read) for read in reads], agent, trace)
    records = [] if trace is not None else record_rows(settings, reads, agent)
    shown, shown_records = rows[: limit or None], records[: limit or None]
    if as_json:
        _write_json([*shown, *shown_records])
        return
    if rows or not records:
        print_entries(shown, len(rows))
    if records:
        print_records(shown_records, len(records))


@cache.command()
@click.argument("text", required=False)
@click.option("--file", type=click.Path(allow_dash=True), help="A trace, one JSON document, instead of TEXT; - is "
              "standard input.")  # fmt: skip
@click.option("--line", type=click.IntRange(1), metavar="N", help="With --file: the line of a JSON Lines file, from 1.")
@click.option("--count", "-k", type=click.IntRange(1), default=5, show_default=True, help="Entries to show.")
@_partition_option
@json_option
@settings_options
def nearest(
    text: str | None, file: str | None, line: int | None, count: int, partition: int | None, as_json: bool
) -> None:
    """Find the live entries that are most similar to a text or a trace.

    The model and its settings must be the worker's. With --file and --partition the answer is that of the worker, to
    the bit, if the trace came next on that partition.
    """
    if (text is None) == (file is None):
        raise click.UsageError("pass a text, or --file with a trace")
    if line is not None and file is None:
        raise click.UsageError("--line goes with --file")
    settings = read_settings()
    from rich.console import Console

    from worker.commands.cache.caches import restore_cache
    from worker.commands.cache.nearest import Query, embed_query, nearest_report, trace_query
    from worker.commands.cache.view import print_nearest

    query = Query((text or "",)) if file is None else trace_query(file, line, settings)
    reads = _read(settings, partition)
    with Console(stderr=True).status("loading the model"):
        embedding, identity = embed_query(query, settings)
    caches = [restore_cache(settings, read, identity.key(), identity.dimensions) for read in reads]
    _check_model(reads, caches, identity.key())
    report = nearest_report(caches, query, embedding, identity, count)
    if as_json:
        _write_json([report])
    else:
        print_nearest(report)


@cache.command()
@_partition_option
@json_option
@settings_options
def stats(partition: int | None, as_json: bool) -> None:
    """Show how full the caches are, how old their entries get, and what evicts them: capacity or TTL."""
    settings = read_settings()
    from worker.commands.cache.caches import restore_latest, stats
    from worker.commands.cache.view import print_stats

    rows = [stats(read, restore_latest(settings, read)) for read in _read(settings, partition)]
    if as_json:
        _write_json(rows)
    else:
        print_stats(rows)


@cache.command()
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
@_partition_option
@settings_options
def export(output: Path, partition: int | None) -> None:
    """Write the live entries to OUTPUT, an npz file for numpy.load: vectors, ids, places, times."""
    settings = read_settings()
    from worker.commands.cache.caches import export_caches

    caches = _latest(settings, partition)
    count = export_caches(caches, output)
    partitions = sum(bool(cached.live) for cached in caches)
    say(f"{count} {'entry' if count == 1 else 'entries'} of {partitions} "
        f"partition{'s' * (partitions != 1)} to {output}")  # fmt: skip


def _read(settings: Settings, partition: int | None) -> list[PartitionLog]:
    from rich.console import Console

    from worker.commands.cache.caches import read_partitions

    with Console(stderr=True).status("reading the changelog"):
        return read_partitions(settings, partition)


def _latest(settings: Settings, partition: int | None) -> list[CachedPartition]:
    from worker.commands.cache.caches import restore_latest

    return [restore_latest(settings, read) for read in _read(settings, partition)]


def _check_model(reads: Sequence[PartitionLog], caches: Sequence[CachedPartition], model: str) -> None:
    """Raise CommandError where all entries are of another model; warn where those of some partitions are."""
    others = {}
    for read, cached in zip(reads, caches, strict=True):
        latest = read.latest()
        if latest is not None and latest.model != model and not cached.live:
            others[cached.partition] = latest.model
    if not others:
        return
    partitions = ", ".join(map(str, others))
    told = (
        f"the entries of partition {partitions} are of {', '.join(sorted(set(others.values())))}, these settings "
        f"embed with {model}: vectors of different models cannot be compared; give the worker's settings (KP_MODEL, "
        "KP_MAX_TOKENS, KP_PRECISION, KP_LONG_TEXTS, KP_EMBED_TEXT)"
    )
    if not any(cached.live for cached in caches):
        raise CommandError(told)
    say(f"warning: {told}")


def _write_json(rows: Sequence[Any]) -> None:
    import msgspec

    for row in rows:
        write_line(clean_json(msgspec.json.encode(row).decode()))

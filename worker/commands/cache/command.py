"""`kp-worker cache`: a look into the caches of a group, from the changelog. Read only."""

from __future__ import annotations

import click

from worker.commands.shared.console import CommandGroup, write_json
from worker.commands.shared.options import json_option, read_settings, settings_options


@click.group(cls=CommandGroup)
def cache() -> None:
    """Show the novelty caches of a group, without changing anything.

    Restores the caches from the committed offsets and the changelog, as a worker does, but joins no group. Exit code 1:
    nothing is committed, the entries are another model's, or it failed.
    """


_partition_option = click.option("--partition", type=click.IntRange(0), metavar="N", help="Only this partition [all].")


@cache.command("list")
@_partition_option
@click.option("--limit", type=click.IntRange(0), default=20, show_default=True, metavar="N",
              help="At most this many; 0: all.")  # fmt: skip
@click.option("--agent", metavar="ID", help="Only this agent's entries (metadata.agent_id).")
@click.option("--trace", metavar="ID", help="Only this trace's entries: its id, or the beginning of it.")
@json_option
@settings_options
def list_entries(partition: int | None, limit: int, agent: str | None, trace: str | None, as_json: bool) -> None:
    """List the live entries, newest first, and then the agents' track records, if there are any."""
    settings = read_settings()
    from worker.commands.cache.caches import newest_rows, read_partitions, record_rows, restore_latest
    from worker.commands.cache.view import print_entries, print_records

    reads = read_partitions(settings, partition)
    rows = newest_rows([restore_latest(settings, read) for read in reads], agent, trace)
    records = [] if trace is not None else record_rows(reads, agent)
    shown, shown_records = rows[: limit or None], records[: limit or None]
    if as_json:
        write_json(*shown, *shown_records)
        return
    if rows or not records:
        print_entries(shown, len(rows))
    if records:
        print_records(shown_records, len(records))


@cache.command()
@click.argument("text", required=False)
@click.option("--file", type=click.Path(allow_dash=True), help="A trace (one JSON document) instead of TEXT; - is "
              "standard input.")  # fmt: skip
@click.option("--line", type=click.IntRange(1), metavar="N", help="With --file: the line of a JSON Lines file, from 1.")
@click.option("--count", "-k", type=click.IntRange(1), default=5, show_default=True, metavar="N",
              help="Entries to show.")  # fmt: skip
@_partition_option
@json_option
@settings_options
def nearest(
    text: str | None, file: str | None, line: int | None, count: int, partition: int | None, as_json: bool
) -> None:
    """Find the live entries that are most similar to a text or a trace.

    The model and its settings must be the worker's. With --file and --partition the novelty is the one that the worker
    would compute, to the bit, if the trace came next on that partition.
    """
    if (text is None) == (file is None):
        raise click.UsageError("pass a text, or --file with a trace")
    if line is not None and file is None:
        raise click.UsageError("--line requires --file")
    settings = read_settings()
    from worker.commands.cache.caches import Query, find_nearest, trace_query
    from worker.commands.cache.view import print_nearest

    query = Query((text or "",)) if file is None else trace_query(file, line, settings)
    report = find_nearest(query, settings, partition, count)
    if as_json:
        write_json(report)
    else:
        print_nearest(report)


@cache.command()
@_partition_option
@json_option
@settings_options
def stats(partition: int | None, as_json: bool) -> None:
    """Show how full the caches are, how old their entries get, and what evicts them: capacity or TTL."""
    settings = read_settings()
    from worker.commands.cache.caches import read_partitions, restore_latest, stats
    from worker.commands.cache.view import print_stats

    rows = [stats(read, restore_latest(settings, read)) for read in read_partitions(settings, partition)]
    if as_json:
        write_json(*rows)
    else:
        print_stats(rows)

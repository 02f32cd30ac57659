"""`kp-worker cache`: a look into the caches of a group, from the changelog. Read only."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console

from worker.commands.cache.caches import (
    CachedPartition,
    PartitionLog,
    newest_rows,
    read_partitions,
    restore_cache,
    restore_latest,
)
from worker.commands.cache.caches import stats as cache_stats
from worker.commands.cache.nearest import Query, embed_query, nearest_report, trace_query
from worker.commands.cache.view import print_entries, print_nearest, print_stats
from worker.commands.shared.console import CommandError, discard_buffered, say, write_line
from worker.config import Settings
from worker.core.terminal import clean_json


def run_cache_list(
    settings: Settings, partition: int | None, *, limit: int, agent: str | None, trace: str | None, as_json: bool
) -> None:
    """Write the live entries, newest first; at most `limit` of them (0: all). Raises CommandError."""
    rows = newest_rows(_latest(settings, partition), agent, trace)
    shown = rows[:limit] if limit else rows
    with _output():
        if as_json:
            _write_json(shown)
        else:
            print_entries(shown, len(rows))


def run_cache_nearest(
    settings: Settings,
    partition: int | None,
    *,
    text: str | None,
    file: str | None,
    line: int | None,
    count: int,
    as_json: bool,
) -> None:
    """Write the `count` entries that are nearest to a text, or to the trace in a file. Raises CommandError."""
    query = Query((text or "",)) if file is None else trace_query(file, line, settings)
    reads = _read(settings, partition)
    with Console(stderr=True).status("loading the model"):
        embedding, identity = embed_query(query, settings)
    caches = [restore_cache(settings, read, identity.key(), identity.dimensions) for read in reads]
    _check_model(reads, caches, identity.key())
    report = nearest_report(caches, query, embedding, identity, count)
    with _output():
        if as_json:
            _write_json([report])
        else:
            print_nearest(report)


def run_cache_stats(settings: Settings, partition: int | None, *, as_json: bool) -> None:
    """Write the statistics of each partition. Raises CommandError."""
    rows = [cache_stats(read, restore_latest(settings, read)) for read in _read(settings, partition)]
    with _output():
        if as_json:
            _write_json(rows)
        else:
            print_stats(rows)


def run_cache_export(settings: Settings, partition: int | None, output: Path) -> None:
    """Write the live entries to an npz file. Raises CommandError."""
    caches = _latest(settings, partition)
    from worker.commands.cache.caches import export_caches

    count = export_caches(caches, output)
    partitions = sum(bool(cached.live) for cached in caches)
    say(f"{count} {'entry' if count == 1 else 'entries'} of {partitions} "
        f"partition{'s' * (partitions != 1)} to {output}")  # fmt: skip


def _read(settings: Settings, partition: int | None) -> list[PartitionLog]:
    with Console(stderr=True).status("reading the changelog"):
        return read_partitions(settings, partition)


def _latest(settings: Settings, partition: int | None) -> list[CachedPartition]:
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


def _write_json(rows: Sequence[msgspec.Struct]) -> None:
    for row in rows:
        write_line(clean_json(msgspec.json.encode(row).decode()))


@contextmanager
def _output() -> Iterator[None]:
    """End quietly if the reader of the pipe closes it."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        discard_buffered(sys.stdout.buffer)

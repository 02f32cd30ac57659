"""What `kp-worker cache` says, as values: entries, the nearest of them, and the statistics of a partition."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from worker.commands.cache.read import CachedPartition, PartitionLog
from worker.core.capacity import advice, capacity_for, entry_bytes, is_short, per_second
from worker.core.changelog import Entry
from worker.core.documents import rfc3339

ENOUGH: Final = 100
"""Entries from which on their rate is worth advice, if the cache is not full."""


class CacheRow(Struct, frozen=True):
    """A live entry. `age_seconds` is in stream time."""

    partition: int
    sequence: int
    offset: int
    stream_time: str
    age_seconds: float
    agent_id: str
    trace_id: str


class NearestRow(Struct, frozen=True):
    """A live entry and its cosine similarity to what was asked for, as the worker computes it."""

    similarity: float
    partition: int
    offset: int
    age_seconds: float
    agent_id: str
    trace_id: str


class NearestReport(Struct, frozen=True):
    """The nearest live entries, most similar first. `novelty`: 1 - the greatest similarity, 0.5 without an entry.

    `compared`: live entries that were compared. `truncated`: the text was longer than the model reads.
    """

    novelty: float
    compared: int
    truncated: bool
    embedder: str
    nearest: list[NearestRow]


class CacheStats(Struct, frozen=True):
    """The statistics of a partition's cache. Times are stream time; None where the entries do not tell.

    `added`: entries since the first one; `evicted`: those of them that left. `leave_after_seconds`: age at which
    entries leave at the rate of the live ones, and by which cause. `capacity_for_ttl`: rate x TTL. `memory_bytes`: what
    a worker needs for the full capacity, at most. `advice`: what to set where capacity evicts long before the TTL.
    """

    partition: int
    model: str
    entries: int
    capacity: int
    added: int
    evicted: int
    committed_offset: int | None
    stream_time: str | None
    oldest_age_seconds: float | None
    newest_age_seconds: float | None
    ttl_seconds: float | None
    rate_per_second: float | None
    leave_after_seconds: float | None
    leave_by: Literal["capacity", "ttl"] | None
    capacity_for_ttl: int | None
    memory_bytes: int
    changelog_records: int
    changelog_bytes: int
    other_model: int
    other_pass: int
    corrupt: int
    advice: str


def cache_row(cached: CachedPartition, entry: Entry) -> CacheRow:
    """Return one live entry."""
    return CacheRow(
        cached.partition, entry.sequence, entry.source_offset, rfc3339(entry.stream_time_ms),
        cached.age_ms(entry) / 1000, entry.agent_id, entry.trace_id,
    )  # fmt: skip


def newest_rows(caches: list[CachedPartition], agent: str | None, trace: str | None) -> list[CacheRow]:
    """Return the live entries of all partitions, newest first; of an agent, or of a trace (its id or its beginning)."""
    found = [
        (entry.stream_time_ms, entry.sequence, cached, entry)
        for cached in caches
        for entry in cached.live
        if (agent is None or entry.agent_id == agent) and (trace is None or _is_trace(entry.trace_id, trace))
    ]
    found.sort(key=lambda it: (-it[0], it[2].partition, -it[1]))
    return [cache_row(cached, entry) for _, _, cached, entry in found]


def _is_trace(trace_id: str, wanted: str) -> bool:
    return trace_id.startswith(wanted) or trace_id.removeprefix("kp:trace:").startswith(wanted)


def cache_stats(read: PartitionLog, cached: CachedPartition) -> CacheStats:
    """Return the statistics of a partition."""
    cache, skipped = cached.scorer.cache, cached.restored.skipped
    ages = [cached.age_ms(entry) for entry in cached.live]
    rate = per_second([entry.stream_time_ms for entry in cached.live])
    reach_ms = cache.reach_ms
    if reach_ms is None and rate is not None:
        reach_ms = round(1000 * cache.max_elements / rate)
    after_ms = min((it for it in (reach_ms, cache.ttl_ms) if it is not None), default=None)
    known = rate is not None and reach_ms is not None
    records, size = read.log.size()
    now = cached.scorer.stream_time_ms
    return CacheStats(
        partition=cached.partition,
        model=cached.model,
        entries=len(cache),
        capacity=cache.max_elements,
        added=cache.next_sequence,
        evicted=cache.next_sequence - len(cache),
        committed_offset=cached.position.committed_offset,
        stream_time=None if now is None else rfc3339(now),
        oldest_age_seconds=ages[0] / 1000 if ages else None,
        newest_age_seconds=ages[-1] / 1000 if ages else None,
        ttl_seconds=None if cache.ttl_ms is None else cache.ttl_ms / 1000,
        rate_per_second=rate,
        leave_after_seconds=after_ms / 1000 if known and after_ms is not None else None,
        leave_by=("capacity" if after_ms == reach_ms else "ttl") if known else None,
        capacity_for_ttl=None if rate is None or cache.ttl_ms is None else capacity_for(rate, cache.ttl_ms),
        memory_bytes=cache.max_elements * entry_bytes(cache.dimensions),
        changelog_records=records,
        changelog_bytes=size,
        other_model=skipped["other_model"],
        other_pass=cached.restored.overridden,
        corrupt=skipped["corrupt"],
        advice=_advice(cached, rate, reach_ms),
    )


def _advice(cached: CachedPartition, rate: float | None, reach_ms: int | None) -> str:
    cache = cached.scorer.cache
    enough = cache.reach_ms is not None or len(cache) >= ENOUGH
    if reach_ms is None or cache.ttl_ms is None or not enough or not is_short(reach_ms, cache.ttl_ms):
        return ""
    return advice(rate, reach_ms, cache.ttl_ms, cache.dimensions)

"""The doctor's look at what the workers remember: the entries of each partition's cache, and the track records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from aiokafka.errors import UnknownTopicOrPartitionError

from worker.commands.doctor.finding import Finding, ok
from worker.commands.doctor.kafka import GROUPS
from worker.commands.doctor.traces import read_within
from worker.commands.shared.session import Session
from worker.commands.shared.shown import shown_name
from worker.config import Settings
from worker.core.restore import Log, ModelCache, restore
from worker.core.scorer import PartitionScorer
from worker.core.track_record import Standing
from worker.kafka.assignment import OffsetsError, Position, read_logs, read_positions
from worker.kafka.cluster.describe import describe_topics

READ_SECONDS: Final = 20.0
"""Time limit for reading the changelog."""

NAMED: Final = 10
"""Partitions and track records that are named; the others are counted."""


class Memory(NamedTuple):
    """What a worker would restore of a partition."""

    entries: int  # live ones of the cache
    records: list[tuple[str, str, Standing]]  # agent, domain, and standing


async def check_caches(settings: Settings) -> list[Finding]:
    """Return the findings on the sizes of the caches and on the track records; none before the first commit."""
    remedy = "look at kp_cache_entries, and at scoring.confidence of the agents' traces"
    read = await read_within(READ_SECONDS, _read(Session(settings)), "caches", "the changelog", remedy)
    if isinstance(read, Finding):
        return [read]
    findings = []
    if read and settings.embedder != "none":
        findings.append(ok("cache entries", _sizes({number: each.entries for number, each in read.items()})))
    if records := [record for each in read.values() for record in each.records]:
        findings.append(ok("track records", _standings(records)))
    return findings


async def _read(session: Session) -> dict[int, Memory]:
    """Restore each partition as a worker that takes it over, but without a producer, so that nobody is fenced."""
    settings = session.settings
    async with session.admin() as admin:
        topics = await session.topics(admin, settings.source_topic, settings.changelog)
        groups = (await describe_topics(admin, [GROUPS]))[GROUPS]
    if len(topics) < 2 or groups.error is UnknownTopicOrPartitionError:
        return {}
    numbers = range(min(topic.partitions for topic in topics.values()))
    try:
        positions = await read_positions(
            session.client, settings.group_id, settings.source_topic, numbers, READ_SECONDS
        )
    except OffsetsError:  # reported by the check of the lag
        return {}
    committed = {number: each for number, each in positions.items() if each.committed_offset is not None}
    return await read_logs(
        session.client, settings.changelog, list(committed), READ_SECONDS, settings.max_batch_bytes,
        lambda number, log: _memory(settings, log, committed[number]),
    )  # fmt: skip


def _memory(settings: Settings, log: Log, position: Position) -> Memory:
    """Count the live entries of the model that wrote the last one, and list the track records."""
    latest = log.latest(position.offset)
    capacity = settings.cache_max_elements
    cache = None if latest is None else ModelCache(latest.model, len(latest.vector) // 4, capacity)
    restored = restore(log, position.on_source(), cache)
    dimensions = 1 if cache is None else cache.dimensions
    scorer = PartitionScorer(capacity, settings.cache_ttl_ms, dimensions, max_step_ms=settings.stream_time_max_step_ms)
    scorer.restore(restored.cache(), position.stream_time_ms)
    return Memory(len(scorer.cache), list(restored.track_record.listed()))


def _sizes(entries: dict[int, int]) -> str:
    fullest = sorted(entries.items(), key=lambda it: -it[1])
    named = ", ".join(f"{count} in partition {number}" for number, count in fullest[:NAMED])
    more = f", at most {fullest[NAMED][1]} in each other" if len(fullest) > NAMED else ""
    return f"{sum(entries.values())} live: {named}{more}"


def _standings(records: Sequence[tuple[str, str, Standing]]) -> str:
    """Return the track records with the most verdicts."""
    most = sorted(records, key=lambda it: -it[2].judged)
    named = "; ".join(
        f"{shown_name(agent)} in {shown_name(domain)}: {it.succeeded:g} of {it.judged} succeeded, used {it.used:.4f}"
        for agent, domain, it in most[:NAMED]
    )
    more = f"; and {len(most) - NAMED} more" if len(most) > NAMED else ""
    return f"{len(most)}: {named}{more}"

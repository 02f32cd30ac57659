"""The caches of a group's partitions, as a worker restores them: entries, statistics, and the nearest to a query.

Read only: it joins no group and creates no topic. It reads the committed offsets, then the changelog to its end, like a
worker that takes over the partitions, but without a producer, so it fences nobody.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from aiokafka.errors import UnknownTopicOrPartitionError
from msgspec import Struct
from rich.console import Console

from worker.commands.shared.console import ArgumentError, CommandError, errors_for_the_user, say
from worker.commands.shared.json_lines import describe_problem, name_of, read_document
from worker.commands.shared.session import Session, run_session
from worker.config import ConfigError, Settings
from worker.core.capacity import advice, capacity_for, entry_bytes, is_short, per_second
from worker.core.changelog import Entry, Log, Restored
from worker.core.documents import rfc3339
from worker.core.forgetting import RemovedBy
from worker.core.novelty import Label
from worker.core.records import EmbedderIdentity
from worker.core.scorer import PartitionScorer, event_time_ms
from worker.core.scoring import NEUTRAL_NOVELTY
from worker.core.trace import InvalidTrace, embedded_texts, parse_trace
from worker.core.track_record import TrackRecord
from worker.embed.embedder import Embedding, ModelError
from worker.embed.load import load_configured
from worker.embed.pool import embed_trace
from worker.kafka.cluster.describe import describe_topics
from worker.kafka.state.restore import OffsetsError, Position, read_logs, read_positions

GROUPS = "__consumer_offsets"
"""A broker creates it when a client looks up a group's coordinator: if it is missing, nothing was ever committed."""

ENOUGH: Final = 100
"""Entries needed before their rate is worth advice, if the cache is not full."""


@dataclass(frozen=True, slots=True)
class PartitionLog:
    """The state of one partition in Kafka."""

    partition: int
    position: Position  # where its group continues
    log: Log  # its changelog

    def latest(self) -> Entry | None:
        """Return the last committed entry."""
        return self.log.latest(self.position.offset)


@dataclass(frozen=True, slots=True)
class CachedPartition:
    """The cache of one partition, with the entries of one model."""

    partition: int
    model: str  # the embedder's identity; empty if the partition has no entry
    position: Position
    restored: Restored
    scorer: PartitionScorer  # restored as in a worker, but each entry is labelled with its sequence number
    live: list[Entry]  # oldest first

    def age_ms(self, entry: Entry) -> int:
        """Return the entry's age in stream time, ms."""
        return (self.scorer.stream_time_ms or 0) - entry.stream_time_ms


def read_partitions(settings: Settings, partition: int | None) -> list[PartitionLog]:
    """Read all partitions of the source topic, or one. Raises CommandError, SettingsError, ArgumentError."""
    with errors_for_the_user(), Console(stderr=True).status("reading the changelog"):
        try:
            return run_session(_read(Session(settings), partition))
        except OffsetsError as error:
            raise CommandError(str(error)) from None


async def _read(session: Session, partition: int | None) -> list[PartitionLog]:
    settings = session.settings
    (source,) = await session.existing(settings.source_topic)
    async with session.admin() as admin:
        changelog = (await session.topics(admin, settings.changelog)).get(settings.changelog)
        offsets = (await describe_topics(admin, [GROUPS]))[GROUPS]
    if changelog is None:
        raise ConfigError(
            f"group {settings.group_id} has no changelog topic {settings.changelog}, where a worker keeps its cache; "
            "correct the group (-g) or KP_CHANGELOG_TOPIC. A group with neither an embedder nor verdicts has none"
        )
    count = min(source.partitions, changelog.partitions)
    if partition is not None and partition >= count:
        raise ArgumentError("--partition", f"{source.name} has the partitions 0 to {count - 1}, not {partition}")
    wanted = range(count) if partition is None else [partition]
    if offsets.error is UnknownTopicOrPartitionError:  # a login without Describe gets another error
        raise CommandError(_nothing_committed(settings, wanted))
    seconds = settings.transaction_timeout_seconds
    positions = await read_positions(session.client, settings.group_id, source.name, wanted, seconds)
    if all(position.committed_offset is None for position in positions.values()):
        raise CommandError(_nothing_committed(settings, wanted))
    logs = await read_logs(session.client, changelog.name, wanted, seconds)
    return [PartitionLog(number, positions[number], logs[number]) for number in wanted]


def _nothing_committed(settings: Settings, wanted: Sequence[int]) -> str:
    where = "" if len(wanted) > 1 else f", partition {wanted[0]}"
    return (
        f"group {settings.group_id} has committed no offset of {settings.source_topic}{where}: no worker has scored a "
        "trace there; correct the group (-g) or the topic (KP_SOURCE_TOPIC) if one has"
    )


def restore_cache(settings: Settings, read: PartitionLog, model: str, dimensions: int) -> CachedPartition:
    """Restore the cache of one model, as a worker with that model does. `model`: an embedder's identity."""
    restored = read.log.restore(read.position.found(), model, dimensions, settings.cache_max_elements)
    scorer = PartitionScorer(
        settings.cache_max_elements, settings.cache_ttl_ms, dimensions, max_step_ms=settings.stream_time_max_step_ms
    )
    # A trace may be in the cache twice: with its sequence number as label, the nearest entry is unambiguous.
    rows = [(it.sequence, it.stream_time_ms, Label(str(it.sequence)), it.array()) for it in restored.entries]
    scorer.restore(rows, read.position.stream_time_ms, restored.next_sequence)
    live = [entry for entry in restored.entries if entry.sequence >= scorer.cache.oldest_sequence]
    return CachedPartition(read.partition, model, read.position, restored, scorer, live)


def restore_latest(settings: Settings, read: PartitionLog) -> CachedPartition:
    """Restore the cache of the model that wrote the last entry: this loads no model."""
    latest = read.latest()
    if latest is None:
        return restore_cache(settings, read, "", 1)
    return restore_cache(settings, read, latest.model, len(latest.vector) // 4)


class Row(Struct, frozen=True):
    """A live entry."""

    partition: int
    sequence: int
    offset: int
    stream_time: str
    age_seconds: float  # in stream time
    agent_id: str
    trace_id: str


def newest_rows(caches: list[CachedPartition], agent: str | None, trace: str | None) -> list[Row]:
    """Return the live entries of all partitions, newest first; of one agent, or of a trace (its id or a prefix)."""
    found = [
        (entry.stream_time_ms, entry.sequence, cached, entry)
        for cached in caches
        for entry in cached.live
        if (agent is None or entry.agent_id == agent) and (trace is None or _is_trace(entry.trace_id, trace))
    ]
    found.sort(key=lambda it: (-it[0], it[2].partition, -it[1]))
    return [
        Row(
            cached.partition, entry.sequence, entry.source_offset, rfc3339(entry.stream_time_ms),
            cached.age_ms(entry) / 1000, entry.agent_id, entry.trace_id,
        )
        for _, _, cached, entry in found
    ]  # fmt: skip


def _is_trace(trace_id: str, wanted: str) -> bool:
    return trace_id.startswith(wanted) or trace_id.removeprefix("kp:trace:").startswith(wanted)


class RecordRow(Struct, frozen=True):
    """An agent's track record in a domain."""

    partition: int
    agent_id: str
    task_domain: str
    judged: int  # verdicts kept
    succeeded: float
    used: float  # the confidence with KP_CONFIDENCE=record


def record_rows(reads: Sequence[PartitionLog], agent: str | None) -> list[RecordRow]:
    """Return the track records as a worker restores them; in each partition, the one with the latest verdict first."""
    records: dict[int, TrackRecord] = {}
    for read in reads:
        restored, position = Restored(), read.position
        read.log.restore_records(restored, position.found())
        records[read.partition] = TrackRecord(position.topic_id or "")
        records[read.partition].restore(restored.records, position.offset, RemovedBy(restored.requests))
    return [
        RecordRow(partition, agent_id, domain, it.judged, it.succeeded, round(it.used, 6))
        for partition, record in records.items()
        for agent_id, domain, it in reversed(list(record.listed()))
        if agent is None or agent_id == agent
    ]


class Stats(Struct, frozen=True):
    """The statistics of a partition's cache. Times are stream time; None if the entries do not tell."""

    partition: int
    model: str
    entries: int
    capacity: int
    added: int  # entries since the first one
    evicted: int  # those of them that left
    committed_offset: int | None
    stream_time: str | None
    oldest_age_seconds: float | None
    newest_age_seconds: float | None
    ttl_seconds: float | None
    rate_per_second: float | None
    leave_after_seconds: float | None  # age at which entries leave, at the rate of the live ones
    leave_by: Literal["capacity", "ttl"] | None  # why they leave then
    capacity_for_ttl: int | None  # rate x TTL
    memory_bytes: int  # of a worker with a full cache, at most
    changelog_records: int
    changelog_bytes: int
    other_model: int
    other_pass: int
    corrupt: int
    advice: str  # what to set if capacity evicts long before the TTL


def stats(read: PartitionLog, cached: CachedPartition) -> Stats:
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
    return Stats(
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


@dataclass(frozen=True, slots=True)
class Query:
    """A trace or text to compare."""

    texts: tuple[str, ...]
    event_time_ms: int | None = None  # the trace's, if it were published now; None for a text


class NearestRow(Struct, frozen=True):
    """A live entry and its similarity to the query."""

    similarity: float  # cosine, as the worker computes it
    partition: int
    offset: int
    age_seconds: float
    agent_id: str
    trace_id: str


class NearestReport(Struct, frozen=True):
    """The nearest live entries, most similar first."""

    novelty: float  # 1 - the greatest similarity; 0.5 without an entry
    compared: int  # number of live entries
    truncated: bool  # the text was longer than the model reads
    objective_truncated: bool  # the same of an objective that was embedded apart
    embedder: str
    nearest: list[NearestRow]  # live entries, most similar first


def trace_query(path: str, line: int | None, settings: Settings) -> Query:
    """Return the texts that the worker would embed for the trace in a file (-: standard input) or on one of its lines.

    `line`: from 1. Raises CommandError, and ArgumentError for an unreadable file.
    """
    raw = read_document(path, line, settings.limits.max_bytes, "kp-worker cache nearest --file", "--file")
    try:
        trace = parse_trace(raw, settings.limits)
    except InvalidTrace as error:
        raise CommandError(f"{name_of(path)}: {describe_problem(raw, line, error)}") from None
    published_ms = round(time.time() * 1000)
    texts = embedded_texts(trace, settings.embed_text)
    return Query(texts, event_time_ms(trace, published_ms, settings.event_time))


def find_nearest(query: Query, settings: Settings, partition: int | None, count: int) -> NearestReport:
    """Return the `count` nearest live entries. Raises CommandError, SettingsError, ArgumentError."""
    reads = read_partitions(settings, partition)
    with Console(stderr=True).status("loading the model"):
        embedding, identity = _embed(query, settings)
    caches = [restore_cache(settings, read, identity.key(), identity.dimensions) for read in reads]
    _check_model(reads, caches, identity.key())
    return nearest_report(caches, query, embedding, identity, count)


def _embed(query: Query, settings: Settings) -> tuple[Embedding, EmbedderIdentity]:
    """Embed the query as a worker with these settings does. Raises CommandError."""
    try:
        embedder = load_configured(settings)
        if embedder is None:
            raise CommandError("KP_EMBEDDER=none makes no vectors; choose the worker's embedder")
        embedding = embed_trace(embedder, query.texts, settings.embed_text)
    except ModelError as error:
        raise CommandError(str(error)) from None
    except (CommandError, MemoryError):
        raise
    except Exception as error:  # the worker makes such a trace a dead letter
        raise CommandError(f"the model fails on this text: {type(error).__name__}") from None
    return embedding, embedder.identity


def _check_model(reads: Sequence[PartitionLog], caches: Sequence[CachedPartition], model: str) -> None:
    """Raise CommandError if all entries are of another model; warn if those of some partitions are."""
    others = {}
    for read, cached in zip(reads, caches, strict=True):
        latest = read.latest()
        if latest is not None and latest.model != model and not cached.live:
            others[cached.partition] = latest.model
    if not others:
        return
    partitions = ", ".join(map(str, others))
    told = (
        f"the entries of partition {partitions} were made with {', '.join(sorted(set(others.values())))}, but these "
        f"settings embed with {model}. Vectors of different models cannot be compared: use the worker's settings "
        "(KP_MODEL, KP_MAX_TOKENS, KP_PRECISION, KP_EMBED_TEXT)"
    )
    if not any(cached.live for cached in caches):
        raise CommandError(told)
    say(f"warning: {told}")


def nearest_report(
    caches: list[CachedPartition], query: Query, embedding: Embedding, identity: EmbedderIdentity, count: int
) -> NearestReport:
    """Return the `count` nearest live entries of these partitions; among equals, the oldest of the lowest partition."""
    found, compared = [], 0
    for cached in caches:
        rows, lived = _nearest(cached, query, embedding, count)
        found += rows
        compared += lived
    found.sort(key=lambda row: (-row.similarity, row.partition))  # a partition's rows are in order already
    novelty = 1.0 - found[0].similarity if found else NEUTRAL_NOVELTY
    cut = embedding.truncated, embedding.objective_truncated
    return NearestReport(novelty, compared, *cut, identity.key(), found[:count])


def _nearest(cached: CachedPartition, query: Query, embedding: Embedding, count: int) -> tuple[list[NearestRow], int]:
    """Return a partition's nearest rows, and the number of live entries. Removes the rows from the cache one by one.

    So each similarity comes from the worker's own scan, with its bits and its choice among equals.
    """
    scorer, entries = cached.scorer, {str(entry.sequence): entry for entry in cached.live}
    now = (scorer.stream_time_ms or 0) if query.event_time_ms is None else query.event_time_ms
    vector, nearest, _ = scorer.compare(embedding.vector, now)
    lived = len(scorer.cache)
    rows: list[NearestRow] = []
    while vector is not None and nearest is not None and len(rows) < count:
        label = nearest.trace_id
        entry, age = entries[label], cached.age_ms(entries[label]) / 1000
        rows.append(
            NearestRow(nearest.similarity, cached.partition, entry.source_offset, age, entry.agent_id, entry.trace_id)
        )
        scorer.cache.forget(lambda it, label=label: it.trace_id == label)  # type: ignore[misc]
        nearest = scorer.cache.nearest_unit(vector)
    return rows, lived

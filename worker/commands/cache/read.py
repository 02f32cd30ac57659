"""The caches of a group's partitions, read from the changelog as a worker restores them. Changes nothing.

Joins no group and creates no topic: it reads the committed offsets, then the changelog to its end, like a worker that
takes over the partitions, but without a producer, so it fences nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aiokafka.errors import UnknownTopicOrPartitionError

from worker.commands.shared.console import ArgumentError, CommandError, errors_for_the_user
from worker.commands.shared.session import Session, run_session
from worker.config import ConfigError, Settings
from worker.core.changelog import Entry, Log, Restored
from worker.core.novelty import Label
from worker.core.scorer import PartitionScorer
from worker.kafka.cluster.describe import describe_topics
from worker.kafka.state.restore import OffsetsError, Position, read_logs, read_positions

GROUPS = "__consumer_offsets"
"""A broker creates it when a client asks for a group's coordinator: if it is missing, nothing was ever committed."""


@dataclass(frozen=True, slots=True)
class PartitionLog:
    """What Kafka has of one partition: where its group continues, and its changelog."""

    partition: int
    position: Position
    log: Log

    def latest(self) -> Entry | None:
        """Return the committed entry that was written last."""
        return self.log.latest(self.position.offset)


@dataclass(frozen=True, slots=True)
class CachedPartition:
    """The cache of one partition with the entries of one model.

    `model`: the embedder's identity, "" if the partition has no entry. `scorer`: restored as a worker restores it, but
    with the sequence number as the label of each entry. `live`: its live entries, oldest first.
    """

    partition: int
    model: str
    position: Position
    restored: Restored
    scorer: PartitionScorer
    live: list[Entry]

    def age_ms(self, entry: Entry) -> int:
        """Return the entry's age in stream time."""
        return (self.scorer.stream_time_ms or 0) - entry.stream_time_ms


def read_partitions(settings: Settings, partition: int | None) -> list[PartitionLog]:
    """Read all partitions of the source topic, or one. Raises CommandError, SettingsError, ArgumentError."""
    with errors_for_the_user():
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
            "correct the group (-g) or KP_CHANGELOG_TOPIC. Without an embedder there is none"
        )
    count = min(source.partitions, changelog.partitions)
    if partition is not None and partition >= count:
        raise ArgumentError("--partition", f"{source.name} has the partitions 0 to {count - 1}, not {partition}")
    wanted = range(count) if partition is None else [partition]
    if offsets.error is UnknownTopicOrPartitionError:  # a login that may not see it learns nothing here
        raise CommandError(_nothing_committed(settings, wanted))
    seconds = settings.transaction_timeout_seconds
    positions = await read_positions(session.client, settings.group_id, source.name, wanted, seconds)
    if all(position.committed_offset is None for position in positions.values()):
        raise CommandError(_nothing_committed(settings, wanted))
    logs = await read_logs(session.client, changelog.name, wanted)
    return [PartitionLog(number, positions[number], logs[number]) for number in wanted]


def _nothing_committed(settings: Settings, wanted: Sequence[int]) -> str:
    where = "" if len(wanted) > 1 else f", partition {wanted[0]}"
    return (
        f"group {settings.group_id} has committed no offset of {settings.source_topic}{where}: no worker has scored a "
        "trace there; correct the group (-g) or the topic (KP_SOURCE_TOPIC) if one has"
    )


def restore_cache(settings: Settings, read: PartitionLog, model: str, dimensions: int) -> CachedPartition:
    """Restore the cache of one model as a worker does that runs it. `model`: an embedder's identity."""
    restored = read.log.restore(read.position.found(), model, dimensions, settings.cache_max_elements)
    scorer = PartitionScorer(
        settings.cache_max_elements, settings.cache_ttl_ms, dimensions, max_step_ms=settings.stream_time_max_step_ms
    )
    # A trace may be in the cache twice: labelled by its sequence number, the nearest entry is known for certain.
    rows = [(it.sequence, it.stream_time_ms, Label(str(it.sequence)), it.array()) for it in restored.entries]
    scorer.restore(rows, read.position.stream_time_ms, restored.next_sequence)
    live = [entry for entry in restored.entries if entry.sequence >= scorer.cache.oldest_sequence]
    return CachedPartition(read.partition, model, read.position, restored, scorer, live)


def restore_latest(settings: Settings, read: PartitionLog) -> CachedPartition:
    """Restore the cache of the model whose entry was written last: no model needs to be loaded for that."""
    latest = read.latest()
    if latest is None:
        return restore_cache(settings, read, "", 1)
    return restore_cache(settings, read, latest.model, len(latest.vector) // 4)

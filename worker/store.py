"""What a newly assigned partition goes on from: its committed offset, and its cache out of the changelog topic.

Lives here: reading both. Must not live here: writing entries (publisher.py), their
bytes (changelog.py), what the cache does with them (novelty.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError, for_code
from aiokafka.protocol.commit import OffsetFetchRequest
from aiokafka.structs import OffsetAndMetadata

from worker.changelog import CorruptEntry, Entry, decode, one_pass
from worker.novelty import Vector
from worker.publisher import stream_time_from

log = logging.getLogger(__name__)

FETCH_BYTES: Final = 4 << 20
"""Bytes of one fetch of a partition: a cache of 1000 entries (1.7 MB) arrives in one."""


PROGRESS_SECONDS: Final = 2.0
"""A restore that takes longer says how far it is, this often."""

RETRY_SECONDS: Final = 0.2
"""Pause before the group's coordinator is asked again while it moves or loads."""


class OffsetsError(Exception):
    """The committed offset does not fit the source topic any more; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a partition goes on: the next source offset, and the stream time that was committed with it.

    `lost`: records between the committed offset and the oldest one that the topic still has.
    """

    offset: int
    stream_time_ms: int | None
    lost: int = 0


@dataclass(slots=True)
class Restored:
    """What the changelog holds for one partition.

    `entries`: of committed traces, for the cache. `replay`: by source offset, of traces past the committed offset
    (after a crash at least once, or a reset of the offset): they come again, and their embedding is ready.
    """

    entries: list[Entry] = field(default_factory=list)
    replay: dict[int, Entry] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)

    def cache(self) -> list[tuple[int, int, str, Vector]]:
        """Return the cache's entries as PartitionScorer.restore takes them."""
        return [
            (entry.sequence, entry.stream_time_ms, entry.trace_id, entry.array()) for entry in one_pass(self.entries)
        ]


async def read_positions(
    client: Mapping[str, Any], group: str, topic: str, partitions: Sequence[int], timeout_seconds: float
) -> dict[int, Position]:
    """Return where each partition goes on. Raises OffsetsError, KafkaError, TimeoutError.

    A partition without a committed offset starts at the oldest record. One whose committed offset is older than that
    goes on at the oldest record, and says how many were lost.
    """
    tps = [TopicPartition(topic, partition) for partition in partitions]
    async with asyncio.timeout(timeout_seconds):
        committed = await _committed(client, group, tps)
        consumer = AIOKafkaConsumer(**client, enable_auto_commit=False)
        await consumer.start()
        try:
            oldest, ends = await consumer.beginning_offsets(tps), await consumer.end_offsets(tps)
        finally:
            await consumer.stop()
    positions = {}
    for tp in tps:
        found = committed.get(tp)
        if found is None:
            positions[tp.partition] = Position(oldest[tp], None)
        elif found.offset > ends[tp]:
            raise OffsetsError(
                f"{topic}/{tp.partition}: the group {group} has committed offset {found.offset}, the topic ends at "
                f"{ends[tp]}: it was recreated or truncated. Decide where to go on: kafka-consumer-groups "
                f"--group {group} --topic {topic} --reset-offsets --to-earliest --execute"
            )
        else:
            lost = max(0, oldest[tp] - found.offset)
            positions[tp.partition] = Position(found.offset + lost, stream_time_from(found.metadata), lost)
    return positions


async def _committed(
    client: Mapping[str, Any], group: str, tps: Sequence[TopicPartition]
) -> dict[TopicPartition, OffsetAndMetadata]:
    """Ask the group's coordinator for committed offsets, again until it answers without an error.

    Not by aiokafka's own methods: they overlook an error of the whole response (while the coordinator moves or loads)
    and then report that nothing is committed, on which a worker would start from the oldest record.
    """
    admin = AIOKafkaAdminClient(**client)
    await admin.start()
    try:
        while True:
            try:
                coordinator = await admin.find_coordinator(group)
                request = OffsetFetchRequest(group, [(tps[0].topic, [tp.partition for tp in tps])])
                response = await admin._send_request(request, coordinator)
                codes = [response.error_code, *(row[3] for _, rows in response.topics for row in rows)]
                for code in codes:
                    if code:
                        raise for_code(code)(f"offsets of group {group}")
            except KafkaError as error:
                if not error.retriable:
                    raise
                log.info("the coordinator of group %s is not ready: %r", group, error)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            return {
                TopicPartition(topic, partition): OffsetAndMetadata(offset, metadata or "")
                for topic, rows in response.topics
                for partition, offset, metadata, _ in rows
                if offset >= 0
            }
    finally:
        await admin.close()


async def restore(
    client: Mapping[str, Any], changelog: str, positions: Mapping[int, Position], model: str, dimensions: int
) -> dict[int, Restored]:
    """Read the changelog of the given source partitions to its end.

    Call it after the partition's producer has started (which ends any open transaction), with the offsets that were
    committed then. Entries with a source offset below the committed one belong to the cache, later ones do not.
    Another model's entries are left out, with one warning; corrupt ones are skipped and counted.
    """
    result = {partition: Restored() for partition in positions}
    consumer = AIOKafkaConsumer(
        **client,
        enable_auto_commit=False,
        auto_offset_reset="earliest",  # without it a reader of a compacted topic reads nothing, silently
        isolation_level="read_committed",
        max_partition_fetch_bytes=FETCH_BYTES,
        fetch_max_bytes=16 * FETCH_BYTES,
    )
    await consumer.start()
    try:
        tps = [TopicPartition(changelog, partition) for partition in positions]
        consumer.assign(tps)
        await consumer.seek_to_beginning(*tps)
        ends = await consumer.end_offsets(tps)
        todo = [tp for tp in tps if await consumer.position(tp) < ends[tp]]
        told = time.monotonic()
        while todo:
            if time.monotonic() - told > PROGRESS_SECONDS:
                left = sum([ends[tp] - await consumer.position(tp) for tp in todo])
                log.info(
                    "restoring from %s: %d of %d partitions left, %d offsets", changelog, len(todo), len(tps), left
                )
                told = time.monotonic()
            for tp, records in (await consumer.getmany(*todo, timeout_ms=500)).items():
                _take(result[tp.partition], records, positions[tp.partition].offset, model, dimensions)
            todo = [tp for tp in todo if await consumer.position(tp) < ends[tp]]
    finally:
        await consumer.stop()
    for partition, restored in result.items():
        if restored.skipped:
            _warn(partition, restored, model)
    return result


def _take(restored: Restored, records: Sequence[Any], committed: int, model: str, dimensions: int) -> None:
    for record in records:
        try:
            entry = decode(record.value)
        except CorruptEntry as error:
            if not restored.skipped["corrupt"]:
                log.warning(
                    "changelog %s/%d offset %d: %s; the entry is skipped",
                    record.topic, record.partition, record.offset, error,
                )  # fmt: skip
            restored.skipped["corrupt"] += 1
            continue
        if entry.model != model or len(entry.vector) != 4 * dimensions:
            restored.skipped["other_model"] += 1
            restored.skipped[f"model {entry.model}"] += 1
        elif entry.source_offset < committed:
            restored.entries.append(entry)
        else:
            restored.replay[entry.source_offset] = entry


def _warn(partition: int, restored: Restored, model: str) -> None:
    others = sorted(name.removeprefix("model ") for name in restored.skipped if name.startswith("model "))
    if others:
        log.warning(
            "partition %d: %d changelog entries were made by another model (%s), this worker runs %s; they are left "
            "out, so the first traces find fewer neighbours",
            partition, restored.skipped["other_model"], ", ".join(others), model,
        )  # fmt: skip

"""The changelog topic read back: the state of each newly assigned partition, before its first trace.

Lives here: reading committed offsets and changelog entries. Must not live here: writing entries (publisher.py), their
bytes (changelog.py), what the cache does with them (novelty.py).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, TopicPartition

from worker.changelog import CorruptEntry, Entry, decode
from worker.novelty import Vector

log = logging.getLogger(__name__)

FETCH_BYTES: Final = 4 << 20
"""Bytes of one fetch of a partition: a cache of 1000 entries (1.7 MB) arrives in one."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a partition goes on: the committed offset (0 where none is) and the stream time committed with it."""

    offset: int
    stream_time_ms: int | None


@dataclass(slots=True)
class Restored:
    """What the changelog holds for one partition.

    `entries`: of committed traces, for the cache. `replay`: vectors by source offset, of traces past the committed
    offset (possible only at least once): they come again, and their embedding is ready.
    """

    entries: list[Entry] = field(default_factory=list)
    replay: dict[int, Vector] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)


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
        while todo:
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
            restored.replay[entry.source_offset] = entry.array()


def _warn(partition: int, restored: Restored, model: str) -> None:
    others = sorted(name.removeprefix("model ") for name in restored.skipped if name.startswith("model "))
    if others:
        log.warning(
            "partition %d: %d changelog entries were made by another model (%s), this worker runs %s; they are left "
            "out, so the first traces find fewer neighbours",
            partition, restored.skipped["other_model"], ", ".join(others), model,
        )  # fmt: skip

"""The doctor's check of the lag: how many records of the source topic wait. Changes nothing.

Lives here: counting them. Must not live here: the other checks of the broker (doctor_kafka.py), committed offsets
(restore.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from aiokafka import TopicPartition

from worker.commands.finding import Finding, ok, warn
from worker.commands.session import read_to
from worker.config import Settings
from worker.kafka.connections import committed_reader, connected
from worker.kafka.restore import read_positions

COUNTED: Final = 1000
"""Offsets behind the committed one that are read, for each partition. With more, their number is an upper bound."""

READ_SECONDS: Final = 5.0
"""How long these may take to read."""


async def check_lag(settings: Settings, client: Mapping[str, Any], partitions: int, answer_seconds: float) -> Finding:
    """Count the records that wait. Raises OffsetsError, KafkaError, ConfigError, TimeoutError.

    A transaction marker has an offset but is not a record: after one, the last offset is never committed. So
    the records of a short lag are counted, and a long lag is reported as an upper bound.
    """
    topic = settings.source_topic
    positions = await read_positions(client, settings.group_id, topic, range(partitions), answer_seconds)
    if lost := sum(position.lost for position in positions.values()):
        return warn("lag", f"{lost} records were deleted before they were scored", "longer retention, or more workers")
    starts = {TopicPartition(topic, number): position.offset for number, position in positions.items()}
    waiting, exact = await _count(settings, client, starts)
    bound = "" if exact else "at most "
    return ok(
        "lag",
        f"{bound}{waiting} record{' waits' if waiting == 1 else 's wait'} in {partitions} partitions",
    )


async def _count(
    settings: Settings, client: Mapping[str, Any], starts: Mapping[TopicPartition, int]
) -> tuple[int, bool]:
    """Return how many committed records there are from `starts` on, and whether that is exact."""
    async with connected(settings, client, committed_reader(client), tolerant=True) as reader:
        ends = await reader.end_offsets(list(starts))
        behind = {tp: max(0, end - starts[tp]) for tp, end in ends.items()}
        short = {tp: starts[tp] for tp, number in behind.items() if number <= COUNTED}
        bound = sum(behind.values())
        long = sum(number for tp, number in behind.items() if tp not in short)
        read = 0
        try:
            async with asyncio.timeout(READ_SECONDS):
                async for _ in read_to(reader, short, ends):
                    read += 1
        except TimeoutError:
            return bound, False
        return long + read, long == 0

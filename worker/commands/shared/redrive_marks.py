"""The marks of redriven dead letters, on the topic `<group>-redriven` (compacted, one partition).

A mark's key is the position and timestamp of the dead letter's *source* record: two dead letters for one record (after
a crash at least once, or a replay) count as one, and a dead-letter topic that was recreated does not inherit marks.
Offsets of a consumer group could not tell which dead letters between two offsets a filter left out, and Kafka forgets
them after a week without a member.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from worker.commands.shared.session import Session, Topic, read_to
from worker.config import ConfigError, Settings
from worker.kafka.cluster.topic_plan import TopicPlan
from worker.kafka.cluster.topics import SETTLE_ATTEMPTS, create
from worker.kafka.reading.dead_letters import DeadLetter

MARKS_CONFIG: Final[Mapping[str, str]] = {"cleanup.policy": "compact", "retention.ms": "-1"}


def marks_topic(settings: Settings) -> str:
    """Return the name of the topic of the marks."""
    return f"{settings.group_id}-redriven"


def marks_plan(settings: Settings) -> TopicPlan:
    """Return the topic of the marks as it should be; no setting of its own names it."""
    return TopicPlan("", marks_topic(settings), 1, MARKS_CONFIG)


def mark_of(letter: DeadLetter) -> bytes:
    """Return the key of a dead letter's mark."""
    return f"{letter.source}@{letter.timestamp_ms}".encode()


async def find_marks_topic(session: Session, *, create_missing: bool) -> Topic | None:
    """Return the topic of the marks; None: it is missing. Raises ConfigError where Kafka would delete marks."""
    name = marks_topic(session.settings)
    async with session.admin() as admin:
        marks = (await session.topics(admin, name)).get(name)
        if marks is None and create_missing:
            marks = await create_marks_topic(session, admin)
    if marks is not None:
        policy = marks.config.get("cleanup.policy", "compact")
        if "compact" not in policy or "delete" in policy:
            raise ConfigError(
                f"topic {name} has cleanup.policy={policy}: markers would be deleted, and dead "
                "letters redriven twice; set cleanup.policy=compact"
            )
    return marks


async def create_marks_topic(session: Session, admin: AIOKafkaAdminClient) -> Topic:
    """Create the topic of the marks, unless it is there. Raises ConfigError where that is denied, KafkaError."""
    name = marks_topic(session.settings)
    await create(admin, session.settings, marks_plan(session.settings))
    for _ in range(SETTLE_ATTEMPTS):
        if found := await session.topics(admin, name):
            return found[name]
        await asyncio.sleep(0.2)
    raise ConfigError(f"topic {name} was created, but the broker does not show it; try again")


async def read_marks(reader: AIOKafkaConsumer, marks: Topic | None) -> set[bytes]:
    """Return the keys of all marks that are committed now."""
    if marks is None:
        return set()
    tps = [TopicPartition(marks.name, partition) for partition in range(marks.partitions)]
    starts, ends = await reader.beginning_offsets(tps), await reader.end_offsets(tps)
    return {record.key async for record in read_to(reader, starts, ends)}

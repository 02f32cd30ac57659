"""Marks of sent records, on a compacted topic with one partition, each in the transaction of its record.

`redrive` keeps them on `<group>-redriven`. A mark's key is the position and timestamp of the dead letter's *source*
record: two dead letters for one record (after a crash at least once, or a replay) count as one, and a recreated
dead-letter topic does not inherit marks. Offsets of a consumer group could not tell which dead letters between two
offsets a filter skipped, and Kafka forgets them after a week without a member.

`publish --follow` keeps its own on `<group>-followed` (publish/follow.py).
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient

from worker.commands.shared.session import Session, Topic, read_to
from worker.config import ConfigError, Settings
from worker.core.records import SourceRecord
from worker.kafka.describe import current_limit
from worker.kafka.producer import Producer, PublishError
from worker.kafka.rows import OutputTopic, PartitionRows, Row, TopicRefusedError, by_partition
from worker.kafka.topics import SETTLE_ATTEMPTS, TopicPlan, create
from worker.kafka.transaction import run_transaction


def marks_topic(settings: Settings) -> str:
    """Return the name of the topic with the marks of `redrive`."""
    return f"{settings.group_id}-redriven"


def followed_topic(settings: Settings) -> str:
    """Return the name of the topic with the marks of `publish --follow`."""
    return f"{settings.group_id}-followed"


def marks_plan(name: str) -> TopicPlan:
    """Return the intended configuration of a topic of marks; no setting names it."""
    return TopicPlan("", name, 1, {"cleanup.policy": "compact", "retention.ms": "-1"})


async def find_marks_topic(session: Session, name: str, *, create: bool = False) -> Topic | None:
    """Return a topic of marks; None: it is missing. Raises ConfigError if Kafka would delete marks."""
    async with session.admin() as admin:
        marks = (await session.topics(admin, name)).get(name)
        if marks is None and create:
            marks = await create_marks_topic(session, admin, name)
    policy = "compact" if marks is None else marks.config.get("cleanup.policy", "compact")
    if "compact" not in policy or "delete" in policy:
        raise ConfigError(
            f"topic {name} has cleanup.policy={policy}: marks would be deleted, and their records sent twice; set "
            "cleanup.policy=compact"
        )
    return marks


async def needed_marks_topic(session: Session, name: str) -> Topic:
    """Return a topic of marks, created with KP_CREATE_TOPICS. Raises ConfigError if it is missing."""
    marks = await find_marks_topic(session, name, create=session.settings.create_topics)
    if marks is None:
        raise ConfigError(
            f"topic {name} is missing: it records what was sent. Create it with one partition and "
            "cleanup.policy=compact, or set KP_CREATE_TOPICS=true"
        )
    return marks


async def create_marks_topic(session: Session, admin: AIOKafkaAdminClient, name: str) -> Topic:
    """Create a topic of marks unless it exists. Raises ConfigError if that is denied, KafkaError."""
    await create(admin, session.settings, marks_plan(name))
    for _ in range(SETTLE_ATTEMPTS):
        if topics := await session.topics(admin, name):
            return topics[name]
        await asyncio.sleep(0.2)
    raise ConfigError(f"topic {name} was created, but the broker does not show it; try again")


async def read_marks(session: Session, reader: AIOKafkaConsumer, marks: Topic | None) -> AsyncIterator[SourceRecord]:
    """Yield the marks that are committed now, in order.

    Another process may have an open transaction before committed marks of this one. So the end is that of all records,
    and the reader, which reads committed records, waits for that transaction to end.
    """
    if marks is None:
        return
    async with session.connected(AIOKafkaConsumer(**session.client, enable_auto_commit=False)) as looking:
        ends = await looking.end_offsets(marks.tps)
    async for record in read_to(reader, await reader.beginning_offsets(marks.tps), ends):
        yield record


MAX_RECORDS: Final = 500
MAX_BYTES: Final = 8 << 20
"""Limits of one transaction: a commit costs the same for 1 or 500, and more would only hold memory."""


class MarkedRecord(NamedTuple):
    """A record for a partition of a topic, and its mark."""

    row: Row | None  # None: no record, only the mark
    topic: OutputTopic
    partition: int
    mark: tuple[bytes, bytes]  # key and value


async def send_marked(
    session: Session, producer: Producer, marks: Topic, records: Sequence[MarkedRecord], *, keep_marks: bool = False
) -> Mapping[int, TopicRefusedError]:
    """Send records and their marks in one transaction; return why topics refuse some, by position.

    Those are omitted, and so are their marks unless `keep_marks`. After any error it is unknown whether the transaction
    was committed. Raises PublishError, ProducerFenced, KafkaError.
    """
    contents = _MarkedBatch(records, written(marks), keep_marks)
    await run_transaction(producer, contents, partial(current_limit, session.client))
    return contents.refused


@dataclass(slots=True)
class _MarkedBatch:
    """The contents of one transaction."""

    records: Sequence[MarkedRecord]
    marks: OutputTopic
    keep_marks: bool
    refused: dict[int, TopicRefusedError] = field(default_factory=dict)

    def partition_rows(self) -> list[PartitionRows]:
        """Return the rows of marks and records; empty if no mark is left."""
        rows: list[tuple[OutputTopic, int, Row, int | None]] = []
        for position, (row, topic, partition, mark) in enumerate(self.records):
            if position not in self.refused or self.keep_marks:
                rows.append((self.marks, 0, (*mark, None, []), None))
            if row is not None and position not in self.refused:
                rows.append((topic, partition, row, position))
        return by_partition(rows)

    def replace(self, part: PartitionRows, refused: Mapping[int, TopicRefusedError]) -> None:
        """Omit the refused records. Raises PublishError for a mark."""
        for row, error in refused.items():
            if not part.positions:
                raise PublishError(f"topic {part.topic.name} refuses a mark: {error.name}; {error.advice}") from error
            self.refused[part.positions[row]] = error


def written(topic: Topic) -> OutputTopic:
    """Return a topic as an output topic."""
    return OutputTopic(topic.name, topic.partitions, topic.max_bytes)

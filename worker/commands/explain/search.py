"""The search for one trace on the accepted, rejected and dead-letter topics, from the newest records to the oldest.

It reads committed records, joins no group and commits nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.structs import ConsumerRecord
from msgspec import Struct

from worker.commands.explain.steps import RecordPlace
from worker.commands.explain.target import Wanted, WantedOutput, WantedSource, output_topics
from worker.commands.shared.session import Session, SessionError, Topic, read_to
from worker.core.terminal import clean
from worker.kafka.cluster.connections import committed_reader
from worker.kafka.reading.dead_letters import DeadLetter, read_dead_letter

FIRST_STRIDE: Final = 1000
"""Offsets of each partition that are read first: what `tail` and the status page show is among them."""

GROWTH: Final = 4
"""How much further back each portion reaches than the one before it."""

FETCH_BYTES: Final = 1 << 20
"""Bytes of one fetch from one partition: a portion ends somewhere within its last one."""


PROGRESS_RECORDS: Final = 5000
"""Records between two calls of `on_progress`."""


class _SourceOnly(Struct):
    source: RecordPlace


class _Head(Struct):
    """What is read of each document, all else is skipped; a dead letter's value has no `scoring`."""

    id: str
    scoring: _SourceOnly | None = None


_head: Final = msgspec.json.Decoder(_Head)


@dataclass(frozen=True, slots=True)
class Hit:
    """A scored document, or a dead letter; `id` None: the dead letter's value has none.

    `first_offset` to `source.offset` are the records of the source topic that it was made of.
    """

    record: ConsumerRecord
    id: str | None
    source: RecordPlace
    first_offset: int
    letter: DeadLetter | None = None

    @property
    def place(self) -> RecordPlace:
        """Return where the record is."""
        return RecordPlace(self.record.topic, self.record.partition, self.record.offset)


@dataclass(slots=True)
class Searched:
    """What was read: records and oldest timestamp (ms) by topic, and all records; `missing` topics do not exist."""

    topics: list[Topic] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    records: dict[str, int] = field(default_factory=dict)
    oldest_ms: dict[str, int] = field(default_factory=dict)
    total: int = 0

    def count(self, record: ConsumerRecord) -> None:
        """Count a record that was read."""
        self.total += 1
        self.records[record.topic] = self.records.get(record.topic, 0) + 1
        oldest = self.oldest_ms.get(record.topic)
        if oldest is None or record.timestamp < oldest:
            self.oldest_ms[record.topic] = record.timestamp


async def search_outputs(
    session: Session, wanted: Wanted, searched: Searched, on_progress: Callable[[], None]
) -> list[Hit]:
    """Return the records that are meant, newest first; empty: there is none.

    The search stops at the first portion of the topics that holds one. Raises ConfigError and KafkaError.
    """
    names = [wanted.topic] if isinstance(wanted, WantedOutput) else list(output_topics(session.settings))
    async with session.admin() as admin:
        found = await session.topics(admin, *names)
    searched.topics, searched.missing = list(found.values()), [name for name in names if name not in found]
    tps = [TopicPartition(topic.name, partition) for topic in searched.topics for partition in range(topic.partitions)]
    if not tps:
        return []
    async with session.connected(committed_reader(session.client, max_partition_fetch_bytes=FETCH_BYTES)) as reader:
        starts, ends = await reader.beginning_offsets(tps), await reader.end_offsets(tps)
        if isinstance(wanted, WantedOutput):
            starts, ends = _only(wanted, starts, ends)
        hits = await _backwards(reader, starts, ends, _matcher(session, wanted), searched, on_progress)
    return sorted(hits, key=lambda hit: (hit.record.timestamp, hit.record.offset), reverse=True)


def _only(
    wanted: WantedOutput, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    """Return the bounds of one record. Raises SessionError where its partition has no such offset."""
    tp = TopicPartition(wanted.topic, wanted.partition)
    if tp not in ends:
        raise SessionError(f"topic {tp.topic} has no partition {tp.partition}, only 0 to {len(ends) - 1}")
    if not starts[tp] <= wanted.offset < ends[tp]:
        raise SessionError(
            f"partition {tp.partition} of {tp.topic} has no offset {wanted.offset}, only {starts[tp]} to {ends[tp] - 1}"
            if starts[tp] < ends[tp]
            else f"partition {tp.partition} of {tp.topic} is empty"
        )
    return {tp: wanted.offset}, {tp: wanted.offset + 1}


Matcher = Callable[[ConsumerRecord], Hit | None]


async def _backwards(
    reader: AIOKafkaConsumer,
    starts: Mapping[TopicPartition, int],
    ends: Mapping[TopicPartition, int],
    match: Matcher,
    searched: Searched,
    on_progress: Callable[[], None],
) -> list[Hit]:
    """Read portions of all partitions from their ends backwards, until one has what is meant."""
    upper, stride = dict(ends), FIRST_STRIDE
    while True:
        lower = {tp: max(starts[tp], end - stride) for tp, end in upper.items()}
        hits = []
        async for record in read_to(reader, lower, upper):
            searched.count(record)
            if hit := match(record):
                hits.append(hit)
            if searched.total % PROGRESS_RECORDS == 0:
                on_progress()
        if hits or all(lower[tp] <= starts[tp] for tp in lower):
            return hits
        upper, stride = lower, stride * GROWTH


def _matcher(session: Session, wanted: Wanted) -> Matcher:
    """Return the function that tells whether a record is meant."""
    dead_letters, source = session.settings.dead_letter_topic, session.settings.source_topic

    def match(record: ConsumerRecord) -> Hit | None:
        found = _letter(record) if record.topic == dead_letters else _document(record)
        return found if found is not None and _is_meant(found, wanted, source) else None

    return match


def _document(record: ConsumerRecord) -> Hit | None:
    """Return a scored document; None where the worker did not write it."""
    try:
        head = _head.decode(record.value or b"")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if head.scoring is None:
        return None
    return Hit(record, head.id, head.scoring.source, head.scoring.source.offset)


def _letter(record: ConsumerRecord) -> Hit | None:
    """Return a dead letter; None where the worker did not write it."""
    letter = read_dead_letter(record)
    if letter is None:
        return None
    try:
        trace_id = _head.decode(record.value or b"").id
    except (msgspec.DecodeError, UnicodeDecodeError):
        trace_id = None
    source = RecordPlace(letter.source_topic, letter.source_partition, letter.source_offset)
    return Hit(record, trace_id, source, source.offset if letter.first_offset is None else letter.first_offset, letter)


def _is_meant(found: Hit, wanted: Wanted, source_topic: str) -> bool:
    if isinstance(wanted, WantedOutput):
        return True
    if isinstance(wanted, WantedSource):
        same_partition = (found.source.topic, found.source.partition) == (source_topic, wanted.partition)
        return same_partition and found.first_offset <= wanted.offset <= found.source.offset
    if found.id is None:  # no JSON, or cut: the id may be in it all the same
        return wanted.beginning.encode() in (found.record.value or b"")
    # As it is on the topic, or as `tail` and the page show it.
    return found.id.startswith(wanted.beginning) or clean(found.id).startswith(wanted.beginning)


async def about_source(session: Session, wanted: WantedSource) -> str:
    """Return why a place of the source topic has no record, in one sentence; "" where it may have one."""
    name, partition = session.settings.source_topic, wanted.partition
    async with session.admin() as admin:
        topic = (await session.topics(admin, name)).get(name)
    if topic is None:
        return f"There is no topic {name}."
    if partition >= topic.partitions:
        return f"Topic {name} has no partition {partition}, only 0 to {topic.partitions - 1}."
    tp = TopicPartition(name, partition)
    async with session.connected(session.reader()) as reader:
        first, end = (await reader.beginning_offsets([tp]))[tp], (await reader.end_offsets([tp]))[tp]
    if wanted.offset >= end:
        return f"Partition {partition} of {name} ends before offset {end}: nothing is published there yet."
    if wanted.offset < first:
        return f"Partition {partition} of {name} begins at offset {first} now: Kafka has deleted that record."
    return ""

"""Publish a demo's records, read them back, and compare."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Container, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.structs import TopicPartition

from worker.commands.shared.samples import Sample
from worker.commands.shared.scored_rows import TailFilter, TailRecord
from worker.config import Settings
from worker.core.records import SourceRecord
from worker.kafka.reading.fetches import Consumer, Reading
from worker.lab.demo.process import DemoError, DemoProcess

SOURCE, ACCEPTED, REJECTED, DEAD_LETTER = (
    str(Settings.model_fields[name].default)
    for name in ("source_topic", "accepted_topic", "rejected_topic", "dead_letter_topic")
)
STALL_SECONDS: Final = 60.0

Document = dict[str, Any]


def place(record: TailRecord) -> tuple[int, int]:
    """Return partition and offset of the source record."""
    if record.dead_letter is not None:
        return record.dead_letter.source_partition, record.dead_letter.source_offset
    source = (record.document or {})["scoring"]["source"]
    return source["partition"], source["offset"]


@dataclass
class DemoOutcome:
    """Everything that was published and read back."""

    published: list[tuple[int, int]] = field(default_factory=list)  # (partition, offset) on the source topic
    records: list[TailRecord] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def scored(self) -> list[Document]:
        """The scored documents."""
        return [record.document for record in self.records if record.document is not None]

    @property
    def dead(self) -> list[TailRecord]:
        """The dead letters."""
        return [record for record in self.records if record.dead_letter is not None]

    def count(self, decision: str) -> int:
        """Return the number of traces with this decision."""
        return sum(document["scoring"]["decision"] == decision for document in self.scored)

    def imbalance(self) -> str | None:
        """Return which records are missing or duplicated; None if all came out exactly once."""
        came = Counter(map(place, self.records))
        sent = Counter(self.published)
        if came == sent:
            return None
        return (
            f"the counts do not add up: published {len(self.published)}, but accepted {self.count('accepted')} + "
            f"rejected {self.count('rejected')} + dead letters {len(self.dead)} = {len(self.records)}; "
            f"missing (partition, offset): {sorted(sent - came) or 'none'}, too many: {sorted(came - sent) or 'none'}"
        )


@asynccontextmanager
async def clients(bootstrap: str, *topics: str) -> AsyncIterator[tuple[AIOKafkaProducer, AIOKafkaConsumer]]:
    """Start a producer, and a consumer of these topics' committed records from the first one; stop both at the end."""
    async with (
        AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", enable_idempotence=True) as producer,
        Consumer(
            *topics,
            reading=Reading(),
            bootstrap_servers=bootstrap,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        ) as consumer,
    ):
        yield producer, consumer


def _read(batches: Mapping[TopicPartition, Sequence[SourceRecord]]) -> list[TailRecord]:
    return list(filter(None, map(TailFilter(DEAD_LETTER).read, chain.from_iterable(batches.values()))))


async def scored(
    consumer: AIOKafkaConsumer, process: DemoProcess, count: int, wanted: Container[str] | None = None
) -> list[TailRecord]:
    """Return `count` scored runs with a wanted id (None: any), in source order. Raises DemoError."""
    found: list[TailRecord] = []
    began = time.monotonic()
    while len(found) < count:
        process.check()
        if time.monotonic() - began > STALL_SECONDS:
            raise DemoError(f"{len(found)} of {count} runs were scored.\n{process.tail()}")
        read = _read(await consumer.getmany(timeout_ms=100))
        found += [it for it in read if it.document and (wanted is None or it.document["id"] in wanted)]
    return sorted(found, key=place)


async def run_flow(
    bootstrap: str, records: Sequence[Sample], worker: DemoProcess, show: Callable[[DemoOutcome], None]
) -> DemoOutcome:
    """Publish the records, and read until each came out or none has arrived for STALL_SECONDS; show progress."""
    async with clients(bootstrap, ACCEPTED, REJECTED, DEAD_LETTER) as (producer, consumer):
        began = progress = time.monotonic()
        sent = [await producer.send(SOURCE, key=record.key, value=record.value) for record in records]
        outcome = DemoOutcome([(data.partition, data.offset) for data in await asyncio.gather(*sent)])
        while len(outcome.records) < len(records) and time.monotonic() - progress < STALL_SECONDS:
            worker.check()
            if read := _read(await consumer.getmany(timeout_ms=100)):
                progress = time.monotonic()
                outcome.records = sorted([*outcome.records, *read], key=place)
                outcome.seconds = progress - began
            show(outcome)
        outcome.records += _read(await consumer.getmany(timeout_ms=300))  # to catch duplicates
    return outcome

"""The records of a demo: published, read back, and compared."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.structs import ConsumerRecord, TopicPartition

from worker.commands.shared.samples import Sample
from worker.config import Settings
from worker.lab.demo.view import Document, dead_position, position

SOURCE, ACCEPTED, REJECTED, DEAD_LETTER = (
    str(Settings.model_fields[name].default)
    for name in ("source_topic", "accepted_topic", "rejected_topic", "dead_letter_topic")
)
STALL_SECONDS: Final = 60.0


@dataclass
class DemoOutcome:
    """Everything that was published and read back; positions are (partition, offset) on the source topic."""

    published: list[tuple[int, int]] = field(default_factory=list)
    scored: list[Document] = field(default_factory=list)
    dead: list[dict[str, str]] = field(default_factory=list)
    seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.scored) + len(self.dead)

    def count(self, decision: str) -> int:
        """Return how many traces got this decision."""
        return sum(document["scoring"]["decision"] == decision for document in self.scored)

    def add(self, batches: Mapping[TopicPartition, Sequence[ConsumerRecord]], seconds: float) -> None:
        """Add records of the output topics; the last one arrived after `seconds`."""
        for batch in batches.values():
            for record in batch:
                if record.topic == DEAD_LETTER:
                    self.dead.append({name: text.decode() for name, text in record.headers})
                else:
                    self.scored.append(msgspec.json.decode(record.value or b""))
        self.seconds = seconds

    def sort(self) -> None:
        """Sort everything by its position on the source topic."""
        self.scored.sort(key=position)
        self.dead.sort(key=dead_position)

    def imbalance(self) -> str | None:
        """Return which records are missing or came out more than once; None if all came out exactly once."""
        came = Counter([*map(position, self.scored), *map(dead_position, self.dead)])
        sent = Counter(self.published)
        if came == sent:
            return None
        return (
            f"the counts do not add up: published {len(self.published)}, but accepted {self.count('accepted')} + "
            f"rejected {self.count('rejected')} + dead letters {len(self.dead)} = {len(self)}; "
            f"missing (partition, offset): {sorted(sent - came) or 'none'}, too many: {sorted(came - sent) or 'none'}"
        )


async def run_flow(
    bootstrap: str,
    records: Sequence[Sample],
    check: Callable[[], None],
    show: Callable[[DemoOutcome], Awaitable[None]],
) -> DemoOutcome:
    """Publish the records and read the three output topics until every record came out, or none arrives any more.

    Meanwhile `check` may raise, and `show` gets the outcome so far.
    """
    began = time.monotonic()
    async with (
        AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", enable_idempotence=True) as producer,
        AIOKafkaConsumer(
            *(ACCEPTED, REJECTED, DEAD_LETTER),
            bootstrap_servers=bootstrap,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        ) as consumer,
    ):
        sent = [await producer.send(SOURCE, key=record.key, value=record.value) for record in records]
        outcome = DemoOutcome([(data.partition, data.offset) for data in await asyncio.gather(*sent)])
        progress = time.monotonic()
        while len(outcome) < len(records) and time.monotonic() - progress < STALL_SECONDS:
            check()
            if batches := await consumer.getmany(timeout_ms=100):
                progress = time.monotonic()
            outcome.add(batches, progress - began)
            await show(outcome)
        outcome.add(await consumer.getmany(timeout_ms=300), outcome.seconds)  # nothing may come twice
    outcome.sort()
    return outcome

"""Re-driven records and their marks, in transactions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from aiokafka.errors import InvalidProducerEpoch, ProducerFenced

from worker.commands.redrive.counts import Progress, RefusedError
from worker.commands.redrive.dead_letters import WholeRecord
from worker.commands.redrive.marks import mark_of
from worker.commands.shared.session import Session, SessionError, Topic
from worker.core.records import exact_size
from worker.kafka.cluster.describe import current_limit
from worker.kafka.reading.dead_letters import REDRIVE_COUNT, REDRIVEN_FROM, DeadLetter
from worker.kafka.writing.producer import AbortableError, Producer, PublishError
from worker.kafka.writing.publication import OutputTopic, Refused, Row, Shipment, TopicRefusedError
from worker.kafka.writing.publisher import MAX_ROUNDS, search


class RedrivenRecord(NamedTuple):
    """A record for the source topic, and the dead letter that it comes from."""

    letter: DeadLetter
    partition: int
    row: Row


def redriven_record(whole: WholeRecord, source: Topic) -> RedrivenRecord:
    """Return the record for the source topic: as it was, plus two headers. Raises RefusedError."""
    letter = whole.letter
    headers = [
        *whole.headers,
        (REDRIVEN_FROM, letter.place.encode()),
        (REDRIVE_COUNT, b"%d" % (letter.redriven + 1)),
    ]
    size = exact_size(whole.key, whole.value, headers)
    if size > source.max_bytes:
        raise RefusedError(
            f"with its two new headers exceeds the limit of topic {source.name}: raise its max.message.bytes to {size}"
        )
    row = (whole.key, whole.value, letter.timestamp_ms, headers)
    return RedrivenRecord(letter, letter.source_partition % source.partitions, row)


@dataclass(frozen=True, slots=True)
class Transactions:
    """Commits redriven records with their marks; `source` and `marks` are the topics of both."""

    session: Session
    producer: Producer
    source: Topic
    marks: Topic
    progress: Progress

    async def commit(self, batch: Sequence[RedrivenRecord]) -> None:
        """Send records and marks in one transaction; records that the source topic refuses are reported and skipped."""
        left = batch
        for _ in range(MAX_ROUNDS):
            refused = await self._try(left) if left else None
            if refused is None:
                break
            for position, why in refused.items():
                with self.progress.refusing(left[position].letter):
                    raise RefusedError(f"topic {self.source.name} refuses it: {why.name} ({why.words}); {why.advice}")
            left = [record for position, record in enumerate(left) if position not in refused]
        else:
            raise PublishError(f"still refused after {MAX_ROUNDS} attempts")
        for record in left:
            self.progress.counts.count_done(record.letter)
        self.progress.on_progress()

    async def _try(self, batch: Sequence[RedrivenRecord]) -> dict[int, TopicRefusedError] | None:
        """Run one transaction; None: it was committed, otherwise the positions of the records that are refused.

        No position at all: sending again finds out more, for example which records a lowered limit refuses. Raises
        SessionError for a newer run.
        """
        source, marks = (
            OutputTopic(topic.name, topic.partitions, topic.max_bytes) for topic in (self.source, self.marks)
        )
        mark_rows: list[Row] = [(mark_of(record.letter), record.letter.place.encode(), None, []) for record in batch]
        by_partition: dict[int, Shipment] = {}
        for position, record in enumerate(batch):
            shipment = by_partition.setdefault(record.partition, Shipment(source, record.partition))
            shipment.rows.append(record.row)
            shipment.positions.append(position)
        found: dict[int, TopicRefusedError] = {}
        try:
            async with self.producer.transaction():  # 3a, 3c
                refused = await self.producer.send([Shipment(marks, 0, mark_rows), *by_partition.values()])  # 3b
                if refused:
                    found = await self._culprits(refused)
                    raise AbortableError("records are refused")
        except AbortableError:
            return found
        except (ProducerFenced, InvalidProducerEpoch) as error:
            group = self.session.settings.group_id
            raise SessionError(f"another redrive of group {group} has taken over; this one stops") from error
        return None

    async def _culprits(self, refused: Sequence[tuple[Shipment, list[Refused]]]) -> dict[int, TopicRefusedError]:
        """Return the records that are refused alone, by position."""
        found: dict[int, TopicRefusedError] = {}
        for shipment, culprits in await search(self.producer, refused, partial(current_limit, self.session.client)):
            for number, error in culprits.items():
                if not shipment.positions:
                    topic = shipment.topic.name
                    raise PublishError(f"topic {topic} refuses a marker: {error.name}; {error.advice}") from error
                found[shipment.positions[number]] = error
        return found

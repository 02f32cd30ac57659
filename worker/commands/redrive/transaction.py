"""Re-driven records and their marks, in transactions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from aiokafka.errors import InvalidProducerEpoch, ProducerFenced

from worker.commands.redrive.counts import Progress, RefusedError
from worker.commands.redrive.dead_letters import WholeRecord
from worker.commands.shared.redrive_marks import mark_of
from worker.commands.shared.session import Session, SessionError, Topic
from worker.core.records import exact_size
from worker.kafka.cluster.describe import current_limit
from worker.kafka.reading.dead_letters import REDRIVE_COUNT, REDRIVEN_FROM, DeadLetter
from worker.kafka.writing.producer import Producer, PublishError
from worker.kafka.writing.rows import OutputTopic, PartitionRows, Row, TopicRefusedError
from worker.kafka.writing.transaction import run_transaction


class RedrivenRecord(NamedTuple):
    """A record for the topic that it was on, and the dead letter that it comes from."""

    letter: DeadLetter
    topic: OutputTopic
    partition: int
    row: Row


def redriven_record(whole: WholeRecord, sources: Mapping[str, Topic]) -> RedrivenRecord:
    """Return the record for the topic that it was on: as it was, plus two headers. Raises RefusedError."""
    letter = whole.letter
    source = sources.get(letter.source_topic)
    if source is None:
        raise RefusedError(f"belongs on topic {letter.source_topic}, which does not exist: create it")
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
    topic = OutputTopic(source.name, source.partitions, source.max_bytes)
    return RedrivenRecord(letter, topic, letter.source_partition % source.partitions, row)


class Transactions:
    """Commits redriven records with their marks, which are on the topic `marks`."""

    def __init__(self, session: Session, producer: Producer, marks: Topic, progress: Progress) -> None:
        self._session = session
        self._producer = producer
        self._marks = OutputTopic(marks.name, marks.partitions, marks.max_bytes)
        self._progress = progress

    async def commit(self, batch: Sequence[RedrivenRecord]) -> None:
        """Send records and marks in one transaction; records that their topic refuses are reported and skipped.

        Raises SessionError for a newer run, PublishError.
        """
        redriven = _Redriven(batch, self._marks, self._progress)
        limit_of = partial(current_limit, self._session.client)
        try:
            await run_transaction(self._producer, redriven, limit_of)  # 3a to 3c
        except (ProducerFenced, InvalidProducerEpoch) as error:
            group = self._session.settings.group_id
            raise SessionError(f"another redrive of group {group} has taken over; this one stops") from error
        for record in redriven.left.values():
            self._progress.counts.count_done(record.letter)
        self._progress.on_progress()


class _Redriven:
    """The contents of one transaction; `left` are the records that were not refused, by their positions."""

    def __init__(self, batch: Sequence[RedrivenRecord], marks: OutputTopic, progress: Progress) -> None:
        self.left = dict(enumerate(batch))
        self._marks = marks
        self._progress = progress

    def partition_rows(self) -> list[PartitionRows]:
        """Return marks and records; none if no record is left."""
        marks = PartitionRows(self._marks, 0)
        by_partition: dict[tuple[str, int], PartitionRows] = {}
        for position, record in self.left.items():
            marks.rows.append((mark_of(record.letter), record.letter.place.encode(), None, []))
            part = by_partition.setdefault(
                (record.topic.name, record.partition), PartitionRows(record.topic, record.partition)
            )
            part.rows.append(record.row)
            part.positions.append(position)
        return [marks, *by_partition.values()] if self.left else []

    def replace(self, part: PartitionRows, refused: Mapping[int, TopicRefusedError]) -> None:
        """Leave the refused records out, and report them. Raises PublishError for a mark."""
        for number, error in refused.items():
            if not part.positions:
                topic = part.topic.name
                raise PublishError(f"topic {topic} refuses a marker: {error.name}; {error.advice}") from error
            record = self.left.pop(part.positions[number])
            with self._progress.refusing(record.letter):
                raise RefusedError(
                    f"topic {record.topic.name} refuses it: {error.name} ({error.words}); {error.advice}"
                )

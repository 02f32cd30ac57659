"""Writing receipts and refused records, each in one transaction with the offset behind its trace.

A receipt is written as soon as its answer is there. A transaction takes longer than a request, so the next traces are
posted meanwhile, and their receipts share the next transaction. After a crash all of them are looked up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from aiokafka import TopicPartition
from aiokafka.structs import OffsetAndMetadata

from worker.contribute.unit import REFUSED
from worker.core.documents import fit_dead_letter, fits
from worker.core.records import OutputRecord
from worker.kafka.cluster.describe import current_limit
from worker.kafka.writing.producer import Producer, PublishError
from worker.kafka.writing.rows import OutputTopic, PartitionRows, TopicRefusedError
from worker.kafka.writing.transaction import look_again, run_transaction

MAX_DUE: Final = 50
"""Most traces of a partition that are posted and not committed."""


class ReceiptPublisher:
    """Commits with the transactional producer of one partition, which has started."""

    def __init__(
        self,
        client: Mapping[str, Any],
        producer: Producer,
        group: str,
        source: TopicPartition,
        topics: Mapping[str, OutputTopic],
    ) -> None:
        self._producer = producer
        self._group = group
        self._source = source
        self._topics = topics
        self._limit_of = partial(current_limit, client)

    async def commit(self, outputs: Sequence[OutputRecord], next_offset: int, metadata: str) -> None:
        """Write records and the offset. After any error it is unknown whether that was committed."""
        receipts = _Receipts(outputs, self._topics, self._source.partition)
        await look_again(receipts.small_topics(), self._limit_of)
        await run_transaction(
            self._producer,
            receipts,
            self._limit_of,
            offsets=(self._group, {self._source: OffsetAndMetadata(next_offset, metadata)}),
            where=f"partition {self._source.partition}: ",
        )


@dataclass(frozen=True, slots=True)
class _Receipts:
    """The contents of one transaction: receipts and refused traces of a source partition."""

    outputs: Sequence[OutputRecord]
    topics: Mapping[str, OutputTopic]
    partition: int

    def small_topics(self) -> list[OutputTopic]:
        """Return the topics that have become too small for a refused trace, or for batches of the usual size."""
        small = {}
        for output in self.outputs:
            topic = self.topics[output.kind]
            if topic.lowered or not fits(output, topic.max_bytes):
                small[topic.name] = topic
        return list(small.values())

    def partition_rows(self) -> list[PartitionRows]:
        """Return what to send; a refused trace is cut to what its topic takes."""
        by_kind: dict[str, PartitionRows] = {}
        for output in self.outputs:
            topic = self.topics[output.kind]
            fitted = fit_dead_letter(output, topic.max_bytes) if output.kind == REFUSED else output
            part = by_kind.setdefault(output.kind, PartitionRows(topic, self.partition % topic.partitions))
            part.rows.append((fitted.key, fitted.value, fitted.timestamp_ms, fitted.headers))
        return list(by_kind.values())

    def replace(self, part: PartitionRows, refused: Mapping[int, TopicRefusedError]) -> None:
        """Raise PublishError: nothing can stand for a receipt."""
        for error in refused.values():
            where = f"topic {part.topic.name}"
            raise PublishError(f"{where} refuses a record: {error.name}; {error.advice}") from error


class _Due(NamedTuple):
    """What is to be committed: a record or none, the offset behind it, and whom to tell then."""

    output: OutputRecord | None
    next_offset: int
    on_committed: Callable[[], None]


class ReceiptQueue:
    """Commits what is due on one partition, in order, in one transaction after the other.

    `metadata` returns what is committed with an offset.
    """

    def __init__(self, publisher: ReceiptPublisher, metadata: Callable[[], str]) -> None:
        self._publisher = publisher
        self._metadata = metadata
        self._due: list[_Due] = []
        self._commits: asyncio.Task[None] | None = None

    async def add(self, output: OutputRecord | None, next_offset: int, on_committed: Callable[[], None]) -> None:
        """Let a record and its offset be committed soon. Raises the error of an earlier commit.

        Waits while too much is due: what is posted but not committed is looked up after a crash.
        """
        self._due.append(_Due(output, next_offset, on_committed))
        if len(self._due) >= MAX_DUE:
            await self.flush()
        elif self._commits is None or self._commits.done():
            self._begin()

    async def flush(self) -> None:
        """Return when all is committed. Raises the error of a commit."""
        if self._due or (self._commits is not None and self._commits.done()):
            self._begin()
        if self._commits is not None:
            await self._commits

    def _begin(self) -> None:
        if self._commits is not None and self._commits.done():
            self._commits.result()
        if self._commits is None or self._commits.done():
            self._commits = asyncio.create_task(self._commit_all())

    async def _commit_all(self) -> None:
        while self._due:
            batch, self._due = self._due, []
            outputs = [each.output for each in batch if each.output is not None]
            await self._publisher.commit(outputs, batch[-1].next_offset, self._metadata())
            for each in batch:
                each.on_committed()

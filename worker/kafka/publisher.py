"""Publishing outputs, cache entries and the source offset: in one transaction, or (at least once) in this order.

The output partition is the source partition modulo the output topic's partitions: each source partition stays in order,
and equal keys stay together if the numbers of partitions are equal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from aiokafka import TopicPartition
from aiokafka.structs import OffsetAndMetadata

from worker.core.passes import committed_from
from worker.core.trace import InvalidTrace
from worker.kafka.producer import AbortableError, Producer, PublishError
from worker.kafka.publication import Batch, OutputTopic, Publication
from worker.kafka.refused_records import LimitOf, replace_refused, unknown_limit

log = logging.getLogger(__name__)

START_PATIENCE_SECONDS: Final = 30.0
"""How long a producer may wait for its transactional id before the log says so."""

MAX_ROUNDS: Final = 24
"""Most attempts to publish one batch. Each has another dead letter or a lower limit than the one before. One cause
needs four at most; a limit that the broker does not report is halved each time."""


TRANSACTIONS: Final = {
    1: "transactions V1 (a new epoch after a request without an answer)",
    2: "transactions V2 (an epoch for each transaction)",
}
"""The versions of the transaction protocol, in words."""


class Publisher(Protocol):
    """Publishes the batches of one source partition, one after the other."""

    async def start(self) -> None:
        """Connect; with exactly once, this fences the partition's former owner."""
        ...

    def delivery(self) -> str:
        """Return how records are delivered, for the log, once started."""
        ...

    async def publish(self, batch: Batch) -> Mapping[int, InvalidTrace]:
        """Publish and commit; return why outputs were replaced by dead letters, by position.

        After any exception it is unknown whether the batch was committed, and the partition must be restored.
        """
        ...

    async def stop(self) -> None:
        """Disconnect; an open transaction is aborted."""
        ...


def offset_metadata(batch: Batch) -> str:
    """Return the metadata that is committed with the offset: stream time and pass, for the next restart."""
    return batch.source_pass.metadata(batch.stream_time_ms)


def stream_time_from(metadata: str) -> int | None:
    """Read the stream time (ms) from committed metadata; None if the metadata is not ours."""
    committed = committed_from(metadata)
    return None if committed is None else committed.stream_time_ms


@dataclass(eq=False, repr=False)
class ExactlyOncePublisher:
    """One transactional producer for one source partition.

    The guarantee depends on the order of steps in `publish`:
     1. begin;
     2. send outputs and cache entries, and await every acknowledgement;
     3. send the source offset, with the stream time and the pass;
     4. commit. Readers of committed records see none of it before.
    If a topic permanently refuses records in step 2, the same producer continues (a new one would fence the next owner
    if the partition is already lost):
     a. find the refused records, in the transaction that will be aborted;
     b. replace them by dead letters;
     c. abort: readers of committed records never see any of it; then start again at 1 with the whole batch. Its cache
        entries stay, so all other scores stay the same, and a restart that replays the batch has the same result.
    A transaction that the brokers want aborted is run again as a whole. Any other failure aborts the transaction and is
    not retried here.
    """

    producer: Producer
    group: str
    source: TopicPartition
    topics: Mapping[str, OutputTopic]
    changelog: OutputTopic
    limit_of: LimitOf = unknown_limit

    async def start(self) -> None:
        """Connect and fence the former owner; its open transaction ends first, and that may take a while."""
        explanation = asyncio.get_running_loop().call_later(START_PATIENCE_SECONDS, self._explain_wait)
        try:
            await self.producer.start()
        finally:
            explanation.cancel()

    def delivery(self) -> str:
        """Return the protocol."""
        return f"exactly_once, {TRANSACTIONS[self.producer.transactions]}"

    def _explain_wait(self) -> None:
        transactional_id = f"{self.group}-{self.source.partition}"
        log.warning(
            "partition %d: waiting for the transactional id %s for %.0f s: its last transaction does not end, or its "
            "coordinator does not answer. kafka-transactions.sh describe --transactional-id %s shows both; if its "
            "state stays PrepareCommit or PrepareAbort, restart the coordinator's broker",
            self.source.partition, transactional_id, START_PATIENCE_SECONDS, transactional_id,
        )  # fmt: skip

    async def publish(self, batch: Batch) -> Mapping[int, InvalidTrace]:
        """Publish one transaction; after a refusal, another one instead."""
        publication = Publication(batch, self.source.partition, self.topics, self.changelog)
        offset = {self.source: OffsetAndMetadata(batch.next_offset, offset_metadata(batch))}
        for _ in range(MAX_ROUNDS):
            try:
                async with self.producer.transaction():  # 1
                    refused = await self.producer.send(publication.shipments())  # 2
                    if refused:
                        await replace_refused(self.producer, publication, refused, self.limit_of)  # a, b
                        raise AbortableError("records are refused")  # c
                    await self.producer.send_offsets(self.group, offset)  # 3
            except AbortableError as error:
                log.info("partition %d: the transaction is run again: %s", self.source.partition, error)
            else:
                return publication.replaced  # 4
        raise _endless(self.source)

    async def stop(self) -> None:
        """Disconnect."""
        await self.producer.stop()


@dataclass(eq=False, repr=False)
class AtLeastOncePublisher:
    """An idempotent producer for one source partition, for clusters without transactions.

    The guarantee depends on the order of steps in `publish`:
     1. send cache entries and outputs, and await every acknowledgement. If a topic permanently refuses records, find
        them, replace them by dead letters and send all again: records accepted the first time are then duplicated;
     2. commit the source offset through the consumer (which refuses it after a rebalance).
    """

    producer: Producer
    source: TopicPartition
    topics: Mapping[str, OutputTopic]
    changelog: OutputTopic
    commit: Callable[[TopicPartition, int, str], Awaitable[None]]
    timeout_seconds: float
    limit_of: LimitOf = unknown_limit

    async def start(self) -> None:
        """Connect."""
        await self.producer.start()

    def delivery(self) -> str:
        """Return the protocol."""
        return "at_least_once, without transactions"

    async def publish(self, batch: Batch) -> Mapping[int, InvalidTrace]:
        """Publish (again after a refusal), then commit."""
        publication = Publication(batch, self.source.partition, self.topics, self.changelog)
        for _ in range(MAX_ROUNDS):
            async with asyncio.timeout(self.timeout_seconds):
                refused = await self.producer.send(publication.shipments())  # 1
                if not refused:
                    await self.commit(self.source, batch.next_offset, offset_metadata(batch))  # 2
                    return publication.replaced
                await replace_refused(self.producer, publication, refused, self.limit_of)
        raise _endless(self.source)

    async def stop(self) -> None:
        """Disconnect."""
        await self.producer.stop()


def _endless(source: TopicPartition) -> PublishError:
    return PublishError(f"partition {source.partition}: still refused after {MAX_ROUNDS} attempts")

"""Publishing outputs, cache entries and the source offset: in one transaction, or (at least once) in this order.

The output partition is the source partition modulo the output topic's partitions: each source partition stays in order,
and equal keys stay together if the numbers of partitions are equal.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from aiokafka import TopicPartition
from aiokafka.structs import OffsetAndMetadata

from worker.core.passes import committed_from
from worker.core.trace import InvalidTrace
from worker.kafka.writing.producer import AbortableError, Producer, PublishError
from worker.kafka.writing.publication import (
    TOO_LARGE,
    Batch,
    OutputTopic,
    Publication,
    Refused,
    Shipment,
    TopicRefusedError,
)

log = logging.getLogger(__name__)

LimitOf = Callable[[str], Awaitable[int | None]]
"""Returns a topic's current max.message.bytes; None if it is not known."""


async def unknown_limit(topic: str) -> int | None:
    """Return no limit."""
    return None


async def replace_refused(
    producer: Producer,
    publication: Publication,
    refused: Sequence[tuple[Shipment, list[Refused]]],
    limit_of: LimitOf,
) -> None:
    """Find the records that their topics refuse and replace them by dead letters. Raises as `search` does."""
    for shipment, culprits in await search(producer, refused, limit_of):
        publication.replace(shipment, culprits)
        for words, count in Counter(map(str, culprits.values())).items():
            log.warning("%s (%d records of partition %d)", words, count, shipment.partition)


async def search(
    producer: Producer,
    refused: Sequence[tuple[Shipment, list[Refused]]],
    limit_of: LimitOf,
) -> list[tuple[Shipment, dict[int, TopicRefusedError]]]:
    """Return the rows of each shipment that are refused alone (none: its topic's limit is lower than known).

    Raises PublishError if there is neither: sending all again would have the same result.
    """
    found = []
    news = False
    for shipment, batches in refused:
        culprits, lowered = await find_culprits(producer, shipment, batches, limit_of)
        news |= bool(culprits) or lowered
        found.append((shipment, culprits))
    if not news:
        raise PublishError(f"the batch is refused, but none of its records alone: {refused[0][1][0].error}")
    return found


async def find_culprits(
    producer: Producer, shipment: Shipment, refused: Sequence[Refused], limit_of: LimitOf
) -> tuple[dict[int, TopicRefusedError], bool]:
    """Return the rows that are refused alone, and whether the topic's limit is lower than known.

    If the broker does not name the records, parts of the batch are sent again, down to single records. With exactly
    once the transaction will be aborted, so that readers of committed records never see them.
    """
    topic = shipment.topic
    too_large = [each for each in refused if each.error.code in TOO_LARGE]
    if too_large:
        limit = await limit_of(topic.name)
        if limit is not None:
            topic.learn(limit)
        if any(topic.batch_bytes < each.limit for each in too_large):  # found now, or by another partition task
            return {}, True  # the next round fits batches, records and dead letters
    culprits: dict[int, TopicRefusedError] = {}
    waiting = list(refused)
    while waiting:
        each = waiting.pop()
        named = each.culprits()
        if named is not None:
            culprits |= named
            continue
        for part in each.suspects():
            rows = Shipment(topic, shipment.partition, shipment.rows[part.start : part.stop])
            for _, found in await producer.send([rows]):
                waiting += [replace(more, first=part.start + more.first) for more in found]
    if too_large and not culprits:
        topic.batch_bytes = min(topic.batch_bytes, *(each.size // 2 for each in too_large))
        return {}, True
    return culprits, False


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

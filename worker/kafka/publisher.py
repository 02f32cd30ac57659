"""Publishing outputs, cache entries and the source offset: in one transaction, or (at least once) in this order.

Lives here: the transaction and its order of steps. Must not live here: scoring, restore, rebalance decisions.

The output partition is the source partition modulo the output topic's partitions: each source partition stays in order,
and equal keys stay together if the numbers of partitions are equal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.structs import OffsetAndMetadata

from worker.core.passes import committed_from
from worker.core.trace import InvalidTrace
from worker.kafka.aiokafka_private_producer import transaction_error
from worker.kafka.errors import chain
from worker.kafka.producer import PublishError, abort_soon, send_all, transactional_producer, while_sending
from worker.kafka.publication import Batch, OutputTopic, Publication
from worker.kafka.refused_records import LimitOf, replace_refused, unknown_limit

log = logging.getLogger(__name__)

START_PATIENCE_SECONDS: Final = 30.0
"""How long a producer may wait for its transactional id before the log says so."""

MAX_ROUNDS: Final = 24
"""Most attempts to publish one batch. Each has another dead letter or a lower limit than the one before. One cause
needs four at most; a limit that the broker does not report is halved each time."""


class Publisher(Protocol):
    """Publishes the batches of one source partition, one after the other."""

    async def start(self) -> None:
        """Connect; with exactly once, this fences the partition's former owner."""
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
     2. send outputs and cache entries, and await every acknowledgement (a transaction that commits its offset before
        the broker has verified its partitions runs into retries, and with a new topic into a dead producer);
     3. send the source offset, with the stream time and the pass;
     4. commit. Readers of committed records see none of it before.
    If a topic permanently refuses records in step 2, the same producer continues (a new one would fence the next owner
    if the partition is already lost):
     a. find the refused records, in the transaction that will be aborted;
     b. abort: readers of committed records never see any of it;
     c. replace them by dead letters and start again at 1 with the whole batch. Its cache entries stay, so all other
        scores stay the same, and a restart that replays the batch has the same result.
    Any other failure aborts the transaction and is not retried here.
    """

    client: Mapping[str, Any]  # holds secrets
    group: str
    source: TopicPartition
    topics: Mapping[str, OutputTopic]
    changelog: OutputTopic
    timeout_seconds: float
    limit_of: LimitOf = unknown_limit

    def __post_init__(self) -> None:
        transactional_id = f"{self.group}-{self.source.partition}"
        self._producer = transactional_producer(self.client, transactional_id, self.timeout_seconds)

    async def start(self) -> None:
        """Connect and fence the former owner; its open transaction ends first, and aiokafka waits for that silently."""
        explanation = asyncio.get_running_loop().call_later(START_PATIENCE_SECONDS, self._explain_wait)
        try:
            await self._producer.start()
        finally:
            explanation.cancel()

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
        for _ in range(MAX_ROUNDS):
            try:
                async with asyncio.timeout(self.timeout_seconds):
                    done = await while_sending(self._producer, self._transact(publication))
            except Exception as error:
                cause = transaction_error(self._producer)
                await self._abort()
                if cause is None or cause in chain(error):
                    raise
                raise PublishError(f"partition {self.source.partition}: {cause!r}") from cause
            if done:
                return publication.replaced
        raise _endless(self.source)

    async def _transact(self, publication: Publication) -> bool:
        """Run one transaction; return whether it was committed."""
        batch = publication.batch
        await self._producer.begin_transaction()  # 1
        refused = await send_all(self._producer, publication.shipments())  # 2
        if refused:
            await replace_refused(self._producer, publication, refused, self.limit_of, aborting=True)  # a, c
            await self._producer.abort_transaction()  # b
            return False
        await self._producer.send_offsets_to_transaction(  # 3
            {self.source: OffsetAndMetadata(batch.next_offset, offset_metadata(batch))}, self.group
        )
        await self._producer.commit_transaction()  # 4
        return True

    async def _abort(self) -> None:
        """Try to abort, so that readers need not wait for the timeout; the next owner aborts it at its start too."""
        try:
            await abort_soon(self._producer)
        except Exception as error:
            log.info("partition %d: the open transaction was not aborted: %r", self.source.partition, error)

    async def stop(self) -> None:
        """Disconnect."""
        await self._producer.stop()


@dataclass(eq=False, repr=False)
class AtLeastOncePublisher:
    """The worker's one idempotent producer, as one source partition uses it, for clusters without transactions.

    The guarantee depends on the order of steps in `publish`:
     1. send cache entries and outputs, and await every acknowledgement. If a topic permanently refuses records, find
        them, replace them by dead letters and send all again: records accepted the first time are then duplicated;
     2. commit the source offset through the consumer (which refuses it after a rebalance).
    """

    producer: AIOKafkaProducer
    source: TopicPartition
    topics: Mapping[str, OutputTopic]
    changelog: OutputTopic
    commit: Callable[[TopicPartition, int, str], Awaitable[None]]
    timeout_seconds: float
    limit_of: LimitOf = unknown_limit

    async def start(self) -> None:
        """Do nothing: the worker has started its producer."""

    async def publish(self, batch: Batch) -> Mapping[int, InvalidTrace]:
        """Publish (again after a refusal), then commit."""
        publication = Publication(batch, self.source.partition, self.topics, self.changelog)
        for _ in range(MAX_ROUNDS):
            async with asyncio.timeout(self.timeout_seconds):
                if await while_sending(self.producer, self._send(publication)):  # 1
                    await self.commit(self.source, batch.next_offset, offset_metadata(batch))  # 2
                    return publication.replaced
        raise _endless(self.source)

    async def _send(self, publication: Publication) -> bool:
        """Send everything once; return whether everything was accepted."""
        refused = await send_all(self.producer, publication.shipments())
        if refused:
            await replace_refused(self.producer, publication, refused, self.limit_of, aborting=False)
        return not refused

    async def stop(self) -> None:
        """Do nothing: other partitions use the same producer."""


def _endless(source: TopicPartition) -> PublishError:
    return PublishError(f"partition {source.partition}: still refused after {MAX_ROUNDS} attempts")

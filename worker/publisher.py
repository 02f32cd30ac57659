"""Publishing: outputs, cache entries and the source offset, together or (at least once) in this order.

Lives here: the transaction and its order of steps. Must not live here: scoring, restore, rebalance decisions.

Output partition: source partition modulo the output topic's partitions, so that each source partition stays in order
and equal keys stay together where the counts agree.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaConnectionError, NodeNotReadyError
from aiokafka.structs import OffsetAndMetadata

from worker.errors import chain
from worker.passes import NO_PASS, Pass, committed_from
from worker.pipeline import DEAD_LETTER, OutputRecord

log = logging.getLogger(__name__)

RETRY_BACKOFF_MS: Final = 20
"""Pause before a retry. The broker needs some ms to finish the last transaction before it takes the next; aiokafka's
default of 100 ms makes that wait the p99."""

MAX_BATCH_BYTES: Final = 262_144
"""Bytes of one producer batch: larger than aiokafka's 16 KiB, because a busy transaction carries hundreds of traces."""

MAX_REQUEST_BYTES: Final = 64 << 20
"""Upper limit of the client alone; what a topic takes is the broker's to say (max.message.bytes)."""

ABORT_SECONDS: Final = 3.0
"""How long a failed worker tries to abort before it exits."""

TRUNCATED_HEADER: Final = "kp-error-truncated"

Row = tuple[bytes | None, bytes | None, int | None, list[tuple[str, bytes]]]
"""Key, value, timestamp (ms since 1970; None: now) and headers of a record to send."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Traces of one partition to commit together, in offset order.

    `entries` are (key, value) for the changelog; without a value they are tombstones. `next_offset` is the source
    offset after the last of them, and `stream_time_ms` the partition's stream time at that point (None where no trace
    was scored yet). `source_pass` is the pass over the source that they belong to.
    """

    outputs: list[OutputRecord]
    entries: list[tuple[bytes, bytes | None]]
    next_offset: int
    stream_time_ms: int | None
    source_pass: Pass = NO_PASS


@dataclass(frozen=True, slots=True)
class OutputTopic:
    """An output topic: name, number of partitions, largest record it takes (bytes)."""

    name: str
    partitions: int
    max_bytes: int


class Publisher(Protocol):
    """Publishes the batches of one source partition, one after the other."""

    async def start(self) -> None:
        """Connect; exactly once, this fences whoever published for the partition before."""
        ...

    async def publish(self, batch: Batch) -> None:
        """Publish and commit. After any exception the batch's fate is unknown and the partition must be restored."""
        ...

    async def stop(self) -> None:
        """Disconnect; an open transaction is aborted."""
        ...


def offset_metadata(batch: Batch) -> str:
    """Return the metadata committed beside the offset: stream time and pass, so that a restart knows them."""
    return batch.source_pass.metadata(batch.stream_time_ms)


def stream_time_from(metadata: str) -> int | None:
    """Read the stream time (ms) from committed metadata; None for metadata that is not ours."""
    committed = committed_from(metadata)
    return None if committed is None else committed.stream_time_ms


def producer_arguments(client: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that both kinds of producer share."""
    return {
        **client,
        "acks": "all",
        "enable_idempotence": True,
        "retry_backoff_ms": RETRY_BACKOFF_MS,
        "max_batch_size": MAX_BATCH_BYTES,
        "max_request_size": MAX_REQUEST_BYTES,
    }


class ExactlyOncePublisher:
    """One transactional producer for one source partition.

    The order of steps in `publish` carries the guarantee:
     1. begin;
     2. send outputs and cache entries, and await every acknowledgement (a transaction that commits its offset before
        the broker has verified its partitions runs into retries, and with a new topic into a dead producer);
     3. send the source offset, with the stream time and the pass;
     4. commit. Only now do readers of committed records see any of it.
    Any failure on the way aborts, and is never retried here.
    """

    def __init__(
        self,
        client: Mapping[str, Any],
        group: str,
        source: TopicPartition,
        topics: Mapping[str, OutputTopic],
        changelog: str,
        timeout_seconds: float,
    ) -> None:
        self._group = group
        self._source = source
        self._topics = topics
        self._changelog = changelog
        self._timeout_seconds = timeout_seconds
        timeout_ms = round(timeout_seconds * 1000)
        self._producer = survive_lost_coordinator(
            AIOKafkaProducer(
                **producer_arguments(client),
                transactional_id=f"{group}-{source.partition}",
                transaction_timeout_ms=timeout_ms,
                request_timeout_ms=timeout_ms,
            )
        )

    async def start(self) -> None:
        """Connect and fence the former owner."""
        await self._producer.start()

    async def publish(self, batch: Batch) -> None:
        """Publish one transaction."""
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await while_sending(self._producer, self._transact(batch))
        except Exception as error:
            cause = self._transaction_error()
            await self._abort()
            if cause is None or cause in chain(error):
                raise
            raise PublishError(f"partition {self._source.partition}: {cause!r}") from cause

    async def _transact(self, batch: Batch) -> None:
        await self._producer.begin_transaction()  # 1
        await send_all(self._producer, self._source.partition, batch, self._topics, self._changelog)  # 2
        await self._producer.send_offsets_to_transaction(  # 3
            {self._source: OffsetAndMetadata(batch.next_offset, offset_metadata(batch))}, self._group
        )
        await self._producer.commit_transaction()  # 4

    def _transaction_error(self) -> BaseException | None:
        """Return the error that aiokafka keeps for the end of the transaction; the sends then fail with others."""
        end: asyncio.Future[None] = self._producer._txn_manager.wait_for_transaction_end()
        return end.exception() if end.done() and not end.cancelled() else None

    async def _abort(self) -> None:
        """Try to abort, so that readers need not wait for the timeout; the next owner's start aborts too."""
        try:
            await asyncio.wait_for(while_sending(self._producer, self._producer.abort_transaction()), ABORT_SECONDS)
        except Exception as error:
            log.info("partition %d: the open transaction was not aborted: %r", self._source.partition, error)

    async def stop(self) -> None:
        """Disconnect."""
        await self._producer.stop()


class AtLeastOncePublisher:
    """The worker's one idempotent producer, as one source partition uses it, for clusters without transactions.

    The order of steps in `publish` carries the guarantee:
     1. send cache entries and outputs, and await every acknowledgement;
     2. commit the source offset through the consumer (which refuses it after a rebalance).
    """

    def __init__(
        self,
        producer: AIOKafkaProducer,
        source: TopicPartition,
        topics: Mapping[str, OutputTopic],
        changelog: str,
        commit: Callable[[TopicPartition, int, str], Awaitable[None]],
        timeout_seconds: float,
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._producer = producer
        self._source = source
        self._topics = topics
        self._changelog = changelog
        self._commit = commit

    async def start(self) -> None:
        """Do nothing: the producer is the worker's and is started already."""

    async def publish(self, batch: Batch) -> None:
        """Publish, then commit."""
        sending = send_all(self._producer, self._source.partition, batch, self._topics, self._changelog)
        async with asyncio.timeout(self._timeout_seconds):
            await while_sending(self._producer, sending)  # 1
            await self._commit(self._source, batch.next_offset, offset_metadata(batch))  # 2

    async def stop(self) -> None:
        """Do nothing: other partitions go on with the producer."""


def survive_lost_coordinator(producer: AIOKafkaProducer) -> AIOKafkaProducer:
    """Make the producer look for its coordinator again when a connection closes under the question.

    aiokafka does so when a broker is not ready yet, but lets a connection that closes at this moment end its sender:
    one in two broker restarts would end the worker.
    """
    client = producer.client
    lookup = client.coordinator_lookup

    async def coordinator_lookup(kind: int, key: str) -> int:
        try:
            return int(await lookup(kind, key))
        except KafkaConnectionError as error:
            raise NodeNotReadyError(str(error)) from error

    client.coordinator_lookup = coordinator_lookup
    return producer


async def while_sending(producer: AIOKafkaProducer, work: Coroutine[Any, Any, None]) -> None:
    """Await work that needs the producer's sender task, or raise the error that ended that task.

    aiokafka's sender ends when the producer is fenced, and what waits for acknowledgements then would wait for ever.
    """
    task = asyncio.ensure_future(work)
    sender: asyncio.Task[None] = producer._sender.sender_task
    try:
        await asyncio.wait({task, sender}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            cause = None if sender.cancelled() else sender.exception()
            raise PublishError(f"the producer ended: {cause!r}") from cause
        task.result()
    finally:
        task.cancel()


async def send_all(
    producer: AIOKafkaProducer, partition: int, batch: Batch, topics: Mapping[str, OutputTopic], changelog: str
) -> None:
    """Send a batch and wait until every record is acknowledged. Raises the first error, naming the topic."""
    rows: dict[tuple[str, int], list[Row]] = {}
    if batch.entries:
        rows[changelog, partition] = [(key, value, None, []) for key, value in batch.entries]
    for record in batch.outputs:
        topic = topics[record.kind]
        output = fit_dead_letter(record, topic.max_bytes) if record.kind == DEAD_LETTER else record
        row = output.key, output.value, output.timestamp_ms, output.headers
        rows.setdefault((topic.name, partition % topic.partitions), []).append(row)
    sends = (send_rows(producer, topic, number, of_topic) for (topic, number), of_topic in rows.items())
    results = await asyncio.gather(*sends, return_exceptions=True)
    for (topic_name, _), result in zip(rows, results, strict=True):
        if isinstance(result, BaseException):
            raise PublishError(f"topic {topic_name}, partition {partition}: {result!r}") from result


async def send_rows(producer: AIOKafkaProducer, topic: str, partition: int, rows: list[Row]) -> None:
    """Send rows to one partition, in order, and wait until all are acknowledged.

    As batches, not record by record: aiokafka's `send` costs 20 us a record (measured), most of it for the future that
    tells each record's own offset, which nobody asks for here.
    """
    acknowledged: list[asyncio.Future[Any]] = []
    builder = producer.create_batch()
    for key, value, timestamp_ms, headers in rows:
        if builder.append(timestamp=timestamp_ms, key=key, value=value, headers=headers) is None:  # it is full
            acknowledged.append(await producer.send_batch(builder, topic, partition=partition))
            builder = producer.create_batch()
            builder.append(timestamp=timestamp_ms, key=key, value=value, headers=headers)
    builder.close()  # nobody else's records may join
    acknowledged.append(await producer.send_batch(builder, topic, partition=partition))
    await asyncio.gather(*acknowledged)


class PublishError(Exception):
    """A record was not acknowledged; the message names the topic."""


def fit_dead_letter(record: OutputRecord, limit: int) -> OutputRecord:
    """Cut the value of a dead letter that its topic would refuse (`limit`, bytes), and say so in a header.

    The whole record is still on the source topic, at the offset in the headers. Refusing it would stop the partition.
    """
    overhead = 512 + len(record.key or b"") + sum(len(name) + len(value or b"") + 12 for name, value in record.headers)
    size = len(record.value or b"")
    if size + overhead <= limit:
        return record
    kept = (record.value or b"")[: max(0, limit - overhead - 64)]
    headers = [*record.headers, (TRUNCATED_HEADER, b"%d of %d bytes kept" % (len(kept), size))]
    return OutputRecord(record.kind, record.key, kept, headers, record.timestamp_ms)

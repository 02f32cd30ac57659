"""Publishing: outputs, cache entries and the source offset, together or (at least once) in this order.

Lives here: the transaction and its order of steps. Must not live here: scoring, restore, rebalance decisions.

Output partition: source partition modulo the output topic's partitions, so that each source partition stays in order
and equal keys stay together where the counts agree.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol, TypeVar

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaConnectionError, NodeNotReadyError, OutOfOrderSequenceNumber
from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.structs import OffsetAndMetadata

from worker.core.passes import committed_from
from worker.core.records import encoded_size
from worker.core.trace import InvalidTrace
from worker.kafka.errors import chain
from worker.kafka.publication import Batch, OutputTopic, Publication, Refused, Row, Shipment
from worker.kafka.refusals import TOO_LARGE, DoubtfulRefusalError, TopicRefusedError, survive_refusals

log = logging.getLogger(__name__)

Result = TypeVar("Result")

LimitOf = Callable[[str], Awaitable[int | None]]
"""Tells a topic's max.message.bytes as it is now; None where nobody may know."""

RETRY_BACKOFF_MS: Final = 20
"""Pause before a retry. The broker needs some ms to finish the last transaction before it takes the next; aiokafka's
default of 100 ms makes that wait the p99."""

MAX_BATCH_BYTES: Final = 262_144
"""Bytes of one producer batch: larger than aiokafka's 16 KiB, because a busy transaction carries hundreds of traces."""

MAX_REQUEST_BYTES: Final = 64 << 20
"""Upper limit of the client alone; what a topic takes is the broker's to say (max.message.bytes)."""

ABORT_SECONDS: Final = 3.0
"""How long a failed worker tries to abort before it exits."""

MAX_ROUNDS: Final = 24
"""Publications of one batch, each with another dead letter or a lower limit than the one before, until it goes
through. Four are the most that one cause takes; a limit that the broker does not tell is halved."""


async def unknown_limit(topic: str) -> int | None:
    """Tell no limit."""
    return None


class Publisher(Protocol):
    """Publishes the batches of one source partition, one after the other."""

    async def start(self) -> None:
        """Connect; exactly once, this fences whoever published for the partition before."""
        ...

    async def publish(self, batch: Batch) -> Mapping[int, InvalidTrace]:
        """Publish and commit; return which outputs came out as dead letters instead, by position, and why.

        After any exception the batch's fate is unknown and the partition must be restored.
        """
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
    Where a topic refuses records for good in step 2, the same producer (a new one would fence a successor, if the
    partition is lost already) goes on so:
     a. find the records that are refused, in the transaction that is lost anyway;
     b. abort: nothing of it is ever seen;
     c. put dead letters in their place and begin again at 1, with all of the batch. Its cache entries stay, so the
        scores of all others do too, and a restart that replays the batch comes to the same.
    Any other failure on the way aborts, and is never retried here.
    """

    def __init__(
        self,
        client: Mapping[str, Any],
        group: str,
        source: TopicPartition,
        topics: Mapping[str, OutputTopic],
        changelog: OutputTopic,
        timeout_seconds: float,
        limit_of: LimitOf = unknown_limit,
    ) -> None:
        self._limit_of = limit_of
        self._group = group
        self._source = source
        self._topics = topics
        self._changelog = changelog
        self._timeout_seconds = timeout_seconds
        timeout_ms = round(timeout_seconds * 1000)
        self._producer = survive_refusals(
            survive_lost_coordinator(
                AIOKafkaProducer(
                    **producer_arguments(client),
                    transactional_id=f"{group}-{source.partition}",
                    transaction_timeout_ms=timeout_ms,
                    request_timeout_ms=timeout_ms,
                )
            )
        )

    async def start(self) -> None:
        """Connect and fence the former owner."""
        await self._producer.start()

    async def publish(self, batch: Batch) -> Mapping[int, InvalidTrace]:
        """Publish one transaction, after a refusal another one in its place."""
        publication = Publication(batch, self._source.partition, self._topics, self._changelog)
        for _ in range(MAX_ROUNDS):
            try:
                async with asyncio.timeout(self._timeout_seconds):
                    done = await while_sending(self._producer, self._transact(publication))
            except Exception as error:
                cause = self._transaction_error()
                await self._abort()
                if cause is None or cause in chain(error):
                    raise
                raise PublishError(f"partition {self._source.partition}: {cause!r}") from cause
            if done:
                return publication.replaced
        raise _endless(self._source)

    async def _transact(self, publication: Publication) -> bool:
        """Run one transaction; whether it was committed."""
        batch = publication.batch
        await self._producer.begin_transaction()  # 1
        refused = await send_all(self._producer, publication.shipments())  # 2
        if refused:
            await replace_refused(self._producer, publication, refused, self._limit_of, aborting=True)  # a, c
            await self._producer.abort_transaction()  # b
            return False
        await self._producer.send_offsets_to_transaction(  # 3
            {self._source: OffsetAndMetadata(batch.next_offset, offset_metadata(batch))}, self._group
        )
        await self._producer.commit_transaction()  # 4
        return True

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
     1. send cache entries and outputs, and await every acknowledgement. Where a topic refuses records for good, find
        them, put dead letters in their place and send all again: what was taken the first time is there twice;
     2. commit the source offset through the consumer (which refuses it after a rebalance).
    """

    def __init__(
        self,
        producer: AIOKafkaProducer,
        source: TopicPartition,
        topics: Mapping[str, OutputTopic],
        changelog: OutputTopic,
        commit: Callable[[TopicPartition, int, str], Awaitable[None]],
        timeout_seconds: float,
        limit_of: LimitOf = unknown_limit,
    ) -> None:
        self._limit_of = limit_of
        self._timeout_seconds = timeout_seconds
        self._producer = producer
        self._source = source
        self._topics = topics
        self._changelog = changelog
        self._commit = commit

    async def start(self) -> None:
        """Do nothing: the producer is the worker's and is started already."""

    async def publish(self, batch: Batch) -> Mapping[int, InvalidTrace]:
        """Publish, after a refusal again, then commit."""
        publication = Publication(batch, self._source.partition, self._topics, self._changelog)
        for _ in range(MAX_ROUNDS):
            async with asyncio.timeout(self._timeout_seconds):
                if await while_sending(self._producer, self._send(publication)):  # 1
                    await self._commit(self._source, batch.next_offset, offset_metadata(batch))  # 2
                    return publication.replaced
        raise _endless(self._source)

    async def _send(self, publication: Publication) -> bool:
        """Send everything once; whether everything was taken."""
        refused = await send_all(self._producer, publication.shipments())
        if refused:
            await replace_refused(self._producer, publication, refused, self._limit_of, aborting=False)
        return not refused

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


async def while_sending(producer: AIOKafkaProducer, work: Coroutine[Any, Any, Result]) -> Result:
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
        return task.result()
    finally:
        task.cancel()


async def replace_refused(
    producer: AIOKafkaProducer,
    publication: Publication,
    refused: Sequence[tuple[Shipment, list[Refused]]],
    limit_of: LimitOf,
    *,
    aborting: bool,
) -> None:
    """Find the records that their topics refuse and put dead letters in their place. Raises as `search` does."""
    for shipment, culprits in await search(producer, refused, limit_of, aborting=aborting):
        publication.replace(shipment, culprits)
        for words, count in Counter(map(str, culprits.values())).items():
            log.warning("%s (%d records of partition %d)", words, count, shipment.partition)


async def search(
    producer: AIOKafkaProducer,
    refused: Sequence[tuple[Shipment, list[Refused]]],
    limit_of: LimitOf,
    *,
    aborting: bool,
) -> list[tuple[Shipment, dict[int, TopicRefusedError]]]:
    """Return the rows of each shipment that are refused by themselves (none: its topic takes less than was known).

    Raises PublishError where there is neither: sending all again would end the same way.
    """
    found = []
    news = False
    for shipment, batches in refused:
        culprits, lowered = await find_culprits(producer, shipment, batches, limit_of, aborting=aborting)
        news |= bool(culprits) or lowered
        found.append((shipment, culprits))
    if not news:
        raise PublishError(f"no single record is refused, but together: {refused[0][1][0].error}")
    return found


def _endless(source: TopicPartition) -> PublishError:
    return PublishError(f"partition {source.partition}: refused again and again, {MAX_ROUNDS} times")


async def send_all(producer: AIOKafkaProducer, shipments: Sequence[Shipment]) -> list[tuple[Shipment, list[Refused]]]:
    """Send shipments, wait until every record is acknowledged, and return what was refused for good.

    Raises the first other error, naming the topic.
    """
    sends = (send_rows(producer, each.topic, each.partition, each.rows) for each in shipments)
    results = await asyncio.gather(*sends, return_exceptions=True)
    found = []
    for shipment, result in zip(shipments, results, strict=True):
        if isinstance(result, BaseException):
            raise PublishError(f"topic {shipment.topic.name}, partition {shipment.partition}: {result!r}") from result
        if result:
            found.append((shipment, result))
    return found


async def send_rows(
    producer: AIOKafkaProducer, topic: OutputTopic, partition: int, rows: Sequence[Row]
) -> list[Refused]:
    """Send rows to one partition, in order; wait until all are acknowledged, and return the batches that were refused.

    As batches, not record by record: aiokafka's `send` costs 20 us a record (measured), most of it for the future that
    tells each record's own offset, which nobody asks for here. A batch is never larger than the topic takes, unless a
    single record is.
    """
    limit = topic.batch_bytes
    small = limit < MAX_BATCH_BYTES  # otherwise the builder's own limit is the lower one
    sent: list[tuple[int, int, asyncio.Future[Any]]] = []  # first row, bytes, acknowledgement
    builder, first = producer.create_batch(), 0
    for number, (key, value, timestamp_ms, headers) in enumerate(rows):
        full = small and number > first and builder.size() + encoded_size(key, value, headers) > limit
        if full or builder.append(timestamp=timestamp_ms, key=key, value=value, headers=headers) is None:
            sent.append((first, builder.size(), await _send(producer, builder, topic, partition)))
            builder, first = producer.create_batch(), number
            builder.append(timestamp=timestamp_ms, key=key, value=value, headers=headers)
    sent.append((first, builder.size(), await _send(producer, builder, topic, partition)))
    results = await asyncio.gather(*(future for *_, future in sent), return_exceptions=True)
    ends = [*(first for first, *_ in sent[1:]), len(rows)]
    refused = []
    for (first, size, _), end, result in zip(sent, ends, results, strict=True):
        if isinstance(result, TopicRefusedError):
            refused.append(Refused(first, end - first, size, limit, result))
        elif isinstance(result, BaseException):
            raise result
    return refused


async def _send(
    producer: AIOKafkaProducer, builder: BatchBuilder, topic: OutputTopic, partition: int
) -> asyncio.Future[Any]:
    builder.close()  # nobody else's records may join
    acknowledged: asyncio.Future[Any] = await producer.send_batch(builder, topic.name, partition=partition)
    return acknowledged


async def find_culprits(
    producer: AIOKafkaProducer, shipment: Shipment, refused: Sequence[Refused], limit_of: LimitOf, *, aborting: bool
) -> tuple[dict[int, TopicRefusedError], bool]:
    """Return the rows that are refused by themselves, and whether the topic was found to take less than was known.

    Where the broker does not say which records it means, parts of the batch are sent again, down to single records.
    `aborting`: in a transaction that will be aborted, so that what is sent here is never seen.
    """
    topic = shipment.topic
    too_large = [each for each in refused if each.error.code in TOO_LARGE]
    if too_large:
        limit = await limit_of(topic.name)
        if limit is not None:
            topic.learn(limit)
        news = any(topic.batch_bytes < each.limit for each in too_large)  # found now, or by another lane in between
        if news and not any(each.error.doubtful for each in refused):
            return {}, True  # the next round cuts batches, records and letters to it
    culprits: dict[int, TopicRefusedError] = {}
    waiting = list(refused)
    while waiting:
        each = waiting.pop()
        if each.error.doubtful:
            await settle_doubt(producer, shipment, each, aborting=aborting)
        named = each.culprits()
        if named is not None:
            culprits |= named
            continue
        for part in each.suspects():
            found = await send_rows(producer, topic, shipment.partition, shipment.rows[part.start : part.stop])
            waiting += [replace(more, first=part.start + more.first) for more in found]
    if too_large and not culprits:
        topic.batch_bytes = min(topic.batch_bytes, *(each.size // 2 for each in too_large))
        return {}, True
    return culprits, False


async def settle_doubt(producer: AIOKafkaProducer, shipment: Shipment, refused: Refused, *, aborting: bool) -> None:
    """Make sure that a refused batch, sent more than once, was never appended. Raises DoubtfulRefusalError.

    If it was, the broker is ahead of the producer's sequence number by it: the next batch would fail, or, being as many
    records, be taken for its repetition and be lost. So a batch of another number of records goes first, of records
    that any topic takes, which only an aborted transaction can hide.
    """
    if aborting:
        rows: list[Row] = [(b"kp-worker", b"", None, [])] * (2 if refused.count == 1 else 1)
        with contextlib.suppress(OutOfOrderSequenceNumber):
            if not await send_rows(producer, shipment.topic, shipment.partition, rows):
                return
    raise DoubtfulRefusalError(f"{refused.error}; whether it was appended before is not known") from refused.error


class PublishError(Exception):
    """A record was not acknowledged; the message names the topic."""

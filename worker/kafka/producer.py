"""The worker's producers: how they are created, and how batches are sent with them.

Lives here: the arguments that all producers share, the transactional and the idempotent producer, sending rows as
batches. Must not live here: transactions and offsets (publisher.py), handling a refusal (refused_records.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar

from aiokafka import AIOKafkaProducer

from worker.core.records import encoded_size
from worker.kafka.aiokafka_private_producer import retry_coordinator_lookup, sender_task
from worker.kafka.publication import OutputTopic, Refused, Row, Shipment
from worker.kafka.refusals import TopicRefusedError, survive_refusals

Result = TypeVar("Result")

RETRY_BACKOFF_MS: Final = 20
"""Pause before a retry. The broker needs some ms to complete one transaction before it accepts the next; with
aiokafka's default of 100 ms that wait is the p99."""

MAX_BATCH_BYTES: Final = 262_144
"""Bytes of one producer batch: larger than aiokafka's 16 KiB, because a busy transaction carries hundreds of traces."""

MAX_REQUEST_BYTES: Final = 64 << 20
"""Limit of the client alone; the broker enforces that of the topic (max.message.bytes)."""

ABORT_SECONDS: Final = 3.0
"""How long a failed worker tries to abort before it exits."""


class PublishError(Exception):
    """A record was not acknowledged; the message names the topic."""


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


def transactional_producer(
    client: Mapping[str, Any], transactional_id: str, timeout_seconds: float
) -> AIOKafkaProducer:
    """Return a transactional producer, not started: its start fences any other user of the id."""
    timeout_ms = round(timeout_seconds * 1000)
    producer = AIOKafkaProducer(
        **producer_arguments(client),
        transactional_id=transactional_id,
        transaction_timeout_ms=timeout_ms,
        request_timeout_ms=timeout_ms,
    )
    retry_coordinator_lookup(producer)
    return survive_refusals(producer)


def idempotent_producer(client: Mapping[str, Any], timeout_seconds: float) -> AIOKafkaProducer:
    """Return a producer without transactions, not started."""
    return survive_refusals(
        AIOKafkaProducer(**producer_arguments(client), request_timeout_ms=round(timeout_seconds * 1000))
    )


async def while_sending(producer: AIOKafkaProducer, work: Coroutine[Any, Any, Result]) -> Result:
    """Await work that needs the producer's sender task, or raise the error that ended that task.

    aiokafka's sender ends when the producer is fenced; acknowledgements would then be awaited forever.
    """
    task = asyncio.ensure_future(work)
    sender = sender_task(producer)
    try:
        await asyncio.wait({task, sender}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            cause = None if sender.cancelled() else sender.exception()
            raise PublishError(f"the producer ended: {cause!r}") from cause
        return task.result()
    finally:
        task.cancel()


async def abort_soon(producer: AIOKafkaProducer) -> None:
    """Abort the open transaction. Raises TimeoutError after ABORT_SECONDS, and what the producer raises."""
    await asyncio.wait_for(while_sending(producer, producer.abort_transaction()), ABORT_SECONDS)


async def send_all(producer: AIOKafkaProducer, shipments: Sequence[Shipment]) -> list[tuple[Shipment, list[Refused]]]:
    """Send shipments, wait until every record is acknowledged, and return the batches that were permanently refused.

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

    As batches, not record by record: aiokafka's `send` costs 20 us per record (measured), most of it for the future
    with each record's offset, which is not needed here. A batch is never larger than the topic's limit, unless a single
    record is.
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


async def _send(producer: AIOKafkaProducer, builder: Any, topic: OutputTopic, partition: int) -> asyncio.Future[Any]:
    builder.close()  # no other records may be added
    acknowledged: asyncio.Future[Any] = await producer.send_batch(builder, topic.name, partition=partition)
    return acknowledged

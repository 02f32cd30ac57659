"""The private names of aiokafka's producer that we use: the other half of aiokafka_private.py, under the same rules.

Lives here: the sender task, the transaction manager, the look-up of a coordinator, and the answers to produce requests.
Must not live here: which answers are final and what follows from them (refusals.py), transactions (publisher.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaConnectionError, NodeNotReadyError
from aiokafka.producer.message_accumulator import MessageBatch
from aiokafka.producer.sender import SendProduceReqHandler
from aiokafka.protocol.produce import ProduceRequest, ProduceRequest_v8

from worker.kafka.aiokafka_private import with_versions


def sender_task(producer: AIOKafkaProducer) -> asyncio.Task[None]:
    """Return the task that sends (`AIOKafkaProducer._sender`, `Sender.sender_task`).

    It ends when the producer is fenced. The public API does not report that, and acknowledgements then never arrive.
    """
    task: asyncio.Task[None] = producer._sender.sender_task
    return task


def transaction_error(producer: AIOKafkaProducer) -> BaseException | None:
    """Return the error that aiokafka keeps for the end of the transaction (`AIOKafkaProducer._txn_manager`).

    The public API raises it at the next commit only; the sends before that fail with errors that follow from it.
    """
    end: asyncio.Future[None] = producer._txn_manager.wait_for_transaction_end()
    return end.exception() if end.done() and not end.cancelled() else None


def retry_coordinator_lookup(producer: AIOKafkaProducer) -> None:
    """Make the producer look for its coordinator again when the connection closes during the request.

    aiokafka does so when a broker is not ready yet (NodeNotReadyError), but lets a connection that closes at this
    moment end its sender: one in two broker restarts would end the worker. Replaces
    `producer.client.coordinator_lookup`; the public API has no option for it.
    """
    client = producer.client
    lookup = client.coordinator_lookup

    async def coordinator_lookup(kind: int, key: str) -> int:
        try:
            return int(await lookup(kind, key))
        except KafkaConnectionError as error:
            raise NodeNotReadyError(str(error)) from error

    client.coordinator_lookup = coordinator_lookup


class Refusals(NamedTuple):
    """Which answers to a batch are final: `codes`, after which the broker has appended nothing and never will.

    `error` makes the batch's error from topic, partition, code, the broker's message, its messages about single records
    by position, and whether an earlier attempt may have been appended. `not_appended`: errors after which a batch is
    sent again and an earlier attempt was certainly not appended.
    """

    codes: Container[int]
    not_appended: tuple[type[BaseException], ...]
    error: Callable[[str, int, int, str, Mapping[int, str], bool], Exception]


def continue_after_refusals(producer: AIOKafkaProducer, refusals: Refusals) -> None:
    """Let refused batches fail with the error that `refusals` makes, and the producer continue with the next ones.

    Replaces `Sender._send_produce_req`, which ignores the broker's messages and leaves a sequence number with which the
    next batch fails. It also drops a batch's bytes once they are acknowledged or refused (`BatchBuilder._buffer`):
    aiokafka's sender keeps its last batches, 8 MiB for each partition's producer.
    """
    sender = producer._sender
    doubtful: WeakSet[Any] = WeakSet()

    async def send_produce_req(node_id: int, batches: Mapping[TopicPartition, MessageBatch]) -> None:
        await _Handler(sender, batches, refusals, doubtful).do(node_id)
        for batch in batches.values():
            if batch.future.done():
                batch._builder._buffer = b""
        sender._in_flight.remove(node_id)
        sender._muted_partitions.difference_update(batches)

    sender._send_produce_req = send_produce_req


@with_versions(ProduceRequest_v8)
class _ProduceRequest(ProduceRequest):  # type: ignore[misc]  # aiokafka is untyped
    """aiokafka's request, also in the version whose response names the refused records and the reason."""


class _Handler(SendProduceReqHandler):  # type: ignore[misc]
    """One request with batches, and its answer."""

    def __init__(
        self, sender: Any, batches: Mapping[TopicPartition, MessageBatch], refusals: Refusals, doubtful: WeakSet[Any]
    ) -> None:
        super().__init__(sender, dict(batches))
        self._refusals = refusals
        self._doubtful = doubtful

    def create_request(self) -> ProduceRequest:
        request = super().create_request()
        return _ProduceRequest(request._transactional_id, request._required_acks, request._timeout, request._topics)

    def handle_response(self, response: Any) -> None:
        for topic, partitions in response.topics:
            for partition, code, *rest in partitions:
                batch = self._batches.get(TopicPartition(topic, partition))
                if batch is not None and code in self._refusals.codes:
                    del self._batches[batch.tp]  # it is complete; aiokafka handles the others
                    self._settle(batch, code, rest)
        super().handle_response(response)

    def _can_retry(self, error: BaseException, batch: MessageBatch) -> bool:
        again = bool(super()._can_retry(error, batch))
        if again and not isinstance(error, self._refusals.not_appended):
            self._doubtful.add(batch)
        return again

    def _settle(self, batch: MessageBatch, code: int, rest: Sequence[Any]) -> None:
        """Fail the batch. `rest`: offset, time, log start, and from version 8 on the messages."""
        records, words = (rest[3], rest[4]) if len(rest) >= 5 else ((), "")
        about = {index: message or "" for index, message in records}
        told = next(iter(about.values()), "") or words or ""
        if self._sender._txn_manager is not None:
            put_back_sequence(self._sender._txn_manager, batch.tp, batch.record_count)
        topic, partition = batch.tp
        batch.failure(self._refusals.error(topic, partition, code, told, about, batch in self._doubtful))
        batch.future.exception()  # marks it as retrieved: asyncio would log it if nothing awaits it


def put_back_sequence(transactions: Any, tp: TopicPartition, records: int) -> None:
    """Subtract records from a partition's sequence number (`TransactionManager._sequence_numbers`)."""
    number = transactions.sequence_number(tp) - records
    transactions._sequence_numbers[tp] = number if number >= -(2**31) else number + 2**32  # as it wraps on the way up

"""What a topic refuses for good, and a producer that goes on behind it.

Lives here: which of Kafka's answers are about the records themselves, and the producer's sequence numbers after one of
them. The only place of the private names of aiokafka that this needs (test_refusals.py guards them). Must not
live here: what is published instead (publication.py), transactions (publisher.py).

aiokafka counts a batch's records into the partition's sequence number when it takes the batch off its queue, and leaves
it so when the broker refuses the batch; the broker does not count it. The next batch to that partition would then fail
with OutOfOrderSequenceNumber. So the number is put back where the answer is handled. A partition has one batch on its
way at a time, and its next one is taken off the queue only after that: the number is then exactly the refused batch's.
Where the answer of an earlier attempt was lost, that rests on the broker not having appended it then; see `doubtful`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final
from weakref import WeakSet

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import (
    LeaderNotAvailableError,
    NodeNotReadyError,
    NotEnoughReplicasError,
    NotLeaderForPartitionError,
    UnknownTopicOrPartitionError,
)
from aiokafka.producer.message_accumulator import MessageBatch
from aiokafka.producer.sender import SendProduceReqHandler
from aiokafka.protocol.produce import ProduceRequest, ProduceRequest_v8

REFUSALS: Final[Mapping[int, str]] = {
    2: "CORRUPT_MESSAGE",
    10: "MESSAGE_TOO_LARGE",
    18: "RECORD_LIST_TOO_LARGE",
    32: "INVALID_TIMESTAMP",
    43: "UNSUPPORTED_FOR_MESSAGE_FORMAT",
    44: "POLICY_VIOLATION",
    76: "UNSUPPORTED_COMPRESSION_TYPE",
    87: "INVALID_RECORD",
}
"""Kafka's error codes that are about the records and not about topic, cluster or permissions, with Kafka's names. The
broker finds all of them before it appends anything."""

TOO_LARGE: Final = frozenset({10, 18})
INVALID_TIMESTAMP: Final = 32

NOT_APPENDED: Final = (
    LeaderNotAvailableError,
    NodeNotReadyError,
    NotEnoughReplicasError,
    NotLeaderForPartitionError,
    UnknownTopicOrPartitionError,
)
"""After these a batch is sent again, and it is certain that the broker did not append it the first time."""

ADVICE: Final[Mapping[int, str]] = {
    10: "raise its max.message.bytes",
    18: "raise its segment.bytes",
    32: "let its message.timestamp.before.max.ms and message.timestamp.after.max.ms allow what the source topic allows",
    76: "set its compression.type to producer",
    87: "a compacted topic takes no record without a key: take compact out of its cleanup.policy",
}


class TopicRefusedError(Exception):
    """A batch that its topic refuses for good; nothing of it was appended, and the producer can go on.

    `words` are the broker's; `records` its words about single records, by their positions in the batch (empty: it does
    not say which ones it means). `doubtful`: it was sent before, and may have been appended then: a limit
    or the clock may have moved on in between.
    """

    def __init__(
        self,
        topic: str,
        partition: int,
        code: int,
        words: str,
        records: Mapping[int, str] = MappingProxyType({}),
        doubtful: bool = False,
    ) -> None:
        super().__init__(topic, partition, code, words, records, doubtful)
        self.doubtful = doubtful
        self.topic = topic
        self.partition = partition
        self.code = code
        self.words = words
        self.records = records

    @property
    def name(self) -> str:
        """Return Kafka's name of the error."""
        return REFUSALS[self.code]

    @property
    def advice(self) -> str:
        """Say what would let the topic take such records."""
        return ADVICE.get(self.code, "look at the broker's log and the topic's settings")

    def about(self, record: int) -> TopicRefusedError:
        """Return the complaint about one record of the batch."""
        return TopicRefusedError(self.topic, self.partition, self.code, self.records[record] or self.words)

    def __str__(self) -> str:
        return f"topic {self.topic} refuses it for good: {self.name}"


class DoubtfulRefusalError(Exception):
    """A batch was refused when it was sent again, and it is not known whether it was appended the first time.

    This producer's sequence number is then not known either. A new producer (a restart) begins with a new one.
    """


class _WithWords(ProduceRequest):  # type: ignore[misc]
    """aiokafka's request, also in the version whose answer says which records are refused, and why."""


_WithWords._CLASSES = (*ProduceRequest._CLASSES, ProduceRequest_v8)


class _Handler(SendProduceReqHandler):  # type: ignore[misc]
    """One request with batches, and its answer."""

    def __init__(self, sender: Any, batches: Mapping[TopicPartition, MessageBatch], doubtful: WeakSet[Any]) -> None:
        super().__init__(sender, dict(batches))
        self._doubtful = doubtful

    def create_request(self) -> ProduceRequest:
        request = super().create_request()
        return _WithWords(request._transactional_id, request._required_acks, request._timeout, request._topics)

    def handle_response(self, response: Any) -> None:
        for topic, partitions in response.topics:
            for partition, code, *rest in partitions:
                batch = self._batches.get(TopicPartition(topic, partition))
                if batch is not None and code in REFUSALS:
                    del self._batches[batch.tp]  # it is settled; aiokafka looks at the others
                    self._settle(batch, _refusal(topic, partition, code, rest, batch in self._doubtful))
        super().handle_response(response)

    def _can_retry(self, error: BaseException, batch: MessageBatch) -> bool:
        again = bool(super()._can_retry(error, batch))
        if again and not isinstance(error, NOT_APPENDED):
            self._doubtful.add(batch)
        return again

    def _settle(self, batch: MessageBatch, error: TopicRefusedError) -> None:
        if self._sender._txn_manager is not None:
            _put_back(self._sender._txn_manager, batch.tp, batch.record_count)
        batch.failure(error)
        batch.future.exception()  # whoever waits for it has it; where nobody does any more, asyncio would complain


def _refusal(topic: str, partition: int, code: int, rest: Sequence[Any], doubtful: bool) -> TopicRefusedError:
    """Read the answer: after partition and code offset, time, log start, and from version 8 on the broker's words."""
    records, words = (rest[3], rest[4]) if len(rest) >= 5 else ((), "")
    about = {index: message or "" for index, message in records}
    return TopicRefusedError(topic, partition, code, next(iter(about.values()), "") or words or "", about, doubtful)


def _put_back(transactions: Any, tp: TopicPartition, records: int) -> None:
    number = transactions.sequence_number(tp) - records
    transactions._sequence_numbers[tp] = number if number >= -(2**31) else number + 2**32  # as it wraps on the way up


def survive_refusals(producer: AIOKafkaProducer) -> AIOKafkaProducer:
    """Let batches that are refused for good fail with TopicRefusedError, and the producer go on behind them.

    A batch's bytes are dropped once they are acknowledged or refused.
    """
    sender = producer._sender
    doubtful: WeakSet[Any] = WeakSet()

    async def send_produce_req(node_id: int, batches: Mapping[TopicPartition, MessageBatch]) -> None:
        await _Handler(sender, batches, doubtful).do(node_id)
        for batch in batches.values():
            if batch.future.done():  # aiokafka's sender keeps its last batches: 8 MiB for each partition's producer
                batch._builder._buffer = b""
        sender._in_flight.remove(node_id)
        sender._muted_partitions.difference_update(batches)

    sender._send_produce_req = send_produce_req
    return producer

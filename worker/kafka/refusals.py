"""Permanent refusals of a topic, and a producer that continues after a refusal.

Lives here: which of Kafka's responses are about the records themselves, and the error for them. Must not live
here: how aiokafka handles a response (aiokafka_private_producer.py), what is published instead (publication.py),
transactions (publisher.py).

aiokafka adds a batch's records to the partition's sequence number when it takes the batch off its queue, and does not
subtract them when the broker refuses the batch, which the broker does not count. The next batch to that partition would
fail with OutOfOrderSequenceNumber. So the number is reduced again where the response is handled. A partition has one
batch in flight at a time, and the next one is taken off the queue after that: the number is then the refused batch's.
If the response to an earlier attempt was lost, this assumes that the broker did not append the batch then; see
`doubtful`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    LeaderNotAvailableError,
    NodeNotReadyError,
    NotEnoughReplicasError,
    NotLeaderForPartitionError,
    UnknownTopicOrPartitionError,
)

from worker.kafka.aiokafka_private_producer import Refusals, continue_after_refusals

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
"""After these errors a batch is sent again, and the broker is known not to have appended it the first time."""

ADVICE: Final[Mapping[int, str]] = {
    10: "raise its max.message.bytes",
    18: "raise its segment.bytes",
    32: (
        "let its message.timestamp.before.max.ms and message.timestamp.after.max.ms allow what the source topic "
        "allows; for the changelog, correct the clock of this machine, or set message.timestamp.type=LogAppendTime"
    ),
    76: "set its compression.type to producer",
    87: "a compacted topic accepts no record without a key: remove compact from its cleanup.policy",
}


@dataclass(eq=False)
class TopicRefusedError(Exception):
    """A batch that its topic permanently refuses; nothing of it was appended, and the producer can continue.

    `words` is the broker's message; `records` its messages about single records, by their positions in the batch
    (empty: it names none). `doubtful`: an earlier attempt may have been appended, because a limit or the clock may have
    changed in between.
    """

    topic: str
    partition: int
    code: int
    words: str
    records: Mapping[int, str] = field(default_factory=dict)
    doubtful: bool = False

    @property
    def name(self) -> str:
        """Return Kafka's name of the error."""
        return REFUSALS[self.code]

    @property
    def advice(self) -> str:
        """Return how to make the topic accept such records."""
        return ADVICE.get(self.code, "check the broker's log and the topic's settings")

    def about(self, record: int) -> TopicRefusedError:
        """Return the error for one record of the batch."""
        return TopicRefusedError(self.topic, self.partition, self.code, self.records[record] or self.words)

    def __str__(self) -> str:
        return f"topic {self.topic} permanently refuses the batch: {self.name}"


class DoubtfulRefusalError(Exception):
    """A batch was refused when it was sent again, and it is unknown whether an earlier attempt was appended.

    This producer's sequence number is then unknown, too. A new producer (a restart) starts with a new one.
    """


def survive_refusals(producer: AIOKafkaProducer) -> AIOKafkaProducer:
    """Let permanently refused batches fail with TopicRefusedError, and let the producer continue after them."""
    continue_after_refusals(producer, Refusals(REFUSALS, NOT_APPENDED, TopicRefusedError))
    return producer

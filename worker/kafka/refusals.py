"""Permanent refusals of a topic: which of Kafka's error codes are about the records themselves, and their error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

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
    (empty: it names none).
    """

    topic: str
    partition: int
    code: int
    words: str
    records: Mapping[int, str] = field(default_factory=dict)

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
    """A batch was refused when it was sent again, and it is unknown whether an earlier try was appended.

    A limit or the clock may have changed in between. The producer's sequence number is then unknown, too; a restart
    begins with a new producer.
    """

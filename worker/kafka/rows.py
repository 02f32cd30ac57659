"""What a producer sends to the partition of a topic, and what the topic refuses of it."""

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from aiokafka.partitioner import murmur2

log = logging.getLogger(__name__)

Row = tuple[bytes | None, bytes | None, int | None, list[tuple[str, bytes]]]
"""Key, value, timestamp (ms since 1970; None: now) and headers of a record to send."""


def key_partition(key: bytes, partitions: int) -> int:
    """Return the partition of a key as Java's producer, and aiokafka's, choose it."""
    return int((murmur2(key) & 0x7FFFFFFF) % partitions)


@dataclass(slots=True)
class OutputTopic:
    """A topic that is written; all partition tasks share the object."""

    name: str
    partitions: int
    max_bytes: int
    """Largest batch that it accepts: read at start, after a refusal for size, and by transaction.look_again."""
    batch_bytes: int = 0
    """Limit of a batch with several records: lowered when such a one was refused, and none of its records alone."""
    lowered: bool = False  # whether batches have been smaller since a refusal: the topic may take larger ones again
    looked_at: float = field(default=-math.inf, repr=False, compare=False)
    """When the limit was last looked up again, seconds of a monotonic clock."""
    looking: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False, compare=False)
    """Held during that look-up: the other partition tasks wait for its result."""

    def __post_init__(self) -> None:
        self.batch_bytes = self.batch_bytes or self.max_bytes

    def learn(self, max_bytes: int) -> None:
        """Apply the topic's current limit, whether it is lower or higher than the known one."""
        if max_bytes == self.max_bytes:
            return
        log.warning("topic %s now accepts at most %d bytes (max.message.bytes)", self.name, max_bytes)
        self.lowered = max_bytes < self.max_bytes
        self.batch_bytes = min(self.batch_bytes, max_bytes) if self.lowered else max_bytes
        self.max_bytes = max_bytes

    def limit_batches(self, size: int) -> None:
        """Send batches of at most `size` bytes from now on."""
        self.batch_bytes = min(self.batch_bytes, size)
        self.lowered = True


@dataclass(slots=True)
class PartitionRows:
    """The rows for one topic partition, in order."""

    topic: OutputTopic
    partition: int
    rows: list[Row] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """Where each is in what its sender publishes; none where nothing can replace them, as for changelog entries."""


def by_partition(rows: Iterable[tuple[OutputTopic, int, Row, int | None]]) -> list[PartitionRows]:
    """Return rows by topic partition, each in its order. With a row: topic, partition, and position (None: none)."""
    parts: dict[tuple[str, int], PartitionRows] = {}
    for topic, partition, row, position in rows:
        part = parts.get((topic.name, partition))
        if part is None:
            part = parts[topic.name, partition] = PartitionRows(topic, partition)
        part.rows.append(row)
        if position is not None:
            part.positions.append(position)
    return list(parts.values())


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
"""Kafka's error codes about records, and not about topic, cluster or permissions. The broker finds all of them before
it appends anything."""

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
    """A batch that its topic permanently refuses; nothing of it was appended, and the producer can continue."""

    topic: str
    partition: int
    code: int
    words: str  # the broker's message
    records: Mapping[int, str] = field(default_factory=dict)  # its messages about records, by position in the batch

    @property
    def name(self) -> str:
        """Return Kafka's name of the error."""
        return REFUSALS[self.code]

    @property
    def advice(self) -> str:
        """Return how to make the topic accept such records."""
        return ADVICE.get(self.code, "check the broker's log and the topic's settings")

    def __str__(self) -> str:
        return f"topic {self.topic} permanently refuses the record batch: {self.name}"


@dataclass(frozen=True, slots=True)
class RefusedBatch:
    """A batch with the rows [first, first + count) of a partition's, which its topic permanently refuses."""

    first: int
    count: int
    size: int  # bytes
    limit: int  # the topic's, as it was known when the batch was sent
    error: TopicRefusedError

    def refused_rows(self) -> dict[int, TopicRefusedError] | None:
        """Return the rows that the broker names, with the error of each; None if it names none.

        The broker sends one code for the batch and a message for each record. If the messages are of several kinds, the
        code applies to some of the records only.
        """
        error = self.error
        if self.count == 1:
            return {self.first: error}
        kinds = {words[:9] for words in error.records.values()}  # "Timestamp 1795...", "Compacted topic ..."
        if len(kinds) != 1 or not self._names_its_rows():
            return None
        return {
            self.first + number: TopicRefusedError(error.topic, error.partition, error.code, words or error.words)
            for number, words in error.records.items()
        }

    def parts(self) -> list[range]:
        """Return the rows to send again to find the cause: the named ones one by one, otherwise both halves."""
        if self.error.records and self._names_its_rows():
            return [range(self.first + number, self.first + number + 1) for number in self.error.records]
        half, end = self.first + self.count // 2, self.first + self.count
        return [range(self.first, half), range(half, end)]

    def _names_its_rows(self) -> bool:
        return all(0 <= number < self.count for number in self.error.records)

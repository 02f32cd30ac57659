"""The records to publish for a batch, by topic partition, with dead letters in place of refused records.

A scored trace whose output does not fit its topic is replaced by a dead letter. The trace was scored, and later traces
were compared with it: its cache entry stays in the batch, so all other scores stay the same.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from worker.core.documents import dead_letter, fit_dead_letter, fits, last_resort, readdressed, source_place
from worker.core.passes import NO_PASS, Pass
from worker.core.records import BATCH_OVERHEAD, DEAD_LETTER, OutputRecord, SourceRecord, encoded_size
from worker.core.trace import InvalidTrace, Reason

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


log = logging.getLogger(__name__)

OWN_HEADERS: Final = 512
"""More bytes than a batch's header and the headers added to a scored trace (kp-score, kp-decision, spans) need."""

KIND_LENGTH: Final = 9
"""Characters that distinguish the broker's messages about a record: "Timestamp 1795..." and "Compacted topic ..."."""

Row = tuple[bytes | None, bytes | None, int | None, list[tuple[str, bytes]]]
"""Key, value, timestamp (ms since 1970; None: now) and headers of a record to send."""


@dataclass(slots=True)
class OutputTopic:
    """A topic that is written: name, number of partitions, largest batch it accepts (bytes).

    `max_bytes` is read at start, and again after a refusal for size. `batch_bytes` limits a batch with more than one
    record. It is lowered when such a batch was refused, none of its records was refused alone, and the topic's limit
    may not be read. All partition tasks share the object.
    """

    name: str
    partitions: int
    max_bytes: int
    batch_bytes: int = 0

    def __post_init__(self) -> None:
        self.batch_bytes = self.batch_bytes or self.max_bytes

    def learn(self, max_bytes: int) -> None:
        """Apply the topic's current limit if it is lower than the known one."""
        if max_bytes < self.max_bytes:
            log.warning("topic %s now accepts at most %d bytes (max.message.bytes)", self.name, max_bytes)
            self.max_bytes = max_bytes
            self.batch_bytes = min(self.batch_bytes, max_bytes)


@dataclass(frozen=True, slots=True)
class Batch:
    """Traces of one partition to commit together, in offset order.

    `entries` are (key, value) for the changelog; the value None deletes. `next_offset` is the source offset after the
    last trace, and `stream_time_ms` the partition's stream time at that point (None: no trace was scored yet).
    `records` are the source records of `outputs`, in the same order: dead letters are made from them. `source_pass` is
    the pass over the source that they belong to.
    """

    outputs: list[OutputRecord]
    entries: Sequence[tuple[bytes, bytes | None]]
    next_offset: int
    stream_time_ms: int | None
    records: Sequence[SourceRecord] = ()
    source_pass: Pass = NO_PASS


@dataclass(slots=True)
class Shipment:
    """The records of one topic partition, in order. `positions`: where each is in the batch's outputs.

    Changelog entries have no positions.
    """

    topic: OutputTopic
    partition: int
    rows: list[Row] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Refused:
    """A batch with the rows [first, first + count) that its topic permanently refused.

    `size`: its bytes. `limit`: the topic's limit as it was known when the batch was sent.
    """

    first: int
    count: int
    size: int
    limit: int
    error: TopicRefusedError

    def culprits(self) -> dict[int, TopicRefusedError] | None:
        """Return the rows that the broker names, with the error of each; None if it names none.

        The broker sends one code for the whole batch and a message for each record. If the messages are of several
        kinds, the code applies to some of the records only.
        """
        error = self.error
        if self.count == 1:
            return {self.first: error}
        kinds = {words[:KIND_LENGTH] for words in error.records.values()}
        if len(kinds) != 1 or not all(0 <= number < self.count for number in error.records):
            return None
        return {self.first + number: error.about(number) for number in error.records}

    def suspects(self) -> list[range]:
        """Return the parts to send again to find the cause: the named records one by one, otherwise both halves."""
        if self.error.records and all(0 <= number < self.count for number in self.error.records):
            return [range(self.first + number, self.first + number + 1) for number in self.error.records]
        half, end = self.first + self.count // 2, self.first + self.count
        return [range(self.first, half), range(half, end)]


class RefusedForGoodError(Exception):
    """A topic refuses a record that nothing can replace: a cache entry, or the last resort of a dead letter."""


class Publication:
    """A batch while it is published; each round of refusals changes it.

    `replaced`: why a dead letter replaces a scored output, by position in the batch.
    """

    def __init__(self, batch: Batch, partition: int, topics: Mapping[str, OutputTopic], changelog: OutputTopic) -> None:
        self.batch = batch
        self.replaced: dict[int, InvalidTrace] = {}
        self._partition = partition
        self._topics = topics
        self._changelog = changelog
        self._outputs = list(batch.outputs)  # dead letters complete: each round fits them again
        self._refused: dict[int, set[int]] = {}  # error codes of dead letters that were refused, by position
        self._hopeless: set[int] = set()  # positions of dead letters that only have the last resort left

    def shipments(self) -> list[Shipment]:
        """Return what to send; each topic partition occurs once."""
        by_target: dict[tuple[str, int], Shipment] = {}
        if self.batch.entries:
            rows: list[Row] = [(key, value, None, []) for key, value in self.batch.entries]
            by_target[self._changelog.name, self._partition] = Shipment(self._changelog, self._partition, rows)
        by_kind: dict[str, Shipment] = {}
        for position, whole in enumerate(self._outputs):
            output = self._fitted(position, whole)
            shipment = by_kind.get(output.kind)
            if shipment is None:
                shipment = by_kind[output.kind] = self._shipment(output.kind, by_target)
            shipment.rows.append((output.key, output.value, output.timestamp_ms, output.headers))
            shipment.positions.append(position)
        return list(by_target.values())

    def _shipment(self, kind: str, by_target: dict[tuple[str, int], Shipment]) -> Shipment:
        """Return the shipment of a kind of output; two kinds may have one topic."""
        topic = self._topics[kind]
        number = self._partition % topic.partitions
        return by_target.setdefault((topic.name, number), Shipment(topic, number))

    def replace(self, shipment: Shipment, culprits: Mapping[int, TopicRefusedError]) -> None:
        """Replace the refused rows by dead letters. Raises RefusedForGoodError."""
        for row, error in culprits.items():
            if not shipment.positions:
                raise RefusedForGoodError(
                    f"topic {error.topic} refuses a single cache entry: {error.name} {error.words}".rstrip()
                ) from error
            position = shipment.positions[row]
            if self._outputs[position].kind != DEAD_LETTER:
                self._become_letter(position, _refused_by_topic(error))
            elif position in self._hopeless:
                raise RefusedForGoodError(
                    f"topic {error.topic} refuses even a dead letter without value and headers: {error.name} "
                    f"{error.words}".rstrip()
                ) from error
            else:
                self._note_refusal(position, error.code)

    def _note_refusal(self, position: int, code: int) -> None:
        """Record why a dead letter was refused: a smaller change than the last resort may suffice."""
        codes = self._refused.setdefault(position, set())
        about_key = code != INVALID_TIMESTAMP and code not in TOO_LARGE and self._outputs[position].key is None
        if code in codes or not (about_key or code == INVALID_TIMESTAMP):
            self._hopeless.add(position)
        codes.add(code)

    def _become_letter(self, position: int, error: InvalidTrace) -> OutputRecord:
        self.replaced[position] = error
        letter = self._outputs[position] = dead_letter(self.batch.records[position], error)
        return letter

    def _fitted(self, position: int, output: OutputRecord) -> OutputRecord:
        """Return the record to send for an output: the output, or a dead letter that fits its topic."""
        if output.kind != DEAD_LETTER:
            topic = self._topics[output.kind]
            source = self.batch.records[position].size if self.batch.records else 0  # holds key and headers
            if source and source + len(output.value or b"") + OWN_HEADERS <= topic.max_bytes:
                return output
            if fits(output, topic.max_bytes):
                return output
            output = self._become_letter(position, _too_large(output, topic))
        limit = self._topics[DEAD_LETTER].max_bytes
        if position in self._hopeless:
            return last_resort(output, limit, source_place(output))
        codes = self._refused.get(position, set())
        if INVALID_TIMESTAMP in codes:
            output = OutputRecord(output.kind, output.key, output.value, output.headers, None)
        if codes - {INVALID_TIMESTAMP}:
            output = readdressed(output)
        return fit_dead_letter(output, limit)


def _refused_by_topic(error: TopicRefusedError) -> InvalidTrace:
    return InvalidTrace(
        Reason.REFUSED_BY_TOPIC,
        "",
        f"topic {error.topic} permanently refuses the scored trace: {error.name}; {error.advice}. Kafka: {error.words}",
    )


def _too_large(output: OutputRecord, topic: OutputTopic) -> InvalidTrace:
    size = encoded_size(output.key, output.value, output.headers) + BATCH_OVERHEAD
    return InvalidTrace(
        Reason.TOO_LARGE,
        "",
        f"the scored trace has {size} bytes with key and headers; topic {topic.name} accepts {topic.max_bytes}; "
        "raise its max.message.bytes, or send smaller traces",
    )

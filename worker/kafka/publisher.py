"""Publishing what is committed together: outputs, changelog entries and source offset, each source partition in order.

Exactly once, they are one transaction; at least once, the offset is committed last. The worker's output partition is
the source partition modulo the output topic's partitions; `assemble` chooses it by the key.

A scored trace whose output its topic refuses, or that does not fit, is replaced by a dead letter. Its cache entry stays
in the commit, because later traces were compared with it.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from aiokafka import TopicPartition
from aiokafka.structs import OffsetAndMetadata

from worker.core.dead_letters import dead_letter, fit_dead_letter, fits, last_resort, readdressed, source_place
from worker.core.records import (
    ASSEMBLED,
    BATCH_OVERHEAD,
    DEAD_LETTER,
    JUDGED,
    REDRIVE_COUNT,
    SPANS,
    OutputRecord,
    SourceRecord,
    encoded_size,
)
from worker.core.terminal import number_of
from worker.core.trace import InvalidTrace, Reason
from worker.kafka.producer import Producer
from worker.kafka.rows import (
    INVALID_TIMESTAMP,
    TOO_LARGE,
    OutputTopic,
    PartitionRows,
    Row,
    TopicRefusedError,
    by_partition,
)
from worker.kafka.transaction import LimitOf, look_again, run_transaction, send_then_commit, unknown_limit

log = logging.getLogger(__name__)

OWN_HEADERS: Final = 1024
"""More than a batch's header and the headers added to a scored trace (kp-score, kp-decision, kp-screen, spans) need."""

START_PATIENCE_SECONDS: Final = 30.0  # how long a producer may wait for its transactional id before the log says so

TRANSACTIONS: Final = {
    1: "transactions V1 (an epoch for each transaction, by one more request)",
    2: "transactions V2 (an epoch for each transaction)",
}
"""The versions of the transaction protocol, in words."""


@dataclass(frozen=True, slots=True)
class Commit:
    """What is committed together of one source partition: in one transaction, or with the offset last."""

    outputs: list[OutputRecord]  # in the order of their offsets
    entries: Sequence[tuple[bytes, bytes | None]]  # keys and values for the changelog; the value None deletes
    next_offset: int  # the source offset after the last record
    metadata: str  # is committed with the offset, for the next owner of the partition
    records: Sequence[SourceRecord] = ()
    """The source records of `outputs`, in the same order, for dead letters; without them nothing replaces an output."""


class RefusedForGoodError(Exception):
    """A topic refuses a record that nothing replaces: a cache entry, a receipt, or the last resort of a dead letter."""


class CommitContents:
    """What is sent for a commit; each round of refusals changes them."""

    def __init__(
        self, commit: Commit, partition: int, topics: Mapping[str, OutputTopic], changelog: OutputTopic | None
    ) -> None:
        self.commit = commit
        self.replaced: dict[int, InvalidTrace] = {}  # why a dead letter replaces a scored output, by position
        self._partition = partition
        self._topics = topics
        self._changelog = changelog
        self._outputs = list(commit.outputs)  # dead letters complete: each round fits them again
        self._refused: dict[int, set[int]] = {}  # error codes of dead letters that were refused, by position
        self._hopeless: set[int] = set()  # positions of dead letters that only have the last resort left

    def small_topics(self) -> list[OutputTopic]:
        """Return the topics that have become too small for an output, a dead letter, or batches of the usual size.

        What is known of a limit is forgotten where a redriven record does not fit: somebody has probably raised it.
        """
        small = {}
        for position, output in enumerate(self._outputs):
            topic = self._topics[output.kind]
            if topic.lowered or not self._fits(position, output, topic):
                small[topic.name] = topic
                records = self.commit.records
                if records and any(name == REDRIVE_COUNT for name, _ in records[position].headers):
                    topic.looked_at = -math.inf
        if self._changelog is not None and self.commit.entries and self._changelog.lowered:
            small[self._changelog.name] = self._changelog
        return list(small.values())

    def partition_rows(self) -> list[PartitionRows]:
        """Return what to send; each topic partition occurs once."""
        parts = by_partition(self._rows())
        if self._changelog is not None and self.commit.entries:
            rows: list[Row] = [(key, value, None, []) for key, value in self.commit.entries]
            parts.insert(0, PartitionRows(self._changelog, self._partition, rows))
        return parts

    def _rows(self) -> Iterator[tuple[OutputTopic, int, Row, int | None]]:
        for position, whole in enumerate(self._outputs):
            output = self._fitted(position, whole)
            topic = self._topics[output.kind]
            number = (self._partition if output.partition is None else output.partition) % topic.partitions
            yield topic, number, (output.key, output.value, output.timestamp_ms, output.headers), position

    def replace(self, part: PartitionRows, refused: Mapping[int, TopicRefusedError]) -> None:
        """Replace the refused rows by dead letters. Raises RefusedForGoodError."""
        for row, error in refused.items():
            if not part.positions:
                raise RefusedForGoodError(
                    f"topic {error.topic} refuses a single cache entry: {error.name} {error.words}".rstrip()
                ) from error
            position = part.positions[row]
            if self._outputs[position].kind != DEAD_LETTER:
                if not self.commit.records:
                    raise RefusedForGoodError(f"{error}; {error.advice}") from error
                self._become_letter(position, _refused_by_topic(self._outputs[position], error))
            elif position in self._hopeless:
                raise RefusedForGoodError(
                    f"topic {error.topic} refuses even a dead letter without value and headers: {error.name} "
                    f"{error.words}".rstrip()
                ) from error
            else:
                self._note_refusal(position, error.code)
        for words, count in Counter(map(str, refused.values())).items():
            log.warning("%s (%s of partition %d)", words, number_of(count, "record"), part.partition)

    def _note_refusal(self, position: int, code: int) -> None:
        """Record why a dead letter was refused: a smaller change than the last resort may suffice."""
        codes = self._refused.setdefault(position, set())
        about_key = code != INVALID_TIMESTAMP and code not in TOO_LARGE and self._outputs[position].key is None
        if code in codes or not (about_key or code == INVALID_TIMESTAMP):
            self._hopeless.add(position)
        codes.add(code)

    def _become_letter(self, position: int, error: InvalidTrace) -> OutputRecord:
        self.replaced[position] = error
        letter = self._outputs[position] = dead_letter(self.commit.records[position], error)
        return letter

    def _fitted(self, position: int, output: OutputRecord) -> OutputRecord:
        if output.kind != DEAD_LETTER:
            topic = self._topics[output.kind]
            if not self.commit.records or self._fits(position, output, topic):
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

    def _fits(self, position: int, output: OutputRecord, topic: OutputTopic) -> bool:
        source = self.commit.records[position].size if self.commit.records else 0  # holds key and headers
        if output.kind != DEAD_LETTER and source and source + len(output.value or b"") + OWN_HEADERS <= topic.max_bytes:
            return True
        return fits(output, topic.max_bytes)


def _what(output: OutputRecord) -> str:
    return {
        ASSEMBLED: "assembled trace", SPANS: "record with spans", JUDGED: "record of a verdict"
    }.get(output.kind, "scored trace")  # fmt: skip


def _refused_by_topic(output: OutputRecord, error: TopicRefusedError) -> InvalidTrace:
    return InvalidTrace(
        Reason.REFUSED_BY_TOPIC,
        "",
        f"topic {error.topic} permanently refuses the {_what(output)}: {error.name}; {error.advice}. "
        f"Kafka: {error.words}",
    )


def _too_large(output: OutputRecord, topic: OutputTopic) -> InvalidTrace:
    size = encoded_size(output.key, output.value, output.headers) + BATCH_OVERHEAD
    return InvalidTrace(
        Reason.TOO_LARGE,
        "",
        f"the {_what(output)} has {size} bytes with key and headers; topic {topic.name} accepts {topic.max_bytes}; "
        "raise its max.message.bytes, or send smaller traces",
    )


async def fence(producer: Producer, place: str) -> None:
    """Start a producer. Its former owner's transaction ends first, which may take long; `place` begins the warning."""
    if producer.transactional_id is None:
        await producer.start()
        return
    explanation = asyncio.get_running_loop().call_later(
        START_PATIENCE_SECONDS, log.warning,
        "%s: waiting for the transactional id %s for %.0f s: its last transaction does not end, or its coordinator "
        "does not answer. kafka-transactions.sh describe --transactional-id %s shows both; if its state stays "
        "PrepareCommit or PrepareAbort, restart the coordinator's broker",
        place, producer.transactional_id, START_PATIENCE_SECONDS, producer.transactional_id,
    )  # fmt: skip
    try:
        await producer.start()
    finally:
        explanation.cancel()


@dataclass(eq=False, repr=False)
class Publisher:
    """Publishes the commits of one source partition, one after the other, with its producer.

    `commit_offset`: at least once, commits an offset as a member of the group; None: exactly once, in transactions.
    """

    producer: Producer
    group: str
    source: TopicPartition
    topics: Mapping[str, OutputTopic]
    changelog: OutputTopic | None
    limit_of: LimitOf = unknown_limit
    commit_offset: Callable[[TopicPartition, int, str], Awaitable[None]] | None = None

    async def start(self) -> None:
        """Connect; with transactions, this fences the partition's former owner."""
        await fence(self.producer, f"partition {self.source.partition}")

    async def publish(self, commit: Commit) -> Mapping[int, InvalidTrace]:
        """Publish and commit; return why outputs were replaced by dead letters, by position.

        After any exception it is unknown whether it was committed, and the partition must be restored.
        """
        contents = CommitContents(commit, self.source.partition, self.topics, self.changelog)
        await look_again(contents.small_topics(), self.limit_of)
        where = f"partition {self.source.partition}: "
        if self.commit_offset is None:
            offset = {self.source: OffsetAndMetadata(commit.next_offset, commit.metadata)}
            await run_transaction(self.producer, contents, self.limit_of, offsets=(self.group, offset), where=where)
        else:
            offset_commit = partial(self.commit_offset, self.source, commit.next_offset, commit.metadata)
            await send_then_commit(self.producer, contents, self.limit_of, offset_commit, where=where)
        return contents.replaced

    async def look_again(self, topic: OutputTopic) -> None:
        """Look up the limit of a topic that seems too small, unless that was done a short time ago."""
        await look_again([topic], self.limit_of)

    async def stop(self) -> None:
        """Disconnect; an open transaction is aborted."""
        await self.producer.stop()

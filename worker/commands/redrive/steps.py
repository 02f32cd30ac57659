"""A run of `kp-worker redrive`: dead letters back to their topics, each exactly once, or into a file.

A redriven dead letter is marked by a record on the topic `<group>-redriven` (marks.py), in the same transaction as the
record on its topic.

The order of steps carries the guarantee:
 1. start the producer `<group>-redrive`: this aborts an open transaction of a killed run, and fences a running one;
 2. read the marks, up to their end: everything that earlier runs committed, and nothing else;
 3. read the dead letters up to their end; redrive those that match, have no mark and are not refused, one transaction
    at a time: a. begin, b. send records and marks and await every acknowledgement, c. commit.
If the process is killed before 3c has taken effect, the transaction is invisible (the worker reads committed records)
and its dead letters have no marks; afterwards, record and mark both exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import InvalidProducerEpoch, ProducerFenced

from worker.commands.redrive.counts import Progress, RefusedError
from worker.commands.shared.console import json_output, naming
from worker.commands.shared.marks import (
    MarkedBatch,
    MarkedRecord,
    find_marks_topic,
    marks_topic,
    needed_marks_topic,
    read_marks,
    written,
)
from worker.commands.shared.session import Session, SessionError, Topic, read_to
from worker.config import ConfigError, Settings
from worker.core.dead_letters import (
    NO_VALUE,
    REDRIVEN_FROM,
    DeadLetter,
    as_json,
    originals,
    read_dead_letter,
)
from worker.core.records import REDRIVE_COUNT, SourceRecord, exact_size
from worker.core.trace import Reason
from worker.kafka.cluster.describe import current_limit
from worker.kafka.writing.producer import Producer
from worker.kafka.writing.transaction import run_transaction

OF_CLOSED_RUNS: Final = frozenset({Reason.LATE_SPAN, Reason.ASSEMBLY_FAILED})
"""Reasons of `assemble` for spans of a closed run: they would be late again, or become a second trace of it."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which dead letters to redrive. Times are those of the source records, ms since 1970."""

    reasons: frozenset[str] = frozenset()  # empty: all
    since_ms: int | None = None
    until_ms: int | None = None  # exclusive
    partition: int | None = None
    first: int = 0
    end: int | None = None  # exclusive

    def takes(self, letter: DeadLetter) -> bool:
        """Return whether the dead letter matches by reason and time."""
        moment = letter.record.time_ms if letter.timestamp_ms is None else letter.timestamp_ms
        return (
            (not self.reasons or letter.reason in self.reasons)
            and (self.since_ms is None or moment >= self.since_ms)
            and (self.until_ms is None or moment < self.until_ms)
        )


def source_topics(settings: Settings) -> list[str]:
    """Return the topics whose records become dead letters of this worker and of its `assemble`."""
    return [settings.source_topic, *settings.span_topics]


def parse_offsets(text: str) -> tuple[int, int | None]:
    """Return (first, end) of A:B (without B), A:, :B or a single offset. Raises ValueError."""
    match = re.fullmatch(r"([0-9]{0,18})(:?)([0-9]{0,18})", text)
    if match is None or not (match[1] or match[3]):
        raise ValueError(f"{text!r} is not an offset range; use A:B (B is exclusive), A:, :B or A")
    first = int(match[1] or 0)
    end = first + 1 if not match[2] else int(match[3]) if match[3] else None
    if end is not None and end <= first:
        raise ValueError(f"{text!r} is empty: the end must be greater than the start")
    return first, end


class WholeRecord(NamedTuple):
    """A dead letter with the complete key, value and headers of its source record."""

    letter: DeadLetter
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]


@dataclass(frozen=True, slots=True)
class DeadLetterSource:
    """The dead letters of a run."""

    run: Redrive
    reader: AIOKafkaConsumer  # reads the dead letters
    lookup: AIOKafkaConsumer  # reads single records of the source topic
    marks: set[bytes]  # of earlier runs
    seen: set[bytes] = field(default_factory=set)  # of dead letters that this run has read

    async def to_redrive(self) -> AsyncIterator[WholeRecord]:
        """Yield the records to redrive; those that were redriven too often are refused."""
        async for letter in self.unmarked():
            with self.run.progress.refusing(letter):
                if letter.redriven >= self.run.max_redrives:
                    raise RefusedError(
                        f"was redriven {letter.redriven} times and failed each time: correct it (--to-file), or raise "
                        "--max-redrives"
                    )
                yield await self.whole(letter)

    async def unmarked(self) -> AsyncIterator[DeadLetter]:
        """Yield the selected dead letters that were not redriven, one for each source record."""
        async for letter in self._selected():
            mark = _mark_of(letter)
            if mark in self.marks:
                self.run.progress.counts.already[letter.reason] += 1
            elif mark in self.seen:
                self.run.progress.counts.repeated[letter.reason] += 1
            else:
                self.seen.add(mark)
                yield letter

    async def whole(self, letter: DeadLetter) -> WholeRecord:
        """Return the source record from the dead letter or, if that is truncated, its topic. Raises RefusedError."""
        if letter.reason in NO_VALUE:
            raise RefusedError(
                f"has no content of {letter.source_range} of topic {letter.source_topic}: {NO_VALUE[letter.reason]}"
            )
        if not letter.incomplete:
            return WholeRecord(letter, letter.key, letter.record.value, letter.original_headers())
        record = await self._source_record(letter)
        if record is None or not letter.is_of(record):
            raise RefusedError(
                f"is truncated, and {letter.source} is no longer there: publish it again from its origin"
            )
        return WholeRecord(letter, record.key, record.value, originals(record.headers))

    async def _selected(self) -> AsyncIterator[DeadLetter]:
        """Yield the selected dead letters, up to the topic's end at the time of the call."""
        session, selection, counts = self.run.session, self.run.selection, self.run.progress.counts
        sources = source_topics(session.settings)
        (topic,) = await session.existing(session.settings.dead_letter_topic)
        wanted = range(topic.partitions) if selection.partition is None else [selection.partition]
        if wanted[-1] >= topic.partitions:
            raise ConfigError(
                f"topic {topic.name} has no partition {wanted[-1]}, only 0 to {topic.partitions - 1} (--partition)"
            )
        tps = [TopicPartition(topic.name, partition) for partition in wanted]
        starts = {tp: max(first, selection.first) for tp, first in (await self.reader.beginning_offsets(tps)).items()}
        ends = await self.reader.end_offsets(tps)
        if selection.end is not None:
            ends = {tp: min(end, selection.end) for tp, end in ends.items()}
        async for record in read_to(self.reader, starts, ends):
            letter = read_dead_letter(record)
            if letter is None or letter.source_topic not in sources:
                counts.foreign += 1
            elif letter.reason in OF_CLOSED_RUNS:
                counts.late += 1
            elif selection.takes(letter):
                counts.found[letter.reason] += 1
                yield letter
            self.run.progress.on_progress()

    async def _source_record(self, letter: DeadLetter) -> SourceRecord | None:
        tp = TopicPartition(letter.source_topic, letter.source_partition)
        (topic,) = await self.run.session.existing(tp.topic)
        if tp.partition >= topic.partitions:
            return None
        first, end = (await self.lookup.beginning_offsets([tp]))[tp], (await self.lookup.end_offsets([tp]))[tp]
        if not first <= letter.source_offset < end:
            return None
        ends = {tp: letter.source_offset + 1}
        async with asyncio.timeout(10.0):  # time limit for reading one existing record from the source topic
            async for record in read_to(self.lookup, {tp: letter.source_offset}, ends):
                return record
        return None


def _mark_of(letter: DeadLetter) -> bytes:
    """Return the key of a dead letter's mark."""
    return f"{letter.source}@{letter.timestamp_ms}".encode()


def redriven_record(whole: WholeRecord, sources: Mapping[str, Topic]) -> MarkedRecord:
    """Return the record for its original topic: unchanged, plus two headers. Raises RefusedError."""
    letter = whole.letter
    source = sources.get(letter.source_topic)
    if source is None:
        raise RefusedError(f"belongs on topic {letter.source_topic}, which does not exist: create it")
    added = [(REDRIVEN_FROM, letter.place.encode()), (REDRIVE_COUNT, b"%d" % (letter.redriven + 1))]
    headers = [*whole.headers, *added]
    size = exact_size(whole.key, whole.value, headers)
    if size > source.max_bytes:
        raise RefusedError(
            f"with its two new headers exceeds the limit of topic {source.name}: raise its max.message.bytes to {size}"
        )
    row = (whole.key, whole.value, letter.timestamp_ms, headers)
    mark = _mark_of(letter), letter.place.encode()
    return MarkedRecord(row, written(source), letter.source_partition % source.partitions, mark)


MAX_RECORDS: Final = 500
MAX_BYTES: Final = 8 << 20
"""Limits of one transaction: a commit costs the same for 1 or 500, and more would only hold memory."""


@dataclass(frozen=True, slots=True)
class Redrive:
    """One run over the dead-letter topic."""

    session: Session
    selection: Selection
    max_redrives: int
    progress: Progress

    async def preview(self, *, for_file: bool = False) -> None:
        """Count as `to_source` (or `to_file`) would, without changing anything."""
        if for_file:
            await self._write(None)
            return
        sources, marks = await self._sources(), await self._marks()
        async with self._letters(marks) as dead_letters:
            async for whole in dead_letters.to_redrive():
                with self.progress.refusing(whole.letter):
                    redriven_record(whole, sources)
                    self.progress.counts.count_done(whole.letter)

    async def to_file(self, path: str) -> None:
        """Write the matching dead letters without a mark as JSON Lines, even those that failed too often.

        - is standard output.
        """
        with contextlib.nullcontext(sys.stdout.buffer) if path == "-" else _whole_file(Path(path)) as output:
            await self._write(json_output(output))

    async def _write(self, output: BinaryIO | None) -> None:
        await self._sources()
        marks = await self._marks()
        async with self._letters(marks) as dead_letters:
            async for letter in dead_letters.unmarked():
                with self.progress.refusing(letter):
                    whole = await dead_letters.whole(letter)
                    if output is not None:
                        output.write(as_json(letter, whole.key, whole.value, whole.headers) + b"\n")
                    self.progress.counts.count_done(letter)

    async def to_source(self) -> None:
        """Redrive with the steps of the module docstring."""
        sources = await self._sources()
        marks = await needed_marks_topic(self.session, marks_topic(self.session.settings))
        settings = self.session.settings
        producer = Producer(self.session.client, f"{settings.group_id}-redrive", settings.transaction_timeout_seconds)
        async with (
            self.session.connected(producer),  # 1
            self._letters(marks) as dead_letters,  # 2
        ):
            batch: list[tuple[DeadLetter, MarkedRecord]] = []
            size = 0
            async for whole in dead_letters.to_redrive():  # 3
                with self.progress.refusing(whole.letter):
                    batch.append((whole.letter, redriven_record(whole, sources)))
                    size += len(whole.value or b"")
                if len(batch) >= MAX_RECORDS or size >= MAX_BYTES:
                    await self._commit(producer, marks, batch)
                    batch, size = [], 0
            if batch:
                await self._commit(producer, marks, batch)

    async def _commit(self, producer: Producer, marks: Topic, batch: Sequence[tuple[DeadLetter, MarkedRecord]]) -> None:
        """Send records and marks in one transaction; records that their topic rejects are reported and skipped.

        Raises SessionError if a newer run has taken over, and PublishError.
        """
        contents = MarkedBatch([record for _, record in batch], written(marks), keep_marks=False)
        try:
            await run_transaction(producer, contents, partial(current_limit, self.session.client))  # 3a to 3c
        except (ProducerFenced, InvalidProducerEpoch) as error:
            group = self.session.settings.group_id
            raise SessionError(f"another redrive of group {group} has taken over; this one stops") from error
        for position, (letter, record) in enumerate(batch):
            with self.progress.refusing(letter):
                if (why := contents.refused.get(position)) is not None:
                    raise RefusedError(f"topic {record.topic.name} refuses it: {why.name} ({why.words}); {why.advice}")
                self.progress.counts.count_done(letter)
        self.progress.on_progress()

    @asynccontextmanager
    async def _letters(self, marks: Topic | None) -> AsyncIterator[DeadLetterSource]:
        """Connect to the dead letters, and read the marks of earlier runs. Raises ConfigError."""
        session = self.session
        async with (
            session.connected(session.reader()) as reader,
            session.connected(session.reader(tolerant=True)) as lookup,
        ):
            marked = {record.key or b"" async for record in read_marks(session, reader, marks)}
            yield DeadLetterSource(self, reader, lookup, marked)

    async def _marks(self) -> Topic | None:
        """Return the topic of marks; None: it is missing. Raises ConfigError."""
        return await find_marks_topic(self.session, marks_topic(self.session.settings), create_missing=False)

    async def _sources(self) -> dict[str, Topic]:
        """Return the topics to which records return. Raises ConfigError.

        They are the source topic, which must exist, and the existing span topics, which only `assemble` needs.
        """
        settings = self.session.settings
        await self.session.existing(settings.dead_letter_topic, settings.source_topic)
        async with self.session.admin() as admin:
            sources = await self.session.topics(admin, *source_topics(settings))
        self.progress.counts.retention_ms = {name: topic.retention_ms for name, topic in sources.items()}
        return sources


@contextlib.contextmanager
def _whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that appears complete or not at all. Raises SessionError if it exists already."""
    if path.is_file():
        raise SessionError(f"{path} exists; remove it, or name another file")
    if path.exists():
        raise SessionError(f"{path} is not a file; name a new one, or - for standard output")
    part = path.with_name(f"{path.name}.part")
    try:
        with naming(part), part.open("wb") as output:
            yield output
            output.flush()
            os.fsync(output.fileno())
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)

"""The dead letters to re-drive: which ones the user selects, and reading them with the records they were made of."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.structs import ConsumerRecord

from worker.commands.redrive.counts import Progress, RefusedError
from worker.commands.shared.redrive_marks import mark_of, read_marks
from worker.commands.shared.session import Session, Topic, read_to
from worker.config import ConfigError, Settings
from worker.core.trace import Reason
from worker.kafka.reading.dead_letters import NO_VALUE, DeadLetter, originals, read_dead_letter

OF_CLOSED_RUNS: Final = frozenset({Reason.LATE_SPAN, Reason.ASSEMBLY_FAILED})
"""Reasons of `assemble` for spans whose run is closed. They would be late again, or become a second trace of it."""

SOURCE_SECONDS: Final = 10.0
"""How long one record that must be there may take to come from the source topic."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which dead letters: of these reasons (none: all), times in [since, until), one partition, offsets [first, end).

    Times are the source records' own, ms since 1970.
    """

    reasons: frozenset[str] = frozenset()
    since_ms: int | None = None
    until_ms: int | None = None
    partition: int | None = None
    first: int = 0
    end: int | None = None

    def takes(self, letter: DeadLetter) -> bool:
        """Whether the selection holds the dead letter, by reason and time."""
        moment = letter.record.timestamp if letter.timestamp_ms is None else letter.timestamp_ms
        return (
            (not self.reasons or letter.reason in self.reasons)
            and (self.since_ms is None or moment >= self.since_ms)
            and (self.until_ms is None or moment < self.until_ms)
        )


def source_topics(settings: Settings) -> list[str]:
    """Return the topics whose records the dead letters of this worker, and of its `assemble`, hold."""
    return [settings.source_topic, *settings.span_topics]


def parse_offsets(text: str) -> tuple[int, int | None]:
    """Return (first, end) of A:B (without B), A:, :B or a single offset. Raises ValueError."""
    found = re.fullmatch(r"([0-9]{0,18})(:?)([0-9]{0,18})", text)
    if found is None or not (found[1] or found[3]):
        raise ValueError(f"{text!r} is not an offset range; use A:B (B is exclusive), A:, :B or A")
    first = int(found[1] or 0)
    end = first + 1 if not found[2] else int(found[3]) if found[3] else None
    if end is not None and end <= first:
        raise ValueError(f"{text!r} is empty: the end must be greater than the start")
    return first, end


class WholeRecord(NamedTuple):
    """A dead letter with key, value and headers of its source record, complete."""

    letter: DeadLetter
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]


@asynccontextmanager
async def open_source(
    session: Session, selection: Selection, progress: Progress, marks: Topic | None
) -> AsyncIterator[DeadLetterSource]:
    """Connect to the dead letters, and read the marks of earlier runs. Raises ConfigError."""
    async with (
        session.connected(session.reader()) as reader,
        session.connected(session.reader(), tolerant=True) as lookup,
    ):
        yield DeadLetterSource(session, selection, progress, reader, lookup, await read_marks(reader, marks))


@dataclass(frozen=True, slots=True)
class DeadLetterSource:
    """The dead letters of a selection. `reader` reads them, `lookup` single records of the source topic.

    `marks` are those of earlier runs, `seen` those of the dead letters that this one has read.
    """

    session: Session
    selection: Selection
    progress: Progress
    reader: AIOKafkaConsumer
    lookup: AIOKafkaConsumer
    marks: set[bytes]
    seen: set[bytes] = field(default_factory=set)

    async def to_redrive(self, max_redrives: int) -> AsyncIterator[WholeRecord]:
        """Yield the records to redrive; those that were redriven `max_redrives` times are refused."""
        async for letter in self.unmarked():
            with self.progress.refusing(letter):
                if letter.redriven >= max_redrives:
                    raise RefusedError(
                        f"was redriven {letter.redriven} times and failed each time: correct it (--to-file), or raise "
                        "--max-redrives"
                    )
                yield await self.whole(letter)

    async def unmarked(self) -> AsyncIterator[DeadLetter]:
        """Yield the selected dead letters that were not redriven, one for each source record."""
        async for letter in self._selected():
            mark = mark_of(letter)
            if mark in self.marks:
                self.progress.counts.already[letter.reason] += 1
            elif mark in self.seen:
                self.progress.counts.repeated[letter.reason] += 1
            else:
                self.seen.add(mark)
                yield letter

    async def whole(self, letter: DeadLetter) -> WholeRecord:
        """Return the source record as it was: what the dead letter holds, unless it is a part. Raises RefusedError."""
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
        settings, selection, counts = self.session.settings, self.selection, self.progress.counts
        sources = source_topics(settings)
        (topic,) = await self.session.existing(settings.dead_letter_topic)
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
            self.progress.on_progress()

    async def _source_record(self, letter: DeadLetter) -> ConsumerRecord | None:
        tp = TopicPartition(letter.source_topic, letter.source_partition)
        (topic,) = await self.session.existing(tp.topic)
        if tp.partition >= topic.partitions:
            return None
        first, end = (await self.lookup.beginning_offsets([tp]))[tp], (await self.lookup.end_offsets([tp]))[tp]
        if not first <= letter.source_offset < end:
            return None
        ends = {tp: letter.source_offset + 1}
        async with asyncio.timeout(SOURCE_SECONDS):
            async for record in read_to(self.lookup, {tp: letter.source_offset}, ends):
                return record
        return None

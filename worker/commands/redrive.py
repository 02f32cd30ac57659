"""`kp-worker redrive`: dead letters back to the source topic, each exactly once, or into a file.

Lives here: which letters, the transaction, the marks. Must not live here: output for people (redrive_view.py).

A re-driven letter is marked by a record on the topic `<group>-redriven` (compacted, one partition), in the same
transaction as the record on the source topic. The mark's key is the position and timestamp of the letter's *source*
record: two letters for one record (after a crash at least once, or a replay) count as one, and a dead-letter topic that
was recreated does not inherit marks. Offsets of a consumer group could not tell which letters between two offsets a
filter left out, and Kafka forgets them after a week without a member.

The order of steps carries the guarantee:
 1. start the producer `<group>-redrive`: this aborts what a killed run left open, and fences one that still runs;
 2. read the marks, up to their end: all of what earlier runs committed, and nothing else;
 3. read the letters up to their end; for those that match, have no mark and are not refused, a transaction at a time:
    a. begin, b. send records and marks and await every acknowledgement, c. commit.
Killed anywhere before 3c is through, a transaction is invisible (the worker reads committed records) and its letters
are without marks; after it, record and mark are both there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import InvalidProducerEpoch, ProducerFenced
from aiokafka.structs import ConsumerRecord

from worker.commands.session import Session, SessionError, Topic, read_to
from worker.config import ConfigError
from worker.core.records import exact_size
from worker.core.trace import Reason
from worker.kafka.dead_letters import REDRIVE_COUNT, REDRIVEN_FROM, Letter, as_json, originals, read_letter
from worker.kafka.describe import current_limit
from worker.kafka.errors import chain
from worker.kafka.producer import PublishError, abort_soon, send_all, transactional_producer, while_sending
from worker.kafka.publication import OutputTopic, Row, Shipment
from worker.kafka.refusals import TopicRefusedError
from worker.kafka.refused_records import search
from worker.kafka.topic_plan import TopicPlan
from worker.kafka.topics import SETTLE_ATTEMPTS, create

MAX_RECORDS: Final = 500
MAX_BYTES: Final = 8 << 20
"""Most records and bytes of one transaction: a commit costs the same for 1 or 500, and more would only hold memory."""

EXAMPLES: Final = 2
"""Letters of each reason that the report keeps to show."""

MARKS_CONFIG: Final[Mapping[str, str]] = {"cleanup.policy": "compact", "retention.ms": "-1"}

NO_VALUE: Final[Mapping[str, str]] = {
    Reason.BATCH_TOO_LARGE: "publish those records again from where they came from, in smaller batches "
    "(docs/publishing.md), or raise the worker's KP_MAX_BATCH_BYTES and score them again (docs/operations.md)",
    Reason.UNREADABLE: "no client can read them there; publish them again from where they came from",
}
"""What to do with letters that have no value, by reason."""

SOURCE_SECONDS: Final = 10.0
"""How long one record that must be there may take to come from the source topic."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which letters: of these reasons (none: all), times in [since, until), one partition, offsets in [first, end).

    Times are the source records' own, ms since 1970.
    """

    reasons: frozenset[str] = frozenset()
    since_ms: int | None = None
    until_ms: int | None = None
    partition: int | None = None
    first: int = 0
    end: int | None = None

    def takes(self, letter: Letter) -> bool:
        """Whether the letter is meant, by reason and time."""
        moment = letter.record.timestamp if letter.timestamp_ms is None else letter.timestamp_ms
        return (
            (not self.reasons or letter.reason in self.reasons)
            and (self.since_ms is None or moment >= self.since_ms)
            and (self.until_ms is None or moment < self.until_ms)
        )


@dataclass(slots=True)
class Report:
    """Counts by reason; `done` were re-driven or written (dry run: would be). Kept up to date during the run.

    `old` of them have a timestamp that is older than the source topic's retention, `retention_ms`.
    """

    found: Counter[str] = field(default_factory=Counter)
    already: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    examples: list[Letter] = field(default_factory=list)
    foreign: int = 0
    old: int = 0
    retention_ms: int | None = None

    def count_done(self, letter: Letter) -> None:
        """Count a letter that was re-driven, written, or would be, and keep the first ones."""
        if self.retention_ms is not None and (letter.timestamp_ms or 0) < time.time() * 1000 - self.retention_ms:
            self.old += 1
        self.done[letter.reason] += 1
        if self.done[letter.reason] <= EXAMPLES:
            self.examples.append(letter)


class Whole(NamedTuple):
    """A letter with key, value and headers of its source record, complete."""

    letter: Letter
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]


class RefusedError(Exception):
    """A letter that cannot be re-driven; the message says why and what to do."""


def parse_time(text: str, now_ms: int) -> int:
    """Return ms since 1970 of an ISO 8601 time (UTC by default) or an age such as 90m. Raises ValueError."""
    if age := re.fullmatch(r"([0-9]{1,9})([smhd])", text):
        return now_ms - int(age[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[age[2]] * 1000
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is no time; give one such as 2026-04-14T08:00Z, or an age such as 90m, 2h, 3d"
        ) from None
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def parse_offsets(text: str) -> tuple[int, int | None]:
    """Return (first, end) of A:B (without B), A:, :B or a single offset. Raises ValueError."""
    found = re.fullmatch(r"([0-9]{0,18})(:?)([0-9]{0,18})", text)
    if found is None or not (found[1] or found[3]):
        raise ValueError(f"{text!r} is no range of offsets; give A:B (from A up to, not including, B), A:, :B or A")
    first = int(found[1] or 0)
    end = first + 1 if not found[2] else int(found[3]) if found[3] else None
    if end is not None and end <= first:
        raise ValueError(f"{text!r} holds no offset: the end must be greater than the start")
    return first, end


class Redrive:
    """One run over the dead-letter topic. `on_refused` gets each refused letter and why, `on_progress` ticks."""

    def __init__(
        self,
        session: Session,
        selection: Selection,
        max_redrives: int,
        report: Report,
        on_refused: Callable[[Letter, str], None],
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        settings = session.settings
        self._session = session
        self._selection = selection
        self._max_redrives = max_redrives
        self._report = report
        self._on_refused = on_refused
        self._on_progress = on_progress
        self._marks_topic = f"{settings.group_id}-redriven"
        self._marks: set[bytes] = set()

    async def preview(self, for_file: bool = False) -> None:
        """Fill the report as `to_source` (or `to_file`) would, and change nothing."""
        if for_file:
            await self._write(None)
            return
        source, marks = await self._look(create=False)
        self._report.retention_ms = source.retention_ms
        async with self._clients() as (reader, lookup):
            await self._read_marks(reader, marks)
            async for whole in self._todo(reader, lookup):
                with self._refusing(whole.letter):
                    _row(whole, source)
                    self._report.count_done(whole.letter)

    async def to_file(self, path: Path) -> None:
        """Write the letters that match and were not re-driven as JSON Lines, also those that failed too often."""
        with _appearing(path) as output:
            await self._write(output)

    async def _write(self, output: BinaryIO | None) -> None:
        _, marks = await self._look(create=False)
        async with self._clients() as (reader, lookup):
            await self._read_marks(reader, marks)
            async for letter in self._unmarked(reader):
                with self._refusing(letter):
                    whole = await self._whole(letter, lookup)
                    if output is not None:
                        output.write(as_json(letter, whole.key, whole.value, whole.headers) + b"\n")
                    self._report.count_done(letter)

    async def to_source(self) -> None:
        """Re-drive: the steps of the module's head."""
        source, marks = await self._look(create=self._session.settings.create_topics)
        if marks is None:
            raise ConfigError(
                f"topic {self._marks_topic} is missing: it remembers what was re-driven. Create it with one partition "
                "and cleanup.policy=compact, or set KP_CREATE_TOPICS=true"
            )
        self._report.retention_ms = source.retention_ms
        settings = self._session.settings
        producer = transactional_producer(
            self._session.client, f"{settings.group_id}-redrive", settings.transaction_timeout_seconds
        )
        to = _written(source), _written(marks)
        async with self._session.connected(producer), self._clients() as (reader, lookup):  # 1
            await self._read_marks(reader, marks)  # 2
            batch: list[tuple[Whole, int, Row]] = []
            size = 0
            async for whole in self._todo(reader, lookup):  # 3
                with self._refusing(whole.letter):
                    batch.append((whole, *_row(whole, source)))
                    size += len(whole.value or b"")
                if len(batch) >= MAX_RECORDS or size >= MAX_BYTES:
                    await self._commit(producer, batch, *to)
                    batch, size = [], 0
            if batch:
                await self._commit(producer, batch, *to)

    # -- reading

    @contextlib.asynccontextmanager
    async def _clients(self) -> AsyncIterator[tuple[AIOKafkaConsumer, AIOKafkaConsumer]]:
        """Connect a reader of marks and letters, and one that looks single source records up."""
        async with (
            self._session.connected(self._session.reader()) as reader,
            self._session.connected(self._session.reader(), tolerant=True) as lookup,
        ):
            yield reader, lookup

    async def _look(self, *, create: bool) -> tuple[Topic, Topic | None]:
        """Return the source topic and the topic of the marks (None: missing), after checking its settings."""
        settings = self._session.settings
        _, source = await self._session.existing(settings.dead_letter_topic, settings.source_topic)
        async with self._session.admin() as admin:
            marks = (await self._session.topics(admin, self._marks_topic)).get(self._marks_topic)
            if marks is None and create:
                marks = await self._create_marks(admin)
        if marks is not None:
            policy = marks.config.get("cleanup.policy", "compact")
            if "compact" not in policy or "delete" in policy:
                raise ConfigError(
                    f"topic {self._marks_topic} has cleanup.policy={policy}: marks would be deleted, and letters "
                    "re-driven again; set cleanup.policy=compact"
                )
        return source, marks

    async def _create_marks(self, admin: AIOKafkaAdminClient) -> Topic:
        await create(admin, self._session.settings, TopicPlan("", self._marks_topic, 1, MARKS_CONFIG))
        for _ in range(SETTLE_ATTEMPTS):
            if found := await self._session.topics(admin, self._marks_topic):
                return found[self._marks_topic]
            await asyncio.sleep(0.2)
        raise ConfigError(f"topic {self._marks_topic} was created, but the broker does not show it; try again")

    async def _read_marks(self, reader: AIOKafkaConsumer, marks: Topic | None) -> None:
        if marks is not None:
            tps = [TopicPartition(marks.name, partition) for partition in range(marks.partitions)]
            starts, ends = await reader.beginning_offsets(tps), await reader.end_offsets(tps)
            self._marks = {record.key async for record in read_to(reader, starts, ends)}

    async def _letters(self, reader: AIOKafkaConsumer) -> AsyncIterator[Letter]:
        """Yield the letters that are meant, up to the topic's end at the time of the call."""
        settings, selection = self._session.settings, self._selection
        (topic,) = await self._session.existing(settings.dead_letter_topic)
        wanted = range(topic.partitions) if selection.partition is None else [selection.partition]
        if wanted[-1] >= topic.partitions:
            raise ConfigError(
                f"topic {topic.name} has no partition {wanted[-1]}, only 0 to {topic.partitions - 1} (--partition)"
            )
        tps = [TopicPartition(topic.name, partition) for partition in wanted]
        starts = {tp: max(first, selection.first) for tp, first in (await reader.beginning_offsets(tps)).items()}
        ends = await reader.end_offsets(tps)
        if selection.end is not None:
            ends = {tp: min(end, selection.end) for tp, end in ends.items()}
        async for record in read_to(reader, starts, ends):
            letter = read_letter(record)
            if letter is None or letter.source_topic != settings.source_topic:
                self._report.foreign += 1
            elif selection.takes(letter):
                self._report.found[letter.reason] += 1
                yield letter
            self._on_progress()

    async def _unmarked(self, reader: AIOKafkaConsumer) -> AsyncIterator[Letter]:
        """Yield the letters that are meant and were not re-driven, one for each source record."""
        async for letter in self._letters(reader):
            if _mark(letter) in self._marks:
                self._report.already[letter.reason] += 1
            else:
                self._marks.add(_mark(letter))
                yield letter

    async def _todo(self, reader: AIOKafkaConsumer, lookup: AIOKafkaConsumer) -> AsyncIterator[Whole]:
        """Yield the letters to re-drive."""
        async for letter in self._unmarked(reader):
            with self._refusing(letter):
                if letter.redriven >= self._max_redrives:
                    raise RefusedError(
                        f"was re-driven {letter.redriven} times and failed each time: mend it (--to-file), or raise "
                        "--max-redrives"
                    )
                yield await self._whole(letter, lookup)

    async def _whole(self, letter: Letter, lookup: AIOKafkaConsumer) -> Whole:
        """Return the source record as it was: what the letter holds, unless that is not all. Raises RefusedError."""
        if letter.reason in NO_VALUE:
            raise RefusedError(f"holds nothing of {letter.source_range} on the source topic: {NO_VALUE[letter.reason]}")
        if not letter.incomplete:
            return Whole(letter, letter.key, letter.record.value, letter.original_headers())
        record = await self._source_record(letter, lookup)
        if record is None or not letter.is_of(record):
            raise RefusedError(
                f"holds only a part of its source record, and {letter.source} is not on the source topic any more: "
                "publish it again from where it came from"
            )
        return Whole(letter, record.key, record.value, originals(record.headers))

    async def _source_record(self, letter: Letter, lookup: AIOKafkaConsumer) -> ConsumerRecord | None:
        tp = TopicPartition(letter.source_topic, letter.source_partition)
        (topic,) = await self._session.existing(tp.topic)
        if tp.partition >= topic.partitions:
            return None
        first, end = (await lookup.beginning_offsets([tp]))[tp], (await lookup.end_offsets([tp]))[tp]
        if not first <= letter.source_offset < end:
            return None
        ends = {tp: letter.source_offset + 1}
        async with asyncio.timeout(SOURCE_SECONDS):
            async for record in read_to(lookup, {tp: letter.source_offset}, ends):
                return record
        return None

    @contextlib.contextmanager
    def _refusing(self, letter: Letter) -> Iterator[None]:
        try:
            yield
        except RefusedError as error:
            self._report.refused[letter.reason] += 1
            self._on_refused(letter, str(error))

    # -- writing

    async def _commit(
        self, producer: AIOKafkaProducer, batch: list[tuple[Whole, int, Row]], source: OutputTopic, marks: OutputTopic
    ) -> None:
        """Send letters and marks in one transaction; those that the source topic refuses are reported and left out."""
        left = batch
        while left:
            try:
                async with asyncio.timeout(self._session.settings.transaction_timeout_seconds):
                    refused = await while_sending(producer, self._transact(producer, left, source, marks))
            except Exception as error:
                with contextlib.suppress(Exception):  # the next run's start aborts too
                    await abort_soon(producer)
                if any(isinstance(cause, ProducerFenced | InvalidProducerEpoch) for cause in chain(error)):
                    raise SessionError(
                        f"another redrive of group {self._session.settings.group_id} has taken over; this one stops"
                    ) from error
                raise
            if refused is None:
                break
            for position, why in refused.items():
                with self._refusing(left[position][0].letter):
                    raise RefusedError(f"topic {source.name} refuses it: {why.name} ({why.words}); {why.advice}")
            left = [each for position, each in enumerate(left) if position not in refused]
        for whole, _, _ in left:
            self._report.count_done(whole.letter)
        self._on_progress()

    async def _transact(
        self, producer: AIOKafkaProducer, batch: list[tuple[Whole, int, Row]], source: OutputTopic, marks: OutputTopic
    ) -> dict[int, TopicRefusedError] | None:
        """Run one transaction; None: it was committed, otherwise the letters that are refused (none: a lower limit)."""
        mine: list[Row] = [(_mark(whole.letter), whole.letter.place.encode(), None, []) for whole, _, _ in batch]
        by_partition: dict[int, Shipment] = {}
        for position, (_, partition, row) in enumerate(batch):
            shipment = by_partition.setdefault(partition, Shipment(source, partition))
            shipment.rows.append(row)
            shipment.positions.append(position)
        await producer.begin_transaction()  # a
        refused = await send_all(producer, [Shipment(marks, 0, mine), *by_partition.values()])  # b
        if not refused:
            await producer.commit_transaction()  # c
            return None
        found: dict[int, TopicRefusedError] = {}
        limit_of = partial(current_limit, self._session.client)
        for shipment, culprits in await search(producer, refused, limit_of, aborting=True):
            for number, error in culprits.items():
                if not shipment.positions:
                    raise PublishError(f"topic {marks.name} refuses a mark: {error.name}; {error.advice}") from error
                found[shipment.positions[number]] = error
        await producer.abort_transaction()
        return found


@contextlib.contextmanager
def _appearing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that is there as a whole or not at all. Raises SessionError where there is one already."""
    if path.exists():
        raise SessionError(f"{path} exists; remove it, or name another file")
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as output:
            yield output
            output.flush()
            os.fsync(output.fileno())
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)


def _mark(letter: Letter) -> bytes:
    return f"{letter.source}@{letter.timestamp_ms}".encode()


def _written(topic: Topic) -> OutputTopic:
    return OutputTopic(topic.name, topic.partitions, topic.max_bytes)


def _row(whole: Whole, source: Topic) -> tuple[int, Row]:
    """Return partition and record for the source topic: as it was, plus two headers. Raises RefusedError."""
    letter = whole.letter
    headers = [
        *whole.headers,
        (REDRIVEN_FROM, letter.place.encode()),
        (REDRIVE_COUNT, b"%d" % (letter.redriven + 1)),
    ]
    size = exact_size(whole.key, whole.value, headers)
    if size > source.max_bytes:
        raise RefusedError(
            f"with its two new headers it is larger than topic {source.name} takes: raise its max.message.bytes to "
            f"{size}"
        )
    return letter.source_partition % source.partitions, (whole.key, whole.value, letter.timestamp_ms, headers)

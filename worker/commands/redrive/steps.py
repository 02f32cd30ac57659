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
import os
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence, Set
from contextlib import AsyncExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import InvalidProducerEpoch, ProducerFenced
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.text import Text

from worker.commands.shared.console import BadLines, JsonOutput, naming, say, text_console
from worker.commands.shared.marks import (
    MAX_BYTES,
    MAX_RECORDS,
    MarkedRecord,
    find_marks_topic,
    marks_topic,
    needed_marks_topic,
    read_marks,
    send_marked,
    written,
)
from worker.commands.shared.session import Session, SessionError, Topic, read_to, run_session
from worker.commands.shared.shown import PlainTable
from worker.config import ConfigError
from worker.core.dead_letters import NO_VALUE, REDRIVEN_FROM, DeadLetter, as_json, originals, read_dead_letter
from worker.core.records import REDRIVE_COUNT, exact_size
from worker.core.terminal import clean, number_of
from worker.core.trace import Reason
from worker.kafka.producer import Producer

OF_CLOSED_RUNS: Final = frozenset({Reason.LATE_SPAN, Reason.ASSEMBLY_FAILED})
"""Reasons of `assemble` for spans of a closed run: they would be late again, or become a second trace of it."""


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


WholeRecord = tuple[bytes | None, bytes | None, list[tuple[str, bytes]]]  # a record's key, value and headers


class RefusedError(Exception):
    """A dead letter cannot be redriven; the message says why and what to do."""


@dataclass(slots=True)
class Redrive:
    """One run over the dead-letter topic: what it takes, where to, and what became of the dead letters, by reason."""

    session: Session
    reasons: frozenset[str]  # those to redrive; empty: all
    since_ms: int | None  # time of the source record, ms since 1970
    until_ms: int | None  # exclusive
    partition: int | None  # None: all
    offsets: tuple[int, int | None]  # the first one, and the end (exclusive)
    max_redrives: int
    to_file: str | None  # - is standard output; None: to the topics of the source records
    execute: bool  # otherwise only count
    status: Status | None = None  # shows the progress; None: there is no terminal
    bad: BadLines = field(init=False)  # names the refused ones
    matching: Counter[str] = field(default_factory=Counter)  # the selection
    already: Counter[str] = field(default_factory=Counter)  # redriven by an earlier run
    repeated: Counter[str] = field(default_factory=Counter)  # with the source record of an earlier letter of this run
    refused: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)  # redriven (dry run: would be)
    examples: list[DeadLetter] = field(default_factory=list)  # the first two of each reason
    foreign: int = 0  # of a topic that these settings do not name, or not of the worker
    late: int = 0  # spans of runs that had closed before
    sent: Counter[str] = field(default_factory=Counter)  # those done, by the topic they go back to
    old: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Those done whose timestamp is older than their topic's retention: by topic and retention, ms."""

    async def run(self) -> None:
        """Redrive with the steps of the module docstring; or write to a file, or only count.

        A file also gets the dead letters that failed too often. Raises ConfigError, SessionError, PublishError.
        """
        session, settings, to_file = self.session, self.session.settings, self.to_file
        # Records return to the source topic, which must exist, and to span topics, which only `assemble` needs.
        topic, _ = await session.existing(settings.dead_letter_topic, settings.source_topic)
        async with session.admin() as admin:
            sources = await session.topics(admin, settings.source_topic, *settings.span_topics)
        sends = self.execute and to_file is None
        marks = await (needed_marks_topic if sends else find_marks_topic)(session, marks_topic(settings))
        transactional_id, timeout_seconds = f"{settings.group_id}-redrive", settings.transaction_timeout_seconds
        producer = Producer(session.client, transactional_id, timeout_seconds) if sends else None
        async with AsyncExitStack() as stack:
            if producer is not None:
                await stack.enter_async_context(session.connected(producer))  # 1
            output = stack.enter_context(_output(to_file)) if self.execute and to_file is not None else None
            reader = await stack.enter_async_context(session.connected(session.reader()))
            lookup = await stack.enter_async_context(session.connected(session.reader(tolerant=True)))
            marked = {record.key or b"" async for record in read_marks(session, reader, marks)}  # 2
            batch, size = list[tuple[DeadLetter, MarkedRecord]](), 0
            async for letter in self._unmarked(reader, topic, marked):  # 3
                with self._refusing(letter):
                    if to_file is None and letter.redriven >= self.max_redrives:
                        raise RefusedError(
                            f"was redriven {letter.redriven} times and failed each time: correct it (--to-file), or "
                            "raise --max-redrives"
                        )
                    key, value, headers = await self._whole(letter, lookup)
                    if output is not None:
                        output.write(as_json(letter, key, value, headers) + b"\n")
                    if to_file is None:
                        batch.append((letter, redriven_record(letter, key, value, headers, sources)))
                        size += len(value or b"")
                    if producer is None:
                        self._count_done(letter, sources.get(letter.source_topic))
                if len(batch) >= MAX_RECORDS or size >= MAX_BYTES:
                    await self._commit(producer, marks, batch, sources)
                    batch, size = [], 0
            await self._commit(producer, marks, batch, sources)

    async def _commit(
        self, producer: Producer | None, marks: Topic | None, batch: Sequence[tuple[DeadLetter, MarkedRecord]],
        sources: Mapping[str, Topic],
    ) -> None:  # fmt: skip
        """Send records and marks in one transaction; records that their topic rejects are reported and skipped.

        Nothing to do in a dry run, without a producer. Raises SessionError if a newer run has taken over, PublishError.
        """
        if not batch or producer is None or marks is None:
            return
        try:
            refused = await send_marked(self.session, producer, marks, [record for _, record in batch])  # 3a to 3c
        except (ProducerFenced, InvalidProducerEpoch) as error:
            group = self.session.settings.group_id
            raise SessionError(f"another redrive of group {group} has taken over; this one stops") from error
        for position, (letter, record) in enumerate(batch):
            with self._refusing(letter):
                if (why := refused.get(position)) is not None:
                    raise RefusedError(f"topic {record.topic.name} refuses it: {why.name} ({why.words}); {why.advice}")
                self._count_done(letter, sources[letter.source_topic])

    def _count_done(self, letter: DeadLetter, source: Topic | None) -> None:
        """Count a dead letter that was redriven, written, or would be, and keep the first ones."""
        self.sent[letter.source_topic] += 1
        retention_ms = None if source is None else source.retention_ms
        if retention_ms is not None and (letter.timestamp_ms or 0) < time.time() * 1000 - retention_ms:
            self.old[letter.source_topic, retention_ms] += 1
        self.done[letter.reason] += 1
        if self.done[letter.reason] <= 2:
            self.examples.append(letter)

    @contextmanager
    def _refusing(self, letter: DeadLetter) -> Iterator[None]:
        """Count and name a dead letter whose RefusedError is raised inside, and continue."""
        try:
            yield
        except RefusedError as error:
            self.refused[letter.reason] += 1
            self.bad.name(f"{letter.record.partition}:{letter.record.offset} {error}")

    async def _unmarked(self, reader: AIOKafkaConsumer, topic: Topic, marked: Set[bytes]) -> AsyncIterator[DeadLetter]:
        """Yield the selected dead letters up to the topic's end that were not redriven, one for each source record."""
        settings, (first, end) = self.session.settings, self.offsets
        wanted = range(topic.partitions) if self.partition is None else [self.partition]
        if wanted[-1] >= topic.partitions:
            raise ConfigError(
                f"topic {topic.name} has no partition {wanted[-1]}, only 0 to {topic.partitions - 1} (--partition)"
            )
        tps = [TopicPartition(topic.name, partition) for partition in wanted]
        starts = {tp: max(oldest, first) for tp, oldest in (await reader.beginning_offsets(tps)).items()}
        ends = await reader.end_offsets(tps)
        if end is not None:
            ends = {tp: min(last, end) for tp, last in ends.items()}
        seen: set[bytes] = set()
        async for record in read_to(reader, starts, ends):
            letter = read_dead_letter(record)
            if letter is None or letter.source_topic not in (settings.source_topic, *settings.span_topics):
                self.foreign += 1
            elif letter.reason in OF_CLOSED_RUNS:
                self.late += 1
            elif self._matches(letter):
                self.matching[letter.reason] += 1
                mark = _mark_of(letter)
                if mark in marked:
                    self.already[letter.reason] += 1
                elif mark in seen:
                    self.repeated[letter.reason] += 1
                else:
                    seen.add(mark)
                    yield letter
            if self.status is not None:
                self.status.update(number_of(self.matching.total(), "dead letter matches", "dead letters match"))

    def _matches(self, letter: DeadLetter) -> bool:
        """Return whether the dead letter is selected by its reason and time."""
        moment = letter.record.time_ms if letter.timestamp_ms is None else letter.timestamp_ms
        return (
            (not self.reasons or letter.reason in self.reasons)
            and (self.since_ms is None or moment >= self.since_ms)
            and (self.until_ms is None or moment < self.until_ms)
        )

    async def _whole(self, letter: DeadLetter, lookup: AIOKafkaConsumer) -> WholeRecord:
        """Return the source record from the dead letter or, if that is truncated, its topic. Raises RefusedError."""
        if letter.reason in NO_VALUE:
            raise RefusedError(
                f"has no content of {letter.source_range} of topic {letter.source_topic}: {NO_VALUE[letter.reason]}"
            )
        if not letter.incomplete:
            return letter.key, letter.record.value, letter.original_headers()
        tp, offset = TopicPartition(letter.source_topic, letter.source_partition), letter.source_offset
        (topic,) = await self.session.existing(tp.topic)
        if (
            tp.partition < topic.partitions
            and (await lookup.beginning_offsets([tp]))[tp] <= offset < (await lookup.end_offsets([tp]))[tp]
        ):
            async with asyncio.timeout(10.0):  # time limit for reading one existing record from the source topic
                async for record in read_to(lookup, {tp: offset}, {tp: offset + 1}):
                    if letter.is_of(record):
                        return record.key, record.value, originals(record.headers)
        raise RefusedError(f"is truncated, and {letter.source} is no longer there: publish it again from its origin")


def _mark_of(letter: DeadLetter) -> bytes:
    """Return the key of a dead letter's mark."""
    return f"{letter.source}@{letter.timestamp_ms}".encode()


def redriven_record(
    letter: DeadLetter, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes]],
    sources: Mapping[str, Topic],
) -> MarkedRecord:  # fmt: skip
    """Return the record for its original topic: unchanged, plus two headers. Raises RefusedError."""
    source = sources.get(letter.source_topic)
    if source is None:
        raise RefusedError(f"belongs on topic {letter.source_topic}, which does not exist: create it")
    added = [(REDRIVEN_FROM, letter.place.encode()), (REDRIVE_COUNT, b"%d" % (letter.redriven + 1))]
    size = exact_size(key, value, [*headers, *added])
    if size > source.max_bytes:
        raise RefusedError(
            f"with its two new headers exceeds the limit of topic {source.name}: raise its max.message.bytes to {size}"
        )
    row = (key, value, letter.timestamp_ms, [*headers, *added])
    mark = _mark_of(letter), letter.place.encode()
    return MarkedRecord(row, written(source), letter.source_partition % source.partitions, mark)


@contextmanager
def _output(file: str) -> Iterator[JsonOutput]:
    """Open standard output, or a new file that appears complete or not at all. Raises SessionError if it exists."""
    if file == "-":
        yield JsonOutput(sys.stdout.buffer)
        return
    path = Path(file)
    if path.is_file():
        raise SessionError(f"{path} exists; remove it, or name another file")
    if path.exists():
        raise SessionError(f"{path} is not a file; name a new one, or - for standard output")
    part = path.with_name(f"{path.name}.part")
    try:
        with naming(part), part.open("wb") as output:
            yield JsonOutput(output)
            output.flush()
            os.fsync(output.fileno())
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)


# -- what is shown


def run_redrive(run: Redrive) -> None:
    """Redrive, show progress on a terminal and the first refused dead letters, and print the counts.

    Exits with 130 if interrupted. Raises CommandError.
    """
    topic, console = run.session.settings.dead_letter_topic, Console(stderr=True, highlight=False)
    run.bad = BadLines(topic, lambda text: console.print(Text(clean(text)), soft_wrap=True))
    with console.status("reading dead letters") if console.is_terminal else nullcontext() as run.status:
        try:
            run_session(run.run())
        except KeyboardInterrupt:
            say(f"interrupted after {number_of(run.done.total(), 'dead letter')}; run it again to continue")
            sys.exit(130)
        run.bad.say_rest("--partition and --offset select them")
    print_counts(run)


def print_counts(run: Redrive) -> None:
    """Print the counts, and after a dry run some examples and what to do next.

    The output goes to standard error if standard output is the file.
    """
    to_file = run.to_file
    console = text_console(stderr=to_file == "-")
    tell = partial(console.print, soft_wrap=True)
    names = sorted(run.sent)
    topics = f"topic{'s' * (len(names) > 1)} {', '.join(names)}" if names else "their topic"
    target = escape(clean(topics if to_file is None else "standard output" if to_file == "-" else to_file))
    if run.foreign:
        tell(
            f"skipped {number_of(run.foreign, 'record')}: not a dead letter, or of a topic that these settings do "
            "not name (KP_SOURCE_TOPIC, KP_SPANS_TOPIC)"
        )
    if run.late:
        tell(f"skipped {number_of(run.late, 'dead letter')} with spans of closed runs: they would be late again")
    if not run.matching:
        tell("no dead letter matches")
        return
    verb, does = ("redriven", "sends") if to_file is None else ("written", "writes")
    console.print(_counts_table(run, verb if run.execute else "to do"))
    if repeated := run.repeated.total():
        tell(
            f"\n{repeated} repeated: another dead letter is of the same source record, as after a replay, or if two "
            "groups share the dead-letter topic. The record is sent once; every group reads it"
        )
    if run.done["conflict"] and to_file is None:
        tell(
            "\nconflict: the registry has other units with the ids of these traces, and refuses them again until those "
            "units are deleted there (docs/contribute.md)"
        )
    done = run.done.total()
    if run.execute:
        tell(f"\n{number_of(done, 'dead letter')} {verb} to {target}")
    elif done:
        console.print(Text("\nExamples", "bold"), examples_table(run.examples), sep="\n")
        tell(f"\nDry run: nothing was {verb}. --execute {does} {done} to {target}")
    else:
        tell("\nNothing to do")
    for (topic, retention_ms), old in sorted(run.old.items()):
        tell(
            f"{number_of(old, 'of them is', 'of them are')} older than topic {escape(clean(topic))} keeps records "
            f"({retention_ms / 86_400_000:.1f} days). Redriven records keep their timestamps, so Kafka may delete them "
            "before they are read: keep their reader running, or raise retention.ms",
            style="yellow",
        )


def _counts_table(run: Redrive, done: str) -> PlainTable:
    """Tabulate the counts by reason; `done` names the last column."""
    columns = {
        "dead letters": run.matching, "repeated": run.repeated, "already done": run.already,
        "refused": run.refused, done: run.done,
    }  # fmt: skip
    if not run.repeated:  # it is rare
        del columns["repeated"]
    table = _table()
    table.add_column("reason")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for reason in sorted(run.matching):
        table.add_row(Text(clean(reason), "yellow"), *(str(column[reason] or "-") for column in columns.values()))
    if len(run.matching) != 1:
        table.add_section()
        table.add_row("all", *(str(column.total() or "-") for column in columns.values()), style="bold")
    return table


def examples_table(examples: list[DeadLetter]) -> PlainTable:
    """Tabulate some dead letters: partition and offset, the source record's time, and the problem."""
    table = _table()
    for name in ("letter", "time (UTC)", "reason"):
        table.add_column(name, no_wrap=True)
    table.add_column("message", overflow="fold")
    for letter in sorted(examples, key=lambda letter: letter.reason):
        ms = letter.timestamp_ms
        table.add_row(
            f"{letter.record.partition}:{letter.record.offset}",
            "-" if ms is None else f"{datetime.fromtimestamp(ms / 1000, UTC):%m-%d %H:%M:%S}",
            Text(clean(letter.reason), "yellow"),
            Text(clean(letter.message)),
        )
    return table


def _table() -> PlainTable:
    return PlainTable(box=box.SIMPLE_HEAD, padding=0, show_edge=False)

"""`kp-worker publish --follow DIR`: the requests in session files become traces, each exactly once.

A published request has a mark on the topic `<group>-followed`, written in the same transaction as its trace: a digest
of its key, and up to where the requests of its file are published, so that a restart leaves out files without news. A
mark has nothing of the session's text. A request that is read twice is not published twice, because it has a mark.

The order of steps carries the guarantee:
 1. start the producer `<group>-follow-<hash of the name>`: this aborts an open transaction of a killed run, and fences
    a running one with the same name;
 2. read the marks, up to their end; replace the values of those that hold text (builds before 0.3.0);
 3. read the files; publish the closed requests that have no mark, one transaction at a time:
    a. begin, b. send traces and marks and await every acknowledgement, c. commit.
If the process is killed before 3c has taken effect, the transaction is invisible and its requests have no mark;
afterwards, traces and marks both exist. Any failure of Kafka (a broker is away, a transaction cannot be committed)
leads back to step 1, and nothing is kept except the marks.
"""

import asyncio
import logging
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from aiokafka.errors import InvalidProducerEpoch, KafkaError, ProducerFenced

from worker.commands.publish.send import KeyField, check_trace, key_of
from worker.commands.shared.marks import (
    MAX_BYTES,
    MAX_RECORDS,
    MarkedRecord,
    followed_topic,
    needed_marks_topic,
    read_marks,
    send_marked,
    written,
)
from worker.commands.shared.run_traces import KEY_ROOM, Options, fitted, trace_of_request
from worker.commands.shared.session import Session, SessionError, Topic, run_session
from worker.commands.shared.session_files import NO_POSITION, Closed, Position, SessionFiles, read_position
from worker.core.records import Clean
from worker.core.terminal import number_of
from worker.core.trace import InvalidTrace, Reason
from worker.kafka.connections import UnreachableError
from worker.kafka.errors import error_text
from worker.kafka.producer import Producer, PublishError
from worker.kafka.rows import OutputTopic, Row, TopicRefusedError, key_partition
from worker.kafka.topic_watch import watched
from worker.observe import logs
from worker.runs.fields import RunRefused, fault
from worker.runs.sessions.formats import Format

log = logging.getLogger(__name__)


def default_name(folder: Path) -> str:
    """Return the default name of a process that follows a folder: machine and folder."""
    return f"{socket.gethostname()}:{folder.resolve()}"


def mark_key(key: bytes) -> bytes:
    """Return the key of a request's mark: a digest, because the ids in a session may have any length and content."""
    return sha256(key).hexdigest()[:32].encode()


@dataclass(slots=True)
class Follower:
    """Collects the closed requests of a folder, and commits them as traces with their marks."""

    session: Session
    folder: Path
    form: Format
    options: Options
    topic: str
    key: KeyField
    clean: Clean | None  # redacts a trace; None: no redaction
    idle_seconds: float
    name: str  # of two processes with the same name, only the later one continues
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    requests: Counter[str] = field(default_factory=Counter)  # of this process: published, refused, repeated
    redactions: Counter[str] = field(default_factory=Counter)
    # Since the last start of the producer:
    producer: Producer = field(init=False)
    target: OutputTopic = field(init=False)
    marks: Topic = field(init=False)
    published: set[bytes] = field(init=False)  # keys of marks
    batch: list[tuple[Closed, MarkedRecord, Mapping[str, int]]] = field(init=False)
    size: int = 0  # of the batch, bytes

    async def run(self) -> None:
        """Follow until asked to stop, and finish what is in flight. Raises ConfigError, SessionError."""
        settings, loop = self.session.settings, asyncio.get_running_loop()
        files = SessionFiles(self.folder, self.form, self.idle_seconds, settings.max_message_bytes)
        try:
            async with asyncio.timeout(None) as limit:

                def end() -> None:
                    if not self.stop.is_set():
                        self.stop.set()
                        limit.reschedule(loop.time() + settings.shutdown_timeout_seconds)

                for number in (signal.SIGTERM, signal.SIGINT):
                    loop.add_signal_handler(number, end)
                while not self.stop.is_set():
                    await self._follow_or_pause(files)
        except TimeoutError:
            raise SessionError(
                "stopping took longer than KP_SHUTDOWN_TIMEOUT_SECONDS; a restart publishes the uncommitted requests"
            ) from None
        log.info("stopped: %s", self._words())

    async def _follow_or_pause(self, files: SessionFiles) -> None:
        try:
            await self._follow(files)
        except (ProducerFenced, InvalidProducerEpoch) as error:
            raise SessionError(
                f"another process follows under the name {self.name!r} and has taken over; this one stops (--name)"
            ) from error
        except (UnreachableError, KafkaError, PublishError, SessionError, TimeoutError) as error:
            if isinstance(error, UnreachableError) and error.final:
                raise
            why = str(error) if isinstance(error, UnreachableError) else error_text(error)
            log.warning("%s; starting again from the last commit", why)
            await self._wait(5.0)

    async def _wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self.stop.wait(), seconds)

    async def _follow(self, files: SessionFiles) -> None:
        """Run the steps of the module docstring, until asked to stop. Raises KafkaError, PublishError, SessionError."""
        session, settings = self.session, self.session.settings
        (target,) = await session.existing(self.topic)
        marks = await needed_marks_topic(session, followed_topic(settings))
        self.target, self.marks, self.batch, self.size = written(target), marks, [], 0
        name = sha256(self.name.encode("utf-8", "replace")).hexdigest()[:16]
        transactional_id, timeout_seconds = f"{settings.group_id}-follow-{name}", settings.transaction_timeout_seconds
        self.producer = Producer(session.client, transactional_id, timeout_seconds)
        topics = {"--topic": target.name, "the marks": marks.name}
        async with (
            session.connected(self.producer),  # 1
            watched(settings, session.client, topics, {marks.name}) as failure,
        ):
            self.published, positions, with_text = await _read_marks(session, marks)  # 2
            for keys in (with_text[at : at + MAX_RECORDS] for at in range(0, len(with_text), MAX_RECORDS)):
                await self._send([MarkedRecord(None, self.target, 0, (key, NO_POSITION)) for key in keys])
            files.start(positions)
            log.info(
                "following %s as %s; requests that group %s has published: %d",
                self.folder, self.name, settings.group_id, len(self.published),
            )  # fmt: skip
            while not self.stop.is_set():  # 3
                if failure.error is not None:
                    raise SessionError(str(failure.error))
                began = time.monotonic()
                for closed in files.poll(time.time(), began):
                    for request in closed:
                        await self._add(request)
                    await asyncio.sleep(0)
                    if self.stop.is_set():
                        break
                await self._commit()
                # A scan of many files takes long; the pause after it is 20 times as long, from 1 to 10 s.
                await self._wait(min(max(1.0, 20 * (time.monotonic() - began)), 10.0))

    async def _send(self, records: Sequence[MarkedRecord]) -> Mapping[int, TopicRefusedError]:
        return await send_marked(self.session, self.producer, self.marks, records, keep_marks=True)  # 3a to 3c

    async def _add(self, closed: Closed) -> None:
        """Add a request unless it has a mark, and commit when the batch is full."""
        mark = mark_key(closed.request.key.encode("utf-8", "replace"))
        if mark in self.published:
            self.requests["repeated"] += 1
            return
        self.published.add(mark)
        row: Row | None = None
        redactions: Mapping[str, int] = {}
        try:
            row, redactions = self._row(closed)
        except (RunRefused, InvalidTrace) as error:
            self._refuse(closed, error)
        except Exception as error:  # one request must not stop the others
            log.debug("%s: no trace could be made of a request", closed.path, exc_info=True)
            self._refuse(closed, fault(error))
        key = mark if row is None or row[0] is None else row[0]
        record = MarkedRecord(row, self.target, key_partition(key, self.target.partitions), (mark, closed.position))
        self.batch.append((closed, record, redactions))
        self.size += len(closed.position) + (0 if row is None else len(row[1] or b""))
        if len(self.batch) >= MAX_RECORDS or self.size >= MAX_BYTES:
            await self._commit()

    async def _commit(self) -> None:
        """Commit the collected requests, in one transaction."""
        if not self.batch:
            return
        batch, self.batch, self.size = self.batch, [], 0
        refused = await self._send([record for _, record, _ in batch])
        for position, (closed, record, redactions) in enumerate(batch):
            if (why := refused.get(position)) is not None:
                words = f"topic {self.target.name} refuses it: {why.name}; {why.advice}"
                self._refuse(closed, RunRefused("refused_by_topic", words))
            elif record.row is not None:
                self.requests["published"] += 1
                self.redactions.update(redactions)
        log.info("%s", self._words())

    def _row(self, closed: Closed) -> tuple[Row, Mapping[str, int]]:
        """Return the record of a request's trace, and its redactions. Raises RunRefused, InvalidTrace."""
        limits = self.session.settings.limits
        most = min(limits.max_bytes, self.target.max_bytes) - KEY_ROOM
        trace, _ = trace_of_request(closed.request, self.options, most)
        redactions: Mapping[str, int] = {}
        if self.clean is not None:
            trace, redactions = self.clean(trace)
            trace, _ = fitted(trace, most)  # a marker may be longer than the text that it replaces
        key = key_of(trace, self.key)
        check_trace(trace, key, limits, self.target.max_bytes)
        return (key, trace, None, []), redactions

    def _refuse(self, closed: Closed, why: RunRefused | InvalidTrace) -> None:
        self.requests["refused"] += 1
        words = str(why)
        if isinstance(why, InvalidTrace):  # whose message may quote the trace
            too_large = why.reason == Reason.TOO_LARGE
            words = f"{why}; --max-content cuts long steps" if too_large else f"{why.reason} {why.path}"
        log.warning("%s: the request at byte %d is not published: %s", closed.path, closed.request.first, words)

    def _words(self) -> str:
        """Return the counts in words."""
        counts = self.requests
        words = f"{number_of(counts['published'], 'request')} published"
        words += f", {counts['refused']} refused" if counts["refused"] else ""
        words += f", {counts['repeated']} found again and left out" if counts["repeated"] else ""
        redacted = ", ".join(f"{count} {kind}" for kind, count in self.redactions.items())
        return words + (f"; redacted: {redacted}" if redacted else "")


def run_follow(follower: Follower) -> None:
    """Follow a folder until SIGTERM or SIGINT. Raises ConfigError, CommandError."""
    settings = follower.session.settings
    logs.configure(settings.log_level, settings.log_format)
    run_session(follower.run())


async def _read_marks(session: Session, marks: Topic) -> tuple[set[bytes], list[Position], list[bytes]]:
    """Return the keys of the marks, their positions, and the keys of marks that hold text of a session."""
    published: set[bytes] = set()
    positions: list[Position] = []
    with_text: dict[bytes, None] = {}
    async with session.connected(session.reader()) as reader:
        async for mark in read_marks(session, reader, marks):
            key, value = mark.key or b"", mark.value or b""
            published.add(key if re.fullmatch(rb"[0-9a-f]{32}", key) else mark_key(key))
            if (position := read_position(value)) is not None:
                positions.append(position)
            if b'"context"' in value:
                with_text[key] = None
            else:
                with_text.pop(key, None)
    return published, positions, list(with_text)

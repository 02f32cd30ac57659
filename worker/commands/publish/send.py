"""Publishing the traces of a JSON Lines file to a topic, each checked before it is sent."""

from __future__ import annotations

import asyncio
import os
import shlex
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import BinaryIO, Final, Literal

import msgspec
from aiokafka import AIOKafkaProducer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from worker.commands.shared.console import (
    ArgumentError,
    BadLines,
    CommandError,
    errors_for_the_user,
    naming,
    open_file,
    say,
    size_of,
)
from worker.commands.shared.json_lines import CHUNK_BYTES, Line, LineSplitter, is_pretty_printed, pretty_printed_hint
from worker.commands.shared.samples import SAMPLES
from worker.commands.shared.session import Session, SessionError, run_session
from worker.config import Settings
from worker.config.redaction_rules import redaction_rules
from worker.core.findings import Clean
from worker.core.terminal import clean
from worker.core.trace import InvalidTrace, Limits, Reason, parse_trace
from worker.kafka.cluster.connections import idempotent_producer, while_sending

IN_FLIGHT: Final = 1000
"""Traces that may be on their way to the broker at once: bounds memory, and still fills batches."""

LINGER_MS: Final = 5
"""How long a batch waits for more records. Without it the first of many traces would each be sent alone."""

MAX_BATCH_BYTES: Final = 262_144
"""Bytes of one batch; aiokafka's 16 KiB would be one large trace."""

MAX_REQUEST_BYTES: Final = 64 << 20
"""Limit of the client alone; the broker enforces that of the topic (max.message.bytes)."""

KeyField = Literal["agent", "id", "domain", "none"]


@dataclass(slots=True)
class PublishCounts:
    """Counts of one run, kept up to date while it lasts."""

    sent: int = 0
    refused: int = 0
    seconds: float = 0.0
    pretty_printed: bytes = b""
    redactions: Counter[str] = field(default_factory=Counter)

    def count_answer(self, future: asyncio.Future[object]) -> None:
        """Count a trace whose sending has ended: as sent, if it was acknowledged."""
        self.sent += not future.cancelled() and future.exception() is None

    def count_refused(self) -> None:
        """Count a line that was not sent."""
        self.refused += 1

    def note_pretty_printed(self, line: bytes) -> None:
        """Note the first line of a file that is no JSON Lines: nothing of it is sent."""
        self.pretty_printed = line

    def count_redactions(self, found: Mapping[str, int]) -> None:
        """Count the markers of one line, by type."""
        self.redactions.update(found)

    def set_seconds(self, seconds: float) -> None:
        """Set how long the run has lasted."""
        self.seconds = seconds


class _KeyMetadata(msgspec.Struct):
    agent_id: str = ""
    task_domain: str = ""


class _KeyFields(msgspec.Struct):
    id: str = ""
    metadata: _KeyMetadata = msgspec.field(default_factory=_KeyMetadata)


_key_decoder = msgspec.json.Decoder(_KeyFields)


def key_of(line: bytes, choice: KeyField) -> bytes | None:
    """Return the record key of a trace; None where the trace does not have that field.

    An agent's traces have one key, so they stay in order and share one novelty cache.
    """
    if choice == "none":
        return None
    try:
        fields = _key_decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # unvalidated lines may be anything
        return None
    text = {"agent": fields.metadata.agent_id, "id": fields.id, "domain": fields.metadata.task_domain}[choice]
    return text.encode() or None


async def publish_lines(
    source: BinaryIO,
    session: Session,
    *,
    topic: str,
    key: KeyField,
    rate: float | None,
    validate: bool,
    redact: bool,
    counts: PublishCounts,
    on_line: Callable[[int], None],
    on_refused: Callable[[int, InvalidTrace], None],
) -> None:
    """Send every line of `source` that is a valid trace (or every line), at most `rate` a second.

    `redact`: each line without secrets and personal data; its key is read, and its size checked, after that.
    `counts` are kept up to date; `on_line` gets each line's size (bytes), `on_refused` its number (from 1) and
    what is wrong. Every trace counted as sent is acknowledged. Raises ConfigError, SessionError.
    """
    (target,) = await session.existing(topic)
    unconnected = idempotent_producer(
        session.client,
        session.settings.transaction_timeout_seconds,
        linger_ms=LINGER_MS,
        max_batch_size=MAX_BATCH_BYTES,
        max_request_size=MAX_REQUEST_BYTES,
    )
    async with session.connected(unconnected) as producer:
        check = _LineCheck(producer, session.settings.limits if validate else None, target.max_bytes)
        sender = _Sender(producer, topic, rate, counts)
        lines = _lines(source, session.settings.max_message_bytes)
        clean = _cleaning(session.settings) if redact else None
        await while_sending(producer, _send_lines(lines, key, clean, check, sender, counts, on_line, on_refused))


def _cleaning(settings: Settings) -> Clean:
    from worker.redact.documents import redact_json

    return partial(redact_json, rules=redaction_rules(settings))


async def _send_lines(
    lines: AsyncIterator[Line],
    key: KeyField,
    clean: Clean | None,
    check: _LineCheck,
    sender: _Sender,
    counts: PublishCounts,
    on_line: Callable[[int], None],
    on_refused: Callable[[int, InvalidTrace], None],
) -> None:
    async for number, line, size, problem in lines:
        on_line(size)
        if number == 1 and check.limits is not None and is_pretty_printed(line):
            counts.note_pretty_printed(line)
            break
        if problem is None and not line.strip():
            continue
        found: dict[str, int] = {}
        try:
            if problem is not None:
                raise InvalidTrace(Reason.TOO_LARGE, "", problem)
            if clean is not None:
                line, found = clean(line)  # noqa: PLW2901 the original must not be sent
            record_key = key_of(line, key)
            check.check(record_key, line)
        except InvalidTrace as error:
            counts.count_refused()
            on_refused(number, error)
        else:
            counts.count_redactions(found)
            await sender.send(number, record_key, line)
    await sender.finish()


@dataclass(frozen=True, slots=True)
class _LineCheck:
    """What a line must be to be sent: a valid trace (`limits` None: anything), and small enough for its topic."""

    producer: AIOKafkaProducer
    limits: Limits | None
    max_batch_bytes: int

    def check(self, key: bytes | None, line: bytes) -> None:
        """Raise InvalidTrace for a line that the worker or the topic would refuse.

        The topic's limit must be checked before sending: a refused batch breaks the sequence of an idempotent
        producer.
        """
        key_size = len(key or b"")
        if self.limits is not None:  # the key counts against the worker's limit, too
            parse_trace(line, replace(self.limits, max_bytes=self.limits.max_bytes - key_size))
        if len(line) + key_size < self.max_batch_bytes // 2:
            return
        batch = self.producer.create_batch()
        batch.append(timestamp=None, key=key, value=line)
        if batch.size() > self.max_batch_bytes:
            limit = f"the topic, whose max.message.bytes is {self.max_batch_bytes}"
            raise InvalidTrace(Reason.TOO_LARGE, "", f"{len(line)} bytes are too large for {limit}")


class _Sender:
    """Sends records at a limited rate, and awaits their acknowledgements in order."""

    def __init__(self, producer: AIOKafkaProducer, topic: str, rate: float | None, counts: PublishCounts) -> None:
        self._producer = producer
        self._topic = topic
        self._rate = rate
        self._counts = counts
        self._began = time.perf_counter()
        self._due = 0
        self._waiting: deque[tuple[int, asyncio.Future[object]]] = deque()

    async def send(self, number: int, key: bytes | None, line: bytes) -> None:
        """Send a line when its time has come. Raises SessionError for an earlier one that failed."""
        if self._rate is not None:
            await asyncio.sleep(self._began + self._due / self._rate - time.perf_counter())
            self._due += 1
        future = await self._producer.send(self._topic, line, key=key)
        future.add_done_callback(self._counts.count_answer)
        self._waiting.append((number, future))
        self._counts.set_seconds(time.perf_counter() - self._began)
        while len(self._waiting) >= IN_FLIGHT or (self._waiting and self._waiting[0][1].done()):
            await self._next_answer()

    async def finish(self) -> None:
        """Return when all lines are acknowledged. Raises SessionError."""
        while self._waiting:
            await self._next_answer()
        self._counts.set_seconds(time.perf_counter() - self._began)

    async def _next_answer(self) -> None:
        number, future = self._waiting.popleft()
        try:
            await future
        except Exception as error:
            raise SessionError(
                f"line {number}: {error!r}; this line and later ones may not have been published"
            ) from error


async def _lines(source: BinaryIO, largest_trace: int) -> AsyncIterator[Line]:
    """Yield the lines of a file, as `read_lines` does.

    Read by a daemon thread from the file descriptor: a slow pipe must delay neither earlier lines nor Ctrl-C.
    """
    loop, chunks, room = asyncio.get_running_loop(), asyncio.Queue[bytes | OSError](), threading.Semaphore(4)

    def read() -> None:
        chunk: bytes | OSError = b"-"
        while isinstance(chunk, bytes) and chunk:
            try:
                chunk = os.read(source.fileno(), CHUNK_BYTES)
            except OSError as error:
                chunk = error
            room.acquire()
            try:
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)
            except RuntimeError:  # the command has ended
                return

    threading.Thread(target=read, daemon=True).start()
    splitter = LineSplitter(largest_trace)
    while chunk := await chunks.get():
        room.release()
        if isinstance(chunk, OSError):
            with naming(source.name):
                raise chunk
        for line in splitter.feed(chunk):
            yield line
    for line in splitter.feed(b""):
        yield line


def run_publish(
    file: str, settings: Settings, *, topic: str, key: KeyField, rate: float | None, validate: bool, redact: bool
) -> int:
    """Publish a file, say how it went, and return the exit code. Raises CommandError, ArgumentError."""
    with errors_for_the_user():
        session = Session(settings)
    source = _open(file)
    console = Console(stderr=True, highlight=False)
    counts = PublishCounts()
    columns = (TextColumn("{task.fields[sent]} sent"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with source, Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("publishing", total=size_of(source), sent=0)
        bad = BadLines(file, lambda text: progress.console.print(Text(clean(text)), soft_wrap=True))
        interrupted = False
        try:
            with errors_for_the_user():
                run_session(
                    publish_lines(
                        source, session, topic=topic, key=key, rate=rate, validate=validate, redact=redact,
                        counts=counts,
                        on_line=lambda size: progress.update(task, advance=size, sent=counts.sent),
                        on_refused=lambda line, error: bad.name(f"{line}: {error.reason}: {error}"),
                    )
                )  # fmt: skip
        except KeyboardInterrupt:
            interrupted = True
        except CommandError as error:
            raise (error.adding(f"; {counts.sent} were published before") if counts.sent else error) from None
    name = "FILE" if file == "-" else shlex.quote(file)
    bad.say_rest(f"kp-worker score {name} --embedder none -o /dev/null --dead-letters BAD.jsonl lists all invalid ones")
    _say_counts(counts, topic, interrupted)
    if counts.pretty_printed:
        raise CommandError(pretty_printed_hint(file, counts.pretty_printed))
    return 130 if interrupted else 1 if counts.refused else 0


def _open(file: str) -> BinaryIO:
    try:
        return open_file(str(SAMPLES) if file == "samples" else file, "rb")
    except OSError as error:
        raise ArgumentError("FILE", f"{file}: {error.strerror}") from None


def _say_counts(counts: PublishCounts, topic: str, interrupted: bool) -> None:
    rate = f", {counts.sent / counts.seconds:.0f}/s" if counts.seconds > 1 else ""
    say(
        f"{counts.sent} trace{'s' * (counts.sent != 1)} published to topic {topic}{rate}, "
        f"{counts.refused} refused" + (", then interrupted" if interrupted else "")
    )
    for kind, count in counts.redactions.items():
        say(f"  {count} {kind} redacted")

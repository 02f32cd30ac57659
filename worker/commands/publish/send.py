"""Publishing the traces of a JSON Lines file to a topic, each validated before it is sent."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
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
    open_file,
    say,
    size_of,
)
from worker.commands.shared.json_lines import Line, lines_as_they_come, not_traces
from worker.commands.shared.samples import SAMPLES
from worker.commands.shared.session import Session, SessionError, run_session
from worker.config import Settings
from worker.core.records import Clean
from worker.core.terminal import clean, number_of
from worker.core.trace import InvalidTrace, Limits, Reason, parse_trace
from worker.kafka.cluster.connections import idempotent_producer, while_sending

IN_FLIGHT: Final = 1000
"""Traces in flight to the broker at once: limits memory, and still fills batches."""

LINGER_MS: Final = 5
"""How long a batch waits for more records. Without it, the first of many traces would be sent one by one."""

MAX_BATCH_BYTES: Final = 262_144
"""Bytes of one batch; aiokafka's default of 16 KiB is one large trace."""

MAX_REQUEST_BYTES: Final = 64 << 20
"""The client's own limit; the broker enforces the topic's (max.message.bytes)."""

KeyField = Literal["agent", "id", "domain", "none"]


@dataclass(slots=True)
class PublishCounts:
    """Counts of one run, updated while it lasts."""

    sent: int = 0
    refused: int = 0
    seconds: float = 0.0
    not_traces: str = ""
    """What a file is instead of traces, of which nothing is sent; it ends the run."""
    redactions: Counter[str] = field(default_factory=Counter)

    def count_answer(self, future: asyncio.Future[object]) -> None:
        """Count a trace whose sending has ended: as sent, if it was acknowledged."""
        self.sent += not future.cancelled() and future.exception() is None


class _KeyMetadata(msgspec.Struct):
    agent_id: str = ""
    task_domain: str = ""


class _KeyFields(msgspec.Struct):
    id: str = ""
    metadata: _KeyMetadata = msgspec.field(default_factory=_KeyMetadata)


_key_decoder = msgspec.json.Decoder(_KeyFields)


def key_of(line: bytes, choice: KeyField) -> bytes | None:
    """Return the record key of a trace; None if the trace does not have that field.

    All traces of an agent have the same key, so they stay in order and share one novelty cache.
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
    sources: Sequence[BinaryIO], session: Session, *, topic: str, key: KeyField, rate: float | None, validate: bool,
    clean: Clean | None, counts: PublishCounts, on_line: Callable[[int], None],
    on_refused: Callable[[str, int, InvalidTrace], None],
) -> None:  # fmt: skip
    """Send every line of the files that is a valid trace (or every line), at most `rate` a second.

    `clean` redacts a line before its key is read and its size checked.
    `counts` is kept up to date; `on_line` gets each line's size (bytes), `on_refused` its file, its number there
    (from 1) and the problem. Every trace counted as sent is acknowledged. Raises ConfigError, SessionError.
    """
    (target,) = await session.existing(topic)
    unconnected = idempotent_producer(
        session.client, session.settings.transaction_timeout_seconds, linger_ms=LINGER_MS,
        max_batch_size=MAX_BATCH_BYTES, max_request_size=MAX_REQUEST_BYTES,
    )  # fmt: skip
    limits = session.settings.limits if validate else None

    async def send_lines(producer: AIOKafkaProducer) -> None:
        sender = _Sender(producer, topic, rate, counts)
        async for file, (number, line, size, problem) in _lines_of(sources, session.settings.max_message_bytes):
            on_line(size)
            if problem is None and not line.strip():
                continue
            found: dict[str, int] = {}
            try:
                if problem is not None:
                    raise InvalidTrace(Reason.TOO_LARGE, "", problem)
                if clean is not None:
                    line, found = clean(line)  # noqa: PLW2901 the original must not be sent
                record_key = key_of(line, key)
                _check(line, record_key, limits, producer, target.max_bytes)
            except InvalidTrace as error:
                if number == 1 and limits is not None and (other := not_traces(file, line)):
                    counts.not_traces = other
                    break
                counts.refused += 1
                on_refused(file, number, error)
            else:
                counts.redactions.update(found)
                await sender.send(number, record_key, line)
        await sender.finish()

    async with session.connected(unconnected) as producer:
        await while_sending(producer, send_lines(producer))


async def _lines_of(sources: Sequence[BinaryIO], largest_trace: int) -> AsyncIterator[tuple[str, Line]]:
    for source in sources:
        async for line in lines_as_they_come(source, largest_trace):
            yield source.name, line


def _check(line: bytes, key: bytes | None, limits: Limits | None, producer: AIOKafkaProducer, most: int) -> None:
    """Raise InvalidTrace for a line that the worker (`limits`) or the topic (a batch of `most` bytes) would reject.

    The topic's limit must be checked before sending: a rejected batch breaks the sequence of an idempotent producer.
    """
    key_size = len(key or b"")
    if limits is not None:  # the key counts towards the worker's limit too
        parse_trace(line, replace(limits, max_bytes=limits.max_bytes - key_size))
    if len(line) + key_size < most // 2:
        return
    batch = producer.create_batch()
    batch.append(timestamp=None, key=key, value=line)
    if batch.size() > most:
        limit = f"the topic, whose max.message.bytes is {most}"
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
        """Send a line when it is due. Raises SessionError for an earlier one that failed."""
        if self._rate is not None:
            await asyncio.sleep(self._began + self._due / self._rate - time.perf_counter())
            self._due += 1
        future = await self._producer.send(self._topic, line, key=key)
        future.add_done_callback(self._counts.count_answer)
        self._waiting.append((number, future))
        self._counts.seconds = time.perf_counter() - self._began
        while len(self._waiting) >= IN_FLIGHT or (self._waiting and self._waiting[0][1].done()):
            await self._next_answer()

    async def finish(self) -> None:
        """Return when all lines are acknowledged. Raises SessionError."""
        while self._waiting:
            await self._next_answer()
        self._counts.seconds = time.perf_counter() - self._began

    async def _next_answer(self) -> None:
        number, future = self._waiting.popleft()
        try:
            await future
        except Exception as error:
            raise SessionError(
                f"line {number}: {error!r}; this line and later ones may not have been published"
            ) from error


def run_publish(
    files: Sequence[str], settings: Settings, *, topic: str, key: KeyField, rate: float | None, validate: bool,
    redact: Clean | None,
) -> int:  # fmt: skip
    """Publish files, report the result, and return the exit code. Raises CommandError, ArgumentError.

    `redact`: redacts a line; None: no redaction.
    """
    with errors_for_the_user():
        session = Session(settings)
    console = Console(stderr=True, highlight=False)
    counts = PublishCounts()
    columns = (TextColumn("{task.fields[sent]} sent"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with ExitStack() as stack:
        sources = [stack.enter_context(_open(file)) for file in files]
        progress = stack.enter_context(
            Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        )
        task = progress.add_task("publishing", total=sum(size_of(source) or 0 for source in sources) or None, sent=0)
        bad = {
            source.name: BadLines(file, lambda text: progress.console.print(Text(clean(text)), soft_wrap=True))
            for file, source in zip(files, sources, strict=True)
        }
        interrupted = False
        try:
            with errors_for_the_user():
                run_session(
                    publish_lines(
                        sources, session, topic=topic, key=key, rate=rate, validate=validate, clean=redact,
                        counts=counts,
                        on_line=lambda size: progress.update(task, advance=size, sent=counts.sent),
                        on_refused=lambda file, line, error: bad[file].name(f"{line}: {error.reason}: {error}"),
                    )
                )  # fmt: skip
        except KeyboardInterrupt:
            interrupted = True
        except CommandError as error:
            raise (
                error.adding(f"; {number_of(counts.sent, 'trace was', 'traces were')} published before")
                if counts.sent
                else error
            ) from None
    for file, lines in zip(dict.fromkeys(files), bad.values(), strict=True):
        name = "FILE" if file == "-" else shlex.quote(file)
        lines.say_rest(
            f"kp-worker score {name} --embedder none -o /dev/null --dead-letters BAD.jsonl lists all invalid ones"
        )
    _say_counts(counts, topic, interrupted)
    if counts.not_traces:
        raise CommandError(counts.not_traces)
    if not counts.sent and not counts.refused and not interrupted:
        raise CommandError(f"{', '.join(files)}: no line holds anything; one trace per line is expected")
    return 130 if interrupted else 1 if counts.refused else 0


def _open(file: str) -> BinaryIO:
    try:
        return open_file(str(SAMPLES) if file == "samples" else file, "rb")
    except OSError as error:
        raise ArgumentError("FILE", f"{file}: {error.strerror}") from None


def _say_counts(counts: PublishCounts, topic: str, interrupted: bool) -> None:
    rate = f", {counts.sent / counts.seconds:.0f}/s" if counts.seconds > 1 else ""
    say(
        f"{number_of(counts.sent, 'trace')} published to topic {topic}{rate}, "
        f"{counts.refused} refused" + (", then interrupted" if interrupted else "")
    )
    for kind, count in counts.redactions.items():
        say(f"  {count} {kind} redacted")

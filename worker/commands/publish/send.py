"""Publishing the traces of a JSON Lines file to a topic, each validated before it is sent."""

import asyncio
import shlex
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import BinaryIO, Literal

import msgspec
from aiokafka import AIOKafkaProducer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from worker.commands.shared.console import BadLines, CommandError, open_argument, say, size_of
from worker.commands.shared.json_lines import lines_as_they_come, not_traces
from worker.commands.shared.options import SAMPLES
from worker.commands.shared.session import Session, SessionError, run_session
from worker.core.records import Clean, exact_size
from worker.core.terminal import clean, number_of
from worker.core.trace import InvalidTrace, Limits, Reason, parse_trace
from worker.kafka.connections import idempotent_producer, while_sending

KeyField = Literal["agent", "id", "domain", "none"]


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


@dataclass(slots=True)
class Publishing:
    """One run of `publish`, and its counts."""

    session: Session
    topic: str
    key: KeyField
    rate: float | None  # traces a second, at most
    validate: bool
    clean: Clean | None  # redacts a line, before its key is read and its size checked; None: no redaction
    sent: int = 0  # acknowledged
    refused: int = 0
    seconds: float = 0.0
    redactions: Counter[str] = field(default_factory=Counter)
    not_traces: str = ""
    """What a file is instead of traces, of which nothing is sent; it ends the run."""
    _unanswered: deque[tuple[int, asyncio.Future[object]]] = field(default_factory=deque)  # with their line numbers

    async def run(self, sources: Sequence[tuple[BinaryIO, BadLines]], on_line: Callable[[int], None]) -> None:
        """Send every line of the files that is a valid trace (or every line); `on_line` gets each line's size (bytes).

        Raises ConfigError, SessionError.
        """
        (target,) = await self.session.existing(self.topic)
        unconnected = idempotent_producer(
            self.session.client, self.session.settings.transaction_timeout_seconds,
            linger_ms=5,  # a batch waits for more records: the first of many traces would be sent one by one
            max_batch_size=262_144,  # aiokafka's default of 16 KiB is one large trace
            max_request_size=64 << 20,  # the client's own limit; the broker enforces the topic's
        )  # fmt: skip
        async with self.session.connected(unconnected) as producer:
            await while_sending(producer, self._send_lines(producer, sources, on_line, target.max_bytes))

    async def _send_lines(
        self, producer: AIOKafkaProducer, sources: Sequence[tuple[BinaryIO, BadLines]],
        on_line: Callable[[int], None], largest: int,
    ) -> None:  # fmt: skip
        began, due = time.perf_counter(), 0
        settings = self.session.settings
        for source, bad in sources:
            async for line in lines_as_they_come(source, settings.max_message_bytes):
                on_line(line.size)
                if line.blank:
                    continue
                redactions: dict[str, int] = {}
                try:
                    trace = line.content()
                    if self.clean is not None:
                        trace, redactions = self.clean(trace)
                    key = key_of(trace, self.key)
                    check_trace(trace, key, settings.limits if self.validate else None, largest)
                except InvalidTrace as error:
                    if line.number == 1 and self.validate and (other := not_traces(source.name, line.data)):
                        self.not_traces = other
                        await self._await_answers(0)
                        return
                    self.refused += 1
                    bad.name(f"{line.number}: {error.reason}: {error}")
                    continue
                self.redactions.update(redactions)
                if self.rate is not None:
                    await asyncio.sleep(began + due / self.rate - time.perf_counter())
                    due += 1
                future = await producer.send(self.topic, trace, key=key)
                future.add_done_callback(self._count_answer)
                self._unanswered.append((line.number, future))
                self.seconds = time.perf_counter() - began
                await self._await_answers(999)  # limits memory, and still fills batches
        await self._await_answers(0)
        self.seconds = time.perf_counter() - began

    def _count_answer(self, future: asyncio.Future[object]) -> None:
        self.sent += not future.cancelled() and future.exception() is None

    async def _await_answers(self, most: int) -> None:
        """Wait until at most so many lines are unanswered. Raises SessionError for a line that failed."""
        while len(self._unanswered) > most or (self._unanswered and self._unanswered[0][1].done()):
            number, future = self._unanswered.popleft()
            try:
                await future
            except Exception as error:
                raise SessionError(
                    f"line {number}: {error!r}; this line and later ones may not have been published"
                ) from error


def check_trace(line: bytes, key: bytes | None, limits: Limits | None, largest: int) -> None:
    """Raise InvalidTrace for a line that the worker (`limits`) or the topic (a batch of `largest` bytes) would reject.

    The topic's limit must be checked before sending: a rejected batch breaks the sequence of an idempotent producer.
    """
    if limits is not None:  # the key counts towards the worker's limit too
        parse_trace(line, replace(limits, max_bytes=limits.max_bytes - len(key or b"")))
    if exact_size(key, line, []) > largest:
        limit = f"the topic, whose max.message.bytes is {largest}"
        raise InvalidTrace(Reason.TOO_LARGE, "", f"{len(line)} bytes are too large for {limit}")


def run_publish(files: Sequence[str], run: Publishing) -> int:
    """Publish files, report the result, and return the exit code. Raises ConfigError, CommandError, ArgumentError."""
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.fields[sent]} sent"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    interrupted = False
    with ExitStack() as stack:
        bad = {file: BadLines(file, lambda text: console.print(Text(clean(text)), soft_wrap=True)) for file in files}
        paths = {file: str(SAMPLES) if file == "samples" else file for file in files}
        sources = [(stack.enter_context(open_argument("FILE", paths[file])), bad[file]) for file in files]
        progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        stack.enter_context(progress)
        task = progress.add_task("publishing", total=sum(size_of(source) or 0 for source, _ in sources) or None, sent=0)
        try:
            run_session(run.run(sources, lambda size: progress.update(task, advance=size, sent=run.sent)))
        except KeyboardInterrupt:
            interrupted = True
        except CommandError as error:
            if run.sent:
                error.message += f"; {number_of(run.sent, 'trace was', 'traces were')} published before"
            raise
    for file, lines in bad.items():
        name = "FILE" if file == "-" else shlex.quote(file)
        lines.say_rest(
            f"kp-worker score {name} --embedder none -o /dev/null --dead-letters BAD.jsonl lists all invalid ones"
        )
    rate_words = f", {run.sent / run.seconds:.0f}/s" if run.seconds > 1 else ""
    end = ", then interrupted" if interrupted else ""
    say(f"{number_of(run.sent, 'trace')} published to topic {run.topic}{rate_words}, {run.refused} refused{end}")
    for kind, count in run.redactions.items():
        say(f"  {count} {kind} redacted")
    if run.not_traces:
        raise CommandError(run.not_traces)
    if not run.sent and not run.refused and not interrupted:
        raise CommandError(f"{', '.join(files)}: no line holds anything; one trace per line is expected")
    return 130 if interrupted else 1 if run.refused else 0

"""`kp-worker publish`: traces from a JSON Lines file to a topic, each looked at before it is sent.

Lives here: reading lines, refusing bad ones, the key, the producer. Must not live here: what a trace is (trace.py).
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final, Literal

import msgspec
from aiokafka import AIOKafkaProducer

from worker.commands.session import Session, SessionError
from worker.core.trace import InvalidTrace, Reason, parse_trace
from worker.kafka.producer import producer_arguments, while_sending

SAMPLES: Final = Path(__file__).parents[1] / "data" / "demo_traces.jsonl"

IN_FLIGHT: Final = 1000
"""Traces that may be on their way to the broker at once: bounds memory, and keeps a thousand in a batch's reach."""

LINGER_MS: Final = 5
"""How long a batch waits for company. Without it the first of many traces would each travel alone."""

CHUNK_BYTES: Final = 1 << 16

KeyField = Literal["agent", "id", "domain", "none"]


@dataclass(slots=True)
class Summary:
    """Counts of one run, kept up to date while it lasts."""

    sent: int = 0
    refused: int = 0
    seconds: float = 0.0


class _KeyMetadata(msgspec.Struct):
    agent_id: str = ""
    task_domain: str = ""


class _KeyFields(msgspec.Struct):
    id: str = ""
    metadata: _KeyMetadata = msgspec.field(default_factory=_KeyMetadata)


_key_decoder = msgspec.json.Decoder(_KeyFields)


def key_of(line: bytes, choice: KeyField) -> bytes | None:
    """Return the record key of a trace; None where the trace does not have that field.

    An agent's traces under one key stay in order and meet in one novelty cache.
    """
    if choice == "none":
        return None
    try:
        fields = _key_decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # unvalidated lines may be anything
        return None
    text = {"agent": fields.metadata.agent_id, "id": fields.id, "domain": fields.metadata.task_domain}[choice]
    return text.encode() or None


async def publish(
    source: BinaryIO,
    session: Session,
    *,
    topic: str,
    key: KeyField,
    rate: float | None,
    validate: bool,
    summary: Summary,
    on_line: Callable[[int], None],
    on_refused: Callable[[int, InvalidTrace], None],
) -> None:
    """Send every line of `source` that is a valid trace (or every line), at most `rate` a second.

    `summary` counts as it goes; `on_line` gets each line's size (bytes), `on_refused` its number (from 1) and
    what is wrong. Every trace counted as sent is acknowledged. Raises ConfigError, SessionError.
    """
    (target,) = await session.existing(topic)
    limits = session.settings.limits
    began = time.perf_counter()

    def acknowledged(future: asyncio.Future[object]) -> None:
        summary.sent += not future.cancelled() and future.exception() is None

    async def send_lines(producer: AIOKafkaProducer) -> None:
        waiting: deque[tuple[int, asyncio.Future[object]]] = deque()
        number = due = 0
        async for line in _lines(source):
            number += 1
            on_line(len(line) + 1)
            if not line.strip():
                continue
            record_key = key_of(line, key)
            try:
                if validate:  # the key counts against the worker's limit, too
                    parse_trace(line, replace(limits, max_bytes=limits.max_bytes - len(record_key or b"")))
                _check_fits(producer, record_key, line, target.max_bytes)
            except InvalidTrace as error:
                summary.refused += 1
                on_refused(number, error)
                continue
            if rate is not None:
                await asyncio.sleep(began + due / rate - time.perf_counter())
                due += 1
            future = await producer.send(topic, line, key=record_key)
            future.add_done_callback(acknowledged)
            waiting.append((number, future))
            summary.seconds = time.perf_counter() - began
            while len(waiting) >= IN_FLIGHT or (waiting and waiting[0][1].done()):
                await _result(*waiting.popleft())
        while waiting:
            await _result(*waiting.popleft())
        summary.seconds = time.perf_counter() - began

    timeout_ms = round(session.settings.transaction_timeout_seconds * 1000)
    arguments = producer_arguments(session.client) | {"linger_ms": LINGER_MS, "request_timeout_ms": timeout_ms}
    async with session.connected(AIOKafkaProducer(**arguments)) as producer:
        began = time.perf_counter()
        await while_sending(producer, send_lines(producer))


async def _result(number: int, future: asyncio.Future[object]) -> None:
    try:
        await future
    except Exception as error:
        raise SessionError(f"line {number}: {error!r}; it and what follows may not be on the topic") from error


def _check_fits(producer: AIOKafkaProducer, key: bytes | None, line: bytes, limit: int) -> None:
    """Raise InvalidTrace for a record that the topic refuses.

    Must be seen before it is sent: a refused batch breaks the sequence of an idempotent producer.
    """
    if len(line) + len(key or b"") < limit // 2:
        return
    batch = producer.create_batch()
    batch.append(timestamp=None, key=key, value=line)
    if batch.size() > limit:
        message = f"{len(line)} bytes are too large for the topic, whose max.message.bytes is {limit}"
        raise InvalidTrace(Reason.TOO_LARGE, "", message)


async def _lines(source: BinaryIO) -> AsyncIterator[bytes]:
    """Yield lines without their ends, as soon as each is there.

    Read by a daemon thread from the bare descriptor: a slow pipe must not hold up what is already read, nor Ctrl-C.
    """
    loop, chunks = asyncio.get_running_loop(), asyncio.Queue[bytes | OSError](maxsize=4)

    def read() -> None:
        chunk: bytes | OSError = b"-"
        while isinstance(chunk, bytes) and chunk:
            try:
                chunk = os.read(source.fileno(), CHUNK_BYTES)
            except OSError as error:
                chunk = error
            try:
                asyncio.run_coroutine_threadsafe(chunks.put(chunk), loop).result()
            except (RuntimeError, asyncio.CancelledError):  # the command has ended
                return

    threading.Thread(target=read, daemon=True).start()
    pieces: list[bytes] = []
    while chunk := await chunks.get():
        if isinstance(chunk, OSError):
            raise chunk
        *ended, rest = chunk.split(b"\n")
        if ended:
            pieces.append(ended[0])
            yield b"".join(pieces).rstrip(b"\r")
            for line in ended[1:]:
                yield line.rstrip(b"\r")
            pieces = []
        pieces.append(rest)
    if last := b"".join(pieces):
        yield last.rstrip(b"\r")

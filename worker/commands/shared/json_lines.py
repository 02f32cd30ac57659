"""JSON Lines, for every command that reads them: line by line, with limits."""

from __future__ import annotations

import asyncio
import codecs
import os
import shlex
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from io import BufferedReader
from typing import Any, BinaryIO, Final, NamedTuple, cast

import msgspec

from worker.commands.shared.console import naming
from worker.core.trace import document_decoder

CHUNK_BYTES: Final = 1 << 16

LINE_FACTOR: Final = 32
"""How many times as long as the largest trace (KP_MAX_MESSAGE_BYTES) a line may be. A run to convert may be far larger
than its trace (images, output of tools), and the JSON of a line takes six times its size in memory."""


class Line(NamedTuple):
    """A line without its end."""

    number: int  # from 1
    data: bytes
    size: int  # bytes, with its end
    problem: str | None = None  # the line is too long, and `data` empty


class LineSplitter:
    """Splits chunks into lines, buffering no more than a line may have. `largest_trace`: KP_MAX_MESSAGE_BYTES."""

    def __init__(self, largest_trace: int) -> None:
        self._most = line_limit(largest_trace)
        self._number = 0
        self._pieces: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> Iterator[Line]:
        """Yield the lines that end in a chunk; an empty chunk is the end of the file."""
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            self._add(piece)
            yield self._line(self._size + 1)
        self._add(rest)
        if not chunk and self._size:
            yield self._line(self._size)

    def _add(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > self._most:
            self._pieces.clear()
        elif piece:
            self._pieces.append(piece)

    def _line(self, size: int) -> Line:
        self._number += 1
        problem = too_long(self._most) if self._size > self._most else None
        line = Line(self._number, b"".join(self._pieces).rstrip(b"\r"), size, problem)
        self._pieces.clear()
        self._size = 0
        return line


def read_lines(file: BinaryIO, largest_trace: int) -> Iterator[Line]:
    """Yield the lines of a file, each as soon as it is complete. Raises OSError, which names the file."""
    lines = LineSplitter(largest_trace)
    with naming(getattr(file, "name", "the input")):
        while chunk := cast("BufferedReader", file).read1(CHUNK_BYTES):
            yield from lines.feed(chunk)
    yield from lines.feed(b"")


async def lines_as_they_come(file: BinaryIO, largest_trace: int) -> AsyncIterator[Line]:
    """Yield the lines of a file, as `read_lines` does, while other tasks run.

    A daemon thread reads from the file descriptor: a slow pipe must delay neither earlier lines nor Ctrl-C.
    """
    loop, chunks, room = asyncio.get_running_loop(), asyncio.Queue[bytes | OSError](), threading.Semaphore(4)

    def read() -> None:
        chunk: bytes | OSError = b"-"
        while isinstance(chunk, bytes) and chunk:
            try:
                chunk = os.read(file.fileno(), CHUNK_BYTES)
            except OSError as error:
                chunk = error
            room.acquire()
            try:
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)
            except RuntimeError:  # the command has ended
                return

    threading.Thread(target=read, daemon=True).start()
    lines = LineSplitter(largest_trace)
    while chunk := await chunks.get():
        room.release()
        if isinstance(chunk, OSError):
            with naming(file.name):
                raise chunk
        for line in lines.feed(chunk):
            yield line
    for line in lines.feed(b""):
        yield line


def one_document(lines: Iterator[Line], most: int) -> Iterator[Line]:
    """Yield a file's lines; one JSON document over several lines (at most `most` bytes) becomes one line."""
    first = next(lines, None)
    if first is None:
        return
    if first.problem is None and is_pretty_printed(first.data):
        size, parts = first.size, [first.data]
        for line in lines:
            size += line.size
            parts.append(line.data)
            if size > most or line.problem is not None:
                raise SeveralLinesError(first.data)
        try:
            document = msgspec.json.format(b"\n".join(parts), indent=-1)
        except ValueError:  # msgspec's errors are ValueErrors: several documents
            raise SeveralLinesError(first.data) from None
        if not document.startswith(b"{"):
            raise SeveralLinesError(first.data)
        yield Line(1, document, size)
        return
    yield first
    yield from lines


class SeveralLinesError(Exception):
    """A file has JSON over several lines that is not one document; `args[0]` is its first line."""


def line_limit(largest_trace: int) -> int:
    """Return the limit of a line, bytes."""
    return LINE_FACTOR * largest_trace


def too_long(most: int) -> str:
    """Return the problem with a line or document of more than `most` bytes."""
    return f"longer than {most} bytes, {LINE_FACTOR} times KP_MAX_MESSAGE_BYTES; shorten it, or raise that setting"


def is_pretty_printed(first_line: bytes) -> bool:
    """Return whether the first line of a file opens a document that continues on the next one."""
    opened = first_line.removeprefix(codecs.BOM_UTF8).strip()
    if opened in (b"{", b"[") or not opened.startswith(b"["):
        return opened in (b"{", b"[")
    try:
        document_decoder.decode(opened)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        return str(error) == "Input data was truncated"
    return False


def pretty_printed_hint(file: str, first_line: bytes) -> str:
    """Return what to do with such a file, which begins with `first_line`; - is standard input."""
    change = "jq -c '.[]'" if first_line.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[") else "jq -c ."
    piped = file in ("-", "<stdin>")
    name, remedy = ("standard input", f"pipe it through {change}") if piped else (file, f"{change} {shlex.quote(file)}")
    return f"{name} holds JSON over several lines; one trace per line is expected: {remedy}"


def value_at(document: Mapping[str, Any], path: str) -> Any:
    """Return the value of a field (with dots if nested); None if there is none."""
    value: Any = document
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value

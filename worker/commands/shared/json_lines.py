"""JSON Lines, for every command that reads them: line by line, with limits. And files that hold one document."""

from __future__ import annotations

import asyncio
import codecs
import os
import shlex
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from io import BufferedReader
from typing import Any, BinaryIO, Final, NamedTuple, cast

from worker.commands.shared.console import ArgumentError, CommandError, naming, open_file
from worker.core.trace import InvalidTrace, Reason, document_decoder

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


def read_document(path: str, line: int | None, most: int) -> bytes:
    """Return the document of a file with one trace, or of a line (from 1) of a file. - is standard input.

    Reads at most `most` + 1 bytes of a document. Raises CommandError, and ArgumentError for an unreadable file.
    """
    name = name_of(path)
    try:
        with open_file(path, "rb") as file:
            raw = file.read(most + 1) if line is None else _line_at(file, line, most, name)
    except OSError as error:
        raise ArgumentError("TRACE", f"{path} cannot be read: {error.strerror}") from None
    first, _, rest = (raw or b"").partition(b"\n")
    if line is None and rest.strip() and _is_json(first):
        raise CommandError(
            f"{name} holds JSON Lines: name the line of one trace, as in kp-worker explain {path} --line 1, or pick "
            f"it by its id, as in grep -m1 ID {'FILE' if path == '-' else path} | kp-worker explain -"
        )
    if raw is None or len(raw) > most:
        where = "" if line is None else f"line {line}: "
        raise CommandError(f"{name}: {where}more than {most} bytes, the limit of one trace (KP_MAX_MESSAGE_BYTES)")
    return raw


def _line_at(file: BinaryIO, number: int, most: int, name: str) -> bytes | None:
    """Return one line; None if it is too long. Raises CommandError if it is missing or empty."""
    last = 0
    for line in read_lines(file, most):
        last = line.number
        if last == number:
            if line.problem is not None:
                return None
            if not line.data.strip():
                raise CommandError(f"{name}: line {number} is empty")
            return line.data
    raise CommandError(f"{name} has no line {number}, only {last}")


def _is_json(raw: bytes) -> bool:
    """Return whether the bytes are one JSON document, according to the parser of traces."""
    try:
        document_decoder.decode(raw)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        return False
    return True


def name_of(path: str) -> str:
    """Return the file's name for errors."""
    return "<stdin>" if path == "-" else path


def describe_problem(raw: bytes, line: int | None, error: InvalidTrace) -> str:
    """Return reason and message of an invalid trace, with its line (from 1) in a file of several."""
    text = f"{'' if line is None else f'line {line}: '}{error.reason}: {error.message}"
    if error.reason is Reason.NOT_JSON and line is not None and raw.strip() in (b"{", b"["):
        text += "; the file holds one document over several lines: leave out --line"
    return text

"""JSON Lines, for every command that reads them: line by line, with limits."""

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
from worker.core.trace import InvalidTrace, Reason, document_decoder

CHUNK_BYTES: Final = 1 << 16

LINE_FACTOR: Final = 32
"""How many times as long as the largest trace (KP_MAX_MESSAGE_BYTES) a line may be. A run to convert may be far larger
than its trace (images, output of tools), and the JSON of a line takes six times its size in memory."""


class Line(NamedTuple):
    """A line without its end."""

    number: int  # from 1; 0: a whole file that is one run, in convert
    data: bytes
    size: int  # bytes, with its end
    problem: str | None = None  # the line is too long, and `data` empty

    @property
    def blank(self) -> bool:
        """Whether the line holds nothing."""
        return self.problem is None and not self.data.strip()

    def content(self) -> bytes:
        """Return the line. Raises InvalidTrace if it is too long."""
        if self.problem is not None:
            raise InvalidTrace(Reason.TOO_LARGE, "", self.problem)
        return self.data


class LineSplitter:
    """Splits chunks into lines, buffering no more than a line may have. `largest_trace`: KP_MAX_MESSAGE_BYTES.

    `pretty`: a file whose first line is a bracket alone is one document, and becomes one line. The mark of UTF-8 at the
    beginning is left out.
    """

    def __init__(self, largest_trace: int, *, pretty: bool = False) -> None:
        self._most = line_limit(largest_trace)
        self._number = 0
        self._pieces: list[bytes] = []
        self._size = 0
        self._is_document = None if pretty else False  # None: the first line will tell

    def feed(self, chunk: bytes) -> Iterator[Line]:
        """Yield the lines that end in a chunk; an empty chunk is the end of the file."""
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            self._add(piece)
            if self._is_document is None:
                self._is_document = self._joined().strip() in (b"{", b"[")
            if self._is_document:
                self._add(b"\n")
            else:
                yield self._line(self._size + 1)
        self._add(rest)
        if not chunk and self._size:
            yield from self._document() if self._is_document else [self._line(self._size)]

    def _add(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > self._most:
            self._pieces.clear()
        elif piece:
            self._pieces.append(piece)

    def _document(self) -> Iterator[Line]:
        """Yield the document as one line; its lines, if it is none: the first one may have been cut off."""
        line = self._line(self._size)
        try:
            yield line if line.problem else line._replace(data=msgspec.json.format(line.data, indent=-1))
        except msgspec.DecodeError:
            for number, data in enumerate(line.data.splitlines(), 1):
                yield Line(number, data, len(data) + 1)

    def _joined(self) -> bytes:
        data = b"".join(self._pieces)
        return data if self._number else data.removeprefix(codecs.BOM_UTF8)

    def _line(self, size: int) -> Line:
        problem = too_long(self._most) if self._size > self._most else None
        data = self._joined().rstrip(b"\r")
        self._number += 1
        line = Line(self._number, data, size, problem)
        self._pieces.clear()
        self._size = 0
        return line


def read_lines(file: BinaryIO, largest_trace: int) -> Iterator[Line]:
    """Yield the lines of a file, each as soon as it is complete. Raises OSError, which names the file."""
    lines, chunk = LineSplitter(largest_trace, pretty=True), b"-"
    with naming(getattr(file, "name", "the input")):
        while chunk:
            chunk = cast("BufferedReader", file).read1(CHUNK_BYTES)
            yield from lines.feed(chunk)


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
    lines, chunk = LineSplitter(largest_trace, pretty=True), b"-"
    while chunk:
        if isinstance(read_chunk := await chunks.get(), OSError):
            with naming(file.name):
                raise read_chunk
        chunk = read_chunk
        room.release()
        for line in lines.feed(chunk):
            yield line


def line_limit(largest_trace: int) -> int:
    """Return the limit of a line, bytes."""
    return LINE_FACTOR * largest_trace


def too_long(most: int) -> str:
    """Return the problem with a line or document of more than `most` bytes."""
    return f"longer than {most} bytes, {LINE_FACTOR} times KP_MAX_MESSAGE_BYTES; shorten it, or raise that setting"


def not_traces(file: str, first_line: bytes) -> str | None:
    """Return what a file is whose first line is no trace, and what to do; None if that cannot be told.

    `file`: - is standard input.
    """
    piped = file in ("-", "<stdin>")
    name, quoted = ("standard input", "") if piped else (file, f" {shlex.quote(file)}")
    for begin, what, change in _OTHER_FILES:
        if first_line.startswith(begin):
            remedy = f"pipe it through {change}" if piped else f"{change}{quoted}"
            return f"{name} is {what}; one trace per line is expected: {remedy}"
    try:
        document = document_decoder.decode(first_line)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
        if first_line.strip() != b"{" and not begins_list(first_line):
            return None
    else:
        first = document[0] if isinstance(document, list) and document else document
        if isinstance(first, dict) and (kind := _kind_of(first)):
            return f"{name} looks like {kind}, not like traces: kp-worker convert makes traces of them"
        if first is document:
            return None
    change = "jq -c '.[]'" if first_line.lstrip()[:1] == b"[" else "jq -c ."
    remedy = f"pipe it through {change}" if piped else f"{change}{quoted}"
    return f"{name} holds JSON over several lines; one trace per line is expected: {remedy}"


def begins_list(first_line: bytes) -> bool:
    """Return whether a line opens a list that goes on on the next line."""
    try:
        document_decoder.decode(first_line)
    except (ValueError, RecursionError) as error:
        return first_line.lstrip()[:1] == b"[" and str(error) == "Input data was truncated"
    return False


_OTHER_FILES: Final = (
    (b"\x1f\x8b", "compressed by gzip", "gunzip -c"), (b"\x28\xb5\x2f\xfd", "compressed by zstd", "zstd -dc"),
    (codecs.BOM_UTF16_LE, "in UTF-16", "iconv -f UTF-16 -t UTF-8"),
    (codecs.BOM_UTF16_BE, "in UTF-16", "iconv -f UTF-16 -t UTF-8"),
)  # fmt: skip
"""How files begin that are no JSON Lines, what they are, and the command that makes them so."""


def _kind_of(document: Mapping[str, Any]) -> str | None:
    """Return what a JSON document is that convert reads."""
    from worker.runs.sessions.session import format_of

    if document.keys() & {"resourceSpans", "resourceLogs"}:
        return "OpenTelemetry spans"
    if isinstance(document.get("role"), str) or isinstance(document.get("messages"), list):
        return "chat messages"
    if str(document.get("schema_version")).startswith("ATIF"):
        return "a trajectory"
    return "a coding agent's session" if format_of(document) is not None else None


def value_at(document: Mapping[str, Any], path: str) -> Any:
    """Return the value of a field (with dots if nested); None if there is none."""
    value: Any = document
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value

"""The session files of a folder: a list of them, and their closed requests as they grow.

This module uses neither Kafka nor a clock. A position says up to where the requests of a file are published, and has
nothing of the file's text. A file that has grown beyond it is read from its beginning, and what began before is left
out. If the position does not fit the file (truncated, replaced, unknown), published requests are returned again, each
with the key that it had.
"""

import logging
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from worker.commands.shared.json_lines import CHUNK_BYTES, Line, LineSplitter, line_limit
from worker.runs.fields import RunRefused, fault
from worker.runs.sessions.formats import Format
from worker.runs.sessions.session import AgentSession, Request

log = logging.getLogger(__name__)


def session_files_below(folder: str) -> tuple[dict[str, os.stat_result], dict[str, OSError]]:
    """Return the session files (*.jsonl) below a folder, and the folders that cannot be read.

    The files are in the order of their last modification, those of sub-agents last: a fork of Claude Code repeats its
    parent's requests, which must be published as the parent's.
    """
    files: dict[str, os.stat_result] = {}
    unreadable: dict[str, OSError] = {}
    folders = [folder]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif entry.name.endswith(".jsonl"):
                        with suppress(OSError):  # deleted, or a dangling link
                            if stat.S_ISREG((status := os.stat(entry.path)).st_mode):
                                files[entry.path] = status
        except OSError as error:
            unreadable[folder] = error

    def order(item: tuple[str, os.stat_result]) -> tuple[bool, int, str]:
        return os.path.basename(item[0]).startswith("agent-"), item[1].st_mtime_ns, item[0]

    return dict(sorted(files.items(), key=order)), unreadable


NO_POSITION: Final = b"{}"


class Position(msgspec.Struct, frozen=True):
    """Up to where the requests of a file are published."""

    file: str  # digest of its name without folders: sessions have unique names, and may be moved
    next: int  # byte offset
    check: str  # digest of the bytes just before `next`; if it differs, the file is read anew
    closed: bool  # no request was open there: lines that go on after it belong to none


_position: Final = msgspec.json.Decoder(Position)


class Closed(NamedTuple):
    """A request that no longer changes."""

    request: Request
    path: str  # of its file, for messages
    position: bytes  # the position after it, as JSON; NO_POSITION: other requests belong before it, or it is lost


@dataclass(slots=True)
class _File:
    """A session file."""

    path: str
    session: AgentSession | None = None  # None unless it is being read
    published: Position | None = None  # what begins before is not returned
    at: int = 0  # offset behind the last line that was fed
    check: str = ""
    seen: tuple[int, int, int, int] | None = None  # device, inode, size and time of change (ns) at the last reading
    unread: bool = True  # although it has not changed
    grew_at: float = 0.0  # when a change was last seen, by the monotonic clock
    quiet_at: float = -math.inf  # the poll before that, if it then had less
    lost: list[Request] = field(default_factory=list)  # requests that were open when the file was truncated or replaced
    warned: set[str] = field(default_factory=set)


class SessionFiles:
    """The session files below `folder`. Each call of `poll` reads their new lines.

    `idle_seconds`: time without a write after which an open request closes. For a file that was seen growing it is
    measured by the monotonic clock, which stands still while the machine sleeps. `largest_trace`: KP_MAX_MESSAGE_BYTES,
    which limits lines and the size of a request.
    """

    def __init__(self, folder: Path, form: Format, idle_seconds: float, largest_trace: int) -> None:
        self._folder = os.fspath(folder)
        self._form = form
        self._positions: dict[str, Position] = {}
        self._polled_at = -math.inf
        self._idle_seconds = idle_seconds
        self._largest_trace = largest_trace
        self._files: dict[str, _File] = {}
        self._unreadable: set[str] = set()

    def start(self, positions: Iterable[Position]) -> None:
        """Begin, or begin again, after these positions; of several for a file, the last one counts."""
        self._positions = {position.file: position for position in positions}
        for file in self._files.values():
            file.session, file.unread = None, True
            file.lost.clear()

    def poll(self, now: float, clock: float) -> Iterator[list[Closed]]:
        """Yield the closed requests, in order, some or none at a time.

        `now`: s since 1970; `clock`: s of a monotonic clock. Unreadable files are logged and retried at the next call.
        """
        statuses, unreadable = session_files_below(self._folder)
        for folder in unreadable.keys() - self._unreadable:
            log.warning("%s cannot be read: %s; trying again", _shown(folder), unreadable[folder].strerror)
        self._unreadable = set(unreadable)
        gone = self._recognise(statuses)
        for path, status in statuses.items():
            file = self._files[path]
            try:
                if (changed := file.seen != _seen(status)) or file.unread:
                    unbroken = clock - file.quiet_at < self._idle_seconds
                    if changed:
                        file.grew_at = clock
                        file.quiet_at = -math.inf if file.seen is None else self._polled_at
                    yield from self._read(file, None if unbroken else self._idle_seconds)
                idle = max(min(now - status.st_mtime, clock - file.quiet_at), clock - file.grew_at)
                if file.session is not None and idle >= self._idle_seconds:
                    yield self._close(file, file.session)
            except OSError as error:
                file.session, file.unread = None, True
                self._warn(file, f"cannot be read: {error.strerror}", "unreadable")
            else:
                file.warned.discard("unreadable")
        for file in gone:  # it may come back, as when its folder was briefly missing
            if file.session is None or clock - file.grew_at >= self._idle_seconds:
                open_until_now = [] if file.session is None else file.session.close()
                yield [Closed(request, file.path, NO_POSITION) for request in (*file.lost, *open_until_now)]
                del self._files[file.path]
        self._polled_at = clock

    def _recognise(self, statuses: Mapping[str, os.stat_result]) -> list[_File]:
        """Match the files with the known ones, even if renamed; return the files that are gone."""
        before, self._files = self._files, {}
        same = {file.seen[:2]: file for file in before.values() if file.seen is not None}
        for path, status in statuses.items():
            file = same.get((status.st_dev, status.st_ino))
            if file is not None and file.path in before and (file.path == path or _goes_on(file, path)):
                del before[file.path]
                file.path = path
                self._files[path] = file
        for path in statuses.keys() - self._files.keys():
            self._files[path] = before.pop(path) if path in before else _File(path)
        self._files |= before
        return [*before.values()]

    def _read(self, file: _File, idle_seconds: float | None) -> Iterator[list[Closed]]:
        """Read the new complete lines; `idle_seconds`: as for a AgentSession. Raises OSError."""
        with _opened(file.path) as descriptor:
            status = os.fstat(descriptor)
            size = status.st_size
            if file.session is not None and not _fits(descriptor, size, file.at, file.check):
                self._warn(file, "was truncated or replaced, and is read from its start")
                file.lost += file.session.close()
                file.session = None
            session = file.session or self._begin(file, descriptor, size)
            if session is None:
                file.seen, file.unread = _seen(status), False
                return
            session.idle_seconds = idle_seconds
            names: set[tuple[str, str]] = set()
            splitter = LineSplitter(self._largest_trace)
            place = file.at
            while place < size and (chunk := os.pread(descriptor, min(CHUNK_BYTES, size - place), place)):
                place += len(chunk)
                closed: list[Closed] = []
                for line in splitter.feed(chunk):
                    closed += self._feed(file, session, line, descriptor)
                names |= {request.request.name for request in closed}
                yield closed
            if place - file.at > line_limit(self._largest_trace):
                file.at = place  # the rest of a line that is too long is logged when it ends
            file.check = _check(descriptor, file.at)
            file.seen, file.unread = _seen(status), False
        names |= session.open_names
        lost, file.lost = file.lost, []
        yield [Closed(request, file.path, NO_POSITION) for request in lost if request.name not in names]
        if session.counts.dropped["lines that belong to no open request"]:
            why = "closed because nothing was written for some time; this is left out (--idle-minutes)"
            self._warn(file, f"continues a request that was {why}")

    def _begin(self, file: _File, descriptor: int, size: int) -> AgentSession | None:
        """Open the session of a file; None: everything in it is published."""
        file.at, file.published = 0, self._positions.get(_name(file.path))
        if file.published is not None and not _fits(descriptor, size, file.published.next, file.published.check):
            self._warn(file, "was truncated or replaced, and is read from its start")
            file.published = None
        if file.published is not None and file.published.closed and file.published.next == size:
            file.at, file.check = size, file.published.check
            return None
        file.check = _check(descriptor, file.at)
        file.session = AgentSession(self._form)
        return file.session

    def _feed(self, file: _File, session: AgentSession, line: Line, descriptor: int) -> list[Closed]:
        begin, file.at = file.at, file.at + line.size
        if file.published is not None and file.published.closed and begin >= file.published.next:
            session.close()
            file.published = msgspec.structs.replace(file.published, closed=False)
        try:
            if line.problem is not None:
                session.skip(begin)
                raise RunRefused("too_large", line.problem)
            closed = session.feed(line.data, begin)
        except RunRefused as error:
            self._warn(file, f"byte {begin}: {error}", error.reason)
            return []
        except Exception as error:  # one line must not stop the others
            log.debug("%s: byte %d cannot be read", _shown(file.path), begin, exc_info=True)
            self._warn(file, f"byte {begin}: {fault(error)}", "mapping_failed")
            return []
        if session.open_since is not None and file.at - session.open_since > line_limit(self._largest_trace):
            closed += session.close()
        return self._with_position(file, session, closed, descriptor)

    def _close(self, file: _File, session: AgentSession) -> list[Closed]:
        """Close the open requests of an idle file, and stop reading it. Raises OSError."""
        with _opened(file.path) as descriptor:
            if file.seen != _seen(os.fstat(descriptor)):
                return []  # the next poll reads it
            closed: list[Request] = []
            if rest := os.pread(descriptor, line_limit(self._largest_trace), file.at):
                with suppress(RunRefused):  # an incomplete line
                    closed += session.feed(rest, file.at)  # a last line without a line break
                    file.at += len(rest)
            closed += session.close()
            file.session = None
            # If none was answered, no position is kept: later lines are read together with them.
            return self._with_position(file, session, closed, descriptor)

    def _with_position(
        self, file: _File, session: AgentSession, closed: list[Request], descriptor: int
    ) -> list[Closed]:
        if file.published is not None:
            closed = [request for request in closed if request.first >= file.published.next]
        if not closed:
            return []
        since = session.open_since
        begin = file.at if since is None else since
        position = Position(_name(file.path), begin, _check(descriptor, begin), since is None)
        self._positions[position.file] = position
        positions = [NO_POSITION] * (len(closed) - 1) + [msgspec.json.encode(position)]
        return [Closed(request, file.path, raw) for request, raw in zip(closed, positions, strict=True)]

    def _warn(self, file: _File, what: str, kind: str = "") -> None:
        """Log a warning about a file, once for each kind of problem."""
        if (kind or what) not in file.warned:
            file.warned.add(kind or what)
            log.warning("%s %s", _shown(file.path), what)


def read_position(raw: bytes) -> Position | None:
    """Return a position; None if the bytes are none."""
    with suppress(msgspec.MsgspecError):
        return _position.decode(raw)
    return None


def _goes_on(file: _File, path: str) -> bool:
    """Return whether another path has the content that was read; the inode of a deleted file may be reused."""
    with suppress(OSError), _opened(path) as descriptor:
        return _fits(descriptor, os.fstat(descriptor).st_size, file.at, file.check)
    return False


@contextmanager
def _opened(path: str) -> Iterator[int]:
    """Open a file to read from. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not block
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _seen(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _check(descriptor: int, at: int) -> str:
    """Return a digest of the 256 bytes before a position: the end of a session line, with its ids and its time."""
    begin = max(0, at - 256)
    return sha256(os.pread(descriptor, at - begin, begin)).hexdigest()[:16]


def _fits(descriptor: int, size: int, at: int, check: str) -> bool:
    return size >= at and _check(descriptor, at) == check


def _name(path: str) -> str:
    return sha256(os.fsencode(os.path.basename(path))).hexdigest()[:16]


def _shown(path: str) -> str:
    """Return a path as text; its bytes may not be UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")

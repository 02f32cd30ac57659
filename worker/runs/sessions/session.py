"""A session, read line by line: which requests of the user are closed, and where an open one begins."""

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from hashlib import sha256
from itertools import islice
from typing import Any, Final, NamedTuple

from worker.runs.fields import Counts, RunRefused, as_time, fault, json_documents, shown
from worker.runs.messages import Message, Part, Reasoning, Role, Text, ToolCall, ToolResult
from worker.runs.sessions import claude_code, codex
from worker.runs.sessions.formats import GEMINI_CLI, OPENCODE, PI, Entry, Format, Outcome, Placed, text_at

FORMATS: Final[Mapping[str, Format]] = {
    each.name: each for each in (claude_code.FORMAT, codex.FORMAT, GEMINI_CLI, OPENCODE, PI)
}


@dataclass(frozen=True, slots=True)
class Request:
    """A closed request of the user, or the task of a sub-agent, with everything done about it. It never changes."""

    key: str  # the same whenever the request is read, and unique
    format: str
    facts: Mapping[str, str]
    """session, request, and, if the session says them, cwd, branch, model, version; for a sub-agent also subagent."""
    messages: tuple[Message, ...]  # the first is the request, if the session has it
    created_at: str | None
    success: bool | None
    """As the session says; otherwise whether the agent gave an answer; None: a line that may have it is unreadable."""
    summary: str | None
    counts: Counts
    first: int  # position of its first line
    last: int  # position of its last line

    @property
    def name(self) -> tuple[str, str]:
        """The session, and the request in it."""
        return _name(self.facts)

    @property
    def agent(self) -> str:
        """The name of the agent, followed by the sub-agent's, if any."""
        return "/".join(part for part in (self.format, self.facts.get("subagent")) if part)


@dataclass(slots=True, eq=False)
class _Cell:
    """A part of a message, which a later version replaces."""

    part: Part
    key: tuple[type[Part], str]  # the kind of the part, and the id of its message, or of its call


@dataclass(slots=True)
class _OpenRequest:
    """A request that is not closed."""

    facts: dict[str, str]
    first: int
    last: int
    created_at: str = ""
    numbered: bool = False  # it has no id but its number
    answered: bool = False
    unread: bool = False  # a part of a line behind the agent's last word could not be read
    skipped: int = 0  # how many lines of the session could not be read until then
    entries: dict[str, list[tuple[Role, list[_Cell]]]] = field(default_factory=dict)  # messages of a line, by its id
    outcome: Outcome | None = None
    counts: Counts = field(default_factory=Counts)
    is_closed: bool = False
    _cells: dict[tuple[type[Part], str], dict[_Cell, None]] = field(default_factory=dict)  # by key, in order

    def add(self, entry: Entry) -> None:
        """Add the messages of a line. A later version of a part takes the place of the earlier one."""
        name, new, replaced = entry.id or f"#{len(self.entries)}", list[tuple[Role, list[_Cell]]](), 0
        rewritten, added = entry.id in self.entries, list[_Cell]()
        self.counts.drop("lines that a later one replaces", rewritten)
        for _, cells in self.entries.get(name, ()):
            for cell in cells:
                self._cells.get(cell.key, {}).pop(cell, None)
        for message in entry.messages:
            cells, versions = list[_Cell](), dict[type[Part], Iterator[_Cell]]()
            for part in message.parts:
                # versions of a part are found by the id of its call, or of its message
                key = (type(part), part.call_id if isinstance(part, ToolCall | ToolResult) else entry.message)
                known = self._cells.setdefault(key, {})
                earlier = None
                if not rewritten and len(message.parts) > 1 and isinstance(part, Text | Reasoning):
                    # a line with the whole message so far
                    earlier = next(versions.setdefault(type(part), iter(known)), None)
                elif not rewritten:
                    last = list(islice(reversed(known), 100))  # a message has fewer, but a file may repeat an id
                    earlier = self._earlier(part, reversed(last))
                if earlier is not None:
                    replaced += 1
                    earlier.part = part
                    continue
                cells.append(_Cell(part, key))
                if key[1]:
                    added.append(cells[-1])
            if cells or message.parts == ():
                new.append((message.role, cells))
        self.counts.drop("parts that a later version replaces", replaced)
        self.entries[name] = new
        for cell in added:
            self._cells[cell.key][cell] = None

    def _earlier(self, part: Part, cells: Iterable[_Cell]) -> _Cell | None:
        """Return the first of some cells that has an earlier version of a part."""
        for cell in cells:
            known = cell.part
            if isinstance(part, ToolCall | ToolResult):
                is_open = isinstance(part, ToolCall) and not self._cells.get((ToolResult, part.call_id))
                if is_open or known == part:
                    return cell
            elif isinstance(known, Text | Reasoning):
                begin, whole = sorted((known.text.rstrip(" .\u2026\n"), part.text), key=len)
                if whole.startswith(begin):
                    return cell
        return None

    @property
    def messages(self) -> tuple[Message, ...]:
        lines = self.entries.values()
        return tuple(_message(role, cells) for line in lines for role, cells in line)

    def has_answer(self) -> bool:
        """Return whether the conversation ends with a text of the agent, not with a call or its result."""
        for message in reversed(self.messages):
            if message.role == "assistant":
                return bool(message.texts()) and not message.calls()
            if any(isinstance(part, ToolResult) for part in message.parts):
                return False
        return False


class _Spawn(NamedTuple):
    """A call that starts a sub-agent."""

    request: _OpenRequest
    call: str
    prompt: str
    name: str


class AgentSession:
    """The requests of one session, read from its lines in order.

    A request closes at the next one, and when the caller closes the session: at its end, or after some time without a
    line. Anything the agent says after that belongs to no request and is counted in `counts`. A sub-agent's run closes
    with the request that started it, or when the sub-agent is asked again.

    `form` None: it is recognised from the lines. `idle_seconds`: an answered request also closes if the next line is
    this much later by its own timestamp, as a caller closes it by the clock.
    """

    def __init__(self, form: Format | None = None, idle_seconds: float | None = None) -> None:
        self.format = form
        self.idle_seconds = idle_seconds
        self.counts = Counts()
        self._latest: datetime | None = None
        self._facts: dict[str, str] = {}
        self._requests = 0
        self._closed = False
        self._open: dict[str | None, _OpenRequest] = {}
        self._command: Entry | None = None
        self._roots: dict[str, str] = {}
        self._skipped = 0  # lines that cannot be read
        self._spawns: dict[tuple[str, str], deque[_Spawn]] = {}  # by ("call", id) and ("prompt", text)
        self._kept: list[Placed] = []  # of a format whose later lines take earlier ones back

    @property
    def open_since(self) -> int | None:
        """The position of the first line that is still needed; None if reading may continue after the last one."""
        firsts = [run.first for run in islice(self._open.values(), 1)]  # they are in the order of their first lines
        return min([*firsts, *(at for _, at in self._kept[:1])], default=None)

    @property
    def _is_revised(self) -> bool:
        return self.format is not None and self.format.revised is not None

    @property
    def open_names(self) -> set[tuple[str, str]]:
        """The names of the open requests."""
        return {_name(run.facts) for run in self._open.values()}

    def feed(self, line: bytes, at: int) -> list[Request]:
        """Read a line, and return the requests that it closes. `at`: its position; positions increase.

        Raises RunRefused for an unreadable line, which changes nothing: continue with the next one.
        """
        if not line.strip():
            return []
        values, problem = line_values(line)
        closed, taken = list[Request](), 0
        for value in values:
            try:
                closed += self.add(value, at)
                taken += 1
            except RunRefused as error:
                refused = error
        if problem is not None:
            self.skip(at)
        if not taken:
            raise problem or refused
        self.counts.drop("documents beside others on a line that cannot be read", taken < len(values) or bool(problem))
        return closed

    def skip(self, at: int) -> None:
        """Note that a line cannot be read: it may have had the answer."""
        if self._is_revised:
            self._kept.append((None, at))
        self._skipped += 1

    def add(self, value: Any, at: int) -> list[Request]:
        """Read the value of a line; like `feed`."""
        if not isinstance(value, dict):
            raise RunRefused("not_a_line", f"{shown(value)} is not a line of a session, and is skipped")
        if self.format is None:
            self.format = format_of(value)
        try:
            if self.format is None or not self._is_revised:
                return self._add_line(value, at)
            self._read(self.format, value, Counts())
        except RunRefused:
            self.skip(at)
            raise
        self._kept.append((value, at))
        return []

    def _add_line(self, value: dict[str, Any], at: int) -> list[Request]:
        if self.format is None:
            raise RunRefused("not_a_line", "no known agent writes such a line; it is skipped")
        counts = Counts()
        entry = self._read(self.format, value, counts)
        idle = self._close_after_pause(text_at(value, "timestamp"))
        # history copied from another session may include that one's header
        kept = frozenset() if entry.opens else self.format.of_header & self._facts.keys()
        facts = {name: fact for name, fact in entry.facts.items() if fact and name not in kept}
        entry = replace(entry, facts=facts, created_at=entry.created_at or text_at(value, "timestamp"))
        self._facts |= entry.facts if entry.run is None else {}
        if (entry.messages or entry.outcome or entry.opens) and self.format.leaves_out(value, self._facts):
            entry, counts = Entry(), Counts()
            counts.drop("lines of a sub-agent that are its parent's, or Codex's own")
        if not (entry.messages or entry.outcome or entry.opens):
            self.counts.dropped.update(counts.dropped)
            self._skipped += _is_in_part(counts)
            if (main := self._open.get(None)) is not None and not main.answered:
                main.facts |= entry.facts
            return idle
        return idle + self._add_entry(entry, at, counts)

    @staticmethod
    def _read(form: Format, value: Any, counts: Counts) -> Entry:
        """Return what a line says. Raises RunRefused, whatever is wrong."""
        try:
            return form.read(value, counts)
        except RunRefused:
            raise
        except Exception as error:
            raise fault(error) from error

    def _close_after_pause(self, timestamp: str) -> list[Request]:
        try:
            at = datetime.fromisoformat(as_time(timestamp))
        except ValueError:
            return []
        before = self._latest
        self._latest = at if before is None else max(before, at)
        if before is None or self.idle_seconds is None or (at - before).total_seconds() < self.idle_seconds:
            return []
        return self.close() if any(run.answered for run in self._open.values()) else []

    def close(self) -> list[Request]:
        """Close and return the open requests, because the session has ended or nothing came for a while."""
        closed, kept, self._kept = list[Request](), self._kept, []
        if self.format is not None and self.format.revised is not None:
            for value, at in self.format.revised(kept, self.counts):
                try:
                    closed += self._add_line(value, at)
                except RunRefused:
                    self.skip(at)
        self._leave_command()
        self._closed = True
        return closed + self._close_all()

    def _add_entry(self, entry: Entry, at: int, counts: Counts) -> list[Request]:
        if entry.opens in ("command", "local"):
            self._leave_command()
            if entry.opens == "command":
                self._command = entry
            return []
        closed: list[Request] = []
        run = entry.run
        if run == "":
            run = self._roots.get(entry.after) or entry.id
            self._roots[entry.id] = run
            entry = replace(entry, run=run)
        if run is None and entry.opens:
            self._leave_command()
        if run is None and self._command is not None and _acts(entry):
            command, self._command = self._command, None
            text = Message("user", (Text(command.messages[0].texts()),))
            closed += self._begin(None, Entry((text,), id=command.id, created_at=command.created_at), at)
        if entry.opens == "fork" and (inherited := self._open.pop(run, None)) is not None:
            inherited.is_closed = True
            self.counts.drop("requests that a fork has inherited")
        current = self._open.get(run)
        if entry.opens and not (current is not None and self._goes_on(current, entry)):
            return closed + self._begin(run, entry, at, counts)
        if entry.opens and current is not None and entry.messages and _is_repeated(entry, current):
            current.counts.drop("repeated requests")
            return closed
        if current is None:
            # a run may begin without a text of the user: a file may lack it, or a call has it
            known = not self._closed if run is None else self._spawn("call", run) is not None
            if not (known and _acts(entry)):
                self.counts.drop("lines that belong to no open request")
                return closed
            closed += self._begin(run, Entry(run=run), at)
            current = self._open[run]
        self._add(current, entry, at, counts)
        return closed

    def _goes_on(self, current: _OpenRequest, entry: Entry) -> bool:
        """Return whether a request belongs to the open one: nothing is answered yet, or the agent is still at work."""
        if entry.opens == "start":
            return current.outcome is None and entry.facts.get("session") == current.facts.get("session")
        return self._request_of(entry) == current.facts["request"] or not (current.answered or current.outcome)

    def _leave_command(self) -> None:
        self.counts.drop("commands that the agent did not act on", self._command is not None)
        self._command = None

    def _request_of(self, entry: Entry) -> str:
        return entry.id or entry.run or self._facts.get("turn", "")

    def _begin(self, run: str | None, entry: Entry, at: int, counts: Counts | None = None) -> list[Request]:
        """Open a request, and return those that it closes: the one before, with its sub-agents' runs."""
        closed = self._close_all() if run is None else self._close_run(run)
        self._requests += 1
        self._closed = False
        name = self._request_of(entry)
        facts = dict(self._facts) | {"request": name or str(self._requests)}
        prompt = entry.messages[0].texts() if entry.messages else None
        spawn = None if run is None else self._spawn("call", run) or (prompt and self._spawn("prompt", prompt)) or None
        request = self._open[run] = _OpenRequest(facts, at, at, numbered=not name, skipped=self._skipped)
        self._add(request, entry, at, counts or Counts())
        if run is not None:
            facts.setdefault("subagent", "agent")
        if spawn is not None:
            facts["subagent"] = spawn.name or facts["subagent"]
            if prompt is None:
                request.entries[spawn.call] = [("user", [_Cell(Text(spawn.prompt), (Text, ""))])]
        return closed

    def _spawn(self, kind: str, key: str) -> _Spawn | None:
        """Return the first call of an open request that starts a sub-agent, by its id or its prompt."""
        spawns = self._spawns.get((kind, key), deque())
        while spawns and spawns[0].request.is_closed:
            spawns.popleft()
        return spawns[0] if spawns else None

    def _add(self, run: _OpenRequest, entry: Entry, at: int, counts: Counts) -> None:
        run.last = at
        run.add(entry)
        run.counts.dropped.update(counts.dropped)
        try:
            run.created_at = as_time(entry.created_at) if entry.created_at else run.created_at
        except ValueError:
            run.counts.drop("invalid timestamps")
        run.facts |= entry.facts
        run.answered |= _acts(entry)
        if _acts(entry):
            run.unread, run.skipped = False, self._skipped
        run.unread |= _is_in_part(counts)
        for call, (prompt, name) in entry.spawns.items():
            spawn = _Spawn(run, call, prompt, name)
            self._spawns.setdefault(("call", call), deque()).append(spawn)
            self._spawns.setdefault(("prompt", prompt), deque()).append(spawn)
        if entry.outcome is not None or _acts(entry):
            run.outcome = entry.outcome

    def _close_all(self) -> list[Request]:
        self._roots.clear()
        self._spawns.clear()
        return [request for run in sorted(self._open, key=lambda key: key is None) for request in self._close_run(run)]

    def _close_run(self, run: str | None) -> list[Request]:
        request = self._open.pop(run, None)
        if request is None:
            return []
        request.is_closed = True
        if not request.answered:
            self.counts.drop("requests that the agent did not answer")
            self.counts.dropped.update(request.counts.dropped)
            return []
        form = "" if self.format is None else self.format.name
        outcome = request.outcome or Outcome(
            request.has_answer() or (None if request.unread or self._skipped > request.skipped else False)
        )
        return [
            Request(
                key=_key(form, request), format=form,
                facts={name: fact for name, fact in request.facts.items() if name not in ("turn", "since", "ordinal")},
                messages=request.messages, created_at=request.created_at or None, success=outcome.success,
                summary=outcome.summary, counts=request.counts, first=request.first, last=request.last,
            )
        ]  # fmt: skip


def _message(role: Role, cells: Iterable[_Cell]) -> Message:
    return Message(role, tuple(cell.part for cell in cells))


def _is_repeated(entry: Entry, request: _OpenRequest) -> bool:
    """Return whether a request repeats the words of the latest line; white space may differ."""
    (role, cells), *more = next(reversed(request.entries.values())) or [("tool", [])]
    latest = _message(role, cells).texts()
    return role == "user" and not more and "".join(latest.split()) == "".join(entry.messages[0].texts().split())


def _acts(entry: Entry) -> bool:
    """Return whether the agent itself says or calls something."""
    return any(
        isinstance(part, ToolCall) or part.text.strip()
        for message in entry.messages if message.role == "assistant" for part in message.parts
    )  # fmt: skip


def _name(facts: Mapping[str, str]) -> tuple[str, str]:
    return facts.get("session", ""), facts["request"]


def _key(form: str, run: _OpenRequest) -> str:
    """Return the key of a request: its id if that is unique (a UUID, or begun by its time), else with the session's.

    A number is not enough: what an agent prints for each request of a session is numbered from 1 each time.
    """
    session, request = _name(run.facts)
    if run.numbered:
        entry = json.dumps([run.created_at, repr(run.messages)])
        return f"{form}/{session}/{request}/{sha256(entry.encode()).hexdigest()}"
    is_unique = re.fullmatch(r"(?i)[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|\d{4}-\d\d-\d\dT.*", request)
    return f"{form}/{request}" if is_unique else f"{form}/{session}/{request}"


def _is_in_part(counts: Counts) -> bool:
    return "parts of other types" in counts.dropped


def line_values(line: bytes) -> tuple[list[Any], RunRefused | None]:
    """Return the values of a line, most often one, and the problem with the first that cannot be read.

    Half of a surrogate pair, left by truncation, becomes "?".
    """
    values, problem = json_documents(line)
    if b"\\u" in line:
        values = json.loads(json.dumps(values, ensure_ascii=False).encode("utf-8", "replace"))
    return values, None if problem is None else RunRefused("not_json", f"{problem}; the line is skipped")


def format_of(value: Any) -> Format | None:
    """Return the format of a line, or of a document that holds a session; None if it is neither."""
    if not isinstance(value, dict):
        return None
    return next((each for each in FORMATS.values() if each.knows(value) or each.lines(value) is not None), None)

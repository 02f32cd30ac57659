"""A session, read line by line: which requests of the user are closed, and where an open one begins."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from hashlib import sha256
from typing import Any, Final

from worker.runs.fields import Counts, RunRefused, as_time, fault, json_documents, shown
from worker.runs.messages import Message, Part, Reasoning, Text, ToolCall, ToolResult
from worker.runs.sessions import claude_code, codex
from worker.runs.sessions.formats import GEMINI_CLI, OPENCODE, PI, Format, Outcome, Placed, Said, text_at

FORMATS: Final[Mapping[str, Format]] = {
    each.name: each for each in (claude_code.FORMAT, codex.FORMAT, GEMINI_CLI, OPENCODE, PI)
}

_UNIQUE: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|\d{4}-\d\d-\d\dT.*", re.IGNORECASE)
"""An id that is globally unique and survives copying: a UUID, or an id that begins with its time."""


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


_Place = tuple[str, int, int]
"""A line's id, and the numbers of a message in it and of a part in that."""


@dataclass(slots=True)
class _Open:
    """A request that is not closed."""

    facts: dict[str, str]
    first: int
    last: int
    created_at: str = ""
    numbered: bool = False  # it has no id but its number
    answered: bool = False
    unread: bool = False  # something behind the agent's last word could not be read
    said: dict[str, tuple[Message, ...]] = field(default_factory=dict)  # by line id
    outcome: Outcome | None = None
    counts: Counts = field(default_factory=Counts)
    spawns: dict[str, tuple[str, str]] = field(default_factory=dict)  # as in Said
    _places: dict[tuple[str, str], list[_Place]] = field(default_factory=dict)
    """By the kind of a part and the id of its message, or of its call: where it is in `said`."""

    def say(self, said: Said) -> None:
        """Add the messages of a line. A later version of a part takes the place of the earlier one."""
        name, new = said.id or f"#{len(self.said)}", list[Message]()
        versions = said.id not in self.said
        self.counts.drop("lines that a later one replaces", not versions)
        replaced = 0
        for message in said.messages:
            parts = list[Part]()
            seen = Counter[str]()
            for part in message.parts:
                kind = type(part).__name__
                place = self._earlier(said, message, part, seen[kind]) if versions else None
                seen[kind] += 1
                if place is None:
                    call = part.call_id if isinstance(part, ToolCall | ToolResult) else said.message
                    if call:
                        self._places.setdefault((kind, call), []).append((name, len(new), len(parts)))
                    parts.append(part)
                else:
                    replaced += 1
                    self._put(place, part)
            if parts or message.parts == ():
                new.append(Message(message.role, tuple(parts)))
        self.counts.drop("parts that a later version replaces", replaced)
        self.said[name] = tuple(new)

    def _earlier(self, said: Said, message: Message, part: Part, number: int) -> _Place | None:
        """Return where an earlier version of a part is. `number`: its place among its line's parts of this kind."""
        call = part.call_id if isinstance(part, ToolCall | ToolResult) else said.message
        places = self._places.get((type(part).__name__, call), [])
        latest = places[-100:]  # far more than a message has, but a file may repeat an id without end
        if isinstance(part, ToolCall | ToolResult):
            answered = isinstance(part, ToolResult) or ("ToolResult", part.call_id) in self._places
            for place in latest:
                known = self._at(place)
                if known == part or (known is not None and not answered):
                    return place
            return None
        if len(message.parts) > 1:  # a line with the whole message so far
            there = [place for place in places if self._at(place) is not None]
            return there[number] if number < len(there) else None
        for place in latest:
            known = self._at(place)
            if isinstance(known, Text | Reasoning):
                begin, whole = sorted((known.text.rstrip(" .\u2026\n"), part.text), key=len)
                if whole.startswith(begin):
                    return place
        return None

    def _at(self, place: _Place) -> Part | None:
        name, message, part = place
        try:
            return self.said[name][message].parts[part]
        except LookupError:
            return None

    def _put(self, place: _Place, part: Part) -> None:
        name, number, index = place
        messages = list(self.said[name])
        parts = messages[number].parts
        messages[number] = replace(messages[number], parts=(*parts[:index], part, *parts[index + 1 :]))
        self.said[name] = tuple(messages)

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(message for messages in self.said.values() for message in messages)

    def has_answer(self) -> bool:
        """Return whether the conversation ends with a text of the agent, not with a call or its result."""
        for message in reversed(self.messages):
            if message.role == "assistant":
                return bool(message.texts()) and not message.calls()
            if any(isinstance(part, ToolResult) for part in message.parts):
                return False
        return False


class Session:
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
        self._open: dict[str | None, _Open] = {}
        self._command: dict[str, str] = {}
        self._roots: dict[str, str] = {}
        self._kept: list[Placed] = []  # of a format whose later lines take earlier ones back

    @property
    def open_since(self) -> int | None:
        """The position of the first line that is still needed; None if reading may continue after the last one."""
        firsts = [run.first for run in self._open.values()]
        if self.format is not None and self.format.revised is not None:
            firsts += [at for _, at in self._kept[:1]]
        return min(firsts, default=None)

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
        self._kept.append((None, at))
        for run in self._open.values():
            run.unread = True

    def add(self, value: Any, at: int) -> list[Request]:
        """Read the value of a line; like `feed`."""
        if not isinstance(value, dict):
            raise RunRefused("not_a_line", f"{shown(value)} is not a line of a session, and is skipped")
        if self.format is None:
            self.format = format_of(value)
        try:
            if self.format is None or self.format.revised is None:
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
        said = self._read(self.format, value, counts)
        idle = self._close_after_pause(text_at(value, "timestamp"))
        if said is not None:
            # history copied from another session may include that one's header
            kept = () if said.opens else self.format.of_header
            facts = {
                name: fact for name, fact in said.facts.items() if fact and not (name in kept and self._facts.get(name))
            }
            said = replace(said, facts=facts)
            self._facts |= said.facts if said.run is None else {}
            if (said.messages or said.outcome or said.opens) and self.format.leaves_out(value, self._facts):
                said, counts = Said(), Counts()
                counts.drop("lines of a sub-agent that are its parent's, or Codex's own")
        if said is None or not (said.messages or said.outcome or said.opens):
            self.counts.dropped.update(counts.dropped)
            main = self._open.get(None)
            for run in self._open.values():
                run.unread |= _is_in_part(counts)
            if said is not None and main is not None and not main.answered:
                main.facts |= said.facts
            return idle
        return idle + self._take(said, at, counts)

    @staticmethod
    def _read(form: Format, value: Any, counts: Counts) -> Said | None:
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

    def _take(self, said: Said, at: int, counts: Counts) -> list[Request]:
        if said.opens in ("command", "local"):
            self._leave_command()
            if said.opens == "command":
                self._command = {"text": said.messages[0].texts(), "id": said.id, "created_at": said.created_at}
            return []
        closed: list[Request] = []
        run = said.run
        if run == "":
            run = self._roots.get(said.after) or said.id
            self._roots[said.id] = run
            said = replace(said, run=run)
        if run is None and said.opens:
            self._leave_command()
        if run is None and self._command and _acts(said):
            text = Message("user", (Text(self._command["text"]),))
            asked = Said((text,), id=self._command["id"], created_at=self._command["created_at"])
            self._command = {}
            closed += self._begin(None, asked, at)
        if said.opens == "fork" and self._open.pop(run, None) is not None:
            self.counts.drop("requests that a fork has inherited")
        found = self._open.get(run)
        if said.opens and not (found is not None and self._goes_on(found, said)):
            return closed + self._begin(run, said, at, counts)
        if said.opens and found is not None and said.messages and _is_repeated(said, found):
            found.counts.drop("repeated requests")
            return closed
        if found is None:
            # a run may begin without a text of the user: a file may lack it, or a call has it
            known = not self._closed if run is None else any(run in each.spawns for each in self._open.values())
            if not (known and _acts(said)):
                self.counts.drop("lines that belong to no open request")
                return closed
            closed += self._begin(run, Said(run=run), at)
            found = self._open[run]
        self._add(found, said, at, counts)
        return closed

    def _goes_on(self, found: _Open, said: Said) -> bool:
        """Return whether a request belongs to the open one: nothing is answered yet, or the agent is still at work."""
        if said.opens == "start":
            return found.outcome is None and said.facts.get("session") == found.facts.get("session")
        return self._request_of(said) == found.facts["request"] or not (found.answered or found.outcome)

    def _leave_command(self) -> None:
        self.counts.drop("commands that the agent did not act on", bool(self._command))
        self._command = {}

    def _request_of(self, said: Said) -> str:
        return said.id or said.run or self._facts.get("turn", "")

    def _begin(self, run: str | None, said: Said, at: int, counts: Counts | None = None) -> list[Request]:
        """Open a request, and return those that it closes: the one before, with its sub-agents' runs."""
        closed = self._close_all() if run is None else self._close_run(run)
        spawns = {call: spawn for found in self._open.values() for call, spawn in found.spawns.items()}
        self._requests += 1
        self._closed = False
        name = self._request_of(said)
        facts = dict(self._facts) | {"request": name or str(self._requests)}
        found = self._open[run] = _Open(facts, at, at, numbered=not name)
        self._add(found, said, at, counts or Counts())
        if run is not None:
            facts.setdefault("subagent", "agent")
            for call, (prompt, name) in spawns.items():
                if call == run or (said.messages and said.messages[0].texts() == prompt):
                    facts["subagent"] = name or facts["subagent"]
                    if not said.messages:
                        found.said[call] = (Message("user", (Text(prompt),)),)
                    break
        return closed

    def _add(self, run: _Open, said: Said, at: int, counts: Counts) -> None:
        run.last = at
        run.say(said)
        run.counts.dropped.update(counts.dropped)
        try:
            run.created_at = as_time(said.created_at) if said.created_at else run.created_at
        except ValueError:
            run.counts.drop("invalid timestamps")
        run.facts |= said.facts
        run.answered |= _acts(said)
        run.unread = _is_in_part(counts) or (run.unread and not _acts(said))
        run.spawns.update(said.spawns)
        if said.outcome is not None or _acts(said):
            run.outcome = said.outcome

    def _close_all(self) -> list[Request]:
        self._roots.clear()
        return [request for run in sorted(self._open, key=lambda key: key is None) for request in self._close_run(run)]

    def _close_run(self, run: str | None) -> list[Request]:
        found = self._open.pop(run, None)
        if found is None:
            return []
        if not found.answered:
            self.counts.drop("requests that the agent did not answer")
            self.counts.dropped.update(found.counts.dropped)
            return []
        form = "" if self.format is None else self.format.name
        outcome = found.outcome or Outcome(found.has_answer() or (None if found.unread else False))
        return [
            Request(
                key=_key(form, found), format=form,
                facts={name: fact for name, fact in found.facts.items() if name not in ("turn", "since", "ordinal")},
                messages=found.messages, created_at=found.created_at or None, success=outcome.success,
                summary=outcome.summary, counts=found.counts, first=found.first, last=found.last,
            )
        ]  # fmt: skip


def _is_repeated(said: Said, run: _Open) -> bool:
    """Return whether a request repeats the words that were said last; white space may differ."""
    last = next(reversed(run.said.values()))
    if len(last) != 1 or last[0].role != "user":
        return False
    return "".join(last[0].texts().split()) == "".join(said.messages[0].texts().split())


def _acts(said: Said) -> bool:
    """Return whether the agent itself says or calls something."""
    return any(
        isinstance(part, ToolCall) or part.text.strip()
        for message in said.messages if message.role == "assistant" for part in message.parts
    )  # fmt: skip


def _name(facts: Mapping[str, str]) -> tuple[str, str]:
    return facts.get("session", ""), facts["request"]


def _key(form: str, run: _Open) -> str:
    """Return the key of a request: its id if that is globally unique, else combined with the session's.

    A number is not enough: what an agent prints for each request of a session is numbered from 1 each time.
    """
    session, request = _name(run.facts)
    if run.numbered:
        said = json.dumps([run.created_at, repr(run.messages)])
        return f"{form}/{session}/{request}/{sha256(said.encode()).hexdigest()}"
    return f"{form}/{request}" if _UNIQUE.fullmatch(request) else f"{form}/{session}/{request}"


def _is_in_part(counts: Counts) -> bool:
    return bool(counts.dropped.keys() & {"blocks of other types", "parts of other types"})


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

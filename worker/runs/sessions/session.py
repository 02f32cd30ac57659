"""A session, read line by line: which requests of the user are closed, and where an open one begins."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from hashlib import sha256
from typing import Any, Final

from worker.runs.fields import Counts, RunRefused, as_time, fault, parse_json, shown
from worker.runs.messages import Message, Text, ToolCall, ToolResult
from worker.runs.sessions import claude_code, codex
from worker.runs.sessions.formats import GEMINI_CLI, OPENCODE, PI, Format, Outcome, Said, text_at

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
    success: bool  # as the session says; otherwise whether the agent gave an answer
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


@dataclass(slots=True)
class _Open:
    """A request that is not closed."""

    facts: dict[str, str]
    first: int
    last: int
    created_at: str = ""
    numbered: bool = False  # it has no id but its number
    answered: bool = False
    said: dict[str, tuple[Message, ...]] = field(default_factory=dict)  # by line id
    outcome: Outcome | None = None
    counts: Counts = field(default_factory=Counts)
    spawns: dict[str, tuple[str, str]] = field(default_factory=dict)  # as in Said

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

    @property
    def open_since(self) -> int | None:
        """The position of the first line that is still needed; None if reading may continue after the last one."""
        return min((run.first for run in self._open.values()), default=None)

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
        return self.add(line_value(line), at)

    def add(self, value: Any, at: int) -> list[Request]:
        """Read the value of a line; like `feed`."""
        if not isinstance(value, dict):
            raise RunRefused("not_a_line", f"{shown(value)} is not a line of a session, and is skipped")
        if self.format is None:
            self.format = format_of(value)
            if self.format is None:
                raise RunRefused("not_a_line", "no known agent writes such a line; it is skipped")
        counts = Counts()
        try:
            said = self.format.read(value, counts)
        except RunRefused:
            raise
        except Exception as error:
            raise fault(error) from error
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
            if said is not None and main is not None and not main.answered:
                main.facts |= said.facts
            return idle
        return idle + self._take(said, at, counts)

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
        self._leave_command()
        self._closed = True
        return self._close_all()

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
        if said.id in run.said:
            run.counts.drop("lines that a later one replaces")
        run.said[said.id or f"#{len(run.said)}"] = said.messages
        run.counts.dropped.update(counts.dropped)
        try:
            run.created_at = as_time(said.created_at) if said.created_at else run.created_at
        except ValueError:
            run.counts.drop("invalid timestamps")
        run.facts |= said.facts
        run.answered |= _acts(said)
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
        outcome = found.outcome or Outcome(found.has_answer())
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


def line_value(line: bytes) -> Any:
    """Return the value of a line. Raises RunRefused. Half of a surrogate pair, left by truncation, becomes "?"."""
    try:
        value = parse_json(line)
        if b"\\u" in line:
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise RunRefused("not_json", f"{error}; the line is skipped") from None
    return value


def format_of(value: Any) -> Format | None:
    """Return the format of a line, or of a document that holds a session; None if it is neither."""
    if not isinstance(value, dict):
        return None
    return next((each for each in FORMATS.values() if each.knows(value) or each.lines(value) is not None), None)

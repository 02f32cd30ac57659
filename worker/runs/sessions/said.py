"""The meaning of one line of a session, for every coding agent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from worker.runs.fields import Counts
from worker.runs.messages import Message

Opens = Literal["", "request", "start", "command", "local", "fork"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended, as far as the session says."""

    success: bool
    summary: str | None = None  # None: the session does not say


@dataclass(frozen=True, slots=True)
class Said:
    """What a line says of the conversation."""

    messages: tuple[Message, ...] = ()
    opens: Opens = ""
    """As "request": the first message is a request of the user. "start": one begins unless one is open. "command": it
    is a request if the agent goes on after it. "local": the command before it ran without the agent. "fork": the open
    request is the task of a fork, which begins with its inheritance. Two equal requests in a row are one; a request in
    the same turn (a fact) as the open one belongs to it."""
    run: str | None = None  # None: the session's own agent; else a sub-agent's id, empty if only `after` identifies it
    after: str = ""  # id of the line before
    id: str = ""  # of the line; a later line with it replaces this one within the request
    created_at: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)  # of the session; they hold for later lines, too
    outcome: Outcome | None = None
    spawns: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """By call id: prompt and name of the sub-agent that the call starts."""


def text_at(value: Mapping[str, Any], name: str) -> str:
    """Return a string field, "" if it is absent or something else."""
    found = value.get(name)
    return found if isinstance(found, str) else ""


@dataclass(frozen=True, slots=True)
class Format:
    """How the sessions of one agent are read."""

    name: str  # for --from; also framework and agent of its traces
    knows: Callable[[Mapping[str, Any]], bool]  # whether an object is a line of such a session
    read: Callable[[Mapping[str, Any], Counts], Said | None]
    """What a line says, None if nothing; counts what it leaves out, raises RunRefused."""
    lines: Callable[[Mapping[str, Any]], Iterable[Any] | None] = lambda document: None
    """Of a session that is one document."""
    of_header: frozenset[str] = frozenset()  # facts whose first value counts, because a header may repeat
    leaves_out: Callable[[Mapping[str, Any], Mapping[str, str]], bool] = lambda line, facts: False
    """Whether a line belongs to no request, by the facts."""

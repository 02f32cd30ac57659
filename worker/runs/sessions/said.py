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
    """The contribution of a line to the conversation."""

    messages: tuple[Message, ...] = ()
    opens: Opens = ""
    """What the line opens.

    - "request": the first message is a request of the user. A request that occurs twice in a row is one, and a request
      in the same turn (a fact) as the open one belongs to that.
    - "start": a request begins, unless one is open.
    - "command": a request, as soon as the agent acts on it.
    - "local": nothing, and the command before it was no request, since it ran without the agent.
    - "fork": the task of a fork, which begins with inherited lines: what is open is not this agent's.
    """
    run: str | None = None
    """None: the session's own agent; otherwise a sub-agent's id, or "" for a sub-agent identified by `after`."""
    after: str = ""  # id of the line before
    id: str = ""  # of the line; a line replaces an earlier one of its request with the same id
    created_at: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)  # of the session; later lines share them
    outcome: Outcome | None = None
    spawns: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Calls that start a sub-agent, by call id: its prompt and its name."""


def text_at(value: Mapping[str, Any], name: str) -> str:
    """Return a string field, "" if it is absent or something else."""
    found = value.get(name)
    return found if isinstance(found, str) else ""


@dataclass(frozen=True, slots=True)
class Format:
    """How the sessions of one agent are read."""

    name: str  # as in --from; also the framework and the agent of its traces
    knows: Callable[[Mapping[str, Any]], bool]  # whether an object is a line of such a session
    read: Callable[[Mapping[str, Any], Counts], Said | None]
    """Reads a line; returns None if it adds nothing to the conversation. Counts what it drops. Raises RunRefused."""
    lines: Callable[[Mapping[str, Any]], Iterable[Any] | None] = lambda document: None
    """Returns the lines of a session that is one document."""
    of_header: frozenset[str] = frozenset()  # facts whose first value counts, because a header may be repeated
    leaves_out: Callable[[Mapping[str, Any], Mapping[str, str]], bool] = lambda line, facts: False
    """Returns whether a line belongs to no request, given the facts."""

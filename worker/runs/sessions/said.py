"""What one line of a session says, whichever agent has written it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from worker.runs.fields import Counts
from worker.runs.messages import Message

Opens = Literal["", "request", "start", "command", "local", "fork"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended, as far as the session says. `summary` is None where it does not say what came of it."""

    success: bool
    summary: str | None = None


@dataclass(frozen=True, slots=True)
class Said:
    """What a line says of the conversation.

    `opens`: "request" if the first message is a request of the user, "start" if one begins unless one is under way,
    "command" if it is a request as soon as the agent goes on after it, "local" if the command before it was none,
    since it ran without the agent, "fork" if what is open is not this agent's: the task of a fork, which begins with
    what it has inherited. A request that is there twice, one after the other, is one; one in the same turn (a fact) as
    the open request belongs to that.
    `run`: None for the session's own agent, a sub-agent's id for a sub-agent; "" for one that is known by `after`, the
    id of the line before. `id`: of the line; a line of the same id replaces an earlier one of its request. `facts`: of
    the session, which later lines share. `spawns`: of calls that start a sub-agent, its prompt and its name, by the
    call's id.
    """

    messages: tuple[Message, ...] = ()
    opens: Opens = ""
    run: str | None = None
    after: str = ""
    id: str = ""
    created_at: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    outcome: Outcome | None = None
    spawns: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def text_at(value: Mapping[str, Any], name: str) -> str:
    """Return a field that is a text, "" where it is absent or something else."""
    found = value.get(name)
    return found if isinstance(found, str) else ""


@dataclass(frozen=True, slots=True)
class Format:
    """How the sessions of one agent are read.

    `name`: as of --from; it is also the framework and the agent of its traces. `knows`: whether an object is a line of
    such a session. `read`: what a line says, None where it has no part in the conversation; it counts what it leaves
    out, and raises RunRefused. `lines`: those of a session that is one document. `of_header`: facts of which the first
    counts, because a header may come again. `leaves_out`: whether a line belongs to no request, by the facts.
    """

    name: str
    knows: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Mapping[str, Any], Counts], Said | None]
    lines: Callable[[Mapping[str, Any]], Iterable[Any] | None] = lambda document: None
    of_header: frozenset[str] = frozenset()
    leaves_out: Callable[[Mapping[str, Any], Mapping[str, str]], bool] = lambda line, facts: False

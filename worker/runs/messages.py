"""Messages between a user, a model and its tools, into which all logs are read, and the steps that they become."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from worker.runs.fields import Counts, FieldPath, parse_json, says_error

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Text:
    """A text for the recipient of the message."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning of the model, separate from its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: Any  # an object, or its JSON text
    call_id: str = ""  # "": the log has none


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a tool call, as text."""

    text: str
    call_id: str = ""  # "": the log has none
    name: str = ""  # of the tool; "": the log has none
    is_error: bool = False


Part: TypeAlias = Text | Reasoning | ToolCall | ToolResult


@dataclass(frozen=True, slots=True)
class Message:
    """A message: its sender, and its parts in order. Tool results may also come in a message of the user."""

    role: Role
    parts: tuple[Part, ...]

    def texts(self) -> str:
        """Return its texts, joined by line breaks."""
        return joined([part.text for part in self.parts if isinstance(part, Text)])

    def calls(self) -> list[ToolCall]:
        """Return its tool calls."""
        return [part for part in self.parts if isinstance(part, ToolCall)]


def joined(texts: Sequence[str]) -> str:
    """Join texts with line breaks; empty ones are omitted."""
    return "\n".join(text for text in texts if text)


def as_text(value: Any) -> str:
    """Return a JSON value as text: a string unchanged, "" for null, anything else as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False, default=repr)


@dataclass(slots=True)
class Transcript:
    """A run as it is read, part by part, in order."""

    error_prefixes: tuple[str, ...] = ()  # a result that begins with one of them is an error
    max_content: int | None = None  # characters at which contents are cut; None: never
    given: frozenset[str] = frozenset()  # what the user gives beside the run, such as created_at
    objective: str | None = None  # unless set before: the first text of the user
    framework: str | None = None
    agent: str | None = None
    success: bool | None = None
    created_at: str | None = None
    last_text: str | None = None  # of the agent
    used: set[FieldPath] = field(default_factory=set)  # paths of the run's fields that were read
    counts: Counts = field(default_factory=Counts)
    steps: list[dict[str, Any]] = field(default_factory=list)
    _errors: list[int] = field(default_factory=list)  # steps that are failed results
    _waiting: Counter[tuple[str | None, str]] = field(default_factory=Counter)  # calls without a result: (id, name)
    _last_action: int = -1  # the agent's last step

    def add(self, message: Message) -> None:
        """Add a message, part by part; system messages have no place in a trace."""
        for part in message.parts:
            if isinstance(part, ToolResult):
                self.add_result(part.text, part.call_id or None, part.name, is_error=part.is_error)
            elif isinstance(part, ToolCall):
                self.add_call(part.name, part.arguments, part.call_id or None)
            elif message.role == "user":
                self.add_user(part.text)
            elif message.role == "assistant":
                self.add_thought(part.text)

    def add_user(self, text: str) -> None:
        """Add a text of the user: the objective, or an observation."""
        if not self._is_blank(text):
            if self.objective is None:
                self.objective = text
            else:
                self._add("observation", text)

    def add_thought(self, text: str) -> None:
        """Add a text of the agent."""
        if not self._is_blank(text):
            self._last_action = len(self.steps)
            self.last_text = text
            self._add("thought", text)

    def add_call(self, name: str, arguments: Any, call_id: str | None, latency_ms: float | None = None) -> None:
        """Add a tool call. `arguments`: an object, or its JSON; anything else is kept under the name `arguments`."""
        if isinstance(arguments, str):
            arguments = self._parsed(arguments)
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            self.counts.change("arguments that are not JSON objects, kept as input.arguments")
            arguments = {"arguments": arguments}
        self._waiting[call_id, "" if call_id else name] += 1
        self._last_action = len(self.steps)
        latency = {} if latency_ms is None else {"latency_ms": latency_ms}
        self._add("tool_call", None, call_id, tool={"name": name}, input=arguments, **latency)

    def add_result(self, text: str, call_id: str | None, name: str = "", *, is_error: bool) -> None:
        """Add a tool's result: an observation, or an error_recovery if it is an error and the agent continues."""
        if not call_id and not name and self._waiting.total() == 1:  # it belongs to the lone call before it
            call_id, name = next(iter(self._waiting.elements()))
        key = (call_id, "" if call_id else name)
        if self._waiting[key]:
            self._waiting[key] -= 1
        elif call_id or name:
            self.counts.change("results without a call, kept as observations")
            self.counts.drop("names of results without a call", 0 if call_id else 1)
        if is_error or text.startswith(self.error_prefixes) or says_error(text):
            self._errors.append(len(self.steps))
        self._add("observation", text, call_id)

    def finish(self, *, answered: bool = False) -> None:
        """Decide what only the end of the run shows: after which errors the agent continued.

        `answered`: the agent gave a final answer that is not a step.
        """
        for index in self._errors:
            if answered or index < self._last_action:
                self.steps[index]["type"] = "error_recovery"
        if without := self._waiting.total():
            self.counts.change("tool calls without a result", without)
        self.counts.steps.update(step["type"] for step in self.steps)

    def _add(self, kind: str, content: str | None, call_id: str | None = None, **more: Any) -> None:
        step: dict[str, Any] = {"step_id": len(self.steps), "type": kind}
        if content is not None:
            step["content"] = self._cut(content)
        step |= more
        if call_id:
            step["tool_call_id"] = call_id
        self.steps.append(step)

    def _is_blank(self, text: str) -> bool:
        if text and not text.strip():
            self.counts.drop("blank texts")
        return not text.strip()

    def _cut(self, text: str) -> str:
        most = self.max_content
        if most is None or len(text) <= most:
            return text
        self.counts.change("step contents cut by --max-content")
        self.counts.change("characters cut by --max-content", len(text) - most)
        return text[:most]

    def _parsed(self, arguments: str) -> Any:
        if not arguments.strip():
            return None
        try:
            value = parse_json(arguments)
            json.dumps(value, ensure_ascii=False).encode()
        except ValueError:  # also half of a surrogate pair, written as an escape
            return arguments
        return value

"""Messages between a user, a model and its tools: the common form into which all logs are read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

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

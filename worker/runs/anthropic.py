"""Messages of Anthropic's Messages API: content blocks, with thinking, tool_use and tool_result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from worker.runs.chat import MEDIA_PARTS, part_type_of
from worker.runs.fields import Counts, RunRefused, count_unread, shown, text_field
from worker.runs.messages import Message, Part, Reasoning, Role, Text, ToolCall, ToolResult, as_text

BLOCKS: Final = frozenset(
    {"thinking", "redacted_thinking", "tool_use", "tool_result", "server_tool_use", "mcp_tool_use"}
)
"""Block types that occur in no other form."""

_ROLES: Final[dict[str, Role]] = {"user": "user", "assistant": "assistant", "system": "system"}

_USES: Final = ("tool_use", "server_tool_use", "mcp_tool_use")

_LEFT_OUT: Final = frozenset({*MEDIA_PARTS, "redacted_thinking", "document", "search_result", "container_upload"})
"""Block types without text for a trace."""

_OF_RESPONSE: Final = {"id", "type", "role", "content", "model", "stop_reason", "stop_sequence", "usage", "container"}
"""Fields of a message that is a response."""


def anthropic_messages(messages: list[Any], counts: Counts, place: str = "messages") -> Iterator[Message]:
    """Yield the messages of a list. Raises RunRefused, with the place."""
    for number, message in enumerate(messages):
        where = f"{place}.{number}"
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or role not in _ROLES:
            raise RunRefused("not_a_run", f"{where}: role {shown(role)} is not one of {', '.join(_ROLES)}")
        if role == "system":
            counts.drop("system messages")
        yield Message(_ROLES[role], tuple(parts_of(message.get("content"), f"{where}.content", role, counts)))
        count_unread(message, _OF_RESPONSE if message.get("type") == "message" else {"role", "content"}, "messages[].",
                     counts)  # fmt: skip


def parts_of(content: Any, place: str, role: str, counts: Counts) -> Iterator[Part]:
    """Yield the parts of a message's content: a string, or a list of blocks. Raises RunRefused, with the place."""
    if content is None or isinstance(content, str):
        yield Text(content or "")
        return
    if not isinstance(content, list):
        raise RunRefused("not_a_run", f"{place}: {shown(content)} is neither a text nor a list of blocks")
    blocks = [_block(block, f"{place}.{number}", counts) for number, block in enumerate(content)]
    if role == "user":  # results first: the user's words after them are one text
        yield from (block for block in blocks if isinstance(block, ToolResult))
        yield Text("\n".join(block.text for block in blocks if isinstance(block, Text)))
    else:
        yield from (block for block in blocks if block is not None)


def is_known(kind: str) -> bool:
    """Return whether a block of this type can be read, or is known to have no text."""
    return kind in _LEFT_OUT or kind in _USES or kind in ("text", "thinking") or kind.endswith("tool_result")


def _block(block: Any, place: str, counts: Counts) -> Part | None:
    kind = part_type_of(block)
    if isinstance(block, str):
        return Text(block)
    if kind == "text":
        count_unread(block, {"type", "text"}, "messages[].content[].", counts)
        return Text(text_field(block, "text", place))
    if kind == "thinking":
        return Reasoning(text_field(block, "thinking", place))
    if kind in _USES:
        name = block.get("name")
        if not isinstance(name, str):
            raise RunRefused("not_a_run", f"{place}: a {kind} needs a name")
        return ToolCall(name, block.get("input"), text_field(block, "id", place))
    if kind is not None and kind.endswith("tool_result"):
        call_id = text_field(block, "tool_use_id", place)
        text, failed = _result_text(block.get("content"), f"{place}.content", counts)
        return ToolResult(text, call_id, is_error=failed or block.get("is_error") is True)
    if kind == "redacted_thinking":
        counts.drop("redacted thinking")
    elif kind in _LEFT_OUT:
        counts.drop(MEDIA_PARTS.get(str(kind), "documents"))
    else:
        raise RunRefused("not_a_run", f"{place}: block type {shown(kind)} is not known")
    return None


def _result_text(content: Any, place: str, counts: Counts) -> tuple[str, bool]:
    """Return the text of a tool result, and whether it is an error; the result of a server tool becomes JSON."""
    if content is None or isinstance(content, str):
        return content or "", False
    if isinstance(content, list) and all(part_type_of(part) in ("text", "image", "document") for part in content):
        parts = [_block(part, f"{place}.{number}", counts) for number, part in enumerate(content)]
        return "\n".join(part.text for part in parts if isinstance(part, Text)), False
    return as_text(content), isinstance(content, dict) and str(content.get("type")).endswith("_error")

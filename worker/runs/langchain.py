"""Messages of LangChain, as written by `messages_to_dict` and `dumpd`, and in the state of a LangGraph graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from worker.runs.chat import MEDIA_PARTS, TEXT_PARTS, part_type_of
from worker.runs.fields import Counts, RunRefused, count_unread, objects_of, shown, text_field
from worker.runs.messages import Message, Part, Reasoning, Role, Text, ToolCall, ToolResult, as_text

_KINDS: Final[dict[str, Role]] = {
    "human": "user", "ai": "assistant", "system": "system", "tool": "tool", "function": "tool", "chat": "user",
}  # fmt: skip

_ROLES: Final[dict[str, Role]] = {"user": "user", "human": "user", "assistant": "assistant", "ai": "assistant",
                                  "system": "system", "developer": "system", "tool": "tool"}  # fmt: skip

_READ: Final = {
    "type", "content", "id", "tool_calls", "invalid_tool_calls", "tool_call_id", "name", "status", "role", "example",
    "additional_kwargs", "tool_call_chunks",
}  # fmt: skip

_EXTRA: Final = {"tool_calls", "function_call", "reasoning_content", "refusal"}
"""Fields of additional_kwargs that are read."""


def kind_of(message: Any) -> str | None:
    """Return the kind of a LangChain message: human, ai, tool, ...; None if it is not one."""
    if not isinstance(message, dict):
        return None
    name = message.get("type")
    if name == "constructor" and isinstance(message.get("id"), list) and message["id"]:
        name = message["id"][-1]
    if not isinstance(name, str):
        return None
    short = name.removesuffix("Chunk").removesuffix("Message").lower()
    return short if short in _KINDS else None


def langchain_messages(messages: list[Any], counts: Counts, place: str = "messages") -> Iterator[Message]:
    """Yield the messages of a list. Raises RunRefused, with the place."""
    for number, message in enumerate(messages):
        where = f"{place}.{number}"
        kind = kind_of(message)
        if kind is None:
            raise RunRefused(
                "not_a_run", f"{where}: type {shown(part_type_of(message))} is not a message of LangChain's"
            )
        body = message.get("kwargs" if message["type"] == "constructor" else "data", message)
        if not isinstance(body, dict):
            raise RunRefused("not_a_run", f"{where}: {shown(body)} is not an object")
        yield _message(kind, body, where, counts)


def _message(kind: str, body: dict[str, Any], place: str, counts: Counts) -> Message:
    role = _KINDS[kind] if kind != "chat" else _ROLES.get(str(body.get("role")).lower(), "user")
    parts = list(_parts(body.get("content"), f"{place}.content", counts))
    if role == "tool":
        text = "\n".join(part.text for part in parts if isinstance(part, Text))
        call_id = text_field(body, "tool_call_id", place)
        failed = body.get("status") == "error"
        parts = [ToolResult(text, call_id, "" if call_id else text_field(body, "name", place), is_error=failed)]
    elif role == "assistant":
        parts = [*_extra_parts(body, place), *(part for part in parts if not isinstance(part, ToolCall))]
        parts += _calls(body, place)
    else:
        parts = [Text("\n".join(part.text for part in parts if isinstance(part, Text)))]
        if role == "system":
            counts.drop("system messages")
    count_unread(body, _READ, "messages[].", counts)
    extra = body.get("additional_kwargs")
    count_unread(extra if isinstance(extra, dict) else {}, _EXTRA, "messages[].additional_kwargs.", counts)
    return Message(role, tuple(parts))


def _parts(content: Any, place: str, counts: Counts) -> Iterator[Part]:
    if content is None or isinstance(content, str):
        yield Text(content or "")
        return
    if not isinstance(content, list):
        raise RunRefused("not_a_run", f"{place}: {shown(content)} is neither a text nor a list of parts")
    for number, part in enumerate(content):
        kind = part_type_of(part)
        if isinstance(part, str):
            yield Text(part)
        elif kind in TEXT_PARTS:
            yield Text(text_field(part, TEXT_PARTS[kind], f"{place}.{number}"))
        elif kind in ("thinking", "reasoning"):
            summary = objects_of(part, "summary", f"{place}.{number}.summary")
            texts = [part.get(kind), part.get("text"), *(each.get("text") for each in summary)]
            yield Reasoning("\n".join(text for text in texts if isinstance(text, str)))
        elif kind in MEDIA_PARTS:
            counts.drop(MEDIA_PARTS[kind])
        elif kind not in ("tool_use", "tool_call", "function_call", "redacted_thinking", "input_json_delta"):
            raise RunRefused("not_a_run", f"{place}.{number}: part type {shown(kind)} is not known")


def _extra_parts(body: dict[str, Any], place: str) -> Iterator[Part]:
    extra = body.get("additional_kwargs")
    if isinstance(extra, dict):
        yield Reasoning(text_field(extra, "reasoning_content", f"{place}.additional_kwargs"))
        yield Text(text_field(extra, "refusal", f"{place}.additional_kwargs"))


def _calls(body: dict[str, Any], place: str) -> Iterator[ToolCall]:
    """Yield the calls of a message; those with invalid JSON are in `invalid_tool_calls`."""
    calls = objects_of(body, "tool_calls", f"{place}.tool_calls")
    invalid = objects_of(body, "invalid_tool_calls", f"{place}.invalid_tool_calls")
    for each in (*calls, *invalid):
        name = each.get("name")
        if not isinstance(name, str):
            raise RunRefused("not_a_run", f"{place}.tool_calls: a tool call needs a name")
        yield ToolCall(name, each.get("args"), text_field(each, "id", f"{place}.tool_calls"))
    extra = body.get("additional_kwargs")
    if calls or invalid or not isinstance(extra, dict):
        return
    for each in objects_of(extra, "tool_calls", f"{place}.additional_kwargs.tool_calls"):
        called = each.get("function")
        if isinstance(called, dict) and isinstance(called.get("name"), str):
            yield ToolCall(
                called["name"], called.get("arguments"), text_field(each, "id", f"{place}.additional_kwargs.tool_calls")
            )
    legacy = extra.get("function_call")
    if isinstance(legacy, dict) and isinstance(legacy.get("name"), str):
        yield ToolCall(legacy["name"], as_text(legacy.get("arguments")))

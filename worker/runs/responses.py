"""Items of OpenAI's Responses API: the input of a request and the output of its response."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from worker.runs.chat import part_type_of, text_of
from worker.runs.fields import Counts, RunRefused, count_unread, objects_of, shown, text_field
from worker.runs.messages import Message, Reasoning, Role, Text, ToolCall, ToolResult, as_text

ITEMS: Final = frozenset({"function_call", "function_call_output", "reasoning", "custom_tool_call", "item_reference"})
"""Item types that occur in no other form."""

_ROLES: Final[dict[str, Role]] = {
    "user": "user", "assistant": "assistant", "system": "system", "developer": "system",
}  # fmt: skip

_OUTPUTS: Final = ("output", "outputs", "results", "result", "error")
"""Fields of a built-in tool's call that hold its result."""

_NO_INPUT: Final = frozenset({
    "id", "type", "status", "call_id", "metadata", "internal_chat_message_metadata_passthrough", *_OUTPUTS,
})  # fmt: skip


def responses_messages(items: list[Any], counts: Counts, place: str = "input") -> Iterator[Message]:
    """Yield the items of a list as messages. Raises RunRefused, with the place."""
    for number, item in enumerate(items):
        yield from _item(item, f"{place}.{number}", counts)


def _item(item: Any, place: str, counts: Counts) -> Iterator[Message]:
    kind = part_type_of(item)
    if kind in (None, "message"):
        yield _message(item, place, counts)
    elif kind == "reasoning":
        parts = [*objects_of(item, "summary", f"{place}.summary"), *objects_of(item, "content", f"{place}.content")]
        if not parts:
            counts.drop("reasoning that is encrypted or not shown")
        yield Message("assistant", tuple(Reasoning(text_field(part, "text", place)) for part in parts))
    elif kind in ("function_call", "custom_tool_call"):
        arguments = item.get("arguments") if kind == "function_call" else {"input": item.get("input")}
        yield Message("assistant", (_call(item, arguments, place, "call_id"),))
        count_unread(item, {"type", "id", "status", "call_id", "name", "arguments", "input"}, "input[].", counts)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        output = item.get("output")
        text = (
            text_of(output, f"{place}.output", "input[].output[]", counts)
            if isinstance(output, list)
            else as_text(output)
        )
        call_id = text_field(item, "call_id", place)
        yield Message("tool", (ToolResult(text, call_id, is_error=item.get("status") == "incomplete"),))
    elif kind == "item_reference":
        counts.drop("references to items of other responses")
    elif kind is not None and kind.endswith("_call"):
        yield from _built_in(item, kind, place, counts)
    elif kind is not None and kind.endswith("_call_output"):
        call_id = text_field(item, "call_id", place)
        yield Message("tool", (ToolResult(as_text(item.get("output")), call_id),))
    elif kind in ("mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "compaction"):
        counts.drop(f"{kind} items")
    else:
        raise RunRefused("not_a_run", f"{place}: item type {shown(kind)} is not known")


def _message(item: Any, place: str, counts: Counts) -> Message:
    role = item.get("role") if isinstance(item, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise RunRefused("not_a_run", f"{place}: role {shown(role)} is not one of {', '.join(_ROLES)}")
    if _ROLES[role] == "system":
        counts.drop(f"{role} messages")
    text = text_of(item.get("content"), f"{place}.content", "input[].content[]", counts)
    count_unread(item, {"type", "id", "status", "role", "content"}, "input[].", counts)
    return Message(_ROLES[role], (Text(text),))


def _call(item: dict[str, Any], arguments: Any, place: str, id_name: str) -> ToolCall:
    name = item.get("name")
    if not isinstance(name, str):
        raise RunRefused("not_a_run", f"{place}: a tool call needs a name")
    return ToolCall(name, arguments, text_field(item, id_name, place))


def _built_in(item: dict[str, Any], kind: str, place: str, counts: Counts) -> Iterator[Message]:
    """Yield the call of a built-in tool, and its result if the item has one."""
    if kind == "image_generation_call":
        counts.drop("images", "result" in item)
        item = {name: value for name, value in item.items() if name != "result"}
    id_name = "call_id" if "call_id" in item else "id"
    if kind == "mcp_call":
        call = _call(item, item.get("arguments"), place, id_name)
    else:
        arguments = {name: value for name, value in item.items() if name not in _NO_INPUT}
        call = _call({**item, "name": kind.removesuffix("_call")}, arguments, place, id_name)
    yield Message("assistant", (call,))
    for name in _OUTPUTS:
        if item.get(name) is not None:
            failed = name == "error" or item.get("status") == "failed"
            yield Message("tool", (ToolResult(as_text(item[name]), call.call_id, is_error=failed),))
            return

"""Chat messages in OpenAI's style."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from worker.runs.fields import Counts, RunRefused, count_unread, is_empty, says_error, shown, text_field
from worker.runs.messages import Message, Part, Reasoning, Text, ToolCall, ToolResult

TEXT_PARTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Content parts that are text, and the field with the text."""

MEDIA_PARTS: Final = {
    "image": "images", "image_url": "images", "input_image": "images", "audio": "audio", "input_audio": "audio",
    "file": "files", "input_file": "files", "video": "videos", "video_url": "videos",
}  # fmt: skip
"""Content parts that no step can hold, and their names in the report."""

_READ: Final = {
    # role: the fields that are read; any other field that is not empty is counted
    "system": {"role", "content"},
    "developer": {"role", "content"},
    "user": {"role", "content"},
    "assistant": {
        "role", "content", "refusal", "tool_calls", "function_call", "audio", "reasoning_content", "reasoning",
    },
    "tool": {"role", "content", "tool_call_id", "name", "is_error", "status"},
    "function": {"role", "content", "name", "is_error", "status"},
}  # fmt: skip


def chat_messages(messages: list[Any], counts: Counts, place: str = "messages") -> Iterator[Message]:
    """Yield the messages of a list. Raises RunRefused, with the place."""
    called: dict[str, str] = {}
    for number, message in enumerate(messages):
        read = _message(message, f"{place}.{number}", counts)
        for part in read.parts:
            if isinstance(part, ToolCall) and part.call_id:
                called[part.call_id] = part.name
            elif isinstance(part, ToolResult) and part.call_id and part.name not in ("", called.get(part.call_id)):
                counts.drop("messages[].name")
        yield read


def _message(message: Any, place: str, counts: Counts) -> Message:
    if isinstance(message, dict) and "role" not in message:
        raise RunRefused("not_a_run", f"{place} has no role: it is not a message in OpenAI's style")
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in _READ:
        raise RunRefused("not_a_run", f"{place}: role {shown(role)} is not one of {', '.join(_READ)}")
    text = text_of(message.get("content"), f"{place}.content", "messages[].content[]", counts)
    if role in ("system", "developer"):
        counts.drop(f"{role} messages")
        read = Message("system", (Text(text),))
    elif role == "user":
        read = Message("user", (Text(text),))
    elif role == "assistant":
        read = Message("assistant", tuple(_assistant_parts(message, text, place, counts)))
    else:
        call_id = text_field(message, "tool_call_id", place)
        name = text_field(message, "name", place)
        read = Message("tool", (ToolResult(text, call_id, name, is_error=says_error(message)),))
    count_unread(message, _READ[role], "messages[].", counts)
    return read


def _assistant_parts(message: dict[str, Any], text: str, place: str, counts: Counts) -> Iterator[Part]:
    reasoning = [text_field(message, name, place) for name in ("reasoning_content", "reasoning")]
    for part in dict.fromkeys(reasoning):  # some servers send the same text under both names
        yield Reasoning(part)
    audio = message.get("audio")
    if isinstance(audio, dict):
        counts.drop("audio")
        yield Text(text_field(audio, "transcript", f"{place}.audio"))
    yield Text(text)
    yield Text(text_field(message, "refusal", place))
    legacy = message.get("function_call")
    if not is_empty(legacy):
        yield _call({"function": legacy}, f"{place}.function_call", counts)
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise RunRefused("not_a_run", f"{place}.tool_calls: {shown(calls)} is not a list")
    for number, call in enumerate(calls):
        yield _call(call, f"{place}.tool_calls.{number}", counts)


def _call(call: Any, place: str, counts: Counts) -> ToolCall:
    call = call if isinstance(call, dict) else {}
    kind = "custom" if isinstance(call.get("custom"), dict) else "function"
    called = call.get(kind)
    name = called.get("name") if isinstance(called, dict) else None
    if not isinstance(name, str):
        raise RunRefused("not_a_run", f"{place}: a tool call needs a {kind} with a name")
    call_id = text_field(call, "id", place)
    arguments = {"input": called.get("input")} if kind == "custom" else called.get("arguments")
    count_unread(call, {"id", "type", kind}, "messages[].tool_calls[].", counts)
    count_unread(called, {"name", "input" if kind == "custom" else "arguments"}, f"messages[].tool_calls[].{kind}.",
                 counts)  # fmt: skip
    return ToolCall(name, arguments, call_id)


def text_of(content: Any, place: str, kind: str, counts: Counts) -> str:
    """Return the text of a content, its parts joined by line breaks; other parts are counted. Raises RunRefused."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RunRefused("not_a_run", f"{place}: {shown(content)} is neither a text nor a list of parts")
    texts = []
    for number, part in enumerate(content):
        part_type = part_type_of(part)
        if isinstance(part, str):
            texts.append(part)
        elif part_type in TEXT_PARTS:
            texts.append(text_field(part, TEXT_PARTS[part_type], f"{place}.{number}"))
            count_unread(part, {"type", TEXT_PARTS[part_type]}, f"{kind}.", counts)
        elif part_type in MEDIA_PARTS:
            counts.drop(MEDIA_PARTS[part_type])
        else:
            raise RunRefused("not_a_run", f"{place}.{number}: part type {shown(part_type)} is not known")
    return "\n".join(texts)


def part_type_of(part: Any) -> str | None:
    """Return the type of a content part; None if it has none."""
    part_type = part.get("type") if isinstance(part, Mapping) else None
    return part_type if isinstance(part_type, str) else None

"""Sessions of Pi: the files under ~/.pi/agent/sessions, in all three versions of the format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from worker.runs.fields import Counts, RunRefused, objects_of, shown
from worker.runs.messages import Message, Part, Reasoning, Text, ToolCall, ToolResult, joined
from worker.runs.sessions.said import Format, Outcome, Said, text_at

_ENTRIES: Final = frozenset({"session", "message", "custom_message", "compaction", "branch_summary", "model_change",
                             "thinking_level_change", "custom", "label", "session_info"})  # fmt: skip


def _knows(line: Mapping[str, Any]) -> bool:
    kind = text_at(line, "type")
    if kind == "session":
        return "cwd" in line and "id" in line
    return kind in _ENTRIES and "timestamp" in line and ("parentId" in line or "message" in line)


def _read(line: Mapping[str, Any], counts: Counts) -> Said | None:
    kind = line.get("type")
    if kind == "session":
        return Said(facts={"session": text_at(line, "id"), "cwd": text_at(line, "cwd"),
                           "model": text_at(line, "modelId")})  # fmt: skip
    if kind == "model_change":
        return Said(facts={"model": text_at(line, "modelId")})
    if kind != "message":
        counts.drop(f"{kind if isinstance(kind, str) else shown(kind)} lines")
        return None
    message = line.get("message")
    if not isinstance(message, dict):
        raise RunRefused("not_a_line", f"message: {shown(message)} is not an object; the line is skipped")
    time, role = text_at(line, "timestamp"), message.get("role")
    name = f"{time}/{text_at(line, 'id')}" if time and ("id" in line or role == "user") else text_at(line, "id")
    if role == "user":
        parts = tuple(part for part in _parts(message, counts) if isinstance(part, Text) and part.text.strip())
        return Said((Message("user", parts),), opens="request", id=name, created_at=time) if parts else None
    if role == "assistant":
        failed = message.get("stopReason") in ("aborted", "error")
        outcome = Outcome(False, text_at(message, "errorMessage") or text_at(message, "stopReason")) if failed else None
        return Said((Message("assistant", tuple(_parts(message, counts))),), id=name, created_at=time, outcome=outcome,
                    facts={"model": text_at(message, "model")})  # fmt: skip
    if role == "toolResult":
        text = joined([part.text for part in _parts(message, counts) if isinstance(part, Text)])
        result = ToolResult(text, text_at(message, "toolCallId"), text_at(message, "toolName"),
                            is_error=message.get("isError") is True)  # fmt: skip
        return Said((Message("tool", (result,)),), id=name, created_at=time)
    counts.drop(f"{role if isinstance(role, str) else shown(role)} messages")
    return None


def _parts(message: Mapping[str, Any], counts: Counts) -> Iterator[Part]:
    if isinstance(message.get("content"), str):
        yield Text(message["content"])
        return
    for number, block in enumerate(objects_of(message, "content", "message.content")):
        kind = block.get("type")
        if kind == "text":
            yield Text(text_at(block, "text"))
        elif kind == "thinking":
            yield Reasoning(text_at(block, "thinking"))
        elif kind == "toolCall" and text_at(block, "name"):
            yield ToolCall(block["name"], block.get("arguments"), text_at(block, "id"))
        elif kind == "image":
            counts.drop("images")
        else:
            raise RunRefused("not_a_line", f"message.content.{number}: block type {shown(kind)} is not known")


FORMAT: Final = Format("pi", _knows, _read)

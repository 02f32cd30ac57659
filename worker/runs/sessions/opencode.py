"""Sessions of OpenCode: the document of `opencode export`, and the lines of `opencode run --format json`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from worker.runs.fields import Counts, RunRefused, as_time, objects_of, shown
from worker.runs.messages import Message, Part, Reasoning, Text, ToolCall, ToolResult, as_text
from worker.runs.sessions.said import Format, Outcome, Said, text_at

_UNSAID: Final = frozenset(
    {"step-start", "step-finish", "snapshot", "patch", "agent", "retry", "compaction", "subtask"}
)


_PRINTED: Final = frozenset({"step_start", "step_finish", "tool_use", "text", "reasoning", "error"})


def _knows(line: Mapping[str, Any]) -> bool:
    if text_at(line, "type") in _PRINTED and "sessionID" in line:
        return True
    info = line.get("info")
    return isinstance(info, dict) and "sessionID" in info and isinstance(line.get("parts"), list)


def _lines(document: Mapping[str, Any]) -> Iterable[Any] | None:
    info, messages = document.get("info"), document.get("messages")
    if not isinstance(info, dict) or not isinstance(messages, list) or not all(map(_is_message, messages[:1])):
        return None
    return [{"info": info}, *messages]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and _knows(value)


def _read(line: Mapping[str, Any], counts: Counts) -> Said | None:
    if text_at(line, "type") in _PRINTED:
        return _printed(line, counts)
    info = line.get("info")
    if not isinstance(info, dict):
        raise RunRefused("not_a_line", f"info: {shown(info)} is not an object; the message is skipped")
    role = info.get("role")
    if "parts" not in line:
        return Said(facts={"session": text_at(info, "id"), "cwd": text_at(info, "directory"),
                           "version": text_at(info, "version"),
                           "subagent": "agent" if info.get("parentID") else ""})  # fmt: skip
    parts = objects_of(line, "parts", "parts")
    if role == "user":
        texts = [text_at(part, "text") for part in parts if part.get("type") == "text" and not part.get("synthetic")]
        counts.drop("parts of a message that are not text", sum(part.get("type") != "text" for part in parts))
        message = Message("user", tuple(Text(text) for text in texts if text.strip()))
        return Said((message,) if message.parts else (), opens="request" if message.parts else "",
                    id=text_at(info, "id"), created_at=_time(info, "created"))  # fmt: skip
    if role != "assistant":
        raise RunRefused("not_a_line", f"info.role {shown(role)} is not known; the message is skipped")
    return Said(
        tuple(_messages(parts, counts)), id=text_at(info, "id"),
        created_at=_time(info, "completed") or _time(info, "created"), facts={"model": text_at(info, "modelID")},
        outcome=_failure(info),
    )  # fmt: skip


def _printed(line: Mapping[str, Any], counts: Counts) -> Said | None:
    """Read a line of `opencode run --format json`. It lacks the user's words."""
    part = line.get("part")
    parts = [part] if isinstance(part, dict) else []
    return Said(tuple(_messages(parts, counts)), created_at=_time({"time": line}, "timestamp"),
                facts={"session": text_at(line, "sessionID")}, outcome=_failure(line))  # fmt: skip


def _failure(value: Mapping[str, Any]) -> Outcome | None:
    error = value.get("error")
    data = error.get("data") if isinstance(error, dict) else None
    words = text_at(data, "message") if isinstance(data, dict) else ""
    return Outcome(False, words or text_at(error, "name")) if isinstance(error, dict) else None


def _messages(parts: list[dict[str, Any]], counts: Counts) -> Iterator[Message]:
    """Yield the agent's texts and calls, each call with its result."""
    for number, part in enumerate(parts):
        kind, state = text_at(part, "type"), part.get("state")
        said: Part | None = None
        if kind == "text":
            said = Text(text_at(part, "text"))
        elif kind == "reasoning":
            said = Reasoning(text_at(part, "text"))
        elif kind == "tool" and text_at(part, "tool") and isinstance(state, dict):
            said = ToolCall(part["tool"], state.get("input"), text_at(part, "callID"))
        elif kind in _UNSAID or kind == "file":
            counts.drop(f"{kind} parts")
        else:
            raise RunRefused("not_a_line", f"parts.{number}: part type {shown(kind)} is not known")
        if said is not None:
            yield Message("assistant", (said,))
        if isinstance(said, ToolCall) and isinstance(state, dict) and state.get("status") in ("completed", "error"):
            failed, metadata = state["status"] == "error", state.get("metadata")
            text = as_text(state.get("error" if failed else "output"))
            failed |= isinstance(metadata, dict) and metadata.get("exit") not in (0, None)
            yield Message("tool", (ToolResult(text, said.call_id, said.name, is_error=failed),))


def _time(info: Mapping[str, Any], name: str) -> str:
    """Return a time in milliseconds since 1970 as ISO 8601; "" if there is none."""
    times = info.get("time")
    value = times.get(name) if isinstance(times, dict) else None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return ""
    try:
        return as_time(value / 1000)
    except ValueError:
        return ""


FORMAT: Final = Format("opencode", _knows, _read, _lines)

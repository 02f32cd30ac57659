"""Sessions of Gemini CLI: the files under ~/.gemini/tmp/PROJECT/chats, as one document or line by line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from worker.runs.fields import Counts, RunRefused, objects_of
from worker.runs.messages import Message, Part, Reasoning, Text, ToolCall, ToolResult, as_text, joined
from worker.runs.sessions.said import Format, Opens, Outcome, Said, text_at

_EXIT_CODE: Final = re.compile(r"^Exit Code: (-?\d+)$", re.MULTILINE)
"""Follows the output of a command; in some versions only of a failed one."""


def _knows(line: Mapping[str, Any]) -> bool:
    return "sessionId" in line and "projectHash" in line


def _lines(document: Mapping[str, Any]) -> Iterable[Any] | None:
    messages = document.get("messages")
    if not _knows(document) or not isinstance(messages, list):
        return None
    return [{name: value for name, value in document.items() if name != "messages"}, *messages]


def _read(line: Mapping[str, Any], counts: Counts) -> Said | None:
    if _knows(line):
        subagent = "agent" if line.get("kind") == "subagent" else ""
        return Said(facts={"session": text_at(line, "sessionId"), "subagent": subagent})
    kind, time, name = line.get("type"), text_at(line, "timestamp"), text_at(line, "id")
    if kind == "user":
        text = _content(line, counts)
        if not text.strip():
            return None
        opens: Opens = "command" if text.lstrip().startswith(("/", "?")) else "request"
        return Said((Message("user", (Text(text),)),), opens=opens, id=name, created_at=time)
    if kind in ("gemini", "model"):
        return Said(tuple(_messages(line, counts)), id=name, created_at=time, facts={"model": text_at(line, "model")})
    if kind == "error":
        return Said(outcome=Outcome(False, _text(line.get("content"), counts) or None), created_at=time)
    if isinstance(kind, str) or "$set" in line or "$rewindTo" in line:
        counts.drop(f"{kind} lines" if isinstance(kind, str) else "changes of the session's header, and of its past")
        return None
    raise RunRefused("not_a_line", "the line has no type, and is skipped")


def _messages(line: Mapping[str, Any], counts: Counts) -> Iterator[Message]:
    """Yield the model's thoughts, texts and calls, and the results of the calls."""
    thoughts = [
        Reasoning(joined([text_at(thought, "subject"), text_at(thought, "description")]))
        for thought in objects_of(line, "thoughts", "thoughts")
    ]
    text = _content(line, counts)
    said: list[Part] = [*thoughts, *([Text(text)] if text else [])]
    results: list[Part] = []
    for number, call in enumerate(objects_of(line, "toolCalls", "toolCalls")):
        if not text_at(call, "name"):
            raise RunRefused("not_a_line", f"toolCalls.{number}: a call needs a name; the line is skipped")
        said.append(ToolCall(call["name"], call.get("args"), text_at(call, "id")))
        if call.get("result") is not None or call.get("status") in ("success", "error", "cancelled"):
            results.append(_result(call, counts))
    if said:
        yield Message("assistant", tuple(said))
    if results:
        yield Message("tool", tuple(results))


def _result(call: Mapping[str, Any], counts: Counts) -> ToolResult:
    found, texts = call.get("result"), []
    for part in found if isinstance(found, list) else [found]:
        answer = part.get("functionResponse") if isinstance(part, dict) else None
        value = answer.get("response") if isinstance(answer, dict) else None
        if isinstance(value, dict) and len(value) == 1 and value.keys() <= {"output", "error"}:
            value = next(iter(value.values()))
        texts.append(_text(part, counts) if value is None else as_text(value))
    text, name = joined(texts), text_at(call, "name")
    codes = _EXIT_CODE.findall(text) if name == "run_shell_command" else []
    is_error = call.get("status") in ("error", "cancelled") or codes[-1:] not in ([], ["0"])
    return ToolResult(text, text_at(call, "id"), name, is_error=is_error)


def _content(line: Mapping[str, Any], counts: Counts) -> str:
    return _text(line.get("parts") if line.get("content") is None else line["content"], counts)


def _text(content: Any, counts: Counts) -> str:
    """Return the text of a content: a string, a part, or a list of them."""
    if isinstance(content, list):
        return joined([_text(part, counts) for part in content])
    if isinstance(content, dict) and not isinstance(content.get("text"), str):
        counts.drop("parts of a message that are not text")
        return ""
    return text_at(content, "text") if isinstance(content, dict) else as_text(content)


FORMAT: Final = Format("gemini-cli", _knows, _read, _lines)

"""What a line of a session means, for every coding agent; and the sessions of Pi, Gemini CLI and OpenCode.

Those of Claude Code and Codex have more to them, and a module each.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any, Final, Literal

from worker.runs.fields import Counts, RunRefused, as_time, objects_of, says_error, shown
from worker.runs.forms import known_parts, parts_of
from worker.runs.messages import Message, Part, Reasoning, Text, ToolCall, ToolResult, as_text, joined

Opens = Literal["", "request", "start", "command", "local", "fork"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended, as far as the session says."""

    success: bool | None  # None: it is unknown, because a line could not be read
    summary: str | None = None  # None: the session does not say


@dataclass(frozen=True, slots=True)
class Entry:
    """What a line says of the conversation."""

    messages: tuple[Message, ...] = ()
    opens: Opens = ""
    """As "request": the first message is a request of the user. "start": one begins unless one is open. "command": it
    is a request if the agent goes on after it. "local": the command before it ran without the agent. "fork": the open
    request is the task of a fork, which begins with its inheritance. Two equal requests in a row are one; a request in
    the same turn (a fact) as the open one belongs to it."""
    run: str | None = None  # None: the session's own agent; else a sub-agent's id, empty if only `after` identifies it
    after: str = ""  # id of the line before
    id: str = ""  # of the line; a later line with it replaces this one within the request
    message: str = ""  # id of the model's message, of which other lines may hold other parts, or later versions
    created_at: str = ""  # unless it is the line's timestamp
    facts: Mapping[str, str] = field(default_factory=dict)  # of the session; they hold for later lines, too
    outcome: Outcome | None = None
    spawns: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # by call id: a sub-agent's prompt and name


def text_at(value: Mapping[str, Any], name: str) -> str:
    """Return a string field, "" if it is absent or something else."""
    text = value.get(name)
    return text if isinstance(text, str) else ""


Placed = tuple[Any, int]
"""The value of a line, None if it cannot be read, and its position."""


@dataclass(frozen=True, slots=True)
class Format:
    """How the sessions of one agent are read."""

    name: str  # for --from; also framework and agent of its traces
    knows: Callable[[Mapping[str, Any]], bool]  # whether an object is a line of such a session
    read: Callable[[Mapping[str, Any], Counts], Entry]  # counts what it leaves out, raises RunRefused
    lines: Callable[[Mapping[str, Any]], Iterable[Any] | None] = lambda document: None  # of one that is a document
    of_header: frozenset[str] = frozenset()  # facts whose first value counts, because a header may repeat
    leaves_out: Callable[[Mapping[str, Any], Mapping[str, str]], bool] = lambda line, facts: False
    """Whether a line belongs to no request, by the facts."""
    revised: Callable[[list[Placed], Counts], Iterable[Placed]] | None = None
    """What is left of all lines at the end of a session whose later lines take earlier ones back."""


# Pi: the files under ~/.pi/agent/sessions, in all three versions of the format


def _pi_knows(line: Mapping[str, Any]) -> bool:
    kind = text_at(line, "type")
    if kind == "session":
        return "cwd" in line and "id" in line
    is_known = kind in ("message", "custom_message", "compaction", "branch_summary", "model_change", "custom", "label",
                        "thinking_level_change", "session_info")  # fmt: skip
    return is_known and "timestamp" in line and ("parentId" in line or "message" in line)


def _pi_read(line: Mapping[str, Any], counts: Counts) -> Entry:
    kind = line.get("type")
    if kind == "session":
        return Entry(facts={"session": text_at(line, "id"), "cwd": text_at(line, "cwd"),
                           "model": text_at(line, "modelId")})  # fmt: skip
    if kind == "model_change":
        return Entry(facts={"model": text_at(line, "modelId")})
    if kind != "message":
        counts.drop(f"{kind if isinstance(kind, str) else shown(kind)} lines")
        return Entry()
    message = line.get("message")
    if not isinstance(message, dict):
        raise RunRefused("not_a_line", f"message: {shown(message)} is not an object; the line is skipped")
    time, role = text_at(line, "timestamp"), message.get("role")
    if role not in ("user", "assistant", "toolResult"):
        counts.drop(f"{role if isinstance(role, str) else shown(role)} messages")
        return Entry()
    parts = parts_of(known_parts(message.get("content"), counts), "message.content", "assistant", counts)
    name = f"{time}/{text_at(line, 'id')}" if time and ("id" in line or role == "user") else text_at(line, "id")
    if role == "user":
        texts = tuple(part for part in parts if isinstance(part, Text) and part.text.strip())
        return Entry((Message("user", texts),), opens="request", id=name) if texts else Entry()
    if role == "assistant":
        failed = message.get("stopReason") in ("aborted", "error")
        outcome = Outcome(False, text_at(message, "errorMessage") or text_at(message, "stopReason")) if failed else None
        return Entry((Message("assistant", tuple(parts)),), id=name,
                    outcome=outcome, facts={"model": text_at(message, "model")})  # fmt: skip
    result = ToolResult(Message("tool", tuple(parts)).texts(), text_at(message, "toolCallId"),
                        text_at(message, "toolName"), is_error=message.get("isError") is True)  # fmt: skip
    return Entry((Message("tool", (result,)),), id=name)


def _pi_revised(lines: list[Placed], counts: Counts) -> Iterator[Placed]:
    """Yield the lines of the branch that the session ends with: each line names the one before it."""
    before: dict[str, str | None] = {}  # by id, in order
    for line, _ in lines:
        if line is not None and "parentId" in line and text_at(line, "id"):
            before[line["id"]] = text_at(line, "parentId") or None
    names = list(before)
    numbers = {name: number for number, name in enumerate(names)}
    number, kept = len(names) - 1, set[str]()
    if not any(before.values()):
        kept |= before.keys()  # it has no branches
    while number >= 0:
        kept.add(names[number])
        parent = before[names[number]]
        if parent is None:
            break
        # A parent that is not there stood on a line that cannot be read.
        number = min(numbers.get(parent, number - 1), number - 1)
    for line, at in lines:
        if line is None or text_at(line, "id") not in before.keys() - kept:
            yield line, at
        else:
            counts.drop("lines of an abandoned branch")


PI: Final = Format("pi", _pi_knows, _pi_read, revised=_pi_revised)


# Gemini CLI: the files under ~/.gemini/tmp/PROJECT/chats, as one document or line by line


def _gemini_knows(line: Mapping[str, Any]) -> bool:
    return "sessionId" in line and "projectHash" in line


def _gemini_lines(document: Mapping[str, Any]) -> Iterable[Any] | None:
    messages = document.get("messages")
    if not _gemini_knows(document) or not isinstance(messages, list):
        return None
    return [{name: value for name, value in document.items() if name != "messages"}, *messages]


def _gemini_read(line: Mapping[str, Any], counts: Counts) -> Entry:
    if _gemini_knows(line):
        subagent = "agent" if line.get("kind") == "subagent" else ""
        return Entry(facts={"session": text_at(line, "sessionId"), "subagent": subagent})
    kind, name = line.get("type"), text_at(line, "id")
    if kind == "user":
        text = _gemini_content(line, counts)
        # Gemini CLI adds the first at the start, the second where it compresses
        if added := re.match(r"\s*<(session_context|state_snapshot)>", text):
            counts.drop("context added to a message")
            text = text.partition(f"</{added[1]}>")[2].strip()
        if not text.strip():
            return Entry()
        opens: Opens = "command" if text.lstrip().startswith(("/", "?")) else "request"
        return Entry((Message("user", (Text(text),)),), opens=opens, id=name)
    if kind in ("gemini", "model"):
        return Entry(tuple(_gemini_messages(line, counts)), id=name, facts={"model": text_at(line, "model")})
    if kind == "error":
        return Entry(outcome=Outcome(False, _gemini_text(line.get("content"), counts) or None))
    if isinstance(kind, str) or "$set" in line or "$rewindTo" in line:
        counts.drop(f"{kind} lines" if isinstance(kind, str) else "changes of the session's header")
        return Entry()
    raise RunRefused("not_a_line", "the line has no type, and is skipped")


def _gemini_revised(lines: list[Placed], counts: Counts) -> Iterable[Placed]:
    """Return the messages that are left: a list of them replaces all before, and `$rewindTo` takes some back."""
    kept: dict[Any, list[Placed]] = {}  # messages by id, other lines by number
    for number, (line, at) in enumerate(lines):
        change = line.get("$set", line) if line is not None else None
        messages = change.get("messages") if isinstance(change, dict) else None
        taken: list[str] = []
        if line is None or not ("$rewindTo" in line or isinstance(messages, list)):
            kept.setdefault((line and text_at(line, "id")) or number, []).append((line, at))
            continue
        names = [name for name in kept if isinstance(name, str)]
        if "$rewindTo" in line:
            taken = names[names.index(line["$rewindTo"]) if line["$rewindTo"] in names else 0 :]
        elif isinstance(messages, list):
            taken = names
        gone = {name: kept.pop(name) for name in taken}
        for each in messages if isinstance(messages, list) else []:
            name = text_at(each, "id") if isinstance(each, dict) else ""
            gone.pop(name, None)
            kept[name or (number, len(kept))] = [((each if isinstance(each, dict) else None), at)]
        counts.drop("messages that were taken back", len(gone))
    return sorted(chain.from_iterable(kept.values()), key=itemgetter(1))


def _gemini_messages(line: Mapping[str, Any], counts: Counts) -> Iterator[Message]:
    """Yield the model's thoughts, texts and calls, and the results of the calls."""
    thoughts = [
        Reasoning(joined([text_at(thought, "subject"), text_at(thought, "description")]))
        for thought in objects_of(line, "thoughts", "thoughts")
    ]
    text = _gemini_content(line, counts)
    parts: list[Part] = [*thoughts, *([Text(text)] if text else [])]
    results: list[Part] = []
    for number, call in enumerate(objects_of(line, "toolCalls", "toolCalls")):
        if not text_at(call, "name"):
            raise RunRefused("not_a_line", f"toolCalls.{number}: a call needs a name; the line is skipped")
        parts.append(ToolCall(call["name"], call.get("args"), text_at(call, "id")))
        if call.get("result") is not None or call.get("status") in ("success", "error", "cancelled"):
            results.append(_gemini_result(call, counts))
    if parts:
        yield Message("assistant", tuple(parts))
    if results:
        yield Message("tool", tuple(results))


def _gemini_result(call: Mapping[str, Any], counts: Counts) -> ToolResult:
    result, texts, failed = call.get("result"), [], False
    for part in result if isinstance(result, list) else [result]:
        answer = part.get("functionResponse") if isinstance(part, dict) else None
        value = answer.get("response") if isinstance(answer, dict) else None
        if isinstance(value, dict) and len(value) == 1 and value.keys() <= {"output", "error"}:
            failed |= "error" in value
            value = next(iter(value.values()))
        failed |= says_error(value)
        texts.append(_gemini_text(part, counts) if value is None else as_text(value))
    text, name = joined(texts), text_at(call, "name")
    # a command's exit code follows its output; in some versions only that of a failed one
    codes = re.findall(r"(?m)^Exit Code: (-?\d+)$", text) if name == "run_shell_command" else []
    is_error = failed or call.get("status") in ("error", "cancelled") or codes[-1:] not in ([], ["0"])
    return ToolResult(text, text_at(call, "id"), name, is_error=is_error)


def _gemini_content(line: Mapping[str, Any], counts: Counts) -> str:
    return _gemini_text(line.get("parts") if line.get("content") is None else line["content"], counts)


def _gemini_text(content: Any, counts: Counts) -> str:
    """Return the text of a content: a string, a part, or a list of them."""
    if isinstance(content, list):
        return joined([_gemini_text(part, counts) for part in content])
    if isinstance(content, dict) and not isinstance(content.get("text"), str):
        counts.drop("parts of a message that are not text")
        return ""
    return text_at(content, "text") if isinstance(content, dict) else as_text(content)


GEMINI_CLI: Final = Format("gemini-cli", _gemini_knows, _gemini_read, _gemini_lines, revised=_gemini_revised)


# OpenCode: the document of `opencode export`, and the lines of `opencode run --format json`

_PRINTED: Final = frozenset({"step_start", "step_finish", "tool_use", "text", "reasoning", "error"})


def _opencode_knows(line: Mapping[str, Any]) -> bool:
    if text_at(line, "type") in _PRINTED and "sessionID" in line:
        return True
    info = line.get("info")
    return isinstance(info, dict) and "sessionID" in info and isinstance(line.get("parts"), list)


def _opencode_lines(document: Mapping[str, Any]) -> Iterable[Any] | None:
    info, messages = document.get("info"), document.get("messages")
    if not isinstance(info, dict) or not isinstance(messages, list):
        return None
    is_known = all(isinstance(message, dict) and _opencode_knows(message) for message in messages[:1])
    return [{"info": info}, *messages] if is_known else None


def _opencode_read(line: Mapping[str, Any], counts: Counts) -> Entry:
    if text_at(line, "type") in _PRINTED:
        return _opencode_printed(line, counts)
    info = line.get("info")
    if not isinstance(info, dict):
        raise RunRefused("not_a_line", f"info: {shown(info)} is not an object; the message is skipped")
    role = info.get("role")
    if "parts" not in line:
        return Entry(facts={"session": text_at(info, "id"), "cwd": text_at(info, "directory"),
                           "version": text_at(info, "version"),
                           "subagent": "agent" if info.get("parentID") else ""})  # fmt: skip
    parts = objects_of(line, "parts", "parts")
    if role == "user":
        texts = [text_at(part, "text") for part in parts if part.get("type") == "text" and not part.get("synthetic")]
        counts.drop("parts of a message that are not text", sum(part.get("type") != "text" for part in parts))
        message = Message("user", tuple(Text(text) for text in texts if text.strip()))
        return Entry((message,) if message.parts else (), opens="request" if message.parts else "",
                    id=text_at(info, "id"), created_at=_time(info, "created"))  # fmt: skip
    if role != "assistant":
        raise RunRefused("not_a_line", f"info.role {shown(role)} is not known; the message is skipped")
    return Entry(
        tuple(_opencode_messages(parts, counts)), id=text_at(info, "id"),
        created_at=_time(info, "completed") or _time(info, "created"), facts={"model": text_at(info, "modelID")},
        outcome=_failure(info),
    )  # fmt: skip


def _opencode_printed(line: Mapping[str, Any], counts: Counts) -> Entry:
    """Read a line of `opencode run --format json`. It lacks the user's words."""
    part = line.get("part")
    parts = [part] if isinstance(part, dict) else []
    return Entry(tuple(_opencode_messages(parts, counts)), created_at=_time({"time": line}, "timestamp"),
                facts={"session": text_at(line, "sessionID")}, outcome=_failure(line))  # fmt: skip


def _failure(value: Mapping[str, Any]) -> Outcome | None:
    error = value.get("error")
    data = error.get("data") if isinstance(error, dict) else None
    words = text_at(data, "message") if isinstance(data, dict) else ""
    return Outcome(False, words or text_at(error, "name")) if isinstance(error, dict) else None


def _opencode_messages(parts: list[dict[str, Any]], counts: Counts) -> Iterator[Message]:
    """Yield the agent's texts and calls, each call with its result."""
    for number, part in enumerate(parts):
        kind, state = text_at(part, "type"), part.get("state")
        content: Part | None = None
        if kind == "text":
            content = Text(text_at(part, "text"))
        elif kind == "reasoning":
            content = Reasoning(text_at(part, "text"))
        elif kind == "tool" and text_at(part, "tool") and isinstance(state, dict):
            content = ToolCall(part["tool"], state.get("input"), text_at(part, "callID"))
        elif kind in ("step-start", "step-finish", "snapshot", "patch", "agent", "retry", "compaction", "subtask",
                      "file"):  # fmt: skip
            counts.drop(f"{kind} parts")
        else:
            raise RunRefused("not_a_line", f"parts.{number}: part type {shown(kind)} is not known")
        if content is not None:
            yield Message("assistant", (content,))
        if isinstance(content, ToolCall) and isinstance(state, dict) and state.get("status") in ("completed", "error"):
            failed, metadata = state["status"] == "error", state.get("metadata")
            text = as_text(state.get("error" if failed else "output"))
            failed |= isinstance(metadata, dict) and metadata.get("exit") not in (0, None)
            yield Message("tool", (ToolResult(text, content.call_id, content.name, is_error=failed),))


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


OPENCODE: Final = Format("opencode", _opencode_knows, _opencode_read, _opencode_lines)

"""Sessions of Codex: the rollout files under sessions/, and the output of `codex exec --json`."""

import re
from collections.abc import Mapping
from typing import Any, Final

from worker.runs.fields import Counts, RunRefused, json_value, says_error, shown, text_field
from worker.runs.forms import ITEMS, MEDIA_PARTS, built_in, known_parts, part_type_of, responses_messages, text_of
from worker.runs.messages import Message, Reasoning, Text, ToolCall, ToolResult, as_text
from worker.runs.sessions.formats import Entry, Format, Outcome, text_at

_CONTEXT: Final = re.compile(
    r"\s*(?:# AGENTS\.md instructions|<(?:environment_context|user_instructions|additional_context|skill|permissions"
    r"|collaboration_mode|user_shell_command|turn_aborted|hook_prompt|image(?: name=[^>]*)?|/image"
    r"|[a-z]+_instructions|codex_internal_context|goal_context|user_action)[\s>])"
)
"""The beginning of a text that Codex put into a message of the user."""

_ENVELOPE: Final = re.compile(
    r"Message Type: ([A-Z_]+)(?:\Z|\n)(?:Task name: .*(?:\Z|\n))?(?:Sender: .*(?:\Z|\n))?(?:Payload:(?:\Z|\n))?"
)
"""The header of a message from one agent to another."""

_ROLLOUT: Final = frozenset({"session_meta", "response_item", "event_msg", "turn_context", "compacted"})

_EXEC: Final = frozenset({"thread.started", "turn.started", "turn.completed", "turn.failed", "item.started",
                          "item.updated", "item.completed"})  # fmt: skip


def _knows(line: Mapping[str, Any]) -> bool:
    if line.get("type") is None:
        return {"id", "timestamp", "instructions"} <= line.keys()
    kind = text_at(line, "type")
    return kind in _EXEC or (kind in _ROLLOUT and isinstance(line.get("payload"), dict))


def _read(line: Mapping[str, Any], counts: Counts) -> Entry:
    kind = text_at(line, "type")
    if "payload" not in line and (_is_item(line) or "record_type" in line or line.get("type") is None):
        return _bare(line, counts)
    if kind in _EXEC or kind == "error":
        return _printed(line, kind, counts)
    payload = line.get("payload")
    if "payload" not in line and kind not in _ROLLOUT:
        counts.drop(f"{kind} lines")
        return Entry()
    if not isinstance(payload, dict):
        raise RunRefused("not_a_line", f"payload: {shown(payload)} is not an object; the line is skipped")
    if kind == "session_meta":
        return Entry(facts=_of_session(payload))
    if kind == "turn_context":
        names = {"turn": "turn_id", "model": "model", "cwd": "cwd"}
        return Entry(facts={fact: text_at(payload, name) for fact, name in names.items()})
    if kind == "event_msg":
        return _event(payload, counts)
    if kind == "response_item":
        return _item(payload, counts)
    counts.drop(f"{kind} lines")
    return Entry()


def _bare(line: Mapping[str, Any], counts: Counts) -> Entry:
    """Read a line from before Codex 0.32: a header without a type, a bare item, or a state record."""
    if _is_item(line):
        return _item(dict(line), counts)
    if "record_type" not in line and "id" not in line:
        raise RunRefused("not_a_line", "the line has no type, and is skipped")
    return Entry(facts=_of_session(line)) if "id" in line else Entry()


def _is_item(item: Mapping[str, Any]) -> bool:
    kind = text_at(item, "type")
    return kind in ITEMS or kind.endswith(("_call", "_output")) or kind == "message" or "role" in item


def _of_session(meta: Mapping[str, Any]) -> dict[str, str]:
    git, source = meta.get("git"), meta.get("source")
    below = source.get("subagent") if isinstance(source, dict) else None
    first = meta.get("subagent_history_start_ordinal")
    return {
        "session": text_at(meta, "id") or text_at(meta, "session_id"), "cwd": text_at(meta, "cwd"),
        "version": text_at(meta, "cli_version"), "branch": text_at(git, "branch") if isinstance(git, dict) else "",
        "subagent": "" if below is None else _name_of(below),
        "since": "" if below is None else text_at(meta, "timestamp"),
        "ordinal": str(first) if type(first) is int else "",
    }  # fmt: skip


def _name_of(subagent: Any) -> str:
    """Return a sub-agent's name by its task: its nickname is random."""
    if not isinstance(subagent, dict):
        return (isinstance(subagent, str) and subagent) or "agent"
    spawn = subagent.get("thread_spawn")
    role = text_at(spawn, "agent_role") if isinstance(spawn, dict) else ""
    return role or text_at(subagent, "other") or "agent"


def _is_left_out(line: Mapping[str, Any], facts: Mapping[str, str]) -> bool:
    """Return whether a line in a sub-agent's rollout is its parent's, or belongs to one of Codex's own sub-agents.

    A rollout may begin with a copy of its parent's: lines numbered below its own first line (Codex 0.145), earlier than
    its header, or from a turn that began before the sub-agent.
    """
    name = facts.get("subagent", "")
    if name in ("", "guardian", "compact", "memory_consolidation"):  # they judge calls or summarise, unasked
        return name != ""
    ordinal, first = line.get("ordinal"), facts.get("ordinal", "")
    if first and type(ordinal) is int:
        return ordinal < int(first)
    turn, session = facts.get("turn", "").lower(), facts.get("session", "").lower()
    # UUIDs of version 7: the first 13 characters are the time of creation
    timed = all(re.match("[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-", each) for each in (turn, session))
    return (timed and turn[:13] < session[:13]) or "" < text_at(line, "timestamp") < facts.get("since", "")


def _event(event: Mapping[str, Any], counts: Counts) -> Entry:
    """Read an event. Only events say how a turn ended; anything that a rollout says twice is taken from its items."""
    kind = event.get("type")
    if kind in ("task_started", "turn_started"):
        return Entry(facts={"turn": text_at(event, "turn_id")})
    if kind in ("task_complete", "turn_complete"):
        last, error = text_at(event, "last_agent_message"), event.get("error")
        if isinstance(error, dict):
            return Entry(outcome=Outcome(False, text_at(error, "message") or None))
        return Entry(outcome=Outcome(True, last)) if last else Entry()
    if kind == "turn_aborted":
        return Entry(outcome=Outcome(False, text_at(event, "reason") or "aborted"))
    if kind == "error":
        error = event.get("error") if isinstance(event.get("error"), dict) else event
        return Entry(outcome=Outcome(False, text_at(error or {}, "message") or None))
    if kind == "user_message" and (text := _request(text_at(event, "message"))):
        return Entry((Message("user", (Text(text),)),), opens="request")
    counts.drop("events that say what an item says, and other events")
    return Entry()


def _item(item: dict[str, Any], counts: Counts) -> Entry:
    kind = text_at(item, "type") or "message"
    if kind == "agent_message" or (kind == "message" and item.get("role") == "user"):
        return _user_message(item, kind, counts)
    if kind in ("function_call_output", "custom_tool_call_output"):
        call_id = text_field(item, "call_id", "payload")
        return Entry((Message("tool", (_result(item.get("output"), call_id, counts),)),))
    if not _is_item(item):
        counts.drop(f"{kind} items")
        return Entry()
    if kind == "message":
        item = item | {"content": known_parts(item.get("content"), counts)}
    return Entry(tuple(each for each in responses_messages([item], counts, "payload") if each.role != "system"))


def _user_message(item: dict[str, Any], kind: str, counts: Counts) -> Entry:
    """Read a message of the user or of another agent: a sub-agent's task is its request."""
    content = item.get("content")
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    metadata = item.get("internal_chat_message_metadata_passthrough")
    kinds = metadata.get("content_item_kinds") if isinstance(metadata, dict) else None
    if not isinstance(kinds, list) or len(kinds) != len(parts):
        kinds = ["user."] * len(parts)
    own = [part for part, name in zip(parts, kinds, strict=True)
           if str(name).startswith("user.") and _CONTEXT.match(text_at(part, "text")) is None]  # fmt: skip
    counts.drop("context added to a message", len(parts) - len(own))
    kept = known_parts(own, counts)
    text = _request(text_of(kept if parts else content, "payload.content", "payload.content[]", counts))
    envelope = _ENVELOPE.match(text)
    message = Message("user", (Text(text if envelope is None else text[envelope.end() :]),))
    is_task = kind != "agent_message" or (envelope is not None and envelope[1] == "NEW_TASK")
    if not is_task or re.match(r"\s*<subagent_notification>", text):
        return Entry((message,))
    if not message.texts():  # encrypted, or an image
        unread = envelope is not None or any(part_type_of(part) in MEDIA_PARTS for part in kept)
        return Entry(opens="request") if unread else Entry()
    return Entry((message,), opens="request")


def _request(text: str) -> str:
    """Return the user's own words, without the text that an editor put before them."""
    heading = "# (?:Context from my IDE setup|Files mentioned by the user).*\n"
    before = re.match(rf"(?s)\s*(?:{heading})?## My request(?: for Codex)?:\s*", text)
    return "" if _CONTEXT.match(text) else text[0 if before is None else before.end() :].strip()


def _result(output: Any, call_id: str, counts: Counts) -> ToolResult:
    """Read a call's result: a string, a list of parts, JSON with output and metadata, or an object with content."""
    parsed = json_value(output) if isinstance(output, str) and output.startswith("{") else output
    failed = _has_failed(parsed)
    if isinstance(parsed, dict) and isinstance(parsed.get("metadata"), dict) and "output" in parsed:
        output = parsed["output"]
    elif isinstance(output, dict) and "content" in output:
        failed, output = failed or output.get("success") is False, output["content"]
    elif isinstance(output, dict) and isinstance(output.get("text"), str):
        output = output["text"]
    if isinstance(output, list):  # parts of a script's output, some of which may be results of its commands
        texts = [text_at(part, "text") for part in output if isinstance(part, dict)]
        failed = failed or any(_has_failed(json_value(text)) for text in texts if text.startswith("{"))
        output = text_of(known_parts(output, counts), "payload.output", "payload.output[]", counts)
    text = as_text(output)
    head = text.partition("\nOutput:")[0][:1000]
    code = re.search(r"(?:\A|\n)(?:Exit code:|Process exited with code) (-?\d+)", head)
    failed = failed or (code is not None and code[1] != "0")
    failed = failed or text.startswith((  # outputs of failed calls that have no exit code
        "execution error", "exec_command failed", "failed to parse function arguments", "unsupported call",
        "apply_patch verification failed", "patch rejected", "aborted by user", "command timed out", "Script failed\n",
    ))  # fmt: skip
    return ToolResult(text, call_id, is_error=failed)


def _has_failed(result: Any) -> bool:
    """Return whether a command's result has a non-zero exit code, or a tool's says that it is an error."""
    if says_error(result):
        return True
    if not isinstance(result, dict) or "output" not in result:
        return False
    about = result["metadata"] if isinstance(result.get("metadata"), dict) else result
    return about.get("exit_code") not in (0, None)


def _printed(line: Mapping[str, Any], kind: str, counts: Counts) -> Entry:
    """Read a line of `codex exec --json`. It has neither the user's words nor times."""
    if kind == "thread.started":
        return Entry(facts={"session": text_at(line, "thread_id")}, opens="request")
    if kind == "turn.started":
        return Entry(opens="request")
    if kind == "turn.completed":
        return Entry(outcome=Outcome(True))
    if kind in ("turn.failed", "error"):
        error = line.get("error") if kind == "turn.failed" else line
        return Entry(outcome=Outcome(False, text_at(error, "message") if isinstance(error, dict) else None))
    item = line.get("item")
    if not isinstance(item, dict):
        raise RunRefused("not_a_line", f"item: {shown(item)} is not an object; the line is skipped")
    name = text_at(item, "type") or text_at(item, "item_type")
    messages = _completed(item, name, counts) if kind == "item.completed" else None
    if messages is None:
        counts.drop(f"{kind} lines" if kind != "item.completed" else f"{name} items")
        return Entry()
    return Entry(messages)


_EXECUTED: Final = {
    # the type of an item: the fields with the arguments of its call, and the field with the result; "": it has none
    "web_search": (("query",), ""), "todo_list": (("items",), ""),
    "command_execution": (("command",), "aggregated_output"), "file_change": (("changes",), "status"),
    "collab_tool_call": (("prompt", "receiver_thread_ids"), "agents_states"),
}  # fmt: skip


def _completed(item: dict[str, Any], kind: str, counts: Counts) -> tuple[Message, ...] | None:
    """Return the messages of an item of `codex exec --json`; None if its type is not read."""
    if kind in ("agent_message", "assistant_message", "plan"):
        return (Message("assistant", (Text(text_at(item, "text")),)),)
    if kind == "reasoning":
        return (Message("assistant", (Reasoning(text_at(item, "text")),)),)
    failed = item.get("status") in ("failed", "declined") or item.get("exit_code") not in (0, None)
    if kind in _EXECUTED:
        name = (text_at(item, "tool") or "collab") if kind == "collab_tool_call" else kind
        given, place = _EXECUTED[kind]
        arguments: Any = {field: item[field] for field in given if item.get(field) is not None}
        result = item.get(place)
    elif kind == "mcp_tool_call":
        place, name = "result", ".".join(filter(None, (text_at(item, "server"), text_at(item, "tool")))) or "mcp"
        arguments, result, error = item.get("arguments"), item.get("result"), item.get("error")
        failed = failed or says_error(result) or error is not None
        if error is not None:
            result = error
        elif isinstance(result, dict) and isinstance(result.get("content"), list):
            texts = [text_at(part, "text") for part in result["content"] if isinstance(part, dict)]
            result = "\n".join(filter(None, texts)) or result
    else:
        return tuple(built_in(item, kind, "item", counts)) if kind.endswith("_call") else None
    call_id = text_at(item, "id")
    call = Message("assistant", (ToolCall(name, arguments, call_id),))
    return (call, Message("tool", (ToolResult(as_text(result), call_id, is_error=failed),))) if place else (call,)


FORMAT: Final = Format(
    "codex", _knows, _read, of_header=frozenset({"session", "version", "subagent", "since", "ordinal"}),
    leaves_out=_is_left_out,
)  # fmt: skip

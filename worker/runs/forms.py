"""The forms in which runs are logged: how a form is recognised, and how its messages are read.

A form is a list of messages (of OpenAI's Chat Completions or Responses API, Anthropic's Messages API, or LangChain), or
a trajectory in ATIF. A reader counts what it leaves out, also what it does not know, and raises RunRefused, with the
place, at something unknown that may be a call or a result: a trace without it would be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from worker.runs.fields import (
    Counts,
    FieldPath,
    RunRefused,
    as_time,
    count_unread,
    find_field,
    is_empty,
    objects_of,
    says_error,
    shown,
    text_field,
)
from worker.runs.messages import Message, Part, Reasoning, Role, Text, ToolCall, ToolResult, Transcript, as_text

TEXT_PARTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Content parts that are text, and the field with the text."""

MEDIA_PARTS: Final = {
    "image": "images", "image_url": "images", "input_image": "images", "audio": "audio", "input_audio": "audio",
    "file": "files", "input_file": "files", "video": "videos", "video_url": "videos",
}  # fmt: skip
"""Content parts that no step can hold, and their names in the report."""


_CALL_WORDS: Final = frozenset({"call", "calls", "function", "functions", "tool", "tools"})

_CALL_FIELDS: Final = frozenset({
    "args", "arguments", "call_id", "function_call", "tool_call", "tool_calls", "tool_call_id", "tool_call_ids",
    "tool_name", "tool_use_id", "toolCalls",
})  # fmt: skip


def leave_out(value: Any, kind: Any, place: str, what: str, counts: Counts) -> None:
    """Count something of an unknown type. Raises RunRefused if its type or a field speaks of a call."""
    inner = value.get("value") if isinstance(value, dict) else None  # as LangChain's parts `non_standard` have it
    for each, name in ((value, kind), (inner, part_type_of(inner))):
        fields = each.keys() if isinstance(each, dict) else set[str]()
        if not isinstance(each, dict | None) or (each is value and not isinstance(name, str)):
            raise RunRefused("not_a_run", f"{place}: {what} {shown(name)} is not known")
        if (
            _CALL_WORDS & {*re.findall("[a-z]+", str(name).lower())}
            or _CALL_FIELDS & fields
            or ({"name", "input"} <= fields)
        ):
            raise RunRefused("not_a_run", f"{place}: {what} {shown(name)} is not known, and may be a call or a result")
    counts.drop(f"{what} {shown(kind)}, which is not known")


def text_of(content: Any, place: str, kind: str, counts: Counts) -> str:
    """Return the text of a content, its parts joined by line breaks; other parts are counted."""
    texts = []
    for number, part in enumerate(_parts(content, place)):
        part_type = part_type_of(part)
        if isinstance(part, str):
            texts.append(part)
        elif part_type in TEXT_PARTS:
            name = TEXT_PARTS[part_type] if TEXT_PARTS[part_type] in part else "content"  # AgentDojo's name
            texts.append(text_field(part, name, f"{place}.{number}"))
            count_unread(part, {"type", name}, f"{kind}.", counts)
        elif part_type in MEDIA_PARTS:
            counts.drop(MEDIA_PARTS[part_type])
        elif part_type != "thinking":
            leave_out(part, part_type, f"{place}.{number}", "part type", counts)
    return "\n".join(texts)


def _parts(content: Any, place: str, what: str = "parts") -> list[Any]:
    """Return the parts of a content; a text is the only one."""
    if content is None or isinstance(content, str):
        return [content or ""]
    if not isinstance(content, list):
        raise RunRefused("not_a_run", f"{place}: {shown(content)} is neither a text nor a list of {what}")
    return content


def part_type_of(part: Any) -> str | None:
    """Return the type of a content part; None if it has none."""
    part_type = part.get("type") if isinstance(part, Mapping) else None
    return part_type if isinstance(part_type, str) else None


def _role_of(message: Any, known: Iterable[str], place: str) -> str:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in known:
        raise RunRefused("not_a_run", f"{place}: role {shown(role)} is not one of {', '.join(known)}")
    return role


def _name_of(called: Any, place: str, needs: str = "a tool call needs a name", field: str = "name") -> str:
    name = called.get(field) if isinstance(called, dict) else None
    if not isinstance(name, str):
        raise RunRefused("not_a_run", f"{place}: {needs}")
    return name


def _joined_texts(parts: Iterable[Part | None]) -> str:
    return "\n".join(part.text for part in parts if isinstance(part, Text))


# OpenAI's Chat Completions API

_CHAT: Final = {
    # role: the fields that are read; any other field that is not empty is counted
    "system": {"role", "content"},
    "developer": {"role", "content"},
    "user": {"role", "content"},
    "assistant": {
        "role", "content", "refusal", "tool_calls", "function_call", "audio", "reasoning_content", "reasoning",
    },
    "tool": {
        "role", "content", "tool_call_id", "tool_call_ids", "tool_call", "id", "name", "is_error", "isError", "status",
        "error",
    },
    "function": {"role", "content", "name", "is_error", "status"},
}  # fmt: skip


_SPEAKERS: Final = frozenset({"agent", "ai", "bot", "gpt", "human", "model"})
"""Roles of other forms whose texts a run needs."""


def chat_messages(messages: list[Any], counts: Counts, place: str) -> Iterator[Message]:
    """Yield chat messages in OpenAI's style."""
    called: dict[str, str] = {}
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if isinstance(message, dict) and message.get("is_demo") is True:
            counts.drop("messages of a demonstration")
            continue
        if isinstance(role, str) and role not in (*_CHAT, *_SPEAKERS):  # a note, such as the `exit` of mini-SWE-agent
            leave_out(message, role, f"{place}.{number}", "role", counts)
            continue
        read = _chat_message(message, f"{place}.{number}", counts)
        for part in read.parts:
            if isinstance(part, ToolCall) and part.call_id:
                called[part.call_id] = part.name
            elif isinstance(part, ToolResult) and part.call_id and part.name not in ("", called.get(part.call_id)):
                counts.drop("messages[].name")
        yield read


def _chat_message(message: Any, place: str, counts: Counts) -> Message:
    if isinstance(message, dict) and "role" not in message:
        raise RunRefused("not_a_run", f"{place} has no role: it is not a message in OpenAI's style")
    role = _role_of(message, _CHAT, place)
    text = text_of(message.get("content"), f"{place}.content", "messages[].content[]", counts)
    if role in ("system", "developer"):
        counts.drop(f"{role} messages")
        read = Message("system", (Text(text),))
    elif role == "user":
        read = Message("user", (Text(text),))
    elif role == "assistant":
        read = Message("assistant", tuple(_chat_parts(message, text, place, counts)))
    else:
        ids = message.get("tool_call_ids")  # of SWE-agent; of tau2 it is `id`
        first = ids[0] if isinstance(ids, list) and ids and isinstance(ids[0], str) else ""
        call_id = text_field(message, "tool_call_id", place) or first or text_field(message, "id", place)
        name = text_field(message, "name", place)
        text = text or (message["error"] if isinstance(message.get("error"), str) else "")
        read = Message("tool", (ToolResult(text, call_id, name, is_error=says_error(message, of_log=True)),))
    count_unread(message, _CHAT[role], "messages[].", counts)
    return read


def _chat_parts(message: dict[str, Any], text: str, place: str, counts: Counts) -> Iterator[Part]:
    reasoning = [text_field(message, name, place) for name in ("reasoning_content", "reasoning")]
    for part in dict.fromkeys(reasoning):  # some servers send the same text under both names
        yield Reasoning(part)
    content = message.get("content")
    for number, part in enumerate(content if isinstance(content, list) else []):
        if part_type_of(part) == "thinking":  # of Mistral
            where = f"{place}.content.{number}.thinking"
            yield Reasoning(text_of(part.get("thinking"), where, "messages[].content[]", counts))
    audio = message.get("audio")
    if isinstance(audio, dict):
        counts.drop("audio")
        yield Text(text_field(audio, "transcript", f"{place}.audio"))
    yield Text(text)
    yield Text(text_field(message, "refusal", place))
    legacy = message.get("function_call")
    if not is_empty(legacy):
        yield _chat_call({"function": legacy}, f"{place}.function_call", counts)
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise RunRefused("not_a_run", f"{place}.tool_calls: {shown(calls)} is not a list")
    for number, call in enumerate(calls):
        yield _chat_call(call, f"{place}.tool_calls.{number}", counts)


def _chat_call(call: Any, place: str, counts: Counts) -> ToolCall:
    call = call if isinstance(call, dict) else {}
    flat = call.get("function") if isinstance(call.get("function"), str) else call.get("name")
    if isinstance(flat, str) and not isinstance(call.get("function"), dict):  # of tau2 and AgentDojo
        given = "arguments" if "arguments" in call else "args"
        known = {"id", "type", "name", "function", given, "requestor", "placeholder_args"}
        count_unread(call, known, "messages[].tool_calls[].", counts)
        return ToolCall(flat, call.get(given), text_field(call, "id", place))
    kind, given = ("custom", "input") if isinstance(call.get("custom"), dict) else ("function", "arguments")
    called = call.get(kind)
    name = _name_of(called, place, f"a tool call needs a {kind} with a name")
    call_id = text_field(call, "id", place)
    count_unread(call, {"id", "type", kind}, "messages[].tool_calls[].", counts)
    count_unread(called, {"name", given}, f"messages[].tool_calls[].{kind}.", counts)
    arguments = called.get(given)
    return ToolCall(name, {"input": arguments} if kind == "custom" else arguments, call_id)


# OpenAI's Responses API: the input of a request and the output of its response

ITEMS: Final = frozenset({"function_call", "function_call_output", "reasoning", "custom_tool_call", "item_reference"})
"""Item types that occur in no other form."""

_ITEM_ROLES: Final[dict[str, Role]] = {
    "user": "user", "assistant": "assistant", "system": "system", "developer": "system",
}  # fmt: skip

_OUTPUTS: Final = ("output", "outputs", "results", "result", "error")
"""Fields of a built-in tool's call that hold its result."""

_NO_INPUT: Final = frozenset({
    "id", "type", "status", "call_id", "metadata", "internal_chat_message_metadata_passthrough", *_OUTPUTS,
})  # fmt: skip


def responses_messages(items: list[Any], counts: Counts, place: str) -> Iterator[Message]:
    """Yield the items of a list as messages."""
    for number, item in enumerate(items):
        yield from _item(item, f"{place}.{number}", counts)


def _item(item: Any, place: str, counts: Counts) -> Iterator[Message]:
    kind = part_type_of(item)
    if kind in (None, "message"):
        role = _role_of(item, _ITEM_ROLES, place)
        if _ITEM_ROLES[role] == "system":
            counts.drop(f"{role} messages")
        text = text_of(item.get("content"), f"{place}.content", "input[].content[]", counts)
        count_unread(item, {"type", "id", "status", "role", "content"}, "input[].", counts)
        yield Message(_ITEM_ROLES[role], (Text(text),))
    elif kind == "reasoning":
        parts = [*objects_of(item, "summary", f"{place}.summary"), *objects_of(item, "content", f"{place}.content")]
        if not parts:
            counts.drop("reasoning that is encrypted or not shown")
        yield Message("assistant", tuple(Reasoning(text_field(part, "text", place)) for part in parts))
    elif kind in ("function_call", "custom_tool_call"):
        arguments = item.get("arguments") if kind == "function_call" else {"input": item.get("input")}
        call = ToolCall(_name_of(item, place), arguments, text_field(item, "call_id", place))
        yield Message("assistant", (call,))
        count_unread(item, {"type", "id", "status", "call_id", "name", "arguments", "input"}, "input[].", counts)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        output = item.get("output")
        if isinstance(output, list):
            text = text_of(output, f"{place}.output", "input[].output[]", counts)
        else:
            text = as_text(output)
        call_id = text_field(item, "call_id", place)
        yield Message("tool", (ToolResult(text, call_id, is_error=item.get("status") == "incomplete"),))
    elif kind == "item_reference":
        counts.drop("references to items of other responses")
    elif (kind is not None and kind.endswith("_call")) or kind == "program":
        yield from built_in(item, kind, place, counts)
    elif kind is not None and kind.endswith("_output"):
        call_id = text_field(item, "call_id", place)
        output = next((item[name] for name in ("tools", *_OUTPUTS) if item.get(name) is not None), None)
        failed = item.get("status") in ("failed", "incomplete")
        yield Message("tool", (ToolResult(as_text(output), call_id, is_error=failed),))
    elif kind in ("mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "compaction"):
        counts.drop(f"{kind} items")
    else:
        leave_out(item, kind, place, "item type", counts)


def built_in(item: dict[str, Any], kind: str, place: str, counts: Counts) -> Iterator[Message]:
    """Yield the call of a built-in tool, and its result if the item has one."""
    if kind == "image_generation_call":
        counts.drop("images", "result" in item)
        item = {name: value for name, value in item.items() if name != "result"}
    if kind == "mcp_call":
        name, arguments = _name_of(item, place), item.get("arguments")
    else:
        name = kind.removesuffix("_call")
        arguments = {name: value for name, value in item.items() if name not in _NO_INPUT}
    call = ToolCall(name, arguments, text_field(item, "call_id" if "call_id" in item else "id", place))
    yield Message("assistant", (call,))
    for output in _OUTPUTS:
        if item.get(output) is not None:
            failed = output == "error" or item.get("status") == "failed"
            yield Message("tool", (ToolResult(as_text(item[output]), call.call_id, is_error=failed),))
            return


# Anthropic's Messages API

BLOCKS: Final = frozenset(
    {"thinking", "redacted_thinking", "tool_use", "tool_result", "server_tool_use", "mcp_tool_use"}
)
"""Block types that occur in no other form."""

_ANTHROPIC_ROLES: Final[dict[str, Role]] = {"user": "user", "assistant": "assistant", "system": "system"}

_USES: Final = ("tool_use", "server_tool_use", "mcp_tool_use")

_LEFT_OUT: Final = frozenset({*MEDIA_PARTS, "redacted_thinking", "document", "search_result", "container_upload"})
"""Block types without text for a trace."""

_OF_RESPONSE: Final = {"id", "type", "role", "content", "model", "stop_reason", "stop_sequence", "usage", "container"}
"""Fields of a message that is a response."""


def anthropic_messages(messages: list[Any], counts: Counts, place: str) -> Iterator[Message]:
    """Yield messages whose contents are blocks, with thinking, tool_use and tool_result."""
    for number, message in enumerate(messages):
        where = f"{place}.{number}"
        role = _role_of(message, _ANTHROPIC_ROLES, where)
        if role == "system":
            counts.drop("system messages")
        yield Message(_ANTHROPIC_ROLES[role], tuple(parts_of(message.get("content"), f"{where}.content", role, counts)))
        known = _OF_RESPONSE if message.get("type") == "message" else {"role", "content"}
        count_unread(message, known, "messages[].", counts)


def parts_of(content: Any, place: str, role: str, counts: Counts) -> Iterator[Part]:
    """Yield the parts of a message's content: a string, or a list of blocks."""
    blocks = [
        _block(block, f"{place}.{number}", counts) for number, block in enumerate(_parts(content, place, "blocks"))
    ]
    if role == "user":  # results first: the user's words after them are one text
        yield from (block for block in blocks if isinstance(block, ToolResult))
        yield Text(_joined_texts(blocks))
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
        name = _name_of(block, place, f"a {kind} needs a name")
        return ToolCall(name, block.get("input"), text_field(block, "id", place))
    if kind is not None and kind.endswith("tool_result"):
        call_id, content, failed = text_field(block, "tool_use_id", place), block.get("content"), False
        if isinstance(content, list) and all(part_type_of(part) in ("text", "image", "document") for part in content):
            parts = [_block(part, f"{place}.content.{number}", counts) for number, part in enumerate(content)]
            content = _joined_texts(parts)
        elif isinstance(content, dict):  # of a server tool
            failed = str(content.get("type")).endswith("_error")
        return ToolResult(as_text(content), call_id, is_error=failed or block.get("is_error") is True)
    if kind == "redacted_thinking":
        counts.drop("redacted thinking")
    elif kind in _LEFT_OUT:
        counts.drop(MEDIA_PARTS.get(str(kind), "documents"))
    else:
        leave_out(block, kind, place, "block type", counts)
    return None


# LangChain, as written by `messages_to_dict` and `dumpd`, and in the state of a LangGraph graph

_KINDS: Final[dict[str, Role]] = {
    "human": "user", "ai": "assistant", "system": "system", "tool": "tool", "function": "tool", "chat": "user",
}  # fmt: skip

_CHAT_ROLES: Final[dict[str, Role]] = {
    "user": "user", "human": "user", "assistant": "assistant", "ai": "assistant", "system": "system",
    "developer": "system", "tool": "tool",
}  # fmt: skip
"""What the role of a message of the kind `chat` means."""

_LANGCHAIN: Final = {
    "type", "content", "id", "tool_calls", "invalid_tool_calls", "tool_call_id", "name", "status", "role", "example",
    "additional_kwargs", "tool_call_chunks",
}  # fmt: skip

_EXTRA: Final = {"tool_calls", "function_call", "reasoning_content", "refusal"}
"""Fields of additional_kwargs that are read."""


def _langchain_kind(message: Any) -> str | None:
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


def langchain_messages(messages: list[Any], counts: Counts, place: str) -> Iterator[Message]:
    """Yield the messages of a list."""
    for number, message in enumerate(messages):
        where, kind = f"{place}.{number}", _langchain_kind(message)
        if kind is None:
            what = f"type {shown(part_type_of(message))}"
            raise RunRefused("not_a_run", f"{where}: {what} is not a message of LangChain's")
        body = message.get("kwargs" if message["type"] == "constructor" else "data", message)
        if not isinstance(body, dict):
            raise RunRefused("not_a_run", f"{where}: {shown(body)} is not an object")
        yield _langchain_message(kind, body, where, counts)


def _langchain_message(kind: str, body: dict[str, Any], place: str, counts: Counts) -> Message:
    role = _KINDS[kind] if kind != "chat" else _CHAT_ROLES.get(str(body.get("role")).lower(), "user")
    parts = list(_langchain_parts(body.get("content"), f"{place}.content", counts))
    extra = body["additional_kwargs"] if isinstance(body.get("additional_kwargs"), dict) else {}
    if role == "tool":
        call_id = text_field(body, "tool_call_id", place)
        name = "" if call_id else text_field(body, "name", place)
        parts = [ToolResult(_joined_texts(parts), call_id, name, is_error=body.get("status") == "error")]
    elif role == "assistant":
        where = f"{place}.additional_kwargs"
        calls = list(_langchain_calls(body, extra, place))
        # The content has them, too, and calls of the service's own tools.
        own = {part.call_id for part in calls}
        others = [part for part in parts if not isinstance(part, ToolCall) or part.call_id not in own]
        parts = [Reasoning(text_field(extra, "reasoning_content", where)), Text(text_field(extra, "refusal", where))]
        parts += [*others, *calls]
    else:
        parts = [Text(_joined_texts(parts))]
        if role == "system":
            counts.drop("system messages")
    count_unread(body, _LANGCHAIN, "messages[].", counts)
    count_unread(extra, _EXTRA, "messages[].additional_kwargs.", counts)
    return Message(role, tuple(parts))


def _langchain_parts(content: Any, place: str, counts: Counts) -> Iterator[Part]:
    for number, part in enumerate(_parts(content, place)):
        kind = part_type_of(part)
        if isinstance(part, str):
            yield Text(part)
        elif kind in TEXT_PARTS:
            yield Text(text_field(part, TEXT_PARTS[kind], f"{place}.{number}"))
        elif kind in (*_USES, "tool_call", "invalid_tool_call", "function_call", "server_tool_call"):
            given = next((part[name] for name in ("args", "arguments", "input") if part.get(name) is not None), None)
            call_id = text_field(part, "call_id" if "call_id" in part else "id", f"{place}.{number}")
            yield ToolCall(_name_of(part, f"{place}.{number}"), given, call_id)
        elif kind is not None and kind.endswith("tool_result"):
            name = "tool_call_id" if "tool_call_id" in part else "tool_use_id"
            found = part.get("output") if "output" in part else part.get("content")
            failed = says_error(part, of_log=True)
            yield ToolResult(as_text(found), text_field(part, name, f"{place}.{number}"), is_error=failed)
        elif kind in ("thinking", "reasoning"):
            summary = objects_of(part, "summary", f"{place}.{number}.summary")
            texts = [part.get(kind), part.get("text"), *(each.get("text") for each in summary)]
            yield Reasoning("\n".join(text for text in texts if isinstance(text, str)))
        elif kind in MEDIA_PARTS:
            counts.drop(MEDIA_PARTS[kind])
        elif kind not in ("redacted_thinking", "input_json_delta"):
            leave_out(part, kind, f"{place}.{number}", "part type", counts)


def _langchain_calls(body: dict[str, Any], extra: dict[str, Any], place: str) -> Iterator[ToolCall]:
    """Yield the calls of a message; those with invalid JSON are in `invalid_tool_calls`."""
    where = f"{place}.tool_calls"
    calls = objects_of(body, "tool_calls", where)
    invalid = objects_of(body, "invalid_tool_calls", f"{place}.invalid_tool_calls")
    for each in (*calls, *invalid):
        yield ToolCall(_name_of(each, where), each.get("args"), text_field(each, "id", where))
    if calls or invalid:
        return
    where = f"{place}.additional_kwargs.tool_calls"
    for each in objects_of(extra, "tool_calls", where):
        called = each.get("function")
        if isinstance(called, dict) and isinstance(called.get("name"), str):
            yield ToolCall(called["name"], called.get("arguments"), text_field(each, "id", where))
    legacy = extra.get("function_call")
    if isinstance(legacy, dict) and isinstance(legacy.get("name"), str):
        yield ToolCall(legacy["name"], as_text(legacy.get("arguments")))


# All forms that are lists of messages

READERS: Final[Mapping[str, Callable[[list[Any], Counts, str], Iterator[Message]]]] = {
    "chat": chat_messages,
    "anthropic": anthropic_messages,
    "responses": responses_messages,
    "langchain": langchain_messages,
}
"""The forms, and the reader of a list of messages in each."""

_STATES: Final = (("messages",), ("values", "messages"), ("channel_values", "messages"))
"""Where a graph's state has its messages: in the state, in a snapshot, and in a checkpoint."""


def form_of(run: Any, path: FieldPath | None = None, append: FieldPath | None = None) -> str:
    """Return the form of a run: one of READERS, or "atif". `path`, `append`: see `messages_of`. Raises RunRefused."""
    if isinstance(run, dict) and str(run.get("schema_version")).startswith("ATIF"):
        return "atif"
    items: list[Any] = run if isinstance(run, list) else []  # probably its messages
    for place in () if isinstance(run, list) else (*_STATES, ("input",), ("output",)) if path is None else (path,):
        if (found := find_field(run, place)) is not None and isinstance(found[1], list):
            items = found[1]
            break
    if append is not None and (found := find_field(run, append)) is not None:
        items = [*items, *answer_of(found[1])]
    for item in items:
        kind = part_type_of(item)
        content = item.get("content") if isinstance(item, dict) else None
        parts = content if isinstance(content, list) else []
        if any(isinstance(part, dict) and isinstance(part.get("thinking"), list) for part in parts):
            return "chat"  # of Mistral
        types = {part_type_of(part) for part in parts}
        if isinstance(item, dict) and "role" not in item and _langchain_kind(item) is not None:
            return "langchain"
        if kind in ITEMS or (kind == "message" and types & {"input_text", "output_text"}):
            return "responses"
        if types & BLOCKS:
            return "anthropic"
        if isinstance(item, dict) and (item.get("tool_calls") or item.get("role") in ("tool", "function", "developer")):
            return "chat"
    if isinstance(run, dict) and path is None and "messages" not in run and "input" in run:
        return "responses"
    if items and all(isinstance(item, dict) and isinstance(item.get("role"), str) for item in items):
        return "anthropic" if isinstance(run, dict) and "system" in run else "chat"
    raise RunRefused("unknown_form", f"no known form: {_looks_like(run)}")


_SHAREGPT: Final = (
    'ShareGPT: jq -c \'.messages = [.conversations[] | {role: ({human: "user", gpt: "assistant"}[.from] // .from), '
    "content: .value}]'"
)

_LOOKS: Final = (
    # fields of a run: what it looks like, and what to do
    ({"request", "response"}, "a log of requests and responses: give --messages @request.messages --append @response"),
    ({"choices"}, "a response alone: log its request beside it, and give --messages and --append"),
    ({"conversations"}, _SHAREGPT),
    ({"contents"}, "a request to Gemini: write its contents as chat messages"),
    ({"run_type", "inputs"}, "a run of LangSmith: give --from langchain --messages @PATH, such as @outputs.messages"),
    ({"resourceSpans"}, "OTLP: give --from otlp"),
    ({"resourceLogs"}, "OTLP: give --from otlp"),
    ({"context", "attributes"}, "a span of OpenTelemetry's console exporter: export it as OTLP, and give --from otlp"),
    ({"role"}, "a message, not a run: jq -sc . FILE makes one run of a file of messages"),
)


def _looks_like(run: Any) -> str:
    """Return what a run of unknown form looks like, and what to do."""
    if isinstance(run, dict):
        for names, looks in _LOOKS:
            if names <= run.keys():
                return f"this looks like {looks}"
        fields = ", ".join(sorted(map(str, run))[:5])
        return f"an object with {shown(fields)}; --messages @PATH names its list of messages, --from its form"
    if isinstance(run, list) and run and (isinstance(run[0], list) or _is_run(run[0], (*_STATES, ("conversations",)))):
        return "this looks like a list of runs: jq -c '.[]' FILE writes one run a line"
    return f"{shown(run)}; a run is a list of messages, or an object with one"


def _is_run(item: Any, places: Sequence[FieldPath]) -> bool:
    """Return whether a list's first item is a run: a message has no list of messages in any of `places`."""
    if isinstance(item, dict) and ("role" in item or "type" in item):
        return False
    return any(find_field(item, place) is not None for place in places)


def messages_of(run: Any, form: str, path: FieldPath | None, append: FieldPath | None, counts: Counts) -> tuple[
    list[Message], list[Message], set[FieldPath]
]:  # fmt: skip
    """Return the messages of a run, the messages of the response that `append` names, and the paths that were read.

    `path`: where the messages of an object are; None: where the form has them. Raises RunRefused.
    """
    used: set[FieldPath] = set()
    read = READERS[form]
    if form == "responses" and isinstance(run, dict) and path is None:
        messages = [message for name in ("input", "output") for message in _input_or_output(run, name, used, counts)]
    else:
        messages = list(read(_list_of_messages(run, form, path, used), counts, "messages"))
    if append is None:
        return messages, [], used
    found = find_field(run, append)
    name = ".".join(append)
    if found is None or found[1] is None:
        raise RunRefused("missing_value", f"the run has no field {name}, which --append names")
    used.add(found[0])
    return messages, list(read(answer_of(found[1]), counts, name)), used


def _input_or_output(run: dict[str, Any], name: str, used: set[FieldPath], counts: Counts) -> Iterator[Message]:
    """Yield the input or output of the Responses API; a string is a message."""
    value = run.get(name)
    used.add((name,))
    if isinstance(value, str):
        value = [{"role": "user" if name == "input" else "assistant", "content": value}]
    if value is not None and not isinstance(value, list):
        raise RunRefused("not_a_run", f"{name}: {shown(value)} is neither a text nor a list of items")
    yield from responses_messages(value or [], counts, name)


def _list_of_messages(run: Any, form: str, path: FieldPath | None, used: set[FieldPath]) -> list[Any]:
    places = (path,) if path is not None else _STATES if form == "langchain" else (("messages",),)
    messages = run
    if isinstance(run, dict):
        if isinstance(run.get("role"), str):
            raise RunRefused("not_a_run", "this is a message, not a run; one run a line is expected: jq -sc . FILE")
        found = next((found for place in places if (found := find_field(run, place)) is not None), None)
        if found is None:
            name = ".".join(path or ("messages",))
            raise RunRefused("not_a_run", f"the run has no field {name}: --messages says where its messages are")
        used.add(found[0])
        messages = found[1]
    if isinstance(messages, str) and form == "responses":
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list):
        raise RunRefused("not_a_run", f"{shown(messages)} is not a list of messages")
    if messages and (isinstance(messages[0], list) or _is_run(messages[0], places)):
        raise RunRefused("not_a_run", "this is a list of runs; one run a line is expected: jq -c '.[]' FILE")
    return messages


def answer_of(value: Any) -> list[Any]:
    """Return the messages of a response: a message, a list of them, a string, or a whole response."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    if not isinstance(value, dict):
        return value if isinstance(value, list) else [value]
    choices, output = value.get("choices"), value.get("output")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        return [choices[0].get("message")]
    return output if isinstance(output, list) else [value]


# ATIF (Agent Trajectory Interchange Format, v1.x)

SOURCES: Final = ("system", "user", "agent")

_STEP: Final = {"step_id", "source", "message", "reasoning_content", "tool_calls", "observation", "is_copied_context"}
_RESULT: Final = {"source_call_id", "content", "extra", "subagent_trajectory_ref"}


def agents(run: Any, above: Any = None) -> Iterator[tuple[Any, Any]]:
    """Yield a trajectory, then its subagents that have an id (ATIF 1.7), each with its parent."""
    yield run, above
    subagents = run.get("subagent_trajectories") if isinstance(run, dict) else None
    for each in subagents if isinstance(subagents, list) else []:
        if _is_subagent(each):
            yield from agents(each, run)


def _is_subagent(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("trajectory_id"), str)


def read_atif(run: Any, transcript: Transcript) -> None:
    """Read a trajectory. Raises RunRefused, with the place."""
    version = run.get("schema_version") if isinstance(run, dict) else None
    if not isinstance(version, str) or not re.match(r"ATIF-v1\.\d", version):
        raise RunRefused("not_a_run", f"schema_version {shown(version)} is not ATIF-v1.x")
    agent = run.get("agent")
    if isinstance(agent, dict) and isinstance(agent.get("name"), str):
        transcript.framework = agent["name"] or None
    transcript.used |= {("schema_version",), ("steps",), ("subagent_trajectories",)}
    if "framework" not in transcript.given:
        transcript.used.add(("agent", "name"))
    if subagents := run.get("subagent_trajectories"):
        listed = subagents if isinstance(subagents, list) else [subagents]
        transcript.counts.drop("subagent trajectories", sum(not _is_subagent(each) for each in listed))
    steps = objects_of(run, "steps", "steps")
    for number, step in enumerate(steps):
        _read_step(step, f"steps.{number}", transcript)
    times = [step["timestamp"] for step in steps if not is_empty(step.get("timestamp"))]
    if times and "created_at" not in transcript.given:
        try:
            transcript.created_at = as_time(times[-1])
        except ValueError as error:
            raise RunRefused("invalid_value", f"the last timestamp {error}, or give --created-at") from None
        transcript.counts.drop("steps[].timestamp", len(times) - 1)


def _read_step(step: dict[str, Any], place: str, transcript: Transcript) -> None:
    source, counts = step.get("source"), transcript.counts
    if source not in SOURCES:
        raise RunRefused("not_a_run", f"{place}: source {shown(source)} is not one of {', '.join(SOURCES)}")
    text = text_of(step.get("message"), f"{place}.message", "steps[].message[]", counts)
    if step.get("is_copied_context") is True:
        counts.drop("steps copied from an earlier trajectory")
        if source == "user" and transcript.objective is None:
            transcript.add_user(text)
        return
    parts: list[Part] = []
    if source == "system":
        if text:
            counts.drop("system messages")
    elif source == "user":
        transcript.add_user(text)
    else:
        reasoning = text_of(step.get("reasoning_content"), f"{place}.reasoning_content", "steps[]", counts)
        parts += [Reasoning(reasoning), Text(text)]
    for number, call in enumerate(objects_of(step, "tool_calls", f"{place}.tool_calls")):
        where = f"{place}.tool_calls.{number}"
        name = _name_of(call, where, "a tool call needs a function_name", "function_name")
        parts.append(ToolCall(name, call.get("arguments"), text_field(call, "tool_call_id", where)))
        count_unread(call, {"tool_call_id", "function_name", "arguments"}, "steps[].tool_calls[].", counts)
    transcript.add(Message("assistant", tuple(parts)))
    observation = step.get("observation")
    if not is_empty(observation):
        if not isinstance(observation, dict):
            raise RunRefused("not_a_run", f"{place}.observation: {shown(observation)} is not an object")
        results = enumerate(objects_of(observation, "results", f"{place}.observation.results"))
        read = [_atif_result(result, f"{place}.observation.results.{number}", counts) for number, result in results]
        transcript.add(Message("tool", tuple(read)))
        count_unread(observation, {"results"}, "steps[].observation.", counts)
    timestamp = set() if "created_at" in transcript.given else {"timestamp"}
    count_unread(step, _STEP | timestamp, "steps[].", counts)


def _atif_result(result: dict[str, Any], place: str, counts: Counts) -> ToolResult:
    kind = "steps[].observation.results[]."
    text = text_of(result.get("content"), f"{place}.content", f"{kind}content[]", counts)
    call_id = text_field(result, "source_call_id", place)
    extra = result.get("extra")
    if isinstance(extra, dict):
        count_unread(extra, {"is_error", "status"}, f"{kind}extra.", counts)
    if references := result.get("subagent_trajectory_ref"):
        counts.drop("references to subagents", len(references) if isinstance(references, list) else 1)
    count_unread(result, _RESULT, kind, counts)
    return ToolResult(text, call_id, is_error=says_error(extra, of_log=True))

"""The forms in which runs are logged: how a form is recognised, and how its messages are read.

A form is a list of messages (of OpenAI's Chat Completions or Responses API, Anthropic's Messages API, or LangChain), or
a trajectory in ATIF. A reader counts what it leaves out, also what it does not know, and raises RunRefused, with the
place, at something unknown that may be a call or a result: a trace without it would be wrong.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from worker.runs.fields import (
    Counts,
    FieldPath,
    RunRefused,
    as_time,
    count_unread,
    find_field,
    first_given,
    is_empty,
    is_marked_error,
    objects_of,
    says_error,
    shown,
    text_field,
)
from worker.runs.messages import Message, Part, Reasoning, Role, Text, ToolCall, ToolResult, Transcript, as_text, joined

ROLES: Final[Mapping[str, Role]] = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
    "ai": "assistant", "model": "assistant", "thinking": "assistant", "tool-call": "assistant", "tool": "tool",
    "function": "tool", "tool-response": "tool", "ipython": "tool",
}  # fmt: skip
"""Roles of messages by their names in all forms, also those that only spans have."""

TEXT_PARTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Content parts that are text, and the field with the text."""

MEDIA_PARTS: Final = {
    "image": "images", "image_url": "images", "input_image": "images", "audio": "audio", "input_audio": "audio",
    "file": "files", "input_file": "files", "video": "videos", "video_url": "videos", "document": "documents",
    "search_result": "documents", "container_upload": "documents", "redacted_thinking": "redacted thinking",
}  # fmt: skip
"""Content parts that no step can hold, and their names in the report."""

CALLS: Final = frozenset({
    "tool_use", "server_tool_use", "mcp_tool_use", "tool_call", "server_tool_call", "invalid_tool_call",
    "custom_tool_call", "mcp_tool_call", "function_call", "toolCall",
})  # fmt: skip
"""Content parts, and items of the Responses API, that are calls and have the tool's name."""

NAMES: Final = ("name", "tool_name", "toolName", "function_name", "function")
IDS: Final = ("call_id", "id", "tool_call_id", "toolCallId", "toolUseId", "tool_use_id")
"""Fields of calls and results with the tool's name, and with the call's id."""

_ARGUMENTS: Final = ("arguments", "args", "input", "parameters")

_OF_CALL: Final = frozenset({*NAMES, *_ARGUMENTS})
"""The fields of a call that are read beside its id."""

_THOUGHTS: Final = ("thinking", "reasoning")

_KNOWN: Final = frozenset({*TEXT_PARTS, *MEDIA_PARTS, *CALLS, *_THOUGHTS})

_RESULT_MEDIA: Final = MEDIA_PARTS.keys() - {"search_result"}
"""The media of results, which are left out of them; a search result has texts deeper inside."""

_RESULT_PARTS: Final = TEXT_PARTS.keys() | _RESULT_MEDIA

_CALL_FIELDS: Final = frozenset({
    "args", "arguments", "call_id", "function_call", "tool_call", "tool_calls", "tool_call_id", "tool_call_ids",
    "tool_name", "tool_use_id", "toolCalls",
})  # fmt: skip


def _leave_out(value: Any, kind: Any, place: str, what: str, counts: Counts) -> None:
    """Count something of an unknown type. Raises RunRefused if its type or a field speaks of a call."""
    inner = value.get("value") if isinstance(value, dict) else None  # as LangChain's parts `non_standard` have it
    for each, name in ((value, kind), (inner, part_type_of(inner))):
        fields = each.keys() if isinstance(each, dict) else set[str]()
        if not isinstance(each, dict | None) or (each is value and not isinstance(name, str)):
            raise RunRefused("not_a_run", f"{place}: {what} {shown(name)} is not known")
        is_call = re.search(r"(?<![a-z])(?:call|function|tool)s?(?![a-z])", str(name).lower()) is not None
        if is_call or _CALL_FIELDS & fields or {"name", "input"} <= fields:
            raise RunRefused("not_a_run", f"{place}: {what} {shown(name)} is not known, and may be a call or a result")
    counts.drop(f"{what} {shown(kind)}, which is not known")


def part_type_of(part: Any) -> str | None:
    """Return the type of a content part; None if it has none."""
    part_type = part.get("type") if isinstance(part, Mapping) else None
    return part_type if isinstance(part_type, str) else None


def known_parts(content: Any, counts: Counts) -> Any:
    """Return a content without the parts of unknown types: newer versions have more types, or encrypt some."""
    if not isinstance(content, list):
        return content
    types = [part_type_of(part) for part in content]
    kept = [
        part for part, kind in zip(content, types, strict=True)
        if kind is None or kind in _KNOWN or kind.endswith("tool_result")
    ]  # fmt: skip
    counts.drop("parts of other types", len(content) - len(kept))
    return kept


def parts_of(content: Any, place: str, role: str, counts: Counts, kind: str = "messages[].content[]") -> list[Part]:
    """Return the parts of a content: a text, or a list of parts; those without a place in a trace are counted.

    Of a user the results come first, then one text. `kind`: of the parts, to count their unread fields.
    """
    if content is None or isinstance(content, str):
        return [Text(content or "")]
    if not isinstance(content, list):
        raise RunRefused("not_a_run", f"{place}: {shown(content)} is neither a text nor a list of parts")
    read = [_part(part, f"{place}.{number}", counts, kind) for number, part in enumerate(content)]
    parts = [part for part in read if part is not None]
    if role == "assistant":
        return parts
    if any(isinstance(part, ToolCall) for part in parts):
        raise RunRefused("not_a_run", f"{place}: a call that is not the assistant's")
    return [*(part for part in parts if isinstance(part, ToolResult)), Text(_joined_texts(parts))]


def text_of(content: Any, place: str, kind: str, counts: Counts) -> str:
    """Return the text of a content, its parts joined by line breaks; other parts are counted."""
    *results, text = parts_of(content, place, "user", counts, kind)
    if results:
        raise RunRefused("not_a_run", f"{place}: a result that is not in a message of the user")
    return text.text if isinstance(text, Text) else ""


def _part(part: Any, place: str, counts: Counts, kind: str) -> Part | None:
    part_type = part_type_of(part)
    if isinstance(part, str):
        return Text(part)
    if part_type in TEXT_PARTS:
        name = TEXT_PARTS[part_type] if TEXT_PARTS[part_type] in part else "content"  # AgentDojo's name
        count_unread(part, {"type", name}, f"{kind}.", counts)
        return Text(text_field(part, name, place))
    if part_type in _THOUGHTS:
        said = part.get(part_type)
        if isinstance(said, list):  # of Mistral; without thoughts inside, which may be nested without end
            said = [each for each in said if part_type_of(each) not in _THOUGHTS]
        said = text_of(said, f"{place}.{part_type}", kind, counts)
        summary = objects_of(part, "summary", f"{place}.summary")
        texts = [said, *(text_field(each, "text", place) for each in (part, *summary))]
        return Reasoning("\n".join(filter(None, texts)))
    if part_type in CALLS:
        return _call(part, place)
    if part_type is not None and part_type.endswith("tool_result"):
        output = part.get("output", part.get("content"))
        text, failed = _result_text(output, f"{place}.content", counts, kind), is_marked_error(part)
        name = "tool_call_id" if "tool_call_id" in part else "tool_use_id"
        return ToolResult(text, text_field(part, name, place), is_error=failed or says_error(output))
    if part_type in MEDIA_PARTS:
        counts.drop(MEDIA_PARTS[part_type])
    elif part_type != "input_json_delta":
        _leave_out(part, part_type, place, "part type", counts)
    return None


def result_text(value: Any) -> str:
    """Return a tool's result as text: the texts of its parts if it is a list of them, otherwise its JSON."""
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        parts = [each for each in value if part_type_of(each) not in _RESULT_MEDIA]
        texts = [
            each.get("text", each.get("content")) for each in parts if (part_type_of(each) or "text") in TEXT_PARTS
        ]  # fmt: skip
        if len(texts) == len(parts) and all(isinstance(text, str) for text in texts):
            return "\n".join(texts)
    return as_text(value)


def _result_text(result: Any, place: str, counts: Counts, kind: str) -> str:
    """Return a result as text, and count what is left out. An object without a type is data, not a part."""
    if isinstance(result, list) and all(part_type_of(part) in _RESULT_PARTS for part in result):
        return text_of(result, place, kind, counts)
    return as_text(result)


def call_in(value: Mapping[str, Any]) -> ToolCall | None:
    """Return the call in an object, which may have its name and arguments below `function` or `custom`; None: no name.

    A custom tool's input is a text.
    """
    function, custom = value.get("function"), value.get("custom")
    inner = function if isinstance(function, dict) else custom if isinstance(custom, dict) else value
    for field in NAMES:
        if isinstance(name := inner.get(field), str):
            break
    else:
        return None
    arguments = first_given(inner, _ARGUMENTS)
    if inner is custom or value.get("type") == "custom_tool_call":
        arguments = {"input": arguments}
    return ToolCall(name, arguments, text_in(value, IDS))


def text_in(value: Mapping[str, Any], names: Iterable[str]) -> str:
    """Return the first of these fields that is a text and not empty; "" if there is none."""
    for name in names:
        if isinstance(text := value.get(name), str) and text:
            return text
    return ""


def _call(value: dict[str, Any], place: str, needs: str = "a name") -> ToolCall:
    """Return the call in an object. Raises RunRefused if it has no name, or an id that is no text."""
    call = call_in(value)
    if call is None:
        raise RunRefused("not_a_run", f"{place}: a tool call needs {needs}")
    text_field(value, next((name for name in IDS if value.get(name) is not None), "id"), place)
    return call


def _joined_texts(parts: Iterable[Part]) -> str:
    return "\n".join(part.text for part in parts if isinstance(part, Text))


# Messages with a role: of OpenAI's Chat Completions API, Anthropic's Messages API, and LangChain

_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")

_FIELDS: Final[dict[Role, set[str]]] = {
    # the fields that are read of a message; any other field that is not empty is counted
    "system": set(),
    "user": set(),
    "assistant": {"refusal", "tool_calls", "function_call", "audio", "reasoning_content", "reasoning"},
    "tool": {"tool_call_id", "tool_call_ids", "tool_call", "id", "name", "is_error", "isError", "status", "error"},
}


def chat_messages(messages: list[Any], counts: Counts, place: str, *, in_order: bool = False) -> Iterator[Message]:
    """Yield messages in OpenAI's style. `in_order`: each text of the agent is a step, as in Anthropic's blocks."""
    called: dict[str, str] = {}
    for number, message in enumerate(messages):
        where, role = f"{place}.{number}", message.get("role") if isinstance(message, dict) else None
        if isinstance(message, dict) and message.get("is_demo") is True:
            counts.drop("messages of a demonstration")
            continue
        speakers = (*_ROLES, "agent", "ai", "bot", "gpt", "human", "model")  # the last six are of other forms
        if isinstance(role, str) and role not in speakers:  # a note, such as the `exit` of mini-SWE-agent
            _leave_out(message, role, where, "role", counts)
            continue
        if isinstance(message, dict) and "role" not in message:
            raise RunRefused("not_a_run", f"{where} has no role: it is not a message in OpenAI's style")
        if not isinstance(role, str) or role not in _ROLES:
            raise RunRefused("not_a_run", f"{where}: role {shown(role)} is not one of {', '.join(_ROLES)}")
        if ROLES[role] == "system":
            counts.drop(f"{role} messages")
        read = _message(message, ROLES[role], where, counts, in_order=in_order)
        known = {"role", "content"} | _FIELDS[read.role]
        if message.get("type") == "message":  # a response of Anthropic's
            known |= {"id", "type", "model", "stop_reason", "stop_sequence", "usage", "container"}
        count_unread(message, known, "messages[].", counts)
        for part in read.parts:
            if isinstance(part, ToolCall) and part.call_id:
                called[part.call_id] = part.name
            elif isinstance(part, ToolResult) and part.call_id and part.name not in ("", called.get(part.call_id)):
                counts.drop("messages[].name")
        yield read


def _message(message: dict[str, Any], role: Role, place: str, counts: Counts, *, in_order: bool) -> Message:
    """Return a message. Its reasoning, calls and refusal may stand beside its content."""
    content, where = message.get("content"), f"{place}.content"
    if role == "tool":
        ids = message.get("tool_call_ids")  # of SWE-agent; of tau2 it is `id`
        first = ids[0] if isinstance(ids, list) and ids and isinstance(ids[0], str) else ""
        call_id = text_field(message, "tool_call_id", place) or first or text_field(message, "id", place)
        parts = parts_of(content, where, role, counts)  # of Anthropic's form they may be results
        text = joined([part.text for part in parts if isinstance(part, Text | ToolResult)])
        text = text or (message["error"] if isinstance(message.get("error"), str) else "")
        name = text_field(message, "name", place)
        return Message(role, (ToolResult(text, call_id, name, is_error=is_marked_error(message)),))
    parts = parts_of(content, where, role, counts)
    if role != "assistant":
        return Message(role, tuple(parts))
    reasons = dict.fromkeys(text_field(message, name, place) for name in ("reasoning_content", "reasoning"))
    beside: list[Part] = [Reasoning(text) for text in reasons]  # some servers send the same text under both names
    if isinstance(audio := message.get("audio"), dict):
        counts.drop("audio")
        beside.append(Text(text_field(audio, "transcript", f"{place}.audio")))
    calls = list(_calls(message, place, counts))
    known = {call.call_id for call in calls}  # LangChain also has them in the content
    parts = [part for part in parts if not isinstance(part, ToolCall) or part.call_id not in known]
    if not in_order and all(isinstance(part, Text | Reasoning) for part in parts):
        parts = [*(part for part in parts if isinstance(part, Reasoning)), Text(_joined_texts(parts))]
    return Message(role, (*beside, *parts, Text(text_field(message, "refusal", place)), *calls))


def _calls(message: dict[str, Any], place: str, counts: Counts) -> Iterator[ToolCall]:
    """Yield the calls beside a message's content: in OpenAI's style, or flat as in tau2, AgentDojo and LangChain."""
    legacy = message.get("function_call")
    listed = [] if is_empty(legacy) else [(f"{place}.function_call", {"function": legacy})]
    calls = objects_of(message, "tool_calls", f"{place}.tool_calls")
    for where, call in [*listed, *((f"{place}.tool_calls.{number}", call) for number, call in enumerate(calls))]:
        yield _call(call, where, "a function with a name")
        wrapper = next((name for name in ("function", "custom") if isinstance(call.get(name), dict)), "")
        beside = {wrapper} if wrapper else _OF_CALL | {"requestor", "placeholder_args", "error"}
        count_unread(call, {"type", *IDS} | beside, "messages[].tool_calls[].", counts)
        count_unread(call[wrapper] if wrapper else {}, _OF_CALL, f"messages[].tool_calls[].{wrapper}.", counts)


# LangChain, as written by `messages_to_dict` and `dumpd`, and in the state of a LangGraph graph

_EXTRA: Final = {"tool_calls", "function_call", "reasoning_content", "refusal"}
"""Fields of additional_kwargs that are read."""


_LANGCHAIN_KINDS: Final = ("human", "ai", "system", "tool", "function", "chat")


def langchain_kind(message: Any) -> str:
    """Return the kind of a LangChain message, such as one of _LANGCHAIN_KINDS; "" for anything without a type."""
    name = message.get("type") if isinstance(message, dict) else None
    if name == "constructor" and isinstance(message.get("id"), list) and message["id"]:
        name = message["id"][-1]
    return name.removesuffix("Chunk").removesuffix("Message").lower() if isinstance(name, str) else ""


def langchain_messages(messages: list[Any], counts: Counts, place: str) -> Iterator[Message]:
    """Yield the messages of a list."""
    for number, message in enumerate(messages):
        where, kind = f"{place}.{number}", langchain_kind(message)
        if kind not in _LANGCHAIN_KINDS:
            what = f"type {shown(part_type_of(message))}"
            raise RunRefused("not_a_run", f"{where}: {what} is not a message of LangChain's")
        body = message.get("kwargs" if message["type"] == "constructor" else "data", message)
        if not isinstance(body, dict):
            raise RunRefused("not_a_run", f"{where}: {shown(body)} is not an object")
        named = str(body.get("role")).lower() if kind == "chat" else kind
        role = ROLES.get(named, "user")
        if role == "system":
            counts.drop("system messages")
        extra = body["additional_kwargs"] if isinstance(body.get("additional_kwargs"), dict) else {}
        calls = objects_of(body, "tool_calls", f"{where}.tool_calls")
        calls = [*calls, *objects_of(body, "invalid_tool_calls", f"{where}.invalid_tool_calls")]  # of invalid JSON
        read = {name: body.get(name) for name in ("content", "tool_call_id", "name", "status")}
        read |= {name: extra.get(name) for name in _EXTRA}
        if calls:
            read |= {"tool_calls": calls, "function_call": None}
        yield _message(read, role, where, counts, in_order=True)
        known = {"type", "content", "id", "tool_calls", "invalid_tool_calls", "tool_call_id", "name", "status", "role"}
        count_unread(body, known | {"example", "additional_kwargs", "tool_call_chunks"}, "messages[].", counts)
        count_unread(extra, _EXTRA, "messages[].additional_kwargs.", counts)


# OpenAI's Responses API: the input of a request and the output of its response

ITEMS: Final = frozenset({"function_call", "function_call_output", "reasoning", "custom_tool_call", "item_reference"})
"""Item types that occur in no other form."""

_OUTPUTS: Final = ("output", "outputs", "results", "result", "error")
"""Fields of a built-in tool's call that hold its result."""


def responses_messages(items: list[Any], counts: Counts, place: str) -> Iterator[Message]:
    """Yield the items of a list as messages."""
    for number, item in enumerate(items):
        yield from _item(item, f"{place}.{number}", counts)


_NO_MESSAGES: Final = {
    "item_reference": "references to items of other responses", "mcp_list_tools": "mcp_list_tools items",
    "mcp_approval_request": "mcp_approval_request items", "mcp_approval_response": "mcp_approval_response items",
    "compaction": "compaction items",
}  # fmt: skip
"""Types of items without a place in a trace, and their names in the report."""


def _item(item: Any, place: str, counts: Counts) -> Iterator[Message]:
    kind = part_type_of(item) or "message"
    if kind == "message":
        named = item.get("role") if isinstance(item, dict) else None
        known = ("user", "assistant", "system", "developer")
        if named not in known:
            raise RunRefused("not_a_run", f"{place}: role {shown(named)} is not one of {', '.join(known)}")
        role = ROLES[named]
        if role == "system":
            counts.drop(f"{named} messages")
        text = text_of(item.get("content"), f"{place}.content", "input[].content[]", counts)
        count_unread(item, {"type", "id", "status", "role", "content"}, "input[].", counts)
        yield Message(role, (Text(text),))
    elif kind == "reasoning":
        parts = [*objects_of(item, "summary", f"{place}.summary"), *objects_of(item, "content", f"{place}.content")]
        if not parts:
            counts.drop("reasoning that is encrypted or not shown")
        yield Message("assistant", tuple(Reasoning(text_field(part, "text", place)) for part in parts))
    elif kind in ("function_call", "custom_tool_call"):
        yield Message("assistant", (_call(item, place),))
        count_unread(item, {"type", "status", *IDS} | _OF_CALL, "input[].", counts)
    elif kind.endswith("_call") or kind == "program":
        yield from built_in(item, kind, place, counts)
    elif kind.endswith("_output"):
        output = first_given(item, _OUTPUTS)
        text = as_text(item.get("tools")) or _result_text(output, f"{place}.output", counts, "input[].output[]")
        failed = is_marked_error(item)
        yield Message("tool", (ToolResult(text, text_field(item, "call_id", place), is_error=failed),))
    elif kind in _NO_MESSAGES:
        counts.drop(_NO_MESSAGES[kind])
    else:
        _leave_out(item, kind, place, "item type", counts)


def built_in(item: dict[str, Any], kind: str, place: str, counts: Counts) -> Iterator[Message]:
    """Yield the call of a built-in tool, and its result if the item has one."""
    if kind == "image_generation_call":
        counts.drop("images", "result" in item)
        item = {name: value for name, value in item.items() if name != "result"}
    if kind == "mcp_call":
        call = _call(item, place)
    else:
        other = {"id", "type", "status", "call_id", "metadata", "internal_chat_message_metadata_passthrough", *_OUTPUTS}
        arguments = {field: value for field, value in item.items() if field not in other}
        call_id = text_field(item, "call_id" if "call_id" in item else "id", place)
        call = ToolCall(kind.removesuffix("_call"), arguments, call_id)
    yield Message("assistant", (call,))
    for output in _OUTPUTS:
        if item.get(output) is not None:
            failed = output == "error" or is_marked_error(item)
            yield Message("tool", (ToolResult(as_text(item[output]), call.call_id, is_error=failed),))
            return


# All forms that are lists of messages

READERS: Final[Mapping[str, Callable[[list[Any], Counts, str], Iterator[Message]]]] = {
    "chat": chat_messages,
    "anthropic": partial(chat_messages, in_order=True),
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
        if (entry := find_field(run, place)) is not None and isinstance(entry[1], list):
            items = entry[1]
            break
    if append is not None and (entry := find_field(run, append)) is not None:
        items = [*items, *answer_of(entry[1])]
    for item in items:
        kind = part_type_of(item)
        content = item.get("content") if isinstance(item, dict) else None
        parts = content if isinstance(content, list) else []
        if any(isinstance(part, dict) and isinstance(part.get("thinking"), list) for part in parts):
            return "chat"  # of Mistral
        types = {part_type_of(part) for part in parts}
        if isinstance(item, dict) and "role" not in item and langchain_kind(item) in _LANGCHAIN_KINDS:
            return "langchain"
        if kind in ITEMS or (kind == "message" and types & {"input_text", "output_text"}):
            return "responses"
        if types & {"thinking", "redacted_thinking", "tool_use", "tool_result", "server_tool_use", "mcp_tool_use"}:
            return "anthropic"  # no other form has these parts
        if isinstance(item, dict) and (item.get("tool_calls") or item.get("role") in ("tool", "function", "developer")):
            return "chat"
    if isinstance(run, dict) and path is None and "messages" not in run and "input" in run:
        return "responses"
    if items and all(isinstance(item, dict) and isinstance(item.get("role"), str) for item in items):
        return "anthropic" if isinstance(run, dict) and "system" in run else "chat"
    raise RunRefused("unknown_form", f"no known form: {_looks_like(run)}")


_LOOKS: Final = (
    # fields of a run: what it looks like, and what to do
    ({"request", "response"}, "a log of requests and responses: give --messages @request.messages --append @response"),
    ({"choices"}, "a response alone: log its request beside it, and give --messages and --append"),
    ({"conversations"}, ("ShareGPT: jq -c '.messages = [.conversations[] | {role: ({"
                         'human: "user", gpt: "assistant"}[.from] // .from), content: .value}]\'')),
    ({"contents"}, "a request to Gemini: write its contents as chat messages"),
    ({"run_type", "inputs"}, "a run of LangSmith: give --from langchain --messages @PATH, such as @outputs.messages"),
    ({"resourceSpans"}, "OTLP: give --from otlp"),
    ({"resourceLogs"}, "OTLP: give --from otlp"),
    ({"context", "attributes"}, "a span of OpenTelemetry's console exporter: export it as OTLP, and give --from otlp"),
    ({"role"}, "a message, not a run: jq -sc . FILE makes one run of a file of messages"),
)  # fmt: skip


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
    messages: list[Message] = []
    if form == "responses" and isinstance(run, dict) and path is None:
        for name, role in (("input", "user"), ("output", "assistant")):
            value = run.get(name)
            items = [{"role": role, "content": value}] if isinstance(value, str) else [] if value is None else value
            if not isinstance(items, list):
                raise RunRefused("not_a_run", f"{name}: {shown(value)} is neither a text nor a list of items")
            messages += read(items, counts, name)
            used.add((name,))
    else:
        messages += read(_list_of_messages(run, form, path, used), counts, "messages")
    if append is None:
        return messages, [], used
    entry = find_field(run, append)
    name = ".".join(append)
    if entry is None or entry[1] is None:
        raise RunRefused("missing_value", f"the run has no field {name}, which --append names")
    used.add(entry[0])
    return messages, list(read(answer_of(entry[1]), counts, name)), used


def _list_of_messages(run: Any, form: str, path: FieldPath | None, used: set[FieldPath]) -> list[Any]:
    places = (path,) if path is not None else _STATES if form == "langchain" else (("messages",),)
    messages = run
    if isinstance(run, dict):
        if isinstance(run.get("role"), str):
            raise RunRefused("not_a_run", "this is a message, not a run; one run a line is expected: jq -sc . FILE")
        entry = next((entry for place in places if (entry := find_field(run, place)) is not None), None)
        if entry is None:
            name = ".".join(path or ("messages",))
            raise RunRefused("not_a_run", f"the run has no field {name}: --messages says where its messages are")
        used.add(entry[0])
        messages = entry[1]
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
        parts.append(_call(call, where, "a function_name"))
        count_unread(call, _OF_CALL.union(IDS), "steps[].tool_calls[].", counts)
    transcript.add(Message("assistant", tuple(parts)))
    observation = step.get("observation")
    if not is_empty(observation):
        if not isinstance(observation, dict):
            raise RunRefused("not_a_run", f"{place}.observation: {shown(observation)} is not an object")
        results = enumerate(objects_of(observation, "results", f"{place}.observation.results"))
        read = [_atif_result(result, f"{place}.observation.results.{number}", counts) for number, result in results]
        transcript.add(Message("tool", tuple(read)))
        count_unread(observation, {"results"}, "steps[].observation.", counts)
    known = {"step_id", "source", "message", "reasoning_content", "tool_calls", "observation", "is_copied_context"}
    count_unread(step, known if "created_at" in transcript.given else known | {"timestamp"}, "steps[].", counts)


def _atif_result(result: dict[str, Any], place: str, counts: Counts) -> ToolResult:
    kind = "steps[].observation.results[]."
    text = text_of(result.get("content"), f"{place}.content", f"{kind}content[]", counts)
    call_id = text_field(result, "source_call_id", place)
    extra = result.get("extra")
    if isinstance(extra, dict):
        count_unread(extra, {"is_error", "status"}, f"{kind}extra.", counts)
    if references := result.get("subagent_trajectory_ref"):
        counts.drop("references to subagents", len(references) if isinstance(references, list) else 1)
    count_unread(result, {"source_call_id", "content", "extra", "subagent_trajectory_ref"}, kind, counts)
    return ToolResult(text, call_id, is_error=is_marked_error(extra))

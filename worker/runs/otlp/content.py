"""The content of one span: the messages of a model call, a tool's arguments and result, an agent's task and answer.

Each library has its own form of a message. `messages_in` reads all of them, and skips the parts that it does not know.
"""

import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import Any, Final

from worker.runs.conversation import ToolRun
from worker.runs.fields import Counts, first_given, is_marked_error, json_object, json_value, says_error
from worker.runs.forms import CALLS, IDS, NAMES, ROLES, built_in, call_in, langchain_kind, result_text, text_in
from worker.runs.messages import Message, Part, Reasoning, Role, Text, ToolCall, ToolResult, as_text
from worker.runs.otlp.dialects import MAX_NAME, Dialect, dialects_of, first_text, is_missed, tool_name, values
from worker.runs.otlp.spans import LogEvent, Span, SpanEvent
from worker.runs.otlp.values import REDACTED, Flat, is_cut_off, loaded, python_object, python_value

_ITEMS: Final = ("message", "reasoning", "_call", "_call_output", "tool_search_output", "program", "program_output")
"""Ends of the types of items of the Responses API, which are mixed with messages and have no role."""

_EVENTS: Final[Mapping[str, Role]] = {
    "gen_ai.system.message": "system", "gen_ai.user.message": "user", "gen_ai.assistant.message": "assistant",
    "gen_ai.tool.message": "tool", "gen_ai.choice": "assistant",
}  # fmt: skip

_OF_CALL: Final[Mapping[str, tuple[str, str]]] = {
    "gen_ai.client.inference.operation.details": ("gen_ai.input.messages", "gen_ai.output.messages"),
    "gen_ai.content.prompt": ("gen_ai.prompt", ""), "gen_ai.content.completion": ("", "gen_ai.completion"),
}  # fmt: skip
"""Events about a whole call: where they have its input and its output. The last two are of 1.27 and before."""

_CALL_ID: Final = re.compile(r"\ACall id: \S*\n")


@dataclass(frozen=True, slots=True)
class Content:
    """The messages that went into a model, and those that came out."""

    convention: str
    inputs: tuple[Message, ...]
    outputs: tuple[Message, ...]
    is_cut: bool = False  # an attribute with them was cut off, so that some may be missing

    def fullness(self) -> tuple[bool, int, int, int]:
        """Return how much the answer says, as a key for comparison.

        Raw requests and responses come last, since they may contain texts of Python objects.
        """
        parts = [part for message in self.outputs for part in message.parts]
        ids = sum(isinstance(part, ToolCall) and part.call_id != "" for part in parts)
        texts = sum(len(part.text) for part in parts if isinstance(part, Text | Reasoning))
        return bool(parts) and self.convention != "openinference_raw", len(parts), ids, texts


_Messages = tuple[list[Message], list[Message]]

Known = list[tuple[Any, Message]]
"""The messages of a run's history, which each of its calls repeats: as they are written, and as they were read."""


def content_of(span: Span, logs: Sequence[LogEvent], known: Known | None = None) -> Content | None:
    """Return the content of a span, from the first dialect that has any; None if nothing was captured.

    `known`: the inputs of other calls of the same run, so that each message is read once.
    """
    for row in dialects_of(span.scope):
        if not row.is_spoken(span.attributes):
            continue
        inputs, outputs = _said(span, logs, row, known)
        if any(message.parts for message in inputs) or any(message.parts for message in outputs):
            if read := _FORMS.get(form_of(span)):
                inputs, outputs = read(inputs, outputs)
            asked = next((each.texts() for each in inputs if each.role == "user"), "")
            for begin, without in _PROMPTS.items():  # of frameworks, in spans of any library
                if asked.startswith(begin):
                    inputs, outputs = without(inputs, outputs)
            was_cut = any(map(is_cut_off, map(span.attributes.get, row.messages[0])))
            return Content(row.name, tuple(inputs), tuple(outputs), was_cut)
    return None


def is_cut(span: Span) -> bool:
    """Return whether an attribute with messages was cut off."""
    return any(is_cut_off(span.attributes.get(name)) for row in dialects_of(span.scope) for name in row.messages[0])


def missed(span: Span, logs: Sequence[LogEvent]) -> set[str]:
    """Return the names of attributes, events and log records that look like content and are not read.

    Numbers in names become N.
    """
    names = {key for key, value in span.attributes.items() if is_missed(span.scope, key) and _says(value)}
    events: tuple[SpanEvent | LogEvent, ...] = (*span.events, *logs)
    for event in events:
        if event.name in _EVENTS or event.name in _OF_CALL or len(event.name) > MAX_NAME:
            continue
        if event.name in ("", "gen_ai.evaluation.result", "exception"):
            continue
        body = event.body if isinstance(event, LogEvent) else None
        within = {**event.attributes, **(body if isinstance(body, dict) else {})}
        named = is_missed(span.scope, event.name) and (_says(body) or any(map(_says, event.attributes.values())))
        if named or any(is_missed(span.scope, key) and _says(value) for key, value in within.items()):
            names.add(("log record " if isinstance(event, LogEvent) else "event ") + event.name)
    return {re.sub(r"\d+", "N", name) for name in names}


def _says(value: Any) -> bool:
    """Return whether a value contains words or JSON."""
    if isinstance(value, str):
        text = value.strip()
        return len(text) > 2 and value != REDACTED and (" " in text or text[0] in "[{")
    if isinstance(value, list | dict):
        return any(map(_says, value.values() if isinstance(value, dict) else value))
    return False


def form_of(span: Span) -> str:
    """Return what is peculiar to the messages of a span (Dialect.form)."""
    return _form_of(dialects_of(span.scope))


@cache
def _form_of(rows: tuple[Dialect, ...]) -> str:
    return next((row.form for row in rows if row.form), "")


def _said(span: Span, logs: Sequence[LogEvent], row: Dialect, known: Known | None) -> _Messages:
    if row.in_events:
        return _events(span, logs)
    inputs = [message for value in row.values(span, "input") for message in messages_in(value, "user", known)]
    outputs = [message for value in row.values(span, "output") for message in messages_in(value, "assistant")]
    if len(row.places.get("output", ())) > 1:
        outputs = _with_each_call_once(outputs)
    if len(outputs) < 2:
        return inputs, outputs
    results = [number for number, message in enumerate(outputs) if message.role == "tool"]
    after = results[-1] + 1 if results else 0  # an agent's span may have the whole run in its output
    return inputs + outputs[:after], outputs[after:]


def _with_each_call_once(messages: list[Message]) -> list[Message]:
    """Return messages without those calls without an id that another place has with one."""
    known = {_call_key(call) for message in messages for call in message.calls() if call.call_id}
    return [
        Message(message.role, tuple(
            part for part in message.parts
            if not isinstance(part, ToolCall) or part.call_id or _call_key(part) not in known
        )) for message in messages
    ]  # fmt: skip


def _call_key(call: ToolCall) -> str:
    return as_text([call.name, json_value(call.arguments)])


def of_google(inputs: list[Message], outputs: list[Message]) -> _Messages:
    """Return messages with bare results, and without call ids made of a tool's name and a position.

    Results with such an id get the name instead.
    """
    names = {call.name for message in (*inputs, *outputs) for call in message.calls()}
    bare, said = (
        [Message(each.role, tuple(_part_of_google(part, names) for part in each.parts)) for each in messages]
        for messages in (inputs, outputs)
    )
    return with_calls(bare, said)


def _part_of_google(part: Part, names: set[str]) -> Part:
    position = re.fullmatch(r"(.+)_\d+", part.call_id) if isinstance(part, ToolCall | ToolResult) else None
    if isinstance(part, ToolCall) and position is not None and position[1] == part.name:
        return replace(part, call_id="")
    if isinstance(part, ToolResult):
        text, failed = _bare_result(part.text)
        part = replace(part, text=text, is_error=part.is_error or failed)
        return part if position is None or position[1] not in names else replace(part, call_id="", name=position[1])
    return part


def _bare_result(text: str) -> tuple[str, bool]:
    """Return the result or error that Google's libraries wrap, because their results must be objects."""
    wrapper = json_object(text) if text.startswith("{") else {}
    inner = wrapper.get("response")
    if isinstance(inner, dict) and wrapper.keys() <= {"id", "name", "response", "scheduling"}:
        wrapper, text = inner, as_text(inner)
    (name, value), *_ = wrapper.items() if len(wrapper) == 1 else [("", None)]
    return as_text(value) if name in ("result", "output", "error") else text, name == "error" or says_error(value)


def with_calls(inputs: list[Message], outputs: list[Message]) -> _Messages:
    """Return messages in which each result without id and name, or with an id of no call, has those of its call.

    That is the first call before it that has no result yet.
    """
    parts_in = [part for message in inputs for part in message.parts]
    known = {part.call_id for part in parts_in if isinstance(part, ToolCall)}
    results = [part for part in parts_in if isinstance(part, ToolResult)]
    if all(part.call_id in known if part.call_id else part.name for part in results):
        return inputs, outputs
    waiting: OrderedDict[int, ToolCall] = OrderedDict()  # without a result yet, by number
    numbers: defaultdict[str, deque[int]] = defaultdict(deque)  # by id and by name of the call
    matched: list[Message] = []
    number = 0
    for message in inputs:
        if message.role == "assistant" and matched and matched[-1].role != "assistant":
            waiting.clear()
        for call in message.calls():
            number += 1
            waiting[number] = call
            for named in {call.call_id, call.name}:
                numbers[named].append(number)
        parts = list(message.parts)
        for at, part in enumerate(parts):
            if isinstance(part, ToolResult) and waiting:
                key = part.call_id or part.name
                same = numbers[key] if key else deque()
                while same and same[0] not in waiting:
                    same.popleft()
                own = waiting.pop(same[0] if same else next(iter(waiting)))
                if part.call_id not in known if part.call_id else not part.name:
                    parts[at] = replace(part, call_id=own.call_id, name=own.name)
        matched.append(message if parts == list(message.parts) else Message(message.role, tuple(parts)))
    return matched, outputs


def without_short(inputs: list[Message], outputs: list[Message]) -> _Messages:
    """Return messages without those in which Mastra abbreviates a call or a result to a name in brackets."""
    return [
        each for each in inputs if each.role == "user" or not any(
            "[tool: " in part.text or "[tool-result: " in part.text
            for part in each.parts if isinstance(part, Text | ToolResult)
        )
    ], outputs  # fmt: skip


_TASK: Final = "New task:\n"


def _without_prompts(message: Message) -> Sequence[Message]:
    """Return a message of smolagents, which sends calls and results as texts, without its prompts."""
    text = message.texts()
    if message.role == "user":
        body = _CALL_ID.sub("", text)
        for start in ("Observation:\n", "Error:\n"):
            if body.startswith(start):
                result = body.removeprefix(start).partition("\nNow let's retry: take care not to repeat previous")[0]
                return [Message("user", (ToolResult(result, is_error=start == "Error:\n"),))]
        return [Message("user", (Text(text.removeprefix(_TASK)),)) if text.startswith(_TASK) else message]
    said, _, written = text.partition("Calling tools:\n")
    if message.role == "assistant" and (calls := _written_calls(written)):
        return [Message("assistant", (Text(said.strip()),)), Message("assistant", calls)]
    return [message]


def _written_calls(text: str) -> tuple[Part, ...]:
    """Return the calls in a list that smolagents writes as a Python literal."""
    return tuple(part for each in _objects(text) for part in _part(each))


_FIELD: Final = re.compile(r"\[\[ ## (\w+) ## \]\]\n?(.*?)(?=\[\[ ## |\Z)", re.DOTALL)


def without_fields(inputs: list[Message], outputs: list[Message]) -> _Messages:
    """Return messages of DSPy, whose texts consist of fields. The first field in the input is the user's request."""
    asked = []
    for each in inputs:
        prompt = each.texts().partition("\n\nRespond with the corresponding output")[0] if each.role == "user" else ""
        field = _FIELD.search(prompt)
        asked.append(each if field is None else Message("user", (Text(field[2].rstrip()),)))
    return asked, list(map(_answer_fields, outputs))


def _answer_fields(message: Message) -> Message:
    """Return a step of DSPy's agent, which has a thought, a tool and arguments. The last answer is not a step."""
    text = message.texts()
    if text.startswith('["'):  # MLflow has a list of answers
        text = as_text(next(iter(loaded(text)), None))
    given: dict[str, Any] = {name: value.rstrip() for name, value in _FIELD.findall(text)}
    given = given or (json_object(text) if text.startswith("{") else {})
    given.pop("completed", None)
    if not given:
        return message
    name = given.get("next_tool_name")
    if name == "finish":
        return Message("assistant", ())
    if isinstance(name, str):
        parts: list[Part] = [Text(as_text(given.get("next_thought"))), ToolCall(name, given.get("next_tool_args"))]
        return Message("assistant", tuple(parts))
    return Message("assistant", (Text(as_text(list(given.values())[-1])),))


_FORMS: Final = {"google": of_google, "fields": without_fields, "short": without_short, "own ids": with_calls}
_PROMPTS: Final[Mapping[str, Callable[[list[Message], list[Message]], _Messages]]] = {
    "[[ ## ": without_fields,
    _TASK: lambda inputs, outputs: ([each for message in inputs for each in _without_prompts(message)], outputs),
}
"""By a dialect's form, and by the beginning of the user's first message: how messages are read once more."""


def _events(span: Span, logs: Sequence[LogEvent]) -> tuple[list[Message], list[Message]]:
    """Return the messages in log records, in events of the span, and in pydantic-ai's attribute of events."""
    named: list[tuple[str, Any]] = [(each.name, {**each.attributes, **json_object(each.body)}) for each in logs]
    named += [
        (event.name, {**event.attributes, **json_object(event.attributes.get("gen_ai.event.content"))})
        for event in span.events
    ]
    for name in ("events", "all_messages_events"):
        if name in span.attributes:
            named += [(as_text(each.get("event.name")), each) for each in _objects(span.attributes[name])]
    inputs: list[Message] = []
    outputs: list[Message] = []
    is_blocks = form_of(span) == "blocks"
    for name, body in named:
        if name in _OF_CALL:
            asked, said = map(body.get, _OF_CALL[name])
            inputs += messages_in(asked, "user")
            outputs += messages_in(said, "assistant")
        elif name == "gen_ai.choice" and (is_blocks or not body.get("index")):  # the agent goes on with the first one
            outputs.append(_event("assistant", body))
        elif name in _EVENTS and name != "gen_ai.choice":
            inputs.append(_event(_EVENTS[name], body))
    if is_blocks and outputs:
        parts = [part for each in outputs for part in each.parts]
        thinks = any(isinstance(part, Reasoning) for message in inputs for part in message.parts)
        if thinks and len(parts) > 1 and isinstance(parts[0], Text) and isinstance(parts[1], Text):
            parts[0] = Reasoning(parts[0].text)  # only the history says so: as an answer it looks like a text
        outputs = [Message("assistant", tuple(parts))]
    return inputs, outputs


def _event(role: Role, body: dict[str, Any]) -> Message:
    """Return the message of an event: its body, or the field `message` of the body (an object, or a content)."""
    inner = loaded(body.get("message"))
    body = {**body, **inner} if isinstance(inner, dict) else body if inner is None else {"content": inner}
    return _message({**body, "role": role}, role)


# Messages


def messages_in(value: Any, role: Role, known: Known | None = None) -> list[Message]:
    """Return the messages in a value, whatever their form. `role` is that of messages without one."""
    value = value if not isinstance(value, str) else _message_json(value)
    if isinstance(value, str):
        if role == "user" and _LINE.match(value):
            return _in_lines(value)
        # the second is what OpenLIT until 1.33 writes instead of any answer of a model that was given tools
        is_nothing = not value.strip() or value in (REDACTED, "Function called with tools")
        return [] if is_nothing else [Message(role, (Text(value),))]
    if isinstance(value, dict):
        return _in_object(value, role, known)
    if not isinstance(value, list):
        return []
    if value and isinstance(value[0], str) and value[0].startswith("ChatMessage("):  # of Haystack or LlamaIndex
        value = [python_object(each) if isinstance(each, str) else each for each in value]
    if value and isinstance(value[0], list):  # LangChain has pairs of role and text, or a list of lists
        pairs = [each for each in value if isinstance(each, list) and len(each) == 2 and str(each[0]) in ROLES]
        value = [{"role": who, "content": text} for who, text in pairs] if len(pairs) == len(value) else value[0]
    if any(isinstance(each, Flat) or (isinstance(each, dict) and _is_message(each)) for each in value):
        return _each_message(value, role, known)
    parts = tuple(part for each in value for part in _part(each))
    return [Message(role, parts)] if parts else []


_LINE: Final = re.compile(r"^(system|developer|user|assistant|tool): (?:text: )?", re.MULTILINE)
"""How OpenLIT until 1.35 begins each message of a prompt."""


def _in_lines(text: str) -> list[Message]:
    _, *pairs = _LINE.split(text)
    messages = [(ROLES[role], said.strip()) for role, said in zip(pairs[::2], pairs[1::2], strict=True)]
    return [
        Message(role, (ToolResult(said) if role == "tool" else Text(said),))
        for role, said in messages if said not in ("", "None")
    ]  # fmt: skip


def _each_message(items: list[Any], role: Role, known: Known | None) -> list[Message]:
    known = [] if known is None else known
    history = []
    for index, each in enumerate(items):
        if index < len(known) and known[index][0] == each:
            history.append(known[index][1])
        elif isinstance(each, dict):
            messages = _in_object(each.nested() if isinstance(each, Flat) else each, role)
            if len(messages) == 1 and index <= len(known):
                known[index:] = [(each, messages[0])]
            history += messages
    return history


def _message_json(text: str) -> Any:
    """Return the JSON in a text if it may be messages, otherwise the text; None if none is whole before a cut."""
    value = loaded(text) if text[:1] in ("[", "{", '"') else text
    is_list = isinstance(value, list) and (not value or _has_objects(value))
    return value if value is None or is_list or isinstance(value, str | dict) else text


def _has_objects(items: list[Any]) -> bool:
    return any(isinstance(each, dict) or (isinstance(each, list) and _has_objects(each[:1])) for each in items)


def _in_object(value: dict[str, Any], role: Role, known: Known | None = None) -> list[Message]:
    if _is_message(value):
        return _in_order(_message(value, role))
    for name in (  # the fields of requests and responses that contain messages
        "messages", "choices", "generations", "candidates", "replies", "contents", "message", "output", "input",
        "response", "prompt", "inputs", "outputs",
    ):  # fmt: skip
        inner = value.get(name)
        if name in ("choices", "generations", "candidates"):  # the agent continues with the first one
            for _ in range(2):
                inner = inner[0] if isinstance(inner, list) and inner else inner
        if inner:
            return messages_in(inner, role, known)
    return [message] if (message := _message(value, role)).parts else []


def _in_order(message: Message) -> list[Message]:
    """Return a message of the agent in pieces if results of a server's tools are in it: what came before and after."""
    if message.role != "assistant" or not any(isinstance(part, ToolResult) for part in message.parts):
        return [message]
    pieces: list[Message] = []
    for is_result, group in groupby(message.parts, key=lambda part: isinstance(part, ToolResult)):
        parts = tuple(group)
        pieces += [Message("tool", (part,)) for part in parts] if is_result else [Message("assistant", parts)]
    return pieces


def _is_message(value: dict[str, Any]) -> bool:
    if isinstance(value.get("role"), str) or isinstance(value.get("message"), dict):
        return True
    if "type" not in value:
        return not value.keys().isdisjoint(("parts", "content", "tool_calls"))
    return str(value["type"]).endswith(_ITEMS) or _own_role(value) is not None


def _own_role(value: dict[str, Any]) -> Role | None:
    """Return the role of a message of LangChain or pydantic-ai."""
    if value.get("kind") == "response" and "parts" in value:
        return "assistant"
    return None if value.keys().isdisjoint(("content", "data", "kwargs")) else ROLES.get(langchain_kind(value))


_USUAL: Final = frozenset({"role", "content", "parts", "name", "message", "finish_reason", "tool_call_id"})
"""The fields of most messages. Only others may have reasoning, calls or a refusal beside the content."""


def _message(value: dict[str, Any], role: Role) -> Message:
    """Return a message: its reasoning, texts, results and calls. Calls may be outside its content."""
    if isinstance(value.get("message"), dict):
        value = {**value, **value["message"]}
    own = None if "role" in value else _own_role(value)
    for name in ("kwargs", "data"):
        if isinstance(value.get(name), dict):
            value = {**value, **value[name]}
    named = value.get("role")
    if isinstance(named, str) and named not in ROLES:  # MessageRole.TOOL_RESPONSE
        named = named.lower().rpartition(".")[2].replace("_", "-")
    role = ROLES.get(named, "user") if isinstance(named, str) else own or role
    if named is None and (kind := str(value.get("type"))) != "message" and kind.endswith(_ITEMS):
        return Message("tool" if kind.endswith("_output") else "assistant", tuple(_part(value)))
    parts: list[Part] = []
    for name in ("parts", "contents", "blocks", "content", "text"):
        if (content := value.get(name)) is None:
            continue
        if not parts:
            parts = _parts_in(content, role)
        elif not any(isinstance(part, Text | ToolResult) for part in parts):
            parts += [part for part in _parts_in(content, role) if isinstance(part, Text)]
    if named in ("tool-call", "tool-response") and all(isinstance(part, Text) for part in parts):
        # smolagents: Python literals of calls, or a text of a result
        written = "\n".join(part.text for part in parts if isinstance(part, Text))
        if role != "tool":
            return Message(role, _written_calls(written.partition("\n")[2]))
        body = _CALL_ID.sub("", written)
        result = ToolResult(body.removeprefix("Observation:\n"), is_error=body.startswith("Error:\n"))
        return Message(role, (result,))
    if named == "thinking":
        parts = [Reasoning(part.text) if isinstance(part, Text) else part for part in parts]
    if not value.keys() <= _USUAL:
        if isinstance(value.get("thought"), str):  # AutoGen: its text next to calls
            parts.insert(0, Text(value["thought"]))
        if isinstance(refusal := value.get("refusal"), str) and refusal:
            parts.append(Text(refusal))
        if calls := _calls_beside(value):
            parts = [*(part for part in parts if not isinstance(part, ToolCall)), *calls]
        names = ("reasoning_content", "reasoning", "thinking")
        reasons = [Reasoning(said) for name in names if isinstance(said := value.get(name), str) and said]
        parts = [*dict.fromkeys(reasons), *parts]
    return _tool_message(parts, value) if role == "tool" else Message(role, tuple(parts))


def _calls_beside(value: dict[str, Any]) -> list[Part]:
    extra = value.get("additional_kwargs")
    lists = [each for name in ("tool_calls", "toolCalls", "invalid_tool_calls") if (each := value.get(name))]
    if not lists and isinstance(extra, dict):
        lists.append(extra.get("tool_calls"))
    lists = [loaded(each) if isinstance(each, str) else each for each in lists]
    items = [item for each in lists if isinstance(each, list) for item in each if isinstance(item, dict)]
    calls = [_wrapped(item, _WRAPPED_CALLS) or item for item in items]
    if isinstance(value.get("function_call"), dict):
        calls.append(value["function_call"])
    if isinstance(value.get("function_call_name"), str):
        calls.append({"name": value["function_call_name"], "arguments": value.get("function_call_arguments_json")})
    return [part for each in calls for part in _call(each)]


def _wrapped(value: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any] | None:
    """Return the object in the first of these fields that has one."""
    for name in names:
        if isinstance(inner := value.get(name), dict):
            return inner
    return None


def _tool_message(parts: list[Part], value: dict[str, Any]) -> Message:
    results = [part for part in parts if isinstance(part, ToolResult)]
    if not results and isinstance(value.get("function"), list):  # AutoGen has them as JSON
        results = [part for each in value["function"] for part in _result(json_object(each))]
    texts = [part.text for part in parts if isinstance(part, Text)]
    if texts and not results:
        call_id = text_in(value, ("tool_call_id", "tool_use_id", "call_id", "id"))
        name = text_in(value, NAMES)
        results = [ToolResult("\n".join(texts), call_id, name, is_error=is_marked_error(value))]
    elif len(results) == 1 and not results[0].call_id:
        results = [replace(results[0], call_id=text_in(value, ("tool_call_id",)))]
    return Message("tool", tuple(results or parts))  # a tool's span may have its call in such a message


# Parts

_CALL_TYPES: Final = (*CALLS, "tool-call", "tool-use", "function")
"""How types of parts that are calls begin."""

_WRAPPED_RESULTS: Final = ("tool_call_result", "toolResult", "functionResponse", "function_response")
_WRAPPED_CALLS: Final = ("tool_call", "toolUse", "toolCall", "functionCall", "function_call")


def _parts_in(content: Any, role: Role) -> list[Part]:
    """Return the parts of a content: a text, or a list of parts, which may be JSON."""
    if isinstance(content, str):
        items = loaded(content) if content.startswith(('[{"', "[{'")) else ()
        if isinstance(items, list) and (parts := [part for each in items for part in _part(each)]):
            return parts
        is_lost = items is None and role != "tool" and re.match(r"""\[\{["'](?:type|text)["']:""", content) is not None
        return [] if content == REDACTED or is_lost else [Text(content)]
    if isinstance(content, dict) and isinstance(content.get("parts"), list):
        content = content["parts"]
    if isinstance(content, list):
        return [part for each in content for part in _part(each)]
    return [*_part(content)] if isinstance(content, dict) else []


def _part(part: Any) -> Sequence[Part]:
    """Return a part of a message, whatever its form; nothing if it is no part."""
    if isinstance(part, str):
        return (Text(part),)
    if not isinstance(part, dict):
        return ()
    kind = part.get("type")
    if kind == "text" and isinstance(text := part.get("content", part.get("text")), str):
        return (Reasoning(text) if part.get("thought") is True else Text(text),)
    if kind == "tool_call" and isinstance(part.get("name"), str):
        return _call(part)
    if kind == "tool_call_response":
        return _result(part)
    if isinstance(wrapped := part.get("message_content"), dict):  # OpenInference
        part = {**part, **wrapped}
    kind = part.get("type", part.get("part_kind", part.get("block_type")))
    kind = kind if isinstance(kind, str) else ""
    if kind.startswith("server_tool_call") and isinstance(own := part.get(kind), dict):  # the semantic conventions
        own = {name: value for name, value in own.items() if name != "type"}
        part = {**part, "response" if kind.endswith("_response") else "arguments": own}
    if (inner := _wrapped(part, _WRAPPED_RESULTS)) is not None:
        return _result(inner)
    if (inner := _wrapped(part, _WRAPPED_CALLS)) is not None:
        return _call(inner)
    if kind.endswith(("result", "response", "output", "return", "retry-prompt")) or (not kind and "origin" in part):
        return _result(part)
    if kind.startswith(_CALL_TYPES) or (not kind and isinstance(part.get("toolName"), str)):
        return _call(part)
    if kind.endswith(("_call", "program")) and (kind != "mcp_call" or isinstance(part.get("name"), str)):
        item = {**part, "call_id": text_in(part, IDS)}
        return [each for message in built_in(item, kind, "", Counts()) for each in message.parts]
    if not kind and ("arguments" in part or isinstance(part.get("function"), dict)):
        return _call(part)
    if kind.startswith(("reasoning", "thinking")):
        return [Reasoning(text) for text in _texts(part)]
    if kind in ("", "text", "input_text", "output_text", "refusal", "user-prompt"):
        made = Reasoning if part.get("thought") is True else Text
        return [made(text) for text in _texts(part) if text != REDACTED]
    return ()


def _call(value: dict[str, Any]) -> Sequence[ToolCall]:
    call = call_in(value)
    if call is None or not call.name:
        return ()
    arguments = call.arguments if isinstance(call.arguments, str) else json_value(call.arguments)
    return (ToolCall(call.name, arguments, call.call_id),)


def _result(result: dict[str, Any]) -> Sequence[ToolResult]:
    value = first_given(result, ("response", "result", "output", "content", "value", "tools"))
    origin = result.get("origin")
    named = {**origin, **result} if isinstance(origin, dict) else result
    failed = is_marked_error(result) or result.get("part_kind") == "retry-prompt" or says_error(value)
    if isinstance(value, dict) and isinstance(value.get("type"), str) and "value" in value:  # Vercel
        failed = failed or value["type"].startswith("error")
        value = value["value"]
    if value is None:
        return ()
    return (ToolResult(result_text(value), text_in(named, IDS), text_in(named, NAMES), is_error=failed),)


def _texts(part: dict[str, Any]) -> list[str]:
    names = ("content", "text", "thinking", "reasoning", "summary", "refusal")
    content = next((part[name] for name in names if part.get(name)), "")
    if isinstance(content, list):
        return [text for each in content if isinstance(each, dict) for text in _texts(each)]
    return [content] if isinstance(content, str) and content else []


def _objects(value: Any) -> list[dict[str, Any]]:
    items = loaded(value)
    return [each for each in items if isinstance(each, dict)] if isinstance(items, list) else []


# Tools


def tool_run(span: Span, logs: Sequence[LogEvent] = ()) -> ToolRun:
    """Return the record of a call in a tool's span."""
    call_id = first_text(span, "call_id")
    arguments = _of_tool(span, "arguments", "input")
    result = _of_tool(span, "result", "output")
    inputs, outputs = _events(span, logs) if arguments is None or result is None else ([], [])
    if arguments is None:
        arguments = next((call.arguments for message in inputs for call in message.calls()), None)
        if arguments is None:
            arguments = next(iter(_words(inputs)), None)
    failed = has_failed(span)
    text: str | None
    if result is not None:
        text, own_id, says_so = _unwrapped(result)
        call_id, failed = call_id or own_id, failed or says_so
    else:
        texts = _words(outputs)
        text = "\n".join(texts) if texts else None
    no_result = failed and text in (None, "", "{}", "null")
    if no_result:
        text = error_text(span)
    if text is not None and form_of(span) == "google":
        text, said = _bare_result(text)
        failed = failed or said
    failed = failed or says_error(text)
    return ToolRun(
        tool_name(span), call_id, _tool_arguments(arguments), text, failed, span.start_ns, span.end_ns, no_result
    )


def _words(messages: list[Message]) -> list[str]:
    return [part.text for message in messages for part in message.parts if isinstance(part, Text | ToolResult)]


def _of_tool(span: Span, name: str, other: str) -> Any:
    """Return the value of a field of a tool's span, or of the field `other` if its dialect has none for tools."""
    for row in dialects_of(span.scope):
        field = name if name in row.places else other
        is_flat = row.messages[1] and not row.messages[0]
        if field in row.places and not is_flat and (given := row.values(span, field)):
            return given[0]
    return None


def _tool_arguments(value: Any) -> Any:
    """Return arguments, parsed, without a wrapper of positional and named ones."""
    parsed = json_value(value)
    if isinstance(parsed, str):
        parsed = python_value(parsed)
    wrapper = {"args", "kwargs", "sanitize_inputs_outputs"}  # the last one is smolagents'
    if isinstance(parsed, dict) and isinstance(parsed.get("kwargs"), dict) and parsed.keys() <= wrapper:
        given = parsed.get("args")
        return {"args": given, **parsed["kwargs"]} if given else parsed["kwargs"]
    return parsed


_WRITTEN: Final = re.compile(
    r"""content=('(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+") (?:.* )?tool_call_id='([^']*)'""", re.DOTALL
)
"""The text of a LangChain message, which some libraries write as a tool's result."""


def _unwrapped(result: Any) -> tuple[str, str, bool]:
    """Return the text of a tool's result; if it is a LangChain message, the id of its call and whether it failed."""
    parsed = json_value(result)
    if isinstance(parsed, dict):
        output = parsed.get("output")
        message = output if isinstance(output, dict) else parsed
        inner = message.get("data", message.get("kwargs", message))
        is_message = message.get("type") in ("tool", "ToolMessage", "constructor")
        if is_message and isinstance(inner, dict) and "content" in inner:
            return result_text(inner["content"]), text_in(inner, ("tool_call_id",)), is_marked_error(inner)
        if parsed.keys() == {"output"}:  # LangSmith: a result must be an object
            return result_text(output), "", False
    if isinstance(parsed, str):
        written = _WRITTEN.match(parsed) if parsed.startswith("content=") else None
        content = None if written is None else python_value(f"[{written[1]}]")
        if written is None or not isinstance(content, list):
            return parsed, "", False
        return as_text(content[0]), written[2], " status='error'" in parsed[written.end() :]
    return as_text(result), "", False


def has_failed(span: Span) -> bool:
    """Return whether a span's status, or an attribute, says that it failed."""
    if span.status == 2 or span.attributes.get("error.type"):
        return True
    raised = any(event.name == "exception" for event in span.events)
    if raised and any(row.failed_by_exception for row in dialects_of(span.scope)):
        return True
    return any(each in (True, "true", "error", "ERROR", "failure") for each in values(span, "failed"))


def error_text(span: Span) -> str | None:
    """Return the error of a span: the message of its exception or of its status, or an attribute."""
    for event in span.events:
        if event.name == "exception" and isinstance(event.attributes.get("exception.message"), str):
            text = as_text(event.attributes["exception.message"])
            return text.partition("Traceback (most recent call last)")[0].strip() or text
    return span.status_message or first_text(span, "error") or None


# Agents


def asked(span: Span) -> Iterable[str]:
    """Yield the texts that an agent may have been asked, from its span."""
    for value in values(span, "input"):
        for message in messages_in(_given(value), "user"):
            if message.role == "user":
                yield message.texts()


def _given(value: Any) -> Any:
    """Return the argument of a function: the first one, or the only named text."""
    parsed = loaded(value)
    if not isinstance(parsed, dict):
        return value
    given, named = parsed.get("args"), parsed.get("kwargs")
    if isinstance(given, list) and given and isinstance(named, dict):
        return given[0]
    inner = next(iter(parsed.values()), None) if len(parsed) == 1 else named
    if isinstance(inner, dict) and not _in_object(parsed, "user"):
        return _given(inner)
    return inner if isinstance(inner, str) and len(parsed) == 1 else parsed


def answered(span: Span) -> Iterable[str]:
    """Yield the texts that may be an agent's answer, from its span."""
    for value in values(span, "output"):
        messages = messages_in(json_value(value), "assistant")
        if texts := next((texts for each in reversed(messages) if (texts := each.texts())), ""):
            yield texts

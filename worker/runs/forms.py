"""The forms of logged runs that are lists of messages: how a form is recognised, and where the messages are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from worker.runs import anthropic, langchain, responses
from worker.runs.anthropic import anthropic_messages
from worker.runs.chat import chat_messages, part_type_of
from worker.runs.fields import Counts, FieldPath, RunRefused, find_field, shown
from worker.runs.langchain import langchain_messages
from worker.runs.messages import Message
from worker.runs.responses import responses_messages

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
    items = _found(run, path)
    if append is not None and (found := find_field(run, append)) is not None:
        items = [*items, *answer_of(found[1])]
    for item in items:
        kind = part_type_of(item)
        content = item.get("content") if isinstance(item, dict) else None
        if isinstance(item, dict) and "role" not in item and langchain.kind_of(item) is not None:
            return "langchain"
        if kind in responses.ITEMS or (kind == "message" and _types(content) & {"input_text", "output_text"}):
            return "responses"
        if _types(content) & anthropic.BLOCKS:
            return "anthropic"
        if isinstance(item, dict) and (item.get("tool_calls") or item.get("role") in ("tool", "function", "developer")):
            return "chat"
    if isinstance(run, dict) and path is None and "messages" not in run and "input" in run:
        return "responses"
    if items and all(isinstance(item, dict) and isinstance(item.get("role"), str) for item in items):
        return "anthropic" if isinstance(run, dict) and "system" in run else "chat"
    raise RunRefused("unknown_form", f"no known form: {_looks_like(run)}")


def _types(content: Any) -> set[Any]:
    parts = content if isinstance(content, list) else []
    types = [part.get("type") for part in parts if isinstance(part, dict)]
    return {kind for kind in types if isinstance(kind, str)}


def _found(run: Any, path: FieldPath | None) -> list[Any]:
    """Return the probable messages of a run, [] if there are none; only for recognising the form."""
    if isinstance(run, list):
        return run
    for place in (path,) if path is not None else (*_STATES, ("input",), ("output",)):
        found = find_field(run, place)
        if found is not None and isinstance(found[1], list):
            return found[1]
    return []


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


def _has_role(item: Any) -> bool:
    return isinstance(item, dict) and ("role" in item or "type" in item)


def messages_of(run: Any, form: str, path: FieldPath | None, append: FieldPath | None, counts: Counts) -> tuple[
    list[Message], list[Message], set[FieldPath]
]:  # fmt: skip
    """Return the messages of a run, the messages of the response that `append` names, and the paths that were read.

    `path`: where the messages of an object are; None: where the form has them. Raises RunRefused.
    """
    used: set[FieldPath] = set()
    read = READERS[form]
    if form == "responses" and isinstance(run, dict) and path is None:
        messages = [message for name in ("input", "output") for message in _items(run, name, used, counts)]
    else:
        place, items = _messages(run, form, path, used)
        messages = list(read(items, counts, place))
    if append is None:
        return messages, [], used
    found = find_field(run, append)
    name = ".".join(append)
    if found is None or found[1] is None:
        raise RunRefused("missing_value", f"the run has no field {name}, which --append names")
    used.add(found[0])
    return messages, list(read(answer_of(found[1]), counts, name)), used


def _items(run: dict[str, Any], name: str, used: set[FieldPath], counts: Counts) -> Iterator[Message]:
    """Yield the input or output of the Responses API; a string is a message."""
    value = run.get(name)
    used.add((name,))
    if isinstance(value, str):
        value = [{"role": "user" if name == "input" else "assistant", "content": value}]
    if value is not None and not isinstance(value, list):
        raise RunRefused("not_a_run", f"{name}: {shown(value)} is neither a text nor a list of items")
    yield from responses_messages(value or [], counts, name)


def _messages(run: Any, form: str, path: FieldPath | None, used: set[FieldPath]) -> tuple[str, list[Any]]:
    messages, place = run, "messages"
    if isinstance(run, dict):
        if isinstance(run.get("role"), str):
            raise RunRefused("not_a_run", "this is a message, not a run; one run a line is expected: jq -sc . FILE")
        found = next((found for place in _places(form, path) if (found := find_field(run, place)) is not None), None)
        if found is None:
            name = ".".join(path or ("messages",))
            raise RunRefused("not_a_run", f"the run has no field {name}: --messages says where its messages are")
        used.add(found[0])
        messages = found[1]
    if isinstance(messages, str) and form == "responses":
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list):
        raise RunRefused("not_a_run", f"{shown(messages)} is not a list of messages")
    if messages and (isinstance(messages[0], list) or _is_run(messages[0], _places(form, path))):
        raise RunRefused("not_a_run", "this is a list of runs; one run a line is expected: jq -c '.[]' FILE")
    return place, messages


def _places(form: str, path: FieldPath | None) -> tuple[FieldPath, ...]:
    if path is not None:
        return (path,)
    return _STATES if form == "langchain" else (("messages",),)


def _is_run(item: Any, places: Sequence[FieldPath]) -> bool:
    """Return whether a list's first item is a run: a message has no list of messages in any of `places`."""
    return not _has_role(item) and any(find_field(item, place) is not None for place in places)


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

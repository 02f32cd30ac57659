"""Values of any shape, where a log should have messages: each is read, or refused with words."""

import json
import random
from typing import Any

import pytest

from tests.support.otlp import log, span
from worker.runs.fields import Counts, RunRefused
from worker.runs.forms import READERS, form_of, messages_of
from worker.runs.messages import Reasoning, Text
from worker.runs.otlp.mapping import assembled
from worker.runs.otlp.rules import parse_rules

RULES = parse_rules("attribute:a|0.5", "attribute:metadata.b|travel", "private", "private")

KEYS = [
    *("role", "parts", "content", "type", "text", "id", "name", "arguments", "response", "result"),
    *("tool_calls", "function", "message", "event.name", "data", "kwargs", "messages", "input", "output"),
    *("call_id", "summary", "choices", "generations", "tool_use_id", "args", "additional_kwargs", "is_error"),
    *("status", "thinking", "index"),
]

WORDS = [
    *("user", "assistant", "tool", "text", "tool_call", "tool_call_response", "reasoning", "tool_use"),
    *("tool_result", "human", "ai", "function_call", "function_call_output", "message", "constructor"),
    *("gen_ai.choice", "web_search_call", "output_text", "thinking"),
    *("", '{"a": 1}', None, 1, 1.5, True),
]

ATTRIBUTES = [
    *("gen_ai.input.messages", "gen_ai.output.messages", "events", "pydantic_ai.all_messages", "input.value"),
    *(
        "output.value", "gen_ai.tool.call.arguments", "gen_ai.tool.call.result", "traceloop.entity.input",
        "metadata", "a",
    ),
]  # fmt: skip

KINDS = [
    {"gen_ai.operation.name": "chat"}, {"openinference.span.kind": "LLM"}, {"openinference.span.kind": "TOOL"},
    {"gen_ai.operation.name": "invoke_agent"}, {"traceloop.span.kind": "tool"},
]  # fmt: skip


def any_shape(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if depth > 4 or kind < 0.4:
        return rng.choice(WORDS)
    if kind < 0.6:
        return [any_shape(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return {rng.choice(KEYS): any_shape(rng, depth + 1) for _ in range(rng.randint(0, 5))}


def three(rng: random.Random) -> list[Any]:
    return [any_shape(rng, 1) for _ in range(3)]


def test_spans_with_any_values_give_a_trace_or_a_reason(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        spans, logs = [], []
        for number in range(1, rng.randint(2, 6)):
            given = {name: three(rng) if rng.random() < 0.7 else any_shape(rng) for name in rng.sample(ATTRIBUTES, 4)}
            given = {name: json.dumps(value) if rng.random() < 0.7 else value for name, value in given.items()}
            spans.append(span(number, attributes=given | rng.choice(KINDS), parent=rng.randint(0, 4)))
            logs.append(log(number, rng.choice(["gen_ai.choice", "gen_ai.tool.message"]), any_shape(rng)))
        for each in assembled(spans, logs, RULES):
            assert (each.value is None) == (each.missing is not None)


@pytest.mark.parametrize("form", ["chat", "anthropic", "langchain"])
def test_thoughts_within_thoughts_are_left_out(form: str) -> None:
    thought: Any = [{"type": "text", "text": "Hm."}]
    for _ in range(400):
        thought = [{"type": "text", "text": "Oh."}, {"type": "thinking", "thinking": thought}]
    message = {"type": "ai"} if form == "langchain" else {"role": "assistant"}
    (read,) = READERS[form]([message | {"content": thought}], Counts(), "messages")
    assert {*read.parts} - {Text(""), Reasoning("")} == {Text("Oh."), Reasoning("Oh.")}


@pytest.mark.parametrize("form", READERS)
def test_a_run_of_any_shape_is_read_or_refused(form: str, seed: int) -> None:
    rng = random.Random(seed)
    outcomes = set()
    for _ in range(300):
        run = (
            {"messages": three(rng), "input": any_shape(rng), "output": any_shape(rng)}
            if rng.random() < 0.8
            else three(rng)
        )
        for read in (lambda: messages_of(run, form, None, rng.choice([None, ("output",)]), Counts()),  # noqa: B023
                     lambda: form_of(run, None, ("output",))):  # noqa: B023  # fmt: skip
            try:
                read()
                outcomes.add("read")
            except RunRefused as error:
                outcomes.add("refused" if str(error) else "without words")
    assert outcomes == {"read", "refused"}

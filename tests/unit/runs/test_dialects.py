"""Runs as libraries write them become the same traces; and what one bad attribute costs."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.otlp import log, shape, span, span_id
from worker.core.trace import parse_trace
from worker.runs.messages import ToolResult
from worker.runs.otlp.content import messages_in
from worker.runs.otlp.dialects import is_read
from worker.runs.otlp.mapping import Assembled, assembled
from worker.runs.otlp.rules import parse_rules
from worker.runs.otlp.spans import LogEvent, Span, decoded

RULES = parse_rules("0.5", "travel", "private", "private")

DATA = Path(__file__).parents[2] / "data" / "dialects"
"""Runs against a scripted model, with the attributes that are read: as libraries wrote them, or made up (made-...)."""

UNREAD = {"gen_ai.system", "gen_ai.provider.name", "gen_ai.response.id", "events"}
"""Attributes of these runs that no row of the table names."""

AGENT = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "booker"}

CHAT = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai"}


def recorded(name: str) -> tuple[dict[str, Any], list[Span], list[LogEvent]]:
    """Return what a run is to become, its spans and its log events."""
    said, *records = (DATA / f"{name}.jsonl").read_text().splitlines()
    found = [decoded(each.encode()) for each in records]
    return json.loads(said), [one for each in found for one in each.spans], [one for each in found for one in each.logs]


def only(spans: list[Span], logs: list[LogEvent] | None = None) -> Assembled:
    (found,) = (each for each in assembled(spans, logs or [], RULES) if each.value is not None)
    return found


def document(spans: list[Span], logs: list[LogEvent] | None = None) -> dict[str, Any]:
    found = only(spans, logs).document
    assert found is not None
    return found


@pytest.mark.parametrize("name", sorted(path.stem for path in DATA.glob("*.jsonl")))
def test_a_run_as_a_library_writes_it(name: str) -> None:
    expected, spans, logs = recorded(name)
    run, made = only(spans, logs), document(spans, logs)
    assert {
        "agent": made["metadata"]["agent_id"], "objective": made["task"]["objective"], "steps": shape(made),
        "calls": [step.get("tool_call_id", "") for step in made["steps"] if step["type"] != "thought"],
        "result": made["outcome"]["result_summary"], "success": made["metadata"]["success"],
        "conventions": sorted(run.conventions),
    } == expected  # fmt: skip
    assert run.unread == ()
    assert {key for each in spans for key in each.attributes if not is_read(each.scope, key)} <= UNREAD


def test_a_library_keeps_its_runs_identity_when_it_moves_to_the_next_conventions() -> None:
    before, after = (document(recorded(name)[1]) for name in ("made-strands", "made-strands-latest"))
    assert before == after


@pytest.mark.parametrize(("before", "after"), [
    ("strands", "strands-latest-orchard"), ("pydantic-ai-v2", "pydantic-ai-v6"),
    ("google-genai-loop-events", "google-genai-latest"),
])  # fmt: skip
def test_recorded_runs_keep_their_identity_too(before: str, after: str) -> None:
    def told(name: str) -> list[Any]:
        _, spans, logs = recorded(name)
        made = document(spans, logs)
        return [made["metadata"][key] for key in ("agent_id", "task_domain")] + [made["task"], made["outcome"]]

    assert told(before) == told(after)


# One bad attribute

JUNK: tuple[Any, ...] = (
    None, "", "x", "[", "{", "null", "[[[[", '[{"role": "assistant", "parts": [{"type": "te', "{'a': ", '"\\ud800"',
    "NaN", "[" * 3000, 0, -1.5, float("nan"), True, b"\xff", [], {}, [None], [[]], [{}], {"role": 1},
    {"content": {"parts": 3}},
    [{"role": "assistant", "tool_calls": 7}], [{"message": {"role": []}}], {"messages": {"0": 1}}, {"type": ["a"]},
    '{"messages": [[["user"]]]}', '[{"toolUse": {"name": 5}}]', '{"choices": [{"message": "x"}]}', "\ud7ff", "9" * 5000,
)  # fmt: skip


def mutated(rng: random.Random, spans: list[Span], logs: list[LogEvent]) -> tuple[list[Span], list[LogEvent], str]:
    """Return the same with one attribute changed: of a span, of an event, or of a log event."""
    index = rng.randrange(len(spans))
    one = spans[index]
    if logs and rng.random() < 0.3:
        at = rng.randrange(len(logs))
        changed = replace(logs[at], body=rng.choice(JUNK), attributes={**logs[at].attributes, "body": rng.choice(JUNK)})
        return spans, [*logs[:at], changed, *logs[at + 1 :]], logs[at].name
    if one.events and rng.random() < 0.5:
        at = rng.randrange(len(one.events))
        name = rng.choice([*one.events[at].attributes, "message"])
        event = replace(one.events[at], attributes={**one.events[at].attributes, name: rng.choice(JUNK)})
        events = (*one.events[:at], event, *one.events[at + 1 :])
        return [*spans[:index], replace(one, events=events), *spans[index + 1 :]], logs, f"{one.name} event {name}"
    if not one.attributes:
        return spans, logs, ""
    name = rng.choice(sorted(one.attributes))
    changed_span = replace(one, attributes={**one.attributes, name: rng.choice(JUNK)})
    return [*spans[:index], changed_span, *spans[index + 1 :]], logs, f"{one.name} {name}"


ONE_INPUT = {
    "google-genai-latest", "openai-agents-oi", "openai-agents-openllmetry", "openai-agents-logfire",
    "openai-v2-noparent", "made-pydantic-ai-agent-alone", "haystack-oi",
}  # fmt: skip
"""Runs whose objective stands in one attribute alone: one call, or the only one of which the input is there."""


@pytest.mark.parametrize("name", sorted({path.stem for path in DATA.glob("*.jsonl")} - ONE_INPUT))
def test_a_bad_attribute_costs_its_run_nothing_but_that_attribute(name: str, seed: int) -> None:
    rng = random.Random(seed)
    _, spans, logs = recorded(name)
    for _ in range(8):
        changed, said, what = mutated(rng, spans, logs)
        runs = [each for each in assembled(changed, said, RULES) if each.value is not None]
        assert runs, what
        for each in runs:
            parse_trace(each.value or b"")


# What went wrong once


def said(role: str, text: str) -> str:
    return json.dumps([{"role": role, "parts": [{"type": "text", "content": text}]}])


def test_an_agent_directly_below_another_one_has_a_run_of_its_own_unless_it_goes_on_with_the_task() -> None:
    def chat(number: int, asked: str, answer: str, parent: int) -> Span:
        messages = {"gen_ai.input.messages": said("user", asked), "gen_ai.output.messages": said("assistant", answer)}
        return span(number, "chat", CHAT | messages, parent=parent)

    def named(number: int, name: str, parent: int = 0) -> Span:
        return span(number, f"invoke_agent {name}", {**AGENT, "gen_ai.agent.name": name}, parent=parent, seconds=60)

    team = [named(1, "team"), chat(2, "Plan it", "I ask.", 1), named(3, "rater", 1)]
    outer, inner = assembled([*team, chat(4, "Rate it", "Five.", 3)], [], RULES)
    assert (outer.key, inner.key) == ("team", "rater")
    assert inner.document is not None
    assert inner.document["task"]["objective"] == "Rate it"
    spans = [*team, chat(4, "Plan it", "Done.", 3)]
    assert (only(spans).key, document(spans)["outcome"]["result_summary"]) == ("team", "Done.")


def test_a_call_beside_the_run_that_failed_says_nothing() -> None:
    """CrewAI asks for a summary when the context is too long."""
    expected, spans, _ = recorded("genai-openai")
    last = max(spans, key=lambda each: (each.name.startswith("chat"), each.start_ns))
    beside = replace(last, span_id=span_id(1), start_ns=last.end_ns, end_ns=last.end_ns, status=2,
                     attributes=CHAT | {"gen_ai.input.messages": said("user", "Sum this up")})  # fmt: skip
    steps = shape(document([*spans, beside]))
    assert steps[: len(expected["steps"])] == expected["steps"]
    assert steps[len(expected["steps"]) :] in ([], [f"thought: {expected['result']}"])


def test_what_lies_below_a_lost_span_is_part_of_the_only_run() -> None:
    """Strands does not end its own span when the model's call fails."""
    expected, spans, _ = recorded("made-strands")
    lost = [replace(each, parent_id=span_id(99)) if each.span_id == span_id(30) else each for each in spans]
    assert document(lost)["outcome"]["result_summary"] == expected["result"]


def test_a_name_that_was_scrubbed_names_no_agent() -> None:
    """Logfire takes a regatta-secretary for a secret."""
    expected, spans, _ = recorded("pydantic-ai-v6")
    scrubbed = "[Scrubbed due to 'secret']"
    hidden = [
        replace(each, attributes={key: value if value != expected["agent"] else scrubbed
                                  for key, value in each.attributes.items()}) for each in spans
    ]  # fmt: skip
    assert only(hidden).key == expected["agent"], "the name of the agent's span has it, too"
    old = [replace(each, name="agent run", attributes=each.attributes | {"logfire.msg": f"{expected['agent']} run"})
           if each.parent_id == "" else each for each in hidden]  # fmt: skip
    assert only(old).key == expected["agent"]


def test_roles_as_an_enum_writes_them() -> None:
    asked = [
        {"role": "MessageRole.SYSTEM", "content": "You book."},
        {"role": "MessageRole.USER", "content": "Book 12A"},
    ]
    (first, second) = messages_in(asked, "user")
    assert (first.role, second.role) == ("system", "user")
    (made,) = messages_in([{"role": "MessageRole.TOOL_RESPONSE", "content": "Observation:\nseen"}], "user")
    assert (made.role, made.parts) == ("tool", (ToolResult("seen"),))


# One call of a model


def steps_of(attributes: dict[str, Any], *logs: LogEvent, scope: str = "made.up") -> list[str]:
    """Return the steps of one call of a model, after which another one answers."""
    root = {"openinference.span.kind": "AGENT", "input.value": "Book a seat", "output.value": "Done"}
    last = CHAT | {"gen_ai.output.messages": said("assistant", "Done")}
    spans = [span(1, "desk", root, seconds=90), span(2, "chat", attributes, parent=1, scope=scope)]
    return shape(document([*spans, span(30, "chat", last, parent=1)], list(logs)))


OUT, OLD = "llm.output_messages.0.message", "gen_ai.completion.0"
OPENINFERENCE = {"openinference.span.kind": "LLM", f"{OUT}.role": "assistant"}
OPENLLMETRY = {"llm.request.type": "chat", f"{OLD}.role": "assistant"}
LOOKED = {f"{OLD}.content": "I look.", f"{OLD}.tool_calls.0.name": "look"}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize("attributes", [
    OPENINFERENCE | {
        f"{OUT}.tool_calls.0.tool_call.function.name": "look", f"{OUT}.content": "I look.",
        f"{OUT}.contents.0.message_content.type": "text", f"{OUT}.contents.0.message_content.text": "I look.",
        f"{OUT}.contents.1.message_content.type": "reasoning", f"{OUT}.contents.1.message_content.text": "Hm.",
    },
    OPENLLMETRY | LOOKED | {f"{OLD}.reasoning_content": "Hm."},
    {"llm.request.type": "chat", f"{OLD}.role": "thinking", f"{OLD}.content": "Hm."}
    | {name.replace(".0.", ".1.", 1): value for name, value in (OPENLLMETRY | LOOKED).items()},
    CHAT | {"gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [
        {"type": "tool_call", "name": "look"}, {"type": "text", "content": "I look."},
        {"type": "reasoning", "content": "Hm."}]}])},
])  # fmt: skip
def test_reasoning_comes_first_and_the_call_last(attributes: dict[str, Any]) -> None:
    assert steps_of(attributes) == ["thought: Hm.", "thought: I look.", "tool_call: look {}"]


def test_reasoning_is_no_part_of_the_answer() -> None:
    attributes = {f"{OLD}.role": "thinking", f"{OLD}.content": "Hm.",
                  "gen_ai.completion.1.role": "assistant", "gen_ai.completion.1.content": "Done"}  # fmt: skip
    asked = {"openinference.span.kind": "AGENT", "input.value": "Book a seat"}
    found = document([span(1, "desk", asked, seconds=90), span(2, attributes=attributes, parent=1)])
    assert (shape(found), found["outcome"]["result_summary"]) == (["thought: Hm."], "Done")


@pytest.mark.parametrize(("attributes", "before", "after"), [
    ({"openinference.span.kind": "LLM", f"{OUT}.function_call_name": "look",
      f"{OUT}.function_call_arguments_json": '{"a": 1}'}, [], []),
    ({"llm.request.type": "chat", f"{OLD}.function_call.name": "look", f"{OLD}.function_call.arguments": '{"a": 1}'},
     [], []),
    (CHAT | {"gen_ai.input.messages": json.dumps([
        {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "seen"}])}, ["thought: I look."], ["observation: seen"]),
])  # fmt: skip
def test_old_forms_of_calls(attributes: dict[str, Any], before: list[str], after: list[str]) -> None:
    assert steps_of(attributes) == [*before, 'tool_call: look {"a": 1}', *after]


def test_messages_in_log_records() -> None:
    choices = [log(2, "gen_ai.choice", {"index": index, "message": {"content": f"Say {index}"}}, at=index)
               for index in (0, 1)]  # fmt: skip
    assert steps_of(CHAT, *choices) == ["thought: Say 0"], "of several choices the first counts"
    body = {"index": 0, "content": {"role": "model", "parts": [{"text": "I look."}, {"function_call": {
        "name": "look", "args": {"a": 1}, "id": None}}]}}  # fmt: skip
    asked = {"content": {"role": "user", "parts": [{"text": "Go"}]}}
    logs = [log(2, "gen_ai.user.message", asked), log(2, "gen_ai.choice", body, at=1)]
    google = "opentelemetry.instrumentation.google_genai"
    attributes = {"gen_ai.operation.name": "generate_content"}
    assert steps_of(attributes, *logs, scope=google)[-2:] == ["thought: I look.", 'tool_call: look {"a": 1}']

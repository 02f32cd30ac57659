"""Runs as libraries write them become the same traces; and what one bad attribute costs."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.genainormalizer import normalized
from tests.support.otlp import shape
from worker.core.trace import parse_trace
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
    read = [decoded(each.encode()) for each in records]
    return json.loads(said), [one for each in read for one in each.spans], [one for each in read for one in each.logs]


def only(spans: list[Span], logs: list[LogEvent] | None = None) -> Assembled:
    (run,) = (each for each in assembled(spans, logs or [], RULES) if each.value is not None)
    return run


def document(spans: list[Span], logs: list[LogEvent] | None = None) -> dict[str, Any]:
    trace = only(spans, logs).document
    assert trace is not None
    return trace


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


@pytest.mark.parametrize("name", sorted(path.stem for path in DATA.glob("*.jsonl")))
@pytest.mark.parametrize("messages", [False, True])
def test_the_collectors_genainormalizer_changes_no_trace(name: str, messages: bool) -> None:
    """Its default keeps the originals. `messages`: later versions also make JSON of flattened messages."""
    _, spans, logs = recorded(name)
    if not messages or name != "made-openinference-cut":  # in one attribute, what was lost cannot be told any more
        assert document([normalized(each, messages=messages) for each in spans], logs) == document(spans, logs)


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
    "openai-v2-noparent", "made-pydantic-ai-agent-alone", "haystack-oi", "instructor-oi", "langgraph-openlit-failed",
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

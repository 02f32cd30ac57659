"""What holds for the traces of any spans, and what hostile spans cannot do. Input and output are in test_cases.py."""

import json
import random
import re
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.support.otlp import NOW, SECOND, log, shape, span, span_id
from worker.core.trace import Limits, parse_trace
from worker.runs.otlp.mapping import Assembled, assembled
from worker.runs.otlp.rules import Rules, parse_rules
from worker.runs.otlp.spans import Span, is_complete

RULES = parse_rules("0.5", "travel", "private", "private")


def chat(number: int, said: list[Any], answer: Any, **more: Any) -> Span:
    """Return the span of a model. A message: a user's text, or (role, *parts); a part: a text, or (call's id, name)."""
    messages = [_message(*each) if isinstance(each, tuple) else _message("user", each) for each in said]
    attributes = {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "p", "gen_ai.input.messages": json.dumps(messages),
        "gen_ai.output.messages": json.dumps([] if answer is None else [_message("assistant", *answer)]),
    }  # fmt: skip
    return span(number, "chat m", attributes | more.pop("attributes", {}), **more)


def _message(role: str, *parts: Any) -> dict[str, Any]:
    return {"role": role, "parts": [
        {"type": "text", "content": each} if isinstance(each, str) else
        {"type": "tool_call_response", "id": each[0], "response": each[1]} if role == "tool" else
        {"type": "tool_call", "id": each[0], "name": each[1], "arguments": {"n": each[0]}} for each in parts
    ]}  # fmt: skip


def tool(number: int, name: str, call_id: str = "", result: Any = None, **more: Any) -> Span:
    attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": name, "gen_ai.tool.call.id": call_id}
    return span(number, name, attributes | ({} if result is None else {"gen_ai.tool.call.result": result}), **more)


def agent(number: int, name: str, **more: Any) -> Span:
    attributes = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name}
    return span(number, f"invoke_agent {name}", attributes | more.pop("attributes", {}), seconds=60, **more)


def only(*spans: Span, rules: Rules = RULES) -> Assembled:
    (run,) = assembled(spans, [], rules)
    return run


def document(*spans: Span, rules: Rules = RULES) -> dict[str, Any]:
    run = only(*spans, rules=rules)
    assert run.document is not None, run
    assert run.value is not None
    parse_trace(run.value)
    assert json.loads(run.value) == run.document
    return run.document


NESTED = [
    agent(1, "outer"),
    chat(2, ["Plan it"], ("I ask.", ("c1", "ask")), parent=1),
    tool(3, "ask", "c1", "three", parent=1, seconds=20),
    agent(4, "inner", parent=3),
    chat(5, ["How many?"], (("c2", "count"),), parent=4),
    tool(6, "count", "c2", "3", parent=4),
    chat(7, ["How many?", ("assistant", ("c2", "count")), ("tool", ("c2", "3"))], ("three",), parent=4),
    chat(
        9, ["Plan it", ("assistant", "I ask.", ("c1", "ask")), ("tool", ("c1", "three"))], ("Three it is.",), parent=1
    ),
]


def test_no_spans_are_no_run_and_a_trace_beyond_the_limits_is_none() -> None:
    assert assembled([], [log(1, "a", "b")], RULES) == []
    tight = Rules(RULES.confidence, RULES.domain, RULES.visibility, RULES.privacy, limits=Limits(max_bytes=300))
    assert only(chat(1, ["Hi"], ("a" * 300,)), rules=tight).missing == "too_large"


STRANGE = {"gen_ai.request.model": "m", "desk.llm.prompt.0.text": "Plan a trip.", "desk.llm.reply": '{"text": "Done."}'}
"""What a library that no row of the table knows might write on the span of a model."""


def test_no_cache_keeps_what_anyone_sends() -> None:
    """Scopes and names of a megabyte each."""
    tracemalloc.start()
    for number in range(30):
        only(span(1, "ask", STRANGE | {f"desk.prompt{number}" + "x" * 1_000_000: "a b"}, scope=f"{number}" * 1_000_000))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 3_000_000


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (("2", "d", "org", "private"), "confidence: '2' is not a number from 0 to 1"),
        (("attribute:a", "d", "org", "private"), "confidence: 'attribute:a' is not attribute:NAME"),
        (("attribute:|1", "d", "org", "private"), "confidence: 'attribute:|1' is not attribute:NAME"),
        (("1", " ", "org", "private"), "domain: ' ' is not a text"),
        (("1", "d", "all", "private"), "visibility: 'all' is not one of private, org, network"),
        (("1", "d", "org", "attribute:p|x"), "privacy: 'x' is not one of aggregated, federated, private"),
    ],
)
def test_a_wrong_rule_is_refused_with_its_name(values: tuple[str, str, str, str], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        parse_rules(*values)


# -- when a trace is complete


@pytest.mark.parametrize(
    ("spans", "ended"),
    [
        ([], False),
        ([span(1)], True),
        ([span(2, parent=1)], False),
        ([span(1), span(2, parent=1)], True),
        ([span(1), span(3, parent=2)], False),  # 2 is still open
        ([span(1, parent=9, remote=True)], False),  # the agent in another process that waits for this one
        ([span(9), span(1, parent=9, remote=True)], True),
        ([span(1, parent=9, remote=True), span(3, parent=2)], False),
        ([span(1, parent=2), span(2, parent=1)], False),
        ([span(1, parent=1)], False),
    ],
)
def test_a_trace_is_complete_when_no_parent_is_missing(spans: list[Span], ended: bool) -> None:
    assert is_complete((each.span_id, each.parent_id) for each in spans) is ended


# -- order, repetition, and hostile spans


def test_the_bytes_depend_on_the_set_of_spans_alone(seed: int) -> None:
    rng = random.Random(seed)
    logs = [log(number, "gen_ai.user.message", {"content": f"{number}"}, at=number % 2) for number in range(4)]
    usual = [each.value for each in assembled(NESTED, logs, RULES)]
    for _ in range(20):
        spans, said = [*NESTED, *rng.choices(NESTED, k=3)], [*logs, *rng.choices(logs, k=2)]
        cut = rng.choice(NESTED)
        spans.append(replace(cut, end_ns=cut.end_ns - 1, attributes={}))  # an earlier state of a span
        rng.shuffle(spans)
        rng.shuffle(said)
        assert [each.value for each in assembled(spans, said, RULES)] == usual


TIMES = [0, NOW, 2**64 - 1]

NAMES = [
    *("gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.tool.call.arguments", "gen_ai.operation.name"),
    *("llm.input_messages.0.message.role", "gen_ai.prompt.0.content", "gen_ai.prompt.x.y", "input.value"),
    *("openinference.span.kind", "gen_ai.response.id", "metadata", "events"),
]


def test_no_set_of_spans_raises_and_each_document_is_valid(seed: int) -> None:
    """Random trees with circles, missing parents, wrong types and texts that were cut off."""
    rng = random.Random(seed)
    texts = [
        *("", "x", "[", '[{"role": "user", "parts": [{"type": "text", "content": "Hi"}]}, {"role', '"\\ud800"', "NaN"),
        *("[" * 3000, '[{"role": 1, "parts": 2}]', '{"messages": [[]]}', "\ud7ff", "1e999", "9" * 5000),
    ]
    for _ in range(150):
        spans = []
        for number in range(1, rng.randint(2, 12)):
            attributes = dict(rng.choice(NESTED).attributes)
            for name in rng.sample(NAMES, 3):
                attributes[name] = rng.choice(
                    [*texts, None, 1.5, float("nan"), b"\xff", ["a", {"b": None}], {}, True, "LLM"]
                )
            one = span(number, attributes=attributes, parent=rng.randint(0, 12))
            spans.append(replace(one, start_ns=rng.choice(TIMES), end_ns=rng.choice(TIMES)))
        for each in assembled(spans, [], RULES):
            assert (each.document is None) == (each.value is None) == (each.missing is not None)
            if each.value is not None:
                parse_trace(each.value)


def test_a_megabyte_of_attributes_and_a_text_cut_off() -> None:
    said = json.dumps([_message("user", "Hi"), _message("assistant", "a" * 3_000_000)])[:-20]
    one = chat(1, [], ("Hello",), attributes={"gen_ai.input.messages": said, "blob": "b" * 1_000_000})
    assert shape(document(one)) == ["thought: Hello"]
    half = '[{"role": "assistant", "parts": [{"type": "text", "content": "\\ud83e"}]}, {"ro'
    cut = chat(1, ["Hi"], ("Hello",), attributes={"gen_ai.output.messages": half})
    assert shape(document(cut)) == ["thought: ?"]


def test_blanks_in_a_field_of_dspy_take_linear_time() -> None:
    text = f"[[ ## question ## ]]\nHi{' ' * 200_000}there"
    began = time.process_time()
    assert document(chat(1, [text], (text,)))["task"]["objective"].split() == ["Hi", "there"]
    assert time.process_time() - began < 2


# -- large traces: a trace that is 32 times as large takes less than 150 times as long


def asked(*messages: dict[str, Any]) -> list[Span]:
    said = json.dumps([_message("user", "Go"), *messages])
    return [chat(1, [], ("Done",), attributes={"gen_ai.input.messages": said})]


def one_message(ids: Callable[[int], dict[str, Any]], count: int) -> list[Span]:
    calls = [{"type": "tool_call", "name": "a", "arguments": {"n": n}, **ids(n)} for n in range(count)]
    got = [{"type": "tool_call_response", "response": f"{n}", **ids(n)} for n in range(count)]
    return asked({"role": "assistant", "parts": calls}, {"role": "tool", "parts": got})


def results_alone(count: int) -> list[Span]:
    """Results without ids, each in a message of its own."""
    calls = [{"type": "tool_call", "name": "a", "arguments": {"n": n}, "id": f"c{n}"} for n in range(count)]
    got = [{"role": "tool", "parts": [{"type": "tool_call_response", "response": f"{n}"}]} for n in range(count)]
    return asked({"role": "assistant", "parts": calls}, *got)


def long_answer(count: int) -> list[Span]:
    parts = [[{"type": "reasoning", "content": f"r{n}"}, {"type": "text", "content": f"{n}"}] for n in range(count)]
    return asked(*({"role": "assistant", "parts": each} for each in parts))


def tree(parent: Callable[[int], int], made: Callable[[int], Span], count: int, first: int = 2) -> list[Span]:
    spans = [replace(made(n), span_id=span_id(n), parent_id=span_id(parent(n)), start_ns=NOW + n, end_ns=NOW + SECOND)
             for n in range(first, count)]  # fmt: skip
    last = replace(chat(0, ["Hi"], ("Hello",)), span_id="f" * 16, parent_id=span_id(count - 1))
    return [*([agent(1, "x")] if first == 2 else []), *spans, last]


def idle_agents(n: int) -> Span:
    """Agents that were asked nothing of their own, and below each a call of a model."""
    return chat(n, [], ("Hi",)) if n % 2 else agent(n, f"a{n}")


LARGE: dict[str, tuple[Callable[[int], list[Span]], int]] = {  # a trace by its size, and the smaller size
    "own ids": (partial(one_message, lambda n: {"id": f"c{n}"}), 500),
    "one id": (partial(one_message, lambda _: {"id": "c"}), 500),
    "no ids": (partial(one_message, lambda _: {}), 500),
    "results in messages of their own": (results_alone, 500),
    "an answer in many messages": (long_answer, 1000),
    "chain": (partial(tree, lambda n: n - 1, span), 500),
    "star": (partial(tree, lambda _: 1, span), 500),
    "circle": (lambda count: tree(lambda n: n % (count - 1) + 1, span, count, 1), 500),
    "tools": (partial(tree, lambda _: 1, lambda n: tool(n, "t")), 500),
    "idle agents": (partial(tree, lambda n: n - 1 if n % 2 else 1, idle_agents), 200),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_trace_takes_linear_time(name: str) -> None:
    """A quadratic way takes 300 to 1000 times as long. The loaded machine of one try may be quiet in the next."""
    made, count = LARGE[name]

    def seconds(spans: list[Span]) -> float:
        began = time.process_time()
        assembled(spans, [], RULES)
        return time.process_time() - began

    few, many = made(count), made(32 * count)
    assert any(seconds(many) < 150 * min(seconds(few) for _ in range(3)) for _ in range(5))
    if made is results_alone:
        steps = document(*few)["steps"]
        assert [step["content"] for step in steps if step["type"] == "observation"][-1] == f"{count - 1}"

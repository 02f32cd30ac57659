"""Traces of spans: which runs a trace holds, what of a run is missing, and what hostile spans cannot do."""

from __future__ import annotations

import json
import random
import re
import time
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from tests.support.otlp import NOW, SECOND, failure, log, shape, span, span_id
from worker.core.trace import Limits, parse_trace
from worker.runs.otlp.mapping import MAX_UNREAD, NO_MODEL, NO_PARENT, Assembled, assembled
from worker.runs.otlp.rules import Rules, parse_rules
from worker.runs.otlp.spans import Span, SpanEvent
from worker.runs.otlp.tree import root_ended

RULES = parse_rules("0.5", "travel", "private", "private")

UUID = "0af76519-16cd-43dd-8448-eb211c80319c"


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
    (found,) = assembled(spans, [], rules)
    return found


def document(*spans: Span, rules: Rules = RULES) -> dict[str, Any]:
    found = only(*spans, rules=rules)
    assert found.document is not None, found
    assert found.value is not None
    parse_trace(found.value)
    assert json.loads(found.value) == found.document
    return found.document


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


def test_an_agent_that_is_a_tool_is_a_run_of_its_own() -> None:
    outer, inner = assembled(NESTED, [], RULES)
    assert outer.document is not None
    assert inner.document is not None
    assert shape(outer.document) == ["thought: I ask.", 'tool_call: ask {"n": "c1"}', "observation: three"]
    assert shape(inner.document) == ['tool_call: count {"n": "c2"}', "observation: 3"]
    assert (outer.document["task"]["objective"], inner.document["task"]["objective"]) == ("Plan it", "How many?")
    assert (outer.document["outcome"]["result_summary"], inner.document["outcome"]["result_summary"]) == (
        "Three it is.", "three")  # fmt: skip
    assert (
        outer.key, inner.key, outer.agent_span_id, inner.agent_span_id,
    ) == ("outer", "inner", span_id(1), span_id(4))  # fmt: skip
    assert [each["id"] for each in (outer.document, inner.document)] == [
        f"kp:trace:{UUID}:{span_id(1)}", f"kp:trace:{UUID}:{span_id(4)}"]  # fmt: skip
    assert outer.document["steps"][1]["latency_ms"] == 20_000


def test_agents_side_by_side_are_runs_of_their_own_and_the_root_speaks_for_none() -> None:
    spans = [
        span(1, "GET /", {"output.value": "both"}, status=2, seconds=99), agent(2, "a", parent=1),
        agent(3, "b", parent=1), chat(4, ["A?"], ("a!",), parent=2), chat(5, ["B?"], ("b!",), parent=3),
    ]  # fmt: skip
    found = assembled(spans, [], RULES)
    assert [each.key for each in found] == ["a", "b"]
    assert [each.document["outcome"]["result_summary"] for each in found if each.document] == ["a!", "b!"]
    assert all(each.document and each.document["metadata"]["success"] for each in found)


def test_a_call_of_a_model_in_a_tool_is_no_run() -> None:
    spans = [
        *NESTED[:2],
        tool(3, "ask", "c1", "three", parent=1, seconds=20),
        chat(4, ["Sum up"], ("three",), parent=3),
    ]
    assert shape(document(*spans)) == ["thought: I ask.", 'tool_call: ask {"n": "c1"}', "observation: three"]


def test_agents_that_hand_over_are_one_run() -> None:
    spans = [
        agent(1, "desk"),
        agent(2, "first", parent=1),
        chat(3, ["Go"], (("c1", "hand_over"),), parent=2),
        agent(4, "second", parent=1),
        chat(5, ["Go", ("assistant", ("c1", "hand_over")), ("tool", ("c1", "ok"))], ("Done",), parent=4),
    ]
    assert shape(document(*spans)) == ['tool_call: hand_over {"n": "c1"}', "observation: ok"]


def test_two_turns_of_a_user_and_a_repeated_call() -> None:
    first = chat(1, ["Hi"], ("Hello", ("c1", "look")))
    again = chat(2, ["Hi", ("assistant", "Hello", ("c1", "look")), ("tool", ("c1", "a"))], (("c2", "look"),))
    said = ["Hi", ("assistant", "Hello", ("c1", "look")), ("tool", ("c1", "a")), ("assistant", ("c2", "look")),
            ("tool", ("c2", "a"))]  # fmt: skip
    third = chat(3, said, ("So?",))
    last = chat(4, [*said, ("assistant", "So?"), "yes"], ("Bye",))
    below = [replace(each, parent_id=span_id(9)) for each in (first, again, third, last)]
    assert shape(document(replace(agent(0, "x"), span_id=span_id(9)), *below)) == [
        "thought: Hello", 'tool_call: look {"n": "c1"}', "observation: a", 'tool_call: look {"n": "c2"}',
        "observation: a", "thought: So?", "observation: yes",
    ]  # fmt: skip


def test_parts_of_one_text_stay_together_and_space_around_a_text_tells_no_turns_apart() -> None:
    """A library may strip what the model said before it sends it again."""
    first = chat(1, [("user", "Hi,", "there")], ("So \n",), parent=9)
    last = chat(2, [("user", "Hi,", "there"), ("assistant", "So"), "Go on"], ("Bye",), parent=9)
    found = document(replace(agent(0, "x"), span_id=span_id(9)), first, last)
    assert found["task"]["objective"] == "Hi,\nthere"
    assert shape(found) == ["thought: So \n", "observation: Go on"]


def test_a_retry_of_the_model_is_no_step() -> None:
    failed = chat(2, ["Hi"], None, status=2, message="503", parent=1)
    found = document(agent(1, "x"), failed, chat(3, ["Hi"], (("c", "look"),), parent=1))
    assert shape(found) == ['tool_call: look {"n": "c"}']
    assert not found["metadata"]["success"]


def test_a_failed_run_says_why() -> None:
    spans = [agent(1, "x", status=2, message="gave up"), chat(2, ["Hi"], (("c", "look"),), parent=1),
             chat(3, ["Hi"], None, parent=1, status=2, events=[failure("HTTP 400")])]  # fmt: skip
    found = document(*spans)
    assert found["metadata"]["success"] is False
    assert found["outcome"]["result_summary"] == "gave up"


def test_tools_alone_are_steps_where_the_objective_is_known() -> None:
    said = {"gen_ai.input.messages": json.dumps([_message("user", "Go")])}
    spans = [
        agent(1, "x", attributes=said),
        tool(2, "a", result="1", parent=1),
        tool(3, "b", parent=1, status=2, message="no"),
    ]
    assert shape(document(*spans)) == ["tool_call: a {}", "observation: 1", "tool_call: b {}", "observation: no"]


def test_reasoning_that_only_the_next_input_has_comes_before_its_turn() -> None:
    said = [_message("user", "Go"), {"role": "assistant", "parts": [{"type": "reasoning", "content": "Hm."}]},
            _message("assistant", "I look.", ("c", "look")), _message("tool", ("c", "x"))]  # fmt: skip
    last = chat(3, [], ("Done",), parent=1, attributes={"gen_ai.input.messages": json.dumps(said)})
    found = document(agent(1, "x"), chat(2, ["Go"], ("I look.", ("c", "look")), parent=1), last)
    assert shape(found) == ["thought: Hm.", "thought: I look.", 'tool_call: look {"n": "c"}', "observation: x"]


# -- what is missing

SKELETON = {
    "gen_ai.operation.name": "chat",
    "gen_ai.input.messages": '[{"role":"user","parts":[{"type":"text"}]}]',
    "gen_ai.output.messages": '[{"role":"assistant","parts":[{"type":"tool_call","name":"a"}]}]',
}
"""What pydantic-ai leaves of messages without their content."""


@pytest.mark.parametrize(
    ("scope", "attributes", "hint"),
    [
        ("opentelemetry.instrumentation.openai_v2", {"gen_ai.operation.name": "chat"}, "CAPTURE_MESSAGE_CONTENT"),
        ("opentelemetry.instrumentation.genai.langchain", {"gen_ai.operation.name": "chat"}, "CAPTURE_MESSAGE_CONTENT"),
        ("pydantic-ai", SKELETON, "include_content=True"),
        (
            "openinference.instrumentation.openai",
            {"openinference.span.kind": "LLM", "input.value": "__REDACTED__"},
            "OPENINFERENCE_HIDE_INPUTS",
        ),
        ("com.anthropic.sdk.python", {"gen_ai.operation.name": "chat"}, "ANTHROPIC_OPEN_TELEMETRY_TRACES_CONTENT_MODE"),
        ("opentelemetry.instrumentation.openai.v1", {"llm.request.type": "chat"}, "TRACELOOP_TRACE_CONTENT"),
        ("opentelemetry.util.genai.handler", {"gen_ai.operation.name": "chat"}, "CAPTURE_MESSAGE_CONTENT=span_only"),
        ("opentelemetry.instrumentation.google_genai", {"gen_ai.operation.name": "chat"}, "gen_ai_latest_experimental"),
        ("semantic_kernel.utils.a", {"gen_ai.operation.name": "chat"}, "OTEL_DIAGNOSTICS_SENSITIVE=true"),
    ],
)
def test_a_run_without_content_names_what_captures_it(scope: str, attributes: dict[str, Any], hint: str) -> None:
    root = agent(1, "x", attributes={"input.value": "__REDACTED__", "output.value": "__REDACTED__"})
    found = only(root, span(2, attributes=attributes, scope=scope, parent=1), tool(3, "a", parent=1))
    assert (found.document, found.value, found.missing) == (None, None, "no_content")
    assert found.hints[0].startswith(f"{scope}: ")
    assert hint in found.hints[0]


@pytest.mark.parametrize("scope", ["opentelemetry.instrumentation.httpx", "aileron", "openinferences", ""])
def test_an_unknown_library_gets_no_other_one_s_hint(scope: str) -> None:
    found = only(span(1, "ask", {"gen_ai.request.model": "m"}, scope=scope))
    assert (found.missing, found.hints) == ("no_content", ())


def test_what_else_is_missing() -> None:
    assert only(span(1, "GET /")).missing == "not_a_run"
    assert assembled([], [log(1, "a", "b")], RULES) == []
    assert only(agent(1, "x"), tool(2, "a", parent=1)).hints == (NO_MODEL,)
    assert only(chat(1, [], ("Hello",))).missing == "no_objective"
    assert only(chat(1, ["Hi"], None)).missing == "no_steps"
    tight = Rules(RULES.confidence, RULES.domain, RULES.visibility, RULES.privacy, limits=Limits(max_bytes=300))
    assert only(chat(1, ["Hi"], ("a" * 300,)), rules=tight).missing == "too_large"


STRANGE = {"gen_ai.request.model": "m", "desk.llm.prompt.0.text": "Plan a trip.", "desk.llm.reply": '{"text": "Done."}'}
"""What a library that no row of the table knows might write on the span of a model."""


def test_content_where_nothing_reads_it_is_named_and_no_setting_is_blamed() -> None:
    about = {"desk.llm.prompt_tokens": "a b", "desk.prompt.id": "a b", "desk.output": "x", "http.request.body": "a b"}
    found = only(span(1, "ask", STRANGE | about, scope="opentelemetry.instrumentation.openai.v1"))
    scope = "opentelemetry.instrumentation.openai.v1"
    assert found.missing == "no_content"
    assert found.unread == ((scope, "desk.llm.prompt.N.text"), (scope, "desk.llm.reply"))
    assert found.hints == ()
    nobody = only(span(1, "ask", {"desk.prompt": "Plan a trip."}, scope="desk"))
    assert (nobody.missing, nobody.unread) == ("not_a_run", (("desk", "desk.prompt"),))


def test_no_cache_keeps_what_anyone_sends() -> None:
    """Scopes and names of a megabyte each."""
    tracemalloc.start()
    for number in range(30):
        only(span(1, "ask", STRANGE | {f"desk.prompt{number}" + "x" * 1_000_000: "a b"}, scope=f"{number}" * 1_000_000))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 3_000_000


def test_events_and_log_records_that_nothing_reads_are_named() -> None:
    said = SpanEvent("desk.message.sent", NOW, {"desk.text": "Plan a trip."})
    read = SpanEvent("gen_ai.user.message", NOW, {"content": "Plan a trip."})
    plain = SpanEvent("desk.retry", NOW, {"desk.reason": "not in time"})
    model = {"gen_ai.request.model": "m"}
    assert only(span(1, "ask", model, scope="desk", events=(said, plain))).unread == (
        ("desk", "event desk.message.sent"),
    )
    assert only(span(1, "ask", model, scope="desk", events=(read,))).unread == ()
    (found,) = assembled([span(1, "ask", model, scope="desk")], [log(1, "desk.answer", {"text": "It is done."})], RULES)
    assert found.unread == (("desk", "log record desk.answer"),)


def test_of_a_trace_only_what_a_silent_call_holds_is_named() -> None:
    """The others say the same in two ways, as many libraries do."""
    twice = chat(1, ["Hi"], ("Hello",), attributes={"desk.prompt": "Hi, you"})
    assert only(twice).unread == ()
    silent = span(
        3,
        "look",
        {"gen_ai.tool.name": "look", "gen_ai.operation.name": "execute_tool"} | {"desk.tool.result": "it is there"},
        parent=1,
    )
    found = only(agent(1, "x"), chat(2, ["Hi"], (("c", "look"),), parent=1), silent)
    assert found.value is not None
    assert found.unread == (("made.up", "desk.tool.result"),)
    unknown = span(3, "Function", {"desk.tool.result": "it is there"}, parent=1)
    assert only(agent(1, "x"), chat(2, ["Hi"], (("c", "look"),), parent=1), unknown).unread == found.unread


def test_what_is_named_as_not_read_is_bounded() -> None:
    attributes = {f"desk.prompt.{chr(97 + number // 26)}{chr(97 + number % 26)}": "a b" for number in range(100)}
    long = {"desk.prompt." + "x" * 200: "a b"}
    found = only(span(1, "ask", {"gen_ai.request.model": "m"} | attributes | long, scope="desk"))
    assert len(found.unread) == MAX_UNREAD
    assert all(len(name) <= 100 for _, name in found.unread)


def test_a_model_that_has_no_parent_is_said() -> None:
    assert only(chat(1, ["Hi"], (("c", "look"),))).hints == (NO_PARENT,)
    assert only(chat(1, ["Hi"], ("Hello",))).hints == ()
    assert only(agent(1, "x"), chat(2, ["Hi"], (("c", "look"),), parent=1)).hints == ()


def test_a_single_answer_is_a_thought() -> None:
    found = document(chat(1, ["Hi"], ("Hello",)))
    assert (shape(found), found["id"]) == (["thought: Hello"], f"kp:trace:{UUID}")


# -- values that come from rules and attributes


def test_rules_take_attributes_where_they_are_valid() -> None:
    rules = parse_rules("attribute:score|0.25", "attribute:metadata.team.name|other", "attribute:vis|org", "aggregated")
    plain = chat(1, ["Hi"], ("Hello",), attributes={"score": 4.0, "vis": "secret"})
    found = document(plain, rules=rules)
    assert found["outcome"]["confidence"] == 0.25
    assert (found["metadata"]["task_domain"], found["metadata"]["visibility"]) == ("other", "org")
    rich = chat(
        1, ["Hi"], ("Hello",), attributes={"score": 0.75, "vis": "network", "metadata": '{"team.name": "rail"}'}
    )
    found = document(rich, rules=rules)
    assert (found["outcome"]["confidence"], found["metadata"]["task_domain"]) == (0.75, "rail")
    assert found["metadata"]["visibility"] == "network"
    assert document(chat(1, ["Hi"], ("Hello",), resource={"score": "1"}), rules=rules)["outcome"]["confidence"] == 1


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


def evaluation(**found: Any) -> SpanEvent:
    attributes = {f"gen_ai.evaluation.{name.replace('_', '.')}": value for name, value in found.items()}
    return SpanEvent("gen_ai.evaluation.result", NOW, attributes)


def test_an_evaluation_gives_success_and_confidence() -> None:
    run = chat(1, ["Hi"], ("Hello",))
    bad = [evaluation(score_value=0.9, score_label="pass"), evaluation(score_value=0.2, score_label="FAIL")]
    for events, expected in (([], (True, 0.5)), (bad[:1], (True, 0.9)), (bad, (False, 0.2)),
                             ([evaluation(score_value=4.0, score_label="good")], (True, 0.5))):  # fmt: skip
        found = document(replace(run, events=tuple(events)))
        assert (found["metadata"]["success"], found["outcome"]["confidence"]) == expected
    as_log = log(1, "gen_ai.evaluation.result", None, **{"gen_ai.evaluation.score.value": 0.1})
    (logged,) = assembled([run], [as_log], RULES)
    assert logged.document is not None
    assert logged.document["outcome"]["confidence"] == 0.1
    (linked,) = assembled([run], [replace(as_log, span_id="")], RULES)
    assert linked.value == logged.value


@pytest.mark.parametrize(("first", "second", "count"), [("r1", "r2", 2), ("r1", "r1", 1), ("r1", "", 1), ("", "", 1)])
def test_two_calls_at_once_may_say_the_same(first: str, second: str, count: int) -> None:
    """If their responses have different ids, they are two calls; else two libraries describe one."""
    pair = [
        chat(number, [f"Part {number}"], ("Fine.",), parent=9, start=1, attributes={"gen_ai.response.id": name})
        for number, name in ((1, first), (2, second))
    ]
    last = chat(5, ["Part 1", "Sum up"], ("Done",), parent=9)
    found = document(replace(agent(0, "x"), span_id=span_id(9)), *pair, last)
    assert shape(found).count("thought: Fine.") == count


def test_the_agent_is_named_by_the_first_attribute_of_the_table() -> None:
    names = {"gen_ai.agent.name": "a", "agent.name": "b", "traceloop.workflow.name": "c", "gen_ai.agent.id": "d"}
    said = chat(2, ["Hi"], ("Ho",), parent=1)
    kind = {"openinference.span.kind": "AGENT"}
    for count in range(4):
        given = dict(list(names.items())[count:])
        assert only(span(1, "root", given | kind), said).key == "abcd"[count]
    assert only(span(1, "desk", kind), said).key == "desk"
    assert only(span(1, "GET /", resource={"service.name": "s"}), said).key == "s"
    assert only(chat(2, ["Hi"], ("Ho",), resource={"other": 1})).key == "chat m"


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"gen_ai.agent.id": "3fa85f64-5717-4562-b3fc-2c963f66afa6", "gen_ai.agent.name": "Assistant"}, "Assistant"),
        ({"gen_ai.agent.id": "3fa85f64-5717-4562-b3fc-2c963f66afa6"}, "s"),
        ({"gen_ai.agent.id": "3FA85F6457174562B3FC2C963F66AFA6"}, "s"),
        ({"gen_ai.agent.id": "asst_trip-planner"}, "asst_trip-planner"),
        ({"gen_ai.agent.name": "assistant_3fa85f64-5717-4562-b3fc-2c963f66afa6"}, "assistant"),
        ({"gen_ai.agent.name": "desk-1f00a2c4"}, "desk"), ({"gen_ai.agent.name": "Agent(140234233412352)"}, "Agent"),
        ({"gen_ai.agent.name": "run-8Zk2Lq91xY"}, "s"), ({"gen_ai.agent.name": "01ARZ3NDEKTSV4RRFFQ69G5FAV"}, "s"),
        ({"gen_ai.agent.name": "planner-20260101"}, "planner-20260101"),
        ({"gen_ai.agent.name": "facade decade added"}, "facade decade added"), ({"gen_ai.agent.name": " "}, "s"),
    ],
)  # fmt: skip
def test_a_generated_id_names_no_agent(given: dict[str, str], key: str) -> None:
    root = span(1, "invoke_agent", given | {"openinference.span.kind": "AGENT"}, resource={"service.name": "s"})
    found = only(
        replace(root, name="invoke_agent 3fa85f64-5717-4562-b3fc-2c963f66afa6"), chat(2, ["Hi"], ("Ho",), parent=1)
    )
    assert found.key == key


@pytest.mark.parametrize(
    ("rule", "named", "unnamed"),
    [
        ("name", "assistant", "desk"), ("service/name", "desk/assistant", "desk"),
        ("support", "assistant", "support"), ("attribute:team|name", "assistant", "desk"),
        ("attribute:app.agent|name", "own id", "own id"), ("attribute:app.agent|service/name", "own id", "own id"),
    ],
)  # fmt: skip
def test_a_setting_says_which_id_an_agent_has(rule: str, named: str, unnamed: str) -> None:
    rules = parse_rules("0.5", "other", "org", "private", agent=rule)
    resource = {"service.name": "desk", "app.agent": "own id"}
    said = chat(2, ["Hi"], ("Ho",), parent=1)
    tool = span(3, "t", {"gen_ai.operation.name": "execute_tool", "gen_ai.agent.name": "x", "team": "x"}, parent=1)
    for given, key in (({"gen_ai.agent.name": "assistant"}, named), ({}, unnamed)):
        root = span(1, "invoke_agent", given | {"gen_ai.operation.name": "invoke_agent"}, resource=resource)
        root = replace(root, name="invoke_agent 3fa85f64-5717-4562-b3fc-2c963f66afa6")
        (found,) = assembled([root, said, tool], [], rules)
        assert found.key == key


def test_a_tools_span_speaks_for_no_agent() -> None:
    """It may make visibility and privacy stricter, and nothing else."""
    rules = parse_rules(
        "attribute:c|0.5", "attribute:d|other", "attribute:v|org", "attribute:p|federated", agent="attribute:a|name"
    )
    root = agent(1, "desk")
    said = chat(2, ["Hi"], ("Ho",), parent=1)
    loose = {"c": 1.0, "d": "code", "v": "network", "p": "aggregated", "a": "x", "gen_ai.agent.name": "x"}
    events = (evaluation(score_value=1.0, score_label="fail"),)
    for place in ("attributes", "resource"):
        hostile = span(3, "t", {"gen_ai.operation.name": "execute_tool"}, parent=1)
        hostile = replace(hostile, **{place: {**getattr(hostile, place), **loose}}, events=events)
        (found,), (without,) = (assembled([root, said, *more], [], rules) for more in ([hostile], []))
        assert found.document is not None
        assert without.document is not None
        assert found.document["metadata"] == without.document["metadata"]
        assert found.document["outcome"]["confidence"] == 0.5
    strict = replace(hostile, resource={}, attributes={**hostile.attributes, "v": "private", "p": "private"}, events=())
    (found,) = assembled([root, said, strict], [], rules)
    assert found.document is not None
    assert (found.document["metadata"]["visibility"], found.document["metadata"]["privacy_level"]) == ("private",) * 2


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
    assert root_ended(spans) is ended


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


def test_times_of_1970_and_of_2554() -> None:
    for start, written in ((0, "1970-01-01T00:00:00.000Z"), (2**63 - 1, "2262-04-11T23:47:16.854Z"),
                           (2**64 - 1, "2554-07-21T23:34:33.709Z")):  # fmt: skip
        one = replace(chat(1, ["Hi"], ("Hello",)), start_ns=start, end_ns=0)
        assert document(one)["metadata"]["created_at"] == written


def test_a_megabyte_of_attributes_and_a_text_cut_off() -> None:
    said = json.dumps([_message("user", "Hi"), _message("assistant", "a" * 3_000_000)])[:-20]
    one = chat(1, [], ("Hello",), attributes={"gen_ai.input.messages": said, "blob": "b" * 1_000_000})
    assert shape(document(one)) == ["thought: Hello"]
    half = '[{"role": "assistant", "parts": [{"type": "text", "content": "\\ud83e"}]}, {"ro'
    cut = chat(1, ["Hi"], ("Hello",), attributes={"gen_ai.output.messages": half})
    assert shape(document(cut)) == ["thought: ?"]


@pytest.mark.parametrize("ids", ["own", "one", "none"])
def test_a_message_of_many_calls_takes_linear_time(ids: str) -> None:
    def seconds(count: int) -> float:
        name = {"own": lambda n: {"id": f"c{n}"}, "one": lambda _: {"id": "c"}, "none": lambda _: {}}[ids]
        calls = [{"type": "tool_call", "name": "a", "arguments": {"n": n}, **name(n)} for n in range(count)]
        got = [{"type": "tool_call_response", "response": f"{n}", **name(n)} for n in range(count)]
        said = [_message("user", "Go"), {"role": "assistant", "parts": calls}, {"role": "tool", "parts": got}]
        one = chat(1, [], ("Done",), attributes={"gen_ai.input.messages": json.dumps(said)})
        began = time.process_time()
        assembled([one], [], RULES)
        return time.process_time() - began

    small = min(seconds(1_000) for _ in range(5))
    assert (
        min(seconds(8_000) for _ in range(3)) < 32 * small
    )  # a quadratic way takes 64 times, and large heaps cost more


def test_many_results_without_ids_in_messages_of_their_own_take_linear_time() -> None:
    def seconds(count: int) -> float:
        calls = [{"type": "tool_call", "name": "a", "arguments": {"n": n}, "id": f"c{n}"} for n in range(count)]
        told = [{"role": "tool", "parts": [{"type": "tool_call_response", "response": f"{n}"}]} for n in range(count)]
        said = [_message("user", "Go"), {"role": "assistant", "parts": calls}, *told]
        one = chat(1, [], ("Done",), attributes={"gen_ai.input.messages": json.dumps(said)})
        began = time.process_time()
        (made,) = assembled([one], [], RULES)
        took = time.process_time() - began
        assert made.document is not None
        assert [step["content"] for step in made.document["steps"] if step["type"] == "observation"][
            -1
        ] == f"{count - 1}"
        return took

    small = min(seconds(500) for _ in range(5))
    assert min(seconds(4_000) for _ in range(3)) < 32 * small  # a quadratic way takes 64 times


def test_results_without_ids_count_only_as_one_for_each_call() -> None:
    """A later result, of a message that is not among those behind the calls, is of no call."""
    calls = [{"type": "tool_call", "name": "a", "arguments": {"n": n}, "id": f"c{n}"} for n in range(2)]
    result = {"type": "tool_call_response", "response": "one"}
    more = {"role": "user", "parts": [{**result, "response": "more", "id": "x"}]}
    told = [{"role": "tool", "parts": [result]}, {"role": "tool", "parts": [{**result, "response": "two"}]}]
    later = {"role": "tool", "parts": [{**result, "response": "later"}]}

    def observations(*behind: dict[str, Any]) -> list[tuple[str, str]]:
        said = [_message("user", "Go"), {"role": "assistant", "parts": calls}, *behind]
        one = chat(1, [], ("Done",), attributes={"gen_ai.input.messages": json.dumps(said)})
        (made,) = assembled([one], [], RULES)
        assert made.document is not None
        steps = made.document["steps"]
        return [(step["tool_call_id"], step["content"]) for step in steps if step["type"] == "observation"]

    assert observations(*told) == [("c0", "one"), ("c1", "two")]
    assert observations(*told, more, later) == [("c0", "one"), ("c1", "two")]
    assert observations(told[0]) == observations(*told, later) == []


@pytest.mark.parametrize("tree", ["chain", "star", "circle", "tools"])
def test_a_trace_of_many_spans_takes_linear_time(tree: str) -> None:
    """Four times as many spans take at most ten times as long; a quadratic way takes sixteen times."""

    def made(count: int) -> list[Span]:
        parent = {
            "chain": lambda n: n - 1, "star": lambda _: 1, "circle": lambda n: n % count + 1, "tools": lambda _: 1,
        }[tree]  # fmt: skip
        blank = span(
            1, "s", {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "t"} if tree == "tools" else {}
        )
        spans = [replace(blank, span_id=span_id(n), parent_id=span_id(parent(n)) if n > 1 or tree == "circle" else "",
                         start_ns=NOW + n, end_ns=NOW + SECOND) for n in range(2, count)]  # fmt: skip
        return [
            agent(1, "x"),
            *spans,
            replace(chat(0, ["Hi"], ("Hello",)), span_id="f" * 16, parent_id=span_id(count - 1)),
        ]

    def seconds(count: int) -> float:
        spans = made(count)
        began = time.process_time()
        assembled(spans, [], RULES)
        return time.process_time() - began

    small = min(seconds(1_000) for _ in range(3))
    assert min(seconds(4_000) for _ in range(2)) < 10 * small


# -- each thing once


def under(*spans: Span) -> list[str]:
    """Return the steps of spans that lie below one agent's span."""
    root = replace(agent(0, "x"), span_id=span_id(99))
    return shape(document(root, *[each if each.parent_id else replace(each, parent_id=span_id(99)) for each in spans]))


def without_ids(*spans: Span) -> list[Span]:
    plain = []
    for each in spans:
        texts = {name: value for name, value in each.attributes.items() if name.endswith("put.messages")}
        for name, text in texts.items():
            texts[name] = re.sub(r'"id": "[^"]*", ', "", str(text)).replace('"n": "d', '"n": "c')
        plain.append(replace(each, attributes={**each.attributes, **texts}))
    return plain


def test_the_same_call_again_and_again_without_ids() -> None:
    said: list[Any] = ["Go"]
    spans = []
    for number in range(4):
        spans.append(chat(number + 1, said, (("c", "look"),)))
        said = [*said, ("assistant", ("c", "look")), ("tool", ("c", f"seen {number}"))]
    steps = under(*without_ids(*spans, chat(9, said, ("Done",))))
    assert [each for each in steps if each.startswith("obs")] == [f"observation: seen {number}" for number in range(4)]
    assert len(steps) == 8


def test_ids_of_calls_that_a_server_uses_again() -> None:
    said: list[Any] = ["Go"]
    spans = []
    for number in range(3):
        spans += [
            chat(2 * number + 1, said, (("call_0", "look"),)),
            tool(2 * number + 2, "look", "call_0", f"span {number}"),
        ]
        said = [*said, ("assistant", ("call_0", "look")), ("tool", ("call_0", f"seen {number}"))]
    steps = under(*spans, chat(9, said, ("Done",)))
    assert [each for each in steps if each.startswith("obs")] == [f"observation: seen {number}" for number in range(3)]
    assert len(steps) == 6
    calls = [each for each in spans if each.name == "look"]
    assert under(*spans, chat(9, ["Go"], ("Done",))).count("observation: span 2") == len(calls[2:])


def test_what_the_user_repeats_is_said_twice_and_what_a_retry_repeats_once() -> None:
    said = ["Go", ("assistant", "a"), "yes"]
    more = [*said, ("assistant", "b"), "yes"]
    failed = chat(3, more, None, status=2)
    steps = under(chat(1, ["Go"], ("a",)), chat(2, said, ("b",)), failed, chat(4, more, ("c",)))
    assert steps == ["thought: a", "observation: yes", "thought: b", "observation: yes"]
    first = chat(1, ["Go", ("assistant", "a"), "yes"], ("b",))
    steps = under(first, chat(2, ["yes"], ("c",)), chat(3, ["Go"], ("d",)))  # calls with a history of their own
    assert steps == ["thought: a", "observation: yes", "thought: b", "thought: c"]


def test_turns_of_a_history_are_kept_apart() -> None:
    said = [
        *("Go", ("assistant", ("c1", "a")), ("assistant", "Hm.", ("c2", "b")), ("tool", ("c1", "1"))),
        *(("tool", ("c2", "2")), ("assistant", ("c3", "a")), ("tool", ("c3", "3"))),
    ]
    assert under(chat(1, said, ("Done",))) == [
        'tool_call: a {"n": "c1"}', "observation: 1", "thought: Hm.", 'tool_call: b {"n": "c2"}', "observation: 2",
        'tool_call: a {"n": "c3"}', "observation: 3",
    ]  # fmt: skip


def test_a_tool_that_two_spans_describe_and_one_that_answers() -> None:
    spans = [chat(1, ["Go"], (("c1", "look"),)), tool(2, "look", "c1", "first"), tool(3, "look", "c1", "second"),
             chat(4, [], (("c2", "final_answer"),)), tool(5, "final_answer", result="c2")]  # fmt: skip
    root = replace(agent(0, "x"), span_id=span_id(99))
    found = document(root, *[replace(each, parent_id=span_id(99)) for each in spans])
    assert shape(found) == ['tool_call: look {"n": "c1"}', "observation: first"]
    assert found["outcome"]["result_summary"] == "c2"
    assert under(spans[0], tool(5, "final_answer", result="c2")) == ['tool_call: look {"n": "c1"}']


def test_spans_of_tools_without_ids_are_matched_by_their_arguments() -> None:
    def own(number: int, argument: str) -> Span:
        made = tool(number, "look", result=f"of {argument}")
        return replace(made, attributes={**made.attributes, "gen_ai.tool.call.arguments": json.dumps({"n": argument})})

    steps = under(chat(1, ["Go"], (("c1", "look"), ("c2", "look"))), own(2, "c2"), own(3, "c1"))
    assert steps[2:] == ["observation: of c1", "observation: of c2"]


def test_nodes_of_a_graph_whose_root_is_lost_are_one_run() -> None:
    node = {"openinference.span.kind": "AGENT"}
    scope = "openinference.instrumentation.langchain"
    spans = [span(1, "agent", node, parent=77, scope=scope), chat(2, ["Go"], (("c", "a"),), parent=1),
             span(4, "agent", node, parent=77, scope=scope),
             chat(5, ["Go", ("assistant", ("c", "a")), ("tool", ("c", "1"))], ("Done",), parent=4)]  # fmt: skip
    assert shape(document(*spans)) == ['tool_call: a {"n": "c"}', "observation: 1"]


def test_of_two_descriptions_of_a_call_the_upper_or_the_fuller_one_counts() -> None:
    upper = chat(1, ["Go"], ("I look.", ("c", "a")), seconds=5)
    below = chat(2, ["Go"], ("I look",), parent=1)
    assert under(upper, below, chat(9, ["Go"], ("Done",))) == ["thought: I look.", 'tool_call: a {"n": "c"}']
    poor = chat(1, ["Go"], ("I look.",), attributes={"gen_ai.response.id": "r"})
    rich = chat(2, ["Go"], ("I look.", ("c", "a")), attributes={"gen_ai.response.id": "r"})
    assert under(poor, rich) == under(rich, poor) == ["thought: I look.", 'tool_call: a {"n": "c"}']

"""`kp-worker convert` on the forms beside chat and ATIF: how they are recognised, and what their parts become."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.support.converted import convert, dropped_by, lines, trace_of, traces_of
from tests.support.otlp import as_json, as_protobuf, shape, span
from worker.version import install_extra

USER = {"role": "user", "content": "Mend the build"}


STEPS = [
    "thought: It names its file.", "thought: I read the log.", 'tool_call: shell {"command": "tail"}',
    "error_recovery: no such file", "observation: more", "thought: Done",
]  # fmt: skip

ANTHROPIC = {
    "system": "Be brief.",
    "messages": [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "It names its file.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "I read the log."},
                {"type": "tool_use", "id": "t1", "name": "shell", "input": {"command": "tail"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result", "tool_use_id": "t1", "is_error": True,
                    "content": [{"type": "text", "text": "no such file"}, {"type": "image", "source": {}}],
                }, {"type": "text", "text": "more"}, {"type": "image", "source": {}},
            ],
        }, {"role": "assistant", "content": "Done"},
    ],
}  # fmt: skip

RESPONSES = {
    "instructions": "Be brief.",
    "input": [
        USER, {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "It names its file."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I read the log."}]},
        {"type": "function_call", "call_id": "t1", "name": "shell", "arguments": '{"command": "tail"}', "status": "a"},
        {"type": "function_call_output", "call_id": "t1", "output": "no such file"},
        {"role": "user", "content": [{"type": "input_text", "text": "more"}]},
    ], "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done"}]}],
}  # fmt: skip

LANGCHAIN = [
    ("system", {"content": "Be brief."}), ("human", {"content": "Mend the build"}),
    (
        "ai",
        {
            "content": [
                {"type": "reasoning", "reasoning": "It names its file."}, {"type": "text", "text": "I read the log."},
                {"type": "tool_use", "id": "t1", "name": "shell", "input": {}},
            ], "tool_calls": [{"name": "shell", "args": {"command": "tail"}, "id": "t1", "type": "tool_call"}],
        },
    ), ("tool", {"content": "no such file", "tool_call_id": "t1", "status": "error", "name": "shell"}),
    ("human", {"content": "more"}), ("ai", {"content": "Done", "response_metadata": {"finish_reason": "stop"}}),
]  # fmt: skip

CLASSES = {"system": "SystemMessage", "human": "HumanMessage", "ai": "AIMessage", "tool": "ToolMessage"}

BY_DICT = [{"type": kind, "data": {**data, "type": kind}} for kind, data in LANGCHAIN]
DUMPED = [
    {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", CLASSES[kind]], "kwargs": data}
    for kind, data in LANGCHAIN
]
PLAIN = [{"type": kind, **data} for kind, data in LANGCHAIN]

RUNS: dict[str, Any] = {
    "anthropic": ANTHROPIC, "responses": RESPONSES, "langchain": BY_DICT, "dumpd": {"messages": DUMPED},
    "langgraph": {"values": {"messages": PLAIN}, "next": []}, "checkpoint": {"channel_values": {"messages": DUMPED}},
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_each_form_becomes_the_same_steps_and_is_recognised(name: str) -> None:
    prefix = ["--error-prefix", "no such"] if name == "responses" else []
    trace = trace_of(RUNS[name], *prefix)
    assert trace["task"]["objective"] == "Mend the build"
    assert shape(trace) == STEPS
    assert [step.get("tool_call_id") for step in trace["steps"]] == [None, None, "t1", "t1", None, None]
    form = name if name in ("anthropic", "responses") else "langchain"
    assert trace_of(RUNS[name], *prefix, source=form) == trace


def test_what_a_step_cannot_hold_is_counted() -> None:
    assert dropped_by(convert(lines(ANTHROPIC))) == {"images": 2, "redacted thinking": 1, "system": 1}
    assert dropped_by(convert(lines(RESPONSES))) == {"instructions": 1}
    assert dropped_by(convert(lines(BY_DICT))) == {"messages[].response_metadata": 1, "system messages": 1}


def test_tools_of_a_server_are_calls_with_results() -> None:
    blocks = [
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"type": "web_search_result", "url": "u"}]},
        {"type": "text", "text": "Found"},
    ]
    assert shape(trace_of([USER, {"role": "assistant", "content": blocks}])) == [
        'tool_call: web_search {"query": "x"}',
        'observation: [{"type": "web_search_result", "url": "u"}]',
        "thought: Found",
    ]
    items = [
        USER,
        {
            "type": "web_search_call",
            "id": "ws",
            "status": "completed",
            "action": {"query": "x"},
            "internal_chat_message_metadata_passthrough": {"turn_id": "t"},
        },
        {
            "type": "image_generation_call",
            "id": "ig",
            "status": "completed",
            "revised_prompt": "a cat",
            "result": "iVBOR",
        },
        {"type": "mcp_call", "id": "m", "name": "find", "arguments": '{"a": 1}', "server_label": "s", "output": "y"},
        {"type": "custom_tool_call", "call_id": "c", "name": "run", "input": "ls"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "z"},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]},
    ]
    assert shape(trace_of({"input": items})) == [
        'tool_call: web_search {"action": {"query": "x"}}', 'tool_call: image_generation {"revised_prompt": "a cat"}',
        'tool_call: find {"a": 1}', "observation: y",
        'tool_call: run {"input": "ls"}', "observation: z", "thought: No",
    ]  # fmt: skip


def test_langchain_calls_that_were_no_json_and_those_of_old_versions() -> None:
    old = {"function": {"name": "find", "arguments": '{"a": 1}'}, "id": "o"}
    run = [
        {"type": "human", "content": "Go"},
        {"type": "ai", "content": "", "invalid_tool_calls": [{"name": "shell", "args": "{oops", "id": "i"}]},
        {
            "type": "AIMessageChunk",
            "content": "",
            "additional_kwargs": {"tool_calls": [old], "reasoning_content": "Hm"},
        },
        {"type": "ai", "content": ["So ", {"type": "text", "text": "be it"}]},
    ]
    assert shape(trace_of(run)) == [
        'tool_call: shell {"arguments": "{oops"}', "thought: Hm", 'tool_call: find {"a": 1}', "thought: So ",
        "thought: be it",
    ]  # fmt: skip


# -- logs of requests and responses


def test_a_response_is_appended_to_its_request() -> None:
    request = {"model": "m", "messages": [USER]}
    answer = {"role": "assistant", "content": "Done"}
    for response, path in (
        ({"choices": [{"message": answer}]}, "@response"),
        (answer, "@response"),
        ({"choices": [{"message": answer}]}, "@response.choices.0.message"),
        ("Done", "@response"),
    ):
        run = {"request": request, "response": response}
        assert shape(trace_of(run, "--messages", "@request.messages", "--append", path)) == ["thought: Done"]
    anthropic = {
        "request": request,
        "response": {
            "type": "message",
            "role": "assistant",
            "usage": {"a": 1},
            "content": [{"type": "thinking", "thinking": "Hm"}, {"type": "text", "text": "Done"}],
        },
    }
    assert shape(trace_of(anthropic, "--messages", "@request.messages", "--append", "@response")) == [
        "thought: Hm",
        "thought: Done",
    ]
    items = {
        "request": {"input": "Mend the build"},
        "response": {"output": [{"type": "reasoning", "summary": []}, *RESPONSES["output"]]},
    }  # type: ignore[misc]
    assert shape(trace_of(items, "--messages", "@request.input", "--append", "@response")) == ["thought: Done"]
    missing = convert(lines({"request": request}), "--messages", "@request.messages", "--append", "@response")
    assert "missing_value: the run has no field response, which --append names" in missing.stderr


def calls(name: str) -> list[dict[str, Any]]:
    """Return the log of a conversation: a line for each call of the model, with the history that was sent."""
    call = {"id": f"{name}1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    said = [
        {"role": "user", "content": f"Find {name}"},
        {"role": "assistant", "content": "I look", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"{name}1", "content": "here"},
        {"role": "assistant", "content": "Found"},
    ]
    return [{"session": {"id": name}, "at": at, "sent": said[:at], "got": said[at], "ok": at == 3} for at in (1, 3)]


GROUPED = ["--messages", "@sent", "--append", "@got", "--success", "@ok"]


@pytest.mark.parametrize("field", ["session.id", "@session.id"])
def test_calls_of_a_conversation_are_one_run(field: str) -> None:
    one, two = calls("a"), calls("b")
    result = convert(lines(one[0], two[0], one[1], one[1], two[1]), *GROUPED, "--group-by", field, success=None)
    assert result.exit_code == 0, result.stderr
    assert "2 runs read, 2 written, 0 refused" in result.stderr
    traces = traces_of(result)
    assert [trace["task"]["objective"] for trace in traces] == ["Find a", "Find b"]
    for trace in traces:
        assert shape(trace) == ["thought: I look", "tool_call: look {}", "observation: here", "thought: Found"]
        assert trace["metadata"]["success"] is True
    assert traces_of(convert(lines(*two), *GROUPED, "--group-by", field, success=None))[0] == traces[1]


def test_a_call_without_its_group_is_refused_and_the_others_are_written() -> None:
    result = convert(
        lines({**calls("a")[0], "session": {}}, calls("b")[0], "x", calls("b")[1]), *GROUPED, "--group-by",
        "session.id", success=None,
    )  # fmt: skip
    assert result.exit_code == 1
    assert "3 runs read, 1 written, 2 refused" in result.stderr
    assert "1: missing_value: the run has no text or number session.id, which --group-by names" in result.stderr


# -- ATIF with subagents


def trajectory(name: str, message: str, **more: Any) -> dict[str, Any]:
    steps = [{"step_id": 1, "source": "user", "message": "Go"}, {"step_id": 2, "source": "agent", "message": message}]
    return {"schema_version": "ATIF-v1.7", "trajectory_id": name, "agent": {"name": name}, "steps": steps, **more}


def test_subagents_become_traces_of_their_own() -> None:
    inner = trajectory("inner", "deep", extra={"reward": 0})
    run = trajectory(
        "outer",
        "high",
        extra={"reward": 1},
        subagent_trajectories=[trajectory("middle", "mid", subagent_trajectories=[inner]), trajectory("other", "low")],
    )
    result = convert(lines(run), success="@extra.reward")
    assert "4 runs read, 4 written, 0 refused" in result.stderr
    assert "subagent trajectories" not in result.stderr
    found = traces_of(result)
    assert [(each["metadata"]["framework"], each["metadata"]["success"], shape(each)) for each in found] == [
        ("outer", True, ["thought: high"]),
        ("middle", True, ["thought: mid"]),
        ("inner", False, ["thought: deep"]),
        ("other", True, ["thought: low"]),
    ]
    assert len({each["id"] for each in found}) == 4


# -- OTLP

CHAT = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "p",
    "team": "rail",
    "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": "Hi"}]}]),
    "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "Hello"}]}]),
}

OTHER = "2" * 32

RECORDS = [
    as_json([span(2, "chat m", CHAT, parent=1)]),
    as_json([span(1, "run", {}), span(1, "chat m", CHAT, trace=OTHER)]),
]


def prefixed(value: bytes) -> bytes:
    return len(value).to_bytes(4, "big") + value


@pytest.mark.parametrize("form", ["auto", "otlp"])
@pytest.mark.parametrize("data", [lines(*RECORDS), b"".join(prefixed(as_protobuf(each)) for each in RECORDS)])
def test_files_of_the_collector(form: str, data: bytes) -> None:
    result = convert(data, "--from", form, success=None, created_at=None, domain="@team")
    assert result.exit_code == 0, result.stderr
    assert "2 runs read, 2 written, 0 refused (2 thought)" in result.stderr
    assert [each["id"] for each in traces_of(result)] == [
        "kp:trace:0af76519-16cd-43dd-8448-eb211c80319c",
        "kp:trace:22222222-2222-2222-2222-222222222222",
    ]
    assert {each["metadata"]["task_domain"] for each in traces_of(result)} == {"rail"}
    assert {each["metadata"]["success"] for each in traces_of(result)} == {True}


def test_one_protobuf_message_without_its_length() -> None:
    result = convert(as_protobuf(RECORDS[0]), success=None, created_at=None)
    assert result.exit_code == 0, result.stderr
    assert len(traces_of(result)) == 1


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.proto", None)
    result = convert(lines(*RECORDS), created_at=None)
    assert result.exit_code == 1
    assert result.stderr == f"Error: opentelemetry.proto is not installed; {install_extra('otlp')}\n"


def test_what_spans_do_not_give_is_said() -> None:
    silent = as_json(
        [span(1, "chat m", {"gen_ai.operation.name": "chat"}, scope="pydantic-ai"), span(1, "GET /", trace=OTHER)]
    )
    data = lines(silent, {"resourceSpans": 1}, RECORDS[1])
    result = convert(data, "--from", "otlp", created_at=None, success="@missing")
    assert result.exit_code == 1
    assert "3 runs read, 0 written, 3 refused" in result.stderr
    assert "no_content: the content of its messages was not captured; pydantic-ai: Instrumentation" in result.stderr
    assert "standard input:2: invalid_type: resourceSpans: Expected `array | null`, got `int`" in result.stderr
    assert "no_value: no span has an attribute that an option names" in result.stderr
    other = convert(lines(as_json([span(1, "GET /", trace=OTHER)]), RECORDS[0]), created_at=None)
    assert dropped_by(other) == {"traces without a span of a model, a tool or an agent": 1}


# -- what is recognised, and what is not


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({"conversations": [{"from": "human", "value": "x"}]}, "this looks like ShareGPT: jq -c"),
        ({"request": {}, "response": {}}, "give --messages @request.messages --append @response"),
        ({"contents": []}, "this looks like a request to Gemini"),
        ({"choices": []}, "a response alone"),
        ({"run_type": "chain", "inputs": {}}, "a run of LangSmith: give --from langchain"),
        ({"context": {}, "attributes": {}}, "a span of OpenTelemetry's console exporter"),
        ({"role": "user", "content": "x"}, "a message, not a run: jq -sc"),
        ({"b": 1, "a": []}, "an object with 'a, b'; --messages @PATH names its list of messages"),
        ([[USER]], "a list of runs: jq -c '.[]' FILE"),
        ("text", "'text'; a run is a list of messages"),
        ([], "a list; a run is a list of messages"),
    ],
)
def test_an_unknown_form_is_named_with_a_way_on(run: Any, said: str) -> None:
    result = convert(lines(run))
    assert result.exit_code == 1
    assert "unknown_form: no known form: " in result.stderr
    assert said in result.stderr


@pytest.mark.parametrize(
    ("run", "form"),
    [
        ([USER, {"role": "assistant", "content": "x"}], "chat"),
        (
            [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}],
            "anthropic",
        ),
        (
            {"system": "s", "messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}]},
            "anthropic",
        ),
        ({"input": "Go", "output": [{"type": "message", "role": "assistant", "content": "x"}]}, "responses"),
        ([{"type": "human", "content": "Go"}, {"type": "ai", "content": "x"}], "langchain"),
        (trajectory("a", "x"), "atif"),
    ],
)
def test_runs_of_every_form_may_be_in_one_file(run: Any, form: str) -> None:
    result = convert(lines(run, [USER, {"role": "assistant", "content": "y"}]), result_summary="z")
    assert result.exit_code == 0, result.stderr
    assert traces_of(result)[0] == trace_of(run, "--from", form, result_summary="z")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--from", "anthropic"], "Missing: --created-at (messages of anthropic have no time)"),
        (["--from", "atif", "--append", "@a"], "--append requires --from chat, or another form of messages"),
        (["--from", "otlp", "--keep", "a=@b", "--agent-id", "x"], "--agent-id, --keep: spans have no place for it"),
        (["--append", "a"], "--append: 'a' is not a path; begin it with @"),
        (["--group-by", "@"], "@ is not a path"),
    ],
)
def test_wrong_options(options: list[str], said: str) -> None:
    result = convert(b"", *options, created_at=None)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


@pytest.mark.parametrize(("form", "said"), [("auto", "--success (not for OTLP and sessions)"), ("chat", "--success")])
def test_success_is_required_where_a_log_does_not_say_it(form: str, said: str) -> None:
    result = convert(lines([USER]), "--from", form, success=None)
    assert result.exit_code == 2
    assert f"Missing: {said}." in result.stderr


@pytest.mark.parametrize(
    ("form", "run", "said"),
    [
        ("anthropic", [{"role": "tool"}], "messages.0: role 'tool' is not one of user, assistant, system"),
        ("anthropic", [{"role": "user", "content": 7}], "messages.0.content: 7 is neither a text nor a list of blocks"),
        (
            "anthropic", [{"role": "user", "content": [{"type": "x"}]}],
            "messages.0.content.0: block type 'x' is not known",
        ),
        (
            "anthropic", [{"role": "assistant", "content": [{"type": "tool_use"}]}],
            "messages.0.content.0: a tool_use needs a name",
        ), ("responses", [{"type": "x"}], "messages.0: item type 'x' is not known"),
        ("responses", [{"role": "x"}], "messages.0: role 'x' is not one of user, assistant, system, developer"),
        ("responses", [{"type": "function_call"}], "messages.0: a tool call needs a name"),
        ("responses", {"input": 7}, "input: 7 is neither a text nor a list of items"),
        ("langchain", [{"type": "x"}], "messages.0: type 'x' is not a message of LangChain's"),
        ("langchain", [{"type": "ai", "data": 7}], "messages.0: 7 is not an object"),
        ("langchain", [{"type": "ai", "content": [{"type": "x"}]}], "messages.0.content.0: part type 'x' is not known"),
        ("langchain", [{"type": "ai", "tool_calls": [{}]}], "messages.0.tool_calls: a tool call needs a name"),
    ],
)  # fmt: skip
def test_a_run_that_cannot_be_read_is_refused_with_its_place(form: str, run: Any, said: str) -> None:
    result = convert(lines(run), "--from", form)
    assert result.exit_code == 1
    assert f"standard input:1: not_a_run: {said}" in result.stderr


def test_content_of_spans_where_nothing_reads_it_is_named() -> None:
    strange = as_json([span(1, "ask", {"gen_ai.request.model": "m", "desk.prompt": "Plan a trip."}, scope="desk")])
    result = convert(lines(strange), "--from", "otlp", success=None, created_at=None)
    assert "no_content: its content seems to be in attributes that nothing reads: desk desk.prompt" in result.stderr

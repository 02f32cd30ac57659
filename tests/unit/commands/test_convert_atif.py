"""`kp-worker convert --from atif`: trajectories become valid traces, and whatever is left out is counted."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from click.testing import Result

from tests.support import converted
from tests.support.converted import dropped_by
from worker.core.trace import parse_trace

VALUES: dict[str, Any] = {
    "source": "atif", "success": "@extra.reward", "domain": "code", "visibility": "org", "created_at": None,
}  # fmt: skip


def trace_of(run: Any, *more: str) -> dict[str, Any]:
    return converted.trace_of(run, *more, **VALUES)


def convert(*runs: Any, more: tuple[str, ...] = ()) -> Result:
    return converted.convert(converted.lines(*runs), *more, **VALUES)


def trajectory(*steps: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a trajectory with these steps, numbered and dated."""
    dated = [{"step_id": at + 1, "timestamp": f"2026-04-14T08:00:{at:02}Z", **step} for at, step in enumerate(steps)]
    agent = {"name": "fixer", "version": "2.1", "model_name": "m"}
    return {"schema_version": "ATIF-v1.6", "session_id": "s", "agent": agent, "steps": dated, "extra": {"reward": 1.0},
            **more}  # fmt: skip


USER = {"source": "user", "message": "Mend the build"}
DONE = {"source": "agent", "message": "It builds"}


def test_a_trajectory_becomes_a_trace() -> None:
    work = {
        "source": "agent", "message": "I look first", "reasoning_content": "Which file?", "model_name": "m2",
        "tool_calls": [
            {"tool_call_id": "a", "function_name": "read", "arguments": {"path": "x"}, "extra": {"retry": 1}},
            {"tool_call_id": "b", "function_name": "run", "arguments": {}},
        ],
        "observation": {"results": [
            {"source_call_id": "b", "content": [{"type": "text", "text": "failed"}, {"type": "image", "source": {}}],
             "extra": {"is_error": True, "exit": 2}},
            {"source_call_id": "a", "content": "def x"},
            {"content": "disk is low"},
        ]},
        "metrics": {"prompt_tokens": 3},
    }  # fmt: skip
    system = {"source": "system", "message": "You mend", "observation": {"results": [{"content": "context cut"}]}}
    run = trajectory(system, USER, work, {"source": "user", "message": [{"type": "text", "text": "Hurry"}]}, DONE)
    trace = trace_of(run)
    assert trace["metadata"] == {
        "created_at": "2026-04-14T08:00:04Z", "framework": "fixer", "task_domain": "code", "success": True,
        "quality_score": 0, "visibility": "org", "privacy_level": "aggregated",
    }  # fmt: skip
    assert trace["task"] == {"objective": "Mend the build"}
    assert trace["outcome"] == {"result_summary": "It builds", "confidence": 0.8}
    assert trace["steps"] == [
        {"step_id": 0, "type": "observation", "content": "context cut"},
        {"step_id": 1, "type": "thought", "content": "Which file?"},
        {"step_id": 2, "type": "thought", "content": "I look first"},
        {"step_id": 3, "type": "tool_call", "tool": {"name": "read"}, "input": {"path": "x"}, "tool_call_id": "a"},
        {"step_id": 4, "type": "tool_call", "tool": {"name": "run"}, "input": {}, "tool_call_id": "b"},
        {"step_id": 5, "type": "error_recovery", "content": "failed", "tool_call_id": "b"},
        {"step_id": 6, "type": "observation", "content": "def x", "tool_call_id": "a"},
        {"step_id": 7, "type": "observation", "content": "disk is low"},
        {"step_id": 8, "type": "observation", "content": "Hurry"},
        {"step_id": 9, "type": "thought", "content": "It builds"},
    ]
    assert dropped_by(convert(run)) == {
        "steps[].timestamp": 4, "agent.model_name": 1, "agent.version": 1, "session_id": 1, "system messages": 1,
        "steps[].metrics": 1, "steps[].model_name": 1, "steps[].tool_calls[].extra": 1, "images": 1,
        "steps[].observation.results[].extra.exit": 1,
    }  # fmt: skip


@pytest.mark.parametrize("version", ["ATIF-v1.0", "ATIF-v1.4", "ATIF-v1.7", "ATIF-v1.12"])
def test_every_version_1_is_read(version: str) -> None:
    assert trace_of(trajectory(USER, DONE) | {"schema_version": version})["steps"][0]["content"] == "It builds"


def test_options_win_over_the_trajectory() -> None:
    more = ("--created-at", "@steps.0.timestamp", "--framework", "mine", "--keep", "x_session=@session_id")
    run = trajectory(USER, DONE)
    trace = trace_of(run, *more)
    assert (trace["metadata"]["created_at"], trace["metadata"]["framework"]) == ("2026-04-14T08:00:00Z", "mine")
    assert trace["x_session"] == "s"
    dropped = dropped_by(convert(run, more=more))
    assert (dropped["steps[].timestamp"], dropped["agent"]) == (2, 1)


def test_copied_steps_are_left_out_but_for_the_objective() -> None:
    before = ({"source": "agent", "message": "before"}, {"source": "user", "message": "later"})
    copied = [step | {"is_copied_context": True} for step in (USER, *before)]
    run = trajectory(*copied, DONE)
    trace = trace_of(run)
    assert trace["task"]["objective"] == "Mend the build"
    assert [step["content"] for step in trace["steps"]] == ["It builds"]
    assert dropped_by(convert(run))["steps copied from an earlier trajectory"] == 3


def test_subagents_are_counted() -> None:
    reference = {"source": "agent", "message": "", "observation": {"results": [
        {"subagent_trajectory_ref": [{"trajectory_id": "t"}, {"trajectory_id": "u"}]}]}}  # fmt: skip
    run = trajectory(USER, reference, DONE, subagent_trajectories=[trajectory(USER, DONE)] * 2, notes="n",
                     continued_trajectory_ref="next.json", final_metrics={"total_steps": 3})  # fmt: skip
    dropped = dropped_by(convert(run))
    assert dropped["subagent trajectories"] == dropped["references to subagents"] == 2
    assert dropped["notes"] == dropped["continued_trajectory_ref"] == dropped["final_metrics"] == 1
    assert [step["content"] for step in trace_of(run)["steps"]] == ["", "It builds"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema_version": "ATIF-v2.0"}, "not_a_run: schema_version 'ATIF-v2.0' is not ATIF-v1.x"),
        ({"schema_version": 1}, "not_a_run: schema_version 1 is not ATIF-v1.x"),
        ({"steps": {}}, "missing_value: the run has no time"),
        ({"steps": {"a": 1}}, "not_a_run: steps: an object is not a list"),
        ({"steps": [1]}, "not_a_run: steps.0: 1 is not an object"),
        ({"steps": [{"source": "robot"}]}, "not_a_run: steps.0: source 'robot' is not one of system, user, agent"),
        ({"steps": [{"source": "agent", "message": 1}]}, "not_a_run: steps.0.message: 1 is neither a text nor a list"),
        ({"steps": [{"source": "agent", "reasoning_content": 1}]}, "not_a_run: steps.0.reasoning_content: 1 is"),
        ({"steps": [{"source": "agent", "tool_calls": [{}]}]}, "steps.0.tool_calls.0: a tool call needs a function_"),
        ({"steps": [{"source": "agent", "observation": []}]}, "missing_value"),
        ({"steps": [{"source": "agent", "observation": [1]}]}, "steps.0.observation: a list is not an object"),
        ({"steps": [USER, DONE]}, "missing_value: the run has no time: give --created-at"),
        ({"steps": [USER, DONE | {"timestamp": "2026-04-14T08:00:00"}]}, "no time zone; end it with Z"),
        ({"extra": {}}, "missing_value: the run has no field extra.reward, which --success names"),
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_trajectory_is_refused_with_its_place(change: dict[str, Any], said: str) -> None:
    result = convert(trajectory(USER, DONE) | change, trajectory(USER, DONE))
    assert result.exit_code == 1
    assert said in result.stderr.splitlines()[0]
    assert "2 runs read, 1 written, 1 refused" in result.stderr


def test_messages_go_with_chat() -> None:
    result = convert(more=("--messages", "@x"))
    assert (result.exit_code, "--messages requires --from chat" in result.stderr) == (2, True)


@pytest.mark.parametrize("source", ["chat", "atif"])
def test_damaged_runs_are_converted_or_refused(source: str, seed: int) -> None:
    """Whatever stands where: each run is written as a valid trace or refused; no other error."""
    rng = random.Random(seed)
    call = {"tool_call_id": "a", "function_name": "f", "arguments": {"a": 1}}
    got = {"source_call_id": "a", "content": "c", "extra": {"status": "error"}}
    work = {"source": "agent", "message": "m", "tool_calls": [call], "observation": {"results": [got]}}
    chat_call = {"id": "a", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "Go"}]},
                {"role": "assistant", "content": "x", "refusal": None, "audio": {"id": "a"}, "tool_calls": [chat_call]},
                {"role": "tool", "tool_call_id": "a", "name": "f", "content": "c"},
                {"role": "assistant", "content": "Bye"}]  # fmt: skip
    run = trajectory(USER, work, DONE) if source == "atif" else {"messages": messages, "extra": {"reward": 1}}
    runs = [_damaged(json.loads(json.dumps(run)), rng) for _ in range(500)]
    data = b"".join(json.dumps(each).encode() + b"\n" for each in runs)
    result = converted.convert(data, source=source, success="@extra.reward")
    written = result.stdout_bytes.split(b"\n")[:-1]
    for raw in written:
        parse_trace(raw)
    refused = 500 - len(written)
    assert f"500 runs read, {len(written)} written, {refused} refused" in result.stderr
    assert 20 < refused < 500


def _damaged(value: Any, rng: random.Random) -> Any:
    """Return the value with one part of it, somewhere, replaced or removed."""
    inner = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    if not inner or rng.random() < 0.15:
        return rng.choice(
            [None, True, 0, -1.5, "", " ", "x", [], [1], {}, {"a": []}, [None], ["x"], [[]], [{}], 10**30]
        )
    key, chosen = rng.choice(inner)
    value[key] = _damaged(chosen, rng)
    return value

"""A trajectory in ATIF (Agent Trajectory Interchange Format, v1.x) as a transcript."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from worker.runs.chat import text_of
from worker.runs.fields import (
    Counts,
    RunRefused,
    as_time,
    count_unread,
    is_empty,
    objects_of,
    says_error,
    shown,
    text_field,
)
from worker.runs.messages import Message, Part, Reasoning, Text, ToolCall, ToolResult
from worker.runs.steps import Transcript

SOURCES: Final = ("system", "user", "agent")

_STEP: Final = {"step_id", "source", "message", "reasoning_content", "tool_calls", "observation", "is_copied_context"}
_RESULT: Final = {"source_call_id", "content", "extra", "subagent_trajectory_ref"}


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
            raise RunRefused("invalid_value", f"the last timestamp: {error}, or give --created-at") from None
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
        parts.append(_call(call, f"{place}.tool_calls.{number}", counts))
    transcript.add(Message("assistant", tuple(parts)))
    observation = step.get("observation")
    if not is_empty(observation):
        if not isinstance(observation, dict):
            raise RunRefused("not_a_run", f"{place}.observation: {shown(observation)} is not an object")
        results = enumerate(objects_of(observation, "results", f"{place}.observation.results"))
        read = [_result(result, f"{place}.observation.results.{number}", counts) for number, result in results]
        transcript.add(Message("tool", tuple(read)))
        count_unread(observation, {"results"}, "steps[].observation.", counts)
    timestamp = set() if "created_at" in transcript.given else {"timestamp"}
    count_unread(step, _STEP | timestamp, "steps[].", counts)


def _call(call: dict[str, Any], place: str, counts: Counts) -> ToolCall:
    name = call.get("function_name")
    if not isinstance(name, str):
        raise RunRefused("not_a_run", f"{place}: a tool call needs a function_name")
    call_id = text_field(call, "tool_call_id", place)
    count_unread(call, {"tool_call_id", "function_name", "arguments"}, "steps[].tool_calls[].", counts)
    return ToolCall(name, call.get("arguments"), call_id)


def _result(result: dict[str, Any], place: str, counts: Counts) -> ToolResult:
    kind = "steps[].observation.results[]."
    text = text_of(result.get("content"), f"{place}.content", f"{kind}content[]", counts)
    call_id = text_field(result, "source_call_id", place)
    extra = result.get("extra")
    if isinstance(extra, dict):
        count_unread(extra, {"is_error", "status"}, f"{kind}extra.", counts)
    if references := result.get("subagent_trajectory_ref"):
        counts.drop("references to subagents", len(references) if isinstance(references, list) else 1)
    count_unread(result, _RESULT, kind, counts)
    return ToolResult(text, call_id, is_error=isinstance(extra, dict) and says_error(extra))

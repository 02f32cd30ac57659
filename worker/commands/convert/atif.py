"""A trajectory in ATIF (Agent Trajectory Interchange Format, v1.x) as a transcript."""

from __future__ import annotations

import re
from typing import Any, Final

from worker.commands.convert.chat import as_call_id, count_unread, says_error, text_of
from worker.commands.convert.options import RunRefused, as_time, is_empty, shown
from worker.commands.convert.trace import Transcript

SOURCES: Final = ("system", "user", "agent")

_STEP: Final = {"step_id", "source", "message", "reasoning_content", "tool_calls", "observation", "is_copied_context"}
_RESULT: Final = {"source_call_id", "content", "extra", "subagent_trajectory_ref"}


def read_atif(run: Any, transcript: Transcript) -> None:
    """Read a trajectory. Raises RunRefused, with the place."""
    version = run.get("schema_version") if isinstance(run, dict) else None
    if not isinstance(version, str) or not re.match(r"ATIF-v1\.\d", version):
        raise RunRefused("not_a_run", f"schema_version {shown(version)} is not ATIF-v1.x")
    agent = run.get("agent")
    if isinstance(agent, dict) and isinstance(agent.get("name"), str):
        transcript.framework = agent["name"] or None
    transcript.used |= {("schema_version",), ("steps",), ("subagent_trajectories",)}
    if "framework" not in transcript.options.fields:
        transcript.used.add(("agent", "name"))
    if subagents := run.get("subagent_trajectories"):
        transcript.counts.drop("subagent trajectories", len(subagents) if isinstance(subagents, list) else 1)
    steps = _objects(run, "steps", "steps")
    for number, step in enumerate(steps):
        _read_step(step, f"steps.{number}", transcript)
    times = [step["timestamp"] for step in steps if not is_empty(step.get("timestamp"))]
    if times and "created_at" not in transcript.options.fields:
        try:
            transcript.created_at = as_time(times[-1])
        except ValueError as error:
            raise RunRefused("invalid_value", f"the last timestamp: {error}, or give --created-at") from None
        transcript.counts.drop("steps[].timestamp", len(times) - 1)


def _read_step(step: dict[str, Any], place: str, transcript: Transcript) -> None:
    source, counts = step.get("source"), transcript.counts
    if source not in SOURCES:
        raise RunRefused("not_a_run", f"{place}: source {shown(source)} is none of {', '.join(SOURCES)}")
    text = text_of(step.get("message"), f"{place}.message", "steps[].message[]", counts)
    if step.get("is_copied_context") is True:
        counts.drop("steps copied from an earlier trajectory")
        if source == "user" and transcript.objective is None:
            transcript.add_user(text)
        return
    if source == "system":
        if text:
            counts.drop("system messages")
    elif source == "user":
        transcript.add_user(text)
    else:
        transcript.add_thought(text_of(step.get("reasoning_content"), f"{place}.reasoning_content", "steps[]", counts))
        transcript.add_thought(text)
    for number, call in enumerate(_objects(step, "tool_calls", f"{place}.tool_calls")):
        _read_call(call, f"{place}.tool_calls.{number}", transcript)
    observation = step.get("observation")
    if not is_empty(observation):
        if not isinstance(observation, dict):
            raise RunRefused("not_a_run", f"{place}.observation: {shown(observation)} is no object")
        for number, result in enumerate(_objects(observation, "results", f"{place}.observation.results")):
            _read_result(result, f"{place}.observation.results.{number}", transcript)
        count_unread(observation, {"results"}, "steps[].observation.", counts)
    timestamp = set() if "created_at" in transcript.options.fields else {"timestamp"}
    count_unread(step, _STEP | timestamp, "steps[].", counts)


def _read_call(call: dict[str, Any], place: str, transcript: Transcript) -> None:
    name = call.get("function_name")
    if not isinstance(name, str):
        raise RunRefused("not_a_run", f"{place}: a tool call needs a function_name")
    call_id = as_call_id(call.get("tool_call_id"), f"{place}.tool_call_id")
    transcript.add_call(name, call.get("arguments"), call_id)
    count_unread(call, {"tool_call_id", "function_name", "arguments"}, "steps[].tool_calls[].", transcript.counts)


def _read_result(result: dict[str, Any], place: str, transcript: Transcript) -> None:
    kind, counts = "steps[].observation.results[].", transcript.counts
    text = text_of(result.get("content"), f"{place}.content", f"{kind}content[]", counts)
    call_id = as_call_id(result.get("source_call_id"), f"{place}.source_call_id")
    extra = result.get("extra")
    marked = isinstance(extra, dict) and says_error(extra)
    transcript.add_result(text, call_id, is_error=marked)
    if isinstance(extra, dict):
        count_unread(extra, {"is_error", "status"}, f"{kind}extra.", counts)
    if references := result.get("subagent_trajectory_ref"):
        counts.drop("references to subagents", len(references) if isinstance(references, list) else 1)
    count_unread(result, _RESULT, kind, counts)


def _objects(value: dict[str, Any], name: str, place: str) -> list[dict[str, Any]]:
    """Return a list of objects, [] where it is absent. Raises RunRefused."""
    items = value.get(name) or []
    if not isinstance(items, list):
        raise RunRefused("not_a_run", f"{place}: {shown(items)} is no list")
    for number, item in enumerate(items):
        if not isinstance(item, dict):
            raise RunRefused("not_a_run", f"{place}.{number}: {shown(item)} is no object")
    return items

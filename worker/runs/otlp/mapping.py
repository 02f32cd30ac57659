"""ReasoningTraces of the spans of one OTLP trace: the mapping of every field, and what is missing where there is none.

A trace gives one document for each run of an agent in it. Its bytes depend on the set of spans alone, neither on their
order nor on repetitions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

from worker.core.trace import CONTEXT, InvalidTrace, parse_trace
from worker.runs.conversation import Conversation
from worker.runs.fields import json_value
from worker.runs.otlp.calls import conversation_of
from worker.runs.otlp.content import REDACTED, Content, error_text, parts_messages
from worker.runs.otlp.rules import AGENT_NAME, SERVICE_AND_NAME, Rules
from worker.runs.otlp.spans import LogEvent, Span, Value
from worker.runs.otlp.tree import Run, identities, kind_of, ordered, runs_of
from worker.runs.steps import Transcript

ERROR_PREFIXES: Final = ("Error:",)
"""A result that begins so is an error: without spans of tools, most libraries say it in no other way."""

Missing = Literal["not_a_run", "no_content", "no_objective", "no_steps", "no_value", "too_large"]
"""Why a run gives no document: no span of a model, tool or agent; its content was not captured; no text of a user;
nothing but an objective; an attribute that a rule names is nowhere; more than the limits of a trace."""

_GEN_AI_CONTENT: Final = (
    "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=span_only, and "
    "OTEL_SEMCONV_STABILITY_OPT_IN=gen_ai_latest_experimental"
)

_HINTS: Final = {
    # how a scope begins: what captures content
    "opentelemetry.instrumentation.openai_v2": _GEN_AI_CONTENT,
    "opentelemetry.instrumentation.genai": _GEN_AI_CONTENT,
    "pydantic-ai": "InstrumentationSettings(include_content=True)",
    "openinference.": "neither OPENINFERENCE_HIDE_INPUTS nor OPENINFERENCE_HIDE_OUTPUTS",
    "com.anthropic.sdk.python": "ANTHROPIC_OPEN_TELEMETRY_TRACES_CONTENT_MODE=content",
    "opentelemetry.instrumentation.": "TRACELOOP_TRACE_CONTENT=true",
}

NO_MODEL: Final = "no span of a model: instrument the client of the model, too"

EVALUATION: Final = "gen_ai.evaluation.result"

NO_PARENT: Final = "each call of the model is a trace of its own: start a span around the whole run"


@dataclass(frozen=True, slots=True)
class Assembled:
    """One run of a trace: its document and the document's bytes, or why there is none (`missing`).

    `conventions`: those that its spans use. `hints`: what to set so that more is captured. `agent_span_id`: the span
    that stands for the run. `key`: the agent's id. `end_ns`: the end of the run's last span, ns since 1970.
    """

    document: dict[str, Any] | None
    value: bytes | None
    missing: Missing | None
    conventions: frozenset[str]
    hints: tuple[str, ...]
    agent_span_id: str
    key: str
    end_ns: int


def assembled(spans: Sequence[Span], logs: Sequence[LogEvent], rules: Rules) -> list[Assembled]:
    """Return the runs of one trace, the outer ones first. `spans` and `logs` are all that is known of the trace."""
    spans = ordered(spans)
    if not spans:
        return []
    events = _by_span(logs)
    runs = runs_of(spans)
    if not runs:
        last = max(span.end_ns for span in spans)
        key = _service(spans) or spans[0].name
        return [Assembled(None, None, "not_a_run", frozenset(), (), spans[0].span_id, key, last)]
    found = [(run, *conversation_of(run, events)) for run in runs]
    kept = [each for each in found if each[0].agent is not None or not each[0].inside_tool or each[1].has_calls()]
    top = [run for run, *_ in kept if not run.inside_tool]
    root = next((span for span in spans if not span.parent_id), None) if len(top) == 1 else None
    alone = len(kept) == 1
    return [
        _assembled(run, conversation, contents, None if run.inside_tool else root, alone, events, rules)
        for run, conversation, contents in kept
    ]


def _by_span(logs: Sequence[LogEvent]) -> dict[str, list[LogEvent]]:
    found: dict[str, list[LogEvent]] = {}
    distinct = dict(zip(identities(logs), logs, strict=True))
    for _, log in sorted(distinct.items(), key=lambda each: (each[1].time_ns, each[1].name, each[0])):
        found.setdefault(log.span_id, []).append(log)
    return found


def _assembled(
    run: Run, conversation: Conversation, contents: Sequence[Content], root: Span | None, alone: bool,
    events: Mapping[str, Sequence[LogEvent]], rules: Rules,
) -> Assembled:  # fmt: skip
    """Return one run. `root`: the trace's root where it speaks for this run. `alone`: the trace holds no other run."""
    outer = [span for span in (run.agent, None if root is run.agent else root) if span is not None]
    objective = _objective(conversation, outer)
    own = _own_spans(run, outer)
    key = _agent_id(run, own, rules)
    document: dict[str, Any] | None = None
    value: bytes | None = None
    missing: Missing | None = None
    if objective is None:
        missing = "no_objective" if conversation.has_text() else "no_content"
    else:
        document = _document(run, conversation, objective, outer, own, alone, key, events, rules)
        document, value, missing = _checked(document, rules)
        if missing == "no_steps" and not contents:
            missing = "no_content"
    conventions = frozenset(content.convention for content in contents) or frozenset(
        name for span in run.models for name in [_convention(span)] if name
    )
    hints = _hints(run) if missing in ("no_content", "no_objective", "no_steps") else ()
    if alone and run.agent is None and len(run.spans) == len(run.models) == 1 and conversation.has_calls():
        hints = (*hints, NO_PARENT)
    end_ns = max(span.end_ns for span in run.spans)
    return Assembled(document, value, missing, conventions, hints, run.first.span_id, key, end_ns)


def _checked(document: dict[str, Any], rules: Rules) -> tuple[dict[str, Any] | None, bytes | None, Missing | None]:
    """Return a document and its bytes if it is a valid trace, else why it is none."""
    if not document["steps"]:
        return None, None, "no_steps"
    values = (*document["metadata"].values(), document["outcome"]["confidence"])
    if None in values:
        return None, None, "no_value"
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    try:
        value = text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, of a text that was cut off in an escape
        value = text.encode("utf-8", "replace")
        document = json.loads(value)
    try:
        parse_trace(value, rules.limits)
    except InvalidTrace:
        return None, None, "too_large"
    return document, value, None


def _document(
    run: Run, conversation: Conversation, objective: str, outer: Sequence[Span], own: Sequence[Span], alone: bool,
    key: str, events: Mapping[str, Sequence[LogEvent]], rules: Rules,
) -> dict[str, Any]:  # fmt: skip
    transcript = Transcript(error_prefixes=ERROR_PREFIXES, objective=objective)
    answer = conversation.take_answer() or _outer_answer(outer)
    conversation.write(transcript)
    transcript.finish(answered=answer is not None)
    if not transcript.steps and answer:
        transcript.add_thought(answer)
    failed = [span for span in (*outer, *run.models[-1:]) if span.status == 2]
    # What the libraries put on the calls of the model says what the run was, but cannot open it to more readers.
    speaking = [*outer, *run.models] or own
    success, confidence = _evaluated(speaking, events, alone=alone)
    evaluated = success is not None or confidence is not None
    if success is None:
        success = not failed and answer is not None
    if rules.success is not None:
        success = rules.success.value(speaking)
    trace_id = run.first.trace_id
    uuid = "-".join([trace_id[:8], trace_id[8:12], trace_id[12:16], trace_id[16:20], trace_id[20:]])
    metadata = {
        "created_at": _created_at(min(span.start_ns for span in run.spans)),
        "agent_id": key,
        "framework": (run.models or run.tools or [run.first])[0].scope,
        "task_domain": rules.domain.value(speaking),
        "success": success,
        "quality_score": 0,
        "visibility": rules.visibility_of(own, run.spans),
        "privacy_level": rules.privacy_of(own, run.spans),
    }
    return {
        "@context": CONTEXT,
        "@type": "ReasoningTrace",
        "id": f"kp:trace:{uuid}" if alone else f"kp:trace:{uuid}:{run.first.span_id}",
        "metadata": {name: value for name, value in metadata.items() if value != ""},
        "task": {"objective": objective},
        "steps": transcript.steps,
        "outcome": {
            "result_summary": answer or next((text for span in failed if (text := error_text(span))), ""),
            "confidence": rules.confidence.value(speaking) if confidence is None else confidence,
            **({"evaluated": True} if evaluated else {}),
        },
    }


_PASSED: Final = frozenset({"pass", "passed", "success", "successful", "succeeded", "correct", "true", "yes"})
_FAILED: Final = frozenset({"fail", "failed", "failure", "incorrect", "wrong", "false", "no"})


def _evaluated(
    spans: Sequence[Span], events: Mapping[str, Sequence[LogEvent]], *, alone: bool
) -> tuple[bool | None, float | None]:
    """Return success and confidence as evaluations of the run say, None where they do not.

    The scores' range is not fixed, so one beyond 0 to 1 says nothing. Of several the lowest score counts, and one
    failure is a failure. `alone`: an evaluation without a span is of this run, too.
    """
    scores: list[float] = []
    labels: set[bool] = set()
    logs = [log for span in spans for log in events.get(span.span_id, ())] + [*(events.get("", ()) if alone else ())]
    said = [event.attributes for span in spans for event in span.events if event.name == EVALUATION]
    said += [{**log.attributes, **_object(log.body)} for log in logs if log.name == EVALUATION]
    for found in said:
        score = found.get("gen_ai.evaluation.score.value")
        if isinstance(score, int | float) and not isinstance(score, bool) and 0 <= score <= 1:
            scores.append(float(score))
        label = str(found.get("gen_ai.evaluation.score.label")).lower()
        if label in _PASSED | _FAILED:
            labels.add(label in _PASSED)
    return (None if not labels else labels == {True}), min(scores, default=None)


def _created_at(time_ns: int) -> str:
    """Return a time as RFC 3339 in UTC, to the millisecond. 2**64 ns are in the year 2554."""
    time = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=time_ns // 1_000_000)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _objective(conversation: Conversation, outer: Sequence[Span]) -> str | None:
    for span in outer:  # smolagents: in the messages it begins with "New task:"
        if "smolagents" in span.scope:
            for task in (
                span.attributes.get("smolagents.task"),
                _object(span.attributes.get("input.value")).get("task"),
            ):
                if isinstance(task, str) and task.strip():
                    return task
    texts = [] if conversation.objective is None else [conversation.objective.removeprefix("New task:\n")]
    for span in outer:
        texts += _outer_objectives(span)
    return next((text for text in texts if text.strip() and text != REDACTED), None)


def _outer_objectives(span: Span) -> Iterable[str]:
    found = span.attributes
    for message in parts_messages(found.get("gen_ai.input.messages")):
        if message.role == "user":
            yield message.texts()
    arguments = _object(found.get("traceloop.entity.input")).get("args")
    if isinstance(arguments, list) and arguments and isinstance(arguments[0], str):
        yield arguments[0]
    value = found.get("input.value")
    if isinstance(value, str) and isinstance(json_value(value), str):
        yield value


def _outer_answer(outer: Sequence[Span]) -> str | None:
    for span in outer:
        found = span.attributes
        for name in ("final_result", "traceloop.entity.output", "output.value"):
            value = found.get(name)
            if isinstance(value, str) and value != REDACTED:
                text = json_value(value)
                if isinstance(text, str) and text.strip():
                    return text
        for message in reversed(parts_messages(found.get("gen_ai.output.messages"))):
            if message.texts():
                return message.texts()
    return None


def _own_spans(run: Run, outer: Sequence[Span]) -> Sequence[Span]:
    """Return the spans that speak for a run: the agent's, or the model's where no span is the agent's.

    A tool's span, which may come from anywhere, speaks for nobody: where there are no others, its resource alone does.
    """
    return outer or run.models or [replace(run.first, attributes={}, events=())]


_AGENT_NAMES: Final = (
    "gen_ai.agent.name", "agent.name", "agent_name", "traceloop.workflow.name", "traceloop.entity.name",
    "gen_ai.agent.id",
)  # fmt: skip
"""The id comes last: in several libraries each run has another one."""

_GENERATED: Final = re.compile(
    r"(?<![0-9a-z])(?:"
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"  # a UUID
    r"|(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{8,}|[0-9]{9,}"  # hex, a counter, an address in memory
    r"|[0-9a-hjkmnp-tv-z]{26}"  # a ULID
    r"|(?:run|thread|session|trace|conv)[-_](?=[a-z]*[0-9])[0-9a-z]{8,}"
    r")(?![0-9a-z])",
    re.IGNORECASE,
)
"""What is made anew for each run or process, and names no agent."""

UNNAMED: Final = "unnamed"


def _agent_id(run: Run, own: Sequence[Span], rules: Rules) -> str:
    """Return the agent's id: the same one for each run of an agent."""
    for value in rules.agent.said(own):
        return str(value)
    name = _agent_name(run, own)
    service = _stable(_service(run.spans))
    if rules.agent.constant == SERVICE_AND_NAME:
        return "/".join(part for part in (service, name) if part) or _span_name(run)
    return name or (rules.agent.constant if rules.agent.constant != AGENT_NAME else "") or service or _span_name(run)


def _agent_name(run: Run, own: Sequence[Span]) -> str:
    """Return the name that a run's spans give its agent, "" where they give none."""
    below = [span for span in run.spans if kind_of(span) in ("agent", "model")]
    for spans in (own, below):
        for attribute in _AGENT_NAMES:
            for span in spans:
                value = span.attributes.get(attribute)
                if isinstance(value, str) and (name := _stable(value)):
                    return name
    if run.agent is None:
        return ""
    return _stable(run.agent.name.removeprefix("invoke_agent ").removeprefix("invoke_workflow "))


def _span_name(run: Run) -> str:
    return _stable(run.first.name) or UNNAMED


def _stable(name: str) -> str:
    """Return a name without its generated parts."""
    if _GENERATED.search(name) is None:
        return name if name.strip() else ""
    return _GENERATED.sub("", name).strip(" -_:/.#()[]{}")


def _service(spans: Sequence[Span]) -> str:
    value = spans[0].resource.get("service.name")
    return value if isinstance(value, str) else ""


def _convention(span: Span) -> str:
    found = span.attributes
    if span.scope == "com.anthropic.sdk.python":
        return "anthropic_sdk"
    for name, convention in (
        ("gen_ai.provider.name", "gen_ai"), ("openinference.span.kind", "openinference"),
        ("llm.request.type", "openllmetry"), ("gen_ai.system", "gen_ai_events"),
    ):  # fmt: skip
        if name in found:
            return convention
    return ""


def _hints(run: Run) -> tuple[str, ...]:
    found = []
    for span in run.models or run.spans:
        for scope, hint in _HINTS.items():
            if span.scope.startswith(scope):
                found.append(f"{span.scope}: {hint}")
                break
    return tuple(dict.fromkeys(found if run.models else [*found, NO_MODEL]))


def _object(value: Value) -> Mapping[str, Any]:
    parsed = json_value(value)
    return parsed if isinstance(parsed, dict) else {}

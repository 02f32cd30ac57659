"""The ReasoningTraces of one OTLP trace: how every field is filled, and why a run yields none.

Each run of an agent in a trace yields one document. Its bytes depend only on the set of spans, not on their order or
repetitions. A trace may contain several runs: an agent may be the tool of another one, or agents may work side by side.
A tool's span separates a run from what the tool does. Otherwise a run is all that lies below the topmost span of an
agent.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import chain, pairwise
from typing import Any, Final, Literal, TypeAlias, TypeGuard

from worker.core.trace import CONTEXT, InvalidTrace, parse_trace
from worker.runs.conversation import Conversation, ToolRun
from worker.runs.fields import json_object, plain
from worker.runs.messages import Reasoning, Text, Transcript
from worker.runs.otlp.content import (
    Content,
    Known,
    answered,
    asked,
    content_of,
    error_text,
    form_of,
    has_failed,
    is_cut,
    missed,
    tool_run,
)
from worker.runs.otlp.dialects import (
    Kind,
    dialects_of,
    hint_of,
    kind_of,
    said_name,
    span_name,
    spoken,
    stable,
    tool_name,
    values,
)
from worker.runs.otlp.rules import AGENT_NAME, SERVICE_AND_NAME, Rules
from worker.runs.otlp.spans import LogEvent, Span, Value
from worker.runs.otlp.values import REDACTED
from worker.runs.shorten import shortened

Missing = Literal["not_a_run", "no_content", "no_objective", "no_steps", "no_value", "too_large"]

LACKS: Final[Mapping[str, str]] = {
    "not_a_run": "no span of a model, tool or agent",
    "no_content": "its content was not captured",
    "no_objective": "no text of a user",
    "no_steps": "nothing but an objective",
    "no_value": "no span has an attribute that a setting or an option names",
    "too_large": "more than KP_MAX_MESSAGE_BYTES, KP_MAX_STEPS or KP_MAX_DEPTH",
}
"""Why a run yields no document, in words."""

MAX_UNREAD: Final = 20
"""Maximum number of unread attributes that are reported for a run."""

CUT_OFF: Final = (
    "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT (or OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT) cuts messages off: unset it"
)

EVALUATION: Final = "gen_ai.evaluation.result"


Logs: TypeAlias = Mapping[str, Sequence[LogEvent]]
"""Log events by the id of their span."""


@dataclass(frozen=True, slots=True)
class Assembled:
    """One run of a trace: its document, also as bytes, or why there is none."""

    document: dict[str, Any] | None
    value: bytes | None
    missing: Missing | None  # why there is no document
    conventions: frozenset[str]  # of its spans
    hints: tuple[str, ...]  # settings that would capture more
    agent_span_id: str  # of the span that stands for the run
    key: str  # the agent's id
    end_ns: int  # of the run's last span, ns since 1970
    cut: int = 0  # characters that were cut from texts
    unread: tuple[tuple[str, str], ...] = ()  # scope and attribute of what looks like content, MAX_UNREAD at most


def assembled(spans: Sequence[Span], logs: Sequence[LogEvent], rules: Rules) -> list[Assembled]:
    """Return the runs of one trace, outer ones first. `spans` and `logs` are all that is known of the trace."""
    spans = ordered(spans)
    if not spans:
        return []
    events = _by_span(logs, spans)
    runs = joined(runs_of(spans), events)
    if not runs:
        last = max(span.end_ns for span in spans)
        key = _service(spans) or spans[0].name
        unread = _unread(spans, events)
        return [Assembled(None, None, "not_a_run", frozenset(), (), spans[0].span_id, key, last, unread=unread)]
    for run in runs:
        _converse(run, events)
    kept = [run for run in runs if run.agent is not None or run.tool is None or run.conversation.has_calls()]
    alone, top = len(kept) == 1, [run for run in kept if run.tool is None]
    root = next((span for span in spans if not span.parent_id), None) if len(top) == 1 else None
    return [_assembled(run, root if run.tool is None else None, alone, events, rules) for run in kept]


def _by_span(logs: Sequence[LogEvent], spans: Sequence[Span]) -> dict[str, list[LogEvent]]:
    """Return the log events of each span, in order.

    OpenLLMetry writes them to the span above the call's own, which is the last one of its scope that began before.
    """
    by_span: dict[str, list[LogEvent]] = {}
    below: dict[tuple[str, str], list[Span]] = {}
    for span in spans if logs else ():
        below.setdefault((span.parent_id, span.scope), []).append(span)
    distinct = dict(zip(identities(logs), logs, strict=True))
    for _, log in sorted(distinct.items(), key=lambda each: (each[1].time_ns, each[1].name, each[0])):
        calls = below.get((log.span_id, log.scope), []) if log.span_id else []
        at = bisect_right(calls, log.time_ns, key=lambda span: span.start_ns) - 1
        is_within = at >= 0 and log.time_ns <= calls[at].end_ns
        by_span.setdefault(calls[at].span_id if is_within else log.span_id, []).append(log)
    return by_span


def _assembled(run: Run, root: Span | None, alone: bool, events: Logs, rules: Rules) -> Assembled:
    """Return one run. `root`: the trace's, if it describes this run."""
    outer = [span for span in (run.agent, None if root is run.agent else root) if span is not None]
    # A tool's span may come from anywhere, so it describes no run; if there is no other, only its resource counts.
    own = outer or run.models or [replace(run.first, attributes={}, events=())]
    objective = _objective(run, outer)
    key = _agent_id(run, own, rules)
    made: tuple[dict[str, Any], bytes, int] | Missing
    if objective is None:
        made = "no_objective" if run.conversation.has_text() else "no_content"
    else:
        made = _checked(_document(run, objective, outer, own, alone, key, events, rules), key, rules)
        made = "no_content" if made == "no_steps" and not run.contents else made
    document, value, cut = made if isinstance(made, tuple) else (None, None, 0)
    missing = None if isinstance(made, tuple) else made
    conventions = frozenset(each.convention for each in run.contents) or frozenset(map(spoken, run.models)) - {""}
    kinds = Counter(step["type"] for step in document["steps"]) if document is not None else None
    lacks = kinds is None or kinds["tool_call"] > kinds["observation"] + kinds["error_recovery"]
    unread = _unread(run.spans if lacks else _silent(run, events), events)
    hints: list[str] = []
    if missing in ("no_content", "no_objective", "no_steps") and not unread:
        scopes = dict.fromkeys(span.scope for span in run.models or run.spans)
        hints += [f"{scope}: {hint}" for scope in scopes if (hint := hint_of(scope))]
        if not run.models:
            hints.append("no span of a model: instrument the client of the model, too")
    if alone and run.agent is None and len(run.spans) == len(run.models) == 1 and run.conversation.has_calls():
        hints.append("each call of the model becomes a separate trace: start a span around the whole run")
    lost = run.spans if missing is not None else run.silent_models()
    if any(content.is_cut for content in run.contents) or any(map(is_cut, lost)):
        hints.append(CUT_OFF)
    end_ns = max(span.end_ns for span in run.spans)
    return Assembled(document, value, missing, conventions, tuple(hints), run.first.span_id, key, end_ns, cut, unread)


def _checked(document: dict[str, Any], key: str, rules: Rules) -> tuple[dict[str, Any], bytes, int] | Missing:
    """Return a document, its bytes and the number of characters cut, or why it is not a valid trace."""
    if not document["steps"]:
        return "no_steps"
    if None in (*document["metadata"].values(), document["outcome"]["confidence"]):
        return "no_value"
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    try:
        value = text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: a text was cut off within an escape
        value = text.encode("utf-8", "replace")
        document = json.loads(value)
    cut = 0
    # the worker counts the record's key: the agent's id, or the 32 bytes of a trace id
    most = rules.limits.max_bytes - max(32, len(key.encode("utf-8", "replace")))
    if len(value) > most and (fitting := shortened(document, len(value), most)) is not None:
        document, cut = fitting
        value = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    try:
        parse_trace(value, rules.limits)
    except InvalidTrace:
        return "too_large"
    return document, value, cut


def _document(
    run: Run, objective: str, outer: Sequence[Span], own: Sequence[Span], alone: bool, key: str, events: Logs,
    rules: Rules,
) -> dict[str, Any]:  # fmt: skip
    # without spans of tools, most libraries mark errors in no other way
    transcript = Transcript(error_prefixes=("Error:", "Error executing tool"), objective=objective)
    answers: Iterable[Any] = chain(
        (text for span in outer for text in values(span, "answer")), [run.conversation.take_answer()],
        (text for span in outer for text in answered(span)),
    )  # fmt: skip
    answer = next(filter(_is_text, answers), None)
    run.conversation.write(transcript)
    transcript.finish(answered=answer is not None)
    if not transcript.steps and answer:
        transcript.add_thought(answer)
    failed = [span for span in (*outer, *run.models[-1:]) if has_failed(span)]
    # Attributes of model calls describe the run, but must not make it visible to more readers.
    speaking = [*outer, *run.models] or own
    success, confidence = _evaluated(speaking, events, alone=alone)
    evaluated = success is not None or confidence is not None
    if success is None:
        success = not failed and answer is not None
    if rules.success is not None:
        success = rules.success.value(speaking)
    trace_id = run.first.trace_id
    uuid = f"{trace_id[:8]}-{trace_id[8:12]}-{trace_id[12:16]}-{trace_id[16:20]}-{trace_id[20:]}"
    began_ms = min(span.start_ns for span in run.spans) // 1_000_000  # 2**64 ns are in the year 2554
    created_at = (datetime(1970, 1, 1) + timedelta(milliseconds=began_ms)).isoformat(timespec="milliseconds")
    metadata = {
        "created_at": f"{created_at}Z", "agent_id": key,
        "framework": (run.models or run.tools or [run.first])[0].scope, "task_domain": rules.domain.value(speaking),
        "success": success, "quality_score": 0, "visibility": rules.strictest("visibility", own, run.spans),
        "privacy_level": rules.strictest("privacy", own, run.spans),
    }  # fmt: skip
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


def _evaluated(spans: Sequence[Span], events: Logs, *, alone: bool) -> tuple[bool | None, float | None]:
    """Return success and confidence as evaluations of the run have them, None if they have none.

    Scores have no fixed range, so those beyond 0 to 1 are ignored. The lowest of several scores counts, and a single
    failure is a failure. `alone`: an evaluation without a span is also about this run.
    """
    scores: list[float] = []
    labels: set[bool] = set()
    logs = [log for span in spans for log in events.get(span.span_id, ())] + [*(events.get("", ()) if alone else ())]
    said = [event.attributes for span in spans for event in span.events if event.name == EVALUATION]
    said += [{**log.attributes, **json_object(log.body)} for log in logs if log.name == EVALUATION]
    for evaluation in said:
        score = evaluation.get("gen_ai.evaluation.score.value")
        if isinstance(score, int | float) and not isinstance(score, bool) and 0 <= score <= 1:
            scores.append(float(score))
        label = str(evaluation.get("gen_ai.evaluation.score.label")).lower()
        if label in _PASSED | _FAILED:
            labels.add(label in _PASSED)
    return (None if not labels else labels == {True}), min(scores, default=None)


def _objective(run: Run, outer: Sequence[Span]) -> str | None:
    """Return the user's words: from an attribute without a prompt, from the first prompt, or from an agent's input."""
    texts = [text for span in outer for text in values(span, "task")]
    if (prompted := run.conversation.objective) is not None:
        rows = {row for scope in {span.scope for span in run.spans} for row in dialects_of(scope)}
        words = [row.prompt.search(prompted) for row in rows if row.prompt is not None]
        texts.append(next((str(each[1]) for each in words if each is not None), prompted))
    return next(filter(_is_text, chain(texts, (text for span in outer for text in asked(span)))), None)


def _is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and value.strip() != "" and value != REDACTED


def _agent_id(run: Run, own: Sequence[Span], rules: Rules) -> str:
    """Return the agent's id, which is the same for all its runs."""
    for value in rules.agent.said(own):
        return str(value)
    name, service, constant = _agent_name(run, own), stable(_service(run.spans)), rules.agent.constant
    if constant == SERVICE_AND_NAME:
        known = "/".join(part for part in (service, name) if part)
    else:
        known = name or (constant if constant != AGENT_NAME else "") or service
    return known or stable(run.first.name) or "unnamed"


def _agent_name(run: Run, own: Sequence[Span]) -> str:
    """Return the agent's name according to the spans of a run; "" if they have none."""
    name, workflow = said_name(own), said_name(own, "workflow")
    if not name:
        kinds = [(span, kind_of(span)) for span in run.spans]
        below = [span for span, kind in kinds if kind in ("agent", "model", "chain")]
        if workflow and len({said_name([span]) for span, kind in kinds if kind in ("agent", "chain")} - {""}) != 1:
            name = workflow
        else:
            name = said_name(below)
        if not name and run.tool is None:  # the workflow of a run in a tool is the tool's
            name = said_name(below, "workflow")
        name = name or said_name([*own, *below], "agent_id")
    if not name and run.agent is not None:
        name = span_name(run.agent)
    if not name and run.tool is not None:  # an unnamed agent that is a tool of another one
        name = next((each for each in values(run.tool, "delegate") if isinstance(each, str)), tool_name(run.tool))
    return stable(name)


def _service(spans: Sequence[Span]) -> str:
    value = spans[0].resource.get("service.name")
    return value if isinstance(value, str) else ""


def _unread(spans: Iterable[Span], events: Logs) -> tuple[tuple[str, str], ...]:
    """Return the scopes and names of what looks like content in these spans and is not read."""
    unread = {(span.scope, name) for span in spans for name in missed(span, events.get(span.span_id, ()))}
    return tuple(sorted(unread)[:MAX_UNREAD])


def _silent(run: Run, events: Logs) -> list[Span]:
    """Return the spans of models and tools from which nothing was read."""
    silent = run.silent_models()
    for span in run.tools:
        logs = events.get(span.span_id, ())
        if missed(span, logs):
            tool = tool_run(span, logs)
            silent += [span] if tool.arguments is None or tool.result is None else []
    return silent


def joined(runs: Sequence[Run], logs: Logs) -> list[Run]:
    """Return the runs, after joining those that continue the task of the agent above with its run.

    An agent below another one has a separate run if both call a model and it was asked something else.
    """
    kept: list[Run] = []
    known = set(map(id, runs))
    within: dict[int, Run] = {}
    first: dict[int, tuple[Any, str]] = {}  # by run: its first model span with a text of the user, and the text

    def asked(run: Run) -> tuple[Any, str]:
        if id(run) not in first:
            texts = ((by_time(span), _asked(span, logs)) for span in run.models)
            first[id(run)] = next((each for each in texts if each[1]), ((math.inf,), ""))
        return first[id(run)]

    for run in runs:
        upper = run.upper
        while upper is not None and id(upper) in within:
            upper = within[id(upper)]
        if upper is None or (upper.models and run.models and asked(run)[1] not in ("", asked(upper)[1])):
            kept.append(run)
            continue
        if id(upper) not in known:  # what lies above the agent says nothing itself
            known.add(id(upper))
            kept.append(upper)
        first[id(upper)] = min(asked(upper), asked(run))
        upper.take(run)
        within[id(run)] = upper
    for run in {id(upper): upper for upper in within.values()}.values():
        run.sort()
    return kept


def _asked(span: Span, logs: Logs) -> str:
    content = content_of(span, logs.get(span.span_id, ()))
    texts = [each.texts().strip() for each in content.inputs if each.role == "user"] if content is not None else []
    return next(filter(None, texts), "")


def _converse(run: Run, logs: Logs) -> None:
    """Set the conversation of a run, the contents of its model calls, and which models' spans have content."""
    known: Known = []
    described: list[tuple[Content, Span]] = []
    covering: set[str] = set()  # models' spans with content, whose dialect says that those below them do not count
    for span in run.models:
        if run.inside.get(span.span_id) in covering:
            run.said.add(span.span_id)
        elif content := content_of(span, logs.get(span.span_id, ()), known):
            described.append((content, span))
            run.said.add(span.span_id)
            if form_of(span) == "whole":
                covering.add(span.span_id)
    contents = _distinct(run, described)
    if not contents and run.agent is not None:
        whole = content_of(run.agent, logs.get(run.agent.span_id, ()))
        contents = [] if whole is None else [(whole, run.agent)]
    for content, span in contents:
        run.conversation.add(content.inputs, content.outputs, span.start_ns, span.end_ns)
    run.conversation.add_tools(_tools(run, logs))
    run.contents = [content for content, _ in contents]


def _tools(run: Run, logs: Logs) -> list[ToolRun]:
    """Return the records of tool calls; several spans of one call become one record."""
    records: dict[str, ToolRun] = {}
    for span in run.tools:
        own = tool_run(span, logs.get(span.span_id, ()))
        outer = records.get(run.inside.get(span.span_id, ""))
        if outer is None:
            records[span.span_id] = own
            continue
        records[run.inside[span.span_id]] = replace(
            outer, call_id=outer.call_id or own.call_id, is_error=outer.is_error or own.is_error,
            arguments=own.arguments if outer.arguments is None else outer.arguments,
            result=own.result if outer.result is None else outer.result,
        )  # fmt: skip
    return list(records.values())


def _distinct(run: Run, contents: Sequence[tuple[Content, Span]]) -> list[tuple[Content, Span]]:
    """Return the content of each model call once, even if several libraries describe it.

    A span below a model's span describes the same call. So does one with the same response id, and one that overlaps in
    time and has the same content, unless both have such ids. The description that says most counts, or the first of
    several that say as much.
    """
    wrappers = _wrappers(run, contents)
    kept: list[tuple[Content, Span]] = []
    topmost: dict[str, int] = {}
    responses: dict[str, int] = {}
    answers: dict[tuple[Any, ...], tuple[int, bool, int]] = {}
    for content, span in contents:
        if span.span_id in wrappers:
            continue
        response = span.attributes.get("gen_ai.response.id")
        response = response if isinstance(response, str) else ""
        top = run.inside.get(span.span_id, "")
        top = span.span_id if top in wrappers or not top else top
        index = topmost.get(top, responses.get(response) if response else None)
        if index is not None:
            topmost.setdefault(top, index)
            before = kept[index][0]
            if content.fullness() > before.fullness():
                kept[index] = (replace(content, inputs=content.inputs or before.inputs), span)
            continue
        same = _signature(content)
        end_ns, has_id, index = answers.get(same, (-1, False, 0))
        if same and end_ns > span.start_ns and not (response and has_id):
            topmost[top] = index
            continue
        topmost[top] = len(kept)
        if response:
            responses[response] = len(kept)
        answers[same] = (span.end_ns, response != "", len(kept))
        kept.append((content, span))
    return kept


def _wrappers(run: Run, contents: Sequence[tuple[Content, Span]]) -> set[str]:
    """Return the ids of models' spans around several consecutive calls, of which they describe only the last."""
    inside: dict[str, list[Span]] = {}
    for content, span in contents:
        if span.span_id in run.inside and any(message.parts for message in content.outputs):
            inside.setdefault(run.inside[span.span_id], []).append(span)
    return {
        top for top, spans in inside.items()
        if len(spans) > 1 and all(one.end_ns <= later.start_ns for one, later in pairwise(spans))
    }  # fmt: skip


def _signature(content: Content) -> tuple[Any, ...]:
    parts = [part for message in content.outputs for part in message.parts if isinstance(part, Text | Reasoning)]
    calls = [(call.call_id, call.name) for message in content.outputs for call in message.calls()]
    return (*(part.text for part in parts), *calls)


# The runs of agents in the tree of a trace's spans

Identity: TypeAlias = tuple[str, int]


def ordered(spans: Iterable[Span]) -> list[Span]:
    """Return spans by start time, outer ones first; of several with one id, the last and fullest."""
    by_id: dict[str, list[Span]] = {}
    for span in spans:
        by_id.setdefault(span.span_id, []).append(span)
    repeated = [span for same in by_id.values() if len(same) > 1 for span in same]
    keys = dict(zip(map(id, repeated), identities(repeated), strict=True))

    def fullness(span: Span) -> tuple[int, int, Identity]:
        return span.end_ns, len(span.attributes), keys[id(span)]

    return sorted((same[0] if len(same) == 1 else max(same, key=fullness) for same in by_id.values()), key=by_time)


def by_time(span: Span) -> tuple[float, int, str]:
    """Return the key of a span in the order of a trace: by start time, outer spans first."""
    return span.start_ns, -span.end_ns, span.span_id


def identities(items: Sequence[Span] | Sequence[LogEvent]) -> list[Identity]:
    """Return a key for each span or log event, by which its whole content can be compared and sorted.

    Linear in the bytes of the record: a resource shared by thousands is written out once.
    """
    written = {key: repr(resource) for key, resource in {id(item.resource): item.resource for item in items}.items()}
    ranks = {text: rank for rank, text in enumerate(sorted(set(written.values())))}
    by_resource = {key: ranks[text] for key, text in written.items()}
    nothing: dict[str, Value] = {}
    return [(repr(replace(item, resource=nothing)), by_resource[id(item.resource)]) for item in items]


@dataclass(slots=True)
class Run:
    """The spans of one run. Each list is sorted by start time."""

    agent: Span | None  # its topmost span; None if no span shows where it begins
    tool: Span | None = None  # the tool's span above it
    upper: Run | None = None  # the run of the agent directly above its agent
    models: list[Span] = field(default_factory=list)
    tools: list[Span] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    inside: dict[str, str] = field(default_factory=dict)
    """For spans of models and tools below another one of the same call: the id of the topmost one, by id."""
    conversation: Conversation = field(default_factory=Conversation)
    contents: list[Content] = field(default_factory=list)  # of its model calls
    said: set[str] = field(default_factory=set)  # ids of the models' spans with content

    @property
    def first(self) -> Span:
        """The span that represents the run."""
        return self.agent or self.spans[0]

    def silent_models(self) -> list[Span]:
        """Return the models' spans without content."""
        return [span for span in self.models if span.span_id not in self.said]

    def take(self, other: Run) -> None:
        """Add the spans of another run, which is part of this one. Sort the spans when all others are taken."""
        self.models += other.models
        self.tools += other.tools
        self.spans += other.spans
        self.inside |= other.inside

    def sort(self) -> None:
        """Sort the spans."""
        for spans in (self.models, self.tools, self.spans):
            spans.sort(key=by_time)


@dataclass(frozen=True, slots=True)
class _Place:
    """The position of a span: ids of the tool above, of the agent (above, or itself), and of the model above."""

    tool: str
    agent: str
    model: str
    orphan: bool
    border: str = ""  # the tool above its children, if it is a tool's span
    name: str = ""  # of the nearest agent with a name
    upper: str = ""  # the agent above the span's own


def runs_of(spans: Sequence[Span]) -> list[Run]:
    """Return the runs of a trace, outer ones first, in linear time. `spans`: as `ordered` returns them."""
    by_id = {span.span_id: span for span in spans}
    kinds = {span.span_id: kind_of(span) for span in spans}
    places = _places(spans, by_id, kinds)
    lost = _below_lost_spans(spans, places, by_id)
    runs: dict[tuple[str, str], Run] = {}
    for span in spans:
        place = places[span.span_id]
        if span.span_id in lost:
            place = replace(place, agent=lost[span.span_id])
        run = runs.get((place.tool, place.agent))
        if run is None:
            run = runs[place.tool, place.agent] = Run(by_id.get(place.agent), by_id.get(place.tool))
        run.spans.append(span)
        if kinds[span.span_id] == "model":
            run.models.append(span)
            if place.model:
                run.inside[span.span_id] = place.model
        elif kinds[span.span_id] == "tool":
            run.tools.append(span)
            if place.border != span.span_id:
                run.inside[span.span_id] = place.border
    for (tool, agent), run in runs.items():
        run.upper = runs.get((tool, places[agent].upper)) if agent and places[agent].upper else None
    return [run for run in runs.values() if _is_run(run, kinds)]


def _below_lost_spans(spans: Sequence[Span], places: dict[str, _Place], by_id: dict[str, Span]) -> dict[str, str]:
    """Return the agent of spans whose parent was lost, as where a model fails: the only one, if they ran during it."""
    agents = {place.agent for place in places.values()} - {""}
    agent = by_id[agents.pop()] if len(agents) == 1 else None
    if agent is None:
        return {}
    alone = [span for span in spans if places[span.span_id].orphan and not places[span.span_id].agent]
    during = [span for span in alone if agent.start_ns <= span.start_ns <= span.end_ns <= agent.end_ns]
    return {span.span_id: agent.span_id for span in during if not places[span.span_id].tool}


def _is_run(run: Run, kinds: dict[str, Kind]) -> bool:
    if run.models or (run.agent is not None and kinds[run.agent.span_id] == "agent"):
        return True
    return bool(run.tools) and run.tool is None


def _places(spans: Sequence[Span], by_id: dict[str, Span], kinds: dict[str, Kind]) -> dict[str, _Place]:
    """Return the position of each span. In a circle, parents count as missing. Not recursive: chains may be long."""
    places: dict[str, _Place] = {}
    for start in spans:
        path: dict[str, Span] = {}
        span: Span | None = start
        while span is not None and span.span_id not in places and span.span_id not in path:
            path[span.span_id] = span
            span = by_id.get(span.parent_id)
        in_circle = span is not None and span.span_id in path
        for each in reversed(path.values()):
            parent = None if in_circle else by_id.get(each.parent_id)
            in_circle = in_circle and each is not span
            above = places.get(parent.span_id) if parent is not None else None
            place = _place(each, kinds, parent, above)
            is_inner = kinds[each.span_id] == "tool" and place.tool and not place.agent
            if is_inner and plain(tool_name(each)) == plain(tool_name(by_id[place.tool])):  # two libraries, one call
                place = replace(places[place.tool], border=place.tool)
            places[each.span_id] = place
    return places


def _place(span: Span, kinds: dict[str, Kind], parent: Span | None, above: _Place | None) -> _Place:
    kind = kinds[span.span_id]
    tool = agent = model = name = upper = ""
    orphan = span.parent_id != ""
    if parent is not None and above is not None:
        orphan = above.orphan
        if kinds[parent.span_id] == "tool":
            tool = above.border
        else:
            tool, agent, name, upper = above.tool, above.agent, above.name, above.upper
            model = above.model or (parent.span_id if kinds[parent.span_id] == "model" else "")
    border = span.span_id if kind == "tool" else ""
    if kind == "agent":
        own = plain(said_name([span]) or span_name(span))
        if not agent or (own and name and own != name):
            agent, upper = span.span_id, agent
        name = own or name
    elif kind == "chain" and not agent and not orphan:
        agent = span.span_id
    return _Place(tool, agent, model, orphan, border, name, upper)

"""The spans of a trace as a tree: what each of them is, and which runs of agents the trace holds.

A trace may hold several runs: an agent that is the tool of another one, or agents side by side. A tool's span is the
border between a run and what the tool does; below or beside it, a run is what lies under the topmost span of an agent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

from worker.runs.otlp.spans import LogEvent, Span, Value

Identity: TypeAlias = tuple[str, int]

Kind = Literal["model", "tool", "agent", "chain", "other"]

_OPERATIONS: Final[dict[str, Kind]] = {
    "chat": "model", "generate_content": "model", "text_completion": "model", "execute_tool": "tool",
    "invoke_agent": "agent", "invoke_workflow": "agent", "create_agent": "other", "embeddings": "other",
}  # fmt: skip

_OPENINFERENCE: Final[dict[str, Kind]] = {"LLM": "model", "TOOL": "tool", "AGENT": "agent", "CHAIN": "chain"}

_TRACELOOP: Final[dict[str, Kind]] = {"tool": "tool", "workflow": "agent", "agent": "agent", "task": "other"}

_LANGCHAIN: Final = "openinference.instrumentation.langchain"
"""Its AGENT spans are nodes of a graph, one for each turn; the run is the CHAIN above them."""


def kind_of(span: Span) -> Kind:
    """Return what a span is, by the attributes of the conventions."""
    found = span.attributes
    operation = found.get("gen_ai.operation.name")
    if isinstance(operation, str) and operation in _OPERATIONS:
        return _OPERATIONS[operation]
    kind = found.get("openinference.span.kind")
    if isinstance(kind, str):
        known = _OPENINFERENCE.get(kind.upper(), "other")
        return "chain" if known == "agent" and span.scope == _LANGCHAIN else known
    kind = found.get("traceloop.span.kind")
    if isinstance(kind, str):
        return _TRACELOOP.get(kind, "other")
    if "gen_ai.tool.name" in found:
        return "tool"
    if "llm.request.type" in found or "gen_ai.request.model" in found or "gen_ai.output.messages" in found:
        return "model"
    flattened = ("gen_ai.completion.", "gen_ai.prompt.", "llm.output_messages.")
    return "model" if any(name.startswith(flattened) for name in found) else "other"


def ordered(spans: Iterable[Span]) -> list[Span]:
    """Return spans by their start, the outer one first, each span once: of two with one id the later and fuller one."""
    found: dict[str, list[Span]] = {}
    for span in spans:
        found.setdefault(span.span_id, []).append(span)
    repeated = [span for same in found.values() if len(same) > 1 for span in same]
    keys = dict(zip(map(id, repeated), identities(repeated), strict=True))
    best = [same[0] if len(same) == 1 else max(same, key=lambda each: _fullness(each, keys)) for same in found.values()]
    return sorted(best, key=lambda span: (span.start_ns, -span.end_ns, span.span_id))


def _fullness(span: Span, keys: dict[int, Identity]) -> tuple[int, int, Identity]:
    return span.end_ns, len(span.attributes), keys[id(span)]


def identities(items: Sequence[Span] | Sequence[LogEvent]) -> list[Identity]:
    """Return for each span or log event what all it holds is equal, and ordered, by.

    Linear in the bytes of the record: a resource that thousands share is written out once.
    """
    written = {key: repr(resource) for key, resource in {id(item.resource): item.resource for item in items}.items()}
    ranks = {text: rank for rank, text in enumerate(sorted(set(written.values())))}
    by_resource = {key: ranks[text] for key, text in written.items()}
    nothing: dict[str, Value] = {}
    return [(repr(replace(item, resource=nothing)), by_resource[id(item.resource)]) for item in items]


def root_ended(spans: Iterable[Span]) -> bool:
    """Return whether a trace is complete as far as its spans say: each has its parent, or is the root.

    A span is exported when it ends, so a parent that is not there is still open, or was lost. This holds for one in
    another process, too: the agent that waits for a sub-agent is often one.
    """
    return is_complete((span.span_id, span.parent_id) for span in spans)


def is_complete(links: Iterable[tuple[str, str]]) -> bool:
    """Return the same of the ids of spans and their parents (spans.links)."""
    known: set[str] = set()
    parents: set[str] = set()
    for span_id, parent_id in links:
        known.add(span_id)
        parents.add(parent_id)
    return "" in parents and not parents - known - {""}


@dataclass(slots=True)
class Run:
    """The spans of one run, each list by start. `agent`: its topmost span; None where no span says where it begins.

    `inside`: for a model's span that lies below another one, which describes the same call, the upper one's id.
    """

    agent: Span | None
    inside_tool: bool
    models: list[Span] = field(default_factory=list)
    tools: list[Span] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    inside: dict[str, str] = field(default_factory=dict)

    @property
    def first(self) -> Span:
        """The span that stands for the run."""
        return self.agent or self.spans[0]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a span lies: below which tool, below or at which topmost agent, and below which model's span."""

    tool: str
    agent: str
    model: str
    orphan: bool


def runs_of(spans: Sequence[Span]) -> list[Run]:
    """Return the runs of a trace, the outer ones first. `spans` as by `ordered`. Linear in their number."""
    by_id = {span.span_id: span for span in spans}
    kinds = {span.span_id: kind_of(span) for span in spans}
    places = _places(spans, by_id, kinds)
    runs: dict[tuple[str, str], Run] = {}
    for span in spans:
        place = places[span.span_id]
        run = runs.get((place.tool, place.agent))
        if run is None:
            run = runs[place.tool, place.agent] = Run(by_id.get(place.agent), bool(place.tool))
        run.spans.append(span)
        if kinds[span.span_id] == "model":
            run.models.append(span)
            if place.model:
                run.inside[span.span_id] = place.model
        elif kinds[span.span_id] == "tool":
            run.tools.append(span)
    return [run for run in runs.values() if _is_run(run, kinds)]


def _is_run(run: Run, kinds: dict[str, Kind]) -> bool:
    if run.models or (run.agent is not None and kinds[run.agent.span_id] == "agent"):
        return True
    return bool(run.tools) and not run.inside_tool


def _places(spans: Sequence[Span], by_id: dict[str, Span], kinds: dict[str, Kind]) -> dict[str, _Place]:
    """Return where each span lies. The parents of a circle count as missing; no recursion, a chain may be long."""
    places: dict[str, _Place] = {}
    for start in spans:
        path: list[Span] = []
        on_path: dict[str, int] = {}
        span: Span | None = start
        while span is not None and span.span_id not in places and span.span_id not in on_path:
            on_path[span.span_id] = len(path)
            path.append(span)
            span = by_id.get(span.parent_id)
        circle = on_path.get(span.span_id, len(path)) if span is not None else len(path)
        for index in range(len(path) - 1, -1, -1):
            each = path[index]
            parent = by_id.get(each.parent_id) if index < circle else None
            above = places.get(parent.span_id) if parent is not None else None
            places[each.span_id] = _place(each, kinds, parent, above)
    return places


def _place(span: Span, kinds: dict[str, Kind], parent: Span | None, above: _Place | None) -> _Place:
    kind = kinds[span.span_id]
    if parent is None or above is None:
        orphan = span.parent_id != ""
        tool = agent = model = ""
    else:
        below_tool = kinds[parent.span_id] == "tool"
        orphan = above.orphan
        tool = parent.span_id if below_tool else above.tool
        agent = "" if below_tool else above.agent
        model = "" if below_tool else parent.span_id if kinds[parent.span_id] == "model" else above.model
    if not agent and (kind == "agent" or (kind == "chain" and not orphan)):
        agent = span.span_id
    return _Place(tool, agent, model, orphan)

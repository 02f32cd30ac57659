"""The spans of a trace as a tree, and the runs of agents in it.

A trace may contain several runs: an agent may be the tool of another one, or agents may work side by side. A tool's
span separates a run from what the tool does. Otherwise a run is all that lies below the topmost span of an agent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from worker.runs.fields import plain
from worker.runs.otlp.dialects import Kind, kind_of, said_name, span_name, tool_name
from worker.runs.otlp.spans import LogEvent, Span, Value

Identity: TypeAlias = tuple[str, int]


def ordered(spans: Iterable[Span]) -> list[Span]:
    """Return spans by start time, outer ones first; of several with one id, the last and fullest."""
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
    """Return a key for each span or log event, by which its whole content can be compared and sorted.

    Linear in the bytes of the record: a resource shared by thousands is written out once.
    """
    written = {key: repr(resource) for key, resource in {id(item.resource): item.resource for item in items}.items()}
    ranks = {text: rank for rank, text in enumerate(sorted(set(written.values())))}
    by_resource = {key: ranks[text] for key, text in written.items()}
    nothing: dict[str, Value] = {}
    return [(repr(replace(item, resource=nothing)), by_resource[id(item.resource)]) for item in items]


def is_complete(links: Iterable[tuple[str, str]]) -> bool:
    """Return whether a trace looks complete: each span has its parent or is the root.

    `links`: of each span its id and its parent's (spans.links). A span is exported when it ends, so a missing parent is
    still open, or was lost. It may be in another process, such as an agent that waits for a sub-agent.
    """
    known: set[str] = set()
    parents: set[str] = set()
    for span_id, parent_id in links:
        known.add(span_id)
        parents.add(parent_id)
    return "" in parents and not parents - known - {""}


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

    @property
    def first(self) -> Span:
        """The span that represents the run."""
        return self.agent or self.spans[0]

    def take(self, other: Run) -> None:
        """Add the spans of another run, which is part of this one."""
        for name in ("models", "tools", "spans"):
            both = getattr(self, name) + getattr(other, name)
            setattr(self, name, sorted(both, key=lambda span: (span.start_ns, -span.end_ns, span.span_id)))
        self.inside |= other.inside


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
    """Return the agent of spans whose parent was lost: the trace's only one, if they ran during it.

    Some libraries do not end their own span if the model call fails.
    """
    agents = {place.agent for place in places.values()} - {""}
    agent = by_id[agents.pop()] if len(agents) == 1 else None
    if agent is None:
        return {}
    return {
        span.span_id: agent.span_id
        for span in spans
        if not places[span.span_id].agent
        and not places[span.span_id].tool
        and places[span.span_id].orphan
        and agent.start_ns <= span.start_ns <= span.end_ns <= agent.end_ns
    }


def _is_run(run: Run, kinds: dict[str, Kind]) -> bool:
    if run.models or (run.agent is not None and kinds[run.agent.span_id] == "agent"):
        return True
    return bool(run.tools) and run.tool is None


def _places(spans: Sequence[Span], by_id: dict[str, Span], kinds: dict[str, Kind]) -> dict[str, _Place]:
    """Return the position of each span. In a circle, parents count as missing. Not recursive: chains may be long."""
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

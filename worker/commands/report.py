"""The numbers of a report on scored traces: documents in, one summary out.

Lives here: reading `scoring` objects into compact columns (about 150 bytes a trace, and its id and objective cut to
`TEXT_LENGTH`), and everything that is computed from them. Must not live here: files, Kafka, plots, HTML, the clock.

The summary does not depend on the order in which documents come: they are put in stream-time order first.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from worker.core import terminal
from worker.core.pipeline import ACCEPTED, CACHED_ID_LENGTH, REJECTED, EmbedderIdentity
from worker.core.scoring import Components, Weights

COMPONENTS: Final = ("complexity", "novelty", "tool_diversity", "outcome_confidence")
THRESHOLDS: Final = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
"""Thresholds of the table; the curve has all hundredths."""

CURVE: Final = tuple(step / 100 for step in range(101))
SHARES: Final = (0.05, 0.1, 0.2, 0.3, 0.5)
SCORE_BINS: Final = 40
"""Bars of 0.025, so that the usual thresholds fall between two bars."""

TEXT_LENGTH: Final = 160
"""Characters that are kept of an id and of an objective: enough to recognise them."""

BAD_SHOWN: Final = 20
TIME_BINS: Final = 60
MIN_IN_BIN: Final = 25
"""Traces that one point of the novelty curve needs at least: a median of fewer only jumps."""

DOMAINS_SHOWN: Final = 20
"""Domains are free text of the agents, so there can be as many as traces: the rest becomes one row."""

EXAMPLES: Final = 3
EXTREMES: Final = 10
CLUSTERS: Final = 10

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_Floats = npt.NDArray[np.float64]
_Rows = npt.NDArray[np.intp]
_Fraction = Annotated[float, Meta(ge=0, le=1)]


class _Metadata(Struct):
    task_domain: str


class _Task(Struct):
    objective: str


class _Step(Struct):
    latency_ms: float = 0.0


class _Nearest(Struct):
    id: str
    similarity: float


class _Source(Struct):
    topic: str
    partition: Annotated[int, Meta(ge=0, lt=2**31)]
    offset: Annotated[int, Meta(ge=0, le=2**63 - 1)]


class _Scoring(Struct):
    score: _Fraction
    decision: str
    threshold: _Fraction
    profile: str
    weights: Weights
    components: Components
    overrides: list[str]
    nearest: _Nearest | None
    stream_time: Annotated[datetime, Meta(tz=True)]
    embedder: EmbedderIdentity | None
    source: _Source
    worker_version: str


class _Document(Struct):
    """What a report reads of an output document (schemas/scored-trace.schema.json)."""

    id: str
    metadata: _Metadata
    task: _Task
    steps: list[_Step]
    scoring: _Scoring


class EmptyReport(ValueError):
    """There is nothing to report on; the message says why."""


class _Names:
    """Distinct values by number, so that a column can hold four bytes for each."""

    def __init__(self) -> None:
        self._codes: dict[Any, int] = {}

    def code(self, value: Any) -> int:
        return self._codes.setdefault(value, len(self._codes))

    def values(self) -> list[Any]:
        return list(self._codes)


class Traces:
    """Scored traces as columns. `add` each document, then `summarize`."""

    def __init__(self, *, hide_texts: bool = False) -> None:
        self.hide_texts = hide_texts
        self.bad = 0
        self.bad_shown: list[tuple[str, str]] = []
        self._decoder = msgspec.json.Decoder(_Document)
        self._texts = bytearray()
        self._domains, self._setups, self._makers, self._overrides = _Names(), _Names(), _Names(), _Names()
        self._columns = {
            name: array(kind)
            for name, kind in {
                "score": "d", **dict.fromkeys(COMPONENTS, "d"), "similarity": "d", "latency_ms": "d",
                "time_ms": "q", "record_ms": "q", "partition": "I", "offset": "Q", "steps": "I", "accepted": "B",
                "domain": "I", "setup": "I", "maker": "I", "overrides": "I",
                "document": "Q", "id": "Q", "nearest": "Q", "text": "Q",
            }.items()
        }  # fmt: skip

    def __len__(self) -> int:
        return len(self._columns["score"])

    def add(self, value: bytes | None, where: str, record_ms: int = 0) -> None:
        """Take one output document; one that cannot be read is counted, and the first ones are named by `where`.

        `record_ms` is the Kafka record's timestamp, for `keep_last`.
        """
        try:
            document = self._decoder.decode(_given(value))
            scoring = document.scoring
            if scoring.decision not in (ACCEPTED, REJECTED):
                raise msgspec.ValidationError("scoring.decision is neither accepted nor rejected")
            time_ms = (scoring.stream_time - _EPOCH) // timedelta(milliseconds=1)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.bad += 1
            if len(self.bad_shown) < BAD_SHOWN:
                self.bad_shown.append((clean(where), _advice(error)))
            return
        nearest = scoring.nearest
        row = {
            "score": scoring.score,
            **{name: getattr(scoring.components, name) for name in COMPONENTS},
            "similarity": np.nan if nearest is None else nearest.similarity,
            "latency_ms": sum(step.latency_ms for step in document.steps),
            "time_ms": time_ms,
            "record_ms": record_ms,
            "partition": scoring.source.partition,
            "offset": scoring.source.offset,
            "steps": len(document.steps),
            "accepted": scoring.decision == ACCEPTED,
            "domain": self._domains.code(clean(document.metadata.task_domain)),
            "setup": self._setups.code((clean(scoring.profile), scoring.threshold, scoring.weights)),
            "maker": self._makers.code((scoring.embedder, clean(scoring.worker_version))),
            "overrides": self._overrides.code(tuple(clean(name) for name in scoring.overrides)),
            "document": _hash(_given(value)),
            "id": _hash(document.id[:CACHED_ID_LENGTH].encode()),
            "nearest": 0 if nearest is None else _hash(nearest.id.encode()),
            "text": len(self._texts),
        }
        for name, cell in row.items():
            self._columns[name].append(cell)
        objective = "" if self.hide_texts else clean(document.task.objective)
        self._texts += f"{clean(document.id)}\0{objective}\0".encode()

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return one column, without a copy."""
        column = self._columns[name]
        return np.frombuffer(column, dtype=np.dtype(column.typecode))

    def text(self, row: int) -> tuple[str, str]:
        """Return id and objective of one trace, cut and cleaned."""
        start = self._columns["text"][row]
        middle = self._texts.index(0, start)
        end = self._texts.index(0, middle + 1)
        return self._texts[start:middle].decode(), self._texts[middle + 1 : end].decode()

    def names(self, column: str) -> list[Any]:
        """Return the distinct values behind a column of numbers."""
        return {
            "domain": self._domains, "setup": self._setups, "maker": self._makers, "overrides": self._overrides,
        }[column].values()  # fmt: skip


@dataclass(frozen=True, slots=True)
class Example:
    """One trace, as the report shows it. Times in ms; `similarity` None: nothing to compare with."""

    id: str
    objective: str
    domain: str
    profile: str
    score: float
    threshold: float
    accepted: bool
    components: tuple[float, ...]
    overrides: tuple[str, ...]
    similarity: float | None
    steps: int
    latency_ms: float
    time_ms: int


@dataclass(frozen=True, slots=True)
class Group:
    """Traces of one domain or profile.

    `curve`: share of them that reaches each threshold of CURVE; `passing`: of THRESHOLDS.
    `cutoffs`: the greatest threshold that lets at least each of SHARES pass.
    """

    name: str
    profile: str
    count: int
    accepted: int
    quartiles: tuple[float, float, float]
    histogram: tuple[int, ...]
    curve: tuple[float, ...]
    passing: tuple[float, ...]
    cutoffs: tuple[float, ...]
    threshold: float | None = None


@dataclass(frozen=True, slots=True)
class Profile:
    """One weights' profile: `threshold` and `weights` are those of its last trace, `setups` how many it had.

    `means`: of the components. `shares`: of the weighted sum. `spread`: share of the weighted sum's variance, by the
    covariance of each weighted component with it; they sum to 1, and one can be negative. None: all sums are equal.
    """

    group: Group
    threshold: float
    weights: tuple[float, ...]
    setups: int
    means: tuple[float, ...]
    shares: tuple[float, ...]
    spread: tuple[float, ...] | None
    above: list[Example]
    below: list[Example]


@dataclass(frozen=True, slots=True)
class Moment:
    """Traces that follow each other in stream time. Novelty's 10th, 50th and 90th percentile; share accepted."""

    time_ms: int
    count: int
    novelty: tuple[float, float, float]
    accepted: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """Traces that hang together by near neighbours. `similarity`: median of those links."""

    size: int
    accepted: int
    similarity: float
    first_ms: int
    last_ms: int
    examples: list[Example]


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything that a report shows, in the order in which it shows it."""

    total: Group
    first_ms: int
    last_ms: int
    partitions: int
    repeated: int
    bad: int
    bad_shown: list[tuple[str, str]]
    makers: list[tuple[EmbedderIdentity | None, str, int]]
    profiles: list[Profile]
    domains: list[Group]
    other_domains: int
    components: dict[str, tuple[int, ...]]
    compared: int
    overrides: list[tuple[str, int, int]]
    moments: list[Moment]
    limit: float
    near_duplicates: int
    near_duplicates_accepted: int
    cluster_count: int
    clustered: int
    clusters: list[Cluster]
    longest: list[Example]
    timed: int
    slowest: list[Example]
    texts_hidden: bool = field(default=False)


def summarize(traces: Traces, similarity: float = 0.9, last: int | None = None, since_ms: int = 0) -> Summary:
    """Return the numbers of all traces; of those with `record_ms` from `since_ms` on and of the `last` of these.

    `similarity` is the least cosine similarity of near-duplicates. Raises EmptyReport.
    """
    if not len(traces):
        raise EmptyReport(_nothing(traces))
    # 1. Documents that came twice (a worker that delivers at least once repeats its outputs to the byte) count once.
    _, first = np.unique(traces.column("document"), return_index=True)
    kept = np.sort(first)
    repeated = len(traces) - len(kept)
    # 2. The last ones only, where asked for.
    record_ms = traces.column("record_ms")
    kept = kept[record_ms[kept] >= since_ms]
    if last is not None:
        kept = np.sort(kept[np.argsort(record_ms[kept], kind="stable")][-last:])
    if not len(kept):
        raise EmptyReport(f"none of {len(traces)} traces lies in the time that is asked for")
    # 3. Stream-time order; within a partition that is the order of scoring.
    keys = [traces.column(name)[kept] for name in ("offset", "partition", "time_ms")]
    rows = kept[np.lexsort(keys)]
    return _Summarizer(traces, rows, similarity).summary(repeated)


class _Summarizer:
    """The parts of a summary, all over the same rows (in stream-time order)."""

    def __init__(self, traces: Traces, rows: _Rows, similarity: float) -> None:
        self._traces, self._limit = traces, similarity
        self._rows = rows
        self._score: _Floats = self._of("score")
        self._accepted = self._of("accepted").astype(bool)
        self._setups = traces.names("setup")
        profiles = _Names()
        of_setup = np.array([profiles.code(name) for name, _, _ in self._setups], dtype=np.intp)
        self._profiles, self._profile = profiles.values(), of_setup[self._of("setup")]

    def _of(self, name: str) -> npt.NDArray[Any]:
        return self._traces.column(name)[self._rows]

    def summary(self, repeated: int) -> Summary:
        times, similarity = self._of("time_ms"), self._of("similarity")
        near = similarity >= self._limit
        domains, others = self._domains()
        clusters = self._clusters(near)
        latency, steps = self._of("latency_ms"), self._of("steps")
        everything = np.arange(len(self._rows))
        return Summary(
            total=self._group("all", "", everything),
            first_ms=int(times[0]),
            last_ms=int(times[-1]),
            partitions=len(np.unique(self._of("partition"))),
            repeated=repeated,
            bad=self._traces.bad,
            bad_shown=self._traces.bad_shown,
            makers=[(*self._traces.names("maker")[code], n) for code, n in _counts(self._of("maker"))],
            profiles=[self._profile_of(int(code)) for code, _ in _counts(self._profile)],
            domains=domains,
            other_domains=others,
            components={name: _histogram(self._of(name)) for name in COMPONENTS},
            compared=int(np.count_nonzero(~np.isnan(similarity))),
            overrides=self._overrides(),
            moments=self._moments(),
            limit=self._limit,
            near_duplicates=int(np.count_nonzero(near)),
            near_duplicates_accepted=int(np.count_nonzero(near & self._accepted)),
            cluster_count=len(clusters),
            clustered=sum(len(members) for members, _ in clusters),
            clusters=[self._cluster(members, links) for members, links in clusters[:CLUSTERS]],
            longest=self._examples(np.argsort(-steps.astype(np.int64), kind="stable")[:EXTREMES]),
            timed=int(np.count_nonzero(latency > 0)),
            slowest=self._examples(np.argsort(-latency, kind="stable")[:EXTREMES][: np.count_nonzero(latency > 0)]),
            texts_hidden=self._traces.hide_texts,
        )

    def _group(self, name: str, profile: str, at: _Rows, threshold: float | None = None) -> Group:
        scores = np.sort(self._score[at])
        low, middle, high = np.quantile(scores, (0.25, 0.5, 0.75))
        return Group(
            name=name,
            profile=profile,
            count=len(at),
            accepted=int(np.count_nonzero(self._accepted[at])),
            quartiles=(float(low), float(middle), float(high)),
            histogram=_histogram(scores),
            curve=_passing(scores, CURVE),
            passing=_passing(scores, THRESHOLDS),
            cutoffs=_cutoffs(scores),
            threshold=threshold,
        )

    def _last_setup(self, at: _Rows) -> tuple[str, float, Weights]:
        found: tuple[str, float, Weights] = self._setups[int(self._of("setup")[at[-1]])]
        return found

    def _profile_of(self, code: int) -> Profile:
        at = np.flatnonzero(self._profile == code)
        name, threshold, weights = self._last_setup(at)
        of_setup = np.array([[getattr(w, c) for c in COMPONENTS] for _, _, w in self._setups])
        values = np.column_stack([self._of(c)[at] for c in COMPONENTS])
        parts = values * of_setup[self._of("setup")[at]]
        sums = parts.sum(axis=1)
        variance = float(np.var(sums))
        spread = ((parts - parts.mean(axis=0)) * (sums - sums.mean())[:, None]).mean(axis=0)
        distance = np.abs(self._score[at] - threshold)
        near = at[np.argsort(distance, kind="stable")]
        reaches = self._score[near] >= threshold
        above, below = near[reaches][:EXAMPLES], near[~reaches][:EXAMPLES]
        return Profile(
            group=self._group(name, name, at, threshold),
            threshold=threshold,
            weights=tuple(getattr(weights, c) for c in COMPONENTS),
            setups=len(np.unique(self._of("setup")[at])),
            means=_floats(values.mean(axis=0)),
            shares=_floats(parts.mean(axis=0) / sums.mean()) if sums.mean() > 0 else (0.0,) * len(COMPONENTS),
            spread=_floats(spread / variance) if variance > 1e-18 else None,
            above=self._examples(above[np.argsort(-self._score[above], kind="stable")]),
            below=self._examples(below[np.argsort(-self._score[below], kind="stable")]),
        )

    def _domains(self) -> tuple[list[Group], int]:
        """Return the largest domains, the rest as one group at the end, and how many are in that."""
        codes = self._of("domain")
        counts = _counts(codes)
        groups = []
        for code, _ in counts[:DOMAINS_SHOWN]:
            at = np.flatnonzero(codes == code)
            profile, threshold, _ = self._last_setup(at)
            groups.append(self._group(self._traces.names("domain")[code], profile, at, threshold))
        rest = [code for code, _ in counts[DOMAINS_SHOWN:]]
        if rest:
            groups.append(self._group(f"{len(rest)} others", "", np.flatnonzero(np.isin(codes, rest))))
        return groups, len(rest)

    def _overrides(self) -> list[tuple[str, int, int]]:
        """Return (rule, traces, accepted of them), most frequent first."""
        codes = self._of("overrides")
        found: dict[str, tuple[int, int]] = {}
        for code, rules in enumerate(self._traces.names("overrides")):
            at = codes == code
            for rule in set(rules):
                count, accepted = found.get(rule, (0, 0))
                found[rule] = (count + int(at.sum()), accepted + int((at & self._accepted).sum()))
        result = [(rule, count, accepted) for rule, (count, accepted) in found.items() if count]
        return sorted(result, key=lambda item: (-item[1], item[0]))

    def _moments(self) -> list[Moment]:
        """Cut the traces into runs of (nearly) the same length."""
        count = len(self._rows)
        runs = np.array_split(np.arange(count), max(1, min(TIME_BINS, count // MIN_IN_BIN)))
        novelty, times = self._of("novelty"), self._of("time_ms")
        result = []
        for run in runs:
            low, middle, high = np.quantile(novelty[run], (0.1, 0.5, 0.9))
            share = float(self._accepted[run].mean())
            result.append(Moment(int(times[run[0]]), len(run), (float(low), float(middle), float(high)), share))
        return result

    def _clusters(self, near: npt.NDArray[np.bool_]) -> list[tuple[_Rows, _Floats]]:
        """Return (traces, similarities of their links) of each cluster of two or more, largest first.

        Nodes are ids: a neighbour that is not among the traces still holds its followers together.
        """
        ids = self._of("id")
        nodes, ends = np.unique(np.concatenate([ids[near], self._of("nearest")[near]]), return_inverse=True)
        parents = list(range(len(nodes)))

        def root(node: int) -> int:
            while parents[node] != node:
                parents[node] = parents[parents[node]]
                node = parents[node]
            return node

        half = len(ends) // 2
        for one, other in zip(ends[:half].tolist(), ends[half:].tolist(), strict=True):
            a, b = root(one), root(other)
            parents[max(a, b)] = min(a, b)
        members = np.flatnonzero(np.isin(ids, nodes))
        roots = np.array([root(node) for node in np.searchsorted(nodes, ids[members]).tolist()], dtype=np.intp)
        order = np.argsort(roots, kind="stable")
        members, roots = members[order], roots[order]
        similarity = self._of("similarity")
        parts = np.split(members, np.flatnonzero(np.diff(roots)) + 1)
        found = [(part, similarity[part[near[part]]]) for part in parts if len(part) >= 2]
        return sorted(found, key=lambda item: (-len(item[0]), int(item[0][0])))

    def _cluster(self, members: _Rows, links: _Floats) -> Cluster:
        times = self._of("time_ms")[members]
        return Cluster(
            size=len(members),
            accepted=int(np.count_nonzero(self._accepted[members])),
            similarity=float(np.median(links)),
            first_ms=int(times[0]),
            last_ms=int(times[-1]),
            examples=self._examples(members[:EXAMPLES]),
        )

    def _examples(self, at: _Rows) -> list[Example]:
        return [self._example(int(self._rows[position])) for position in at]

    def _example(self, row: int) -> Example:
        def cell(name: str) -> Any:
            return self._traces.column(name)[row].item()

        identity, objective = self._traces.text(row)
        profile, threshold, _ = self._setups[cell("setup")]
        similarity = cell("similarity")
        return Example(
            id=identity,
            objective=objective,
            domain=self._traces.names("domain")[cell("domain")],
            profile=profile,
            score=cell("score"),
            threshold=threshold,
            accepted=bool(cell("accepted")),
            components=tuple(cell(name) for name in COMPONENTS),
            overrides=self._traces.names("overrides")[cell("overrides")],
            similarity=None if np.isnan(similarity) else similarity,
            steps=cell("steps"),
            latency_ms=cell("latency_ms"),
            time_ms=cell("time_ms"),
        )


_BLANKS: Final = dict.fromkeys(map(ord, "\t\n\r"), " ")


def clean(text: str) -> str:
    """Return a text that is safe to show: cut, and without characters that control terminals, markup or direction."""
    shown = text if len(text) <= TEXT_LENGTH else text[: TEXT_LENGTH - 1] + "…"
    if shown.isascii() and shown.isprintable():
        return shown
    return terminal.clean(shown.translate(_BLANKS))


def _hash(data: bytes) -> int:
    # 64 bits: of a million values two are equal with a probability of 3e-8.
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _given(value: bytes | None) -> bytes:
    if not value:
        raise msgspec.DecodeError("it has no value")
    return value


def _advice(error: Exception) -> str:
    if "`scoring`" in str(error) and "missing" in str(error):
        return "no scoring object: score it first (kp-worker score)"
    return clean(str(error))


def _nothing(traces: Traces) -> str:
    if not traces.bad:
        return "no documents"
    where, reason = traces.bad_shown[0]
    return f"none of {traces.bad} documents can be read; {where}: {reason}"


def _counts(codes: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """Return (code, how often), most frequent first, then in the order of first appearance."""
    values, first, counts = np.unique(codes, return_index=True, return_counts=True)
    order = np.lexsort((first, -counts))
    return [(int(values[i]), int(counts[i])) for i in order]


def _histogram(values: _Floats) -> tuple[int, ...]:
    """Count values in bars of 1 / SCORE_BINS; what lies outside of 0..1 (novelty can) goes to the outermost."""
    bars = np.clip(np.floor(values * SCORE_BINS + 1e-9).astype(np.intp), 0, SCORE_BINS - 1)
    return tuple(int(count) for count in np.bincount(bars, minlength=SCORE_BINS))


def _passing(ordered: _Floats, thresholds: Sequence[float]) -> tuple[float, ...]:
    return _floats((len(ordered) - np.searchsorted(ordered, thresholds, side="left")) / len(ordered))


def _cutoffs(ordered: _Floats) -> tuple[float, ...]:
    return tuple(float(ordered[len(ordered) - math.ceil(share * len(ordered))]) for share in SHARES)


def _floats(values: npt.ArrayLike) -> tuple[float, ...]:
    return tuple(float(value) for value in np.asarray(values))

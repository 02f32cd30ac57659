"""The numbers of a report: columns of scored traces in, one `Summary` out.

They do not depend on the order in which documents come: they are put in stream-time order first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from worker.commands.report.columns import COMPONENTS, Traces
from worker.commands.shared.scored import DistinctValues, NoDocuments, Rows, counts_of
from worker.commands.shared.shown import is_cut, shown_name
from worker.commands.shared.target_share import accepts, share_cutoff, share_threshold, thresholds_to_paste
from worker.core.domains import DomainWithoutProfile, UnusedProfile, unused_profiles, without_profile
from worker.core.records import EmbedderIdentity
from worker.core.scoring import PROFILES, Weights

THRESHOLDS: Final = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
"""Thresholds of the table, besides the current one; the curve has all hundredths."""

CURVE: Final = tuple(step / 100 for step in range(101))

SHARES: Final = (0.05, 0.1, 0.2, 0.3, 0.5)

PASTED_SHARE: Final = SHARES[1]
"""The share that the config below the table accepts of each domain."""

SCORE_BINS: Final = 40
"""Bars of 0.025, so that the usual thresholds fall between two bars."""

TIME_BINS: Final = 60

MIN_IN_BIN: Final = 25
"""Traces that one point of the novelty curve needs at least: a median of fewer only jumps."""

DOMAINS_SHOWN: Final = 20
"""Domains are free text of the agents, so there can be as many as traces: the rest becomes one row."""

EXAMPLES, EXTREMES, CLUSTERS = 3, 10, 10
"""How many the page shows: traces beside a threshold or of a cluster, longest and slowest traces, clusters."""

_Floats = npt.NDArray[np.float64]


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

    `curve`: share of them that reaches each threshold of CURVE; `passing`: of Summary.thresholds.
    `cutoffs`: the greatest threshold that lets at least each of SHARES pass. `threshold`: the current one; None where
    the traces have several.
    """

    name: str
    profile: str
    count: int
    accepted: int
    quartiles: tuple[float, ...]
    histogram: tuple[int, ...]
    curve: tuple[float, ...]
    passing: tuple[float, ...]
    cutoffs: tuple[float, ...]
    threshold: float | None = None


@dataclass(frozen=True, slots=True)
class ProfileNumbers:
    """One profile of weights: `threshold` and `weights` are those of its last trace, `setups` how many it had.

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
    novelty: tuple[float, ...]
    accepted: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """Traces that are linked by their nearest neighbours. `similarity`: median of those links."""

    size: int
    accepted: int
    similarity: float
    first_ms: int
    last_ms: int
    examples: list[Example]


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything that a report shows, in the order in which it shows it.

    `config`: thresholds that accept PASTED_SHARE of each of the domains, as lines of a config file.
    `thresholds`: THRESHOLDS, and the current one where all profiles have the same.
    `screened`: traces that the screen has looked at; `marked`: those in which a rule matched.
    """

    total: Group
    thresholds: tuple[float, ...]
    first_ms: int
    last_ms: int
    partitions: int
    repeated: int
    bad: int
    bad_shown: list[tuple[str, str]]
    makers: list[tuple[EmbedderIdentity | None, str, int]]
    profiles: list[ProfileNumbers]
    domains: list[Group]
    other_domains: int
    config: str
    without_profile: list[DomainWithoutProfile]
    unused_profiles: list[UnusedProfile]
    components: dict[str, tuple[int, ...]]
    compared: int
    overrides: list[tuple[str, int, int]]
    screened: int
    marked: int
    rules: list[tuple[str, int, int]]
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
    texts_hidden: bool


def summarize(
    traces: Traces,
    similarity: float = 0.9,
    last: int | None = None,
    since_ms: int = 0,
    profiles: Collection[str] = tuple(PROFILES),
) -> Summary:
    """Return the numbers of all traces; of those with `record_ms` from `since_ms` on and of the `last` of these.

    `similarity` is the least cosine similarity of near-duplicates, `profiles` are the names of those that the settings
    have. Raises NoDocuments.
    """
    if not len(traces):
        raise NoDocuments(_nothing(traces))
    rows, repeated = traces.rows.counted(last, since_ms)
    return _Summarizer(traces, rows, similarity, profiles).summary(repeated)


def _nothing(traces: Traces) -> str:
    if not traces.unreadable.count:
        return "no documents"
    where, reason = traces.unreadable.shown[0]
    return f"none of {traces.unreadable.count} documents can be read; {where}: {reason}"


class _Summarizer:
    """The parts of a summary, all over the same rows (in stream-time order)."""

    def __init__(self, traces: Traces, rows: Rows, similarity: float, known: Collection[str]) -> None:
        self._traces, self._limit, self._known = traces, similarity, known
        self._rows = rows
        self._score: _Floats = self._of("score")
        self._accepted = self._of("accepted").astype(bool)
        self._setups = traces.names("setup")
        profiles = DistinctValues()
        of_setup = np.array([profiles.code(name) for name, _, _ in self._setups], dtype=np.intp)
        self._profiles, self._profile = profiles.values(), of_setup[self._of("setup")]
        current = {
            self._last_setup(np.flatnonzero(self._profile == code))[1] for code in np.unique(self._profile).tolist()
        }
        self._threshold = current.pop() if len(current) == 1 else None
        others = [t for t in THRESHOLDS if self._threshold is None or abs(t - self._threshold) > 1e-9]
        self._thresholds = tuple(sorted([*others, *([] if self._threshold is None else [self._threshold])]))

    def _of(self, name: str) -> npt.NDArray[Any]:
        return self._traces.rows.column(name)[self._rows]

    def summary(self, repeated: int) -> Summary:
        times, similarity = self._of("time_ms"), self._of("similarity")
        near = similarity >= self._limit
        domains, others = self._domains()
        clusters = _clusters_of(self._of("id"), self._of("nearest"), similarity, near)
        latency, steps = self._of("latency_ms"), self._of("steps")
        names = self._traces.names("domain")
        rules = self._traces.names("screen")
        screened = np.array([found is not None for found in rules])[self._of("screen")]
        marked = np.array([bool(found) for found in rules])[self._of("screen")]
        return Summary(
            total=self._group("all", "", np.arange(len(self._rows)), self._threshold),
            thresholds=self._thresholds,
            first_ms=int(times[0]),
            last_ms=int(times[-1]),
            partitions=len(np.unique(self._of("partition"))),
            repeated=repeated,
            bad=self._traces.unreadable.count,
            bad_shown=self._traces.unreadable.shown,
            makers=[(*self._traces.names("maker")[code], n) for code, n in counts_of(self._of("maker"))],
            profiles=[self._profile_of(int(code)) for code, _ in counts_of(self._profile)],
            domains=domains,
            other_domains=others,
            config=self._config(),
            without_profile=self._without_profile(),
            unused_profiles=unused_profiles(self._known, {names[code] for code in np.unique(self._of("domain"))}),
            components={name: _histogram(self._of(name)) for name in COMPONENTS},
            compared=int(np.count_nonzero(~np.isnan(similarity))),
            overrides=self._named("overrides"),
            screened=int(np.count_nonzero(screened)),
            marked=int(np.count_nonzero(marked)),
            rules=self._named("screen"),
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

    def _group(self, name: str, profile: str, at: Rows, threshold: float | None = None) -> Group:
        scores = np.sort(self._score[at])
        return Group(
            name=name,
            profile=profile,
            count=len(at),
            accepted=int(np.count_nonzero(self._accepted[at])),
            quartiles=_floats(np.quantile(scores, (0.25, 0.5, 0.75))),
            histogram=_histogram(scores),
            curve=_passing(scores, CURVE),
            passing=_passing(scores, self._thresholds),
            cutoffs=tuple(share_cutoff(scores, Fraction(str(share))) for share in SHARES),
            threshold=threshold,
        )

    def _last_setup(self, at: Rows) -> tuple[str, float, Weights]:
        found: tuple[str, float, Weights] = self._setups[int(self._of("setup")[at[-1]])]
        return found

    def _profile_of(self, code: int) -> ProfileNumbers:
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
        return ProfileNumbers(
            group=self._group(shown_name(name), shown_name(name), at, threshold),
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
        counts = counts_of(codes)
        groups = []
        for code, _ in counts[:DOMAINS_SHOWN]:
            at = np.flatnonzero(codes == code)
            profile, threshold, _ = self._last_setup(at)
            name = shown_name(self._traces.names("domain")[code])
            groups.append(self._group(name, shown_name(profile), at, threshold))
        rest = [code for code, _ in counts[DOMAINS_SHOWN:]]
        if rest:
            groups.append(self._group(f"{len(rest)} others", "", np.flatnonzero(np.isin(codes, rest)), self._threshold))
        return groups, len(rest)

    def _config(self) -> str:
        """Return thresholds for the largest domains; a name that is cut is no name of a profile."""
        codes, names = self._of("domain"), self._traces.names("domain")
        largest = [code for code, _ in counts_of(codes)[:DOMAINS_SHOWN] if not is_cut(names[code])]
        thresholds, comments = {}, {}
        for code in largest:
            scores = self._score[codes == code]
            found = share_threshold(scores, Fraction(str(PASTED_SHARE)))
            thresholds[names[code]], comments[names[code]] = found.threshold, accepts(found.accepted, len(scores))
        return thresholds_to_paste(thresholds, comments)

    def _without_profile(self) -> list[DomainWithoutProfile]:
        """Return the domains whose last trace did not take a profile of their own."""
        codes, names = self._of("domain")[::-1], self._traces.names("domain")
        domains, last, counts = np.unique(codes, return_index=True, return_counts=True)
        taken = self._profile[::-1][last]
        found = {
            names[code]: int(count)
            for code, profile, count in zip(domains, taken, counts, strict=True)
            if names[code] != self._profiles[profile]
        }
        return without_profile(found, {*PROFILES, *self._known, *self._profiles})

    def _named(self, column: str) -> list[tuple[str, int, int]]:
        """Return (override or rule, traces, accepted of them), most frequent first."""
        codes = self._of(column)
        found: dict[str, tuple[int, int]] = {}
        for code, names in enumerate(self._traces.names(column)):
            at = codes == code
            for name in set(names or ()):
                count, accepted = found.get(name, (0, 0))
                found[name] = (count + int(at.sum()), accepted + int((at & self._accepted).sum()))
        result = [(name, count, accepted) for name, (count, accepted) in found.items() if count]
        return sorted(result, key=lambda item: (-item[1], item[0]))

    def _moments(self) -> list[Moment]:
        """Cut the traces into runs of (nearly) the same length."""
        count = len(self._rows)
        runs = np.array_split(np.arange(count), max(1, min(TIME_BINS, count // MIN_IN_BIN)))
        novelty, times = self._of("novelty"), self._of("time_ms")
        result = []
        for run in runs:
            quantiles = _floats(np.quantile(novelty[run], (0.1, 0.5, 0.9)))
            result.append(Moment(int(times[run[0]]), len(run), quantiles, float(self._accepted[run].mean())))
        return result

    def _cluster(self, members: Rows, links: _Floats) -> Cluster:
        times = self._of("time_ms")[members]
        return Cluster(
            size=len(members),
            accepted=int(np.count_nonzero(self._accepted[members])),
            similarity=float(np.median(links)),
            first_ms=int(times[0]),
            last_ms=int(times[-1]),
            examples=self._examples(members[:EXAMPLES]),
        )

    def _examples(self, at: Rows) -> list[Example]:
        return [self._example(int(self._rows[position])) for position in at]

    def _example(self, row: int) -> Example:
        def cell(name: str) -> Any:
            return self._traces.rows.column(name)[row].item()

        identity, objective = self._traces.text(row)
        profile, threshold, _ = self._setups[cell("setup")]
        similarity = cell("similarity")
        return Example(
            id=identity,
            objective=objective,
            domain=shown_name(self._traces.names("domain")[cell("domain")]),
            profile=shown_name(profile),
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


def _clusters_of(
    ids: npt.NDArray[Any], nearest: npt.NDArray[Any], similarity: _Floats, near: npt.NDArray[np.bool_]
) -> list[tuple[Rows, _Floats]]:
    """Return (traces, similarities of their links) of each cluster of two or more, largest first.

    `ids` and `nearest`: hashes of each trace's id and its neighbour's; `near`: whether the two are linked, shape (n,)
    each. Nodes are ids: a neighbour that is not among the traces still holds its followers together.
    """
    nodes, ends = np.unique(np.concatenate([ids[near], nearest[near]]), return_inverse=True)
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
    parts = np.split(members, np.flatnonzero(np.diff(roots)) + 1)
    found = [(part, similarity[part[near[part]]]) for part in parts if len(part) >= 2]
    return sorted(found, key=lambda item: (-len(item[0]), int(item[0][0])))


def _histogram(values: _Floats) -> tuple[int, ...]:
    """Count values in bars of 1 / SCORE_BINS; what lies outside of 0..1 (novelty can) goes to the outermost."""
    bars = np.clip(np.floor(values * SCORE_BINS + 1e-9).astype(np.intp), 0, SCORE_BINS - 1)
    return tuple(int(count) for count in np.bincount(bars, minlength=SCORE_BINS))


def _passing(ordered: _Floats, thresholds: Sequence[float]) -> tuple[float, ...]:
    return _floats((len(ordered) - np.searchsorted(ordered, thresholds, side="left")) / len(ordered))


def _floats(values: npt.ArrayLike) -> tuple[float, ...]:
    return tuple(float(value) for value in np.asarray(values))

"""The numbers of a report: scored documents in, one `Summary` out.

They do not depend on the order of the documents, which are sorted by stream time first.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from worker.commands.analysis.documents import (
    Rows,
    ScoredTraces,
    Table,
    bars,
    by_domain,
    counts_of,
    floats,
    hash64,
    unscored,
)
from worker.commands.shared.scored_document import DocumentScoring
from worker.commands.shared.shown import cut_text, is_cut, shown_name, shown_text
from worker.commands.shared.thresholds import accepts, share_cutoff, share_threshold, thresholds_to_paste
from worker.core.domains import DomainWithoutProfile, UnusedProfile, unused_profiles, without_profile
from worker.core.json_words import in_json_words
from worker.core.novelty import CACHED_ID_LENGTH
from worker.core.records import ACCEPTED, REJECTED, EmbedderIdentity
from worker.core.scoring import FORMULAS, PROFILES, Weights

THRESHOLDS: Final = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
"""Thresholds of the table, besides the current one; the curve has all hundredths."""

CURVE: Final = tuple(step / 100 for step in range(101))

SHARES: Final = (0.05, 0.1, 0.2, 0.3, 0.5)

PASTED_SHARE: Final = SHARES[1]
"""The share of each domain that the config below the table accepts."""

SCORE_BINS: Final = 40
"""Bars of 0.025, so that the usual thresholds fall between two bars."""

TIME_BINS: Final = 60

MIN_IN_BIN: Final = 25
"""Minimum number of traces for one point of the novelty curve: a median of fewer is too noisy."""

EXAMPLES, EXTREMES, CLUSTERS = 3, 10, 10
"""How many are shown: traces near a threshold or in a cluster, longest and slowest traces, clusters."""

COMPONENTS: Final = tuple(FORMULAS)


class _DocumentMetadata(Struct):
    task_domain: str


class _DocumentTask(Struct):
    objective: str


class _DocumentStep(Struct):
    latency_ms: float = 0.0


class _Document(Struct):
    """The fields of an output document that a report reads (schemas/scored-trace.schema.json)."""

    id: str
    metadata: _DocumentMetadata
    task: _DocumentTask
    steps: list[_DocumentStep]
    scoring: DocumentScoring


class Traces(ScoredTraces):
    """Scored traces for a report: about 150 bytes each, plus id and objective, both cut."""

    cannot = "read"

    def __init__(self, *, hide_texts: bool = False) -> None:
        super().__init__(
            {
                "score": "f8", **dict.fromkeys(COMPONENTS, "f8"), "similarity": "f8", "latency_ms": "f8", "steps": "u4",
                "accepted": "?", "domain": "u4", "setup": "u4", "maker": "u4", "overrides": "u4", "screen": "u4",
                "id": "u8", "nearest": "u8",
            }
        )  # fmt: skip
        self.hide_texts = hide_texts
        self._decoder = msgspec.json.Decoder(_Document)

    def add(self, value: bytes | None, where: str, record_ms: int = 0) -> None:
        """Take one output document (ScoredTraces.add)."""
        try:
            if not value:
                raise msgspec.DecodeError("it has no value")
            document = self._decoder.decode(value)
            if document.scoring.decision not in (ACCEPTED, REJECTED):
                raise msgspec.ValidationError("scoring.decision is neither accepted nor rejected")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.unreadable.add(where, _advice(error))
            return
        objective = "" if self.hide_texts else shown_text(document.task.objective)
        text = f"{shown_text(document.id)}\0{objective}"
        self._keep(value, document.scoring, record_ms, text, self._cells(document))

    def _cells(self, document: _Document) -> dict[str, Any]:
        scoring, nearest = document.scoring, document.scoring.nearest
        screened = None if scoring.screen is None else tuple(map(shown_text, scoring.screen.rules))
        return {
            "score": scoring.score,
            **{name: getattr(scoring.components, name) for name in COMPONENTS},
            "similarity": np.nan if nearest is None else nearest.similarity,
            "latency_ms": sum(step.latency_ms for step in document.steps),
            "steps": len(document.steps),
            "accepted": scoring.decision == ACCEPTED,
            # Names unchanged: a domain and its near miss may look alike when shown.
            "domain": self.code("domain", cut_text(document.metadata.task_domain)),
            "setup": self.code("setup", (cut_text(scoring.profile), scoring.threshold, scoring.weights)),
            "maker": self.code("maker", (scoring.embedder, shown_text(scoring.worker_version))),
            "overrides": self.code("overrides", tuple(map(shown_text, scoring.overrides))),
            "screen": self.code("screen", screened),
            "id": hash64(document.id[:CACHED_ID_LENGTH].encode()),
            "nearest": 0 if nearest is None else hash64(nearest.id.encode()),
        }


def _advice(error: Exception) -> str:
    words = "nested too deep" if isinstance(error, RecursionError) else in_json_words(str(error))
    return unscored(error) or words


_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Example:
    """One trace, as shown in the report."""

    id: str
    objective: str
    domain: str
    profile: str
    score: float
    threshold: float
    accepted: bool
    components: tuple[float, ...]
    overrides: tuple[str, ...]
    similarity: float | None  # None: nothing to compare with
    steps: int
    latency_ms: float
    time_ms: int  # stream time


@dataclass(frozen=True, slots=True)
class Group:
    """Traces of one domain or profile."""

    name: str
    profile: str
    count: int
    accepted: int
    quartiles: tuple[float, ...]
    histogram: tuple[int, ...]
    curve: tuple[float, ...]  # share that reaches each threshold of CURVE
    passing: tuple[float, ...]  # share that reaches each of Summary.thresholds
    cutoffs: tuple[tuple[float, float | None], ...]
    """For each of SHARES: the greatest threshold that lets at least this share pass, and the share that passes if equal
    scores make it more, else None."""
    threshold: float | None = None  # the current one; None if the traces have several


@dataclass(frozen=True, slots=True)
class ProfileNumbers:
    """One profile of weights."""

    group: Group
    threshold: float  # of its last trace
    weights: tuple[float, ...]  # of its last trace
    setups: int  # how many pairs of weights and threshold it had
    means: tuple[float, ...]  # of the components
    shares: tuple[float, ...]  # of the components in the weighted sum
    spread: tuple[float, ...] | None
    """Share of each component in the variance of the weighted sum, by the covariance of both; they sum to 1, and one
    may be negative. None: all sums are equal."""
    above: list[Example]
    below: list[Example]


@dataclass(frozen=True, slots=True)
class Moment:
    """Consecutive traces in stream time."""

    time_ms: int
    count: int
    novelty: tuple[float, ...]  # 10th, 50th and 90th percentile
    accepted: float  # share


@dataclass(frozen=True, slots=True)
class Cluster:
    """Traces linked by their nearest neighbours."""

    size: int
    accepted: int
    similarity: float  # median of the links
    first_ms: int
    last_ms: int
    examples: list[Example]


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything that a report shows, in this order."""

    total: Group
    thresholds: tuple[float, ...]  # THRESHOLDS, and the current one if all profiles have the same
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
    config: str  # thresholds that accept PASTED_SHARE of each domain, as lines of a config file
    without_profile: list[DomainWithoutProfile]
    unused_profiles: list[UnusedProfile]
    components: dict[str, tuple[int, ...]]
    compared: int
    overrides: list[tuple[str, int, int]]
    screened: int  # traces that were screened
    marked: int  # those in which a rule matched
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

    @property
    def ties(self) -> bool:
        """Return whether ties anywhere make a cutoff accept more than its share."""
        groups = (*(profile.group for profile in self.profiles), *self.domains)
        return any(passing is not None for group in groups for _, passing in group.cutoffs)


def summarize(
    traces: Traces,
    similarity: float = 0.9,
    last: int | None = None,
    since_ms: int = 0,
    profiles: Collection[str] = tuple(PROFILES),
) -> Summary:
    """Return the numbers of the traces with `record_ms` from `since_ms` on, and of these only the `last` ones.

    `similarity`: the least cosine similarity of near-duplicates; `profiles`: the names of the profiles in the settings.
    Raises NoDocuments.
    """
    table, repeated = traces.counted(last, since_ms)
    return _Summarizer(traces, table, similarity, profiles).summary(repeated)


class _Summarizer:
    """Computes the parts of a summary, all over the same rows (in stream-time order)."""

    def __init__(self, traces: Traces, table: Table, similarity: float, known: Collection[str]) -> None:
        self._traces, self._limit, self._known = traces, similarity, known
        self._table, self._score, self._accepted = table, table["score"], table["accepted"]
        self._names, self._setups = traces.names("domain"), traces.names("setup")
        self._profiles = list(dict.fromkeys(name for name, _, _ in self._setups))
        of_setup = np.array([self._profiles.index(name) for name, _, _ in self._setups], dtype=np.intp)
        self._profile = of_setup[table["setup"]]
        current = {
            self._last_setup(np.flatnonzero(self._profile == code))[1] for code in np.unique(self._profile).tolist()
        }
        self._threshold = current.pop() if len(current) == 1 else None
        others = [t for t in THRESHOLDS if self._threshold is None or abs(t - self._threshold) > 1e-9]
        self._thresholds = tuple(sorted([*others, *([] if self._threshold is None else [self._threshold])]))

    def summary(self, repeated: int) -> Summary:
        times, similarity = self._table["time_ms"], self._table["similarity"]
        near = similarity >= self._limit
        domains, others = self._domains()
        clusters = _clusters_of(self._table["id"], self._table["nearest"], similarity, near)
        latency, steps = self._table["latency_ms"], self._table["steps"]
        rules = self._traces.names("screen")
        screened = np.array([found is not None for found in rules])[self._table["screen"]]
        marked = np.array([bool(found) for found in rules])[self._table["screen"]]
        return Summary(
            total=self._group("all", "", np.arange(len(self._table)), self._threshold),
            thresholds=self._thresholds,
            first_ms=int(times[0]),
            last_ms=int(times[-1]),
            partitions=len(np.unique(self._table["partition"])),
            repeated=repeated,
            bad=self._traces.unreadable.count,
            bad_shown=self._traces.unreadable.shown,
            makers=[(*self._traces.names("maker")[code], n) for code, n in counts_of(self._table["maker"])],
            profiles=[self._profile_of(int(code)) for code, _ in counts_of(self._profile)],
            domains=domains,
            other_domains=others,
            config=self._config(),
            without_profile=self._without_profile(),
            unused_profiles=unused_profiles(
                self._known, {self._names[code] for code in np.unique(self._table["domain"])}
            ),
            components={name: bars(self._table[name], SCORE_BINS) for name in COMPONENTS},
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
            quartiles=floats(np.quantile(scores, (0.25, 0.5, 0.75))),
            histogram=bars(scores, SCORE_BINS),
            curve=_passing(scores, CURVE),
            passing=_passing(scores, self._thresholds),
            cutoffs=tuple(_cutoff(scores, Fraction(str(share))) for share in SHARES),
            threshold=threshold,
        )

    def _last_setup(self, at: Rows) -> tuple[str, float, Weights]:
        found: tuple[str, float, Weights] = self._setups[int(self._table["setup"][at[-1]])]
        return found

    def _profile_of(self, code: int) -> ProfileNumbers:
        at = np.flatnonzero(self._profile == code)
        name, threshold, weights = self._last_setup(at)
        of_setup = np.array([[getattr(w, c) for c in COMPONENTS] for _, _, w in self._setups])
        values = np.column_stack([self._table[c][at] for c in COMPONENTS])
        parts = values * of_setup[self._table["setup"][at]]
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
            setups=len(np.unique(self._table["setup"][at])),
            means=floats(values.mean(axis=0)),
            shares=floats(parts.mean(axis=0) / sums.mean()) if sums.mean() > 0 else (0.0,) * len(COMPONENTS),
            spread=floats(spread / variance) if variance > 1e-18 else None,
            above=self._examples(above[np.argsort(-self._score[above], kind="stable")]),
            below=self._examples(below[np.argsort(-self._score[below], kind="stable")]),
        )

    def _domains(self) -> tuple[list[Group], int]:
        """Return the largest domains, all others as one last group, and how many these are."""
        largest, rest, others = by_domain(self._table["domain"])
        groups = []
        for code, at in largest:
            profile, threshold, _ = self._last_setup(at)
            groups.append(self._group(shown_name(self._names[code]), shown_name(profile), at, threshold))
        if rest:
            groups.append(self._group(f"{len(rest)} others", "", others, self._threshold))
        return groups, len(rest)

    def _config(self) -> str:
        """Return thresholds for the largest domains; a truncated name cannot name a profile."""
        found = {}
        for code, at in by_domain(self._table["domain"])[0]:
            if not is_cut(self._names[code]):
                it = share_threshold(self._score[at], Fraction(str(PASTED_SHARE)))
                found[self._names[code]] = it.threshold, accepts(it.accepted, len(at), it.wanted)
        return thresholds_to_paste(found)

    def _without_profile(self) -> list[DomainWithoutProfile]:
        """Return the domains whose last trace did not use a profile of the same name."""
        codes, names = self._table["domain"][::-1], self._names
        domains, last, counts = np.unique(codes, return_index=True, return_counts=True)
        taken = self._profile[::-1][last]
        found = {
            names[code]: int(count)
            for code, profile, count in zip(domains, taken, counts, strict=True)
            if names[code] != self._profiles[profile]
        }
        return without_profile(found, {*PROFILES, *self._known, *self._profiles})

    def _named(self, column: str) -> list[tuple[str, int, int]]:
        """Return (override or rule, traces, accepted ones), most frequent first."""
        codes = self._table[column]
        found: dict[str, tuple[int, int]] = {}
        for code, names in enumerate(self._traces.names(column)):
            at = codes == code
            for name in set(names or ()):
                count, accepted = found.get(name, (0, 0))
                found[name] = (count + int(at.sum()), accepted + int((at & self._accepted).sum()))
        result = [(name, count, accepted) for name, (count, accepted) in found.items() if count]
        return sorted(result, key=lambda item: (-item[1], item[0]))

    def _moments(self) -> list[Moment]:
        """Split the traces into runs of (nearly) equal length."""
        count = len(self._table)
        runs = np.array_split(np.arange(count), max(1, min(TIME_BINS, count // MIN_IN_BIN)))
        novelty, times = self._table["novelty"], self._table["time_ms"]
        result = []
        for run in runs:
            quantiles = floats(np.quantile(novelty[run], (0.1, 0.5, 0.9)))
            result.append(Moment(int(times[run[0]]), len(run), quantiles, float(self._accepted[run].mean())))
        return result

    def _cluster(self, members: Rows, links: _Floats) -> Cluster:
        times = self._table["time_ms"][members]
        return Cluster(
            size=len(members),
            accepted=int(np.count_nonzero(self._accepted[members])),
            similarity=float(np.median(links)),
            first_ms=int(times[0]),
            last_ms=int(times[-1]),
            examples=self._examples(members[:EXAMPLES]),
        )

    def _examples(self, at: Rows) -> list[Example]:
        return [self._example(self._table[position]) for position in at]

    def _example(self, row: np.void) -> Example:
        identity, objective = self._traces.texts[row["row"]].split("\0")
        profile, threshold, _ = self._setups[row["setup"]]
        return Example(
            id=identity,
            objective=objective,
            domain=shown_name(self._names[row["domain"]]),
            profile=shown_name(profile),
            score=float(row["score"]),
            threshold=threshold,
            accepted=bool(row["accepted"]),
            components=tuple(float(row[name]) for name in COMPONENTS),
            overrides=self._traces.names("overrides")[row["overrides"]],
            similarity=None if np.isnan(row["similarity"]) else float(row["similarity"]),
            steps=int(row["steps"]),
            latency_ms=float(row["latency_ms"]),
            time_ms=int(row["time_ms"]),
        )


def _cutoff(ordered: _Floats, share: Fraction) -> tuple[float, float | None]:
    """Return the cutoff for a share, and the share that reaches it if ties make that more."""
    cutoff = share_cutoff(ordered, share)
    (reaching,) = _passing(ordered, [cutoff])
    return cutoff, reaching if reaching * len(ordered) >= math.ceil(share * len(ordered)) + 0.5 else None


def _clusters_of(
    ids: npt.NDArray[Any], nearest: npt.NDArray[Any], similarity: _Floats, near: npt.NDArray[np.bool_]
) -> list[tuple[Rows, _Floats]]:
    """Return (traces, similarities of their links) of each cluster of two or more, largest first.

    `ids` and `nearest`: hashes of each trace's id and its neighbour's; `near`: whether the two are linked; shape (n,)
    each. Nodes are ids: a neighbour that is not among the traces still connects its followers.
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


def _passing(ordered: _Floats, thresholds: Sequence[float]) -> tuple[float, ...]:
    return floats((len(ordered) - np.searchsorted(ordered, thresholds, side="left")) / len(ordered))

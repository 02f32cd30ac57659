"""The numbers of `kp-worker report`: scored documents in, one `Report` out. Field names are those of --json.

Nothing is embedded: a document has its novelty, and no decision changes the novelty of a later trace.

With an outcome field, each run is scored by its agent's claim, never by the recorded outcome. A fractional outcome
counts as that share of a success. Intervals are 95 % bootstrap intervals over the tasks: they say nothing about other
agents.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from worker.commands.shared.console import CommandError
from worker.commands.shared.json_lines import value_at
from worker.commands.shared.placed_verdicts import Standings, same_share
from worker.commands.shared.shown import cut_text, fixed, is_cut, shown_text
from worker.commands.shared.thresholds import (
    FEW_TRACES,
    LEAST_TRACES,
    accepts,
    config_to_paste,
    share_interval,
    share_threshold,
    too_few,
)
from worker.config import Settings
from worker.core.documents import ReadScoring, ScoredDocument, rfc3339
from worker.core.novelty import CACHED_ID_LENGTH
from worker.core.records import ACCEPTED, REJECTED, EmbedderIdentity
from worker.core.scoring import (
    DEFAULT_PROFILE,
    NEUTRAL_NOVELTY,
    Components,
    DomainWithoutProfile,
    Profile,
    Score,
    UnusedProfile,
    Weights,
    arithmetic,
    score_trace,
    unused_profiles,
    weights_by_verdicts,
    without_profile,
)
from worker.core.terminal import number_of
from worker.core.trace import InvalidTrace, Limits, ReasoningTrace, parse_trace
from worker.core.track_record import TrackRecord
from worker.core.verdicts import issued_ms, unsigned_verdict

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.integer[Any]]
Table = npt.NDArray[np.void]
"""Rows with named columns: `table["score"]` is a column, `table[rows]` selects rows."""

THRESHOLDS: Final = tuple(step / 40 for step in range(41))
QUANTILES: Final = (0.1, 0.25, 0.5, 0.75, 0.9)
BINS: Final = 40
"""Bars of 0.025, so that the usual thresholds fall between two bars."""

NEAR: Final = 0.9
"""The least similarity of a near-duplicate."""

DOMAINS: Final = 20
"""Domains are free text of the agents, so there may be as many as traces: the others become one row."""

LEFT_OUT, EXAMPLES, CLUSTERS, CHANGES = 20, 3, 10, 1000
"""How many are named: skipped documents, traces on a side of a threshold or in a cluster, clusters, changes."""

CHANCE: Final = 0.5
"""The AUC of a figure without information."""

STATED: Final = 0.95
"""The confidence that every run claims: agents state a constant, usually about this one."""

WARM_UP: Final = 5
"""With simulated verdicts, the first fifth of an order is not measured, because few verdicts are known there."""

CONFIDENCE_BINS: Final = 10
"""Equal bins of confidence, for the calibration."""

FOLDS: Final = 5
"""Parts of the tasks: a threshold is chosen on four of them and measured on the fifth."""

DRAWS: Final = 500
"""Bootstrap samples: the ends of a 95 % interval then vary by less than a tenth of its width."""

TASK: Final = "x_task"
"""The field that names a run's task, if every run has it."""

_COMPONENTS: Final = tuple(Components.__dataclass_fields__)
_COLUMNS: Final = np.dtype(
    [("document", "u8"), ("row", "u4"), ("file", "u4"), ("record_ms", "i8"), ("time_ms", "i8"), ("partition", "u4"),
     ("offset", "u8"), ("domain", "u4"), ("setup_before", "u4"), ("setup", "u4"), ("score_before", "f8"),
     ("score", "f8"), ("accepted_before", "?"), ("accepted", "?"), *((name, "f8") for name in _COMPONENTS),
     ("overrides", "u4"), ("screen", "u4"), ("maker", "u4"), ("similarity", "f8"), ("id", "u8"), ("nearest", "u8")]
)  # fmt: skip
_ANY: Final = Limits(max_bytes=2**31, max_steps=2**31, max_depth=256)
"""The documents were accepted earlier, whatever the limits are now."""

_START: Final = datetime(2000, 1, 1, tzinfo=UTC)


class Setup(NamedTuple):
    """What a trace is judged by."""

    profile: str
    threshold: float
    weights: Weights


class Verdict(Struct, frozen=True):
    """One trace's score and decision, and the threshold behind it."""

    profile: str
    score: float
    threshold: float
    decision: str


class Trace(Struct, frozen=True):
    """One trace, before and after the change of settings; both are equal without one."""

    id: str
    objective: str
    domain: str
    partition: int  # of the source record
    offset: int
    before: Verdict
    after: Verdict
    components: tuple[float, ...]
    overrides: tuple[str, ...]


class Scores(Struct, frozen=True):
    """The scores of a group of traces."""

    profile: str | None  # of its last trace; None for several domains together
    threshold: float | None  # likewise, but the threshold of all profiles if they have the same
    accepted: int
    quantiles: tuple[float, ...]  # at QUANTILES
    reaching: tuple[float, ...]  # share that reaches each of THRESHOLDS
    histogram: tuple[int, ...]  # BINS counts from 0 to 1


class Domain(Struct, frozen=True):
    """A domain as it is and, where settings are tried, as it would be."""

    domain: str
    traces: int
    to_accepted: int  # traces whose decision becomes accepted
    to_rejected: int
    before: Scores
    after: Scores


class Border(Struct, frozen=True):
    """The traces nearest to a profile's threshold, the highest score first."""

    profile: str
    threshold: float
    above: list[Trace]
    below: list[Trace]


class Cluster(Struct, frozen=True):
    """Traces linked by their nearest neighbours."""

    traces: int
    accepted: int
    similarity: float  # median of the links
    span_ms: int
    first: list[Trace]


class NearDuplicates(Struct, frozen=True):
    """Traces with a similarity of at least NEAR to an earlier one."""

    traces: int
    accepted: int
    clusters: int
    clustered: int
    largest: list[Cluster]


class LeftOut(Struct):
    """Documents skipped for one kind of reason."""

    count: int = 0
    first: list[tuple[str, str]] = msgspec.field(default_factory=list)  # places and reasons

    def add(self, where: str, reason: str) -> None:
        """Count a document; the first ones are kept with their reason."""
        self.count += 1
        if len(self.first) < LEFT_OUT:
            self.first.append((shown_text(where), shown_text(reason)))


class Changes(Struct, frozen=True):
    """The decisions that other settings change."""

    same_share: float | None
    """The threshold for all profiles that accepts as many new scores as are accepted now; None if none are."""
    decisions: list[Trace]  # the first CHANGES by stream time


class ProposedThreshold(Struct, frozen=True):
    """A domain's current and proposed threshold, both with the scores of the settings.

    `wanted`, `above` and `interval` are None for a domain with fewer than LEAST_TRACES, which keeps its threshold.
    """

    domain: str
    profile: str
    traces: int
    threshold_before: float
    threshold: float
    accepted_before: int
    accepted: int
    wanted: int | None  # see ShareThreshold
    above: int | None  # see ShareThreshold
    interval: tuple[float, float] | None  # 95 % bootstrap interval of the proposed threshold


class Proposal(Struct, frozen=True):
    """Thresholds that accept a share of each domain."""

    share: float
    accepted_before: int
    accepted: int
    domains: list[ProposedThreshold]  # the largest ones, and all with FEW_TRACES or more
    other_domains: int  # how many others keep their threshold
    cut: list[str]  # domains whose name is too long for the config


class Interval(Struct, frozen=True):
    """A figure and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{fixed(self.value, 3)} ({fixed(self.low, 3)} to {fixed(self.high, 3)})"


class Bin(Struct, frozen=True):
    """Runs whose confidence is in one of CONFIDENCE_BINS equal bins."""

    share: float  # of all runs
    confidence: float  # mean
    succeeded: Interval


class Scope(Struct, frozen=True):
    """The figures over all runs, or within each domain or file and then combined."""

    name: str
    auc_score: Interval | None
    """Probability that the score of a success exceeds that of a failure (of one domain or file); ties count half."""
    auc_confidence: Interval | None  # the same of the outcome confidence
    best_fifth: Interval  # share of successes among the fifth with the highest scores (of each)
    best_novelty: float  # mean novelty of the fifth with the highest scores (of all)
    base: float  # Brier score of the share of successes (of each)


class BetterThreshold(Struct, frozen=True):
    """The threshold that best separates successes from failures.

    `threshold` is chosen on all runs; the other figures are from parts of the tasks that did not choose it.
    """

    threshold: float
    accepted: Interval
    succeeded: Interval | None
    gain: Interval | None  # share of successes accepted minus share of failures accepted


class Basis(Struct, frozen=True):
    """The figures with one kind of outcome confidence."""

    name: str
    accepted: Interval  # share of the runs
    succeeded: Interval | None  # share of the accepted runs
    brier: Interval  # mean squared distance of confidence and outcome
    ece: float
    """Expected calibration error: the mean distance of confidence and successes over the bins. It has no interval,
    because resampling makes it larger."""
    bins: list[Bin]
    scopes: list[Scope]
    better: BetterThreshold | None


class Part(Struct, frozen=True):
    """A file or domain."""

    name: str
    runs: int
    succeeded: float  # share of the runs
    claims: int  # runs that claim success
    true: float | None  # share of these claims


class Judging(Struct, frozen=True):
    """Which runs get simulated verdicts."""

    share: float  # of the runs, drawn at random
    late: int  # runs until a verdict arrives


class Outcomes(Struct, frozen=True):
    """How well scores tell success from failure."""

    outcome: str
    claimed: str | None
    task: str | None
    runs: int
    tasks: int
    succeeded: float
    admissions: int
    admissions_true: float | None
    files: list[Part]
    domains: list[Part]
    judging: Judging | None
    orders: int  # random orders; without simulated verdicts one
    measured: int  # runs in each order; without simulated verdicts all
    stated: Basis
    record: Basis | None  # only with verdicts, as those below
    weighted: Basis | None  # by the record, with weights where the outcome has 0.6
    weighted_gain: Interval | None  # by how much that raises the successes among the best fifth; paired, too
    gain: Interval | None  # by how much the AUC of the score rises, with the interval of the paired difference


class Report(Struct, frozen=True):
    """Everything that a report shows."""

    source: str
    first: str  # stream time
    last: str
    partitions: int
    repeated: int  # documents with identical bytes, counted once
    unreadable: LeftOut
    inconsistent: LeftOut
    embedders: list[tuple[str, int]]  # each embedder with the worker's version, and its traces
    changed_within: list[str]  # profiles that had several thresholds or weights
    total: Domain
    domains: list[Domain]  # the largest ones; the last row sums the others
    other_domains: int  # how many those are
    without_profile: list[DomainWithoutProfile]
    unused_profiles: list[UnusedProfile]
    border: list[Border]
    near_duplicates: NearDuplicates
    hidden_text: dict[str, int]  # the traces that each rule of the screen marks
    changes: Changes | None
    share: Proposal | None
    outcome: Outcomes | None
    config: str | None  # the settings and the proposed thresholds, to paste; None without both


# -- reading


class Asked(NamedTuple):
    """What is asked of recorded outcomes: the names of the fields, and the verdicts to simulate."""

    outcome: str
    claimed: str | None = None
    judging: Judging | None = None


class Run(NamedTuple):
    """A run with a recorded outcome, scored as its agent claims."""

    outcome: float
    claim: bool | None
    task: str | None
    agent: str
    scored: Score
    threshold: float
    used: float  # confidence by the track records so far; NaN: none, or the run admits failure


class Traces:
    """Scored documents: `add` each, then take the `report`.

    With `rescore`, each is scored again with the settings. `standings` are the track records by which
    `confidence=record` scores a document that was scored without them.
    """

    def __init__(
        self, settings: Settings, *, rescore: bool = False, asked: Asked | None = None,
        standings: Standings | None = None,
    ) -> None:  # fmt: skip
        self._settings, self._rescore, self._asked, self._standings = settings, rescore, asked, standings
        self._simulates = asked is not None and asked.judging is not None
        self._profiles = settings.scoring_profiles()
        self._confidence = settings.confidence if "confidence" in settings.model_fields_set else None
        self.unreadable, self.inconsistent = LeftOut(), LeftOut()
        self.files: list[str] = []
        self._texts: list[tuple[str, str]] = []
        self._runs: list[Run] = []
        self._new: list[tuple[Any, ...]] = []
        self._pieces = [np.empty(0, _COLUMNS)]
        self._codes: dict[str, dict[Any, int]] = defaultdict(dict)
        self._names: dict[str, list[Any]] = defaultdict(list)
        self._decoder = msgspec.json.Decoder(ScoredDocument)

    def add(self, value: bytes | None, where: str, record_ms: int = 0) -> None:
        """Take one output document; an unusable one is counted, and the first of these are named by `where`.

        `record_ms` is the Kafka record's timestamp, for the bounds of `report`. Raises CommandError.
        """
        raw = value or b""
        try:
            document = self._decoder.decode(raw)
            fields: Any = None if self._asked is None else msgspec.json.decode(raw)
            if document.scoring.decision not in (ACCEPTED, REJECTED):
                raise msgspec.ValidationError("scoring.decision is neither accepted nor rejected")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.unreadable.add(where, _advice(raw, error))
            return
        if self._rescore or self._asked is not None:
            wrong = contradiction(document)
            if wrong is not None:
                self.inconsistent.add(where, f"{cut_text(document.id, 60)}: {wrong}")
                return
        if self._asked is not None:
            self._runs.append(self._run(document, fields, where, self._asked))
        self._texts.append((cut_text(document.id, CACHED_ID_LENGTH), shown_text(document.task.objective)))
        self._new.append((hash64(raw), len(self._texts) - 1, len(self.files), record_ms, *self._cells(document)))
        # Rows collected before they are packed: as Python numbers, a row takes five times the memory
        if len(self._new) == 4096:
            self._pack()

    def _cells(self, document: ScoredDocument) -> Iterator[Any]:
        """Yield the cells of a row from `time_ms` on."""
        it = document.scoring
        setup, before = Setup(cut_text(it.profile), it.threshold, it.weights), (it.score, it.decision == ACCEPTED)
        components, overrides, setup_after, after = it.components, it.overrides, setup, before
        if self._rescore:
            scored = score_trace(document, it.components.novelty, self._profiles, self._used(document))
            threshold = self._threshold(scored.profile)
            components, overrides = scored.components, scored.overrides
            after = scored.score, scored.score >= threshold
            setup_after = Setup(cut_text(scored.profile), threshold, scored.weights)
        yield from (it.stream_time_ms, it.source.partition, it.source.offset)
        # Names unchanged: a domain and its near miss may look alike when shown.
        yield self._code("domain", cut_text(document.metadata.task_domain))
        yield from (self._code("setup", setup), self._code("setup", setup_after))
        yield from (before[0], after[0], before[1], after[1], *(getattr(components, name) for name in _COMPONENTS))
        yield self._code("overrides", tuple(map(shown_text, overrides)))
        yield self._code("screen", () if it.screen is None else tuple(map(shown_text, it.screen.rules)))
        yield self._code("maker", (it.embedder, shown_text(f"{_named(it.embedder)}, kp-worker {it.worker_version}")))
        yield np.nan if it.nearest is None else it.nearest.similarity
        yield hash64(document.id[:CACHED_ID_LENGTH].encode())
        yield 0 if it.nearest is None else hash64(it.nearest.id.encode())

    def _threshold(self, profile: str) -> float:
        own = self._profiles[profile].threshold
        return self._settings.threshold if own is None else own

    def _used(self, document: ScoredDocument) -> float | None:
        """Return a document's outcome confidence with the settings; None: the stated one. Raises CommandError."""
        if self._confidence == "stated":
            return None
        if self._confidence == "record" and self._standings is not None:
            return self._standings.used(document)
        if self._confidence == "record" and document.scoring.confidence is None and not self._simulates:
            raise CommandError(
                "confidence=record needs verdicts, and these traces were scored without: read the topics "
                "(--from-kafka), or simulate verdicts (--outcome FIELD --verdicts SHARE)"
            )
        return document.used

    def _run(self, document: ScoredDocument, fields: Mapping[str, Any], where: str, asked: Asked) -> Run:
        """Return a run as its agent claims it. Raises CommandError for a missing or mistyped field."""
        outcome = _outcome(fields, asked.outcome, where)
        claim = None if asked.claimed is None else _claim(fields, asked.claimed, where)
        task = value_at(fields, TASK)
        claimed, it = as_claimed(document, claim), document.scoring
        profiles = self._profiles if self._rescore else _own_profiles(it)
        scored = score_trace(claimed, it.components.novelty, profiles)
        threshold = self._threshold(scored.profile) if self._rescore else it.threshold
        used, about = np.nan, document.metadata
        if self._standings is not None and claimed.metadata.success:
            place = it.source.partition, it.source.offset
            used = self._standings.at(*place, about.agent_id, about.task_domain).used
        named = None if task is None or isinstance(task, Mapping | list) else str(task)
        return Run(outcome, claim, named, about.agent_id, scored, threshold, used)

    def _code(self, column: str, value: Any) -> int:
        """Return the number of a name; a new name gets a new number."""
        codes, names = self._codes[column], self._names[column]
        code = codes.setdefault(value, len(codes))
        if code == len(names):
            names.append(value)
        return code

    def _pack(self) -> None:
        self._pieces.append(np.array(self._new, _COLUMNS))
        self._new.clear()

    def _counted(self, last: int | None, since_ms: int) -> tuple[Table, int]:
        """Return the rows that count, in stream-time order, and the number of repeated documents."""
        self._pack()
        table = np.concatenate(self._pieces)
        self._pieces = [table]
        if not len(table):
            raise CommandError(self._nothing())
        # 1. Repeated documents count once: a worker that delivers at least once may repeat an output byte for byte.
        kept = np.sort(np.unique(table["document"], return_index=True)[1])
        repeated, record_ms = len(table) - len(kept), table["record_ms"]
        # 2. Only the last ones, if requested.
        kept = kept[record_ms[kept] >= since_ms]
        if last is not None:
            kept = np.sort(kept[np.argsort(record_ms[kept], kind="stable")[-last:]])
        if not len(kept):
            raise CommandError(f"none of {number_of(len(table), 'trace')} is in the requested time range")
        # 3. Stream-time order; within a partition that is the order of scoring.
        order = np.lexsort([table[name][kept] for name in ("offset", "partition", "time_ms")])
        return table[kept[order]], repeated

    def _nothing(self) -> str:
        count = self.unreadable.count + self.inconsistent.count
        if not count:
            return "no documents"
        where, reason = (self.unreadable.first or self.inconsistent.first)[0]
        return f"none of {count} documents can be counted; {where}: {reason}"

    # -- the report

    def report(self, source: str, last: int | None = None, since_ms: int = 0, share: Fraction | None = None) -> Report:
        """Return the numbers of the traces with `record_ms` from `since_ms` on, and of these only the `last` ones.

        `share` (0..1): propose thresholds that accept this share of each domain. Raises CommandError, also if there is
        no document to count.
        """
        table, repeated = self._counted(last, since_ms)
        names, setups = self._names["domain"], self._names["setup"]
        largest, rest, others = by_domain(table["domain"])
        domains = [self._domain(names[code], table[at]) for code, at in largest]
        if rest:
            domains.append(self._domain(f"{len(rest)} others", table[others], alone=False))
        counts = {names[code]: count for code, count in counts_of(table["domain"])}
        used = [setups[code].profile for code in np.unique(table["setup_before"])]
        known = self._profiles if self._rescore else {*self._profiles, *used}
        proposal, proposed = None, dict(self._profiles)
        comments: dict[str, str] = {}
        if share is not None:
            proposal = self._propose(table, share)
            comments = self._proposed(proposal, proposed)
        return Report(
            source=source,
            first=rfc3339(int(table["time_ms"][0])),
            last=rfc3339(int(table["time_ms"][-1])),
            partitions=len(np.unique(table["partition"])),
            repeated=repeated,
            unreadable=self.unreadable,
            inconsistent=self.inconsistent,
            embedders=[(self._names["maker"][code][1], count) for code, count in counts_of(table["maker"])],
            changed_within=sorted({name for name in used if used.count(name) > 1}),
            total=self._domain("all", table, alone=False),
            domains=domains,
            other_domains=len(rest),
            without_profile=without_profile(counts, known),
            unused_profiles=unused_profiles(self._profiles, counts),
            border=list(self._border(table)),
            near_duplicates=self._near_duplicates(table),
            hidden_text=self._hidden_text(table),
            changes=self._changes(table) if self._rescore else None,
            share=proposal,
            outcome=None if self._asked is None else self._outcomes(table, self._asked),
            config=config_to_paste(proposed, self._settings.threshold, comments) if self._rescore else None,
        )

    def _domain(self, name: str, table: Table, *, alone: bool = True) -> Domain:
        changed = table["accepted"][table["accepted"] != table["accepted_before"]]
        to_accepted = int(np.count_nonzero(changed))
        before, after = (self._scores(table, when, alone=alone) for when in ("_before", ""))
        return Domain(name, len(table), to_accepted, len(changed) - to_accepted, before, after)

    def _scores(self, table: Table, when: str, *, alone: bool) -> Scores:
        scores, setups = np.sort(table[f"score{when}"]), table[f"setup{when}"]
        profile, threshold, _ = self._names["setup"][setups[-1]]
        if not alone:
            last = {self._names["setup"][code].profile: self._names["setup"][code].threshold for code in setups}
            threshold = threshold if len(set(last.values())) == 1 else None
        reaching = (len(scores) - np.searchsorted(scores, THRESHOLDS)) / len(scores)
        return Scores(
            profile if alone else None, threshold, int(np.count_nonzero(table[f"accepted{when}"])),
            floats(np.quantile(scores, QUANTILES)), floats(reaching), bars(scores, BINS),
        )  # fmt: skip

    def _border(self, table: Table) -> Iterator[Border]:
        """Yield the border of each profile, the most frequent first."""
        names = [setup.profile for setup in self._names["setup"]]
        profiles = np.array([names.index(name) for name in names])[table["setup"]]
        for code, _ in counts_of(profiles):
            rows = table[profiles == code]
            threshold = self._names["setup"][rows["setup"][-1]].threshold
            near = rows[np.argsort(np.abs(rows["score"] - threshold), kind="stable")]
            sides = [near[reaches][:EXAMPLES] for reaches in (near["score"] >= threshold, near["score"] < threshold)]
            above, below = (side[np.argsort(-side["score"], kind="stable")] for side in sides)
            yield Border(names[code], threshold, self._traces(above), self._traces(below))

    def _near_duplicates(self, table: Table) -> NearDuplicates:
        near = table["similarity"] >= NEAR
        clusters = clusters_of(table["id"], table["nearest"], table["similarity"], near)
        return NearDuplicates(
            int(np.count_nonzero(near)),
            int(np.count_nonzero(near & table["accepted_before"])),
            len(clusters),
            sum(len(members) for members, _ in clusters),
            [self._cluster(table[members], links) for members, links in clusters[:CLUSTERS]],
        )

    def _cluster(self, rows: Table, links: Floats) -> Cluster:
        span_ms = int(rows["time_ms"][-1] - rows["time_ms"][0])
        accepted = int(np.count_nonzero(rows["accepted_before"]))
        return Cluster(len(rows), accepted, float(np.median(links)), span_ms, self._traces(rows[:EXAMPLES]))

    def _hidden_text(self, table: Table) -> dict[str, int]:
        marks: Counter[str] = Counter()
        for code, rules in enumerate(self._names["screen"]):
            marks += Counter(dict.fromkeys(rules, int(np.count_nonzero(table["screen"] == code))))
        return dict(marks.most_common())

    def _traces(self, rows: Table) -> list[Trace]:
        return [self._trace(row) for row in rows]

    def _trace(self, row: np.void) -> Trace:
        before, after = (
            Verdict(setup.profile, float(row[f"score{when}"]), setup.threshold, decision)
            for when in ("_before", "")
            for setup in [self._names["setup"][row[f"setup{when}"]]]
            for decision in [ACCEPTED if row[f"accepted{when}"] else REJECTED]
        )
        identity, objective = self._texts[row["row"]]
        return Trace(
            identity, objective, self._names["domain"][row["domain"]], int(row["partition"]), int(row["offset"]),
            before, after, tuple(float(row[name]) for name in _COMPONENTS), self._names["overrides"][row["overrides"]],
        )  # fmt: skip

    def _changes(self, table: Table) -> Changes:
        kept = same_share(table["score"], int(np.count_nonzero(table["accepted_before"])))
        changed = table[table["accepted"] != table["accepted_before"]][:CHANGES]
        return Changes(None if kept is None else kept.threshold, self._traces(changed))

    # -- thresholds for a share

    def _propose(self, table: Table, share: Fraction) -> Proposal:
        counts, names = counts_of(table["domain"]), self._names["domain"]
        chosen = [code for rank, (code, count) in enumerate(counts) if rank < DOMAINS or count >= FEW_TRACES]
        proposals = [self._proposal(names[code], table[table["domain"] == code], share) for code in chosen]
        before = int(np.count_nonzero(table["accepted"]))
        accepted = before + sum(it.accepted - it.accepted_before for it in proposals)
        cut = [it.domain for it in proposals if is_cut(it.domain)]
        return Proposal(float(share), before, accepted, proposals, len(counts) - len(chosen), cut)

    def _proposal(self, name: str, rows: Table, share: Fraction) -> ProposedThreshold:
        profile, threshold, _ = self._names["setup"][rows["setup"][-1]]
        before = int(np.count_nonzero(rows["accepted"]))
        if len(rows) < LEAST_TRACES:
            return ProposedThreshold(name, profile, len(rows), threshold, threshold, before, before, None, None, None)
        proposed = share_threshold(rows["score"], share)
        interval = share_interval(rows["score"], share)
        return ProposedThreshold(
            name, profile, len(rows), threshold, proposed.threshold, before, proposed.accepted, proposed.wanted,
            proposed.above, interval,
        )  # fmt: skip

    def _proposed(self, proposal: Proposal, profiles: dict[str, Profile]) -> dict[str, str]:
        """Give profiles the proposed thresholds; return the comment on each."""
        comments = {}
        default_moves = any(it.domain == DEFAULT_PROFILE and it.interval is not None for it in proposal.domains)
        for it in proposal.domains:
            if is_cut(it.domain):
                continue
            # The weights that the domain has now: default's, if it has no profile.
            proposed = Profile(self._profiles[it.profile].weights, it.threshold)
            if it.interval is not None:
                profiles[it.domain] = proposed
                comments[it.domain] = accepts(it.accepted, it.traces, it.wanted, it.interval)
            elif default_moves and it.domain not in profiles:
                profiles[it.domain] = proposed
                comments[it.domain] = f"as before: {too_few(it.traces)}"
        return comments

    # -- recorded outcomes

    def _outcomes(self, table: Table, asked: Asked) -> Outcomes:
        # In the order of the files, so that the same files give the same figures.
        table = table[np.argsort(table["file"], kind="stable")]
        of_table = [self._runs[row] for row in table["row"]]
        if asked.claimed is not None and all(run.claim is None for run in of_table):
            raise CommandError(
                f"no run has a claim at {asked.claimed}; --claimed must name a field with true, false or null"
            )
        outcome = np.array([run.outcome for run in of_table])
        if len(set(outcome.tolist())) < 2:
            raise CommandError(
                f"{number_of(len(of_table), 'run')}, all with the same outcome; there must be runs that succeeded and "
                "runs that failed"
            )
        tasks = [run.task for run in of_table]
        task = None if None in tasks else TASK
        domains = [self._names["domain"][code] for code in table["domain"]]
        runs = Runs(
            scored=[run.scored for run in of_table],
            claims=np.array([run.claim is not False for run in of_table]),
            thresholds=np.array([run.threshold for run in of_table]),
            outcome=outcome,
            tasks=np.arange(len(of_table)) if task is None else numbered(tasks),
            domains=numbered(domains),
            files=numbered(table["file"].tolist()),
            about=[(run.agent, domain) for run, domain in zip(of_table, domains, strict=True)],
        )
        used = None if self._standings is None else np.array([run.used for run in of_table])
        names = [self.files[code - 1] for code in dict.fromkeys(table["file"].tolist())]
        return outcomes(runs, asked, task, used, names, list(dict.fromkeys(domains)))


def _named(it: EmbedderIdentity | None) -> str:
    return "no embedder" if it is None else f"{it.name}, {it.precision}, {it.embed_text}, {it.max_tokens} tokens"


def _own_profiles(scoring: ReadScoring) -> dict[str, Profile]:
    """Return the profile by which a document was scored, for its domain."""
    return dict.fromkeys((DEFAULT_PROFILE, scoring.profile), Profile(scoring.weights))


def contradiction(document: ScoredDocument) -> str | None:
    """Return the first figure of a document that does not follow from its trace, bit for bit; None: all do."""
    scoring = document.scoring
    try:
        score = score_trace(document, scoring.components.novelty, _own_profiles(scoring), document.used)
    except ValueError as error:
        return str(error)
    stated = document.outcome.confidence
    if scoring.confidence is not None and scoring.confidence.stated != stated:
        return f"confidence.stated is {scoring.confidence.stated!r}, but the trace states {stated!r}"
    for name, stored, follows in _figures(scoring, score):
        if stored != follows:
            return f"{name} is {stored!r}, but {follows!r} follows from the trace"
    return None


def _figures(scoring: ReadScoring, score: Score) -> Iterator[tuple[str, object, object]]:
    """Yield (name, the document's value, the computed value)."""
    nearest = scoring.nearest
    novelty = NEUTRAL_NOVELTY if nearest is None else 1.0 - nearest.similarity
    yield "novelty", scoring.components.novelty, novelty
    yield "profile", scoring.profile, score.profile
    for name in ("complexity", "tool_diversity", "outcome_confidence"):
        yield name, getattr(scoring.components, name), getattr(score.components, name)
    yield "overrides", ", ".join(scoring.overrides), ", ".join(score.overrides)
    yield "score", scoring.score, score.score
    yield "decision", scoring.decision, ACCEPTED if score.score >= scoring.threshold else REJECTED


def _advice(raw: bytes, error: Exception) -> str:
    """Return why a document cannot be read, in the parser's words if the trace is at fault."""
    try:
        parse_trace(raw, _ANY)
    except InvalidTrace as invalid:
        return f"{invalid.reason}: {invalid.message}"
    text = str(error)
    return "it is not scored: kp-worker score first" if "`scoring`" in text and "missing" in text else text


def _outcome(fields: Mapping[str, Any], path: str, where: str) -> float:
    value = value_at(fields, path)
    if value is None:
        raise CommandError(
            f"{where} has no outcome at {path}; name another field with --outcome. The line has "
            f"{', '.join(sorted(fields))}"
        )
    if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
        raise _wrong(where, path, value, "--outcome must name a field with true, false or a number from 0 to 1")
    return float(value)


def _claim(fields: Mapping[str, Any], path: str, where: str) -> bool | None:
    value = value_at(fields, path)
    if value is not None and not isinstance(value, bool):
        raise _wrong(where, path, value, "--claimed must name a field with true, false or null")
    return value


def _wrong(where: str, path: str, value: object, remedy: str) -> CommandError:
    return CommandError(f"{where}: {path} is {shown_text(json.dumps(value))}; {remedy}")


def as_claimed(trace: ReasoningTrace, claimed: bool | None) -> ReasoningTrace:
    """Return a run as if it ended as its agent claims, without the recorded outcome. None counts as success."""
    return structs.replace(
        trace,
        metadata=structs.replace(trace.metadata, success=claimed is not False),
        outcome=structs.replace(trace.outcome, confidence=STATED, evaluated=None),
    )


# -- tables


def hash64(data: bytes) -> int:
    """Return a 64-bit hash: among a million values, two are equal with a probability of 3e-8."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def numbered(names: Sequence[object]) -> Ints:
    """Return names as numbers 0..k-1, in order of first use."""
    known: dict[object, int] = {}
    return np.array([known.setdefault(name, len(known)) for name in names], np.int64)


def counts_of(codes: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """Return (code, frequency), most frequent first, then in order of first appearance."""
    values, first, counts = np.unique(codes, return_index=True, return_counts=True)
    order = np.lexsort((first, -counts))
    return [(int(values[i]), int(counts[i])) for i in order]


def by_domain(codes: npt.NDArray[Any]) -> tuple[list[tuple[int, Ints]], list[int], Ints]:
    """Return the largest domains with their rows; then the codes of all others, and their rows together."""
    order = [code for code, _ in counts_of(codes)]
    rest = order[DOMAINS:]
    largest: list[tuple[int, Ints]] = [(code, np.flatnonzero(codes == code)) for code in order[:DOMAINS]]
    return largest, rest, np.flatnonzero(np.isin(codes, rest))


def bars(values: npt.NDArray[Any], count: int) -> tuple[int, ...]:
    """Count values in equal bars from 0 to 1; values outside count in the outermost bars."""
    places = np.clip(np.floor(values * count + 1e-9).astype(np.intp), 0, count - 1)
    return tuple(np.bincount(places, minlength=count).tolist())


def floats(values: npt.ArrayLike) -> tuple[float, ...]:
    """Return Python floats."""
    return tuple(np.asarray(values, np.float64).tolist())


def clusters_of(
    ids: npt.NDArray[Any], nearest: npt.NDArray[Any], similarity: Floats, near: npt.NDArray[np.bool_]
) -> list[tuple[Ints, Floats]]:
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
    clusters = [(part, similarity[part[near[part]]]) for part in parts if len(part) >= 2]
    return sorted(clusters, key=lambda item: (-len(item[0]), int(item[0][0])))


# -- how well scores tell success from failure


def resampled(count: int, rng: np.random.Generator) -> Floats:
    """Return how often each of `count` tasks is in each draw, shape (DRAWS + 1, count); row 0 is the sample itself."""
    return np.vstack([np.ones(count), rng.multinomial(count, np.full(count, 1 / max(count, 1)), DRAWS)])


def mean_of(of_draws: Sequence[Floats | None]) -> Floats | None:
    """Return the mean over the orders that have draws."""
    known = [draws for draws in of_draws if draws is not None]
    return np.asarray(np.mean(known, axis=0)) if known else None


def interval(of_draws: Sequence[Floats | None]) -> Interval | None:
    """Return the mean over orders, with the interval of its draws."""
    mean = mean_of(of_draws)
    if mean is None:
        return None
    low, high = np.nanquantile(mean[1:], (0.025, 0.975))
    return Interval(round(float(mean[0]), 4), round(float(low), 4), round(float(high), 4))


@dataclass(slots=True)
class Runs:
    """Runs as their agents claim them, in one order."""

    scored: list[Score]
    claims: npt.NDArray[np.bool_]  # False: the run admits failure
    thresholds: Floats
    outcome: Floats  # 0 to 1
    tasks: Ints  # numbered from 0, as are domains and files
    domains: Ints
    files: Ints
    about: list[tuple[str, str]]  # agent and domain

    def __len__(self) -> int:
        return len(self.scored)


class Results(NamedTuple):
    """The results of all runs with one kind of confidence."""

    score: Floats
    confidence: Floats  # outcome confidence
    accepted: Floats


Order = tuple[Ints, Results]
"""The runs that are measured, and the results of all runs."""


class Measurement:
    """Measures scores of the same runs, in the same orders, with the same draws of tasks."""

    def __init__(self, runs: Runs, seed: int = 1) -> None:
        self._runs = runs
        rng = np.random.default_rng(seed)
        count = int(runs.tasks.max()) + 1
        self._weights = resampled(count, rng)
        self._folds = rng.permutation(count) % FOLDS
        self._scopes: list[tuple[str, Ints]] = [("all", np.zeros(len(runs), np.int64))]
        for name, groups in (("within domain", runs.domains), ("within file", runs.files)):
            if len(np.unique(groups)) > 1:
                self._scopes.append((name, groups))

    def score(self, confidence: Floats | None = None, weights: Callable[[Weights], Weights] = lambda it: it) -> Results:
        """Score all runs with these confidences; None or NaN: the claimed one. `weights`: changes those of a run."""
        used = np.array([it.components.outcome_confidence for it in self._runs.scored])
        scores = np.array([it.score for it in self._runs.scored])
        for place in [] if confidence is None else range(len(self._runs)):
            it = self._runs.scored[place]
            if not np.isnan(confidence[place]):  # type: ignore[index]  # there are places only with confidences
                used[place] = confidence[place]  # type: ignore[index]
            components = replace(it.components, outcome_confidence=float(used[place]))
            scores[place] = min(1.0, max(0.0, arithmetic(components, weights(it.weights), it.overrides).before_clamp))
        return Results(scores, used, (scores >= self._runs.thresholds).astype(float))

    def auc_draws(self, orders: Sequence[Order]) -> Floats | None:
        """Return the AUC of the score over all runs: draw 0 is the sample itself."""
        return mean_of([self._auc(at, it.score, self._scopes[0][1]) for at, it in orders])

    def best_draws(self, orders: Sequence[Order]) -> Floats | None:
        """Return the share of successes in the best fifth of all runs: draw 0 is the sample itself."""
        return mean_of([self._best(at, it.score, self._scopes[0][1]) for at, it in orders])

    def _novelty(self, orders: Sequence[Order]) -> float:
        novelty = np.array([it.components.novelty for it in self._runs.scored])
        best = (at[np.argsort(-it.score[at], kind="stable")[: max(1, len(at) // 5)]] for at, it in orders)
        return round(float(np.mean([novelty[those].mean() for those in best])), 4)

    def basis(self, name: str, orders: Sequence[Order]) -> Basis:
        """Return the figures, as means over the orders."""
        outcome, ones = self._runs.outcome, np.ones(len(self._runs))
        return Basis(
            name,
            _sure(interval([self._mean(at, it.accepted, ones) for at, it in orders])),
            interval([self._mean(at, outcome, it.accepted) for at, it in orders]),
            _sure(interval([self._mean(at, (it.confidence - outcome) ** 2, ones) for at, it in orders])),
            round(float(np.mean([calibration_error(outcome[at], it.confidence[at]) for at, it in orders])), 4),
            self._bins(orders),
            [self._scope(name, groups, orders) for name, groups in self._scopes],
            self._better(orders),
        )

    def _scope(self, name: str, groups: Ints, orders: Sequence[Order]) -> Scope:
        return Scope(
            name,
            interval([self._auc(at, it.score, groups) for at, it in orders]),
            interval([self._auc(at, it.confidence, groups) for at, it in orders]),
            _sure(interval([self._best(at, it.score, groups) for at, it in orders])),
            self._novelty(orders),
            round(float(np.mean([base_rate(self._runs.outcome[at], groups[at]) for at, _ in orders])), 4),
        )

    def _of_runs(self, at: Ints) -> Floats:
        return self._weights[:, self._runs.tasks[at]]

    def _mean(self, at: Ints, values: Floats, share: Floats) -> Floats | None:
        """Return the weighted mean of values in each draw; `share`: the weight of each; None if all are 0."""
        weights = self._of_runs(at) * share[at]
        if not share[at].any():
            return None
        with np.errstate(invalid="ignore"):
            return np.asarray(weights @ values[at] / weights.sum(1))

    def _auc(self, at: Ints, values: Floats, groups: Ints) -> Floats | None:
        won, pairs = np.zeros(len(self._weights)), np.zeros(len(self._weights))
        for group in np.unique(groups[at]):
            own = at[groups[at] == group]
            good, bad = _by_value(values[own], self._of_runs(own), self._runs.outcome[own])
            won += (good * (np.cumsum(bad, 1) - bad / 2)).sum(1)
            pairs += good.sum(1) * bad.sum(1)
        if not pairs[0]:
            return None
        with np.errstate(invalid="ignore"):
            return np.asarray(won / pairs)

    def _best(self, at: Ints, values: Floats, groups: Ints) -> Floats:
        """Return the share of successes in the best fifth of each group; values tied at its end all count in part."""
        succeeded, taken = np.zeros(len(self._weights)), np.zeros(len(self._weights))
        for group in np.unique(groups[at]):
            own = at[groups[at] == group]
            good, bad = _by_value(-values[own], self._of_runs(own), self._runs.outcome[own])
            weight = good + bad
            fifth = weight.sum(1, keepdims=True) / 5  # the best fifth by score
            share = np.clip(fifth - (np.cumsum(weight, 1) - weight), 0, weight)
            succeeded += np.divide(good * share, weight, out=np.zeros_like(weight), where=weight > 0).sum(1)
            taken += fifth[:, 0]
        with np.errstate(invalid="ignore"):
            return np.asarray(succeeded / taken)

    def _bins(self, orders: Sequence[Order]) -> list[Bin]:
        bins = []
        total = sum(len(at) for at, _ in orders)
        for number in range(CONFIDENCE_BINS):
            chosen = [(at[_bin_of(it.confidence[at]) == number], it) for at, it in orders]
            count = sum(len(at) for at, _ in chosen)
            if count:
                weights = sum(self._of_runs(at).sum(1) for at, _ in chosen)
                good = sum(self._of_runs(at) @ self._runs.outcome[at] for at, _ in chosen)
                mean = sum(float(it.confidence[at].sum()) for at, it in chosen) / count
                with np.errstate(invalid="ignore"):
                    succeeded = _sure(interval([np.asarray(good / weights)]))
                bins.append(Bin(round(count / total, 4), round(mean, 4), succeeded))
        return bins

    def _better(self, orders: Sequence[Order]) -> BetterThreshold | None:
        """Choose a threshold on the tasks of all folds but one, and measure it on that one."""
        outcome, everywhere, ones = self._runs.outcome, [], np.ones(len(self._runs))
        decided = []
        for at, it in orders:
            whole = best_threshold(it.score[at], outcome[at])
            if whole is None:
                return None
            everywhere.append(whole)
            accepted = np.zeros(len(ones))
            folds = self._folds[self._runs.tasks]
            for fold in range(FOLDS):
                chosen = best_threshold(it.score[at[folds[at] != fold]], outcome[at[folds[at] != fold]])
                if chosen is None:
                    return None
                accepted[folds == fold] = it.score[folds == fold] >= chosen
            decided.append((at, accepted))
        gains = [(self._mean(at, it, outcome), self._mean(at, it, 1 - outcome)) for at, it in decided]
        return BetterThreshold(
            round(float(np.median(everywhere)), 4),
            _sure(interval([self._mean(at, it, ones) for at, it in decided])),
            interval([self._mean(at, outcome, it) for at, it in decided]),
            interval([good - bad for good, bad in gains if good is not None and bad is not None]),
        )


def _sure(it: Interval | None) -> Interval:
    if it is None:
        raise RuntimeError("this is a bug: there are runs")
    return it


def _by_value(values: Floats, weights: Floats, outcome: Floats) -> tuple[Floats, Floats]:
    """Return the weights of successes and of failures at each distinct value, ascending; shape (draws, values)."""
    order = np.argsort(values, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(values[order]) != 0])
    sorted_weights, good = weights[:, order], outcome[order]
    return (
        np.add.reduceat(sorted_weights * good, starts, axis=1),
        np.add.reduceat(sorted_weights * (1 - good), starts, axis=1),
    )


def _bin_of(confidence: Floats) -> Ints:
    return np.minimum((confidence * CONFIDENCE_BINS).astype(np.int64), CONFIDENCE_BINS - 1)


def calibration_error(outcome: Floats, confidence: Floats) -> float:
    """Return the mean distance of confidence and successes over equal bins, weighted by runs."""
    bins = _bin_of(confidence)
    return float(
        sum(
            abs(outcome[bins == each].mean() - confidence[bins == each].mean()) * (bins == each).mean()
            for each in np.unique(bins)
        )
    )


def base_rate(outcome: Floats, groups: Ints) -> float:
    """Return the Brier score of each group's own share of successes."""
    return float(
        sum(((outcome[groups == each] - outcome[groups == each].mean()) ** 2).sum() for each in np.unique(groups))
        / len(outcome)
    )


def best_threshold(scores: Floats, outcome: Floats) -> float | None:
    """Return the score threshold that accepts the most successes minus failures, by share; None without both."""
    good, bad = _by_value(scores, np.ones((1, len(scores))), outcome)
    if not good.sum() or not bad.sum():
        return None
    above = [np.cumsum(it[0, ::-1])[::-1] / it.sum() for it in (good, bad)]
    return float(np.unique(scores)[int(np.argmax(above[0] - above[1]))])


def judged_orders(runs: Runs, judging: Judging, seed: int = 1) -> list[tuple[Ints, Floats]]:
    """Return random orders of the runs: the measured ones, and each run's confidence according to its agent's record.

    A run's verdict is known `late` places after it. A run that admits failure has the claimed confidence (NaN), as in
    the worker.
    """
    rng = np.random.default_rng(seed)
    orders: list[tuple[Ints, Floats]] = []
    for _ in range(10):  # random orders in which runs arrive and are judged; the figures are means over them
        order, record = rng.permutation(len(runs)), TrackRecord()
        judged = rng.random(len(runs)) < judging.share
        confidence = np.full(len(runs), np.nan)
        for place, run in enumerate(order):
            known = place - judging.late
            if known >= 0 and judged[known]:
                _judge(record, runs, int(order[known]), known)
            if runs.claims[run]:
                confidence[run] = record.standing(*runs.about[run]).used
        orders.append((np.sort(order[len(runs) // WARM_UP :]), confidence))
    return orders


def _judge(record: TrackRecord, runs: Runs, run: int, place: int) -> None:
    agent, domain = runs.about[run]
    line = {
        "trace_id": f"{run}", "agent_id": agent, "task_domain": domain, "partition": 0,
        "success": float(runs.outcome[run]), "judge": "recorded",
    }  # fmt: skip
    verdict = unsigned_verdict(line, _START + timedelta(seconds=place))
    record.add(verdict, issued_ms(verdict, None), place)


def outcomes(
    runs: Runs, asked: Asked, task: str | None, used: Floats | None, files: Sequence[str], domains: Sequence[str]
) -> Outcomes:
    """Return all figures. `used`: the confidence of each run by real verdicts, if there are any."""
    measurement = Measurement(runs)
    stated, everything = measurement.score(), np.arange(len(runs))
    orders: list[tuple[Ints, Floats]] = [] if used is None else [(everything, used)]
    if asked.judging is not None:
        orders = judged_orders(runs, asked.judging)
    by_stated = [(at, stated) for at, _ in orders] or [(everything, stated)]
    by_record = [(at, measurement.score(confidence)) for at, confidence in orders]
    weighted = [(at, measurement.score(confidence, weights_by_verdicts)) for at, confidence in orders]
    before, after = measurement.auc_draws(by_stated), measurement.auc_draws(by_record)
    best, best_weighted = measurement.best_draws(by_record), measurement.best_draws(weighted)
    failures = 1 - runs.outcome[~runs.claims]
    return Outcomes(
        outcome=asked.outcome,
        claimed=asked.claimed,
        task=task,
        runs=len(runs),
        tasks=int(runs.tasks.max()) + 1,
        succeeded=round(float(runs.outcome.mean()), 4),
        admissions=len(failures),
        admissions_true=round(float(failures.mean()), 4) if len(failures) else None,
        files=[_part(runs, runs.files == number, name) for number, name in enumerate(files)],
        domains=[_part(runs, runs.domains == number, name) for number, name in enumerate(domains)],
        judging=asked.judging,
        orders=len(by_stated),
        measured=len(by_stated[0][0]),
        stated=measurement.basis("stated", by_stated),
        record=measurement.basis("record", by_record) if by_record else None,
        weighted=measurement.basis("record, outcome 0.6", weighted) if weighted else None,
        weighted_gain=None if best is None or best_weighted is None else interval([best_weighted - best]),
        gain=None if before is None or after is None else interval([after - before]),
    )


def _part(runs: Runs, own: npt.NDArray[np.bool_], name: str) -> Part:
    true = runs.outcome[own & runs.claims]
    share = round(float(true.mean()), 4) if len(true) else None
    return Part(name, int(own.sum()), round(float(runs.outcome[own].mean()), 4), len(true), share)

"""The numbers of `kp-worker report`: scored documents in, one `Report` out. Field names are those of --json.

Nothing is embedded: a document has its novelty, and no decision changes the novelty of a later trace.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import Struct

from worker.commands.report.outcomes import Asked, Outcomes, Run, as_claimed, measure_outcomes, read_outcome
from worker.commands.shared.console import CommandError
from worker.commands.shared.placed_verdicts import Standings, same_share
from worker.commands.shared.shown import cut_text, shown_text
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
    UnusedProfile,
    Weights,
    score_trace,
    unused_profiles,
    without_profile,
)
from worker.core.terminal import number_of
from worker.core.trace import InvalidTrace, Limits, parse_trace

THRESHOLDS = tuple(step / 40 for step in range(41))

BINS = 40
"""Bars of 0.025, so that the usual thresholds fall between two bars."""

NEAR = 0.9
"""The least similarity of a near-duplicate."""

DOMAINS = 20
"""Domains are free text of the agents, so there may be as many as traces: the others become one row."""

LEFT_OUT, EXAMPLES, NEAR_ONES, CHANGES = 20, 3, 10, 1000
"""How many are named: skipped documents, traces on a side of a threshold, accepted near-duplicates, changes."""

_COMPONENTS = tuple(Components.__dataclass_fields__)


class Verdict(Struct, frozen=True, gc=False):
    """One trace's score and decision, and the threshold behind it."""

    profile: str
    score: float
    threshold: float
    decision: str


class Trace(Struct, frozen=True, gc=False):
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
    quantiles: tuple[float, ...]  # at 0.1, 0.25, 0.5, 0.75, 0.9
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


class NearDuplicates(Struct, frozen=True):
    """Traces with a similarity of at least NEAR to an earlier one."""

    traces: int
    accepted: int
    examples: list[tuple[Trace, str, float]]  # the first accepted ones, each with the earlier trace's id and similarity


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

    same_share: float | None  # the threshold for all profiles that accepts as many as now; None if none are accepted
    decisions: list[Trace]  # the first CHANGES by stream time


class ProposedThreshold(Struct, frozen=True):
    """A domain's current and proposed threshold, both with the scores of the settings.

    A domain with fewer than LEAST_TRACES keeps its threshold, and lacks the last three.
    """

    domain: str
    profile: str
    traces: int
    threshold_before: float
    threshold: float
    accepted_before: int
    accepted: int
    wanted: int | None = None  # see ShareThreshold
    above: int | None = None  # see ShareThreshold
    interval: tuple[float, float] | None = None  # 95 % bootstrap interval of the proposed threshold


class Proposal(Struct, frozen=True):
    """Thresholds that accept a share of each domain."""

    share: float
    accepted_before: int
    accepted: int
    domains: list[ProposedThreshold]  # the largest ones, and all with FEW_TRACES or more
    other_domains: int  # how many others keep their threshold


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


class Row(NamedTuple):
    """One document."""

    trace: Trace
    record_ms: int
    time_ms: int
    setup: tuple[str, float, Weights]  # profile, threshold and weights by which it was scored
    made_by: tuple[EmbedderIdentity | None, str]
    nearest: str
    similarity: float  # to `nearest`; 0 without one
    rules: tuple[str, ...]  # of the screen
    run: Run | None  # its recorded outcome, if asked for


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
        self._profiles = settings.scoring_profiles()
        self._confidence = settings.confidence if "confidence" in settings.model_fields_set else None
        self.unreadable, self.inconsistent = LeftOut(), LeftOut()
        self.files = ["the topics"]
        self._rows: list[Row] = []
        self._hashes: set[int] = set()
        self._repeated = 0
        self._shared: dict[Any, Any] = {}
        self._decoder = msgspec.json.Decoder(ScoredDocument)

    def add(self, value: bytes | None, where: str, record_ms: int = 0, file: str = "the topics") -> None:
        """Take one output document; an unusable one is counted, and the first of these are named by `where`.

        `record_ms` is the Kafka record's timestamp, for the bounds of `report`. Raises CommandError.
        """
        raw, run = value or b"", None
        try:
            document = self._decoder.decode(raw)
            fields: Any = None if self._asked is None else msgspec.json.decode(raw)
            if document.scoring.decision not in (ACCEPTED, REJECTED):
                raise msgspec.ValidationError("scoring.decision is neither accepted nor rejected")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.unreadable.add(where, _advice(raw, error))
            return
        if (self._rescore or self._asked is not None) and (wrong := contradiction(document)) is not None:
            self.inconsistent.add(where, f"{cut_text(document.id, 60)}: {wrong}")
            return
        if self._asked is not None:
            run = self._run(document, *read_outcome(fields, where, self._asked), file)
        # A worker that delivers at least once may repeat an output byte for byte.
        if (digest := hash(raw)) in self._hashes:  # of 64 bits: two of a million documents share it with 3e-8
            self._repeated += 1
            return
        self._hashes.add(digest)
        self._rows.append(self._row(document, record_ms, run))

    def _row(self, document: ScoredDocument, record_ms: int, run: Run | None) -> Row:
        it, nearest, once = document.scoring, document.scoring.nearest, self._once
        before = after = Verdict(once(it.profile), it.score, it.threshold, once(it.decision))
        components, overrides = it.components, it.overrides
        if self._rescore:
            scored = score_trace(document, it.components.novelty, self._profiles, self._used(document))
            components, overrides, threshold = scored.components, scored.overrides, self._threshold(scored.profile)
            after = Verdict(once(scored.profile), scored.score, threshold, _decision(scored.score, threshold))
        trace = Trace(
            document.id[:CACHED_ID_LENGTH],
            shown_text(document.task.objective),
            once(document.metadata.task_domain),
            it.source.partition,
            it.source.offset,
            before,
            after,
            tuple(getattr(components, name) for name in _COMPONENTS),
            once(tuple(map(shown_text, overrides))),
        )
        return Row(
            trace,
            record_ms,
            it.stream_time_ms,
            once((before.profile, it.threshold, it.weights)),
            once((it.embedder, shown_text(f"{_named(it.embedder)}, kp-worker {it.worker_version}"))),
            "" if nearest is None else nearest.id,
            0.0 if nearest is None else nearest.similarity,
            () if it.screen is None else once(tuple(dict.fromkeys(map(shown_text, it.screen.rules)))),
            run,
        )

    def _once(self, value: Any) -> Any:
        """Return the first of all equal values: traces share them in memory."""
        return self._shared.setdefault(value, value)

    def _threshold(self, profile: str) -> float:
        own = self._profiles[profile].threshold
        return self._settings.threshold if own is None else own

    def _used(self, document: ScoredDocument) -> float | None:
        """Return a document's outcome confidence with the settings; None: the stated one. Raises CommandError."""
        if self._confidence == "stated":
            return None
        if self._confidence == "record" and self._standings is not None:
            return self._standings.used(document)
        simulates = self._asked is not None and self._asked.judging is not None
        if self._confidence == "record" and document.scoring.confidence is None and not simulates:
            raise CommandError(
                "confidence=record needs verdicts, and these traces were scored without: read the topics "
                "(--from-kafka), or simulate verdicts (--outcome FIELD --verdicts SHARE)"
            )
        return document.used

    def _run(self, document: ScoredDocument, outcome: float, claim: bool | None, task: str | None, file: str) -> Run:
        """Return a run, scored as its agent claims."""
        it, about, used = document.scoring, document.metadata, np.nan
        profiles = self._profiles if self._rescore else _own_profiles(it)
        scored = score_trace(as_claimed(document, claim), it.components.novelty, profiles)
        threshold = self._threshold(scored.profile) if self._rescore else it.threshold
        if self._standings is not None and claim is not False:
            used = self._standings.at(it.source.partition, it.source.offset, about.agent_id, about.task_domain).used
        return Run(outcome, claim, task, about.agent_id, about.task_domain, scored, file, threshold, used)

    # -- the report

    def report(self, source: str, last: int | None = None, since_ms: int = 0, share: Fraction | None = None) -> Report:
        """Return the numbers of the traces with `record_ms` from `since_ms` on, and of these only the `last` ones.

        `share` (0..1): propose thresholds that accept this share of each domain. Raises CommandError, also if there is
        no document to count.
        """
        rows = self._counted(last, since_ms)
        traces = [row.trace for row in rows]
        by_domain = grouped(traces, lambda it: it.domain)
        domains = [_domain(name, own) for name, own in islice(by_domain.items(), DOMAINS)]
        if rest := set(islice(by_domain, DOMAINS, None)):
            domains.append(_domain(f"{len(rest)} others", [it for it in traces if it.domain in rest], alone=False))
        counts = {name: len(own) for name, own in by_domain.items()}
        used = [profile for profile, _, _ in {row.setup for row in rows}]
        near = [row for row in rows if row.similarity >= NEAR]
        near_accepted = [row for row in near if row.trace.before.decision == ACCEPTED]
        profiles, comments = dict(self._profiles), dict[str, str]()
        proposal = None if share is None else self._propose(by_domain, share, profiles, comments)
        changes, outcome = None, None
        if self._rescore:
            accepted = sum(it.before.decision == ACCEPTED for it in traces)
            kept = same_share([it.after.score for it in traces], accepted)
            changed = [it for it in traces if it.after.decision != it.before.decision]
            changes = Changes(None if kept is None else kept.threshold, changed[:CHANGES])
        if self._asked is not None:
            # In the order of the files, so that the same files give the same figures.
            runs = sorted((row.run for row in rows if row.run), key=lambda run: self.files.index(run.file))
            outcome = measure_outcomes(runs, self._asked, judged=self._standings is not None)
        return Report(
            source=source,
            first=rfc3339(rows[0].time_ms),
            last=rfc3339(rows[-1].time_ms),
            partitions=len({it.partition for it in traces}),
            repeated=self._repeated,
            unreadable=self.unreadable,
            inconsistent=self.inconsistent,
            embedders=[(name, len(own)) for (_, name), own in grouped(rows, lambda row: row.made_by).items()],
            changed_within=sorted({name for name in used if used.count(name) > 1}),
            total=_domain("all", traces, alone=False),
            domains=domains,
            other_domains=len(rest),
            without_profile=without_profile(counts, self._profiles if self._rescore else {*self._profiles, *used}),
            unused_profiles=unused_profiles(self._profiles, counts),
            border=list(_border(traces)),
            near_duplicates=NearDuplicates(
                len(near),
                len(near_accepted),
                [(row.trace, row.nearest, row.similarity) for row in near_accepted[:NEAR_ONES]],
            ),
            hidden_text=dict(Counter(rule for row in rows for rule in row.rules).most_common()),
            changes=changes,
            share=proposal,
            outcome=outcome,
            config=config_to_paste(profiles, self._settings.threshold, comments) if self._rescore else None,
        )

    def _counted(self, last: int | None, since_ms: int) -> list[Row]:
        """Return the rows that count, in stream-time order: within a partition that is the order of scoring."""
        if not self._rows:
            count = self.unreadable.count + self.inconsistent.count
            if not count:
                raise CommandError("no documents")
            where, reason = (self.unreadable.first or self.inconsistent.first)[0]
            raise CommandError(f"none of {count} documents can be counted; {where}: {reason}")
        rows = [row for row in self._rows if row.record_ms >= since_ms]
        if last is not None:
            rows = sorted(rows, key=lambda row: row.record_ms)[-last:]
        if not rows:
            raise CommandError(f"none of {number_of(len(self._rows), 'trace')} is in the requested time range")
        return sorted(rows, key=lambda row: (row.time_ms, row.trace.partition, row.trace.offset))

    def _propose(
        self, by_domain: Mapping[str, Sequence[Trace]], share: Fraction, profiles: dict[str, Profile],
        comments: dict[str, str],
    ) -> Proposal:  # fmt: skip
        """Return the proposed thresholds; give them to `profiles`, and a comment on each to `comments`."""
        before, proposals = 0, []
        for rank, (name, traces) in enumerate(by_domain.items()):
            scores, last = np.array([it.after.score for it in traces]), traces[-1].after
            count, now = len(traces), sum(it.after.decision == ACCEPTED for it in traces)
            before += now
            if count >= LEAST_TRACES and (rank < DOMAINS or count >= FEW_TRACES):
                new, interval = share_threshold(scores, share), share_interval(scores, share)
                figures = last.threshold, new.threshold, now, new.accepted, new.wanted, new.above, interval
                proposals.append(ProposedThreshold(name, last.profile, count, *figures))
            elif rank < DOMAINS:
                proposals.append(ProposedThreshold(name, last.profile, count, last.threshold, last.threshold, now, now))
        default_moves = any(it.domain == DEFAULT_PROFILE and it.interval is not None for it in proposals)
        for it in proposals:
            if it.interval is not None:
                comments[it.domain] = accepts(it.accepted, it.traces, it.wanted, it.interval)
            elif default_moves and it.domain not in profiles:
                comments[it.domain] = f"as before: {too_few(it.traces)}"
            if it.domain in comments:  # with the weights that it has now: default's, if it has no profile
                profiles[it.domain] = Profile(self._profiles[it.profile].weights, it.threshold)
        accepted = before + sum(it.accepted - it.accepted_before for it in proposals)
        return Proposal(float(share), before, accepted, proposals, len(by_domain) - len(proposals))


T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the groups with equal keys, the largest first, then in order of first appearance."""
    groups = defaultdict[K, list[T]](list)
    for item in items:
        groups[key(item)].append(item)
    return dict(sorted(groups.items(), key=lambda group: -len(group[1])))


def _decision(score: float, threshold: float) -> str:
    return ACCEPTED if score >= threshold else REJECTED


def _domain(name: str, traces: Sequence[Trace], *, alone: bool = True) -> Domain:
    to = Counter(it.after.decision for it in traces if it.after.decision != it.before.decision)
    before, after = [it.before for it in traces], [it.after for it in traces]
    return Domain(name, len(traces), to[ACCEPTED], to[REJECTED], _scores(before, alone), _scores(after, alone))


def _scores(verdicts: Sequence[Verdict], alone: bool) -> Scores:
    scores, last = np.sort([it.score for it in verdicts]), verdicts[-1]
    reaching = (len(scores) - np.searchsorted(scores, THRESHOLDS)) / len(scores)
    # A score on an edge, such as 0.575, belongs to the bar that begins there.
    bars = np.clip(np.floor(scores * BINS + 1e-9).astype(int), 0, BINS - 1)
    return Scores(
        last.profile if alone else None,
        last.threshold if alone or len(set({it.profile: it.threshold for it in verdicts}.values())) == 1 else None,
        sum(it.decision == ACCEPTED for it in verdicts),
        tuple(np.quantile(scores, (0.1, 0.25, 0.5, 0.75, 0.9)).tolist()),
        tuple(reaching.tolist()),
        tuple(np.bincount(bars, minlength=BINS).tolist()),
    )


def _border(traces: Sequence[Trace]) -> Iterator[Border]:
    """Yield the border of each profile, the most frequent first."""
    for profile, own in grouped(traces, lambda it: it.after.profile).items():
        threshold = own[-1].after.threshold
        near = sorted(own, key=lambda it: abs(it.after.score - threshold))
        sides = [[it for it in near if (it.after.score >= threshold) is side][:EXAMPLES] for side in (True, False)]
        yield Border(profile, threshold, *(sorted(side, key=lambda it: -it.after.score) for side in sides))


# -- documents that cannot be counted


def _named(it: EmbedderIdentity | None) -> str:
    return "no embedder" if it is None else f"{it.name}, {it.precision}, {it.embed_text}, {it.max_tokens} tokens"


def _own_profiles(scoring: ReadScoring) -> dict[str, Profile]:
    """Return the profile by which a document was scored, for its domain."""
    return dict.fromkeys((DEFAULT_PROFILE, scoring.profile), Profile(scoring.weights))


def contradiction(document: ScoredDocument) -> str | None:
    """Return the first figure of a document that does not follow from its trace, bit for bit; None: all do."""
    it, nearest, stated = document.scoring, document.scoring.nearest, document.outcome.confidence
    try:
        score = score_trace(document, it.components.novelty, _own_profiles(it), document.used)
    except ValueError as error:
        return str(error)
    if it.confidence is not None and it.confidence.stated != stated:
        return f"confidence.stated is {it.confidence.stated!r}, but the trace states {stated!r}"
    figures: list[tuple[str, object, object]] = [
        ("novelty", it.components.novelty, NEUTRAL_NOVELTY if nearest is None else 1.0 - nearest.similarity),
        ("profile", it.profile, score.profile),
        *((name, getattr(it.components, name), getattr(score.components, name)) for name in _COMPONENTS),
        ("overrides", ", ".join(it.overrides), ", ".join(score.overrides)),
        ("score", it.score, score.score),
        ("decision", it.decision, _decision(score.score, it.threshold)),
    ]
    for name, stored, follows in figures:
        if stored != follows:
            return f"{name} is {stored!r}, but {follows!r} follows from the trace"
    return None


def _advice(raw: bytes, error: Exception) -> str:
    """Return why a document cannot be read, in the parser's words if the trace is at fault."""
    try:
        # Whatever the limits are now: the documents were accepted earlier.
        parse_trace(raw, Limits(max_bytes=2**31, max_steps=2**31, max_depth=256))
    except InvalidTrace as invalid:
        return f"{invalid.reason}: {invalid.message}"
    text = str(error)
    return "it is not scored: kp-worker score first" if "`scoring`" in text and "missing" in text else text

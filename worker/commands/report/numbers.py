"""The figures of `kp-worker report`: scored documents in, one document out, with the fields of --json as attributes.

Nothing is embedded: a document has its novelty, and no decision changes the novelty of a later trace.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import islice
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import Struct

from worker.commands.report.outcomes import Asked, Run, as_claimed, measure_outcomes, read_outcome
from worker.commands.shared.console import CommandError
from worker.commands.shared.placed_verdicts import Standings
from worker.commands.shared.shown import cut_text, shown_text
from worker.commands.shared.thresholds import (
    FEW_TRACES,
    LEAST_TRACES,
    accepts,
    config_to_paste,
    same_share,
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
    Profile,
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


class LeftOut(Struct):
    """Documents skipped for one kind of reason."""

    count: int = 0
    first: list[tuple[str, str]] = msgspec.field(default_factory=list)  # places and reasons

    def add(self, where: str, reason: str) -> None:
        """Count a document; the first ones are kept with their reason."""
        self.count += 1
        if len(self.first) < LEFT_OUT:
            self.first.append((shown_text(where), shown_text(reason)))


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
        scoring, nearest, once = document.scoring, document.scoring.nearest, self._once
        before = after = Verdict(once(scoring.profile), scoring.score, scoring.threshold, once(scoring.decision))
        components, overrides = scoring.components, scoring.overrides
        if self._rescore:
            scored = score_trace(document, scoring.components.novelty, self._profiles, self._used(document))
            components, overrides, threshold = scored.components, scored.overrides, self._threshold(scored.profile)
            after = Verdict(once(scored.profile), scored.score, threshold, _decision(scored.score, threshold))
        trace = Trace(
            document.id[:CACHED_ID_LENGTH],
            shown_text(document.task.objective),
            once(document.metadata.task_domain),
            scoring.source.partition,
            scoring.source.offset,
            before,
            after,
            tuple(getattr(components, name) for name in _COMPONENTS),
            once(tuple(map(shown_text, overrides))),
        )
        return Row(
            trace,
            record_ms,
            scoring.stream_time_ms,
            once((before.profile, scoring.threshold, scoring.weights)),
            once((scoring.embedder, shown_text(f"{_named(scoring.embedder)}, kp-worker {scoring.worker_version}"))),
            "" if nearest is None else nearest.id,
            0.0 if nearest is None else nearest.similarity,
            () if scoring.screen is None else once(tuple(dict.fromkeys(map(shown_text, scoring.screen.rules)))),
            run,
        )

    def _once(self, value: Any) -> Any:
        """Return the first of all equal values: traces share them in memory."""
        return self._shared.setdefault(value, value)

    def _threshold(self, profile: str) -> float:
        return self._profiles[profile].threshold_or(self._settings.threshold)

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
        scoring, about, used = document.scoring, document.metadata, np.nan
        profiles = self._profiles if self._rescore else _own_profiles(scoring)
        scored = score_trace(as_claimed(document, claim), scoring.components.novelty, profiles)
        threshold = self._threshold(scored.profile) if self._rescore else scoring.threshold
        if self._standings is not None and claim is not False:
            used = self._standings.at(
                scoring.source.partition, scoring.source.offset, about.agent_id, about.task_domain
            ).used
        return Run(outcome, claim, task, about.agent_id, about.task_domain, scored, file, threshold, used)

    # -- the report

    def report(
        self, source: str, last: int | None = None, since_ms: int = 0, share: Fraction | None = None
    ) -> SimpleNamespace:
        """Return the figures of the traces with `record_ms` from `since_ms` on, and of these only the `last` ones.

        `share` (0..1): propose thresholds that accept this share of each domain. Raises CommandError, also if there is
        no document to count.
        """
        rows = self._counted(last, since_ms)
        traces = [row.trace for row in rows]
        by_domain = grouped(traces, lambda trace: trace.domain)
        counts = {name: len(own) for name, own in by_domain.items()}
        domains = [_domain(name, own) for name, own in islice(by_domain.items(), DOMAINS)]
        if rest := set(islice(by_domain, DOMAINS, None)):
            domains.append(
                _domain(f"{len(rest)} others", [trace for trace in traces if trace.domain in rest], alone=False)
            )
        used = [profile for profile, _, _ in {row.setup for row in rows}]
        near = [row for row in rows if row.similarity >= NEAR]
        near_accepted = [row for row in near if row.trace.before.decision == ACCEPTED]
        proposal, profiles, comments = None, self._profiles, dict[str, str]()
        if share is not None:
            proposal, profiles, comments = self._propose(by_domain, share)
        changes, outcome = None, None
        if self._rescore:
            accepted = sum(trace.before.decision == ACCEPTED for trace in traces)
            changed = [trace for trace in traces if trace.after.decision != trace.before.decision]
            changes = SimpleNamespace(
                # the threshold for all profiles that accepts as many as now; None if none are accepted
                same_share=same_share([trace.after.score for trace in traces], accepted),
                decisions=changed[:CHANGES],  # the first ones by stream time
            )
        if self._asked is not None:
            # In the order of the files, so that the same files give the same figures.
            runs = sorted((row.run for row in rows if row.run), key=lambda run: self.files.index(run.file))
            outcome = measure_outcomes(runs, self._asked, judged=self._standings is not None)
        return SimpleNamespace(
            source=source,
            first=rfc3339(rows[0].time_ms),  # stream time
            last=rfc3339(rows[-1].time_ms),
            partitions=len({trace.partition for trace in traces}),
            repeated=self._repeated,  # documents with identical bytes, counted once
            unreadable=self.unreadable,
            inconsistent=self.inconsistent,
            # each embedder with the worker's version, and its traces
            embedders=[(name, len(own)) for (_, name), own in grouped(rows, lambda row: row.made_by).items()],
            # profiles that had several thresholds or weights
            changed_within=sorted({name for name in used if used.count(name) > 1}),
            total=_domain("all", traces, alone=False),
            domains=domains,  # the largest ones; the last row sums the others
            other_domains=len(rest),  # how many those are
            without_profile=without_profile(counts, self._profiles if self._rescore else {*self._profiles, *used}),
            unused_profiles=unused_profiles(self._profiles, counts),
            border=list(_border(traces)),
            near_duplicates=SimpleNamespace(
                traces=len(near),
                accepted=len(near_accepted),
                # each with the earlier trace's id and similarity
                examples=[(row.trace, row.nearest, row.similarity) for row in near_accepted[:NEAR_ONES]],
            ),
            # the traces that each rule of the screen marks
            hidden_text=dict(Counter(rule for row in rows for rule in row.rules).most_common()),
            changes=changes,
            share=proposal,
            outcome=outcome,
            # the settings and the proposed thresholds, to paste
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
        self, by_domain: Mapping[str, Sequence[Trace]], share: Fraction
    ) -> tuple[SimpleNamespace, dict[str, Profile], dict[str, str]]:
        """Return the proposed thresholds, the profiles with them, and a comment on each of these."""
        before, rows, profiles, comments = 0, [], dict(self._profiles), dict[str, str]()
        for rank, (name, traces) in enumerate(by_domain.items()):
            count, now, last = len(traces), sum(trace.after.decision == ACCEPTED for trace in traces), traces[-1].after
            before += now
            if rank >= DOMAINS and count < FEW_TRACES:
                continue
            row = SimpleNamespace(
                domain=name,
                profile=last.profile,
                traces=count,
                threshold_before=last.threshold,  # with the scores of the settings, as `threshold`
                threshold=last.threshold,
                accepted_before=now,
                accepted=now,
                wanted=None,  # see ShareThreshold; None for fewer than LEAST_TRACES, which keep their threshold
                above=None,
                interval=None,  # 95 % bootstrap interval of the proposed threshold
            )
            if count >= LEAST_TRACES:
                scores = np.array([trace.after.score for trace in traces])
                vars(row).update(share_threshold(scores, share)._asdict(), interval=share_interval(scores, share))
                comments[name] = accepts(row.accepted, count, row.wanted, row.interval)
            rows.append(row)
        default_moves = DEFAULT_PROFILE in comments
        for row in rows:
            if default_moves and row.domain not in profiles:
                comments.setdefault(row.domain, f"as before: {too_few(row.traces)}")
            if row.domain in comments:  # with the weights that it has now: default's, if it has no profile
                profiles[row.domain] = Profile(self._profiles[row.profile].weights, row.threshold)
        proposal = SimpleNamespace(
            share=float(share),
            accepted_before=before,
            accepted=before + sum(row.accepted - row.accepted_before for row in rows),
            domains=rows,  # the largest ones, and all with FEW_TRACES or more
            other_domains=len(by_domain) - len(rows),  # which keep their threshold
        )
        return proposal, profiles, comments


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


def _domain(name: str, traces: Sequence[Trace], *, alone: bool = True) -> SimpleNamespace:
    """Return a domain as it is and, where settings are tried, as it would be; `alone`: not several domains together."""
    to = Counter(trace.after.decision for trace in traces if trace.after.decision != trace.before.decision)
    return SimpleNamespace(
        domain=name,
        traces=len(traces),
        to_accepted=to[ACCEPTED],  # traces whose decision becomes accepted
        to_rejected=to[REJECTED],
        before=_scores([trace.before for trace in traces], alone),
        after=_scores([trace.after for trace in traces], alone),
    )


def _scores(verdicts: Sequence[Verdict], alone: bool) -> SimpleNamespace:
    scores, last = np.sort([verdict.score for verdict in verdicts]), verdicts[-1]
    reaching = (len(scores) - np.searchsorted(scores, THRESHOLDS)) / len(scores)
    # A score on an edge, such as 0.575, belongs to the bar that begins there.
    bars = np.clip(np.floor(scores * BINS + 1e-9).astype(int), 0, BINS - 1)
    one_threshold = alone or len(set({verdict.profile: verdict.threshold for verdict in verdicts}.values())) == 1
    return SimpleNamespace(
        profile=last.profile if alone else None,  # of its last trace
        threshold=last.threshold if one_threshold else None,  # likewise, and if all profiles have the same
        accepted=sum(verdict.decision == ACCEPTED for verdict in verdicts),
        quantiles=np.quantile(scores, (0.1, 0.25, 0.5, 0.75, 0.9)).tolist(),
        reaching=reaching.tolist(),  # share that reaches each of THRESHOLDS
        histogram=np.bincount(bars, minlength=BINS).tolist(),  # from 0 to 1
    )


def _border(traces: Sequence[Trace]) -> Iterator[SimpleNamespace]:
    """Yield each profile's threshold and the traces nearest to it, the highest score first."""
    for profile, own in grouped(traces, lambda trace: trace.after.profile).items():
        threshold = own[-1].after.threshold
        near = sorted(own, key=lambda trace: abs(trace.after.score - threshold))
        above = [trace for trace in near if trace.after.score >= threshold][:EXAMPLES]
        below = [trace for trace in near if trace.after.score < threshold][:EXAMPLES]
        for side in (above, below):
            side.sort(key=lambda trace: -trace.after.score)
        yield SimpleNamespace(profile=profile, threshold=threshold, above=above, below=below)


# -- documents that cannot be counted


def _named(embedder: EmbedderIdentity | None) -> str:
    if embedder is None:
        return "no embedder"
    return f"{embedder.name}, {embedder.precision}, {embedder.embed_text}, {embedder.max_tokens} tokens"


def _own_profiles(scoring: ReadScoring) -> dict[str, Profile]:
    """Return the profile by which a document was scored, for its domain."""
    return dict.fromkeys((DEFAULT_PROFILE, scoring.profile), Profile(scoring.weights))


def contradiction(document: ScoredDocument) -> str | None:
    """Return the first figure of a document that does not follow from its trace, bit for bit; None: all do."""
    scoring, nearest, stated = document.scoring, document.scoring.nearest, document.outcome.confidence
    try:
        score = score_trace(document, scoring.components.novelty, _own_profiles(scoring), document.used)
    except ValueError as error:
        return str(error)
    if scoring.confidence is not None and scoring.confidence.stated != stated:
        return f"confidence.stated is {scoring.confidence.stated!r}, but the trace states {stated!r}"
    figures: list[tuple[str, object, object]] = [
        ("novelty", scoring.components.novelty, NEUTRAL_NOVELTY if nearest is None else 1.0 - nearest.similarity),
        ("profile", scoring.profile, score.profile),
        *((name, getattr(scoring.components, name), getattr(score.components, name)) for name in _COMPONENTS),
        ("overrides", ", ".join(scoring.overrides), ", ".join(score.overrides)),
        ("score", scoring.score, score.score),
        ("decision", scoring.decision, _decision(score.score, scoring.threshold)),
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

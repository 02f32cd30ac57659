"""The effect of other settings, as values: scored documents in, one `WhatIf` or one `Proposal` out.

Nothing is embedded: the document contains its novelty, and no decision changes the novelty of a later trace. Field
names are those of the JSON output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from worker.commands.analysis.documents import (
    DOMAINS_SHOWN,
    LeftOut,
    NoDocuments,
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
from worker.commands.shared.json_lines import label_of
from worker.commands.shared.placed_verdicts import same_share
from worker.commands.shared.scored_document import DocumentScoring, ScoredDocument
from worker.commands.shared.shown import cut_text, is_cut, shown_text
from worker.commands.shared.thresholds import (
    FEW_TRACES,
    LEAST_TRACES,
    accepts,
    config_to_paste,
    share_interval,
    share_threshold,
    too_few,
)
from worker.core.domains import DomainWithoutProfile, UnusedProfile, unused_profiles, without_profile
from worker.core.novelty import CACHED_ID_LENGTH
from worker.core.records import ACCEPTED, REJECTED
from worker.core.scoring import DEFAULT_PROFILE, NEUTRAL_NOVELTY, Profile, Score, score_trace
from worker.core.trace import InvalidTrace, Limits, parse_trace

QUANTILES: Final = (0.1, 0.25, 0.5, 0.75, 0.9)
BINS: Final = 20
"""Bars of the histogram: 0.05 each."""

_ANY: Limits = Limits(max_bytes=2**31, max_steps=2**31, max_depth=256)
"""The documents were accepted earlier, whatever the limits are now."""


class Setup(NamedTuple):
    """The profile and the threshold by which a trace is judged."""

    profile: str
    threshold: float


class RescoredTraces(ScoredTraces):
    """Traces with their score and decision before and after.

    `profiles` and `threshold` are the candidate's. `confidence`: returns a document's outcome confidence with the
    candidate (None: the stated one); by default the document keeps its own. `label`: the field (with dots if nested)
    that identifies a trace's task. `fields`: the field names of the first document without a label.
    """

    cannot = "counted"

    def __init__(
        self,
        profiles: Mapping[str, Profile],
        threshold: float,
        label: str | None = None,
        confidence: Callable[[ScoredDocument], float | None] = lambda document: document.used,
    ) -> None:
        super().__init__(
            {
                "score_before": "f8", "score": "f8", "accepted_before": "?", "accepted": "?", "domain": "u4",
                "setup_before": "u4", "setup": "u4", "labelled": "?", "label": "u8",
            }
        )  # fmt: skip
        self.profiles, self.threshold, self.label = profiles, threshold, label
        self._confidence = confidence
        self.fields: list[str] = []
        self._decoder = msgspec.json.Decoder(ScoredDocument)

    def add(self, value: bytes | None, where: str, record_ms: int = 0) -> None:
        """Rescore one document (ScoredTraces.add)."""
        raw = value or b""
        try:
            document = self._decoder.decode(raw)
            label = None if self.label is None else self._label(raw, self.label)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.unreadable.add(where, _advice(raw, error))
            return
        wrong = contradiction(document)
        if wrong is not None:
            self.inconsistent.add(where, f"{cut_text(document.id, 60)}: {wrong}")
            return
        before = document.scoring
        after = score_trace(document, before.components.novelty, self.profiles, self._confidence(document))
        own = self.profiles[after.profile].threshold
        threshold = self.threshold if own is None else own
        cells = {
            "score_before": before.score,
            "score": after.score,
            "accepted_before": before.decision == ACCEPTED,
            "accepted": after.score >= threshold,
            "domain": self.code("domain", cut_text(document.metadata.task_domain)),
            "setup_before": self.code("setup", Setup(before.profile, before.threshold)),
            "setup": self.code("setup", Setup(after.profile, threshold)),
            "labelled": label is not None,
            "label": 0 if label is None else hash64(label.encode()),
        }
        self._keep(raw, before, record_ms, cut_text(document.id, CACHED_ID_LENGTH), cells)

    def _label(self, raw: bytes, path: str) -> str | None:
        fields: dict[str, Any] = msgspec.json.decode(raw)
        label = label_of(fields, path)
        if label is None:
            self.fields = self.fields or [shown_text(name) for name in sorted(fields)]
        return label


def contradiction(document: ScoredDocument) -> str | None:
    """Return the first figure of a document that does not follow from its trace, bit for bit; None: all do."""
    scoring = document.scoring
    own = dict.fromkeys((DEFAULT_PROFILE, scoring.profile), Profile(scoring.weights))
    try:
        score = score_trace(document, scoring.components.novelty, own, document.used)
    except ValueError as error:
        return str(error)
    stated = document.outcome.confidence
    if scoring.confidence is not None and scoring.confidence.stated != stated:
        return f"confidence.stated is {scoring.confidence.stated!r}, but the trace states {stated!r}"
    for name, stored, follows in _figures(scoring, score):
        if stored != follows:
            return f"{name} is {stored!r}, but {follows!r} follows from the trace"
    return None


def _figures(scoring: DocumentScoring, score: Score) -> Iterator[tuple[str, object, object]]:
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
    return unscored(error) or str(error)


class Verdict(Struct, frozen=True):
    """One trace's score and decision, and the threshold behind it."""

    profile: str
    score: float
    threshold: float
    decision: str


class RescoredTrace(Struct, frozen=True):
    """One trace before and after."""

    id: str
    domain: str
    partition: int  # of the source record
    offset: int
    before: Verdict
    after: Verdict


class Scores(Struct, frozen=True):
    """The scores of a domain."""

    profile: str | None  # of its last trace; None for all domains together
    threshold: float | None  # likewise
    accepted: int
    quantiles: tuple[float, ...]  # at QUANTILES
    histogram: tuple[int, ...]  # BINS counts from 0 to 1


class DomainChange(Struct, frozen=True):
    """A domain before and after."""

    domain: str
    traces: int
    to_accepted: int  # traces whose decision becomes accepted
    to_rejected: int
    before: Scores
    after: Scores


class Documents(Struct, frozen=True):
    """Skipped documents."""

    count: int
    first: list[tuple[str, str]]  # places and reasons of the first ones

    @classmethod
    def of(cls, left_out: LeftOut) -> Documents:
        """Return the documents skipped for one kind of reason."""
        return cls(left_out.count, left_out.shown)


class WhatIf(Struct, frozen=True):
    """Everything that a candidate changes."""

    source: str
    repeated: int
    unreadable: Documents
    inconsistent: Documents
    total: DomainChange
    domains: list[DomainChange]  # the largest ones; the last row sums the others
    other_domains: int  # how many those are
    flips: list[RescoredTrace]  # the first traces, by stream time, whose decision changes
    same_share: float | None
    """The threshold for all profiles that accepts as many new scores as are accepted now; None if none are."""
    without_profile: list[DomainWithoutProfile]
    unused_profiles: list[UnusedProfile]
    config: str  # the candidate as a config file


class BeforeAndAfter:
    """The traces that count, in stream-time order. Raises NoDocuments."""

    def __init__(self, traces: RescoredTraces, last: int | None = None, since_ms: int = 0) -> None:
        self._traces, self._names, self._setups = traces, traces.names("domain"), traces.names("setup")
        self._table, self.repeated = traces.counted(last, since_ms)
        self._changed = self._table["accepted_before"] != self._table["accepted"]

    def __iter__(self) -> Iterator[RescoredTrace]:
        return map(self._trace, self._table)

    def summary(self, source: str, flips: int) -> WhatIf:
        """Return the changes; `flips` limits the traces that are named."""
        traces, codes = self._traces, self._table["domain"]
        largest, rest, others = by_domain(codes)
        domains = [self._change(self._names[code], at, one_setup=True) for code, at in largest]
        if rest:
            domains.append(self._change(f"{len(rest)} others", others, one_setup=False))
        counts = {self._names[code]: count for code, count in counts_of(codes)}
        kept = same_share(self._table["score"], int(np.count_nonzero(self._table["accepted_before"])))
        return WhatIf(
            source=source,
            repeated=self.repeated,
            unreadable=Documents.of(traces.unreadable),
            inconsistent=Documents.of(traces.inconsistent),
            total=self._change("all", np.arange(len(codes)), one_setup=False),
            domains=domains,
            other_domains=len(rest),
            flips=[self._trace(row) for row in self._table[self._changed][:flips]],
            same_share=None if kept is None else kept.threshold,
            without_profile=without_profile(counts, traces.profiles),
            unused_profiles=unused_profiles(traces.profiles, counts),
            config=config_to_paste(traces.profiles, traces.threshold),
        )

    def _change(self, domain: str, at: Rows, *, one_setup: bool) -> DomainChange:
        changed = self._table["accepted"][at][self._changed[at]]
        to_accepted = int(np.count_nonzero(changed))
        return DomainChange(
            domain=domain,
            traces=len(at),
            to_accepted=to_accepted,
            to_rejected=len(changed) - to_accepted,
            before=self._scores("_before", self._table[at], one_setup=one_setup),
            after=self._scores("", self._table[at], one_setup=one_setup),
        )

    def _scores(self, when: str, table: Table, *, one_setup: bool) -> Scores:
        scores = table[f"score{when}"]
        profile, threshold = self._setups[table[f"setup{when}"][-1]] if one_setup else (None, None)
        return Scores(
            profile=profile,
            threshold=threshold,
            accepted=int(np.count_nonzero(table[f"accepted{when}"])),
            quantiles=floats(np.quantile(scores, QUANTILES)),
            histogram=bars(scores, BINS),
        )

    def _trace(self, row: np.void) -> RescoredTrace:
        before, after = (
            Verdict(setup.profile, float(row[f"score{when}"]), setup.threshold, decision)
            for when in ("_before", "")
            for setup in [self._setups[row[f"setup{when}"]]]
            for decision in [ACCEPTED if row[f"accepted{when}"] else REJECTED]
        )
        text, domain = self._traces.texts[row["row"]], self._names[row["domain"]]
        return RescoredTrace(text, domain, int(row["partition"]), int(row["offset"]), before, after)


class Labels(Struct, frozen=True):
    """Counts of labelled traces."""

    firsts: int  # no earlier trace of their domain has their label
    repeats: int  # the others


class AtThreshold(Struct, frozen=True):
    """The traces that a threshold accepts."""

    threshold: float | None  # None for all domains together
    accepted: int
    labels: Labels | None  # of the accepted ones


class DomainProposal(Struct, frozen=True):
    """A domain at its current and at the proposed threshold, both with the candidate's scores.

    `wanted`, `above` and `interval` are None for all domains together, and for a domain with fewer than LEAST_TRACES,
    whose `proposed` equals `current`.
    """

    domain: str
    profile: str | None  # in force now; None for all domains together
    traces: int
    labels: Labels | None
    current: AtThreshold
    proposed: AtThreshold
    wanted: int | None  # see ShareThreshold
    above: int | None  # see ShareThreshold
    interval: tuple[float, float] | None  # 95 % bootstrap interval of the proposed threshold


class Proposal(Struct, frozen=True):
    """Thresholds that accept a share of each domain."""

    source: str
    share: float
    label: str | None
    unlabelled: int
    repeated: int
    unreadable: Documents
    inconsistent: Documents
    total: DomainProposal
    domains: list[DomainProposal]
    """The largest ones, and all with FEW_TRACES or more; those with fewer than LEAST_TRACES keep their threshold."""
    other_domains: int  # how many others keep their threshold
    cut: list[str]  # domains whose name is too long for the config
    without_profile: list[DomainWithoutProfile]
    config: str  # the candidate with these thresholds, as a config file


def propose(
    traces: RescoredTraces, share: Fraction, source: str, last: int | None = None, since_ms: int = 0
) -> Proposal:
    """Return thresholds that accept a share (0..1) of each domain's traces. Raises NoDocuments."""
    table, repeated = traces.counted(last, since_ms)
    labelled = table["labelled"]
    if traces.label is not None and not labelled.any():
        raise NoDocuments(
            f"none of {len(table)} traces has a label at {traces.label}: --label names a field with text or a number; "
            f"the first one has {', '.join(traces.fields)}"
        )
    found, others, total = _Domains(traces, table).proposals(share)
    names = traces.names("domain")
    counts = {names[code]: count for code, count in counts_of(table["domain"])}
    return Proposal(
        source=source,
        share=float(share),
        label=traces.label,
        unlabelled=0 if traces.label is None else int(np.count_nonzero(~labelled)),
        repeated=repeated,
        unreadable=Documents.of(traces.unreadable),
        inconsistent=Documents.of(traces.inconsistent),
        total=total,
        domains=found,
        other_domains=others,
        cut=[it.domain for it in found if is_cut(it.domain)],
        without_profile=without_profile(counts, traces.profiles),
        config=_config(traces, found),
    )


class _Domains:
    """The traces that count, in stream-time order, by domain."""

    def __init__(self, traces: RescoredTraces, table: Table) -> None:
        self._traces, self._table = traces, table
        self._first = np.zeros(len(table), bool)
        at = np.flatnonzero(table["labelled"])
        # Different domains may use the same task labels.
        self._first[at[np.unique(table[["domain", "label"]][at], return_index=True)[1]]] = True

    def proposals(self, share: Fraction) -> tuple[list[DomainProposal], int, DomainProposal]:
        """Return the domains that get a threshold, largest first, the number of others, and all together."""
        counts, accepted = counts_of(self._table["domain"]), self._table["accepted"].copy()
        chosen = [code for rank, (code, count) in enumerate(counts) if rank < DOMAINS_SHOWN or count >= FEW_TRACES]
        found = [self._proposal(code, share, accepted) for code in chosen]
        everything = np.arange(len(self._table))
        now, then = (self._at(None, everything[it]) for it in (self._table["accepted"], accepted))
        labels = self._labels(everything)
        total = DomainProposal("all", None, len(everything), labels, now, then, None, None, None)
        return found, len(counts) - len(chosen), total

    def _proposal(self, code: int, share: Fraction, accepted: npt.NDArray[np.bool_]) -> DomainProposal:
        """Return the proposal for one domain, and set the domain's rows of `accepted` accordingly."""
        at = np.flatnonzero(self._table["domain"] == code)
        table = self._table[at]
        setup: Setup = self._traces.names("setup")[table["setup"][-1]]
        name, labels = self._traces.names("domain")[code], self._labels(at)
        current = self._at(setup.threshold, at[table["accepted"]])
        if len(at) < LEAST_TRACES:
            accepted[at] = table["score"] >= setup.threshold
            return DomainProposal(name, setup.profile, len(at), labels, current, current, None, None, None)
        found = share_threshold(table["score"], share)
        accepted[at] = table["score"] >= found.threshold
        proposed, interval = self._at(found.threshold, at[accepted[at]]), share_interval(table["score"], share)
        return DomainProposal(
            name, setup.profile, len(at), labels, current, proposed, found.wanted, found.above, interval
        )

    def _at(self, threshold: float | None, accepted: Rows) -> AtThreshold:
        return AtThreshold(threshold, len(accepted), self._labels(accepted))

    def _labels(self, at: Rows) -> Labels | None:
        if self._traces.label is None:
            return None
        first = int(np.count_nonzero(self._first[at]))
        return Labels(first, int(np.count_nonzero(self._table["labelled"][at])) - first)


def _config(traces: RescoredTraces, domains: Sequence[DomainProposal]) -> str:
    """Return the candidate with the proposed thresholds as a config file."""
    profiles, comments = dict(traces.profiles), {}
    default_moves = any(it.domain == DEFAULT_PROFILE and it.interval is not None for it in domains)
    for it in domains:
        if it.profile is None or is_cut(it.domain):
            continue
        # The weights that the domain has now: default's, if it has no profile.
        proposed = Profile(traces.profiles[it.profile].weights, it.proposed.threshold)
        if it.interval is not None:
            profiles[it.domain] = proposed
            comments[it.domain] = accepts(it.proposed.accepted, it.traces, it.wanted, it.interval)
        elif default_moves and it.domain not in profiles:
            profiles[it.domain] = proposed
            comments[it.domain] = f"as before: {too_few(it.traces)}"
    return config_to_paste(profiles, traces.threshold, comments)

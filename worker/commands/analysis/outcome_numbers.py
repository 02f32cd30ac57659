"""How well scores tell successful runs from failed ones: figures on runs whose outcome is recorded.

A run is scored by its agent's claim, never by the recorded outcome. A fractional outcome counts as that share of a
success. Intervals are 95 % bootstrap intervals over the tasks: they say nothing about other agents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec
import numpy as np
from msgspec import Struct

from worker.commands.analysis.novelty import Floats, Interval, Ints, interval, mean_of, resampled
from worker.config import Settings
from worker.core.scoring import Profile, score_trace
from worker.core.trace import ReasoningTrace
from worker.core.track_record import TrackRecord
from worker.core.verdicts import issued_ms, make_verdict

STATED: Final = 0.95
"""The confidence that every run claims: agents state a constant, usually about this one."""

ORDERS: Final = 10
"""Random orders in which runs arrive and are judged; the figures are means over them."""

WARM_UP: Final = 5
"""With verdicts, the first fifth of an order is not measured, because few verdicts are known there."""

BEST: Final = 5
"""The best fifth by score."""

BINS: Final = 10
"""Equal bins of confidence, for the calibration."""

FOLDS: Final = 5
"""Parts of the tasks: a threshold is chosen on four of them and measured on the fifth."""

_START: Final = datetime(2000, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class Runs:
    """Runs in the order of their files."""

    traces: list[ReasoningTrace]
    novelty: Floats
    outcome: Floats  # 0 to 1
    tasks: Ints  # numbered from 0, as are domains and files
    domains: Ints
    files: Ints
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of files and domains

    def __len__(self) -> int:
        return len(self.traces)


def as_claimed(trace: ReasoningTrace, claimed: bool | None) -> ReasoningTrace:
    """Return a run as if it ended as its agent claims, without the recorded outcome. None counts as success."""
    return msgspec.structs.replace(
        trace,
        metadata=msgspec.structs.replace(trace.metadata, success=claimed is not False),
        outcome=msgspec.structs.replace(trace.outcome, confidence=STATED, evaluated=None),
    )


class Scored(Struct, frozen=True):
    """The results of all runs of an order; NaN: the run is not in it."""

    score: Floats
    confidence: Floats  # outcome confidence
    accepted: Floats


class Bin(Struct, frozen=True):
    """Runs whose confidence is in one of BINS equal bins."""

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
    base: float  # Brier score of the share of successes (of each)


class Threshold(Struct, frozen=True):
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
    better: Threshold | None


class Part(Struct, frozen=True):
    """A file or domain."""

    name: str
    runs: int
    succeeded: float  # share of the runs
    claims: int  # runs that claim success
    true: float | None  # share of these claims


class Judging(Struct, frozen=True):
    """Which runs get verdicts."""

    share: float  # of the runs, drawn at random
    late: int  # runs until a verdict arrives
    seed: int


class Outcomes(Struct, frozen=True):
    """Everything that `evaluate --outcome` shows."""

    outcome: str
    claimed: str | None
    task: str | None
    runs: int
    tasks: int
    succeeded: float
    admissions: int
    admissions_true: float | None
    threshold: float  # in force for profiles without a threshold
    embedder: str
    files: list[Part]
    domains: list[Part]
    judging: Judging | None
    orders: int  # random orders; without verdicts one
    measured: int  # runs in each order; without verdicts all
    stated: Basis
    record: Basis | None  # only with verdicts, as `gain`
    gain: Interval | None  # by how much the AUC of the score rises, with the interval of the paired difference


class Measurement:
    """Measures scores of the same runs, in the same orders, with the same draws of tasks."""

    def __init__(self, runs: Runs, profiles: Mapping[str, Profile], threshold: float, seed: int) -> None:
        self._runs, self._profiles, self._threshold = runs, profiles, threshold
        rng = np.random.default_rng(seed)
        count = int(runs.tasks.max()) + 1
        self._weights = resampled(count, rng)
        self._folds = rng.permutation(count) % FOLDS
        self._scopes: list[tuple[str, Ints]] = [("all", np.zeros(len(runs), np.int64))]
        for name, groups in (("within domain", runs.domains), ("within file", runs.files)):
            if len(np.unique(groups)) > 1:
                self._scopes.append((name, groups))

    def score(self, confidence: Floats | None = None) -> Scored:
        """Score all runs with these confidences; None or NaN: the stated one."""
        scores, used, accepted = (np.empty(len(self._runs)) for _ in range(3))
        for place, trace in enumerate(self._runs.traces):
            taken = None if confidence is None or np.isnan(confidence[place]) else float(confidence[place])
            found = score_trace(trace, float(self._runs.novelty[place]), self._profiles, taken)
            own = self._profiles[found.profile].threshold
            scores[place] = found.score
            used[place] = found.components.outcome_confidence
            accepted[place] = found.score >= (self._threshold if own is None else own)
        return Scored(scores, used, accepted)

    def auc_draws(self, orders: Sequence[tuple[Ints, Scored]]) -> Floats | None:
        """Return the AUC of the score over all runs: draw 0 is the sample itself."""
        return mean_of([self._auc(at, scored.score, self._scopes[0][1]) for at, scored in orders])

    def basis(self, name: str, orders: Sequence[tuple[Ints, Scored]]) -> Basis:
        """Return the figures; `orders`: for each order, the measured runs and the scores of all runs."""
        outcome = self._runs.outcome
        squares = [self._mean(at, (it.confidence - outcome) ** 2, np.ones(len(outcome))) for at, it in orders]
        return Basis(
            name,
            _sure(interval([self._mean(at, it.accepted, np.ones(len(outcome))) for at, it in orders])),
            interval([self._mean(at, outcome, it.accepted) for at, it in orders]),
            _sure(interval(squares)),
            round(float(np.mean([calibration_error(outcome[at], it.confidence[at]) for at, it in orders])), 4),
            self._bins(orders),
            [self._scope(name, groups, orders) for name, groups in self._scopes],
            self._better(orders),
        )

    def _scope(self, name: str, groups: Ints, orders: Sequence[tuple[Ints, Scored]]) -> Scope:
        return Scope(
            name,
            interval([self._auc(at, it.score, groups) for at, it in orders]),
            interval([self._auc(at, it.confidence, groups) for at, it in orders]),
            _sure(interval([self._best(at, it.score, groups) for at, it in orders])),
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
            fifth = weight.sum(1, keepdims=True) / BEST
            share = np.clip(fifth - (np.cumsum(weight, 1) - weight), 0, weight)
            succeeded += np.divide(good * share, weight, out=np.zeros_like(weight), where=weight > 0).sum(1)
            taken += fifth[:, 0]
        with np.errstate(invalid="ignore"):
            return np.asarray(succeeded / taken)

    def _bins(self, orders: Sequence[tuple[Ints, Scored]]) -> list[Bin]:
        found = []
        total = sum(len(at) for at, _ in orders)
        for number in range(BINS):
            chosen = [(at[_bin_of(it.confidence[at]) == number], it) for at, it in orders]
            count = sum(len(at) for at, _ in chosen)
            if count:
                weights = sum(self._of_runs(at).sum(1) for at, _ in chosen)
                good = sum(self._of_runs(at) @ self._runs.outcome[at] for at, _ in chosen)
                mean = sum(float(it.confidence[at].sum()) for at, it in chosen) / count
                with np.errstate(invalid="ignore"):
                    succeeded = _sure(interval([np.asarray(good / weights)]))
                found.append(Bin(round(count / total, 4), round(mean, 4), succeeded))
        return found

    def _better(self, orders: Sequence[tuple[Ints, Scored]]) -> Threshold | None:
        """Choose a threshold on the tasks of all folds but one, and measure it on that one."""
        outcome, everywhere, ones = self._runs.outcome, [], np.ones(len(self._runs))
        decided = []
        for at, scored in orders:
            whole = best_threshold(scored.score[at], outcome[at])
            if whole is None:
                return None
            everywhere.append(whole)
            accepted = np.zeros(len(ones))
            folds = self._folds[self._runs.tasks]
            for fold in range(FOLDS):
                chosen = best_threshold(scored.score[at[folds[at] != fold]], outcome[at[folds[at] != fold]])
                if chosen is None:
                    return None
                accepted[folds == fold] = scored.score[folds == fold] >= chosen
            decided.append((at, accepted))
        gains = [(self._mean(at, it, outcome), self._mean(at, it, 1 - outcome)) for at, it in decided]
        return Threshold(
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
    return np.minimum((confidence * BINS).astype(np.int64), BINS - 1)


def calibration_error(outcome: Floats, confidence: Floats) -> float:
    """Return the mean distance of confidence and successes over BINS equal bins, weighted by runs."""
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


def judged_orders(runs: Runs, judging: Judging) -> list[tuple[Ints, Floats]]:
    """Return random orders of the runs: the measured ones, and each run's confidence according to its agent's record.

    A run's verdict is known `late` places after it. A run that admits failure has the stated confidence (NaN), as in
    the worker.
    """
    rng = np.random.default_rng(judging.seed)
    found: list[tuple[Ints, Floats]] = []
    for _ in range(ORDERS):
        order, record = rng.permutation(len(runs)), TrackRecord()
        judged = rng.random(len(runs)) < judging.share
        confidence = np.full(len(runs), np.nan)
        for place, run in enumerate(order):
            known = place - judging.late
            if known >= 0 and judged[known]:
                _judge(record, runs, int(order[known]), known)
            metadata = runs.traces[run].metadata
            if metadata.success:
                confidence[run] = record.standing(metadata.agent_id, metadata.task_domain).used
        found.append((np.sort(order[len(runs) // WARM_UP :]), confidence))
    return found


def _judge(record: TrackRecord, runs: Runs, run: int, place: int) -> None:
    trace = runs.traces[run]
    line = {
        "trace_id": f"{run}", "agent_id": trace.metadata.agent_id, "task_domain": trace.metadata.task_domain,
        "partition": 0, "success": float(runs.outcome[run]), "judge": "recorded",
    }  # fmt: skip
    verdict = make_verdict(line, topic="-", topic_id="-" * 22, issued_at=_START + timedelta(seconds=place))
    record.add(verdict, issued_ms(verdict, None), place)


def outcomes(
    runs: Runs, settings: Settings, outcome: str, claimed: str | None, task: str | None, seed: int,
    judging: Judging | None,
) -> Outcomes:  # fmt: skip
    """Return all figures; `outcome`, `claimed`, `task`: the names of these fields."""
    measurement = Measurement(runs, settings.scoring_profiles(), settings.threshold, seed)
    stated = measurement.score()
    by_stated: list[tuple[Ints, Scored]] = [(np.arange(len(runs)), stated)]
    by_record: list[tuple[Ints, Scored]] = []
    gain = None
    if judging is not None:
        orders = judged_orders(runs, judging)
        by_stated = [(at, stated) for at, _ in orders]
        by_record = [(at, measurement.score(confidence)) for at, confidence in orders]
        before, after = measurement.auc_draws(by_stated), measurement.auc_draws(by_record)
        gain = None if before is None or after is None else interval([after - before])
    failures = 1 - runs.outcome[[not trace.metadata.success for trace in runs.traces]]
    return Outcomes(
        outcome=outcome,
        claimed=claimed,
        task=task,
        runs=len(runs),
        tasks=int(runs.tasks.max()) + 1,
        succeeded=round(float(runs.outcome.mean()), 4),
        admissions=len(failures),
        admissions_true=round(float(failures.mean()), 4) if len(failures) else None,
        threshold=settings.threshold,
        embedder=settings.embedder,
        files=_parts("files", runs.files, runs),
        domains=_parts("domains", runs.domains, runs),
        judging=judging,
        orders=len(by_stated),
        measured=len(by_stated[0][0]),
        stated=measurement.basis("stated", by_stated),
        record=measurement.basis("record", by_record) if by_record else None,
        gain=gain,
    )


def _parts(kind: str, groups: Ints, runs: Runs) -> list[Part]:
    """Return the figures of each file or domain."""
    claims = np.array([trace.metadata.success for trace in runs.traces])
    found = []
    for number, name in enumerate(runs.names[kind]):
        own = groups == number
        true = runs.outcome[own & claims]
        share = round(float(true.mean()), 4) if len(true) else None
        found.append(Part(name, int(own.sum()), round(float(runs.outcome[own].mean()), 4), len(true), share))
    return found

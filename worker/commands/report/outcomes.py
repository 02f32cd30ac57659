"""How well scores tell success from failure: figures of runs with recorded outcomes.

Each run is scored by its agent's claim, never by the recorded outcome. A fractional outcome counts as that share of a
success. Intervals are 95 % bootstrap intervals over the tasks: they say nothing about other agents.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from worker.commands.shared.console import CommandError
from worker.commands.shared.json_lines import value_at
from worker.commands.shared.shown import fixed, shown_text
from worker.core.documents import ScoredDocument
from worker.core.scoring import Profile, Score, Weights, arithmetic, score_trace, weights_by_verdicts
from worker.core.terminal import number_of
from worker.core.trace import ReasoningTrace
from worker.core.track_record import TrackRecord
from worker.core.verdicts import issued_ms, unsigned_verdict

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.integer[Any]]

CHANCE = 0.5
"""The AUC of a figure without information."""

STATED = 0.95
"""The confidence that every run claims: agents state a constant, usually about this one."""

FOLDS = 5
"""Parts of the tasks: a threshold is chosen on four of them and measured on the fifth."""

DRAWS = 500
"""Bootstrap samples: the ends of a 95 % interval then vary by less than a tenth of its width."""

TASK = "x_task"
"""The field that names a run's task, if every run has it."""


class Interval(Struct, frozen=True):
    """A figure and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{fixed(self.value, 3)} ({fixed(self.low, 3)} to {fixed(self.high, 3)})"


class Scope(Struct, frozen=True):
    """The figures over all runs, or within each domain or file and then combined."""

    name: str
    auc_score: Interval | None
    """Probability that the score of a success exceeds that of a failure (of one domain or file); ties count half."""
    auc_confidence: Interval | None  # the same of the outcome confidence
    best_fifth: Interval | None  # share of successes among the fifth with the highest scores (of each)


class BetterThreshold(Struct, frozen=True):
    """The threshold that best separates successes from failures.

    `threshold` is chosen on all runs; the other figures are from parts of the tasks that did not choose it.
    """

    threshold: float
    accepted: Interval | None
    succeeded: Interval | None
    gain: Interval | None  # share of successes accepted minus share of failures accepted


class Basis(Struct, frozen=True):
    """The figures with one kind of outcome confidence; None: there is nothing to measure."""

    name: str
    accepted: Interval | None  # share of the runs
    succeeded: Interval | None  # share of the accepted runs
    brier: Interval | None  # mean squared distance of confidence and outcome
    constant: float  # the Brier score of the share of successes
    ece: float
    """Expected calibration error: the mean distance of confidence and successes over ten equal bins of confidence. It
    has no interval, because resampling makes it larger."""
    best_novelty: float  # mean novelty of the fifth with the highest scores
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


class Asked(NamedTuple):
    """What is asked of recorded outcomes: the names of the fields, and the verdicts to simulate."""

    outcome: str
    claimed: str | None = None
    judging: Judging | None = None


class Run(NamedTuple):
    """A run with a recorded outcome, scored as its agent claims."""

    outcome: float  # 0 to 1
    claim: bool | None  # False: it admits failure
    task: str | None
    agent: str
    domain: str
    scored: Score
    file: str = ""
    threshold: float = 0.0
    used: float = np.nan  # confidence by the track records so far; NaN: none, or the run admits failure


# -- reading


def read_outcome(
    document: ScoredDocument, fields: Mapping[str, Any], where: str, asked: Asked, profiles: Mapping[str, Profile]
) -> Run:
    """Return a run as its agent claims it. Raises CommandError for a missing or mistyped field."""
    outcome, task = value_at(fields, asked.outcome), value_at(fields, TASK)
    claim = None if asked.claimed is None else value_at(fields, asked.claimed)
    if outcome is None:
        raise CommandError(
            f"{where} has no outcome at {asked.outcome}; name another field with --outcome. The line has "
            f"{', '.join(sorted(fields))}"
        )
    if not isinstance(outcome, bool | int | float) or not 0 <= outcome <= 1:
        remedy = "--outcome must name a field with true, false or a number from 0 to 1"
        raise CommandError(f"{where}: {asked.outcome} is {shown_text(json.dumps(outcome))}; {remedy}")
    if claim is not None and not isinstance(claim, bool):
        remedy = "--claimed must name a field with true, false or null"
        raise CommandError(f"{where}: {asked.claimed} is {shown_text(json.dumps(claim))}; {remedy}")
    named = None if task is None or isinstance(task, Mapping | list) else str(task)
    scored = score_trace(as_claimed(document, claim), document.scoring.components.novelty, profiles)
    return Run(float(outcome), claim, named, document.metadata.agent_id, document.metadata.task_domain, scored)


def as_claimed(trace: ReasoningTrace, claimed: bool | None) -> ReasoningTrace:
    """Return a run as if it ended as its agent claims, without the recorded outcome. None counts as success."""
    return structs.replace(
        trace,
        metadata=structs.replace(trace.metadata, success=claimed is not False),
        outcome=structs.replace(trace.outcome, confidence=STATED, evaluated=None),
    )


# -- intervals


def numbered(names: Sequence[object]) -> Ints:
    """Return names as numbers 0..k-1, in order of first use."""
    known: dict[object, int] = {}
    return np.array([known.setdefault(name, len(known)) for name in names], np.int64)


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
    return None if mean is None else Interval(*_rounded(mean[0], *np.nanquantile(mean[1:], (0.025, 0.975))))


def _rounded(*values: Any) -> list[float]:
    return [round(float(value), 4) for value in values]


# -- figures


class Results(NamedTuple):
    """The results of all runs with one kind of confidence."""

    score: Floats
    confidence: Floats  # outcome confidence
    accepted: Floats  # 0 or 1


Order = tuple[Ints, Results]
"""The runs that are measured, and the results of all runs."""


class Measurement:
    """Measures scores of the same runs, in the same orders, with the same draws of tasks.

    The draws of a figure have the shape (DRAWS + 1,): draw 0 is the sample itself. None: there is nothing to measure.
    """

    def __init__(self, runs: Sequence[Run], seed: int = 1) -> None:
        self._runs = runs
        self._outcome = np.array([run.outcome for run in runs])
        self._novelty = np.array([run.scored.components.novelty for run in runs])
        tasks = [run.task for run in runs]
        self.tasks = np.arange(len(runs)) if None in tasks else numbered(tasks)
        self.everything = np.zeros(len(runs), np.int64)
        rng = np.random.default_rng(seed)
        count = int(self.tasks.max()) + 1
        self._weights = resampled(count, rng)
        self._fold = (rng.permutation(count) % FOLDS)[self.tasks]
        parts = {"within domain": [run.domain for run in runs], "within file": [run.file for run in runs]}
        self._scopes: dict[str, Ints] = {"all": self.everything}
        self._scopes |= {name: numbered(groups) for name, groups in parts.items() if len(set(groups)) > 1}

    def score(self, confidence: Floats | None = None, weights: Callable[[Weights], Weights] = lambda it: it) -> Results:
        """Score all runs with these confidences; None or NaN: the claimed one. `weights`: changes those of a run."""
        used = np.array([run.scored.components.outcome_confidence for run in self._runs])
        scores = np.array([run.scored.score for run in self._runs])
        if confidence is not None:
            used = np.where(np.isnan(confidence), used, confidence)
            for place, it in enumerate(run.scored for run in self._runs):
                components = replace(it.components, outcome_confidence=float(used[place]))
                raw = arithmetic(components, weights(it.weights), it.overrides).before_clamp
                scores[place] = min(1.0, max(0.0, raw))
        return Results(scores, used, (scores >= [run.threshold for run in self._runs]).astype(float))

    def basis(self, name: str, orders: Sequence[Order]) -> Basis:
        """Return the figures, as means over the orders."""
        outcome = self._outcome
        fifths = [
            self._novelty[at[np.argsort(-it.score[at], kind="stable")[: max(1, len(at) // 5)]]] for at, it in orders
        ]
        constant, ece, best_novelty = _rounded(
            np.mean([outcome[at].var() for at, _ in orders]),
            np.mean([calibration_error(outcome[at], it.confidence[at]) for at, it in orders]),
            np.mean([fifth.mean() for fifth in fifths]),
        )
        return Basis(
            name,
            interval([self.mean(at, it.accepted) for at, it in orders]),
            interval([self.mean(at, outcome, it.accepted) for at, it in orders]),
            interval([self.mean(at, (it.confidence - outcome) ** 2) for at, it in orders]),
            constant,
            ece,
            best_novelty,
            [
                Scope(
                    scope,
                    interval([self.auc(at, it.score, groups) for at, it in orders]),
                    interval([self.auc(at, it.confidence, groups) for at, it in orders]),
                    interval([self.best_fifth(at, it.score, groups) for at, it in orders]),
                )
                for scope, groups in self._scopes.items()
            ],
            self._better(orders),
        )

    def mean(self, at: Ints, values: Floats, share: Floats | None = None) -> Floats | None:
        """Return the mean of values in each draw; `share`: the weight of each; None if all are 0."""
        weights = self._weights[:, self.tasks[at]] * (1.0 if share is None else share[at])
        if not weights[0].any():
            return None
        with np.errstate(invalid="ignore"):
            return np.asarray(weights @ values[at] / weights.sum(1))

    def auc(self, at: Ints, values: Floats, groups: Ints) -> Floats | None:
        """Return the probability that a success has a higher value than a failure of its group; ties count half."""
        won, pairs = np.zeros(DRAWS + 1), np.zeros(DRAWS + 1)
        for good, bad in self._by_value(at, values, groups):
            won += (good * (np.cumsum(bad, 1) - bad / 2)).sum(1)
            pairs += good.sum(1) * bad.sum(1)
        if not pairs[0]:
            return None
        with np.errstate(invalid="ignore"):
            return np.asarray(won / pairs)

    def best_fifth(self, at: Ints, values: Floats, groups: Ints) -> Floats:
        """Return the share of successes in the best fifth of each group; values tied at its end all count in part."""
        succeeded, taken = np.zeros(DRAWS + 1), np.zeros(DRAWS + 1)
        for good, bad in self._by_value(at, -values, groups):
            weight = good + bad
            fifth = weight.sum(1, keepdims=True) / 5
            share = np.clip(fifth - (np.cumsum(weight, 1) - weight), 0, weight)
            succeeded += np.divide(good * share, weight, out=np.zeros_like(weight), where=weight > 0).sum(1)
            taken += fifth[:, 0]
        with np.errstate(invalid="ignore"):
            return np.asarray(succeeded / taken)

    def _by_value(self, at: Ints, values: Floats, groups: Ints) -> list[tuple[Floats, Floats]]:
        """Return `by_value` of each group."""
        own = [at[groups[at] == group] for group in np.unique(groups[at])]
        return [by_value(values[it], self._weights[:, self.tasks[it]], self._outcome[it]) for it in own]

    def _better(self, orders: Sequence[Order]) -> BetterThreshold | None:
        """Choose a threshold on the tasks of all folds but one, and measure it on that one."""
        outcome, whole, decided = self._outcome, [], []
        for at, it in orders:
            accepted = np.zeros(len(outcome))
            for fold in range(FOLDS):
                others, mine = at[self._fold[at] != fold], self._fold == fold
                chosen = best_threshold(it.score[others], outcome[others])
                if chosen is None:
                    return None
                accepted[mine] = it.score[mine] >= chosen
            decided.append((at, accepted))
            whole.append(best_threshold(it.score[at], outcome[at]) or 0.0)
        gains = [(self.mean(at, it, outcome), self.mean(at, it, 1 - outcome)) for at, it in decided]
        return BetterThreshold(
            round(float(np.median(whole)), 4),
            interval([self.mean(at, it) for at, it in decided]),
            interval([self.mean(at, outcome, it) for at, it in decided]),
            interval([good - bad for good, bad in gains if good is not None and bad is not None]),
        )


def by_value(values: Floats, weights: Floats, outcome: Floats) -> tuple[Floats, Floats]:
    """Return the weights of successes and of failures at each distinct value, ascending; shape (draws, values)."""
    order = np.argsort(values, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(values[order]) != 0])
    sorted_weights, good = weights[:, order], outcome[order]
    return (
        np.add.reduceat(sorted_weights * good, starts, axis=1),
        np.add.reduceat(sorted_weights * (1 - good), starts, axis=1),
    )


def calibration_error(outcome: Floats, confidence: Floats) -> float:
    """Return the mean distance of confidence and successes over ten equal bins, weighted by runs."""
    bins = np.minimum((confidence * 10).astype(np.int64), 9)
    return float(np.abs(np.bincount(bins, outcome - confidence)).sum() / len(outcome))


def best_threshold(scores: Floats, outcome: Floats) -> float | None:
    """Return the score threshold that accepts the most successes minus failures, by share; None without both."""
    if not 0 < outcome.sum() < len(outcome):
        return None
    good, bad = by_value(scores, np.ones((1, len(scores))), outcome)
    above = [np.cumsum(it[0, ::-1])[::-1] / it.sum() for it in (good, bad)]
    return float(np.unique(scores)[int(np.argmax(above[0] - above[1]))])


def judged_orders(runs: Sequence[Run], judging: Judging, seed: int = 1) -> list[tuple[Ints, Floats]]:
    """Return random orders of the runs: the measured ones, and each run's confidence according to its agent's record.

    A run's verdict is known `late` places after it. A run that admits failure has the claimed confidence (NaN), as in
    the worker. The first fifth of an order is not measured, because few verdicts are known there.
    """
    rng = np.random.default_rng(seed)
    orders: list[tuple[Ints, Floats]] = []
    for _ in range(10):  # random orders in which runs arrive and are judged; the figures are means over them
        order, record = rng.permutation(len(runs)), TrackRecord()
        judged = rng.random(len(runs)) < judging.share
        confidence = np.full(len(runs), np.nan)
        for place, number in enumerate(order):
            known = place - judging.late
            if known >= 0 and judged[known]:
                _judge(record, runs[order[known]], int(order[known]), known)
            run = runs[number]
            if run.claim is not False:
                confidence[number] = record.standing(run.agent, run.domain).used
        orders.append((np.sort(order[len(runs) // 5 :]), confidence))
    return orders


def _judge(record: TrackRecord, run: Run, number: int, place: int) -> None:
    line = {
        "trace_id": f"{number}", "agent_id": run.agent, "task_domain": run.domain, "partition": 0,
        "success": run.outcome, "judge": "recorded",
    }  # fmt: skip
    verdict = unsigned_verdict(line, datetime(2000, 1, 1, tzinfo=UTC) + timedelta(seconds=place))
    record.add(verdict, issued_ms(verdict, None), place)


def measure_outcomes(runs: Sequence[Run], asked: Asked, *, judged: bool = False) -> Outcomes:
    """Return all figures. `judged`: there are real verdicts (`Run.used`). Raises CommandError if runs do not differ."""
    if asked.claimed is not None and all(run.claim is None for run in runs):
        raise CommandError(
            f"no run has a claim at {asked.claimed}; --claimed must name a field with true, false or null"
        )
    if len({run.outcome for run in runs}) < 2:
        raise CommandError(
            f"{number_of(len(runs), 'run')}, all with the same outcome; there must be runs that succeeded and "
            "runs that failed"
        )
    it, everything = Measurement(runs), np.arange(len(runs))
    orders: list[tuple[Ints, Floats]] = []
    stated = it.score()
    if asked.judging is not None:
        orders = judged_orders(runs, asked.judging)
    elif judged:
        orders = [(everything, np.array([run.used for run in runs]))]
    by_stated: list[Order] = [(at, stated) for at, _ in orders] or [(everything, stated)]
    by_record: list[Order] = [(at, it.score(confidence)) for at, confidence in orders]
    weighted: list[Order] = [(at, it.score(confidence, weights_by_verdicts)) for at, confidence in orders]

    def gain(
        figure: Callable[[Ints, Floats, Ints], Floats | None], new: list[Order], old: list[Order]
    ) -> Interval | None:
        after, before = (mean_of([figure(at, to.score, it.everything) for at, to in orders]) for orders in (new, old))
        return None if after is None or before is None else interval([after - before])

    return Outcomes(
        outcome=asked.outcome,
        claimed=asked.claimed,
        task=None if any(run.task is None for run in runs) else TASK,
        runs=len(runs),
        tasks=int(it.tasks.max()) + 1,
        succeeded=round(float(np.mean([run.outcome for run in runs])), 4),
        files=_parts((run.file for run in runs), runs),
        domains=_parts((run.domain for run in runs), runs),
        judging=asked.judging,
        orders=len(by_stated),
        measured=len(by_stated[0][0]),
        stated=it.basis("stated", by_stated),
        record=it.basis("record", by_record) if by_record else None,
        weighted=it.basis("record, outcome 0.6", weighted) if weighted else None,
        weighted_gain=gain(it.best_fifth, weighted, by_record),
        gain=gain(it.auc, by_record, by_stated) if by_record else None,
    )


def _parts(names: Iterable[str], runs: Sequence[Run]) -> list[Part]:
    """Return the runs of each file or domain, in order of first appearance. `names`: that of each run."""
    groups: dict[str, list[Run]] = {}
    for name, run in zip(names, runs, strict=True):
        groups.setdefault(name, []).append(run)
    parts = []
    for name, own in groups.items():
        true = [run.outcome for run in own if run.claim is not False]
        [succeeded] = _rounded(np.mean([run.outcome for run in own]))
        parts.append(Part(name, len(own), succeeded, len(true), _rounded(np.mean(true))[0] if true else None))
    return parts

"""How well scores tell success from failure: figures of runs with recorded outcomes.

Each run is scored by its agent's claim, never by the recorded outcome. A fractional outcome counts as that share of a
success. Intervals are 95 % bootstrap intervals over the tasks: they say nothing about other agents.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from worker.commands.shared.console import CommandError
from worker.commands.shared.json_lines import value_at
from worker.commands.shared.shown import fixed, shown_text
from worker.core.scoring import Score, Weights, arithmetic, weights_by_verdicts
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


class Judging(Struct, frozen=True):
    """Which runs get simulated verdicts."""

    share: float  # of the runs, drawn at random
    late: int  # runs until a verdict arrives


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


def read_outcome(fields: Mapping[str, Any], where: str, asked: Asked) -> tuple[float, bool | None, str | None]:
    """Return a document's outcome, claim and task. Raises CommandError for a missing or mistyped field."""
    outcome, task = value_at(fields, asked.outcome), value_at(fields, TASK)
    claim = None if asked.claimed is None else value_at(fields, asked.claimed)
    if outcome is None:
        raise CommandError(
            f"{where} has no outcome at {asked.outcome}; name another field with --outcome. The line has "
            f"{', '.join(sorted(fields))}"
        )
    for option, path, value, kinds, right in (
        ("--outcome", asked.outcome, outcome, "true, false or a number from 0 to 1",
         isinstance(outcome, bool | int | float) and 0 <= outcome <= 1),
        ("--claimed", asked.claimed, claim, "true, false or null", isinstance(claim, bool | None)),
    ):  # fmt: skip
        if not right:
            stated = shown_text(json.dumps(value))
            raise CommandError(f"{where}: {path} is {stated}; {option} must name a field with {kinds}")
    return float(outcome), claim, None if task is None or isinstance(task, Mapping | list) else str(task)


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


def interval(of_orders: Iterable[Floats]) -> Interval | None:
    """Return the mean of the orders' draws, with its interval; an order whose draw 0 is NaN does not count."""
    known = [draws for draws in of_orders if not np.isnan(draws[0])]
    if not known:
        return None
    mean = np.mean(known, axis=0)
    return Interval(*map(_rounded, (mean[0], *np.nanquantile(mean[1:], (0.025, 0.975)))))


def _rounded(value: Any) -> float:
    return round(float(value), 4)


# -- figures


class Order(NamedTuple):
    """The runs that are measured, and the results of all runs with one kind of confidence."""

    at: Ints
    score: Floats
    confidence: Floats  # outcome confidence
    accepted: Floats  # 0 or 1


class Measurement:
    """Measures scores of the same runs, in the same orders, with the same draws of tasks.

    The draws of a figure have the shape (DRAWS + 1,): draw 0 is the sample itself. NaN: there is nothing to measure.
    """

    def __init__(self, runs: Sequence[Run], seed: int = 1) -> None:
        self._runs = runs
        self._outcome = np.array([run.outcome for run in runs])
        self._threshold = np.array([run.threshold for run in runs])
        tasks = [run.task for run in runs]
        self.tasks = np.arange(len(runs)) if None in tasks else numbered(tasks)
        rng = np.random.default_rng(seed)
        count = int(self.tasks.max()) + 1
        self._weights = resampled(count, rng)
        self._fold = (rng.permutation(count) % FOLDS)[self.tasks]
        parts = {"within domain": [run.domain for run in runs], "within file": [run.file for run in runs]}
        self._scopes: dict[str, Ints] = {"all": np.zeros(len(runs), np.int64)}
        self._scopes |= {name: numbered(groups) for name, groups in parts.items() if len(set(groups)) > 1}

    def order(
        self, at: Ints, confidence: Floats | float = np.nan, weights: Callable[[Weights], Weights] = lambda own: own
    ) -> Order:
        """Score all runs with these confidences; NaN: the claimed one. `weights`: changes those of a run."""
        scored, raw = [run.scored for run in self._runs], []
        used = np.where(np.isnan(confidence), [run.components.outcome_confidence for run in scored], confidence)
        for run, own in zip(scored, used.tolist(), strict=True):
            components = replace(run.components, outcome_confidence=own)
            raw.append(arithmetic(components, weights(run.weights), run.overrides).before_clamp)
        scores = np.clip(raw, 0.0, 1.0)
        return Order(at, scores, used, (scores >= self._threshold).astype(float))

    def basis(self, name: str, orders: Sequence[Order]) -> SimpleNamespace:
        """Return the figures with one kind of outcome confidence, as means over the orders."""
        outcome, novelty = self._outcome, np.array([run.scored.components.novelty for run in self._runs])

        def best_novelty(order: Order) -> Any:
            best = np.argsort(-order.score[order.at], kind="stable")[: max(1, len(order.at) // 5)]
            return novelty[order.at[best]].mean()

        return SimpleNamespace(
            name=name,
            accepted=interval(self.mean(order.at, order.accepted) for order in orders),  # share of the runs
            succeeded=interval(self.mean(order.at, outcome, order.accepted) for order in orders),  # of these
            # mean squared distance of confidence and outcome
            brier=interval(self.mean(order.at, (order.confidence - outcome) ** 2) for order in orders),
            constant=_rounded(np.mean([outcome[order.at].var() for order in orders])),  # Brier of the mean outcome
            # without an interval, because resampling makes it larger
            ece=_rounded(np.mean([
                calibration_error(outcome[order.at], order.confidence[order.at]) for order in orders
            ])),
            best_novelty=_rounded(np.mean([best_novelty(order) for order in orders])),  # of the best fifth
            scopes=[  # over all runs, or within each domain or file and then combined
                SimpleNamespace(
                    name=scope,
                    auc_score=interval(self.auc(order.at, order.score, groups) for order in orders),
                    auc_confidence=interval(self.auc(order.at, order.confidence, groups) for order in orders),
                    best_fifth=interval(self.best_fifth(order.at, order.score, groups) for order in orders),
                )
                for scope, groups in self._scopes.items()
            ],
            better=self._better(orders),
        )  # fmt: skip

    def mean(self, at: Ints, values: Floats, share: Floats | None = None) -> Floats:
        """Return the mean of values in each draw; `share`: the weight of each."""
        weights = self._weights[:, self.tasks[at]] * (1.0 if share is None else share[at])
        return _ratio(weights @ values[at], weights.sum(1))

    def auc(self, at: Ints, values: Floats, groups: Ints | None = None) -> Floats:
        """Return the probability that a success has a higher value than a failure of its group; ties count half."""
        won, pairs = np.zeros(DRAWS + 1), np.zeros(DRAWS + 1)
        for good, bad in self._by_value(at, values, groups):
            won += (good * (np.cumsum(bad, 1) - bad / 2)).sum(1)
            pairs += good.sum(1) * bad.sum(1)
        return _ratio(won, pairs)

    def best_fifth(self, at: Ints, values: Floats, groups: Ints | None = None) -> Floats:
        """Return the share of successes in the best fifth of each group; values tied at its end all count in part."""
        succeeded, taken = np.zeros(DRAWS + 1), np.zeros(DRAWS + 1)
        for good, bad in self._by_value(at, -values, groups):
            weight = good + bad
            fifth = weight.sum(1, keepdims=True) / 5
            share = np.clip(fifth - (np.cumsum(weight, 1) - weight), 0, weight)
            succeeded += np.divide(good * share, weight, out=np.zeros_like(weight), where=weight > 0).sum(1)
            taken += fifth[:, 0]
        return _ratio(succeeded, taken)

    def _by_value(self, at: Ints, values: Floats, groups: Ints | None) -> list[tuple[Floats, Floats]]:
        """Return `by_value` of each group; without groups all are one."""
        own = [at] if groups is None else [at[groups[at] == group] for group in np.unique(groups[at])]
        return [by_value(values[runs], self._weights[:, self.tasks[runs]], self._outcome[runs]) for runs in own]

    def _better(self, orders: Sequence[Order]) -> SimpleNamespace | None:
        """Return the threshold that best separates successes from failures; None: there is none in a part of the tasks.

        It is chosen on all runs. The other figures are from parts of the tasks that did not choose theirs.
        """
        outcome, whole, decided = self._outcome, [], []
        for at, scores, *_ in orders:
            accepted = np.zeros(len(outcome))
            for fold in range(FOLDS):
                others, mine = at[self._fold[at] != fold], self._fold == fold
                chosen = best_threshold(scores[others], outcome[others])
                if chosen is None:
                    return None
                accepted[mine] = scores[mine] >= chosen
            decided.append((at, accepted))
            whole.append(best_threshold(scores[at], outcome[at]) or 0.0)
        return SimpleNamespace(
            threshold=_rounded(np.median(whole)),
            accepted=interval(self.mean(at, accepted) for at, accepted in decided),
            succeeded=interval(self.mean(at, outcome, accepted) for at, accepted in decided),
            # share of successes accepted minus share of failures accepted
            gain=interval(
                self.mean(at, accepted, outcome) - self.mean(at, accepted, 1 - outcome) for at, accepted in decided
            ),
        )


def _ratio(part: Floats, whole: Floats) -> Floats:
    with np.errstate(invalid="ignore"):  # 0 / 0
        return np.asarray(part / whole)


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
    above = [np.cumsum(weights[0, ::-1])[::-1] / weights.sum() for weights in (good, bad)]
    return float(np.unique(scores)[int(np.argmax(above[0] - above[1]))])


def judged_orders(runs: Sequence[Run], judging: Judging) -> list[tuple[Ints, Floats]]:
    """Return random orders of the runs: the measured ones, and each run's confidence according to its agent's record.

    A run's verdict is known `late` places after it. A run that admits failure has the claimed confidence (NaN), as in
    the worker. The first fifth of an order is not measured, because few verdicts are known there.
    """
    rng, start = np.random.default_rng(1), datetime(2000, 1, 1, tzinfo=UTC)
    orders: list[tuple[Ints, Floats]] = []
    for _ in range(10):  # random orders in which runs arrive and are judged; the figures are means over them
        order, record = rng.permutation(len(runs)), TrackRecord()
        judged = rng.random(len(runs)) < judging.share
        confidence = np.full(len(runs), np.nan)
        for place, number in enumerate(order):
            known = place - judging.late
            if known >= 0 and judged[known]:
                run = runs[order[known]]
                line = {"trace_id": f"{order[known]}", "agent_id": run.agent, "task_domain": run.domain, "partition": 0,
                        "success": run.outcome, "judge": "recorded"}  # fmt: skip
                verdict = unsigned_verdict(line, start + timedelta(seconds=known))
                record.add(verdict, issued_ms(verdict, None), known)
            run = runs[number]
            if run.claim is not False:
                confidence[number] = record.standing(run.agent, run.domain).used
        orders.append((np.sort(order[len(runs) // 5 :]), confidence))
    return orders


def measure_outcomes(runs: Sequence[Run], asked: Asked, *, judged: bool = False) -> SimpleNamespace:
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
    measurement, everything = Measurement(runs), np.arange(len(runs))
    orders: list[tuple[Ints, Floats]] = []
    if asked.judging is not None:
        orders = judged_orders(runs, asked.judging)
    elif judged:
        orders = [(everything, np.array([run.used for run in runs]))]
    stated = measurement.order(everything)
    by_stated = [stated._replace(at=at) for at, _ in orders] or [stated]
    by_record = [measurement.order(at, confidence) for at, confidence in orders]
    weighted = [measurement.order(at, confidence, weights_by_verdicts) for at, confidence in orders]

    def gain(figure: Callable[[Ints, Floats], Floats], new: list[Order], old: list[Order]) -> Interval | None:
        pairs = zip(new, old, strict=True) if new else ()
        return interval(figure(after.at, after.score) - figure(before.at, before.score) for after, before in pairs)

    return SimpleNamespace(
        outcome=asked.outcome,
        claimed=asked.claimed,
        task=None if any(run.task is None for run in runs) else TASK,
        runs=len(runs),
        tasks=int(measurement.tasks.max()) + 1,
        succeeded=_rounded(np.mean([run.outcome for run in runs])),
        files=_parts(runs, "file"),
        domains=_parts(runs, "domain"),
        judging=asked.judging,
        orders=len(by_stated),  # random ones; without simulated verdicts one
        measured=len(by_stated[0][0]),  # runs in each order; without simulated verdicts all
        stated=measurement.basis("stated", by_stated),
        # only with verdicts, as those below
        record=measurement.basis("record", by_record) if orders else None,
        # by the record, with weights where the outcome has 0.6
        weighted=measurement.basis("record, outcome 0.6", weighted) if orders else None,
        weighted_gain=gain(measurement.best_fifth, weighted, by_record),  # paired, of the successes there
        gain=gain(measurement.auc, by_record, by_stated),  # of the score's AUC
    )


def _parts(runs: Sequence[Run], kind: Literal["file", "domain"]) -> list[SimpleNamespace]:
    """Return the runs of each file or domain, in order of first appearance."""
    groups = defaultdict[str, list[Run]](list)
    for run in runs:
        groups[getattr(run, kind)].append(run)
    parts = []
    for name, own in groups.items():
        claims = [run.outcome for run in own if run.claim is not False]
        parts.append(SimpleNamespace(
            name=name,
            runs=len(own),
            succeeded=_rounded(np.mean([run.outcome for run in own])),  # share of the runs
            claims=len(claims),  # runs that claim success
            true=_rounded(np.mean(claims)) if claims else None,  # share of these claims
        ))  # fmt: skip
    return parts

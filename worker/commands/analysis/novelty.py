"""How well novelty tells a repeated task from a new one: figures on labelled traces, with intervals.

A trace is a *first* if no earlier one has its label, otherwise a *repeat*. AUC is the probability that a first has a
higher novelty than a repeat, ties counting half (Mann-Whitney); 0.5 is chance, 1 is perfect. One partition, no TTL and
no capacity: the figures show what view and model can tell, whatever the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from worker.commands.shared.shown import fixed

Floats = npt.NDArray[np.floating[Any]]

Ints = npt.NDArray[np.integer[Any]]

CHANCE: Final = 0.5
"""The AUC of a novelty without information."""

DRAWS: Final = 500
"""Bootstrap samples of the labels: the ends of a 95 % interval then vary by less than a tenth of its width."""

HALVINGS: Final = 2
"""Random halvings of the labels for the warm figure; each is used both ways round."""

QUANTILES: Final = (0.1, 0.5, 0.9)

BINS: Final = 40

BLOCK: Final = 512
"""Rows of similarities at once: 512 x 100,000 float32 are 200 MB."""

MOST_PAIRS: Final = 400_000
"""Maximum number of pairs whose similarities are compared; if there are more, a random sample."""


class Interval(Struct, frozen=True):
    """A figure and its 95 % bootstrap interval over the labels."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{fixed(self.value, 3)} ({fixed(self.low, 3)} to {fixed(self.high, 3)})"


def cell(it: Interval | None) -> str:
    """Return a figure and its interval for a table."""
    return "-" if it is None else f"{it.value:.3f} {it.low:.3f}-{it.high:.3f}"


class Figures(Struct, frozen=True):
    """The figures of one file with one setting; None if there was nothing to compare.

    Quantiles (QUANTILES) and histograms (BINS equal bins over 0..1, the last one also for greater values) are of the
    file's order.
    """

    traces: int
    labels: int
    repeats: int
    auc_warm: Interval | None  # half of the labels come first, as history, in random order
    auc_in_order: Interval | None  # in the file's order, without the very first trace
    auc_pairs: Interval | None  # similarity of two traces with the same label against other pairs
    nearest_is_same: Interval | None  # share of the repeats whose nearest earlier trace has the same label
    first_quantiles: list[Interval]
    repeat_quantiles: list[Interval]
    first_histogram: list[int]
    repeat_histogram: list[int]


class Row(Struct, frozen=True, omit_defaults=True):
    """The figures of one file with one choice of settings."""

    file: str
    settings: dict[str, object]
    cut: int  # traces that were truncated
    bad: int  # lines that were no trace
    figures: Figures
    auc_warm_behind: Interval | None = None
    """Distance of the warm AUC from the highest one of the file, with the interval of the paired difference (same draws
    and halves); None for the highest itself."""


def named(settings: Mapping[str, object]) -> str:
    """Name a choice of settings: objective, 128 tokens."""
    rest = [f"{name} {value}" for name, value in settings.items() if name not in ("embed_text", "max_tokens")]
    return ", ".join([str(settings["embed_text"]), f"{settings['max_tokens']} tokens", *rest])


def behind_the_highest(rows: Sequence[tuple[Row, Floats | None]]) -> list[Row]:
    """Return the rows of one file with `auc_warm_behind`, given each row with the draws of its warm AUC."""
    known = [draws for _, draws in rows if draws is not None]
    if not known:
        return [row for row, _ in rows]
    best = max(known, key=lambda draws: float(draws[0]))
    return [
        row if draws is None or draws is best else structs.replace(row, auc_warm_behind=interval([best - draws]))
        for row, draws in rows
    ]


def verdict(rows: Sequence[Row]) -> list[str]:
    """Return what the warm AUC of a file's rows shows, in sentences.

    Settings are compared by the interval of the paired difference: their own intervals may overlap although one is
    better in nearly every draw.
    """
    found = [(row, row.figures.auc_warm) for row in rows if row.figures.auc_warm is not None]
    best = next(((row, auc) for row, auc in found if row.auc_warm_behind is None), None)
    if best is None:
        return ["No AUC warm, so no verdict: no half of the tasks has both firsts and repeats."]
    row, auc = best
    told = f"{named(row.settings)} has the highest AUC warm, " if len(rows) > 1 else "AUC warm "
    told += f"{auc}: "
    if auc.low > CHANCE:
        told += f"novelty tells repeats from new tasks better than chance ({CHANCE})."
    elif auc.high < CHANCE:
        told += f"worse than chance ({CHANCE}), so repeats look more novel than new tasks."
    else:
        told += f"the interval holds {CHANCE}, so nothing better than chance is shown."
    sentences = [told]
    for row, _ in found:
        behind = row.auc_warm_behind
        if behind is not None:
            holds = behind.low <= 0 <= behind.high
            shown = "the interval holds 0: no difference shown" if holds else "a difference is shown"
            sentences.append(f"Against {named(row.settings)} it is ahead by {behind}; {shown}.")
    return sentences


@dataclass(frozen=True, slots=True)
class Run:
    """Traces in the order in which they were compared."""

    novelty: Floats
    labels: Ints
    first: npt.NDArray[np.bool_]
    same: npt.NDArray[np.bool_]  # the nearest one has the same label


def measured(vectors: Floats, labels: Ints, seed: int) -> tuple[Figures, Floats | None]:
    """Return the figures of traces in order, and the draws of the warm AUC, shape (DRAWS + 1,) (see `_auc`).

    `vectors`: unit vectors, shape (n, dimensions); `labels`: 0..k-1, shape (n,). Draws for the same labels and seed are
    paired: they have the same halves and the same weights.
    """
    rng = np.random.default_rng(seed)
    count = int(labels.max()) + 1 if len(labels) else 0
    weights = resampled(count, rng)
    in_order = compared(vectors, labels, np.arange(0), np.arange(len(labels)))
    warm = [run for _ in range(HALVINGS) for run in _halves(vectors, labels, rng)]
    repeats = ~in_order.first
    warm_auc = mean_of([_auc(run, weights) for run in warm])
    found = Figures(
        len(labels),
        count,
        int(repeats.sum()),
        interval([warm_auc]),
        interval([_auc(_behind_the_first(in_order), weights)]),
        interval([_auc(_pairs(vectors, labels, rng), weights)]),
        interval([_share(in_order.same[repeats], in_order.labels[repeats], weights)]),
        _quantiles(in_order, in_order.first, weights),
        _quantiles(in_order, repeats, weights),
        _histogram(in_order.novelty[in_order.first]),
        _histogram(in_order.novelty[repeats]),
    )
    return found, warm_auc


def resampled(count: int, rng: np.random.Generator) -> Floats:
    """Return how often each of `count` labels is in each draw, shape (DRAWS + 1, count); row 0 is the sample itself."""
    return np.vstack([np.ones(count), rng.multinomial(count, np.full(count, 1 / max(count, 1)), DRAWS)])


def compared(vectors: Floats, labels: Ints, history: Ints, order: Ints) -> Run:
    """Compare the traces of `order` (indices) with the history and with the earlier ones of `order`."""
    known = vectors[history]
    novelty, nearest = np.empty(len(order)), np.empty(len(order), np.int64)
    everything = np.concatenate([history, order])
    for start in range(0, len(order), BLOCK):
        rows = order[start : start + BLOCK]
        similar = vectors[rows] @ np.vstack([known, vectors[order[: start + len(rows)]]]).T
        for row in range(len(rows)):
            similar[row, len(history) + start + row :] = -np.inf
        best = similar.argmax(1)
        novelty[start : start + len(rows)] = 1 - similar[np.arange(len(rows)), best]
        nearest[start : start + len(rows)] = everything[best]
    novelty[np.isinf(novelty)] = 0.5  # the worker's value for an empty cache
    ordered = labels[order]
    first = np.zeros(len(order), bool)
    first[np.unique(ordered, return_index=True)[1]] = True
    first &= ~np.isin(ordered, labels[history])
    return Run(novelty, ordered, first, labels[nearest] == ordered)


def _halves(vectors: Floats, labels: Ints, rng: np.random.Generator) -> list[Run]:
    shuffled = rng.permutation(int(labels.max()) + 1)
    parts = shuffled[: len(shuffled) // 2], shuffled[len(shuffled) // 2 :]
    runs = []
    for part in parts:
        known = np.isin(labels, part)
        runs.append(compared(vectors, labels, rng.permutation(np.flatnonzero(known)), np.flatnonzero(~known)))
    return runs


def _behind_the_first(run: Run) -> Run:
    """Return the run without its very first trace, whose novelty of 0.5 says nothing."""
    return Run(run.novelty[1:], run.labels[1:], run.first[1:], run.same[1:])


def _pairs(vectors: Floats, labels: Ints, rng: np.random.Generator) -> Run:
    """Return pairs as if each were one trace: its novelty is the similarity, and a `first` has equal labels."""
    left, right = (
        np.triu_indices(len(labels), 1) if len(labels) <= 1200 else rng.integers(len(labels), size=(2, MOST_PAIRS))
    )
    apart = left != right
    left, right = left[apart], right[apart]
    if len(left) > MOST_PAIRS:
        drawn = rng.choice(len(left), MOST_PAIRS, replace=False)
        left, right = left[drawn], right[drawn]
    similar = np.einsum("ij,ij->i", vectors[left], vectors[right]) if len(left) else np.empty(0)
    same = labels[left] == labels[right]
    return Run(similar, labels[left], same, same)


def _auc(run: Run, weights: Floats) -> Floats | None:
    """Return the AUC of each draw, shape (draws + 1,); draw 0 is the sample itself."""
    if run.first.all() or not run.first.any():
        return None
    values, place = np.unique(run.novelty, return_inverse=True)
    result = np.full(len(weights), np.nan)
    for draw, weight in enumerate(weights):
        of_trace = weight[run.labels]
        repeats = np.bincount(place, of_trace * ~run.first, len(values))
        firsts = np.bincount(place, of_trace * run.first, len(values))
        total = repeats.sum() * firsts.sum()
        if total:
            result[draw] = (firsts @ (np.cumsum(repeats) - repeats / 2)) / total
    return result


def _share(hits: npt.NDArray[np.bool_], labels: Ints, weights: Floats) -> Floats | None:
    if not len(hits):
        return None
    of_trace = weights[:, labels]
    with np.errstate(invalid="ignore"):
        return np.asarray((of_trace @ hits) / of_trace.sum(1))


def _quantiles(run: Run, chosen: npt.NDArray[np.bool_], weights: Floats) -> list[Interval]:
    if not chosen.any():
        return []
    order = np.argsort(run.novelty[chosen])
    values, labels = run.novelty[chosen][order], run.labels[chosen][order]
    sums = np.cumsum(weights[:, labels], axis=1)
    found = []
    for quantile in QUANTILES:
        # The smallest value that at least this share of the traces does not exceed.
        places = np.minimum((sums < quantile * sums[:, -1:] - 1e-9).sum(1), len(values) - 1)
        quantile_interval = interval([values[places]])
        if quantile_interval is not None:
            found.append(quantile_interval)
    return found


def _histogram(novelty: Floats) -> list[int]:
    return [int(count) for count in np.histogram(np.clip(novelty, 0, 1), BINS, (0, 1))[0]]


def mean_of(of_draws: Sequence[Floats | None]) -> Floats | None:
    """Return the mean over the runs that have draws."""
    runs = [draws for draws in of_draws if draws is not None]
    return np.asarray(np.mean(runs, axis=0)) if runs else None


def interval(of_draws: Sequence[Floats | None]) -> Interval | None:
    """Return the mean over runs, with the interval of its draws."""
    mean = mean_of(of_draws)
    if mean is None:
        return None
    low, high = np.nanquantile(mean[1:], (0.025, 0.975))
    return Interval(round(float(mean[0]), 4), round(float(low), 4), round(float(high), 4))

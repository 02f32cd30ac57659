"""Measure how well novelty tells a repeated task from a new one, with each combination of settings.

Traces with the same label (--label FIELD; dots for nested fields) are the same task. A trace is a *first* if no earlier
one has its label, otherwise a *repeat*. AUC is the probability that a first has a higher novelty than a repeat, ties
counting half (Mann-Whitney); 0.5 is chance, 1 is perfect:

- warm: half of the tasks come first, as history (means over both halves of two random halvings);
- in order: in the file's order, without its very first trace.

`cut` is the number of truncated traces, `equal` the number of those that the model reads like an earlier one.
A file is one partition without TTL and capacity: the figures show what text and model can tell, whatever the cache.
Intervals are 95 % bootstrap intervals over the labels. Two settings are compared by the interval of their paired
difference: their own intervals may overlap although one is better in nearly every draw.

    python -m tests.runs.novelty_grid FILE --label x_task --grid embed_text=whole,objective --grid max_tokens=128,256
"""

import argparse
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from worker.commands.report.outcomes import CHANCE, Floats, Interval, Ints, interval, numbered, resampled
from worker.commands.shared.json_lines import value_at
from worker.config import ConfigError, Settings, read
from worker.config.loading import parse_assignments
from worker.core.trace import ReasoningTrace, embedded_texts, is_objective, parse_trace
from worker.embed.embedder import Embedder, Embedding, mean_of_parts
from worker.embed.load import load_embedder

GRID: Final = ("embed_text", "max_tokens", "model", "precision", "embedder")
"""Settings that --grid may vary: those that affect vectors."""

BLOCK: Final = 512
"""Rows of similarities at once: 512 x 100,000 float32 are 200 MB."""


class Figures(Struct, frozen=True):
    """The figures of one file with one choice of settings; None if there was nothing to compare."""

    traces: int
    labels: int
    repeats: int
    auc_warm: Interval | None
    auc_in_order: Interval | None
    median_first: float | None  # novelty
    median_repeat: float | None


class Row(Struct, frozen=True):
    """The figures of one file with one choice of settings."""

    file: str
    settings: dict[str, object]
    cut: int  # traces that were truncated
    equal: int  # traces that the model reads like an earlier one
    figures: Figures
    behind: Interval | None = None
    """Distance of the warm AUC from the highest one of the file, with the interval of the paired difference (same draws
    and halves); None for the highest itself."""


@dataclass(frozen=True, slots=True)
class Run:
    """Traces in the order in which they were compared."""

    novelty: Floats
    labels: Ints
    first: npt.NDArray[np.bool_]


def measured(vectors: Floats, labels: Ints, seed: int) -> tuple[Figures, Floats | None]:
    """Return the figures of traces in order, and the draws of the warm AUC, shape (DRAWS + 1,) (see `_auc`).

    `vectors`: unit vectors, shape (n, dimensions); `labels`: 0..k-1, shape (n,). Draws for the same labels and seed are
    paired: they have the same halves and the same weights.
    """
    rng = np.random.default_rng(seed)
    count = int(labels.max()) + 1 if len(labels) else 0
    weights = resampled(count, rng)
    in_order = compared(vectors, labels, np.arange(0), np.arange(len(labels)))
    warm = [run for _ in range(2) for run in _halves(vectors, labels, rng)]
    repeats = ~in_order.first
    warm_aucs = [auc for run in warm if (auc := _auc(run, weights)) is not None]
    warm_auc = np.asarray(np.mean(warm_aucs, axis=0)) if warm_aucs else None
    # The novelty of the very first trace, 0.5, says nothing.
    rest = Run(in_order.novelty[1:], in_order.labels[1:], in_order.first[1:])
    figures = Figures(
        len(labels),
        count,
        int(repeats.sum()),
        _interval(warm_auc),
        _interval(_auc(rest, weights)),
        *(round(float(np.median(in_order.novelty[at])), 4) if at.any() else None for at in (in_order.first, repeats)),
    )
    return figures, warm_auc


def _interval(draws: Floats | None) -> Interval | None:
    return None if draws is None else interval([draws])


def compared(vectors: Floats, labels: Ints, history: Ints, order: Ints) -> Run:
    """Compare the traces of `order` (indices) with the history and with the earlier ones of `order`."""
    known = vectors[history]
    novelty = np.empty(len(order))
    for start in range(0, len(order), BLOCK):
        rows = order[start : start + BLOCK]
        similar = vectors[rows] @ np.vstack([known, vectors[order[: start + len(rows)]]]).T
        for row in range(len(rows)):
            similar[row, len(history) + start + row :] = -np.inf
        novelty[start : start + len(rows)] = 1 - similar.max(1)
    novelty[np.isinf(novelty)] = 0.5  # the worker's value for an empty cache
    ordered = labels[order]
    first = np.zeros(len(order), bool)
    first[np.unique(ordered, return_index=True)[1]] = True
    first &= ~np.isin(ordered, labels[history])
    return Run(novelty, ordered, first)


def _halves(vectors: Floats, labels: Ints, rng: np.random.Generator) -> list[Run]:
    shuffled = rng.permutation(int(labels.max()) + 1)
    runs = []
    for part in (shuffled[: len(shuffled) // 2], shuffled[len(shuffled) // 2 :]):
        known = np.isin(labels, part)
        runs.append(compared(vectors, labels, rng.permutation(np.flatnonzero(known)), np.flatnonzero(~known)))
    return runs


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


def behind_the_highest(rows: Sequence[tuple[Row, Floats | None]]) -> list[Row]:
    """Return the rows of one file with `behind`, given each row with the draws of its warm AUC."""
    known = [draws for _, draws in rows if draws is not None]
    if not known:
        return [row for row, _ in rows]
    best = max(known, key=lambda draws: float(draws[0]))
    return [
        row if draws is None or draws is best else structs.replace(row, behind=interval([best - draws]))
        for row, draws in rows
    ]


def verdict(rows: Sequence[Row]) -> list[str]:
    """Return what the warm AUC of a file's rows shows, in sentences."""
    with_auc = [(row, row.figures.auc_warm) for row in rows if row.figures.auc_warm is not None]
    best = next(((row, auc) for row, auc in with_auc if row.behind is None), None)
    if best is None:
        return ["No warm AUC, so no verdict: no half of the tasks has both firsts and repeats."]
    row, auc = best
    against = "better than" if auc.low > CHANCE else "worse than" if auc.high < CHANCE else "not shown to differ from"
    sentences = [f"The highest warm AUC is {auc}, with {named(row.settings)}: {against} chance ({CHANCE})."]
    for row, _ in with_auc:
        if row.behind is not None:
            shown = "no difference is shown" if row.behind.low <= 0 <= row.behind.high else "a difference is shown"
            sentences.append(f"It is ahead of {named(row.settings)} by {row.behind}; {shown}.")
    return sentences


def named(settings: Mapping[str, object]) -> str:
    """Name a choice of settings: embed_text=whole max_tokens=256."""
    return " ".join(f"{name}={value}" for name, value in settings.items())


# -- the run


class Vectors:
    """Vectors of traces with several settings; an input is embedded once for each model, precision and limit."""

    def __init__(self) -> None:
        self._embedders: dict[tuple[object, ...], tuple[Embedder, dict[bytes, Embedding]]] = {}

    def of(self, traces: Sequence[ReasoningTrace], settings: Settings) -> tuple[Floats, int, int]:
        """Return the vectors, shape (n, dimensions), and the numbers of truncated and of equal traces (see `Row`)."""
        key = (settings.embedder, settings.model, settings.precision, settings.max_tokens)
        if key not in self._embedders:
            embedder = load_embedder(settings)
            if embedder is None:
                sys.exit("KP_EMBEDDER=none makes no vectors; choose another embedder")
            self._embedders[key] = embedder, {}
        embedder, known = self._embedders[key]
        embeddings, inputs = [], set()
        for trace in traces:
            readings = [
                embedder.read(text, is_objective(index, settings.embed_text))
                for index, text in enumerate(embedded_texts(trace, settings.embed_text))
            ]
            for reading in readings:
                if reading.key not in known:
                    known[reading.key] = embedder.infer(reading)
            embeddings.append(mean_of_parts([known[reading.key] for reading in readings]))
            inputs.add(tuple(reading.key for reading in readings))
        cut = sum(embedding.truncated or embedding.objective_truncated for embedding in embeddings)
        return np.array([embedding.vector for embedding in embeddings]), cut, len(traces) - len(inputs)


def choices(grid: Sequence[str], assignments: Sequence[str]) -> list[tuple[Settings, dict[str, object]]]:
    """Return the settings of each point of the grid, with the values to show."""
    axes = []
    for axis in grid:
        name, _, values = axis.partition("=")
        if name not in GRID or not values:
            sys.exit(f"--grid {axis!r}: give NAME=VALUE,VALUE with a name of {', '.join(GRID)}")
        axes.append([f"{name}={value}" for value in values.split(",")])
    points: list[tuple[Settings, dict[str, object]]] = []
    for point in itertools.product(*axes):
        settings = read(None, parse_assignments([*assignments, *point])).settings
        names = {"embed_text", "max_tokens", *(assignment.partition("=")[0] for assignment in point)}
        points.append((settings, {name: getattr(settings, name) for name in GRID if name in names}))
    return points


def read_labelled(path: Path, label: str) -> tuple[list[ReasoningTrace], Ints]:
    """Return the traces of a file and their labels as numbers, in order."""
    traces, labels = [], []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            value = value_at(json.loads(line), label)
            if value is None or isinstance(value, Mapping | list):
                sys.exit(f"{path}:{number}: no text or number at {label}, which --label names")
            traces.append(parse_trace(line))
            labels.append(str(value))
    if not 1 < len(set(labels)) < len(labels):
        sys.exit(f"{path}: {len(labels)} traces, {len(set(labels))} labels: no two tasks, or no repeat")
    return traces, numbered(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--label", required=True, metavar="FIELD")
    parser.add_argument("--grid", action="append", default=[], metavar="NAME=V,V")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="assignments")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one line for each row")
    given = parser.parse_args()
    try:
        points = choices(given.grid, given.assignments)
    except ConfigError as error:
        sys.exit(str(error))
    vectors = Vectors()
    for path in given.files:
        traces, labels = read_labelled(path, given.label)
        rows = []
        for settings, shown in points:
            made, cut, equal = vectors.of(traces, settings)
            figures, warm = measured(made, labels, given.seed)
            rows.append((Row(path.name, shown, cut, equal, figures), warm))
        compared_rows = behind_the_highest(rows)
        if given.json:
            sys.stdout.writelines(msgspec.json.encode(row).decode() + "\n" for row in compared_rows)
        else:
            show(compared_rows)


def show(rows: Sequence[Row]) -> None:
    """Print the figures of one file."""
    width = max(len(named(row.settings)) for row in rows)
    first = rows[0].figures
    print(f"{rows[0].file}: {first.traces} traces, {first.labels} labels, {first.repeats} repeats")
    print(f"  {'':{width}}  {'AUC warm':18}  {'AUC in order':18}  first  repeat   cut  equal")
    for row in rows:
        it = row.figures
        cells = [_cell(it.auc_warm), _cell(it.auc_in_order), _short(it.median_first, 5), _short(it.median_repeat, 6)]
        print(f"  {named(row.settings):{width}}  {'  '.join(cells)}  {row.cut:4}  {row.equal:5}")
    for sentence in verdict(rows):
        print(f"  {sentence}")
    print()


def _cell(it: Interval | None) -> str:
    return ("-" if it is None else f"{it.value:.3f} {it.low:.3f}-{it.high:.3f}").ljust(18)


def _short(value: float | None, width: int) -> str:
    return ("-" if value is None else f"{value + 0.0:.2f}").ljust(width)


if __name__ == "__main__":
    main()

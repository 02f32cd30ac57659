"""The figures of tests/runs/novelty_grid.py, against a brute-force oracle."""

import random
from typing import Any

import numpy as np
import pytest

from tests.runs import novelty_grid
from tests.runs.novelty_grid import Row, behind_the_highest, compared, measured, verdict


def brute_auc(high: list[float], low: list[float]) -> float:
    return sum((a > b) + 0.5 * (a == b) for a in high for b in low) / (len(high) * len(low))


def brute(vectors: Any, labels: list[int], history: list[int], order: list[int]) -> list[tuple[float, bool]]:
    """Return novelty, and whether a first, of each trace of `order`."""
    seen, found = list(history), []
    for index in order:
        best = max((float(vectors[index] @ vectors[other]) for other in seen), default=0.5)
        found.append((1 - best, labels[index] not in {labels[other] for other in seen}))
        seen.append(index)
    return found


def sample(rng: random.Random) -> tuple[Any, list[int]]:
    count, kinds = rng.randint(4, 60), rng.randint(2, 12)
    labels = [rng.randrange(kinds) for _ in range(count)]
    known: dict[int, int] = {}
    labels = [known.setdefault(label, len(known)) for label in labels]
    vectors = np.array([[rng.gauss(label % 5, 1.5) for label in (label,) * 4] for label in labels])
    vectors[rng.randrange(count)] = vectors[rng.randrange(count)]  # ties
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True), labels


def test_the_figures_are_those_of_an_oracle(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(novelty_grid, "BLOCK", 7)
    monkeypatch.setattr("worker.commands.report.outcomes.DRAWS", 20)
    for _ in range(10):
        vectors, labels = sample(rng)
        everything = rng.sample(range(len(labels)), len(labels))
        cut = rng.randrange(len(labels))
        history, order = everything[:cut], sorted(everything[cut:])
        run = compared(vectors, np.array(labels), np.array(history, int), np.array(order, int))
        expected = brute(vectors, labels, history, order)
        np.testing.assert_allclose(run.novelty, [novelty for novelty, _ in expected], atol=1e-9)
        assert run.first.tolist() == [first for _, first in expected]

        found = measured(vectors, np.array(labels), 1)[0]
        in_order = brute(vectors, labels, [], list(range(len(labels))))
        firsts = [novelty for novelty, first in in_order[1:] if first]
        repeats = [novelty for novelty, first in in_order if not first]
        assert (found.traces, found.labels, found.repeats) == (len(labels), len(set(labels)), len(repeats))
        if firsts and repeats:
            assert found.auc_in_order.value == pytest.approx(brute_auc(firsts, repeats), abs=1e-4)


def rows_of(*noises: float, seed: int, labels: int = 40) -> list[Row]:
    """Return the rows of one file of which each setting adds another noise to the same tasks."""
    rng = np.random.default_rng(seed)
    known: dict[int, int] = {}
    tasks = np.array([
        known.setdefault(int(task), len(known)) for task in rng.permutation(np.repeat(np.arange(labels), 5))
    ])  # fmt: skip
    centres, noise = rng.normal(size=(labels, 16))[tasks], rng.normal(size=(len(tasks), 16))
    rows = []
    for number, size in enumerate(noises):
        made = centres + size * noise
        found, warm = measured(made / np.linalg.norm(made, axis=1, keepdims=True), tasks, 1)
        rows.append((Row("a", {"max_tokens": number}, 0, 0, found), warm))
    return behind_the_highest(rows)


def test_two_settings_are_compared_by_the_interval_of_their_paired_difference() -> None:
    """Their own intervals overlap, and one of them is better in nearly every draw all the same."""
    better, worse, same = rows_of(1.2, 1.6, 1.2, seed=4)
    one, two = better.figures.auc_warm, worse.figures.auc_warm
    assert two.high > one.low
    assert better.behind is None
    assert worse.behind.value == pytest.approx(one.value - two.value, abs=2e-4)
    assert 0 < worse.behind.low < worse.behind.high < one.high - two.low
    first, second, third = verdict([better, worse, same])
    assert first == "The highest warm AUC is 0.801 (0.713 to 0.874), with max_tokens=0: better than chance (0.5)."
    assert second.startswith("It is ahead of max_tokens=1 by 0.0")
    assert second.endswith("; a difference is shown.")
    assert third.endswith(" by 0.000 (0.000 to 0.000); no difference is shown.")

"""`evaluate`: its figures against a brute-force oracle, and what it says of files that it cannot use."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from msgspec import structs

from tests.support.builders import trace_document
from tests.support.reports import parsed
from worker.cli import cli
from worker.commands.analysis.labelled import names_apart
from worker.commands.analysis.novelty import (
    Figures,
    Interval,
    Row,
    behind_the_highest,
    compared,
    measured,
    verdict,
)


def brute_auc(high: list[float], low: list[float]) -> float:
    return sum((a > b) + 0.5 * (a == b) for a in high for b in low) / (len(high) * len(low))


def brute(vectors: Any, labels: list[int], history: list[int], order: list[int]) -> list[tuple[float, bool, bool]]:
    """Return novelty, whether a first, whether the nearest has the same label, of each trace of `order`."""
    seen, found = list(history), []
    for index in order:
        similar = [(float(vectors[index] @ vectors[other]), -place) for place, other in enumerate(seen)]
        best, place = max(similar, default=(0.5, 1))
        first = labels[index] not in {labels[other] for other in seen}
        found.append((1 - best, first, place <= 0 and labels[seen[-place]] == labels[index]))
        seen.append(index)
    return found


def figures(vectors: Any, labels: Any, seed: int) -> Figures:
    return measured(vectors, labels, seed)[0]


def sample(rng: random.Random) -> tuple[Any, list[int]]:
    count, kinds = rng.randint(4, 60), rng.randint(2, 12)
    labels = [rng.randrange(kinds) for _ in range(count)]
    known: dict[int, int] = {}
    labels = [known.setdefault(label, len(known)) for label in labels]
    vectors = np.array([[rng.gauss(label % 5, 1.5) for label in (label,) * 4] for label in labels])
    vectors[rng.randrange(count)] = vectors[rng.randrange(count)]  # ties
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True), labels


def test_traces_are_compared_as_an_oracle_does(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr("worker.commands.analysis.novelty.BLOCK", 7)
    for _ in range(60):
        vectors, labels = sample(rng)
        everything = rng.sample(range(len(labels)), len(labels))
        cut = rng.randrange(len(labels))
        history, order = everything[:cut], sorted(everything[cut:])
        run = compared(vectors, np.array(labels), np.array(history, int), np.array(order, int))
        expected = brute(vectors, labels, history, order)
        np.testing.assert_allclose(run.novelty, [novelty for novelty, _, _ in expected], atol=1e-9)
        assert run.first.tolist() == [first for _, first, _ in expected]


@pytest.mark.slow
def test_the_figures_are_those_of_an_oracle(seed: int, long: bool) -> None:
    rng = random.Random(seed)
    for _ in range(25 if long else 10):
        vectors, labels = sample(rng)
        found = figures(vectors, np.array(labels), 1)
        runs = brute(vectors, labels, [], list(range(len(labels))))
        firsts = [novelty for novelty, first, _ in runs[1:] if first]
        repeats = [novelty for novelty, first, _ in runs if not first]
        assert (found.traces, found.labels, found.repeats) == (len(labels), len(set(labels)), len(repeats))
        if firsts and repeats:
            assert found.auc_in_order is not None
            assert found.auc_in_order.value == pytest.approx(brute_auc(firsts, repeats), abs=1e-4)
            assert found.auc_in_order.low <= found.auc_in_order.high
        pairs = [(float(vectors[i] @ vectors[j]), labels[i] == labels[j])
                 for i in range(len(labels)) for j in range(i + 1, len(labels))]  # fmt: skip
        same, other = [s for s, is_same in pairs if is_same], [s for s, is_same in pairs if not is_same]
        if same and other:
            assert found.auc_pairs is not None
            assert found.auc_pairs.value == pytest.approx(brute_auc(same, other), abs=1e-4)
        if repeats:
            middle = sorted(repeats)[-(-len(repeats) // 2) - 1]
            assert found.repeat_quantiles[1].value == pytest.approx(middle, abs=1e-4)
            assert sum(found.repeat_histogram) == len(repeats)


@pytest.mark.slow
def test_tasks_that_lie_apart_are_told_and_chance_is_one_half(seed: int) -> None:
    """Labels that have nothing to do with the vectors: the interval holds one half."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(40), 5))
    apart = rng.normal(size=(40, 64))[labels] + 0.1 * rng.normal(size=(200, 64))
    apart /= np.linalg.norm(apart, axis=1, keepdims=True)
    told = figures(apart, _in_order(labels), 1)
    assert told.auc_warm is not None
    assert told.nearest_is_same is not None
    assert (told.auc_warm.value, told.nearest_is_same.value) == (1, 1)
    chance = figures(apart, _in_order(rng.permutation(labels)), 1)
    assert chance.auc_pairs is not None
    assert abs(chance.auc_pairs.value - 0.5) < 0.1


def _in_order(labels: Any) -> Any:
    """Number the labels in the order of their first trace."""
    known: dict[int, int] = {}
    return np.array([known.setdefault(int(label), len(known)) for label in labels])


def test_the_same_seed_gives_the_same_figures() -> None:
    vectors, labels = sample(random.Random(7))
    assert figures(vectors, np.array(labels), 3) == figures(vectors, np.array(labels), 3)


# -- the verdict


def rows_of(*noises: float, seed: int, labels: int = 40) -> list[Row]:
    """Return the rows of one file of which each setting adds another noise to the same tasks."""
    rng = np.random.default_rng(seed)
    tasks = _in_order(rng.permutation(np.repeat(np.arange(labels), 5)))
    centres, noise = rng.normal(size=(labels, 16))[tasks], rng.normal(size=(len(tasks), 16))
    rows = []
    for number, size in enumerate(noises):
        made = centres + size * noise
        found, warm = measured(made / np.linalg.norm(made, axis=1, keepdims=True), tasks, 1)
        rows.append((Row("a", {"embed_text": "whole", "max_tokens": number}, 0, 0, found), warm))
    return behind_the_highest(rows)


def test_two_settings_are_compared_by_the_interval_of_their_paired_difference() -> None:
    """Their own intervals overlap, and one of them is better in nearly every draw all the same."""
    better, worse, same = rows_of(1.2, 1.6, 1.2, seed=4)
    one, two = better.figures.auc_warm, worse.figures.auc_warm
    assert one is not None
    assert two is not None
    assert two.high > one.low
    assert better.auc_warm_behind is None
    assert worse.auc_warm_behind is not None
    assert worse.auc_warm_behind.value == pytest.approx(one.value - two.value, abs=2e-4)
    assert 0 < worse.auc_warm_behind.low < worse.auc_warm_behind.high < one.high - two.low
    assert same.auc_warm_behind == Interval(0, 0, 0)
    first, second, third = verdict([better, worse, same])
    assert first.startswith("whole, 0 tokens has the highest AUC warm, 0.801 (0.713 to 0.874): novelty tells repeats")
    assert second.startswith("Against whole, 1 tokens it is ahead by 0.0")
    assert second.endswith("; a difference is shown.")
    assert third.endswith(" by 0.000 (0.000 to 0.000); the interval holds 0: no difference shown.")


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        (Interval(0.8, 0.7, 0.9), "AUC warm 0.800 (0.700 to 0.900): novelty tells repeats from new tasks better than"),
        (Interval(0.55, 0.5, 0.6), "the interval holds 0.5, so nothing better than chance is shown."),
        (Interval(0.3, 0.2, 0.4), "worse than chance (0.5), so repeats look more novel than new tasks."),
        (None, "No AUC warm, so no verdict"),
    ],
)
def test_one_setting_is_compared_with_chance(interval: Interval | None, words: str) -> None:
    [row] = rows_of(1, seed=1, labels=3)
    [told] = verdict([structs.replace(row, figures=structs.replace(row.figures, auc_warm=interval))])
    assert words in told


# -- the page


@pytest.mark.slow
def test_the_page_shows_each_file_and_setting_and_escapes_names() -> None:
    from worker.commands.analysis.page import render_evaluation  # matplotlib: a second in each process of xdist

    rows = []
    for seed, name in enumerate(("<script>a</script>.jsonl", "b.jsonl")):
        for view in ("whole", "objective"):
            vectors, labels = sample(random.Random(seed))
            found = figures(vectors, np.array(labels), 1)
            rows.append(Row(name, {"embed_text": view, "max_tokens": 128}, 3, 1, found))
    page = render_evaluation(rows, "<b>label</b>")
    assert page == render_evaluation(rows, "<b>label</b>")
    assert "<script" not in page
    assert "<b>label" not in page
    tree = parsed(page)
    told = [" ".join(" ".join(it.itertext()).split()) for it in tree.findall(".//div[@class='verdict']")]
    assert told == [" ".join(verdict(rows[:2])), " ".join(verdict(rows[2:]))]
    assert len(tree.findall(".//h2")) == 2
    assert len(tree.findall(".//figure")) == 2 * (1 + 2)
    cells = ["".join(cell.itertext()) for cell in tree.findall(".//tbody/tr/td[2]")]
    assert [cell.split()[0] for cell in cells] == [
        "\u2013" if row.figures.auc_warm is None else f"{row.figures.auc_warm.value:.3f}" for row in rows
    ]


# -- the command, without a model


def run(path: Path, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["evaluate", str(path), *arguments])
    return result.exit_code, result.stderr


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    path = tmp_path / "traces.jsonl"
    documents = [trace_document(f"kp:trace:{n}", objective=f"task {n % 2}") | {"task_id": n % 2} for n in range(4)]
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def test_a_label_that_is_not_there_is_named_with_what_is(traces: Path) -> None:
    code, error = run(traces, "--label", "metadata.task")
    assert code == 1
    assert "traces.jsonl: line 1 has no label at metadata.task" in error
    assert "task_id" in error


def test_labels_must_repeat(traces: Path) -> None:
    code, error = run(traces, "--label", "id")
    assert code == 1
    assert "4 traces with 4 labels; there must be at least two tasks, and a repeat of one" in error


def test_a_grid_varies_what_changes_vectors(traces: Path) -> None:
    assert run(traces, "--label", "task_id", "--grid", "threshold=0.5")[0] == 2
    code, error = run(traces, "--label", "task_id", "--grid", "max_tokens=x")
    assert code == 2
    assert "--set max_tokens='x' is wrong: give a whole number" in error


def test_without_an_embedder_there_is_nothing_to_evaluate(traces: Path) -> None:
    code, error = run(traces, "--label", "task_id", "--set", "embedder=none")
    assert code == 1
    assert "KP_EMBEDDER=none makes no vectors" in error


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (["runs/traces.jsonl"], ["traces.jsonl"]),
        (["a/traces.jsonl", "b/traces.jsonl", "c/x.jsonl"], ["a/traces.jsonl", "b/traces.jsonl", "x.jsonl"]),
        (["a/c/traces.jsonl", "b/c/traces.jsonl"], ["a/c/traces.jsonl", "b/c/traces.jsonl"]),
        (["traces.jsonl", "b/traces.jsonl"], ["traces.jsonl", "b/traces.jsonl"]),
        (["/y/t", "x/y/t", "y/t", "-"], ["/y/t", "x/y/t", "y/t", "standard input"]),
    ],
)
def test_files_of_the_same_name_are_told_apart_by_their_folders(files: list[str], names: list[str]) -> None:
    assert names_apart(files) == names


def test_random_paths_have_names_of_their_own_which_are_their_ends(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        paths = {"/" * rng.randrange(2) + "/".join(rng.choices("abc", k=rng.randint(1, 4))) for _ in range(8)}
        names = names_apart(sorted(paths))
        assert len(set(names)) == len(paths)
        assert all(path.endswith(name) for path, name in zip(sorted(paths), names, strict=True))


def test_two_files_of_one_name_are_two_and_one_file_twice_is_an_error(
    traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = traces.parent / "more" / traces.name
    other.parent.mkdir()
    other.write_text(traces.read_text().replace('"task_id"', '"other_id"'))
    code, error = run(traces, str(other), "--label", "task_id", "--set", "embedder=none")
    assert (code, "makes no vectors" in error) == (1, True)
    code, error = run(other, str(traces), "--label", "task_id")
    assert code == 1
    assert f"more/{traces.name}: line 1 has no label at task_id" in error
    monkeypatch.chdir(traces.parent)
    code, error = run(Path(traces.name), f"more/../{traces.name}", "--label", "task_id")
    assert code == 2
    assert f"{traces.name} is named 2 times; name each file once" in error

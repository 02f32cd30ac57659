"""`evaluate --outcome`: its figures against brute force, and the recorded outcome never enters a score."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from tests.support.builders import T0, random_trace_bytes
from worker import parse_trace, score_trace
from worker.cli import cli
from worker.commands.analysis.outcome_numbers import (
    STATED,
    Judging,
    Measurement,
    Runs,
    as_claimed,
    base_rate,
    best_threshold,
    calibration_error,
    judged_orders,
)
from worker.core.scoring import PROFILES


def run(path: Path, *arguments: str, embedder: str = "none") -> Result:
    env = {"KP_EMBEDDER": embedder}
    return CliRunner().invoke(cli, ["evaluate", str(path), "--outcome", "metadata.success", *arguments], env=env)


def made_runs(rng: random.Random, count: int) -> Runs:
    traces = [parse_trace(random_trace_bytes(rng, number, T0 + number)) for number in range(count)]
    claims = [rng.random() < 0.9 for _ in range(count)]
    ids = np.array([[rng.randrange(count // 2), rng.randrange(3), rng.randrange(2)] for _ in range(count)])
    return Runs(
        [as_claimed(trace, claim) for trace, claim in zip(traces, claims, strict=True)],
        np.full(count, 0.5),
        np.array([rng.choice([0.0, 1.0, 0.25]) for _ in range(count)]),
        ids[:, 0], ids[:, 1], ids[:, 2],
        {"files": ["a", "b"], "domains": ["x", "y", "z"]},
    )  # fmt: skip


# -- brute force


def brute_auc(values: Any, outcome: Any, groups: Any) -> float:
    won = pairs = 0.0
    for a, b in itertools.product(range(len(values)), repeat=2):
        if groups[a] == groups[b]:
            weight = outcome[a] * (1 - outcome[b])
            pairs += weight
            won += weight * (1 if values[a] > values[b] else 0.5 if values[a] == values[b] else 0)
    return won / pairs


def brute_best_fifth(values: Any, outcome: Any) -> float:
    """Return what succeeded of the best fifth; of equal values at its end, each takes part by the same share."""
    left, total = len(values) / 5, 0.0
    for value in sorted(set(values), reverse=True):
        same = [truth for it, truth in zip(values, outcome, strict=True) if it == value]
        taken = min(left, len(same))
        total, left = total + taken * sum(same) / len(same), left - taken
    return total / (len(values) / 5)


def test_the_figures_are_those_of_an_oracle(seed: int) -> None:
    rng = random.Random(seed)
    runs = made_runs(rng, 80)
    measurement = Measurement(runs, PROFILES, 0.5, seed)
    confidence = np.array([rng.choice([0.1, 0.35, 0.8, np.nan]) for _ in range(80)])
    scored = measurement.score(confidence)
    for trace, used, score, taken in zip(runs.traces, confidence, scored.score, scored.confidence, strict=True):
        expected = score_trace(trace, 0.5, confidence=None if np.isnan(used) else float(used))
        assert (score, taken) == (expected.score, expected.components.outcome_confidence)
    at = np.array(sorted(rng.sample(range(80), 60)))
    basis = measurement.basis("record", [(at, scored)])
    outcome, values, used = runs.outcome[at], scored.score[at], scored.confidence[at]
    for scope, groups in zip(basis.scopes, (np.zeros(80), runs.domains, runs.files), strict=True):
        assert scope.auc_score is not None
        assert scope.auc_confidence is not None
        assert scope.auc_score.value == pytest.approx(brute_auc(values, outcome, groups[at]), abs=1e-4)
        assert scope.auc_confidence.value == pytest.approx(brute_auc(used, outcome, groups[at]), abs=1e-4)
        own = [np.flatnonzero(groups[at] == each) for each in np.unique(groups[at])]
        best = sum(len(it) * brute_best_fifth(values[it], outcome[it]) for it in own) / len(at)
        assert scope.best_fifth.value == pytest.approx(best, abs=1e-4)
        rates = [((outcome[it] - outcome[it].mean()) ** 2).sum() for it in own]
        assert scope.base == pytest.approx(sum(rates) / len(at), abs=1e-4)
        assert scope.auc_score.low <= scope.auc_score.value <= scope.auc_score.high
    accepted = values >= 0.5
    assert basis.accepted.value == pytest.approx(accepted.mean(), abs=1e-4)
    assert basis.succeeded is not None
    assert basis.succeeded.value == pytest.approx(outcome[accepted].mean(), abs=1e-4)
    assert basis.brier.value == pytest.approx(((used - outcome) ** 2).mean(), abs=1e-4)
    assert sum(it.share for it in basis.bins) == pytest.approx(1, abs=1e-3)
    error = sum(it.share * abs(it.confidence - it.succeeded.value) for it in basis.bins)
    assert basis.ece == pytest.approx(error, abs=1e-3)


def test_the_calibration_error_by_hand() -> None:
    outcome, confidence = np.array([1.0, 0, 1, 1]), np.array([0.62, 0.68, 0.1, 1.0])
    # bin .6: mean .65, half succeeded; bin .1: all of one at .1; last bin: one at 1, which succeeded
    assert calibration_error(outcome, confidence) == pytest.approx((2 * 0.15 + 0.9 + 0) / 4)
    assert base_rate(outcome, np.zeros(4)) == pytest.approx(0.75 * 0.25)


def test_the_best_threshold_tells_successes_from_failures(seed: int) -> None:
    rng = random.Random(seed)
    scores = np.array([round(rng.random(), 1) for _ in range(30)])
    outcome = np.array([float(rng.random() < 0.5) for _ in range(30)])
    outcome[:2] = 0, 1

    def gain(threshold: float) -> float:
        passed = scores >= threshold
        return float(passed[outcome == 1].mean() - passed[outcome == 0].mean())

    found = best_threshold(scores, outcome)
    assert found is not None
    assert gain(found) == pytest.approx(max(gain(each) for each in scores))
    assert best_threshold(scores, np.ones(30)) is None


def test_a_good_threshold_is_measured_on_tasks_that_did_not_choose_it() -> None:
    rng = random.Random(1)
    runs = made_runs(rng, 200)
    runs.outcome = np.array([float(rng.random() < 0.5) for _ in range(200)])
    measurement = Measurement(runs, PROFILES, 0.75, 1)
    chance = measurement.basis("stated", [(np.arange(200), measurement.score())]).better
    assert chance is not None
    assert chance.gain is not None
    assert chance.gain.low < 0.1  # what is chosen from noise gains nothing elsewhere
    perfect = measurement.score(np.where(runs.outcome == 1, 1.0, 0.0))
    told = measurement.basis("record", [(np.arange(200), perfect)]).better
    assert told is not None
    assert told.gain is not None
    assert told.gain.low > chance.gain.high


# -- the record


def test_verdicts_come_late_and_count_for_their_agent_alone() -> None:
    runs = made_runs(random.Random(1), 60)
    for at, confidence in judged_orders(runs, Judging(1.0, 60, 1)):
        claims = [trace.metadata.success for trace in runs.traces]
        assert len(at) == 48
        assert all(np.isnan(confidence[[not it for it in claims]]))
        assert all(confidence[claims] == 0.5)  # no verdict comes in time
    runs.outcome[:] = 1
    orders = judged_orders(runs, Judging(1.0, 1, 1))
    assert all((confidence[at[~np.isnan(confidence[at])]] > 0.5).all() for at, confidence in orders)


# -- the command


def write(path: Path, documents: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, documents)))
    return path


def documents(rng: random.Random, count: int = 60) -> list[dict[str, Any]]:
    made = [json.loads(random_trace_bytes(rng, number, T0 + number)) for number in range(count)]
    for number, document in enumerate(made):
        document["metadata"] |= {"success": rng.random() < 0.5, "agent_id": rng.choice(["ada", "bob"])}
        document |= {"x_task": f"task {number % 20}", "x_claimed": rng.choice([True, True, None, False])}
    return made


def test_the_recorded_outcome_never_changes_a_score(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    made = documents(rng)
    for document in made:
        claimed = rng.choice([True, None, False])
        trace = parse_trace(json.dumps(document).encode())
        expected = score_trace(as_claimed(trace, claimed))
        for success, confidence, evaluated in itertools.product((True, False), (0.0, 1.0), (True, None)):
            document["metadata"]["success"] = success
            document["outcome"]["confidence"] = confidence
            document["outcome"]["evaluated"] = evaluated
            assert score_trace(as_claimed(parse_trace(json.dumps(document).encode()), claimed)) == expected
        assert expected.components.outcome_confidence == STATED * (0.3 if claimed is False else 1)
    # the same runs, all outcomes turned: the same share is accepted, and the AUC is turned, too
    for document in made:
        document["metadata"]["success"] = rng.random() < 0.5
    before = json.loads(run(write(tmp_path / "a.jsonl", made), "--json").stdout)
    for document in made:
        document["metadata"]["success"] ^= True
    after = json.loads(run(write(tmp_path / "a.jsonl", made), "--json").stdout)
    assert before["stated"]["accepted"] == after["stated"]["accepted"]
    aucs = [it["stated"]["scopes"][0]["auc_score"]["value"] for it in (before, after)]
    assert sum(aucs) == pytest.approx(1, abs=2e-4)


def test_the_same_seed_gives_the_same_figures_and_tables_page_and_sentences_are_there(tmp_path: Path) -> None:
    file = write(tmp_path / "runs.jsonl", documents(random.Random(4)))
    arguments = ("--claimed", "x_claimed", "--verdicts", "50%", "--late", "5")
    first, second = (run(file, *arguments, "--json").stdout for _ in range(2))
    assert first == second
    found = json.loads(first)
    assert found["judging"] == {"share": 0.5, "late": 5, "seed": 1}
    assert (found["runs"], found["tasks"], found["task"]) == (60, 20, "x_task")
    assert [it["name"] for it in found["record"]["scopes"]] == ["all", "within domain"]
    assert found["admissions"] + found["files"][0]["claims"] == 60
    page = tmp_path / "page.html"
    text = run(file, *arguments, "--text", "--page", str(page)).stdout
    for words in ("AUC score", "best fifth", "Brier", "base rate", "ECE", "Intervals are 95 %", "drawn at random"):
        assert words in text
    assert "Calibration" in page.read_text()
    assert page.read_text().count("<svg") == 3


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("success", None, "line 2 has no outcome at x_won"),
        (
            "x_won",
            "yes",
            'line 2: x_won is "yes"; --outcome must name a field with true, false or a number from 0 to 1',
        ),
        ("x_won", 1.5, "x_won is 1.5"),
        ("x_won", [], "x_won is []"),
        ("x_claimed", "done", 'x_claimed is "done"; --claimed must name a field with true, false or null'),
    ],
)
def test_a_field_of_another_kind_is_named_with_its_line(tmp_path: Path, field: str, value: Any, told: str) -> None:
    made = documents(random.Random(1), 4)
    for document in made:
        document["x_won"] = 1
    made[1][field] = value
    if value is None:
        del made[1]["x_won"]
    file = write(tmp_path / "runs.jsonl", made)
    found = CliRunner().invoke(
        cli, ["evaluate", str(file), "--outcome", "x_won", "--claimed", "x_claimed"], env={"KP_EMBEDDER": "none"}
    )
    assert found.exit_code == 1
    assert told in found.stderr


def test_runs_must_differ_and_options_must_go_together(tmp_path: Path) -> None:
    made = documents(random.Random(1), 4)
    for document in made:
        document["metadata"]["success"] = True
        del document["x_claimed"]
    file = write(tmp_path / "runs.jsonl", made)
    assert "all with the same outcome" in run(file).stderr
    assert "no run has a claim at x_claimed" in run(file, "--claimed", "x_claimed").stderr
    assert "has no task at x_none" in run(file, "--label", "x_none").stderr
    for arguments in (
        ("--verdicts", "0"), ("--verdicts", "2"), ("--late", "5"), ("--grid", "max_tokens=1"),
        ("--claimed", "metadata.success"),
    ):  # fmt: skip
        assert run(file, *arguments).exit_code == 2
    assert CliRunner().invoke(cli, ["evaluate", str(file)]).exit_code == 2
    assert CliRunner().invoke(cli, ["evaluate", str(file), "--label", "id", "--claimed", "x"]).exit_code == 2

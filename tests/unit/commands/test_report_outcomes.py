"""`report --outcome`: its figures against brute force, and the recorded outcome never enters a score."""

import io
import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.builders import T0, random_trace_bytes
from tests.support.reports import outputs, report_of, run
from worker import parse_trace, score_trace
from worker.commands.report.outcomes import (
    STATED,
    Asked,
    Judging,
    Measurement,
    Run,
    as_claimed,
    best_threshold,
    calibration_error,
    judged_orders,
)
from worker.commands.score.lines import score_lines
from worker.config import load
from worker.core.trace import ReasoningTrace


def made_runs(rng: random.Random, count: int) -> tuple[list[ReasoningTrace], list[Run]]:
    traces, runs = [], []
    for number in range(count):
        claim = rng.random() < 0.9
        traces.append(trace := as_claimed(parse_trace(random_trace_bytes(rng, number, T0 + number)), claim))
        task, domain, file = f"{rng.randrange(count // 2)}", f"d{rng.randrange(3)}", f"f{rng.randrange(2)}"
        outcome, agent = rng.choice([0.0, 1.0, 0.25]), trace.metadata.agent_id
        runs.append(Run(outcome, claim, task, agent, domain, score_trace(trace), file, 0.5))
    return traces, runs


def outcome_of_runs(runs: list[Run]) -> Any:
    return np.array([run.outcome for run in runs])


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
    traces, runs = made_runs(rng, 80)
    measurement = Measurement(runs, seed)
    confidence = np.array([rng.choice([0.1, 0.35, 0.8, np.nan]) if run.claim else np.nan for run in runs])
    at = np.array(sorted(rng.sample(range(80), 60)))
    order = measurement.order(at, confidence)
    for trace, used, *result in zip(traces, confidence, order.score, order.confidence, strict=True):
        expected = score_trace(trace, 0.5, confidence=None if np.isnan(used) else float(used))
        assert result == [expected.score, expected.components.outcome_confidence], "to the last bit"
    basis = measurement.basis("record", [order])
    outcome, values, used = outcome_of_runs(runs)[at], order.score[at], order.confidence[at]
    parts = ([0] * 80, [run.domain for run in runs], [run.file for run in runs])
    for scope, groups in zip(basis.scopes, map(np.array, parts), strict=True):
        assert scope.auc_score.value == pytest.approx(brute_auc(values, outcome, groups[at]), abs=1e-4)
        assert scope.auc_confidence.value == pytest.approx(brute_auc(used, outcome, groups[at]), abs=1e-4)
        own = [np.flatnonzero(groups[at] == each) for each in np.unique(groups[at])]
        best = sum(len(it) * brute_best_fifth(values[it], outcome[it]) for it in own) / len(at)
        assert scope.best_fifth.value == pytest.approx(best, abs=1e-4)
        assert scope.auc_score.low <= scope.auc_score.value <= scope.auc_score.high
    accepted = values >= 0.5
    for figure, expected in (
        (basis.accepted, accepted.mean()),
        (basis.succeeded, outcome[accepted].mean()),
        (basis.brier, ((used - outcome) ** 2).mean()),
    ):
        assert figure.value == pytest.approx(expected, abs=1e-4)
    assert basis.constant == pytest.approx(((outcome - outcome.mean()) ** 2).mean(), abs=1e-4)
    assert basis.ece == pytest.approx(calibration_error(outcome, used), abs=1e-4)


def test_the_calibration_error_by_hand() -> None:
    outcome, confidence = np.array([1.0, 0, 1, 1]), np.array([0.62, 0.68, 0.1, 1.0])
    # bin .6: mean .65, half succeeded; bin .1: all of one at .1; last bin: one at 1, which succeeded
    assert calibration_error(outcome, confidence) == pytest.approx((2 * 0.15 + 0.9 + 0) / 4)


def test_the_best_threshold_tells_successes_from_failures(seed: int) -> None:
    rng = random.Random(seed)
    scores = np.array([round(rng.random(), 1) for _ in range(30)])
    outcome = np.array([float(rng.random() < 0.5) for _ in range(30)])
    outcome[:2] = 0, 1

    def gain(threshold: float) -> float:
        passed = scores >= threshold
        return float(passed[outcome == 1].mean() - passed[outcome == 0].mean())

    assert gain(best_threshold(scores, outcome)) == pytest.approx(max(gain(each) for each in scores))
    assert best_threshold(scores, np.ones(30)) is None


def test_runs_of_a_single_task_have_figures_and_no_better_threshold() -> None:
    """No other task could choose one."""
    runs = [run._replace(task="the one") for run in made_runs(random.Random(1), 40)[1]]
    measurement = Measurement(runs)
    basis = measurement.basis("stated", [measurement.order(np.arange(40))])
    assert basis.better is None
    assert basis.accepted is not None


def test_a_good_threshold_is_measured_on_tasks_that_did_not_choose_it() -> None:
    rng = random.Random(1)
    _, runs = made_runs(rng, 200)
    runs = [run._replace(outcome=float(rng.random() < 0.5)) for run in runs]
    measurement = Measurement(runs)
    chance = measurement.basis("stated", [measurement.order(np.arange(200))]).better
    assert chance.gain.low < 0.1  # what is chosen from noise gains nothing elsewhere
    perfect = measurement.order(np.arange(200), outcome_of_runs(runs))
    assert measurement.basis("record", [perfect]).better.gain.low > chance.gain.high


def test_verdicts_come_late_and_count_for_their_agent_alone() -> None:
    _, runs = made_runs(random.Random(1), 60)
    claims = np.array([bool(run.claim) for run in runs])
    for at, confidence in judged_orders(runs, Judging(1.0, 60)):
        assert len(at) == 48
        assert all(np.isnan(confidence[~claims]))
        assert all(confidence[claims] == 0.5)  # no verdict comes in time
    runs = [run._replace(outcome=1.0) for run in runs]
    orders = judged_orders(runs, Judging(1.0, 1))
    assert all((confidence[at[~np.isnan(confidence[at])]] > 0.5).all() for at, confidence in orders)


# -- on scored documents


def documents(rng: random.Random, count: int = 60) -> list[dict[str, Any]]:
    """Return traces whose `metadata.success` is what was recorded."""
    made = [json.loads(random_trace_bytes(rng, number, T0 + number)) for number in range(count)]
    for number, document in enumerate(made):
        document["metadata"] |= {"success": rng.random() < 0.5, "agent_id": rng.choice(["ada", "bob"])}
        document |= {"x_task": f"task {number % 20}", "x_claimed": rng.choice([True, True, None, False])}
    return made


def as_scored(made: list[dict[str, Any]]) -> list[bytes]:
    output = io.BytesIO()
    lines = b"\n".join(json.dumps(document).encode() for document in made)
    score_lines([io.BytesIO(lines)], output, None, load(embedder="none"), None)
    return output.getvalue().splitlines()


@pytest.mark.parametrize("asked", [Asked("metadata.success"), Asked("metadata.success", "x_claimed")])
def test_the_recorded_outcome_never_changes_a_score(seed: int, asked: Asked) -> None:
    """The same runs with another recorded outcome, confidence and evaluation: the same scores."""
    rng = random.Random(seed)
    made = documents(rng)
    for document in made:
        claimed = document["x_claimed"]
        expected = score_trace(as_claimed(parse_trace(json.dumps(document).encode()), claimed))
        for success, confidence, evaluated in itertools.product((True, False), (0.0, 1.0), (True, None)):
            document["metadata"]["success"] = success
            document["outcome"] |= {"confidence": confidence, "evaluated": evaluated}
            assert score_trace(as_claimed(parse_trace(json.dumps(document).encode()), claimed)) == expected
        assert expected.components.outcome_confidence == STATED * (0.3 if claimed is False else 1)
        document["metadata"]["success"] = rng.random() < 0.5
    # all outcomes turned: the same share is accepted, and the AUC is turned, too
    before = report_of(as_scored(made), asked=asked).outcome
    for document in made:
        document["metadata"]["success"] ^= True
        document["outcome"]["confidence"] = rng.random()
    after = report_of(as_scored(made), asked=asked).outcome
    assert before.stated.accepted == after.stated.accepted
    aucs = [it.stated.scopes[0].auc_score for it in (before, after)]
    assert sum(auc.value for auc in aucs if auc is not None) == pytest.approx(1, abs=2e-4)


def test_it_measures_the_scores_of_the_documents_novelty_and_all_or_those_of_the_settings(seed: int) -> None:
    rng = random.Random(seed)
    sources = [json.dumps(document).encode() for document in documents(rng)]
    made = outputs(sources, threshold=0.5)
    outcome = np.array([float(json.loads(it)["metadata"]["success"]) for it in made])
    for settings, threshold in (({}, 0.5), ({"threshold": 0.6}, 0.6)):
        outcomes = report_of(made, asked=Asked("metadata.success"), **settings).outcome
        assert (outcomes.runs, outcomes.tasks, outcomes.task, outcomes.record) == (60, 20, "x_task", None)
        scores = np.array([
            score_trace(as_claimed(parse_trace(source), None), json.loads(it)["scoring"]["components"]["novelty"]).score
            for source, it in zip(sources, made, strict=True)
        ])  # fmt: skip
        assert outcomes.stated.accepted.value == pytest.approx((scores >= threshold).mean(), abs=1e-4)
        auc = outcomes.stated.scopes[0].auc_score
        assert auc.value == pytest.approx(brute_auc(scores, outcome, np.zeros(60)), abs=1e-4)


def write(path: Path, lines: list[bytes]) -> str:
    path.write_bytes(b"\n".join(lines))
    return str(path)


def outcome_of(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    outcomes: dict[str, Any] = json.loads(result.stdout)["outcome"]
    return outcomes


def test_files_are_runs_in_their_order_and_the_same_give_the_same_figures(tmp_path: Path) -> None:
    lines = as_scored(documents(random.Random(4)))
    one = write(tmp_path / "one.jsonl", lines)
    two = [write(tmp_path / name, part) for name, part in (("a.jsonl", lines[:30]), ("b.jsonl", lines[30:]))]
    options = ("--outcome", "metadata.success", "--claimed", "x_claimed", "--verdicts", "50%", "--late", "5")
    whole, parted = outcome_of(one, *options), outcome_of(*two, *options)
    assert whole == outcome_of(one, *options)
    assert whole["judging"] == {"share": 0.5, "late": 5}
    assert [it["name"] for it in whole["record"]["scopes"]] == ["all", "within domain"]
    assert [it["name"] for it in parted["record"]["scopes"]] == ["all", "within domain", "within file"]
    assert parted["record"]["scopes"][:2] == whole["record"]["scopes"]
    assert [(it["name"], it["runs"]) for it in parted["files"]] == [("a.jsonl", 30), ("b.jsonl", 30)]
    assert 0 < whole["files"][0]["claims"] < 60


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("x_won", None, "line 2 has no outcome at x_won"),
        ("x_won", "yes", 'line 2: x_won is "yes"; --outcome must name a field with true, false or a number from 0 to'),
        ("x_won", 1.5, "x_won is 1.5"),
        ("x_won", [], "x_won is []"),
        ("x_claimed", "done", 'x_claimed is "done"; --claimed must name a field with true, false or null'),
    ],
)
def test_a_field_of_another_kind_is_named_with_its_line(tmp_path: Path, field: str, value: Any, message: str) -> None:
    made = [document | {"x_won": 1} for document in documents(random.Random(1), 4)]
    made[1][field] = value
    result = run(write(tmp_path / "runs.jsonl", as_scored(made)), "--outcome", "x_won", "--claimed", "x_claimed")
    assert (result.exit_code, message in result.stderr) == (1, True), result.stderr


def test_runs_must_differ_and_have_a_claim_where_one_is_named(tmp_path: Path) -> None:
    made = documents(random.Random(1), 4)
    for document in made:
        document["metadata"]["success"] = True
        del document["x_claimed"]
    file = write(tmp_path / "runs.jsonl", as_scored(made))
    options = (file, "--outcome", "metadata.success")
    assert "4 runs, all with the same outcome" in run(*options).stderr
    assert "no run has a claim at x_claimed" in run(*options, "--claimed", "x_claimed").stderr


@pytest.mark.parametrize("bad", [b'"\\ud800"', b"9" * 5000, b"1e400"])
def test_an_outcome_that_cannot_be_read_is_named(bad: bytes, tmp_path: Path) -> None:
    lines = [line[:-1] + b',"x_won":' + bad + b"}" for line in as_scored(documents(random.Random(1), 2))]
    result = run(write(tmp_path / "runs.jsonl", lines), "--outcome", "x_won")
    assert (result.exit_code, "line 1" in result.stderr) == (1, True), result.stderr
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_simulated_verdicts_go_together_with_settings(tmp_path: Path) -> None:
    file = write(tmp_path / "runs.jsonl", as_scored(documents(random.Random(3))))
    options = (file, "--outcome", "metadata.success", "--verdicts", "50%", "--late", "2")
    plain = outcome_of(*options)
    assert outcome_of(*options, "--set", "confidence=record") == plain
    other = outcome_of(*options, "--set", "threshold=0.5")
    for name in ("stated", "record"):
        assert other[name]["scopes"] == plain[name]["scopes"], "a threshold changes no score"
        assert other[name]["accepted"]["value"] > plain[name]["accepted"]["value"]
    config = tmp_path / "weights.toml"
    config.write_text("[profiles.finance.weights]\ncomplexity=0\nnovelty=0\ntool_diversity=0\noutcome_confidence=1\n")
    assert outcome_of(*options, "--config", str(config))["record"]["scopes"] != plain["record"]["scopes"]

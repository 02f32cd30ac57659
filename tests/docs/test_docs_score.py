"""Every figure of docs/how-a-score-comes-about.md, computed again by the core and by the real model."""

import json
import re
import shlex

import numpy as np
import pytest

from tests.support.score_page import DOCUMENTS, EARLIER, HALF, SIMILARITY, TEXT, scored
from tests.support.snippets import snippets
from worker.config import load
from worker.core.scorer import PartitionScorer
from worker.core.scoring import PROFILES, Components, weights_by_verdicts
from worker.core.trace import parse_trace


def tables(first_cell: str) -> list[list[list[str]]]:
    """The rows of each table whose header begins with that cell."""
    bodies = re.findall(rf"^\| {first_cell} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
    return [[[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()] for table in bodies]


def calculate(expression: str) -> float:
    assert re.fullmatch(r"[-+*/(), 0-9.]*(min\([-+*/, 0-9.]+\))?", expression), expression
    return float(eval(expression, {"__builtins__": {}, "min": min}))  # digits and operators only


def test_the_tables_hold_the_core_s_figures() -> None:
    earlier, result = scored()
    assert f"Its novelty was {earlier.components.novelty}, its score {earlier.score:.4f}" in " ".join(TEXT.split())
    components = tables("component")[1]  # the first table is the formula's
    names = [name.replace(" ", "_") for name, *_ in components]
    assert names == list(Components.__dataclass_fields__)
    for name, (_, calculation, value, weight, share) in zip(names, components, strict=True):
        assert calculate(calculation) == pytest.approx(float(value), abs=1e-9)
        assert getattr(result.components, name) == pytest.approx(float(value), abs=HALF)
        assert getattr(result.weights, name) == float(weight)
        assert float(value) * float(weight) == pytest.approx(float(share), abs=1.1 * HALF)
    (_, total, summed), *overrides, (_, _, verdict) = tables("then")[0]
    assert total == " + ".join(row[4] for row in components)
    assert calculate(total) == pytest.approx(float(summed), abs=1e-9)
    last = float(summed)
    for _, calculation, value in overrides:
        assert calculation.startswith(f"{last:.4f} ")
        assert calculate(calculation) == pytest.approx(float(value), abs=1e-9)
        last = float(value)
    assert [re.findall(r"`(\w+)`", row[0])[0] for row in overrides] == list(result.overrides)
    assert result.score == pytest.approx(last, abs=2 * HALF)
    assert verdict == ("accepted" if result.accepted else "rejected")


def test_a_second_tool_would_have_saved_it() -> None:
    document = json.loads(DOCUMENTS[1])
    document["steps"][2]["tool"] = {"name": "another"}
    scorer = PartitionScorer(dimensions=2)
    scorer.score(EARLIER, [1.0, 0.0], 0)
    result = scorer.score(parse_trace(json.dumps(document)), [SIMILARITY, float(np.sqrt(1 - SIMILARITY**2))], 0)
    assert result.score == pytest.approx(0.7995, abs=2 * HALF)
    assert "0.7995" in TEXT
    assert result.accepted


def test_the_profiles_are_the_code_s_and_the_example_of_own_ones_is_taken() -> None:
    (rows,) = tables("profile")
    weights_by_profile = {name: tuple(map(float, weights)) for name, *weights in rows}
    assert weights_by_profile == {
        name: tuple(getattr(profile.weights, part) for part in Components.__dataclass_fields__)
        for name, profile in PROFILES.items()
    }
    _, variable = shlex.split(TEXT.split("```console\n")[1].split("```")[0])
    profiles = load(profiles=json.loads(variable.removeprefix("KP_PROFILES="))).scoring_profiles()
    assert profiles["legal"].threshold == 0.7
    assert profiles["medical"].threshold == 0.85
    assert profiles["medical"].weights == PROFILES["medical"].weights


def test_the_weights_for_verdicts_are_in_proportion_to_the_code_s() -> None:
    (text,) = (it.text for it in snippets("tests/docs/test_docs_score.py") if it.page == "docs/verdicts.md")
    _, _, variable = shlex.split(text)
    profiles = load(profiles=json.loads(variable.removeprefix("KP_PROFILES="))).scoring_profiles()
    assert profiles.keys() == PROFILES.keys()
    for name, profile in PROFILES.items():
        wanted = weights_by_verdicts(profile.weights)
        for part in Components.__dataclass_fields__:
            assert getattr(profiles[name].weights, part) == pytest.approx(getattr(wanted, part), abs=0.001)

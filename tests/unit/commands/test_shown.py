"""How a score is shown beside its threshold: never on the other side of it."""

from __future__ import annotations

import io
import json
import math
import random
import re
from typing import Any

import pytest
from rich.console import Console

from tests.support.builders import trace_bytes
from tests.support.reports import rendered, report_of, scored_document, words
from worker.commands.shared.explanation import explain_trace, explanation_text
from worker.commands.shared.scored_rows import TailRecord, rows
from worker.commands.shared.shown import shown_score, shown_threshold
from worker.config import Settings


def printed(renderable: Any, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(renderable)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def test_a_shown_score_lies_on_its_side_of_the_shown_threshold_with_the_fewest_digits(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(3000):
        threshold = rng.choice([0, 1, 0.75, 0.1 + 0.2, round(rng.random(), 3), rng.random()])
        near = threshold + rng.choice([-1, 1]) * 10 ** rng.uniform(-17, -1)
        bits = [threshold, math.nextafter(threshold, 0), math.nextafter(threshold, 1), near, rng.random()]
        score, digits = min(1.0, max(0.0, rng.choice(bits))), rng.choice([3, 4])
        text = shown_score(score, threshold, digits)
        assert (float(text) >= float(shown_threshold(threshold))) == (score >= threshold)
        assert float(text) == pytest.approx(score, abs=0.5000001 * 10**-digits)
        places = len(text.partition(".")[2])
        if places > digits and text != repr(score):
            assert (round(score, places - 1) >= threshold) != (score >= threshold), "a digit less would do"


@pytest.mark.parametrize(
    ("score", "threshold", "text"),
    [
        (0.7497, 0.75, "0.7497"),
        (0.75, 0.75, "0.750"),
        (0.7501, 0.75, "0.750"),
        (0.74996, 0.75, "0.74996"),
        (math.nextafter(0.75, 0), 0.75, "0.7499999999999999"),
        (0.7502, 0.7504, "0.750"),
        (0.7497, None, "0.750"),
        (1, 1, "1.000"),
        (0.9999, 1, "0.9999"),
        (-1e-9, 0.75, "0.000"),
    ],
)
def test_a_score_has_three_digits_unless_they_would_lie(score: float, threshold: float | None, text: str) -> None:
    assert shown_score(score, threshold) == text


def test_a_threshold_has_all_its_digits() -> None:
    assert [shown_threshold(it) for it in (0.75, 1.0, 0, 0.7500004, 0.1 + 0.2)] == [
        "0.75", "1", "0", "0.7500004", "0.30000000000000004",
    ]  # fmt: skip


JUST_BELOW = (0.7497, 0.749996)


@pytest.mark.parametrize("score", [*JUST_BELOW, math.nextafter(0.75, 0)])
def test_tail_shows_the_digits_and_keeps_to_the_terminal(score: float) -> None:
    documents = [scored_document(n, score=it, domain="a_domain_of_16_c") for n, it in enumerate((score, 0.5))]
    records = [TailRecord(None, document, None) for document in documents]  # type: ignore[arg-type]
    lines = printed(rows(records, 80, header=True, only_dead_letters=False), 80)
    assert max(map(len, (line.rstrip() for line in lines))) <= 80
    assert re.search(rf" {score} rejected ", lines[1])
    assert re.search(r" 0\.500 rejected ", lines[2])
    assert lines[1].count("…") == 1, "only the domain is cut"


@pytest.mark.parametrize("score", JUST_BELOW)
def test_explain_shows_the_digits_of_the_sum_too(score: float) -> None:
    trace, settings = trace_bytes(), Settings()
    neutral = explain_trace(trace, settings, 0.5)
    novelty = 0.5 + (score - neutral.score) / neutral.components["novelty"].weight
    found = explain_trace(trace, settings, novelty)
    assert found.score == pytest.approx(score, abs=1e-9)
    lines = printed(explanation_text(found), 120)
    assert next(line for line in lines if line.startswith("sum ")).split()[-1] == str(score)
    assert not any("0.7500" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("score", JUST_BELOW)
def test_a_report_shows_the_digits(score: float) -> None:
    text = words(rendered(report_of([scored_document(n, score=it) for n, it in enumerate((score, 0.9))])))
    assert str(score) in text.split()
    assert "0.750" not in text


def test_what_machines_read_has_the_score_as_it_is() -> None:
    document = scored_document(score=0.749996)
    record = type("Record", (), {"value": json.dumps(document).encode()})()
    assert json.loads(TailRecord(record, document, None).as_json())["scoring"]["score"] == 0.749996

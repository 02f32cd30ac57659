"""How a score is shown beside its threshold: never on the other side of it."""

import io
import math
import random
import re
import shlex
from typing import Any

import pytest
from rich.console import Console

from tests.support.builders import trace_bytes
from tests.support.reports import rendered, report_of, scored_document, words
from worker.commands.shared.explanation import explain_trace, explanation_text
from worker.commands.shared.scored_rows import TailRecord, in_commit_order, rows
from worker.commands.shared.shown import Pasted, columns, shown_score, shown_threshold
from worker.config import Settings
from worker.core.records import SourceRecord


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
    lines = printed(rows(records), 80)
    assert max(map(len, (line.rstrip() for line in lines))) <= 80
    assert re.search(rf" {score} rejected ", lines[1])
    assert re.search(r" 0\.500 rejected ", lines[2])
    assert lines[1].count("…") == 1, "only the domain is cut"


@pytest.mark.parametrize("score", JUST_BELOW)
def test_explain_shows_the_digits_of_the_sum_too(score: float) -> None:
    trace, settings = trace_bytes(), Settings()
    neutral = explain_trace(trace, settings, 0.5)
    novelty = 0.5 + (score - neutral.score) / neutral.components["novelty"].weight
    explained = explain_trace(trace, settings, novelty)
    assert explained.score == pytest.approx(score, abs=1e-9)
    lines = printed(explanation_text(explained), 120)
    assert next(line for line in lines if line.startswith("sum ")).split()[-1] == str(score)
    assert not any("0.7500" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("score", JUST_BELOW)
def test_a_report_shows_the_digits(score: float) -> None:
    text = words(rendered(report_of([scored_document(n, score=it) for n, it in enumerate((score, 0.9))])))
    assert str(score) in text.split()
    assert "0.750" not in text


@pytest.mark.parametrize("width", [107, 80, 72, 60, 50, 40, 32])
def test_a_narrow_terminal_gets_fewer_columns_and_no_cut_figures(width: int) -> None:
    document = scored_document(0, domain="a_domain_of_16_c", score=0.8)
    record = TailRecord(None, document, None)  # type: ignore[arg-type]
    head, line = (text.rstrip() for text in printed(rows([record]), width))
    assert max(len(head), len(line)) <= width
    names, cells = head.split(), line.split()
    assert len(names) - ("overrides" in names and len(names) - len(cells)) == len(cells)
    shown = dict(zip(names, cells, strict=False))
    assert shown["id"] == document["id"].removeprefix("kp:trace:")[:8]
    assert shown["decision"] == "accepted"
    assert float(shown["score"]) == pytest.approx(document["scoring"]["score"], abs=1e-3)
    assert ("overrides" in names, "nearest" in names) == (width >= 107, width >= 72)
    assert "…" not in (line if width >= 80 else line.replace(shown["domain"], ""))


def test_a_table_that_has_nothing_left_to_go_continues_below() -> None:
    table = columns("trace", "score", "words", right=("score",))
    table.fit = ("words",)
    table.add_row("kp:trace:0123456789", "0.123", "many")
    assert [line.split() for line in printed(table, 20)] == [["trace"], ["score"], ["kp:trace:0123456789"], ["0.123"]]


@pytest.mark.parametrize("width", [200, 60, 30])
def test_a_command_is_pasted_as_one(width: int) -> None:
    command = "kp-worker explain --config 'a b.toml' -b kafka:9092 --set profiles.x.threshold=0.5 kp:trace:1"
    lines = printed(Pasted(command), width)
    assert [line.rstrip().endswith("\\") for line in lines] == [True] * (len(lines) - 1) + [False]
    assert max(map(len, lines)) <= max(width, 34)
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == shlex.split(command)
    broken = shlex.join(["kp-worker", "explain", "--set", "profiles={a=1,\nb=1}", "kp:trace:1"])
    assert shlex.split("\n".join(printed(Pasted(broken), width)).replace("\\\n", "")) == shlex.split(broken)


def test_rows_follow_each_other_as_their_commits_did() -> None:
    def record(partition: int, offset: int, time_ms: int) -> TailRecord:
        document = scored_document(offset)
        document["scoring"]["source"] = {"topic": "traces", "partition": partition, "offset": offset}
        return TailRecord(SourceRecord("traces.accepted", partition, 0, time_ms, None, b"", []), document, None)

    # The second of partition 0 was redriven: its timestamp is older than that of the record before it.
    records = [record(0, 1, 5), record(1, 0, 15), record(0, 0, 10), record(0, 2, 20)]
    assert [it.source for it in in_commit_order(records)] == [(0, 0), (0, 1), (1, 0), (0, 2)]

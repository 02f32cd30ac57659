"""`kp-worker explain`: the steps lead to the core's score, bit for bit, and problems have a line."""

import json
import random

import pytest
from click.testing import CliRunner, Result

from tests.support.builders import (
    T0,
    make_record,
    make_trace,
    random_trace_bytes,
    read_jsonl,
    trace_bytes,
    trace_document,
)
from worker.cli import cli
from worker.commands.explain_steps import explain_trace
from worker.config import load
from worker.core.documents import scored_record
from worker.core.scorer import PartitionScorer
from worker.core.scoring import score_trace
from worker.core.trace import parse_trace


def run(document: bytes, *options: str, **env: str) -> Result:
    return CliRunner().invoke(cli, ["explain", "-", *options], input=document, env=env)


def test_every_parity_case_is_explained_with_its_score_to_the_last_bit() -> None:
    settings = load()
    for case in read_jsonl("scoring_cases.jsonl"):
        raw = json.dumps(case["trace"]).encode()
        trace = parse_trace(raw)
        for novelty in (0.0, 0.5, 1 / 3, 1.9):
            explanation, score = explain_trace(raw, settings, novelty), score_trace(trace, novelty)
            assert explanation.score == score.score
            assert {name: it.value for name, it in explanation.components.items()} == {
                name: getattr(score.components, name) for name in explanation.components
            }
            assert [override.name for override in explanation.overrides] == list(score.overrides)


def test_what_the_worker_wrote_is_explained_with_its_own_figures(seed: int) -> None:
    rng = random.Random(seed)
    scorer, settings = PartitionScorer(dimensions=3), load()
    for offset in range(50):
        raw = random_trace_bytes(rng, offset, 1_776_153_600_000 + offset)
        scored = scorer.score(parse_trace(raw), [rng.gauss(0, 1) for _ in range(3)], offset)
        document = scored_record(make_record(raw, offset), scored, None).value
        assert document is not None
        explanation = explain_trace(document, settings)
        assert (explanation.score, explanation.agrees) == (scored.score, True)
        assert (explanation.decision == "accepted") == scored.accepted
        assert explanation.nearest is None or scored.nearest is not None


def test_a_scored_document_keeps_its_profile_when_the_settings_have_changed() -> None:
    raw = trace_bytes(domain="legal")
    scored = PartitionScorer(threshold=0.6).score(parse_trace(raw), None, 0)
    document = scored_record(make_record(raw), scored, None).value
    assert document is not None
    weights = {"complexity": 1, "novelty": 0, "tool_diversity": 0, "outcome_confidence": 0}
    result = run(document, KP_PROFILES=json.dumps({"legal": {"weights": weights}, "default": {"weights": weights}}))
    explained = json.loads(result.output)
    assert result.exit_code == 0
    assert (explained["profile"], explained["score"], explained["threshold"]) == ("default", scored.score, 0.6)
    assert "other weights" in explained["notes"][0]


def test_a_document_that_was_changed_is_found_out() -> None:
    raw = trace_bytes()
    document = scored_record(make_record(raw), PartitionScorer().score(parse_trace(raw), None, 0), None).value
    assert document is not None
    changed = json.loads(document)
    changed["outcome"]["confidence"] = 0.95
    result = run(json.dumps(changed).encode())
    assert result.exit_code == 1
    assert "was changed" in json.loads(result.output)["notes"][0]


def test_a_bare_trace_has_neutral_novelty_or_the_given_one_and_the_settings_profile() -> None:
    bare = json.loads(run(trace_bytes()).output)
    assert (bare["components"]["novelty"]["value"], bare["score"]) == (0.5, score_trace(make_trace()).score)
    assert "--novelty" in bare["notes"][0]
    given = json.loads(run(trace_bytes(), "--novelty", "0.9", KP_PROFILES='{"finance": {"threshold": 0.95}}').output)
    assert given["score"] == score_trace(make_trace(), 0.9).score
    assert (given["threshold"], given["decision"], given["notes"]) == (0.95, "rejected", [])


def test_a_stream_time_that_was_held_back_is_told() -> None:
    scorer = PartitionScorer(dimensions=2, max_step_ms=60_000)
    for number in range(2):
        record = make_record(trace_bytes(created_at=T0 + number * 3_600_000), timestamp_ms=None)
        trace = parse_trace(record.value)
        output = scored_record(record, scorer.score(trace, None, T0 + number * 3_600_000), None)
    document = output.value or b""
    (note,) = explain_trace(document, load(stream_time_max_step_seconds=60)).notes
    assert "compared at stream time 2026-04-14T08:01:00.000Z, before its created_at (2026-04-14T09:00:00.000Z)" in note
    assert explain_trace(document, load()).notes == []


def test_another_s_scoring_object_is_no_score() -> None:
    result = run(json.dumps({**trace_document(), "scoring": {"score": "good"}}).encode())
    assert "not kp-worker's" in json.loads(result.output)["notes"][0]


def test_each_override_is_told_with_what_it_did() -> None:
    steps = ["error_recovery:a", "error_recovery", "error_recovery"]
    text = run(trace_bytes(steps=steps), "--text").output
    raw = explain_trace(trace_bytes(steps=steps), load())
    assert [override.name for override in raw.overrides] == ["error_recovery_bonus", "low_tool_diversity_penalty"]
    assert raw.overrides[0].after == raw.overrides[1].before
    for override in raw.overrides:
        assert f"{override.before:.4f} -> {override.after:.4f}" in text


def test_text_of_a_trace_cannot_steer_the_terminal() -> None:
    text = run(trace_bytes("kp:trace:\x1b[2J", domain="\x1b]0;x\x07"), "--text").output
    assert "\x1b" not in text
    assert "\x07" not in text


@pytest.mark.parametrize(
    ("change", "line", "words"),
    [
        (('"confidence": 0.9', '"confidence": 90'), '"confidence": 90', "outcome.confidence: 90 is not allowed"),
        (('"type": "observation"', '"type": "look"'), '"type": "look"', "steps.4.type"),
        (('"name": "search"', '"nam": "search"'), '"tool": {', "steps.1.tool.name: required"),
        (('"result_summary": "Done",', ""), '"outcome": {', "outcome.result_summary: required"),
        (('"objective": "Explain"', '"objective": Explain'), '"objective": Explain', "not_json"),
        (('"Done"', '"\udcff"'), "\udcff", "not_utf8"),
    ],
)
def test_a_problem_is_told_with_its_line(change: tuple[str, str], line: str, words: str) -> None:
    text = json.dumps(trace_document(), indent=1).replace(*change)
    number = text[: text.index(line)].count("\n") + 1
    result = run(text.encode(errors="surrogateescape"))
    assert result.exit_code == 1
    assert f"<stdin>: line {number}: " in result.output
    assert words in result.output


def test_the_last_of_equal_keys_is_the_one_that_counts() -> None:
    text = json.dumps(trace_document(), indent=1)
    text = text.replace('"outcome": {', '"outcome": {"confidence": 0.5,\n')
    result = run(text.replace('"confidence": 0.9', '\n"confidence": 9').encode())
    number = text[: text.index('"confidence": 0.9')].count("\n") + 2
    assert f"line {number}: " in result.output


def test_json_lines_are_told_apart_from_a_broken_document() -> None:
    lines = run(trace_bytes() + b"\n" + trace_bytes())
    assert lines.exit_code == 1
    assert "line 2: not_json" in lines.output
    assert "sed -n 1p" in lines.output
    assert "sed" not in run(b"{}x").output


@pytest.mark.parametrize("novelty", ["nan", "-1", "2.5", "much"])
def test_a_novelty_out_of_range_is_refused(novelty: str) -> None:
    assert run(trace_bytes(), "--novelty", novelty).exit_code == 2

"""`kp-worker explain`: the steps lead to the core's score, bit for bit, and problems have a line."""

import contextlib
import io
import itertools
import json
import os
import random
import shlex
import threading
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

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
from worker.commands.explain import is_file, parse_target, read_document
from worker.commands.shared.console import Command, CommandError
from worker.commands.shared.explanation import agrees, explain_trace, explanation_text
from worker.commands.shared.options import given_options, settings_options
from worker.config import load
from worker.core.documents import RecordPlace, scored_record
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
        explanation = explain_trace(document, settings)
        assert (explanation.score, agrees(explanation)) == (scored.score, True)
        assert (explanation.decision == "accepted") == scored.accepted
        assert explanation.nearest is None or scored.nearest is not None


def scored_twice(**fields: Any) -> dict[str, Any]:
    """Return the document of a trace that was scored a second time: its nearest is itself."""
    raw, scorer = trace_bytes(**fields), PartitionScorer(dimensions=2, threshold=0.6)
    for offset in range(2):
        scored = scorer.score(parse_trace(raw), [1.0, 0.0], offset)
    document: dict[str, Any] = json.loads(scored_record(make_record(raw), scored, None).value or b"")
    return document


def test_a_scored_document_keeps_its_profile_when_the_settings_have_changed() -> None:
    document = scored_twice(domain="legal")
    weights = {"complexity": 1, "novelty": 0, "tool_diversity": 0, "outcome_confidence": 0}
    result = run(
        json.dumps(document).encode(),
        KP_PROFILES=json.dumps({"legal": {"weights": weights}, "default": {"weights": weights}}),
    )
    explained = json.loads(result.output)
    assert result.exit_code == 0
    score = document["scoring"]["score"]
    assert (explained["profile"], explained["score"], explained["threshold"]) == ("default", score, 0.6)
    assert "other weights" in explained["notes"][0]


def test_a_document_that_was_changed_is_found_out() -> None:
    changed = scored_twice()
    changed["outcome"]["confidence"] = 0.95
    result = run(json.dumps(changed).encode())
    assert result.exit_code == 1
    assert "was changed" in json.loads(result.output)["notes"][0]


def test_a_bare_trace_has_neutral_novelty_or_the_given_one_and_the_settings_profile() -> None:
    bare = json.loads(run(trace_bytes()).output)
    assert (bare["components"]["novelty"]["value"], bare["score"]) == (0.5, score_trace(make_trace()).score)
    assert "--novelty" in bare["notes"][0]
    assert json.loads(run(trace_bytes(), KP_THRESHOLD=repr(bare["score"])).output)["decision"] == "accepted"
    own = '{"default": {"threshold": 0.1}, "finance": {"threshold": 0.95}}'
    given = json.loads(run(trace_bytes(), "--novelty", "0.9", KP_PROFILES=own).output)
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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('"confidence": 0.9', '"confidence": 90'), "outcome.confidence: 90 is not allowed"),
        (('"name": "search"', '"nam": "search"'), "steps.1.tool.name: required"),
        (('"objective": "Explain"', '"objective": Explain'), "not_json"),
        (('"Done"', '"\udcff"'), "not_utf8"),
    ],
)
def test_a_problem_is_told_with_its_place(change: tuple[str, str], words: str) -> None:
    text = json.dumps(trace_document(), indent=1).replace(*change)
    result = run(text.encode(errors="surrogateescape"))
    assert result.exit_code == 1
    assert "<stdin>: " in result.output
    assert words in result.output
    assert "JSON Lines" not in result.output


@pytest.mark.parametrize("line", [None, 700])
def test_a_file_of_many_lines_is_not_read_whole(line: int | None, tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    os.mkfifo(path)
    written = 0

    def write_for_ever() -> None:
        nonlocal written
        with contextlib.suppress(BrokenPipeError), path.open("wb", buffering=0) as file:
            for number in itertools.count(1):
                written += file.write(trace_bytes(f"kp:trace:{number}") + b"\n")

    writer = threading.Thread(target=write_for_ever)
    writer.start()
    if line is None:
        with pytest.raises(
            CommandError, match=r"JSON Lines: name the line of one trace, as in kp-worker explain .* --line 1"
        ):
            read_document(str(path), line, 1 << 20)
    else:
        assert json.loads(read_document(str(path), line, 1 << 20))["id"] == f"kp:trace:{line}"
    writer.join()
    assert written < 2 << 20


def test_one_line_of_a_file_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "0:3"  # a file wins over a place
    path.write_bytes(trace_bytes() + b"\n\n")
    assert CliRunner().invoke(cli, ["explain", str(path)]).exit_code == 0
    bad = trace_bytes(confidence=7)
    path.write_bytes(b"\n".join([trace_bytes("kp:trace:1"), trace_bytes("kp:trace:2"), bad, b""]) + b"\n" + b"[" * 99)

    def explain(line: int, **env: str) -> Result:
        return CliRunner().invoke(cli, ["explain", str(path), "--line", str(line)], env=env)

    assert json.loads(explain(2).output)["id"] == "kp:trace:2"
    for line, words in {
        3: "line 3: invalid_value: outcome.confidence: 7 is not allowed",
        4: "line 4 is empty",
        5: "line 5: not_json",
        6: "has no line 6, only 5",
        9: "has no line 9, only 5",
    }.items():
        result = explain(line)
        assert (result.exit_code, words in result.output) == (1, True), result.output
    small = explain(1, KP_MAX_MESSAGE_BYTES="1024", KP_MAX_BATCH_BYTES="1048576")
    assert json.loads(small.output)["id"] == "kp:trace:1"
    path.write_bytes(trace_bytes(objective="x" * 2000) + b"\n")
    large = explain(1, KP_MAX_MESSAGE_BYTES="1024")
    assert "line 1: more than 1024 bytes, the limit of one trace (KP_MAX_MESSAGE_BYTES)" in large.output


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        ("kp:trace:7c3a-1", "kp:trace:7c3a-1"),
        ("7c3a6bc1", "kp:trace:7c3a6bc1"),
        ("kp:trace:a/b.json", "kp:trace:a/b.json"),
        ("3:41", RecordPlace("traces", 3, 41)),
        ("traces:3:41", RecordPlace("traces", 3, 41)),
        ("traces/3/41", RecordPlace("traces", 3, 41)),
        ("traces.rejected:0:7", RecordPlace("traces.rejected", 0, 7)),
        ("traces.dead-letter/2/0", RecordPlace("traces.dead-letter", 2, 0)),
    ],
)
def test_what_is_no_file_is_an_id_or_a_place(target: str, wanted: object) -> None:
    assert not is_file(target)
    assert parse_target(target, load()) == wanted


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no/such/file"], "no such file"),
        (["no/such/file"], "PARTITION:OFFSET"),
        (["trace.json"], "no such file"),
        (["kp:trace:"], "is not an id"),
        (["kp:trace:"], "PARTITION:OFFSET"),
        (["elsewhere:0:7"], "not one of the topics traces, traces.accepted, traces.rejected, traces.dead-letter"),
        (["."], "Is a directory"),
        (["7c3a6bc1", "--line", "2"], "there is no file 7c3a6bc1"),
        *((["-", "--novelty", novelty], "--novelty") for novelty in ("nan", "-1", "2.5", "much")),
    ],
    ids=str,
)
def test_wrong_arguments(words: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["explain", *words], input=trace_bytes())
    assert (result.exit_code, message in result.output) == (2, True), result.output


def test_a_near_miss_of_the_domain_is_named() -> None:
    assert "which has no profile (did you mean 'finance'?)" in run(trace_bytes(domain="Finance")).output
    assert "meant" not in run(trace_bytes(domain="gardening")).output


def test_text_into_a_pipe_is_not_wrapped() -> None:
    text = run(trace_bytes(objective="long " * 100, steps=["error_recovery:a"] * 3), "--text").output
    assert "long " * 100 in text
    assert "+ (0.3 if any error_recovery) + steps / 20 * 0.2)\n" in text.replace(" \n", "\n").replace("  ", " ")


def test_a_novelty_that_is_nearly_0_is_written_as_0() -> None:
    document = scored_twice()
    document["scoring"]["nearest"]["similarity"], document["scoring"]["components"]["novelty"] = 1.0000004, -3.57628e-07
    text = run(json.dumps(document).encode(), "--text").output
    assert "= 1 - 1 = 0.000\n" in text
    assert "-0.0" not in text


def test_a_printed_command_has_the_settings_that_were_given_and_no_secret(tmp_path: Path) -> None:
    document = scored_twice()
    config = tmp_path / "a b.toml"
    config.write_text("threshold = 0.8\n")
    given = ["--text", "--config", str(config), "-b", "kafka:9092", "-g", "mine", "--set", "profiles.x.threshold=0.5"]
    explanation = explain_trace(json.dumps(document).encode(), load())
    explanation.record = RecordPlace("t", 0, 0)
    printed = []

    @click.command(cls=Command)
    @settings_options
    def print_it() -> None:
        printed.append(given_options())

    secret = ["--set", "sasl_password=hunter2", "--set", '"sasl_password"=hunter3']
    assert CliRunner().invoke(print_it, [*given[1:], *secret]).exit_code == 0
    (options,) = printed
    assert shlex.split(options) == given[1:]
    assert "hunter" not in options
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(explanation_text(explanation, options))
    assert f"kp-worker explain{options} {explanation.nearest.id}" in console.export_text()

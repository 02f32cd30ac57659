"""`kp-worker convert`: what is not input and output. Those are in unit/runs/test_cases.py."""

import io
import json
import random
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.support import converted, sessions
from tests.support.converted import OPTIONS, lines, traces_of
from tests.support.message_logs import ERROR, expected_parts, message_log
from tests.support.otlp import as_json, as_protobuf, span
from tests.support.processes import start_command
from tests.support.sessions import claude_line, claude_request
from tests.support.surroundings import environment
from worker.cli import cli
from worker.commands.score.lines import score_lines
from worker.config import Settings

MINIMAL = [{"role": "user", "content": "Book a seat"}, {"role": "assistant", "content": "Done"}]


convert = partial(converted.convert, source="chat")


# -- many runs, against an independent reading


def test_each_part_of_200_runs_is_in_one_step_and_in_order(seed: int, tmp_path: Path) -> None:
    runs = [message_log(seed + number) for number in range(200)]
    file = tmp_path / "runs.jsonl"
    file.write_bytes(b"".join(json.dumps(run, ensure_ascii=number % 2 == 0).encode() + b"\n"
                              for number, run in enumerate(runs)))  # fmt: skip
    more = ["--success", "@reward", "--created-at", "@finished", "--error-prefix", ERROR, "--keep", "x_task=@task"]
    results = [CliRunner().invoke(cli, ["convert", "--from", "chat", *OPTIONS, *more, str(file)]) for _ in range(2)]
    assert [result.exit_code for result in results] == [0, 0], results[0].stderr
    assert results[0].stdout_bytes == results[1].stdout_bytes
    traces = traces_of(results[0])
    assert len(traces) == len({trace["id"] for trace in traces}) == 200
    for run, trace in zip(runs, traces, strict=True):
        objective, parts = expected_parts(run)
        assert trace["task"]["objective"] == objective
        assert [step["step_id"] for step in trace["steps"]] == list(range(len(parts)))
        last_action = max(at for at, part in enumerate(parts) if part[0] != "got")
        for at, (part, step) in enumerate(zip(parts, trace["steps"], strict=True)):
            if part[0] == "call":
                assert (step["type"], step["tool"]) == ("tool_call", {"name": part[1]})
                assert step["input"] == as_object(part[2])
                assert "content" not in step
            else:
                went_on = part[0] == "got" and part[1].startswith(ERROR) and at < last_action
                kind = "thought" if part[0] == "text" else "error_recovery" if went_on else "observation"
                assert (step["type"], step["content"]) == (kind, part[1])
        assert trace["outcome"]["result_summary"] == [part[1] for part in parts if part[0] == "text"][-1]
        assert trace["metadata"]["success"] == (run["reward"] == 1)
        assert trace["x_task"] == run["task"]
    summary = score_lines([io.BytesIO(results[0].stdout_bytes)], io.BytesIO(), None, Settings(), None)
    assert (len(summary.scores), summary.dead_letters) == (200, {})


def as_object(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return {"arguments": arguments}


# -- runs that give no trace


@pytest.mark.parametrize("run", [b'["\xff"]', b"[" * 100_000])
def test_a_line_that_is_no_json_is_named_and_the_next_one_is_written(run: bytes) -> None:
    result = convert(run + b"\n\n" + lines(MINIMAL))
    assert result.exit_code == 1
    assert result.stderr.startswith("standard input:1: not_json: ")
    assert "2 runs read, 1 written, 1 refused" in result.stderr
    assert len(traces_of(result)) == 1


CALL = {"tool_call_id": "a", "function_name": "f", "arguments": {"a": 1}}
STEPS = [
    {"source": "user", "message": "Mend the build"},
    {"source": "agent", "message": "m", "tool_calls": [CALL], "observation": {"results": [
        {"source_call_id": "a", "content": "c", "extra": {"status": "error"}}]}},
    {"source": "agent", "message": "It builds"},
]  # fmt: skip
MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "Go"}]},
    {"role": "assistant", "content": "x", "refusal": None, "audio": {"id": "a"},
     "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
    {"role": "tool", "tool_call_id": "a", "name": "f", "content": "c"},
    {"role": "assistant", "content": "Bye"},
]  # fmt: skip


@pytest.mark.parametrize(("source", "run"), [
    ("chat", {"messages": MESSAGES}),
    ("atif", {"schema_version": "ATIF-v1.6", "session_id": "s", "agent": {"name": "fixer", "version": "2.1"}, "steps": [
        {"step_id": at, "timestamp": f"2026-04-14T08:00:{at:02}Z", **step} for at, step in enumerate(STEPS, 1)]}),
])  # fmt: skip
def test_damaged_runs_are_converted_or_refused(source: str, run: dict[str, Any], seed: int) -> None:
    """Whatever stands where: each run is written as a valid trace or refused; no other error."""
    rng = random.Random(seed)
    runs = [_damaged(json.loads(json.dumps(run | {"extra": {"reward": 1}})), rng) for _ in range(500)]
    result = converted.convert(lines(*runs), source=source, success="@extra.reward")
    written = len(traces_of(result))
    assert f"500 runs read, {written} written, {500 - written} refused" in result.stderr
    assert 20 < 500 - written < 500
    assert "mapping_failed" not in result.stderr


def _damaged(value: Any, rng: random.Random) -> Any:
    """Return the value with one part of it, somewhere, replaced or removed."""
    inner = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    if not inner or rng.random() < 0.15:
        return rng.choice(
            [None, True, 0, -1.5, "", " ", "x", [], [1], {}, {"a": []}, [None], ["x"], [[]], [{}], 10**30]
        )
    key, chosen = rng.choice(inner)
    value[key] = _damaged(chosen, rng)
    return value


def test_a_trace_that_is_too_large_is_refused_and_max_content_cuts_it() -> None:
    run = [*MINIMAL, {"role": "user", "content": "x" * 2_000_000}]
    refused = convert(lines(run))
    assert refused.exit_code == 1
    assert "too_large: " in refused.stderr
    assert "--max-content cuts long steps" in refused.stderr
    cut = convert(lines(run), "--max-content", "1000")
    assert [len(step["content"]) for step in traces_of(cut)[0]["steps"]] == [4, 1000]
    assert "1999000  characters cut by --max-content" in cut.stderr
    assert "1  step contents cut by --max-content" in cut.stderr


# -- files and the report


def test_a_file_of_one_run_and_a_file_of_lines(tmp_path: Path) -> None:
    one, many, report = tmp_path / "run.json", tmp_path / "runs.jsonl", tmp_path / "report.json"
    one.write_text(json.dumps(MINIMAL, indent=2))
    many.write_bytes(lines({"messages": MINIMAL, "run": 1}, {"messages": []}))
    result = CliRunner().invoke(
        cli, ["convert", "--from", "chat", *OPTIONS, "--report", str(report), str(one), str(many)]
    )
    assert result.exit_code == 1
    assert len(traces_of(result)) == 2
    first, second = json.loads(report.read_bytes())["files"]
    assert first == {
        "file": str(one), "runs": {"read": 1, "written": 1, "refused": 0}, "steps": {"thought": 1}, "dropped": {},
        "changed": {}, "unread_lines": {}, "refused": {"by_reason": {}, "first": []},
    }  # fmt: skip
    assert second["runs"] == {"read": 2, "written": 1, "refused": 1}
    assert second["dropped"] == {"run": 1}
    assert [(each["line"], each["reason"]) for each in second["refused"]["first"]] == [(2, "missing_value")]


def test_field_names_without_end_do_not_fill_the_report() -> None:
    runs = [{"messages": MINIMAL, f"field-{number}" + "x" * 100: 1} for number in range(300)]
    result = convert(lines(*runs))
    assert result.exit_code == 0
    assert "200  other fields" in result.stderr
    assert len(result.stderr.splitlines()) < 110


@pytest.mark.slow
def test_each_trace_is_written_when_its_run_is_read() -> None:
    """As the middle of a pipe: standard input stays open while the first trace comes out."""
    env = environment()
    env.pop("PYTHONUNBUFFERED", None)
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with start_command("convert", "--from", "chat", *OPTIONS, "-", env=env, **pipes) as process:
        process.stdin.write(lines(MINIMAL))
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["task"] == {"objective": "Book a seat"}
        out, _ = process.communicate(lines(MINIMAL))
    assert (process.returncode, out.count(b"\n")) == (0, 1)


# -- OTLP

CHAT = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "p",
    "team": "rail",
    "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": "Hi"}]}]),
    "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "Hello"}]}]),
}

RECORDS = [
    as_json([span(2, "chat m", CHAT, parent=1)]),
    as_json([span(1, "run", {}), span(1, "chat m", CHAT, trace="2" * 32)]),
]


PREFIXED = b"".join(len(value).to_bytes(4, "big") + value for value in map(as_protobuf, RECORDS))


@pytest.mark.parametrize("form", ["auto", "otlp"])
@pytest.mark.parametrize("data", [lines(*RECORDS), PREFIXED])
def test_files_of_the_collector(form: str, data: bytes) -> None:
    result = converted.convert(data, "--from", form, success=None, created_at=None, domain="@team")
    assert result.exit_code == 0, result.stderr
    assert "2 runs read, 2 written, 0 refused (2 thought)" in result.stderr
    assert [each["id"] for each in traces_of(result)] == [
        "kp:trace:0af76519-16cd-43dd-8448-eb211c80319c",
        "kp:trace:22222222-2222-2222-2222-222222222222",
    ]
    assert {each["metadata"]["task_domain"] for each in traces_of(result)} == {"rail"}
    assert {each["metadata"]["success"] for each in traces_of(result)} == {True}


def test_one_protobuf_message_without_its_length() -> None:
    result = converted.convert(as_protobuf(RECORDS[0]), success=None, created_at=None)
    assert result.exit_code == 0, result.stderr
    assert len(traces_of(result)) == 1


def test_spans_that_are_left_out_are_named() -> None:
    record = as_json([span(1, "chat m", CHAT), span(2, "x", {})])
    record["resourceSpans"][-1]["scopeSpans"][-1]["spans"][-1]["spanId"] = "zz"
    result = converted.convert(lines(RECORDS[0], record), success=None, created_at=None)
    assert result.exit_code == 1
    assert "standard input:2: invalid_value: " in result.stderr
    assert "16 hex digits is expected; 1 span is left out\n" in result.stderr
    assert "1 written, 1 refused" in result.stderr


# -- sessions of coding agents: a trace for each request

LINES = [*claude_request("a", 1), *claude_request("a", 2)]


def convert_file(file: Path, lines: list[bytes], *more: str) -> Result:
    file.write_bytes(b"".join(lines))
    result = CliRunner().invoke(cli, ["convert", str(file), *sessions.VALUES, *more])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_a_line_that_cannot_be_read_is_named_with_its_file_and_costs_only_itself(tmp_path: Path) -> None:
    path, report = tmp_path / "s.jsonl", tmp_path / "report.json"
    good = traces_of(convert_file(path, LINES))
    result = convert_file(path, [b"{\n", *LINES[:3], b"\xff\n", *LINES[3:]], "--report", str(report))
    assert result.exit_code == 1
    assert traces_of(result) == good
    assert f"{path}:1: not_json: " in result.stderr
    assert f"{path}:5: not_json: " in result.stderr
    assert "2 runs read, 2 written, 0 refused, 2 lines not read" in result.stderr
    (file,) = json.loads(report.read_text())["files"]
    assert file["unread_lines"] == {"not_json": 2}
    assert [each["line"] for each in file["refused"]["first"]] == [1, 5]


def test_the_long_texts_of_a_request_that_is_too_large_are_cut(tmp_path: Path) -> None:
    failed = {"type": "tool_result", "tool_use_id": "call-1-0", "content": "No rule. " * 200_000, "is_error": True}
    lines = [*LINES[:2], claude_line("a", "1r0", "user", [failed]), *LINES[3:]]
    result = convert_file(tmp_path / "s.jsonl", lines)
    assert result.exit_code == 0, result.stderr
    first, second = traces_of(result)
    assert len(result.stdout_bytes.splitlines()[0]) < 1_048_576
    assert [step["type"] for step in first["steps"]] == ["tool_call", "error_recovery", "thought"]
    assert first["steps"][1]["content"].endswith(" characters cut]")
    assert second["task"] == {"objective": "Task 2 of a"}
    assert "characters cut, since the trace would be too large" in result.stderr

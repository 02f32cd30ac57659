"""`kp-worker convert` on sessions of coding agents: a trace for each request, and a report of what is in none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from worker.cli import cli
from worker.core.trace import parse_trace

OPTIONS = ("--confidence", "0.8", "--domain", "@cwd", "--visibility", "org", "--privacy", "aggregated")


def line(number: int, kind: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": kind, "uuid": f"u-{number}", "sessionId": "s-1", "cwd": "/repo", "version": "2.1.0",
            "message": {"role": kind, "content": content}, "timestamp": f"2026-04-14T08:00:{number:02}.000Z",
            **more}  # fmt: skip


CALL = {"type": "tool_use", "id": "c1", "name": "Bash", "input": {"command": "make"}}
FAILED = {"type": "tool_result", "tool_use_id": "c1", "content": "No rule", "is_error": True}

SESSION = [
    {"type": "summary", "summary": "Fixing", "leafUuid": "x"}, line(1, "user", "Fix the build"),
    line(2, "assistant", [CALL]), line(3, "user", [FAILED]),
    line(4, "assistant", [{"type": "text", "text": "It builds."}]), line(5, "user", "Now the tests"),
    line(6, "assistant", [CALL]),
]  # fmt: skip


def convert(*files: Path | str, options: tuple[str, ...] = OPTIONS, data: bytes = b"") -> Result:
    result = CliRunner().invoke(cli, ["convert", *map(str, files), *options], input=data)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def written(path: Path, lines: list[Any]) -> Path:
    path.write_bytes(
        b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in lines)
    )
    return path


def traces(result: Result) -> list[dict[str, Any]]:
    for each in result.stdout_bytes.splitlines():
        parse_trace(each)
    return [json.loads(each) for each in result.stdout_bytes.splitlines()]


def test_a_line_that_cannot_be_read_is_named_with_its_file_and_costs_only_itself(tmp_path: Path) -> None:
    good = traces(convert(written(tmp_path / "good.jsonl", SESSION)))
    path, report = written(tmp_path / "s.jsonl", [b"{", *SESSION[:3], b"\xff", *SESSION[3:]]), tmp_path / "report.json"
    result = convert(path, options=(*OPTIONS, "--report", str(report)))
    assert result.exit_code == 1
    assert traces(result) == good
    assert f"{path}:1: not_json: " in result.stderr
    assert f"{path}:5: not_json: " in result.stderr
    assert "2 runs read, 2 written, 0 refused, 2 lines not read" in result.stderr
    (found,) = json.loads(report.read_text())["files"]
    assert found["unread_lines"] == {"not_json": 2}
    assert [each["line"] for each in found["refused"]["first"]] == [1, 5]


def test_a_request_that_is_in_two_files_is_written_once(tmp_path: Path) -> None:
    branch = [each | {"sessionId": "s-2", "uuid": f"0a1b2c3d-4e5f-4061-8071-2a3b4c5d6e{number:02}"}
              for number, each in enumerate(SESSION[1:])]  # fmt: skip
    paths = written(tmp_path / "a.jsonl", branch[:4]), written(tmp_path / "b.jsonl", branch)
    result = convert(*paths)
    assert result.exit_code == 0
    assert [each["task"]["objective"] for each in traces(result)] == ["Fix the build", "Now the tests"]
    assert "1  requests that were read before" in result.stderr


def test_a_file_that_is_no_session_is_named(tmp_path: Path) -> None:
    journal = written(tmp_path / "journal.jsonl", [{"type": "started", "key": "v2:1a", "agentId": "a2fc"}])
    other = written(tmp_path / "notes.jsonl", [{"note": "x"}])
    result = convert(written(tmp_path / "s.jsonl", SESSION), journal, other)
    assert result.exit_code == 1
    assert f"{journal}: 0 runs read" in result.stderr
    assert f"{other}: missing_option: Missing: --success" in result.stderr
    assert f"{other} is neither OTLP nor a session." in result.stderr
    assert len(traces(result)) == 2
    alone = convert(other)
    assert alone.exit_code == 2
    assert f"{other} is neither OTLP nor a session." in alone.stderr


def test_a_folder_is_read_as_follow_reads_it(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "notes.json").write_text("{}")
    path = written(tmp_path / "deep" / "s.jsonl", SESSION)
    result = convert(str(tmp_path))
    assert result.exit_code == 0
    assert traces(result) == traces(convert(path))
    empty = tmp_path / "empty"
    empty.mkdir()
    refused = convert(str(empty))
    assert refused.exit_code == 1
    assert f"{empty}: no session file (*.jsonl) is below this folder" in refused.stderr


def test_a_trace_is_already_one(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(convert(written(tmp_path / "s.jsonl", SESSION)).stdout_bytes)
    result = convert(str(path))
    assert result.exit_code == 1
    assert f"{path}:1: already_a_trace: it is already a trace: give it to score or publish" in result.stderr


def test_the_long_texts_of_a_request_that_is_too_large_are_cut(tmp_path: Path) -> None:
    long = {**FAILED, "content": "No rule. " * 200_000}
    result = convert(written(tmp_path / "s.jsonl", [*SESSION[:3], line(3, "user", [long]), *SESSION[4:]]))
    assert result.exit_code == 0, result.stderr
    first, second = traces(result)
    assert len(result.stdout_bytes.splitlines()[0]) < 1_048_576
    assert [step["type"] for step in first["steps"]] == ["tool_call", "error_recovery", "thought"]
    assert first["steps"][1]["content"].endswith(" characters cut]")
    assert second["task"] == {"objective": "Now the tests"}
    assert "characters cut, since the trace would be too large" in result.stderr


@pytest.mark.parametrize("option", ["--messages", "--append", "--group-by"])
def test_options_of_other_forms_are_refused(tmp_path: Path, option: str) -> None:
    path = written(tmp_path / "s.jsonl", SESSION)
    result = convert(path, options=(*OPTIONS, "--from", "claude-code", option, "@a"))
    assert result.exit_code == 2
    assert f"{option} requires --from chat" in result.stderr

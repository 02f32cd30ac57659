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


@pytest.mark.parametrize("form", [(), ("--from", "claude-code")])
def test_a_session_becomes_a_trace_for_each_request(tmp_path: Path, form: tuple[str, ...]) -> None:
    result = convert(written(tmp_path / "s.jsonl", SESSION), options=(*OPTIONS, *form, "--keep", "x_at=@request"))
    assert result.exit_code == 0, result.stderr
    first, second = traces(result)
    assert first["metadata"] == {
        "created_at": "2026-04-14T08:00:04.000Z", "agent_id": "claude-code", "framework": "claude-code",
        "task_domain": "/repo", "success": True, "quality_score": 0, "visibility": "org",
        "privacy_level": "aggregated",
    }  # fmt: skip
    assert first["task"] == {"objective": "Fix the build"}
    assert first["outcome"] == {"result_summary": "It builds.", "confidence": 0.8}
    assert [step["type"] for step in first["steps"]] == ["tool_call", "error_recovery", "thought"]
    assert (second["metadata"]["success"], second["outcome"]["result_summary"]) == (False, "")
    assert (first["x_at"], second["x_at"]) == ("u-1", "u-5")
    assert result.stderr == (
        f"{tmp_path / 's.jsonl'}: 2 runs read, 2 written, 0 refused (2 tool_call, 1 error_recovery, 1 thought)\n"
        "  not in the traces:\n    1  summary lines\n  changed:\n    1  tool calls without a result\n"
    )


def test_a_session_that_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"loglines": [*SESSION, "x"]}, indent=2))
    result = convert(path)
    assert result.exit_code == 1
    assert [each["task"]["objective"] for each in traces(result)] == ["Fix the build", "Now the tests"]
    assert f"{path}: entry 7: not_a_line: 'x' is not a line of a session" in result.stderr


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
    assert result.exit_code == 2
    assert f"{journal}: 0 runs read" in result.stderr
    assert f"{other} is neither OTLP nor a session." in result.stderr


def test_what_a_session_lacks_is_given_by_options(tmp_path: Path) -> None:
    stream = [
        {"type": "system", "subtype": "init", "session_id": "s", "cwd": "/repo", "uuid": "i"},
        {"type": "assistant", "session_id": "s", "message": {"role": "assistant", "content": [CALL]}},
        {"type": "result", "subtype": "error_max_turns", "is_error": False, "session_id": "s"},
    ]
    path = written(tmp_path / "claude-code.txt", stream)
    result = convert(path)
    assert result.exit_code == 1
    assert "missing_value: the run has no time: give --created-at" in result.stderr
    result = convert(path, options=(*OPTIONS, "--created-at", "2026-04-14T08:00:00Z"))
    assert "missing_value: the run has no text of a user: give --objective" in result.stderr
    more = (
        "--created-at", "2026-04-14T08:00:00Z", "--objective", "Fix it", "--success", "true", "--agent-id", "@model",
    )  # fmt: skip
    result = convert(path, options=(*OPTIONS, *more))
    assert "missing_value: the run has no field model, which --agent-id names" in result.stderr
    (trace,) = traces(convert(path, options=(*OPTIONS, *more[:-1], "@session")))
    assert (trace["metadata"]["success"], trace["metadata"]["agent_id"]) == (True, "s")
    assert trace["task"]["objective"] == "Fix it"


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


def test_a_rollout_of_codex_comes_through_a_pipe() -> None:
    def item(**payload: Any) -> dict[str, Any]:
        return {"timestamp": "2026-04-14T08:00:00Z", "type": "response_item", "payload": {"type": "message", **payload}}

    lines = [
        {"timestamp": "2026-04-14T08:00:00Z", "type": "session_meta", "payload": {"id": "t-1", "cwd": "/repo"}},
        item(role="user", content=[{"type": "input_text", "text": "Fix it"}]),
        item(role="assistant", content=[{"type": "output_text", "text": "Done."}]),
    ]
    result = convert("-", data=b"\n".join(json.dumps(each).encode() for each in lines))
    (trace,) = traces(result)
    assert trace["metadata"]["agent_id"] == "codex"
    assert result.stderr.startswith("standard input: 1 run read, 1 written, 0 refused (1 thought)")


@pytest.mark.parametrize("option", ["--messages", "--append", "--group-by"])
def test_options_of_other_forms_are_refused(tmp_path: Path, option: str) -> None:
    path = written(tmp_path / "s.jsonl", SESSION)
    result = convert(path, options=(*OPTIONS, "--from", "claude-code", option, "@a"))
    assert result.exit_code == 2
    assert f"{option} requires --from chat" in result.stderr

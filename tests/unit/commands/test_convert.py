"""`kp-worker convert`: agents' logs become valid traces, part by part, and whatever is left out is counted."""

from __future__ import annotations

import io
import json
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support import converted
from tests.support.converted import VALUES, lines, traces_of
from tests.support.message_logs import ERROR, expected_parts, message_log
from tests.support.otlp import shape
from tests.support.processes import start_command
from tests.support.surroundings import environment
from worker.cli import cli
from worker.commands.score.lines import score_lines
from worker.commands.shared.console import PIPE_CLOSED
from worker.config import Settings

MINIMAL = [{"role": "user", "content": "Book a seat"}, {"role": "assistant", "content": "Done"}]


convert, trace_of = partial(converted.convert, source="chat"), partial(converted.trace_of, source="chat")


# -- many runs, against an independent reading


def test_each_part_of_200_runs_is_in_one_step_and_in_order(seed: int, tmp_path: Path) -> None:
    runs = [message_log(seed + number) for number in range(200)]
    file = tmp_path / "runs.jsonl"
    file.write_bytes(b"".join(json.dumps(run, ensure_ascii=number % 2 == 0).encode() + b"\n"
                              for number, run in enumerate(runs)))  # fmt: skip
    options = [word for pair in VALUES.items() for word in pair]
    more = ["--success", "@reward", "--created-at", "@finished", "--error-prefix", ERROR, "--keep", "x_task=@task"]
    results = [CliRunner().invoke(cli, ["convert", "--from", "chat", *options, *more, str(file)]) for _ in range(2)]
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
    summary = score_lines(io.BytesIO(results[0].stdout_bytes), io.BytesIO(), None, Settings(), None)
    assert (len(summary.scores), summary.dead_letters) == (200, {})


def as_object(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return {"arguments": arguments}


def test_the_result_of_a_call_has_the_call_s_id() -> None:
    run = message_log(3)
    ids = {
        each["id"]: each["function"]["name"] for message in run["messages"] for each in message.get("tool_calls", [])
    }
    steps = [step for step in trace_of(run)["steps"] if "tool_call_id" in step]
    assert {step["tool_call_id"]: step["tool"]["name"] for step in steps if "tool" in step} == ids
    assert sorted(step["tool_call_id"] for step in steps if "tool" not in step) == sorted(ids)


# -- messages


@pytest.mark.parametrize(
    ("message", "steps"),
    [
        ({"role": "assistant", "content": "a"}, ["thought: a"]),
        ({"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "output_text", "text": "b"}]},
         ["thought: a\nb"]),
        ({"role": "assistant", "content": None, "refusal": "I will not"}, ["thought: I will not"]),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not"}]}, ["thought: I will not"]),
        ({"role": "assistant", "content": "a", "reasoning_content": "b", "reasoning": "b"},
         ["thought: b", "thought: a"]),
        ({"role": "assistant", "audio": {"id": "x", "data": "AA", "transcript": "spoken"}}, ["thought: spoken"]),
        ({"role": "assistant", "function_call": {"name": "f", "arguments": ""}}, ["tool_call: f {}"]),
        ({"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": 1, "a": 2}'}}]},
         ['tool_call: f {"arguments": "{\\"a\\": 1, \\"a\\": 2}"}']),
        ({"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}]},
         ['tool_call: f {"arguments": "{\\"a\\": \\"\\\\ud800\\"}"}']),
        ({"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '[1e400]'}}]},
         ['tool_call: f {"arguments": "[1e400]"}']),
        ({"role": "assistant", "tool_calls": [{"id": "1", "type": "custom", "custom": {"name": "f", "input": "ls"}}]},
         ['tool_call: f {"input": "ls"}']),
        ({"role": "user", "content": ["and", {"type": "text", "text": "this"}]}, ["observation: and\nthis"]),
        ({"role": "tool", "tool_call_id": "0", "content": ""}, ["observation: "]),
        ({"role": "system", "content": "x"}, []),
        ({"role": "user", "content": " \n"}, []),
    ],
    ids=str,
)  # fmt: skip
def test_a_message_becomes_these_steps(message: dict[str, Any], steps: list[str]) -> None:
    first: dict[str, Any] = {"role": "assistant", "tool_calls": [{"id": "0", "function": {"name": "g"}}]}
    assert shape(trace_of([MINIMAL[0], first, message, MINIMAL[1]])) == ["tool_call: g {}", *steps, "thought: Done"]


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        ({"content": "Error: no"}, "observation"),  # what a text means is not guessed
        ({"content": "no", "is_error": True}, "error_recovery"),
        ({"content": "no", "status": "error"}, "error_recovery"),
        ({"content": "no", "status": "success"}, "observation"),
    ],
)
def test_an_error_is_what_the_log_calls_one(result: dict[str, Any], kind: str) -> None:
    call = {"role": "assistant", "tool_calls": [{"id": "0", "function": {"name": "g", "arguments": "{}"}}]}
    result = {"role": "tool", "tool_call_id": "0", **result}
    run = [MINIMAL[0], MINIMAL[1], call, result]
    assert [step["type"] for step in trace_of([*run, MINIMAL[1]])["steps"]][2] == kind
    assert [step["type"] for step in trace_of(run)["steps"]][2] == "observation"  # the agent does not go on


def test_the_objective_may_come_from_elsewhere_and_no_user_text_is_lost() -> None:
    run = {"goal": "Seat 4A", "messages": MINIMAL}
    trace = trace_of(run, objective="@goal", result_summary="booked")
    assert trace["task"]["objective"] == "Seat 4A"
    assert shape(trace) == ["observation: Book a seat", "thought: Done"]
    assert trace["outcome"] == {"result_summary": "booked", "confidence": 0.8}


def test_the_longest_name_that_is_there_counts() -> None:
    run = {"messages": MINIMAL, "a": {"b": "short"}, "a.b": "long", "c.d": 1, "c": [{}, {"d": "last"}]}
    assert trace_of(run, domain="@a.b")["metadata"]["task_domain"] == "long"
    assert trace_of(run, domain="@c.-1.d")["metadata"]["task_domain"] == "last"


def test_messages_may_be_anywhere() -> None:
    assert shape(trace_of({"a": {"b.c": MINIMAL}}, messages="@a.b.c")) == ["thought: Done"]


# -- values


def test_values_come_from_fields() -> None:
    run = {
        "messages": MINIMAL,
        "m": {"ok": "passed", "sure": "0.25", "who": 7},
        "gen_ai.domain": "code",
        "t": 1776153600.5,
    }
    trace = trace_of(run, "--keep", "x_all=@m", success="@m.ok=passed", confidence="@m.sure", agent_id="@m.who",
                     domain="@gen_ai.domain", created_at="@t", framework="@@desk", visibility="org")  # fmt: skip
    assert trace["metadata"] == {
        "created_at": "2026-04-14T08:00:00.500000Z", "agent_id": "7", "framework": "@desk", "task_domain": "code",
        "success": True, "quality_score": 0, "visibility": "org", "privacy_level": "aggregated",
    }  # fmt: skip
    assert trace["outcome"]["confidence"] == 0.25
    assert trace["x_all"] == run["m"]


@pytest.mark.parametrize(
    ("option", "value", "field", "said"),
    [
        ("success", "@f", None, "no field f, which --success names"),
        ("success", "@f", 0.5, "0.5 is neither true nor false"),
        ("success", "@f=yes", [], "a list is not a text (--success)"),
        ("success", "@f.g", "x", "no field f.g"),
        ("confidence", "@f", True, "True is not a number from 0 to 1 (--confidence)"),
        ("confidence", "@f", 80, "80 is not a number from 0 to 1"),
        ("domain", "@f", " ", "' ' is not a text"),
        ("visibility", "@f", "public", "'public' is not one of private, org, network (--visibility)"),
        ("privacy", "@f", {}, "an object is not one of aggregated, federated, private (--privacy)"),
        ("created_at", "@f", "2026-04-14T08:00:00", "no time zone; end it with Z"),
        ("created_at", "@f", 1776153600000, "seconds (not milliseconds) since 1970"),
        ("created_at", "@f", "yesterday", "use ISO 8601"),
    ],
)
def test_a_wrong_value_of_a_run_refuses_the_run_and_names_the_option(
    option: str, value: str, field: Any, said: str
) -> None:
    result = convert(lines({"messages": MINIMAL, "f": field}, {"messages": MINIMAL, "f": "x"}), **{option: value})
    assert result.exit_code == 1
    assert said in result.stderr.splitlines()[0]
    assert result.stderr.startswith("standard input:1: ")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"success": "maybe"}, "--success: 'maybe' is neither true nor false"),
        ({"confidence": "nan"}, "--confidence: 'nan' is not a number from 0 to 1"),
        ({"visibility": "public"}, "--visibility: 'public' is not one of"),
        ({"created_at": "2026-04-14"}, "--created-at: '2026-04-14' has no time zone"),
        ({"created_at": None}, "Missing: --created-at (messages of chat have no time)."),
        ({"domain": "@a..b"}, "--domain: @a..b is not a path"),
        ({"keep": "x"}, "--keep: 'x' is not NAME=@path"),
        ({"keep": "task=@x"}, "--keep: task is a field of every trace"),
        ({"messages": "traj"}, "--messages: 'traj' is not a path; begin it with @"),
        ({"error_prefix": ""}, "--error-prefix must not be empty: every result begins with an empty text"),
        ({"success": None}, "Missing: --success."),
        *(({name: None}, f"Missing option '--{name}'") for name in ("confidence", "domain", "visibility", "privacy")),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_options_are_told_before_anything_is_read(change: dict[str, str | None], said: str) -> None:
    result = convert(lines(MINIMAL), **change)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


@pytest.mark.parametrize(
    ("logged", "written"),
    [
        ("2026-04-14T08:00:00.123456789Z", "2026-04-14T08:00:00.123456789Z"),
        ("2026-04-14T08:00:00.123456789+00:00", "2026-04-14T08:00:00.123456Z"),
        ("2026-04-14 10:00:00+02:00", "2026-04-14T08:00:00Z"),
        (1776153600, "2026-04-14T08:00:00Z"),
        (1776153600.25, "2026-04-14T08:00:00.250000Z"),
    ],
)
def test_a_time_is_written_in_utc(logged: str | float, written: str) -> None:
    assert trace_of({"messages": MINIMAL, "t": logged}, created_at="@t")["metadata"]["created_at"] == written


# -- runs that give no trace


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (b'{"a"', "not_json: Expecting ':' delimiter at character 5"),
        (b'{"a": NaN}', "not_json: NaN is not a JSON number"),
        (b'{"a": 1, "a": 2}', "not_json: an object has a key twice"),
        (b'["\xff"]', "not_json: "),
        (b"[" * 100_000, "not_json: it is nested too deeply"),
        (b'"text"', "not_a_run: 'text' is not a list of messages"),
        (b'{"role": "user", "content": "x"}', "not_a_run: this is a message, not a run"),
        (b'[{"messages": []}]', "not_a_run: this is a list of runs"),
        (b'[[{"role": "user", "content": "x"}]]', "not_a_run: this is a list of runs"),
        (b'[{"from": "human", "value": "x"}]', "messages.0 has no role: it is not a message in OpenAI's style"),
        (b'[{"role": "user", "content": "x"}, {"text": "y"}]', "not_a_run: messages.1 has no role"),
        (b'{"turns": []}', "not_a_run: the run has no field messages: --messages says where"),
        (b"[]", "missing_value: the run has no text of a user: give --objective"),
        (b'[{"role": "user", "content": "x"}]', "missing_value: the run has no text of the agent: give --result-summ"),
        (b'[{"role": "narrator"}]', "not_a_run: messages.0: role 'narrator' is not one of system, developer, user"),
        (b'[{"role": []}]', "not_a_run: messages.0: role a list is not one of"),
        (b'[{"role": "user", "content": 7}]', "not_a_run: messages.0.content: 7 is neither a text nor a list of parts"),
        (b'[{"role": "user", "content": [{"type": "tool_use"}]}]', "messages.0.content.0: part type 'tool_use' is not"),
        (b'[{"role": "user", "content": [{"type": {}}]}]', "part type None is not known"),
        (b'[{"role": "user", "content": [{"type": "text", "text": 1}]}]', "messages.0.content.0.text: 1 is not a text"),
        (b'[{"role": "assistant", "tool_calls": {"a": 1}}]', "messages.0.tool_calls: an object is not a list"),
        (b'[{"role": "assistant", "tool_calls": [{"function": {}}]}]', "messages.0.tool_calls.0: a tool call needs a"),
        (b'[{"role": "assistant", "tool_calls": [{"id": 1, "function": {"name": "f"}}]}]', "tool_calls.0.id: 1 is no"),
        (b'[{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "x"}]', "not_utf8: "),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_a_run_that_gives_no_trace_is_named_and_the_next_one_is_written(run: bytes, said: str) -> None:
    result = convert(run + b"\n\n" + lines(MINIMAL))
    assert result.exit_code == 1
    assert said in result.stderr.splitlines()[0]
    assert "2 runs read, 1 written, 1 refused" in result.stderr
    assert len(traces_of(result)) == 1


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
    options = [word for pair in VALUES.items() for word in pair]
    result = CliRunner().invoke(
        cli, ["convert", "--from", "chat", *options, "--report", str(report), str(one), str(many)]
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


def test_a_document_over_several_lines_is_told_once() -> None:
    result = convert(json.dumps({"messages": MINIMAL}, indent=2).encode())
    assert result.exit_code == 1
    assert "each line must hold one run: jq -c . writes" in result.stderr
    assert "1 run read, 0 written, 1 refused" in result.stderr


def test_nothing_read_is_a_failure() -> None:
    assert convert(b"\n").exit_code == 1


def test_what_has_no_place_is_counted() -> None:
    call = {"id": "1", "index": 0, "function": {"name": "f", "arguments": "{}", "parsed": {"a": 1}}}
    run = {
        "id": "r", "usage": {"total": 9}, "meta": {"domain": "d", "tags": ["a"], "note": None}, "tools": [],
        "messages": [
            {"role": "system", "content": "x"},
            {"role": "developer", "content": "x"},
            {"role": "user", "content": [{"type": "text", "text": "Go", "cache": True}, {"type": "input_audio"},
                                         {"type": "image_url"}, {"type": "image_url"}, {"type": "file"}],
             "name": "Ada"},
            {"role": "assistant", "content": "  ", "annotations": [{"type": "url"}], "refusal": None,
             "tool_calls": [call, {"id": "2", "function": {"name": "g", "arguments": "[1]"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "ok", "name": "f", "timestamp": 3},
            {"role": "tool", "tool_call_id": "9", "content": "ok", "name": "h"},
            {"role": "function", "content": "ok", "name": "h"},
            {"role": "assistant", "content": "Bye", "audio": {"id": "a"}},
        ],
    }  # fmt: skip
    result = convert(lines(run), domain="@meta.domain")
    text = result.stderr.split("not in the traces:\n")[1]
    dropped, changed = (dict(line.split(maxsplit=1)[::-1] for line in part.strip().split("\n"))
                        for part in text.split("  changed:\n"))  # fmt: skip
    assert dropped == dict.fromkeys([
        "id", "usage", "meta.tags", "system messages", "developer messages", "audio", "files", "blank texts",
        "messages[].content[].cache", "messages[].name", "messages[].annotations", "messages[].timestamp",
        "names of results without a call", "messages[].tool_calls[].index", "messages[].tool_calls[].function.parsed",
    ], "1") | {"images": "2", "audio": "2", "messages[].name": "2"}  # fmt: skip
    assert changed == {
        "arguments that are not JSON objects, kept as input.arguments": "1",
        "results without a call, kept as observations": "2",
        "tool calls without a result": "1",
    }


def test_field_names_without_end_do_not_fill_the_report() -> None:
    runs = [{"messages": MINIMAL, f"field-{number}" + "x" * 100: 1} for number in range(300)]
    result = convert(lines(*runs))
    assert result.exit_code == 0
    assert "200  other fields" in result.stderr
    assert len(result.stderr.splitlines()) < 110


def test_the_terminal_is_safe_from_a_log() -> None:
    result = convert(lines({"messages": MINIMAL, "\x1b[2J": 1}, [{"role": "\x1b[2J"}]))
    assert "\x1b" not in result.stderr


def test_equal_runs_have_one_id_whatever_their_spelling() -> None:
    first, second, other = ({"messages": MINIMAL, "n": 1}, {"n": 1, "messages": MINIMAL}, {"messages": MINIMAL, "n": 2})
    spaced = json.dumps(second, indent=None, separators=(" , ", " : ")).encode() + b"\r\n"
    ids = [trace["id"] for trace in traces_of(convert(lines(first) + spaced + lines(other)))]
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.slow
def test_each_trace_is_written_when_its_run_is_read() -> None:
    """As the middle of a pipe: standard input stays open while the first trace comes out."""
    env = environment()
    env.pop("PYTHONUNBUFFERED", None)
    options = [word for pair in VALUES.items() for word in pair]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with start_command("convert", "--from", "chat", *options, "-", env=env, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(lines(MINIMAL))
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["task"] == {"objective": "Book a seat"}
        out, _ = process.communicate(lines(MINIMAL))
    assert (process.returncode, out.count(b"\n")) == (0, 1)


def test_a_reader_that_goes_away_ends_the_command_without_a_traceback(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    file.write_bytes(lines(MINIMAL) * 5000)
    options = [word for pair in VALUES.items() for word in pair]
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with start_command("convert", "--from", "chat", *options, str(file), **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
    assert process.returncode == PIPE_CLOSED

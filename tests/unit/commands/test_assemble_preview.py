"""`kp-worker assemble --try`: what it says about a file of records."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support import spans
from worker.cli import cli
from worker.commands.shared import preview
from worker.commands.shared.preview import Preview
from worker.runs.otlp import mapping
from worker.runs.otlp import spans as otlp_spans


def lines(*records: tuple[bytes | None, bytes]) -> list[str]:
    look = Preview(spans.RULES)
    for key, value in records:
        look.add(key, value)
    return list(look.lines())


def test_a_run_is_shown_with_its_steps_and_result() -> None:
    shown = lines(
        *((None, value) for value in (spans.as_json(spans.run_spans(1)), spans.as_protobuf(spans.run_spans(2))))
    )
    assert shown[0] == f"{spans.trace_id(2)}: 4 spans, gen_ai, agent agent-2"
    assert "  objective: Do task 2." in shown
    assert "  steps: 1 observation, 1 thought, 1 tool_call; success" in shown
    assert "  result: Task 2 is done." in shown
    assert shown[-3:] == [
        "2 records: 1 otlp_json, 1 otlp_proto",
        "2 OpenTelemetry traces, 0 of them without their root or a parent",
        "2 reasoning traces would come out",
    ]


def test_what_is_missing_is_said_with_a_way_to_have_it() -> None:
    bare = spans.run_spans(1)[:-1]
    for each in bare:
        each["attributes"] = {
            name: value for name, value in each["attributes"].items() if "messages" not in name and "result" not in name
        }
    shown = lines((None, spans.as_json(bare)), (None, b"{"))
    assert shown[0].endswith(", not ended")
    assert shown[1] == "  no trace: its content was not captured"
    assert "no trace for 1 run: its content was not captured" in shown
    assert any(line.startswith("2 records: 1 otlp_json, 1 unreadable (not_json") for line in shown)


def test_content_where_nothing_reads_it_is_named() -> None:
    strange = spans.run_spans(1)
    for each in strange:
        each["attributes"] = {name.replace("gen_ai.", "desk."): value for name, value in each["attributes"].items()}
        each["attributes"]["gen_ai.request.model"] = "m"
    shown = lines((None, spans.as_json(strange)))
    assert shown[1] == "  no trace: its content seems to be in attributes that nothing reads, see below"
    (named,) = [line for line in shown if line.startswith("not read, and looks like content: ")]
    assert "desk.input.messages (1 runs)" in named
    assert "desk.output.messages (1 runs)" in named


def test_a_fault_in_one_run_or_record_names_it_and_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect of the mapping and of the reader, made by hand."""
    made, read = mapping.assembled, otlp_spans.decoded

    def broken(spans_of: Sequence[otlp_spans.Span], *more: Any) -> Any:
        if spans_of[0].trace_id == spans.trace_id(2):
            raise KeyError("boom")
        return made(spans_of, *more)

    def broken_reader(value: bytes, *more: Any) -> Any:
        if spans.trace_id(3).encode() in value:
            raise ZeroDivisionError
        return read(value, *more)

    for module in (preview, mapping):
        monkeypatch.setattr(module, "assembled", broken)
    for module in (preview, otlp_spans):
        monkeypatch.setattr(module, "decoded", broken_reader)
    values = [spans.as_json(spans.run_spans(number)) for number in (1, 2, 3, 4)]
    shown = lines(*((None, value) for value in values))
    assert f"{spans.trace_id(2)}: 4 spans: KeyError while it was converted; report it with this run" in shown
    assert "no trace for 1 run: a bug in kp-worker; please report it, with the spans" in shown
    assert "2 reasoning traces would come out" in shown
    assert "4 records: 3 otlp_json, 1 unreadable (ZeroDivisionError while it was converted" in "".join(shown)
    options = ["--confidence", "1", "--domain", "a", "--visibility", "org", "--privacy", "private"]
    done = CliRunner().invoke(cli, ["convert", *options, "-"], input=b"\n".join(values))
    assert done.exit_code == 1
    assert len(done.stdout.splitlines()) == 2
    assert f"trace {spans.trace_id(2)}: mapping_failed: KeyError while it was converted" in done.stderr
    assert "3: mapping_failed: ZeroDivisionError while it was converted" in done.stderr


def test_keys_that_are_trace_ids_are_noticed() -> None:
    value = spans.as_json(spans.run_spans(1))
    assert "KP_SPANS_KEYED=true" in lines((spans.trace_id(1).encode(), value))[-1]
    assert "KP_SPANS_KEYED" not in "".join(lines((spans.trace_id(2).encode(), value)))


def test_the_command_reads_a_file_and_names_what_is_not_set(tmp_path: Path) -> None:
    file = tmp_path / "spans.json"
    file.write_bytes(spans.as_json(spans.run_spans(1)) + b"\n")
    done = CliRunner().invoke(cli, ["assemble", "--try", str(file)], env=spans.SETTINGS)
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "1 reasoning trace would come out")
    file.write_bytes(b"{}\n")
    assert CliRunner().invoke(cli, ["assemble", "--try", str(file)], env=spans.SETTINGS).exit_code == 1
    missing = CliRunner().invoke(cli, ["assemble", "--try", str(tmp_path / "none")], env=spans.SETTINGS)
    assert (missing.exit_code, "No such file or directory" in missing.stderr) == (2, True)
    unset = CliRunner().invoke(cli, ["assemble", "--try", str(file)], env={**spans.SETTINGS, "KP_ASSEMBLE_DOMAIN": ""})
    assert unset.exit_code == 2
    assert "KP_ASSEMBLE_DOMAIN" in unset.stderr

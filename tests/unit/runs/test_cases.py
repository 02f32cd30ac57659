"""Runs as they are logged, and what becomes of them: every case in tests/data/runs.

A file there has the cases of one subject: a line with the name of a case, its options and what is expected, then the
lines of its input, or of input files, each below a line with its name. `python -m tests.unit.runs.test_cases` writes
what comes out into the files: read the difference.
"""

import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from worker.cli import cli
from worker.core.trace import parse_trace
from worker.runs.messages import Message, Reasoning, ToolCall, ToolResult, as_text
from worker.runs.otlp.mapping import assembled
from worker.runs.otlp.rules import parse_rules
from worker.runs.otlp.spans import LogEvent, Span, decoded
from worker.runs.sessions.session import FORMATS, AgentSession, Request, format_of

DATA = Path(__file__).parents[2] / "data" / "runs"

RULES = ["0.5", "travel", "private", "private"]


@dataclass(frozen=True)
class Case:
    head: dict[str, Any]
    lines: list[str]

    @property
    def data(self) -> bytes:
        return "".join(f"{line}\n" for line in self.lines).encode()


def cases(path: Path) -> list[Case]:
    listed: list[Case] = []
    for line in path.read_text("utf-8").splitlines():
        if line.startswith('{"case":'):
            listed.append(Case(json.loads(line), []))
        else:
            listed[-1].lines.append(line)
    return listed


# What comes out


def of_session(case: Case) -> Any:
    """Return the requests of a session."""
    form = FORMATS.get(case.head.get("form", ""))
    lines: list[Any] = [json.loads(line) for line in case.lines]
    if case.head.get("document"):
        form = format_of(lines[0])
        assert form is not None
        lines = list(form.lines(lines[0]) or ())
    session = AgentSession(form)
    closed = [request for at, line in enumerate(lines) for request in session.feed(json.dumps(line).encode(), at)]
    return [_request(request) for request in closed + session.close()]


def _request(request: Request) -> dict[str, Any]:
    shown = {
        "key": request.key, "agent": request.agent, "facts": request.facts, "created_at": request.created_at,
        "lines": [request.first, request.last], "success": request.success, "summary": request.summary,
        "dropped": request.counts.dropped, "messages": [part for each in request.messages for part in _parts(each)],
    }  # fmt: skip
    return {name: value for name, value in shown.items() if value not in (None, {})}


def _parts(message: Message) -> Iterator[str]:
    for part in message.parts:
        if isinstance(part, ToolCall):
            yield f"call {part.call_id}: {part.name} {as_text(part.arguments)}"
        elif isinstance(part, ToolResult):
            yield f"{'error' if part.is_error else 'result'} {part.call_id}: {part.text}"
        else:
            yield f"{'thought' if isinstance(part, Reasoning) else message.role}: {part.text}"


def of_spans(case: Case) -> Any:
    """Return the runs of a trace."""
    spans: list[Span] = []
    logs: list[LogEvent] = []
    for line in case.lines:
        record = decoded(line.encode())
        spans += record.spans
        logs += record.logs
    rules = parse_rules(*case.head.get("rules", RULES), agent=case.head.get("agent", "name"))
    runs = []
    for run in assembled(spans, logs, rules):
        assert (run.value is None) == (run.document is None) == (run.missing is not None)
        if run.value is not None:
            parse_trace(run.value)
            assert json.loads(run.value) == run.document
        shown = {
            "agent": run.key, "span": run.agent_span_id, "conventions": sorted(run.conventions), "hints": run.hints,
            "unread": run.unread, "missing": run.missing, "trace": run.document,
        }  # fmt: skip
        runs.append({name: value for name, value in shown.items() if value not in (None, (), [])})
    return runs


def of_convert(case: Case) -> Any:
    """Return what `convert` writes about standard input, or about files, which the options name."""
    runner, options = CliRunner(), shlex.split(case.head["options"])
    with runner.isolated_filesystem():
        file: Path | None = None
        for line in case.lines:
            if line.startswith('{"file":'):
                file = Path(json.loads(line)["file"])
                file.parent.mkdir(exist_ok=True)
            elif file is not None:
                with file.open("a", encoding="utf-8") as target:
                    target.write(f"{line}\n")
        result = runner.invoke(cli, ["convert", *options, *(["-"] if file is None else [])], input=case.data)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    traces = result.stdout_bytes.splitlines()
    for trace in traces:
        parse_trace(trace)
    return {
        "exit": result.exit_code,
        "report": result.stderr.splitlines(),
        "traces": [json.loads(each) for each in traces],
    }


OUTCOMES: dict[str, Callable[[Case], Any]] = {"sessions": of_session, "spans": of_spans, "convert": of_convert}
"""By folder: what comes out of a case."""


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        pytest.param(kind, case, id=f"{kind}/{path.stem}: {case.head['case']}")
        for kind in OUTCOMES for path in sorted((DATA / kind).glob("*.jsonl")) for case in cases(path)
    ],
)  # fmt: skip
def test_what_becomes_of_a_run(kind: str, case: Case) -> None:
    assert _as_json(OUTCOMES[kind](case)) == case.head["expected"]


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, ensure_ascii=False))


def _rewrite() -> None:
    for kind, outcome in OUTCOMES.items():
        for path in (DATA / kind).glob("*.jsonl"):
            lines = []
            for case in cases(path):
                head = {**case.head, "expected": outcome(case)}
                lines += [json.dumps(head, ensure_ascii=False), *case.lines]
            path.write_text("".join(f"{line}\n" for line in lines), "utf-8")


if __name__ == "__main__":
    _rewrite()

"""docs/agent-logs.md: the logs of the page convert as it says, and its Python logs a run without a loss."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.snippets import shell, snippets
from tests.support.surroundings import DOCS, ROOT, environment

BLOCKS = snippets("tests/docs/test_agent_logs.py")
(RUN,) = (block.text for block in BLOCKS if block.language == "json")
(CONSOLE,) = (block for block in BLOCKS if block.language == "console")


class Answer(SimpleNamespace):
    """An answer in the form of a client's: attributes, and `model_dump`."""

    def model_dump(self, *, exclude_none: bool) -> dict[str, Any]:
        calls = [{"id": call.id, "type": "function", "function": vars(call.function)} for call in self.tool_calls or []]
        fields = {"role": "assistant", "content": self.content, "refusal": None, "tool_calls": calls or None}
        return {name: value for name, value in fields.items() if not exclude_none or value is not None}


class Replay:
    """A client that gives prepared answers, and takes no field that a message does not have."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)
        self.chat = SimpleNamespace(completions=self)

    def create(self, *, model: str, messages: list[dict[str, Any]]) -> Any:
        assert model
        for message in messages:
            assert message.keys() <= {"role", "content", "tool_calls", "tool_call_id"}
        return SimpleNamespace(choices=[SimpleNamespace(message=self._answers.pop(0))])


def call(name: str, **arguments: Any) -> Any:
    return SimpleNamespace(id=f"id-{name}", function=SimpleNamespace(name=name, arguments=json.dumps(arguments)))


def convert(command: str, folder: Path) -> tuple[str, Any]:
    """Run a command of the page; return what it reported, and its trace."""
    done = shell(command, environment(PYTHONPATH=str(ROOT)), folder)
    assert (done.returncode, done.stdout) == (0, "")
    return done.stderr, json.loads((folder / "traces.jsonl").read_bytes())


@pytest.mark.slow
def test_the_command_prints_what_the_page_says(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(RUN)
    (command,) = CONSOLE.commands()
    reported, trace = convert(command, tmp_path)
    shown = CONSOLE.text.replace("\\\n", " ").splitlines(keepends=True)
    assert reported == "".join(line for line in shown if not line.startswith("$ "))
    assert trace | {"id": "kp:trace:ID"} == json.loads((DOCS / "examples/converted-run.json").read_text("utf-8"))


@pytest.mark.slow
def test_the_python_logs_a_run_that_loses_only_its_system_message(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(compile((DOCS / "examples/log_runs.py").read_text("utf-8"), "log_runs.py", "exec"), names)
    client = Replay(
        Answer(content=None, tool_calls=[call("parcel", number=4471), call("hours", city="Ghent")]),
        Answer(content="I was wrong", tool_calls=None), Answer(content="It waits in Ghent.", tool_calls=None),
    )  # fmt: skip
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is parcel 4471?"}]
    names["run_agent"](client, {"model": "m"}, {"hours": lambda city: {"from": 8, "city": city}}, messages)
    names["run_agent"](client, {"model": "m"}, {}, messages)
    fields = {"resolved": True, "agent": "desk-3", "queue": "customer_service", "run": "r-1"}
    names["log_run"](tmp_path / "runs.jsonl", messages, **fields)
    (command,) = CONSOLE.commands()
    reported, trace = convert(command.replace("run.json", "--from chat runs.jsonl"), tmp_path)
    assert reported.endswith("not in the traces:\n    1  system messages\n")
    assert [step["type"] for step in trace["steps"]] == [
        "tool_call", "tool_call", "error_recovery", "observation", "thought", "thought",
    ]  # fmt: skip

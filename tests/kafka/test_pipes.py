"""A reader that closes the pipe ends every command with exit code 0, and without a word."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from tests.support.builders import trace_bytes
from tests.support.kafka_fixtures import WorkerProcess, produce
from tests.support.processes import start_fork
from tests.support.stage import Desk
from tests.support.surroundings import ROOT
from worker.cli import COMMANDS
from worker.commands.shared.console import PIPE_CLOSED
from worker.lab.broker.embedded_kafka import EmbeddedKafka

RULES = {"confidence": "1", "domain": "x", "visibility": "org", "privacy": "private"}
OPTIONS = [word for name, value in RULES.items() for word in (f"--{name}", value)]
SETTINGS = [word for name, value in RULES.items() for word in ("--set", f"assemble_{name}={value}")]
SAYS: dict[str, Sequence[Sequence[str]]] = {
    "run": [["--help"]],  # it runs until it is stopped, and says what it does in its log
    "contribute": [["--help"]],
    "assemble": [["--help"], ["--try", "{bad}", *SETTINGS]],
    "score": [["{traces}"]],
    "fetch-model": [["--help"]],
    "demo": [[]],
    "broker": [[]],
    "explain": [["{traces}", "--line", "1"], ["kp:trace:one"]],
    "topics": [["--text"], ["--json"]],
    "doctor": [["--text"], ["--json"]],
    "config": [["show", "--text"], ["check"]],
    "report": [["{scored}", "--text"], ["{scored}", "--json"]],
    "publish": [["{bad}"], ["{traces}"]],
    "tail": [["--text", "--no-follow"], ["--json", "--from-beginning", "--no-follow"], ["--dead-letters"]],
    "redrive": [[], ["--to-file", "-", "--execute"]],
    "verdict": [["{verdicts}", "--set", "verdict_key_file={keys}"]],
    "convert": [["{runs}", "--success", "true", "--created-at", "2026-01-01T00:00Z", *OPTIONS]],
}
"""What each command is given, so that it says something."""


@pytest.fixture(scope="module")
def desk(kafka: EmbeddedKafka) -> Desk:
    """Topics with scored traces, dead letters and a cache."""
    desk = Desk(kafka)
    with WorkerProcess(desk.env) as worker:
        worker.wait_ready()
        produce(desk.bootstrap, desk.name, [(b"k", trace_bytes("kp:trace:one")), (b"k", b"{")])
        worker.wait_metric("kp_records_consumed_total", 2)
        worker.finish()
    return desk


@pytest.fixture(scope="module")
def files(desk: Desk, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("said")
    run = {"messages": [{"role": "user", "content": "Do it."}, {"role": "assistant", "content": "Done."}]}
    place = {"trace_id": "kp:trace:one", "agent_id": "a", "task_domain": "d", "partition": 0, "offset": 0}
    content = {
        "keys": b"judge " + b"k" * 32,
        "verdicts": json.dumps(place | {"success": True, "judge": "judge"}).encode() + b"\n",
        "traces": b"".join(trace_bytes(f"kp:trace:{n}", domain=f"domain-{n % 2}") + b"\n" for n in range(300)),
        "bad": b"\x00\n" * 300,
        "runs": (json.dumps(run).encode() + b"\n") * 300,
        "scored": desk.run("tail", "--from-beginning", "--no-follow", "--json").stdout.encode(),
    }
    for name, raw in content.items():
        (folder / name).write_bytes(raw)
    return {name: str(folder / name) for name in content}


def test_every_command_says_something_here() -> None:
    assert SAYS.keys() == COMMANDS.keys()


@pytest.mark.sample(5)
@pytest.mark.parametrize("args", [[name, *more] for name, each in SAYS.items() for more in each], ids=" ".join)
def test_a_reader_that_leaves_is_no_error(args: list[str], desk: Desk, files: dict[str, str], tmp_path: Path) -> None:
    given = [re.sub(r"\{(\w+)\}", lambda name: files[name[1]], arg) for arg in args]
    assert run(desk.env, given, tmp_path, both=True) == (PIPE_CLOSED, "")
    code, said = run(desk.env, given, tmp_path, both=False)
    assert "Traceback" not in said
    assert "Broken pipe" not in said
    assert code == PIPE_CLOSED or (args[0], code) == ("publish", 1), said


def run(env: Mapping[str, str], args: Sequence[str], folder: Path, *, both: bool) -> tuple[int, str]:
    """Run a command whose standard output, or both outputs, are a pipe that is closed already."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb", buffering=0) as closed, TemporaryFile() as file, open(os.devnull, "rb") as nothing:
        errors = closed if both else file
        process = start_fork(
            "worker", args, {**env, "PYTHONPATH": str(ROOT)}, folder, stdin=nothing, stdout=closed, stderr=errors
        )
        try:
            code = process.wait(120)
        finally:
            process.kill()
        file.seek(0)
        return code, file.read().decode()

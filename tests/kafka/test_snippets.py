"""The code blocks of README.md and docs/ that need Kafka: their `kp-worker` commands run as they stand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.builders import trace_bytes
from tests.support.chaos import wait_until
from tests.support.commands import Desk
from tests.support.kafka_fixtures import WorkerProcess, produce
from tests.support.snippets import Snippet, snippets
from worker.lab.broker.embedded_kafka import EmbeddedKafka

MINE = snippets("tests/kafka/test_snippets.py")
WRONG = (
    trace_bytes().replace(b'"confidence": 0.9', b'"confidence": 90'),
    trace_bytes().replace(b'"@context"', b'"context"'),
    trace_bytes()[:-9],
)


@pytest.fixture(scope="module")
def desk(kafka: EmbeddedKafka) -> Desk:
    """Topics on which a worker has scored the sample traces, and dead letters."""
    desk = Desk(kafka, partitions=4)
    with WorkerProcess(desk.env) as worker:
        worker.wait_ready()
        assert desk.run("publish", "samples").returncode == 0
        produce(kafka.bootstrap_servers, desk.name, [(b"key", value) for value in WRONG])
        assert wait_until(lambda: worker.metric("kp_records_consumed_total") == 77, 60)
        worker.terminate()
        assert worker.wait() == 0
    return desk


@pytest.mark.parametrize("block", MINE, ids=str)
def test_the_commands_of_a_block_run(block: Snippet, desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "traces.jsonl").write_bytes(b"\n".join([trace_bytes()] * 3 + list(WRONG)))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in block.commands():
        line = command if shutil.which("jq") else command.split(" | jq")[0]
        if line.startswith("jq ") and not shutil.which("jq"):
            continue
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", line], env=desk.env | {"PATH": path}, cwd=tmp_path,
            capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip
        partly = line.startswith("kp-worker publish traces.jsonl")
        assert done.returncode == partly, f"{line}\n{done.stdout}{done.stderr}"
        if block.page == "docs/commands/publish.md":
            shown = block.text.split(command + "\n")[1].split("\n$ ")[0].strip()
            assert (done.stdout + done.stderr).replace(desk.name, "traces").strip() == shown

"""The code blocks of README.md and docs/ that need Kafka: their `kp-worker` commands run as they stand."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.support.builders import trace_bytes
from tests.support.kafka_fixtures import WorkerProcess, produce
from tests.support.snippets import Snippet, shell, snippets
from tests.support.stage import Desk
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
        worker.wait_metric("kp_records_consumed_total", 77)
        worker.finish()
    return desk


@pytest.mark.parametrize("block", MINE, ids=str)
def test_the_commands_of_a_block_run(block: Snippet, desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "traces.jsonl").write_bytes(b"\n".join([trace_bytes()] * 3 + list(WRONG)))
    for command in block.commands():
        line = command if shutil.which("jq") else command.split(" | jq")[0]
        if line.startswith("jq ") and not shutil.which("jq"):
            continue
        done = shell(line, desk.env, tmp_path)
        partly = line.startswith("kp-worker publish traces.jsonl")
        assert done.returncode == partly, f"{line}\n{done.stdout}{done.stderr}"
        if command.startswith("kp-worker publish "):
            shown = block.text.split(command + "\n")[1].split("\n$ ")[0].strip()
            assert (done.stdout + done.stderr).replace(desk.name, "traces").strip() == shown


def printed(text: str) -> list[str]:
    """Return the commands that stand on lines of their own."""
    return re.findall(r"^\s*((?:KP_\w+=\S+ )*kp-worker .+?)\s*$", text, re.MULTILINE)


def test_the_commands_that_commands_print_run_as_they_stand(desk: Desk, tmp_path: Path) -> None:
    letter = json.loads(desk.run("tail", "--no-follow", "--dead-letters", "--json").stdout.splitlines()[0])
    said = desk.run("explain", f"{letter['source']['partition']}:{letter['source']['offset']}", "--text").stdout
    commands = printed(said)
    assert len(commands) == 2, said
    for command in commands:
        done = shell(command, desk.env, tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def test_topics_creates_those_of_contribute(kafka: EmbeddedKafka) -> None:
    desk = Desk(kafka)
    settings = {"KP_REGISTRY_URL": "http://127.0.0.1:1"}
    states = []
    for arguments in ([], ["--create"], []):
        done = desk.run("topics", "--json", *arguments, **settings)
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        states.append({row["state"] for row in rows if row.get("needed_by") == "contribute"})
    assert states == [{"missing"}, {"exists"}, {"exists"}]
    rows = [json.loads(line) for line in desk.run("topics", "--json").stdout.splitlines()]
    assert not [row for row in rows if row.get("needed_by") == "contribute"]

"""The examples of docs/publishing.md and docs/agent-logs.md that need node or another client: compiled and run.

Not part of `make test`, which needs nothing but Python: `make snippet-check` runs it. Needs node and npm, and fails
where they are missing; kafkajs, TypeScript and confluent-kafka are fetched once into .cache/snippet-checks.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer

from tests.support.builders import read_jsonl
from tests.support.imports import ROOT
from tests.support.kafka_fixtures import consume_all, create_topics, unique
from tests.support.snippets import snippets
from worker.core.trace import parse_trace
from worker.lab.broker.embedded_kafka import EmbeddedKafka

DOCUMENT = (ROOT / "docs/publishing.md").read_text("utf-8")
TOOLS = ROOT / ".cache/snippet-checks"
NODE_PACKAGES = ("kafkajs@2.2.4", "typescript@5.9.3", "@types/node@20.19.0")
PYTHON_PACKAGES = ("confluent-kafka==2.12.1",)
PARENT = "00-00000000000000000000000000000001-0000000000000002-01"

TYPESCRIPT_MAIN = """
import { readFileSync } from "node:fs";
import { connect, disconnect, publish } from "./agent.js";

async function main() {
  await connect();
  for (const trace of JSON.parse(readFileSync("traces.json", "utf-8"))) {
    await publish(trace, process.env.PARENT);
  }
  await disconnect();
}
main();
"""

LOGGING_MAIN = """
import { logRun, runAgent } from "./agent.js";

const input = JSON.stringify({ city: "Ghent" });
const call = (id: string, name: string) => ({ id, type: "function", function: { name, arguments: input } });
const answers = [
  { role: "assistant", content: null, tool_calls: [call("a", "parcel"), call("b", "hours")] },
  { role: "assistant", content: "It waits in Ghent." },
];
const create = async (request: { model: string; messages: object[] }) => {
  if (request.messages.some((message) => "is_error" in message)) throw new Error("unknown field is_error");
  return { choices: [{ message: answers.shift() }] };
};

async function main() {
  const messages = [{ role: "user", content: "Where is parcel 4471?" }];
  const hours = (input: { city: string }) => ({ city: input.city, from: 8 });
  await runAgent({ chat: { completions: { create } } }, { model: "m" }, { hours }, messages);
  await logRun("runs.jsonl", messages, { resolved: true, domain: "customer_service" });
}
main();
"""

PYTHON_MAIN = """
import json, os
import agent
for trace in json.load(open("traces.json", encoding="utf-8")):
    agent.publish(trace, os.environ["PARENT"])
agent.close()
"""


@pytest.fixture(scope="module")
def traces() -> list[Any]:
    return [trace for trace in read_jsonl("traces.jsonl") if "agent_id" in trace["metadata"]][:40]


def example(heading: str) -> str:
    found = re.search(rf"## {heading}\n.*?```[a-z]+\n(.*?)```", DOCUMENT, re.DOTALL)
    assert found is not None, f"docs/publishing.md has no example under {heading}"
    return found[1]


def compile_typescript(folder: Path, module: str, agent: str, main: str) -> None:
    modules = node_modules()
    (folder / "node_modules").symlink_to(modules)
    (folder / "package.json").write_text(json.dumps({"type": module}))
    (folder / "agent.ts").write_text(agent, "utf-8")
    (folder / "main.ts").write_text(main)
    compiler = str(modules / "typescript/bin/tsc")
    run("node", compiler, "--strict", "--module", "node16", "--target", "es2022", "--types", "node",
        "agent.ts", "main.ts", cwd=folder)  # fmt: skip


def run(*command: str, cwd: Path, **env: str) -> None:
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"


def node_modules() -> Path:
    for program in ("node", "npm"):
        assert shutil.which(program), f"{program} is missing: install Node.js 20 or later (https://nodejs.org)"
    home = TOOLS / "-".join(NODE_PACKAGES).replace("/", "_")
    if not (home / ".ready").exists():
        home.mkdir(parents=True, exist_ok=True)
        run("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(home), *NODE_PACKAGES, cwd=home)
        (home / ".ready").touch()
    return home / "node_modules"


def site_packages() -> Path:
    home = TOOLS / "-".join(PYTHON_PACKAGES)
    if not home.exists():
        uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
        run(*uv, "--target", str(home), *PYTHON_PACKAGES, cwd=ROOT)
    return home


async def partitions_of(bootstrap: str, topic: str, keys: list[bytes]) -> dict[bytes, int]:
    """Return where aiokafka sends each key."""
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
        return {key: (await producer.send_and_wait(topic, b"", key=key)).partition for key in keys}


def assert_published(bootstrap: str, topic: str, traces: list[Any]) -> None:
    """Every trace is there once, in the order of its agent, and where all clients put its key."""
    records = consume_all(bootstrap, topic)
    assert len(records) == len(traces)
    for agent in {trace["metadata"]["agent_id"] for trace in traces}:
        sent = [trace for trace in traces if trace["metadata"]["agent_id"] == agent]
        assert [json.loads(record.value) for record in records if record.key == agent.encode()] == sent
    assert all(record.headers == (("traceparent", PARENT.encode()),) for record in records)
    for record in records:
        parse_trace(record.value)
    other = unique("docs")
    create_topics(bootstrap, {other: 3})
    where = asyncio.run(partitions_of(bootstrap, other, sorted({record.key for record in records})))
    assert {(record.key, record.partition) for record in records} == set(where.items())


@pytest.mark.parametrize("module", ["module", "commonjs"])
def test_the_typescript_example(kafka: EmbeddedKafka, tmp_path: Path, traces: list[Any], module: str) -> None:
    compile_typescript(tmp_path, module, example("TypeScript, kafkajs"), TYPESCRIPT_MAIN)
    (tmp_path / "traces.json").write_text(json.dumps(traces), "utf-8")
    topic = unique("docs")
    create_topics(kafka.bootstrap_servers, {topic: 3})
    env = {"KP_BOOTSTRAP_SERVERS": kafka.bootstrap_servers, "KP_SOURCE_TOPIC": topic, "PARENT": PARENT}
    run("node", "main.js", cwd=tmp_path, **env)
    assert_published(kafka.bootstrap_servers, topic, traces)


def test_the_confluent_example(kafka: EmbeddedKafka, tmp_path: Path, traces: list[Any]) -> None:
    (tmp_path / "agent.py").write_text(example("Python, confluent-kafka"), "utf-8")
    (tmp_path / "main.py").write_text(PYTHON_MAIN)
    (tmp_path / "traces.json").write_text(json.dumps(traces), "utf-8")
    topic = unique("docs")
    create_topics(kafka.bootstrap_servers, {topic: 3})
    env = {"KP_BOOTSTRAP_SERVERS": kafka.bootstrap_servers, "KP_SOURCE_TOPIC": topic, "PARENT": PARENT}
    run(sys.executable, "main.py", cwd=tmp_path, PYTHONPATH=str(site_packages()), **env)
    assert_published(kafka.bootstrap_servers, topic, traces)


@pytest.mark.parametrize("module", ["module", "commonjs"])
def test_the_typescript_that_logs_a_run(tmp_path: Path, module: str) -> None:
    (block,) = [each for each in snippets("tests/runs/check_snippets.py") if each.page == "docs/agent-logs.md"]
    compile_typescript(tmp_path, module, block.text, LOGGING_MAIN)
    run("node", "main.js", cwd=tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "worker", "convert", "--from", "chat", "--success", "@resolved", "--confidence", "0.8",
         "--domain", "@domain", "--visibility", "private", "--privacy", "private", "--created-at", "@finished",
         str(tmp_path / "runs.jsonl")],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "not in the traces" not in done.stderr
    steps = json.loads(done.stdout)["steps"]
    assert [step["type"] for step in steps] == ["tool_call", "tool_call", "error_recovery", "observation", "thought"]
    assert steps[3]["content"] == '{"city":"Ghent","from":8}'

"""The examples of the pages that need node, another client or Phoenix: compiled and run.

Not part of `make test`, which needs nothing but Python: `make snippet-check` runs it. Needs node and npm, and fails
where they are missing; the packages are fetched once into .cache/snippet-checks. Confluent's client downloads a binary;
where that is not allowed, npm builds it, with a C++ compiler and the headers of OpenSSL and zlib.
"""

import asyncio
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer

from tests.support import spans
from tests.support.accepted_topic import accepted_topic, judge, scored, start_reader, two_readers
from tests.support.builders import read_jsonl
from tests.support.kafka_fixtures import consume_all, create_topics, produce, unique, wait_until
from tests.support.surroundings import ROOT
from worker.core.trace import parse_trace
from worker.lab.broker.embedded_kafka import EmbeddedKafka
from worker.lab.broker.kafka_node import free_ports

EXAMPLES = ROOT / "docs/examples"
TOOLS = ROOT / ".cache/snippet-checks"
NODE_PACKAGES = ("kafkajs@2.2.4", "typescript@5.9.3", "@types/node@20.19.0")
READER_PACKAGES = (
    "@confluentinc/kafka-javascript@1.10.1", "pg@8.23.1", "@types/pg@8.23.1", "typescript@5.9.3", "@types/node@20.19.0",
    "@electric-sql/pglite@0.5.14", "@electric-sql/pglite-socket@0.2.17",
)  # fmt: skip
PYTHON_PACKAGES = ("confluent-kafka==2.12.1",)
PHOENIX = "arize-phoenix==20.26.1"
PATIENCE_S = 900.0
"""Of a build of Confluent's client on a slow machine; it only decides when a broken test gives up."""

pytestmark = pytest.mark.timeout(PATIENCE_S)

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

POSTGRES = """
const { PGlite } = require("@electric-sql/pglite");
const { PGLiteSocketServer } = require("@electric-sql/pglite-socket");
const server = new PGLiteSocketServer({ db: new PGlite(), port: 0, host: "127.0.0.1", maxConnections: 10 });
server.addEventListener("listening", (event) => console.log(event.detail.port));
server.start();
"""

ASK = """
const { Client } = require("pg");
const client = new Client({ connectionString: process.env.DATABASE_URL });
client.connect().then(() => client.query(process.argv[2])).then(({ rows }) => {
  console.log(JSON.stringify(rows));
  return client.end();
});
"""

FAILED = "SELECT id FROM accepted WHERE source IN (SELECT source FROM judged WHERE success < 0.5)"

KILLED = """
const { KafkaJS } = require("@confluentinc/kafka-javascript");
const { consumer } = KafkaJS.Kafka.prototype;
KafkaJS.Kafka.prototype.consumer = function (options) {
  options.kafkaJS.sessionTimeout = 6000; // the group waits so long for a member that was killed
  const made = consumer.call(this, options);
  const commit = made.commitOffsets.bind(made);
  made.commitOffsets = (offsets) =>
    offsets[0].topic === process.env.KP_ACCEPTED_TOPIC ? process.kill(process.pid, "SIGKILL") : commit(offsets);
  return made;
};
require("./agent.js");
"""

KILLED_ANNOTATOR = """
import asyncio, functools, os, runpy, urllib.request
from aiokafka import AIOKafkaConsumer
really_open, posted = urllib.request.urlopen, []
def urlopen(*args, **more):
    answer = really_open(*args, **more)
    posted.append(answer)
    return answer
async def commit(self, really_commit=AIOKafkaConsumer.commit):
    if posted:
        os._exit(9)
    await really_commit(self)
urllib.request.urlopen, AIOKafkaConsumer.commit = urlopen, commit
AIOKafkaConsumer.__init__ = functools.partialmethod(AIOKafkaConsumer.__init__, session_timeout_ms=6000)
runpy.run_path("reader.py")
"""

KAFKAJS_READER = """
const { Kafka } = require("kafkajs");
const consumer = new Kafka({ brokers: [process.env.KP_BOOTSTRAP_SERVERS] }).consumer({ groupId: process.env.TOPIC });
async function main() {
  await consumer.connect();
  await consumer.subscribe({ topic: process.env.TOPIC, fromBeginning: true });
  await consumer.run({
    eachMessage: async ({ message }) => {
      if (message.value && message.value.includes("kp:trace:never")) process.exit(0);
    },
  });
  setTimeout(() => process.exit(1), 10_000);
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


def compile_typescript(
    folder: Path, module: str, agent: str, main: str, packages: tuple[str, ...] = NODE_PACKAGES
) -> None:
    modules = node_modules(packages)
    (folder / "node_modules").symlink_to(modules)
    (folder / "package.json").write_text(json.dumps({"type": module}))
    (folder / "agent.ts").write_text(agent, "utf-8")
    (folder / "main.ts").write_text(main)
    compiler = str(modules / "typescript/bin/tsc")
    run("node", compiler, "--strict", "--module", "node16", "--target", "es2022", "--types", "node",
        "agent.ts", "main.ts", cwd=folder)  # fmt: skip


def run(*command: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout


def node_modules(packages: tuple[str, ...]) -> Path:
    for program in ("node", "npm"):
        assert shutil.which(program), f"{program} is missing: install Node.js 20 or later (https://nodejs.org)"
    home = TOOLS / "-".join(packages).replace("/", "_")
    if not (home / ".ready").exists():
        home.mkdir(parents=True, exist_ok=True)
        run("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(home), *packages, cwd=home,
            CKJS_LINKING="dynamic")  # fmt: skip
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


def check_published(kafka: EmbeddedKafka, folder: Path, traces: list[Any], *command: str, **env: str) -> None:
    """Run a publisher: every trace is there once, in the order of its agent, and where all clients put its key."""
    (folder / "traces.json").write_text(json.dumps(traces), "utf-8")
    bootstrap, topic, other = kafka.bootstrap_servers, unique("docs"), unique("docs")
    create_topics(bootstrap, {topic: 3, other: 3})
    env |= {"KP_BOOTSTRAP_SERVERS": bootstrap, "KP_SOURCE_TOPIC": topic, "PARENT": PARENT}
    run(*command, cwd=folder, **env)
    records = consume_all(bootstrap, topic)
    assert len(records) == len(traces)
    for agent in {trace["metadata"]["agent_id"] for trace in traces}:
        sent = [trace for trace in traces if trace["metadata"]["agent_id"] == agent]
        assert [json.loads(record.value) for record in records if record.key == agent.encode()] == sent
    assert all(record.headers == (("traceparent", PARENT.encode()),) for record in records)
    for record in records:
        parse_trace(record.value)
    where = asyncio.run(partitions_of(bootstrap, other, sorted({record.key for record in records})))
    assert {(record.key, record.partition) for record in records} == set(where.items())


@pytest.mark.parametrize("module", ["module", "commonjs"])
def test_the_typescript_example(kafka: EmbeddedKafka, tmp_path: Path, traces: list[Any], module: str) -> None:
    compile_typescript(tmp_path, module, (EXAMPLES / "publish-kafkajs.ts").read_text("utf-8"), TYPESCRIPT_MAIN)
    check_published(kafka, tmp_path, traces, "node", "main.js")


def test_the_confluent_example(kafka: EmbeddedKafka, tmp_path: Path, traces: list[Any]) -> None:
    shutil.copy(EXAMPLES / "publish_confluent.py", tmp_path / "agent.py")
    (tmp_path / "main.py").write_text(PYTHON_MAIN)
    check_published(kafka, tmp_path, traces, sys.executable, "main.py", PYTHONPATH=str(site_packages()))


@contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """Run a Postgres in WebAssembly; yield its address."""
    (folder / "postgres.cjs").write_text(POSTGRES)
    with subprocess.Popen(["node", "postgres.cjs"], cwd=folder, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        try:
            yield f"postgres://postgres:postgres@127.0.0.1:{int(server.stdout.readline())}/postgres?sslmode=disable"
        finally:
            server.kill()


@pytest.mark.parametrize("module", ["module", "commonjs"])
def test_the_typescript_reader_stores_each_trace_once(
    kafka: EmbeddedKafka, tmp_path: Path, seed: int, module: str
) -> None:
    compile_typescript(tmp_path, module, (EXAMPLES / "accepted-reader.ts").read_text("utf-8"), "", READER_PACKAGES)
    (tmp_path / "killed.cjs").write_text(KILLED)
    (tmp_path / "ask.cjs").write_text(ASK)
    rng = random.Random(seed)
    special = [scored(rng, trace_id) for trace_id in ("kp:trace:\0", "kp:trace:" + rng.randbytes(3000).hex())]
    topic = accepted_topic(kafka, seed, 60, special)
    judged, later, failed = judge(kafka, topic)
    log = tmp_path / "log"
    with postgres(tmp_path) as address:
        env = {
            "KP_BOOTSTRAP_SERVERS": kafka.bootstrap_servers, "KP_ACCEPTED_TOPIC": topic.name, "DATABASE_URL": address,
            "KP_JUDGED_TOPIC": judged,
        }  # fmt: skip

        def ask(query: str) -> list[dict[str, Any]]:
            return json.loads(run("node", "ask.cjs", query, cwd=tmp_path, **env))  # type: ignore[no-any-return]

        def rows() -> dict[str, tuple[float, str]]:
            return {each["id"]: (each["score"], each["document"]) for each in ask("SELECT * FROM accepted")}

        with start_reader(["node", "killed.cjs"], tmp_path, env) as killed:
            assert killed.wait(60) == -signal.SIGKILL, log.read_text()
        assert ask("UPDATE accepted SET score = -1 RETURNING id"), "the reader was killed too early"
        ask("ALTER TABLE accepted RENAME score TO away")  # the upsert fails, and it is not the record's fault
        with two_readers(["node", "agent.js"], tmp_path, env):
            assert wait_until(lambda: 'column "score"' in log.read_text(), 60), log.read_text()
            ask("ALTER TABLE accepted RENAME away TO score")
            assert wait_until(lambda: rows() == topic.rows, 90, 0.5), log.read_text()
            produce(kafka.bootstrap_servers, judged, [(None, later)])
            assert wait_until(lambda: {each["id"] for each in ask(FAILED)} == failed, 60), log.read_text()
        assert rows() == topic.rows
        unreadable = ask("SELECT encode(value, 'hex') AS value FROM unreadable")
    values = [None if each["value"] is None else bytes.fromhex(each["value"]) for each in unreadable]
    assert Counter(values) == Counter(topic.unreadable)


@contextmanager
def phoenix(folder: Path) -> Iterator[str]:
    """Run Phoenix with an empty database; yield its address."""
    home = TOOLS / PHOENIX
    if not (home / ".ready").exists():
        uv, python = [sys.executable, "-m", "uv"], str(home / "bin/python")
        run(*uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(home), cwd=ROOT)
        run(*uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", python, PHOENIX, cwd=ROOT)
        (home / ".ready").touch()
    http, grpc = free_ports(2)
    address = f"http://127.0.0.1:{http}"
    env = {
        **os.environ, "PHOENIX_HOST": "127.0.0.1", "PHOENIX_PORT": str(http), "PHOENIX_GRPC_PORT": str(grpc),
        "PHOENIX_WORKING_DIR": str(folder / "phoenix"), "PHOENIX_TELEMETRY_ENABLED": "false",
    }  # fmt: skip
    with (folder / "phoenix.log").open("wb") as log:
        server = subprocess.Popen([str(home / "bin/phoenix"), "serve"], cwd=folder, env=env, stdout=log, stderr=log)
    try:
        assert wait_until(lambda: answers(address), 300), (folder / "phoenix.log").read_text()
        yield address
    finally:
        server.kill()
        server.wait()


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/healthz", timeout=5):
            return True
    except OSError:
        return False


def ask_json(address: str) -> Any:
    with urllib.request.urlopen(address, timeout=30) as answer:
        return json.load(answer)


def annotated(address: str, runs: Iterable[int], name: str) -> dict[str, list[tuple[float, str]]]:
    """Return the annotations of a name on the runs: those of their traces, and those of their spans."""
    annotations: dict[str, list[tuple[float, str]]] = {}
    for kind in ("trace", "span"):
        ids = [spans.trace_id(each) if kind == "trace" else spans.span_id(each, "agent") for each in runs]
        query = urllib.parse.urlencode([(f"{kind}_ids", each) for each in ids] + [("limit", "1000")])
        read = ask_json(f"{address}/v1/projects/default/{kind}_annotations?{query}")["data"]
        for each in (each for each in read if each["name"] == name):
            annotations.setdefault(each[f"{kind}_id"], []).append((each["result"]["score"], each["result"]["label"]))
    return annotations


def test_the_reader_for_phoenix_annotates_each_run_once(kafka: EmbeddedKafka, tmp_path: Path, seed: int) -> None:
    shutil.copy(EXAMPLES / "annotate_phoenix.py", tmp_path / "reader.py")
    (tmp_path / "killed.py").write_text(KILLED_ANNOTATOR)
    traces, unknown = 30, 7  # of each partition; a run that Phoenix does not know

    def id_of(partition: int, number: int) -> str:
        run = partition * traces + number
        span = f":{spans.span_id(run, 'agent')}" if run % 3 == 0 else ""  # its trace holds several runs
        return f"kp:trace:{uuid.UUID(spans.trace_id(run))}{span}"

    topic = accepted_topic(kafka, seed, traces, id_of=id_of)
    create_topics(kafka.bootstrap_servers, {f"{topic.name}.rejected": 1})
    targets = {
        id_of(*each): spans.span_id(run, "agent") if run % 3 == 0 else spans.trace_id(run)
        for run, each in enumerate(itertools.product(range(2), range(traces)))
        if run != unknown
    }
    wanted = {
        target: [(topic.rows[each][0], json.loads(topic.rows[each][1])["scoring"]["decision"])]
        for each, target in targets.items()
    }
    judged, later, failed = judge(kafka, topic)
    log = tmp_path / "log"

    def failures() -> set[str]:
        stated = annotated(address, range(2 * traces), "outcome")
        return {target for target, each in stated.items() if (0, "failure") in each}

    with phoenix(tmp_path) as address:
        for run in range(2 * traces):
            if run != unknown:
                headers = {"Content-Type": "application/x-protobuf"}
                value = spans.as_protobuf(spans.run_spans(run))
                urllib.request.urlopen(
                    urllib.request.Request(f"{address}/v1/traces", value, headers), timeout=30
                ).close()
        assert wait_until(lambda: len(ask_json(f"{address}/v1/projects/default/traces?limit=1000")["data"]) == 59, 60)
        env = {
            "PYTHONUNBUFFERED": "1", "PHOENIX_ENDPOINT": address, "KP_BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
            "KP_ACCEPTED_TOPIC": topic.name, "KP_REJECTED_TOPIC": f"{topic.name}.rejected",
            "KP_JUDGED_TOPIC": judged,
        }  # fmt: skip
        with start_reader([sys.executable, "killed.py"], tmp_path, env) as killed:
            assert killed.wait(60) == 9, log.read_text()
        assert annotated(address, range(2 * traces), "knowledge value") or failures(), "the reader was killed too early"
        with two_readers([sys.executable, "reader.py"], tmp_path, env):
            assert wait_until(lambda: log.read_text().count("reading") == 3, 60), log.read_text()
            assert wait_until(lambda: annotated(address, range(2 * traces), "knowledge value") == wanted, 60), (
                log.read_text()
            )
            produce(kafka.bootstrap_servers, judged, [(None, later)])
            assert wait_until(lambda: failures() == {targets[each] for each in failed}, 60), log.read_text()
    assert f"Phoenix does not know the trace {spans.trace_id(unknown)}" in log.read_text()


def test_kafkajs_still_returns_aborted_records(kafka: EmbeddedKafka, tmp_path: Path) -> None:
    """If it no longer does, the page may recommend it for reading, too."""
    (tmp_path / "node_modules").symlink_to(node_modules(NODE_PACKAGES))
    (tmp_path / "reader.cjs").write_text(KAFKAJS_READER)
    topic = accepted_topic(kafka, 1, 300).name
    run("node", "reader.cjs", cwd=tmp_path, KP_BOOTSTRAP_SERVERS=kafka.bootstrap_servers, TOPIC=topic)

"""The topics of one test on a real Kafka, what a worker put on them, and commands run on them."""

import json
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.support.builders import T0, make_record
from tests.support.kafka_fixtures import WorkerProcess, consume_all, create_topics, produce, unique, wait_committed
from tests.support.processes import run_command, start_command
from tests.support.surroundings import DATA, environment, topic_settings
from worker.config import Settings, load
from worker.core.dead_letters import dead_letter
from worker.core.documents import scored_record
from worker.core.records import SourceRecord
from worker.core.scorer import PartitionScorer
from worker.core.trace import InvalidTrace, Reason, parse_trace
from worker.lab.broker.embedded_kafka import EmbeddedKafka

LINES = (DATA / "traces.jsonl").read_bytes().splitlines()
OUTPUTS = ("accepted", "rejected", "dead-letter")

Workers = Callable[..., WorkerProcess]


class Stage:
    """A set of topics of one test, and what is on them. `env`: an environment with the settings that name them."""

    def __init__(self, kafka: EmbeddedKafka, **settings: str) -> None:
        self.bootstrap = kafka.bootstrap_servers
        self.name = unique("traces")
        quick = {"KP_EMBEDDER": "none", "KP_SESSION_TIMEOUT_SECONDS": "6"}
        self.env = environment(**topic_settings(self.bootstrap, self.name, **quick | settings))

    def produce(self, records: list[tuple[Any, ...]]) -> list[tuple[int, int]]:
        return produce(self.bootstrap, self.name, records)

    def outputs(self) -> dict[str, list[Any]]:
        return {kind: consume_all(self.bootstrap, f"{self.name}.{kind}") for kind in OUTPUTS}

    def wait_committed(self, count: int, timeout: float = 90.0) -> None:
        wait_committed(self.bootstrap, self.name, self.name, count, timeout)

    def run(
        self, *args: str, stdin: bytes = b"", module: str = "worker", **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        done = run_command(module, args, self.env | env, stdin)
        assert b"Traceback" not in done.stderr, done.stderr.decode()
        return subprocess.CompletedProcess(args, done.returncode, done.stdout.decode(), done.stderr.decode())

    def start(self, *args: str, **pipes: Any) -> subprocess.Popen[bytes]:
        """Start a command; the test stops it."""
        return start_command(*args, env=self.env, **pipes)

    def settings(self) -> Settings:
        given: dict[str, Any] = {
            name.removeprefix("KP_").lower(): value for name, value in self.env.items() if name.startswith("KP_")
        }
        return load(**given)


class Desk(Stage):
    """Topics that exist from the start, and commands run on them."""

    def __init__(self, kafka: EmbeddedKafka, partitions: int = 2, **settings: str) -> None:
        super().__init__(kafka, **settings)
        self.topics = {kind: f"{self.name}.{kind}" for kind in OUTPUTS}
        # Times in tests are months old: by the broker's default Kafka would delete such records at its next look.
        kept = (partitions, {"retention.ms": "-1"})
        create_topics(self.bootstrap, dict.fromkeys([self.name, *self.topics.values()], kept))

    def read(self, kind: str | None = None) -> list[Any]:
        """Return what is on a topic; None: the source topic."""
        return consume_all(self.bootstrap, self.name if kind is None else self.topics[kind])

    def put(
        self, scorer: PartitionScorer, raw: bytes, offset: int = 0, vector: Any = None, partition: int = 0
    ) -> bytes:
        """Put a trace of source partition 0, scored, on its topic, with the time T0 + offset s; return its document."""
        record = make_record(raw, offset, timestamp_ms=T0 + 1000 * offset, topic=self.name)
        output = scored_record(record, scorer.score(parse_trace(raw), vector, T0), None)
        row = (output.key, output.value, output.headers, partition, output.timestamp_ms)
        produce(self.bootstrap, self.topics[output.kind], [row])
        return output.value or b""

    def letters(self, wanted: list[tuple[Reason, bytes]], *, first_offset: int = 0) -> list[tuple[int, int]]:
        """Put dead letters, as the worker writes them, on their topic, with source offsets from `first_offset` on.

        DeadLetter n has the time T0 + n seconds, the key `key-n` and a header n. Returns (partition, offset) of each.
        """
        records = []
        for number, (reason, value) in enumerate(wanted, first_offset):
            partition, when = number % 2, T0 + 1000 * number
            headers = [("n", b"%d" % number), ("traceparent", b"00-%032x-%016x-01" % (number + 1, number + 1))]
            source = SourceRecord(self.name, partition, number, when, b"key-%d" % number, value, headers)
            letter = dead_letter(source, InvalidTrace(reason, "", f"broken for a test: {reason}"))
            records.append((letter.key, letter.value, letter.headers, partition, letter.timestamp_ms))
        return produce(self.bootstrap, self.topics["dead-letter"], records)


def header(record: Any, name: str) -> str:
    """Return the last header of that name as text."""
    value: bytes = dict(record.headers)[name]
    return value.decode()


@pytest.fixture
def stage(kafka: EmbeddedKafka) -> Stage:
    return Stage(kafka)


@pytest.fixture
def desk(kafka: EmbeddedKafka) -> Desk:
    return Desk(kafka)


def untouched(kafka: EmbeddedKafka, **settings: str) -> Stage:
    """Return a stage whose topics nobody creates unasked, with the default embedder, as some checks need one."""
    stage = Stage(kafka, **{"KP_CREATE_TOPICS": "false", **settings})
    if "KP_EMBEDDER" not in settings:
        del stage.env["KP_EMBEDDER"]
    return stage


def origin(record: Any) -> tuple[int, int]:
    """Source partition and offset of an output record, of whatever topic."""
    if any(name == "kp-source-offset" for name, _ in record.headers):
        return int(header(record, "kp-source-partition")), int(header(record, "kp-source-offset"))
    document = json.loads(record.value)
    source = document.get("scoring", document)["source"]  # a verdict's says so itself
    return source["partition"], source["offset"]


def origins(stage: Stage) -> list[tuple[int, int]]:
    """Source partition and offset of everything that came out, sorted."""
    return sorted(origin(record) for records in stage.outputs().values() for record in records)


def documents(stage: Stage) -> list[dict[str, Any]]:
    outputs = stage.outputs()
    found = [record for kind in ("accepted", "rejected") for record in outputs[kind]]
    return [json.loads(record.value) for record in sorted(found, key=origin)]


NO_MODEL = {"KP_EMBEDDER": "openvino", "KP_MODEL": "/nowhere/model"}
"""An embedder that takes no time: there is none. What does not need its vectors is done as with any other one."""


class Diagnosis:
    """What the doctor said, and its exit code."""

    def __init__(self, env: Mapping[str, str]) -> None:
        settings = {"KP_EMBEDDER": "none", "KP_HTTP_PORT": "0", **env}
        self.process = run_command("worker", ["doctor"], environment(**settings))
        assert self.process.stderr == b""
        self.findings: list[dict[str, Any]] = [json.loads(line) for line in self.process.stdout.splitlines()]

    def of(self, check: str) -> list[tuple[str, str]]:
        return [(it["level"], it["message"]) for it in self.findings if it["check"].startswith(check)]

    def failed(self) -> list[str]:
        failed = [f"{it['check']}: {it['message']}" for it in self.findings if it["level"] == "fail"]
        assert self.process.returncode == (1 if failed else 0)
        return failed

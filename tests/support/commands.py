"""Commands of the worker on the topics of a test."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from typing import Any

from tests.support.builders import T0
from tests.support.kafka_fixtures import consume_all, create_topics, produce, unique
from tests.support.processes import run_command, start_command
from tests.support.surroundings import environment, topic_settings
from worker.core.dead_letters import dead_letter
from worker.core.records import SourceRecord
from worker.core.trace import InvalidTrace, Reason
from worker.lab.broker.embedded_kafka import EmbeddedKafka


class Desk:
    """The topics of one test, the settings that name them, and commands run on them."""

    def __init__(self, kafka: EmbeddedKafka, partitions: int = 2, **settings: str) -> None:
        self.bootstrap = kafka.bootstrap_servers
        self.name = unique("desk")
        self.topics = {kind: f"{self.name}.{kind}" for kind in ("accepted", "rejected", "dead-letter")}
        self.settings = topic_settings(self.bootstrap, self.name, **{"KP_EMBEDDER": "none"} | settings)
        # Times in tests are months old: by the broker's default Kafka would delete such records at its next look.
        kept = (partitions, {"retention.ms": "-1"})
        create_topics(self.bootstrap, dict.fromkeys([self.name, *self.topics.values()], kept))

    @property
    def env(self) -> dict[str, str]:
        """The settings in an environment without the developer's."""
        return environment(**self.settings)

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

    def read(self, kind: str | None = None) -> list[Any]:
        """Return what is on a topic; None: the source topic."""
        return consume_all(self.bootstrap, self.name if kind is None else self.topics[kind])

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

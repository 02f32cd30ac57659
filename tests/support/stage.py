"""The topics of one test on a real Kafka, and what a worker put on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from click.testing import CliRunner, Result

from tests.support.commands import header
from tests.support.kafka_fixtures import WorkerProcess, consume_all, produce, unique, wait_committed
from tests.support.surroundings import DATA, topic_settings
from worker.cli import cli
from worker.config import Settings, load
from worker.lab.broker.embedded_kafka import EmbeddedKafka

LINES = (DATA / "traces.jsonl").read_bytes().splitlines()
OUTPUTS = ("accepted", "rejected", "dead-letter")

Workers = Callable[..., WorkerProcess]


class Stage:
    """A set of topics of one test, and what is on them."""

    def __init__(self, kafka: EmbeddedKafka, **settings: str) -> None:
        self.bootstrap = kafka.bootstrap_servers
        self.name = unique("traces")
        quick = {"KP_EMBEDDER": "none", "KP_SESSION_TIMEOUT_SECONDS": "6"}
        self.env = topic_settings(self.bootstrap, self.name, **quick | settings)

    def produce(self, records: list[tuple[Any, ...]]) -> list[tuple[int, int]]:
        return produce(self.bootstrap, self.name, records)

    def outputs(self) -> dict[str, list[Any]]:
        return {kind: consume_all(self.bootstrap, f"{self.name}.{kind}") for kind in OUTPUTS}

    def wait_committed(self, count: int, timeout: float = 90.0) -> None:
        wait_committed(self.bootstrap, self.name, self.name, count, timeout)

    def settings(self) -> Settings:
        given: dict[str, Any] = {name.removeprefix("KP_").lower(): value for name, value in self.env.items()}
        return load(**given)

    def topics(self, *options: str) -> Result:
        return CliRunner().invoke(cli, ["topics", *options], env=self.env, catch_exceptions=False)

    def lines(self, *options: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.topics("--json", *options).output.splitlines()]


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


def documents(stage: Stage) -> list[dict[str, object]]:
    outputs = stage.outputs()
    found = [record for kind in ("accepted", "rejected") for record in outputs[kind]]
    return [json.loads(record.value) for record in sorted(found, key=origin)]

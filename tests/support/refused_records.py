"""Records of each kind that a topic refuses, between good ones, and what a worker made of them."""

from __future__ import annotations

import json
from typing import Any

from tests.support.builders import trace_bytes
from tests.support.kafka_fixtures import WorkerProcess, create_topics
from tests.support.stage import Stage, Workers, origin
from worker.lab.broker.embedded_kafka import EmbeddedKafka

Kind = tuple[bytes | None, bytes, list[tuple[str, bytes]], int]
"""Key, value, headers and how many ms later than now."""

STRICT = {"max.message.bytes": "65536", "message.timestamp.after.max.ms": "60000", "cleanup.policy": "compact"}
"""Settings that refuse a null key, a timestamp in the future, and a batch of more than 64 KiB."""

SOURCE = {"max.message.bytes": "8000000"}

LATER = 1_200_000


def good(number: int, size: int = 0) -> bytes:
    return trace_bytes(f"kp:trace:{number}", objective=f"task {number % 7}" + "x" * size, confidence=number % 10 / 10)


def kinds(number: int) -> dict[str, Kind]:
    """Each kind of refusal by itself: a scored trace, then the same of dead letters."""
    key, header = b"k%d" % number, [("n", b"%d" % number)]
    return {
        "null key": (None, good(number), header, 0),
        "future": (key, good(number), header, LATER),
        "null key and future": (None, good(number), header, LATER),
        "bad, null key": (None, b"bad", header, 0),
        "bad, future": (key, b"bad", header, LATER),
        "bad, null key and future": (None, b"bad", header, LATER),
        "bad, large": (key, b"bad" * 50_000, header, 0),
        "bad, large key, future": (key * 50_000, b"bad", header, LATER),
        "bad, large header": (key, b"bad", [("\N{GRINNING FACE}" * 560, b"x" * 100_000)], 0),
    }


def program() -> list[tuple[str, Kind]]:
    """Return every kind between good records, and every pair of kinds next to each other between good ones."""
    names = list(kinds(0))
    wanted = ["good"]
    for first in names:
        wanted += [first, "good"]
    for first in names:
        for second in names:
            wanted += [first, second, "good"]
    return [
        (name, (b"k%d" % n, good(n), [("n", b"%d" % n)], 0) if name == "good" else kinds(n)[name])
        for n, name in enumerate(wanted)
    ]


def stage_of(kafka: EmbeddedKafka, config: dict[str, str], **settings: str) -> Stage:
    stage = Stage(kafka, KP_EVENT_TIME="record", **settings)
    names = {f"{stage.name}.{kind}": (2, config) for kind in ("accepted", "rejected", "dead-letter")}
    changelog = {"cleanup.policy": "compact", **({"max.message.bytes": "65536"} if config else {})}
    create_topics(
        stage.bootstrap, {stage.name: (2, SOURCE), **names, f"{stage.name}-novelty-changelog": (2, changelog)}
    )
    return stage


def results(stage: Stage) -> dict[tuple[int, int], list[tuple[str, Any]]]:
    found: dict[tuple[int, int], list[tuple[str, Any]]] = {}
    for kind, records in stage.outputs().items():
        for record in records:
            found.setdefault(origin(record), []).append((kind, record))
    return found


def scoring(record: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(record.value)["scoring"]
    del document["source"]
    return document


def run(stage: Stage, workers: Workers, count: int, timeout: float = 120) -> WorkerProcess:
    worker = workers(stage.env, module="tests.support.crash_worker").wait_ready()
    stage.wait_committed(count, timeout)
    return worker

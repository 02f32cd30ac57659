"""`kp-worker cache nearest` says what the worker says next: the same neighbour, the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.commands import Desk
from tests.support.kafka_fixtures import produce, wait_committed
from tests.support.stage import LINES, Workers, origin
from worker import InvalidTrace, parse_trace
from worker.lab.broker.embedded_kafka import EmbeddedKafka

BEFORE = 15
"""Traces of each of two partitions before the first look; with room for 6, each cache has wrapped around twice."""


def valid_lines() -> list[bytes]:
    found = []
    for line in LINES:
        try:
            parse_trace(line)
        except InvalidTrace:
            continue
        found.append(line)
    return found


def score(desk: Desk, rows: list[tuple[Any, ...]], total: int) -> None:
    produce(desk.bootstrap, desk.name, rows)
    wait_committed(desk.bootstrap, desk.name, desk.name, total, 120)


def nearest(desk: Desk, path: Path, *options: str) -> dict[str, Any]:
    done = desk.run("cache", "nearest", "--file", str(path), "--json", *options)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_answer_is_the_worker_s_own(kafka: EmbeddedKafka, workers: Workers, tmp_path: Path) -> None:
    desk = Desk(kafka, KP_EMBEDDER="auto", KP_CACHE_MAX_ELEMENTS="6", KP_CACHE_TTL_SECONDS="none")
    workers(desk.env).wait_ready(120)
    lines = valid_lines()
    assert len(lines) >= 2 * BEFORE + 2
    score(desk, [(None, line, (), number % 2) for number, line in enumerate(lines[: 2 * BEFORE])], 2 * BEFORE)
    path = tmp_path / "trace.json"
    told = []
    for number, line in enumerate(lines[2 * BEFORE : 2 * BEFORE + 2]):
        path.write_bytes(line)
        told.append(nearest(desk, path, "--partition", "1", "-k", "3"))
        if number == 0:
            both = nearest(desk, path, "-k", "30")
            assert both["compared"] == len(both["nearest"]) == 12
            own = [row for row in both["nearest"] if row["partition"] == 1][:3]
            assert own == told[0]["nearest"]
        score(desk, [(None, line, (), 1)], 2 * BEFORE + number + 1)
    scored = {origin(record): json.loads(record.value)["scoring"]
              for kind in ("accepted", "rejected") for record in desk.read(kind)}  # fmt: skip
    for number, report in enumerate(told):
        found = scored[(1, BEFORE + number)]
        assert report["compared"] == 6
        assert found["nearest"] == {
            "id": report["nearest"][0]["trace_id"], "similarity": report["nearest"][0]["similarity"],
        }  # fmt: skip
        assert found["components"]["novelty"] == report["novelty"]
    done = desk.run("cache", "nearest", "anything", "--set", "max_tokens=128")
    assert done.returncode == 1
    assert "Vectors of different models cannot be compared" in done.stderr

"""`kp-worker cache` on the changelog of a real worker, whose small cache warns, and where there is nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.builders import T0, trace_bytes
from tests.support.commands import Desk, Diagnosis
from tests.support.crash_worker import HashEmbedder, hash_vector
from tests.support.kafka_fixtures import consume_all, create_topics, produce
from tests.support.stage import Workers
from worker import embedding_text, parse_trace
from worker.lab.broker.embedded_kafka import EmbeddedKafka

CAPACITY = 120
COUNTS = (300, 90)
"""Traces of each partition: one fills its cache twice, the other does not."""


def trace(partition: int, number: int) -> bytes:
    document = json.loads(trace_bytes(f"kp:trace:{partition}-{number}", created_at=T0 + 50 * number))
    document["metadata"]["agent_id"] = f"agent-{number % 3}"
    document["task"]["objective"] = f"Task {partition} {number}"
    return json.dumps(document).encode()


@pytest.fixture(scope="module")
def desk(kafka: EmbeddedKafka) -> Desk:
    return Desk(kafka, KP_EMBEDDER="auto", KP_CACHE_MAX_ELEMENTS=str(CAPACITY))


def lines(desk: Desk, *args: str) -> list[dict[str, Any]]:
    done = desk.run("cache", *args)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def topic_names(desk: Desk) -> set[str]:
    import asyncio

    from aiokafka.admin import AIOKafkaAdminClient

    async def names() -> set[str]:
        admin = AIOKafkaAdminClient(bootstrap_servers=desk.bootstrap)
        await admin.start()
        try:
            return {name for name in await admin.list_topics() if name.startswith(desk.name)}
        finally:
            await admin.close()

    return asyncio.run(names())


def test_what_a_worker_left_is_listed_counted_and_exported(desk: Desk, workers: Workers, tmp_path: Path) -> None:
    before = topic_names(desk)
    done = desk.run("cache", "list")
    assert (done.returncode, "has no changelog topic" in done.stderr) == (2, True)
    assert topic_names(desk) == before, "no topic is created by a look"
    worker = workers(desk.env, (), "tests.support.crash_worker").wait_ready()
    done = desk.run("cache", "stats", "--partition", "1")
    assert done.returncode == 1
    assert f"group {desk.name} has committed no offset of {desk.name}, partition 1" in done.stderr
    rows = [(None, trace(partition, number), (), partition)
            for partition, count in enumerate(COUNTS) for number in range(count)]  # fmt: skip
    produce(desk.bootstrap, desk.name, rows)
    worker_sees(worker)
    assert worker.metric("kp_cache_ttl_seconds") == 3600
    log = worker.log()
    assert log.count("entries leave the full cache (KP_CACHE_MAX_ELEMENTS=120) after 5.95 s, the TTL is 3600 s") == 1
    assert "KP_CACHE_MAX_ELEMENTS to about 73000" in log

    busy, calm = lines(desk, "stats")
    assert (busy["entries"], busy["evicted"], busy["committed_offset"]) == (CAPACITY, 300 - CAPACITY, 300)
    assert (busy["leave_after_seconds"], busy["leave_by"]) == (5.95, "capacity")
    assert (calm["entries"], calm["evicted"]) == (90, 0)
    assert busy["model"] == calm["model"] == HashEmbedder.identity.key()
    listed = lines(desk, "list", "--limit", "0")
    assert len(listed) == CAPACITY + 90
    assert [row["offset"] for row in listed if row["partition"] == 0] == list(range(299, 299 - CAPACITY, -1))
    (row,) = lines(desk, "list", "--trace", "1-7", "--agent", "agent-1", "--partition", "1", "--limit", "1")
    assert row["trace_id"] == "kp:trace:1-79"

    output = tmp_path / "cache.npz"
    done = desk.run("cache", "export", str(output))
    assert done.stderr == f"210 entries of 2 partitions to {output}\n"
    with np.load(output) as found:
        for place in (0, 119, 120, 209):
            trace_id, offset = str(found["trace_id"][place]), int(found["source_offset"][place])
            text = embedding_text(parse_trace(trace(int(found["partition"][place]), offset)))
            assert trace_id.endswith(f"-{offset}")
            assert found["vectors"][place].tobytes() == hash_vector(text).tobytes()
    worker.terminate()
    assert worker.wait() == 0


def worker_sees(worker: Any) -> None:
    """Wait until all is scored, and the gauges are of that."""
    import time

    deadline = time.monotonic() + 90
    while (
        worker.metric("kp_cache_reach_seconds", partition="0") != 5.95
        or worker.metric("kp_cache_entries", partition="1") != COUNTS[1]
        or worker.metric("kp_committed_offset", partition="0") != 300
    ):
        assert time.monotonic() < deadline, worker.log()
        time.sleep(0.2)


def test_the_doctor_computes_the_capacity_that_holds_the_ttl(desk: Desk) -> None:
    (finding,) = [it for it in Diagnosis(desk.env).findings if it["check"] == "cache"]
    assert finding["level"] == "warn"
    assert "partition 0, the busiest, takes 20 traces a second" in finding["message"]
    assert "they hold 6 s, the TTL is 3600 s" in finding["message"]
    assert (
        "set KP_CACHE_MAX_ELEMENTS to about 72000 (rate x TTL; at most 168 MB for each partition)" in finding["remedy"]
    )
    (finding,) = [it for it in Diagnosis(desk.env | {"KP_CACHE_TTL_SECONDS": "5"}).findings if it["check"] == "cache"]
    assert finding["level"] == "ok"


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["list", "--partition", "2"], 2, "has the partitions 0 to 1, not 2"),
        (["list", "--set", "changelog_topic=none-such"], 2, "has no changelog topic none-such"),
        (["list", "--set", "source_topic=none-such"], 2, "topic none-such"),
        (["nearest"], 2, "pass a text, or --file with a trace"),
        (["nearest", "x", "--file", "-"], 2, "pass a text, or --file with a trace"),
        (["nearest", "x", "--set", "embedder=none"], 1, "KP_EMBEDDER=none makes no vectors"),
        (["nearest", "--file", "/nowhere/trace.json"], 2, "/nowhere/trace.json cannot be read"),
        (["nearest", "--file", "-"], 1, "not_json"),
        (["nearest", "x", "--line", "1"], 2, "--line goes with --file"),
        (
            ["nearest", "--file", "tests/data/traces.jsonl"],
            1,
            "kp-worker cache nearest --file tests/data/traces.jsonl -",
        ),
    ],
)
def test_wrong_questions_get_clear_answers(arguments: list[str], code: int, told: str, desk: Desk) -> None:
    done = desk.run("cache", *arguments, stdin=b"{")
    assert (done.returncode, told in done.stderr) == (code, True), done.stderr


def test_a_group_that_never_committed_is_named(desk: Desk) -> None:
    create_topics(desk.bootstrap, {f"{desk.name}-2-novelty-changelog": (2, {"cleanup.policy": "compact"})})
    done = desk.run("cache", "list", "-g", f"{desk.name}-2")
    assert done.returncode == 1
    assert f"group {desk.name}-2 has committed no offset of {desk.name}: no worker has scored" in done.stderr
    assert consume_all(desk.bootstrap, f"{desk.name}-2-novelty-changelog") == []

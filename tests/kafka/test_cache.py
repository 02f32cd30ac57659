"""`kp-worker cache` on the changelog of a real worker, whose small cache warns, and where there is nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.builders import T0, trace_bytes
from tests.support.commands import NO_MODEL, Desk, Diagnosis
from tests.support.crash_worker import HashEmbedder
from tests.support.kafka_fixtures import WorkerProcess, admin, consume_all, create_topics, produce
from tests.support.stage import Workers
from worker.lab.broker.embedded_kafka import EmbeddedKafka

CAPACITY = 120
COUNTS = (300, 90)
"""Traces of each partition: one fills its cache twice, the other does not."""


def trace(partition: int, number: int) -> bytes:
    document = json.loads(trace_bytes(f"kp:trace:{partition}-{number}", created_at=T0 + 50 * number))
    document["metadata"]["agent_id"] = f"agent-{number % 3}"
    document["task"]["objective"] = f"Task {partition} {number}"
    return json.dumps(document).encode()


SETTINGS = {"KP_EMBEDDER": "auto", "KP_CACHE_MAX_ELEMENTS": str(CAPACITY)}


@pytest.fixture(scope="module")
def desk(kafka: EmbeddedKafka) -> Desk:
    """Return the topics on which a worker has scored COUNTS."""
    desk = Desk(kafka, **SETTINGS)
    with WorkerProcess(desk.env, (), module="tests.support.crash_worker") as worker:
        worker.wait_ready()
        rows = [(None, trace(partition, number), (), partition)
                for partition, count in enumerate(COUNTS) for number in range(count)]  # fmt: skip
        produce(desk.bootstrap, desk.name, rows)
        worker.wait_metric("kp_cache_reach_seconds", 5.95, partition="0")
        worker.wait_metric("kp_cache_entries", COUNTS[1], partition="1")
        worker.wait_metric("kp_committed_offset", 300, partition="0")
        assert worker.metric("kp_cache_ttl_seconds") == 3600
        log = worker.log()
        said = "entries leave the full cache (KP_CACHE_MAX_ELEMENTS=120) after 5.95 s, the TTL is 3600 s"
        assert log.count(said) == 1
        assert "KP_CACHE_MAX_ELEMENTS to about 73000" in log
        worker.terminate()
        assert worker.wait() == 0
    return desk


def lines(desk: Desk, *args: str) -> list[dict[str, Any]]:
    done = desk.run("cache", *args)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def topic_names(desk: Desk) -> set[str]:
    names = admin(desk.bootstrap, lambda client: client.list_topics())
    return {name for name in names if name.startswith(desk.name)}


def test_before_anything_is_scored_the_commands_say_so_and_create_nothing(
    kafka: EmbeddedKafka, workers: Workers
) -> None:
    desk = Desk(kafka, **SETTINGS)
    before = topic_names(desk)
    done = desk.run("cache", "list")
    assert (done.returncode, "has no changelog topic" in done.stderr) == (2, True)
    assert topic_names(desk) == before, "no topic is created by a look"
    workers(desk.env, (), "tests.support.crash_worker").wait_ready()
    done = desk.run("cache", "stats", "--partition", "1")
    assert done.returncode == 1
    assert f"group {desk.name} has committed no offset of {desk.name}, partition 1" in done.stderr


def test_what_a_worker_left_is_listed_and_counted(desk: Desk) -> None:
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


def test_the_doctor_computes_the_capacity_that_holds_the_ttl(desk: Desk) -> None:
    (finding,) = [it for it in Diagnosis(desk.env | NO_MODEL).findings if it["check"] == "cache"]
    assert finding["level"] == "warn"
    assert "partition 0, the busiest, takes 20 traces a second" in finding["message"]
    assert "they hold 6 s, the TTL is 3600 s" in finding["message"]
    assert (
        "set KP_CACHE_MAX_ELEMENTS to about 72000 (rate x TTL; at most 168 MB for each partition)" in finding["remedy"]
    )
    (finding,) = [
        it for it in Diagnosis(desk.env | NO_MODEL | {"KP_CACHE_TTL_SECONDS": "5"}).findings if it["check"] == "cache"
    ]
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
        (["nearest", "x", "--line", "1"], 2, "--line requires --file"),
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

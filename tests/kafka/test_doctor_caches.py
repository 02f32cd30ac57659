"""What `kp-worker doctor` says of the caches of a real worker, whose small cache warns, and before there are any."""

from __future__ import annotations

import json

import pytest

from tests.support.builders import T0, trace_bytes
from tests.support.commands import NO_MODEL, Desk, Diagnosis
from tests.support.kafka_fixtures import WorkerProcess, admin, produce
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


def topic_names(desk: Desk) -> set[str]:
    names = admin(desk.bootstrap, lambda client: client.list_topics())
    return {name for name in names if name.startswith(desk.name)}


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
        worker.finish()
    return desk


def test_before_anything_is_scored_there_is_nothing_to_say_and_no_topic_is_created(kafka: EmbeddedKafka) -> None:
    desk = Desk(kafka, **SETTINGS)
    before = topic_names(desk)
    diagnosis = Diagnosis(desk.env | NO_MODEL)
    ((level, message),) = diagnosis.of("cache")
    assert (level, "too few traces yet to tell their rate" in message) == ("ok", True)
    assert diagnosis.of("track records") == []
    assert topic_names(desk) == before


def test_the_doctor_counts_the_entries_and_computes_the_capacity_that_holds_the_ttl(desk: Desk) -> None:
    diagnosis = Diagnosis(desk.env | NO_MODEL)
    assert diagnosis.of("cache entries") == [
        ("ok", f"{CAPACITY + 90} live: {CAPACITY} in partition 0, 90 in partition 1")
    ]
    (finding,) = [it for it in diagnosis.findings if it["check"] == "cache"]
    assert finding["level"] == "warn"
    assert "partition 0, the busiest, takes 20 traces a second" in finding["message"]
    assert "they hold 6 s, the TTL is 3600 s" in finding["message"]
    assert (
        "set KP_CACHE_MAX_ELEMENTS to about 72000 (rate x TTL; at most 155 MB for each partition)" in finding["remedy"]
    )
    (finding,) = [
        it for it in Diagnosis(desk.env | NO_MODEL | {"KP_CACHE_TTL_SECONDS": "5"}).findings if it["check"] == "cache"
    ]
    assert finding["level"] == "ok"
    other = Diagnosis(
        desk.env | NO_MODEL | {"KP_GROUP_ID": f"{desk.name}-2", "KP_CHANGELOG_TOPIC": f"{desk.name}-novelty-changelog"}
    )
    assert other.of("cache entries") == []  # this group has committed nothing

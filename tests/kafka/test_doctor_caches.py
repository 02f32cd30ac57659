"""What `kp-worker doctor` says of the caches of a real worker, whose small cache warns, and before there are any."""

from typing import Any

import pytest

from tests.support.builders import T0, trace_bytes
from tests.support.kafka_fixtures import WorkerProcess, admin, produce
from tests.support.stage import NO_MODEL, Desk, Diagnosis
from worker.lab.broker.embedded_kafka import EmbeddedKafka

CAPACITY = 120
COUNTS = (300, 90)
"""Traces of each partition: one fills its cache twice, the other does not."""


def trace(partition: int, number: int) -> bytes:
    objective, created_at = f"Task {partition} {number}", T0 + 50 * number
    return trace_bytes(f"kp:trace:{partition}-{number}", created_at=created_at, objective=objective)


SETTINGS = {"KP_EMBEDDER": "auto", "KP_CACHE_MAX_ELEMENTS": str(CAPACITY)}


def of_the_cache(desk: Desk, **env: str) -> dict[str, Any]:
    (finding,) = [it for it in Diagnosis(desk.env | NO_MODEL | env).findings if it["check"] == "cache"]
    return finding


def topic_names(desk: Desk) -> set[str]:
    names = admin(desk.bootstrap, lambda client: client.list_topics())
    return {name for name in names if name.startswith(desk.name)}


@pytest.fixture(scope="module")
def desk(kafka: EmbeddedKafka) -> Desk:
    """Return the topics on which a worker has scored COUNTS."""
    desk = Desk(kafka, **SETTINGS)
    with WorkerProcess(desk.env, (), module="tests.support.crash_worker") as worker:
        worker.wait_ready()
        for partition, count in enumerate(COUNTS):
            produce(desk.bootstrap, desk.name, [(None, trace(partition, n), (), partition) for n in range(count)])
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
    live = f"{CAPACITY + 90} live: {CAPACITY} in partition 0, 90 in partition 1"
    assert diagnosis.of("cache entries") == [("ok", live)]
    finding = of_the_cache(desk)
    assert finding["level"] == "warn"
    assert "partition 0, the busiest, takes 20 traces a second" in finding["message"]
    assert "they hold 6 s, the TTL is 3600 s" in finding["message"]
    remedy = "set KP_CACHE_MAX_ELEMENTS to about 72000 (rate x TTL; at most 155 MB for each partition)"
    assert remedy in finding["remedy"]
    assert of_the_cache(desk, KP_CACHE_TTL_SECONDS="5")["level"] == "ok"
    group = {"KP_GROUP_ID": f"{desk.name}-2", "KP_CHANGELOG_TOPIC": f"{desk.name}-novelty-changelog"}
    assert Diagnosis(desk.env | NO_MODEL | group).of("cache entries") == []  # this group has committed nothing

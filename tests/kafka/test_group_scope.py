"""The novelty scope `group` with real workers on a real Kafka."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.support.builders import trace_bytes
from tests.support.chaos import wait_until
from tests.support.kafka_fixtures import WorkerProcess, create_topics
from tests.support.stage import Stage, documents
from worker.broker.embedded_kafka import EmbeddedKafka

Start = Callable[[Mapping[str, str]], WorkerProcess]


def stage_of(kafka: EmbeddedKafka, partitions: int = 2, **settings: str) -> Stage:
    stage = Stage(kafka, KP_NOVELTY_SCOPE="group", **settings)
    create_topics(kafka.bootstrap_servers, {stage.name: partitions})
    return stage


def publish(stage: Stage, partition: int, *traces: tuple[str, str]) -> None:
    """Publish traces of (the end of the id, objective) to a partition."""
    stage.produce([(None, trace_bytes(f"kp:trace:{name}", objective=text), (), partition) for name, text in traces])


def wait_entries(count: int, *workers: WorkerProcess) -> None:
    """Wait until the views of all workers have so many entries."""
    arrived = wait_until(lambda: all(it.metric("kp_group_view_entries") == count for it in workers), 60)
    assert arrived, [(it.metric("kp_group_view_entries"), it.log()) for it in workers]


def nearest_by_id(stage: Stage) -> dict[str, Any]:
    return {str(it["id"])[9:]: it["scoring"]["nearest"] for it in documents(stage)}  # type: ignore[index]


def test_a_text_that_another_partition_has_committed_is_not_new(kafka: EmbeddedKafka, hashing: Start) -> None:
    stage = stage_of(kafka)
    one, two = hashing(stage.env), hashing(stage.env)
    both = (one.wait_ready(), two.wait_ready())
    assert wait_until(lambda: all(it.metric("kp_assigned_partitions") == 1 for it in both), 60)
    publish(stage, 0, ("a-0", "first text"), ("a-1", "second text"))
    wait_entries(2, *both)
    publish(stage, 1, ("b-0", "second text"), ("b-1", "second text"))
    wait_entries(4, *both)
    found = nearest_by_id(stage)
    assert found["a-0"] is None
    assert {key: found["a-1"][key] for key in ("id", "partition", "offset")} == {
        "id": "kp:trace:a-0",
        "partition": 0,
        "offset": 0,
    }
    assert found["b-0"] == {"id": "kp:trace:a-1", "similarity": found["b-0"]["similarity"], "partition": 0, "offset": 1}
    assert found["b-0"]["similarity"] > 0.9999
    assert found["b-1"]["partition"] == 1, "of equals, the partition's own"
    for worker in both:
        assert worker.metric("kp_group_view_lag_seconds") < 5
        assert worker.metric("kp_group_view_bytes") == 4 * 384 * 4
        worker.terminate()
        assert worker.wait() == 0, worker.log()
    third = hashing(stage.env).wait_ready()  # the view is complete before the first trace
    assert "group view: 4 entries of 2 partitions" in third.log()
    publish(stage, 0, ("a-2", "second text"))
    stage.wait_committed(5)
    assert nearest_by_id(stage)["a-2"]["id"] == "kp:trace:a-1"

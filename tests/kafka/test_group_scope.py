"""The novelty scope `group` with real workers on a real Kafka."""

from __future__ import annotations

from typing import Any

from aiokafka.admin import NewPartitions

from tests.support.builders import trace_bytes
from tests.support.kafka_fixtures import WorkerProcess, admin, commit_offset, create_topics, wait_until
from tests.support.stage import Stage, Workers, documents
from worker.core.group_view import memory_bytes
from worker.lab.broker.embedded_kafka import EmbeddedKafka


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


def test_a_text_that_another_partition_has_committed_is_not_new(kafka: EmbeddedKafka, hashing: Workers) -> None:
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
        assert worker.metric("kp_group_view_bytes") == memory_bytes(4, 384)
        worker.terminate()
        assert worker.wait() == 0, worker.log()
    third = hashing(stage.env).wait_ready()  # the view is complete before the first trace
    assert "group view: 4 entries of 2 partitions" in third.log()
    publish(stage, 0, ("a-2", "second text"))
    stage.wait_committed(5)
    assert nearest_by_id(stage)["a-2"]["id"] == "kp:trace:a-1"


def test_entries_of_the_pass_before_a_reset_are_not_compared(kafka: EmbeddedKafka, hashing: Workers) -> None:
    stage = stage_of(kafka)
    first = hashing(stage.env).wait_ready()
    publish(stage, 0, ("a-0", "kept text"), ("a-1", "old text"), ("a-2", "old text"))
    wait_entries(3, first)
    first.terminate()
    assert first.wait() == 0, first.log()
    commit_offset(stage.bootstrap, stage.name, stage.name, 1)
    second = hashing(stage.env).wait_ready()
    assert "group view: 1 entry of 2 partitions" in second.log(), "those at and past the offset are of another pass"
    wait_entries(3, second)
    publish(stage, 1, ("b-0", "old text"), ("b-1", "kept text"))
    stage.wait_committed(5)
    found = nearest_by_id(stage)
    assert [found[name]["id"] for name in ("b-0", "b-1")] == ["kp:trace:a-1", "kp:trace:a-0"]


def test_a_partition_that_the_source_gains_is_followed(kafka: EmbeddedKafka, hashing: Workers) -> None:
    stage = stage_of(kafka, partitions=1)
    worker = hashing(stage.env | {"TEST_METADATA_MS": "2000"}).wait_ready()
    publish(stage, 0, ("a-0", "some text"))
    wait_entries(1, worker)
    admin(kafka.bootstrap_servers, lambda it: it.create_partitions({stage.name: NewPartitions(2)}))
    assert wait_until(lambda: worker.metric("kp_assigned_partitions") == 2, 90), worker.log()
    publish(stage, 1, ("b-0", "some text"))
    wait_entries(2, worker)
    publish(stage, 0, ("a-1", "some text"))
    stage.wait_committed(3)
    found = nearest_by_id(stage)
    assert (found["b-0"]["id"], found["b-0"]["partition"]) == ("kp:trace:a-0", 0)
    assert found["a-1"]["partition"] == 0

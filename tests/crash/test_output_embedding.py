"""KP_OUTPUT_EMBEDDING: the same vector again after a crash."""

from __future__ import annotations

import json
import time

from tests.support.crash_worker import hash_vector
from tests.support.output_embedding import decode
from tests.support.stage import LINES, Stage, Workers, origin
from worker import embedding_text, parse_trace
from worker.lab.broker.embedded_kafka import EmbeddedKafka


def test_a_replay_after_a_crash_gives_the_same_bytes(kafka: EmbeddedKafka, workers: Workers) -> None:
    """At least once: outputs and cache entries are there, the offset is not, so each trace comes again, identical."""
    stage = Stage(
        kafka, KP_OUTPUT_EMBEDDING="true", KP_EMBEDDER="auto", KP_DELIVERY="at_least_once", KP_TOPIC_PARTITIONS="1"
    )
    crashing = {**stage.env, "TEST_CRASH_AT": "after_sends:1:kill"}
    first = workers(crashing, (), module="tests.support.crash_worker").wait_ready()
    now = int(time.time() * 1000)
    stage.produce([(b"k", line, (), 0, now + i) for i, line in enumerate(LINES[:50])])
    first.wait()
    workers(stage.env, (), module="tests.support.crash_worker").wait_ready()
    stage.wait_committed(50)
    outputs = stage.outputs()
    records = outputs["accepted"] + outputs["rejected"]
    by_offset: dict[int, set[bytes]] = {}
    for record in records:
        by_offset.setdefault(origin(record)[1], set()).add(record.value)
    assert len(records) > 50, "the crash came before anything was published: nothing was replayed"
    assert sorted(by_offset) == list(range(50))
    assert {len(values) for values in by_offset.values()} == {1}
    for offset, (value,) in by_offset.items():
        expected = hash_vector(embedding_text(parse_trace(LINES[offset])))
        assert decode(json.loads(value)).tobytes() == expected.tobytes()

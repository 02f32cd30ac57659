"""KP_OUTPUT_EMBEDDING: within the size limit of the topics."""

from __future__ import annotations

import json

from tests.support.builders import trace_bytes
from tests.support.commands import header
from tests.support.crash_worker import DIMENSIONS
from tests.support.kafka_fixtures import create_topics
from tests.support.output_embedding import decode
from tests.support.stage import Stage, Workers
from worker.core.documents import embedding_bytes
from worker.kafka.cluster.topics import OUTPUT_OVERHEAD
from worker.lab.broker.embedded_kafka import EmbeddedKafka


def test_a_trace_that_would_not_fit_with_its_embedding_is_a_dead_letter(kafka: EmbeddedKafka, workers: Workers) -> None:
    stage = Stage(kafka, KP_OUTPUT_EMBEDDING="true", KP_EMBEDDER="auto")
    topic_limit = 20_000
    fits = topic_limit - OUTPUT_OVERHEAD - embedding_bytes(DIMENSIONS)
    small = {"max.message.bytes": str(topic_limit)}
    create_topics(stage.bootstrap, {f"{stage.name}.{kind}": (1, small) for kind in ("accepted", "rejected")})
    workers(stage.env, (), module="tests.support.crash_worker").wait_ready()
    bare = len(trace_bytes(objective=""))
    for size in (fits, topic_limit):
        stage.produce([(None, trace_bytes(objective="x" * (size - bare)), (), 0)])
    stage.wait_committed(2)
    outputs = stage.outputs()
    (letter,) = outputs["dead-letter"]
    assert header(letter, "kp-error-reason") == "too_large"
    assert f"accepts {topic_limit}" in header(letter, "kp-error-message")
    (document,) = [json.loads(record.value) for record in outputs["accepted"] + outputs["rejected"]]
    assert len(decode(document)) == DIMENSIONS

"""KP_OUTPUT_EMBEDDING: the vector in the output, bit for bit, also after a crash, and within the size limit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from tests.support.builders import TextEmbedder, make_record, make_trace, text_vector, trace_bytes
from tests.support.commands import header
from tests.support.crash_worker import DIMENSIONS, hash_vector
from tests.support.kafka_fixtures import WorkerProcess, create_topics
from tests.support.output_embedding import decode, score_file
from tests.support.schemas import VALIDATORS
from tests.support.stage import LINES, Stage, origin
from worker import PartitionScorer, config, embedding_text, parse_trace
from worker.embedded_kafka import EmbeddedKafka
from worker.models import load_embedder
from worker.pipeline import embedding_bytes, scored_record
from worker.topics import OUTPUT_OVERHEAD

Workers = Callable[..., WorkerProcess]


def test_a_file_s_documents_hold_the_vector_where_it_is_asked_for() -> None:
    lines = [trace_bytes(f"kp:trace:{n}", objective=f"task {n}") for n in range(5)]
    documents = score_file(lines, TextEmbedder(), output_embedding=True)
    for line, document in zip(lines, documents, strict=True):
        assert decode(document).tobytes() == text_vector(embedding_text(parse_trace(line)), 8).tobytes()
        VALIDATORS["scored-trace"].validate(document)
        del document["scoring"]["embedding"]
    assert documents == score_file(lines, TextEmbedder())


@pytest.mark.model
@pytest.mark.parametrize("kind", ["sentence-transformers", "auto"])
def test_the_real_model_s_vectors_come_out_bit_for_bit(kind: str) -> None:
    embedder = load_embedder(kind, None, 256, 1, "fp32")
    assert embedder is not None
    for line, document in zip(LINES[:20], score_file(LINES[:20], embedder, output_embedding=True), strict=True):
        assert decode(document).tobytes() == embedder.embed(embedding_text(parse_trace(line))).vector.tobytes()


def test_without_an_embedder_it_is_refused() -> None:
    with pytest.raises(config.ConfigError, match="KP_OUTPUT_EMBEDDING=true needs an embedder"):
        config.load(embedder="none", output_embedding=True)


@pytest.mark.parametrize("field", ["dtype", "dimensions", "data"])
def test_the_schema_wants_all_of_it(field: str) -> None:
    (document,) = score_file([trace_bytes()], TextEmbedder(), output_embedding=True)
    del document["scoring"]["embedding"][field]
    assert not VALIDATORS["scored-trace"].is_valid(document)


@pytest.mark.parametrize("dimensions", [1, 2, 3, 384, 4096])
def test_the_size_that_is_reckoned_with_is_the_true_one(dimensions: int) -> None:
    identity = TextEmbedder(dimensions).identity
    scored = PartitionScorer(dimensions=dimensions).score(make_trace(), text_vector("t", dimensions), 0)
    sizes = [
        len(scored_record(make_record(trace_bytes()), scored, identity, embedding=on).value or b"")
        for on in (False, True)
    ]
    assert sizes[1] - sizes[0] == embedding_bytes(dimensions)


@pytest.mark.kafka
def test_a_trace_that_would_not_fit_with_its_embedding_is_a_dead_letter(kafka: EmbeddedKafka, workers: Workers) -> None:
    stage = Stage(kafka, KP_OUTPUT_EMBEDDING="true", KP_EMBEDDER="auto")
    topic_limit = 20_000
    fits = topic_limit - OUTPUT_OVERHEAD - embedding_bytes(DIMENSIONS)
    small = {"max.message.bytes": str(topic_limit)}
    create_topics(stage.bootstrap, {f"{stage.name}.{kind}": (1, small) for kind in ("accepted", "rejected")})
    workers(stage.env, (), module="tests.support.crash_worker").wait_ready()
    bare = len(trace_bytes(objective=""))
    for size in (fits, fits + 1):
        stage.produce([(None, trace_bytes(objective="x" * (size - bare)), (), 0)])
    stage.wait_committed(2)
    outputs = stage.outputs()
    (letter,) = outputs["dead-letter"]
    assert header(letter, "kp-error-reason") == "too_large"
    assert f"the limit is {fits} " in header(letter, "kp-error-message")
    (document,) = [json.loads(record.value) for record in outputs["accepted"] + outputs["rejected"]]
    assert len(decode(document)) == DIMENSIONS


@pytest.mark.kafka
@pytest.mark.crash
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

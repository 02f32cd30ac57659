"""What docs/operations.md says of a changed KP_CACHE_MAX_ELEMENTS, on real Kafka."""

from __future__ import annotations

from tests.support.crash_worker import hash_vector
from tests.support.stage import LINES, Stage, Workers, documents
from worker.core.novelty import Vector
from worker.core.scorer import PartitionScorer, cached_id
from worker.core.trace import created_at_ms, embedding_text, parse_trace
from worker.lab.broker.embedded_kafka import EmbeddedKafka

EACH = 30
CAPACITIES = (20, 5, 60)
"""Smaller than what came before, then larger than all that came before."""


def expected(capacities: tuple[int, ...]) -> list[tuple[str, float] | None]:
    """The nearest neighbours by the core: at each restart the newest entries of the whole past, as many as fit."""
    past: list[tuple[int, int, str, Vector]] = []
    result: list[tuple[str, float] | None] = []
    for run, capacity in enumerate(capacities):
        scorer = PartitionScorer(capacity)
        scorer.restore(past)
        for line in LINES[run * EACH : (run + 1) * EACH]:
            trace = parse_trace(line)
            scored = scorer.score(trace, hash_vector(embedding_text(trace)), created_at_ms(trace))
            assert scored.sequence is not None
            assert scored.vector is not None
            past.append((scored.sequence, scored.stream_time_ms, cached_id(trace), scored.vector))
            nearest = scored.nearest
            result.append(None if nearest is None else (nearest.trace_id, nearest.similarity))
    return result


def test_a_changed_capacity_keeps_the_newest_entries(kafka: EmbeddedKafka, hashing: Workers) -> None:
    assert expected(CAPACITIES) != expected((20, 20, 20)) != expected((20, 5, 5)), "the sample must show the capacity"
    stage = Stage(kafka, KP_TOPIC_PARTITIONS="1")
    for run, capacity in enumerate(CAPACITIES):
        worker = hashing({**stage.env, "KP_CACHE_MAX_ELEMENTS": str(capacity)}).wait_ready()
        assert worker.metric("kp_restored_entries_total") == run * EACH
        stage.produce([(None, line, (), 0) for line in LINES[run * EACH : (run + 1) * EACH]])
        stage.wait_committed((run + 1) * EACH)
        worker.finish()
    found = [document["scoring"]["nearest"] for document in documents(stage)]  # type: ignore[index]
    assert [None if it is None else (it["id"], it["similarity"]) for it in found] == expected(CAPACITIES)

"""A group that reads its source again, another source, or with other settings: which cache entries it believes."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from tests.support.crash_worker import HashEmbedder, hash_vector
from tests.support.kafka_fixtures import (
    WorkerProcess,
    admin,
    commit_offset,
    committed,
    consume_all,
    create_again,
    create_topics,
    produce,
    wait_until,
)
from tests.support.stage import LINES, NO_MODEL, Diagnosis, Stage, Workers, documents
from worker.core.changelog import MARKER_KEY, SLACK, decode
from worker.core.scorer import PartitionScorer, cached_id
from worker.core.trace import InvalidTrace, Limits, created_at_ms, embedding_text, parse_trace
from worker.kafka.topics import CHANGELOG_CONFIG
from worker.lab.broker.embedded_kafka import EmbeddedKafka


def rows(lines: Sequence[bytes]) -> list[tuple[Any, ...]]:
    return [(None, line, (), 0) for line in lines]


def run(start: Workers, stage: Stage, total: int, lines: Sequence[bytes] = (), **settings: str) -> WorkerProcess:
    """Let a worker score until `total` records are committed, and stop it; the lines are produced once it is ready."""
    worker = start({**stage.env, **settings}).wait_ready()
    stage.produce(rows(lines))
    stage.wait_committed(total)
    worker.finish()
    return worker


def expected(lines: Sequence[bytes], max_steps: int = 10_000) -> list[tuple[str, float] | None]:
    """The nearest neighbour of each trace, by the core in one undisturbed run."""
    scorer = PartitionScorer()
    result: list[tuple[str, float] | None] = []
    for line in lines:
        try:
            trace = parse_trace(line, Limits(max_steps=max_steps))
        except InvalidTrace:
            continue
        scored = scorer.score(trace, hash_vector(embedding_text(trace)), created_at_ms(trace))
        result.append(None if scored.nearest is None else (scored.nearest.trace_id, scored.nearest.similarity))
    return result


def nearest(found: Sequence[dict[str, Any]]) -> list[tuple[str, float] | None]:
    pairs = [document["scoring"]["nearest"] for document in found]
    return [None if it is None else (it["id"], it["similarity"]) for it in pairs]


def so_far(stage: Stage) -> dict[str, int]:
    """Return the number of documents on each topic."""
    return {kind: len(records) for kind, records in stage.outputs().items() if kind != "dead-letter"}


def scored_since(stage: Stage, before: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the documents that came after `before`, in source order."""
    outputs = stage.outputs()
    found = [json.loads(record.value) for kind, count in before.items() for record in outputs[kind][count:]]
    return sorted(found, key=lambda document: document["scoring"]["source"]["offset"])


def commit(stage: Stage, offset: int, metadata: str = "") -> None:
    commit_offset(stage.bootstrap, stage.name, stage.name, offset, metadata=metadata)


def metadata_of(stage: Stage) -> str:
    offsets = admin(stage.bootstrap, lambda client: client.list_consumer_group_offsets(stage.name))
    return str(next(iter(offsets.values())).metadata)


def recreate(stage: Stage) -> None:
    """Delete the source topic, and with it the group's offsets, and make it anew under the same name."""
    admin(stage.bootstrap, lambda client: client.delete_topics([stage.name]))
    create_again(stage.bootstrap, stage.name, 1)
    assert wait_until(lambda: not committed(stage.bootstrap, stage.name, stage.name))


def live(stage: Stage) -> dict[bytes, bytes]:
    """Return what compaction would leave of the changelog, without the marker."""
    found: dict[bytes, bytes] = {}
    for record in consume_all(stage.bootstrap, f"{stage.name}-novelty-changelog"):
        found.pop(record.key, None)
        if record.value is not None:
            found[record.key] = record.value
    found.pop(MARKER_KEY, None)
    return found


def other_texts(lines: Sequence[bytes], texts: Sequence[bytes]) -> list[bytes]:
    """Return traces with the ids of some and the rest of others."""
    result = []
    for line, text in zip(lines, texts, strict=True):
        document = json.loads(text)
        document["id"] = json.loads(line)["id"]
        result.append(json.dumps(document).encode())
    return result


@pytest.fixture
def stage(kafka: EmbeddedKafka) -> Stage:
    return Stage(kafka, KP_TOPIC_PARTITIONS="1", KP_CACHE_TTL_SECONDS="none")


# -- the three that scored wrong, silently


def test_a_source_made_anew_with_the_same_ids_and_other_texts(stage: Stage, hashing: Workers) -> None:
    run(hashing, stage, 30, LINES[:30])
    recreate(stage)
    lines = other_texts(LINES[:30], LINES[30:60])
    before = so_far(stage)
    stage.produce(rows(lines))
    worker = run(hashing, stage, 30)
    assert nearest(scored_since(stage, before)) == expected(lines)
    assert "the source topic was recreated" in worker.log()


def test_a_source_made_anew_whose_last_record_is_a_dead_letter_before_a_restart(stage: Stage, hashing: Workers) -> None:
    run(hashing, stage, 30, LINES[:30])
    recreate(stage)
    before = so_far(stage)
    stage.produce(rows([*LINES[100:110], b'{"not": "a trace"}']))
    run(hashing, stage, 11)
    run(hashing, stage, 31, LINES[110:130])
    assert nearest(scored_since(stage, before)) == expected(LINES[100:130])


def test_score_again_with_a_smaller_limit_and_a_restart(stage: Stage, hashing: Workers) -> None:
    lines = [*LINES[:30], *sorted(LINES[30:60], key=lambda line: len(json.loads(line)["steps"]))]
    most = 3
    assert len(json.loads(lines[-1])["steps"]) > most
    run(hashing, stage, 60, lines)
    before = so_far(stage)
    commit(stage, 0)
    run(hashing, stage, 60, KP_MAX_STEPS=str(most))
    more = [line for line in LINES[60:200] if len(json.loads(line)["steps"]) <= most][:20]
    run(hashing, stage, 80, more, KP_MAX_STEPS=str(most))
    assert nearest(scored_since(stage, before)) == expected([*lines, *more], most)


# -- another topic behind the committed offset


@pytest.mark.sample(1)
@pytest.mark.parametrize("stale", [10, 99], ids=["already longer", "still shorter"])
def test_a_committed_offset_of_a_topic_that_was_made_anew(stage: Stage, hashing: Workers, stale: int) -> None:
    run(hashing, stage, 10, LINES[:10])
    metadata = metadata_of(stage)
    recreate(stage)
    before = so_far(stage)
    stage.produce(rows(LINES[10:40]))
    commit(stage, stale, metadata)
    worker = hashing(stage.env).wait_ready()
    assert wait_until(lambda: committed(stage.bootstrap, stage.name, stage.name) == {0: 30}), worker.log()
    worker.finish()
    assert worker.log().count("was recreated (topic id") == 1
    assert nearest(scored_since(stage, before)) == expected(LINES[10:40])


# -- what must go on as before


def test_a_step_back_keeps_its_cache_and_so_does_a_restart_after_it(stage: Stage, hashing: Workers) -> None:
    run(hashing, stage, 40, LINES[:40])
    first = documents(stage)
    before = so_far(stage)
    commit(stage, 20)
    worker = run(hashing, stage, 40)
    assert (
        "epoch 2 of the source begins at offset 20 (the committed offset was moved), with 20 earlier cache entries"
        in worker.log()
    )
    assert scored_since(stage, before) == first[20:]
    run(hashing, stage, 50, LINES[40:50])
    assert nearest(scored_since(stage, before)) == expected(LINES[:50])[20:]
    live_offsets = sorted(decode(value).source_offset for value in live(stage).values())
    assert live_offsets == list(range(50))


def test_an_offset_behind_the_changelog_is_refused_and_nothing_is_published_twice(
    stage: Stage, hashing: Workers
) -> None:
    """Entries and offset are in one transaction: an earlier offset is not the worker's, whoever gave it."""
    run(hashing, stage, 40, LINES[:40])
    first = documents(stage)
    commit(stage, 20, metadata_of(stage))
    refusal = "has committed offset 20, but the changelog has committed entries of records up to 39"
    ((level, message),) = Diagnosis(stage.env | NO_MODEL).of("offsets")
    assert level == "fail"
    assert refusal in message
    worker = hashing(stage.env)
    assert worker.wait() == 1
    assert refusal in worker.log()
    assert f"--topic {stage.name}:0 --reset-offsets --to-offset 40 --execute" in worker.log()
    assert documents(stage) == first
    commit(stage, 40)
    run(hashing, stage, 50, LINES[40:50])
    assert documents(stage)[:40] == first
    assert nearest(documents(stage)) == expected(LINES[:50])


def test_exactly_once_waits_for_the_end_of_what_a_crash_at_least_once_has_left(stage: Stage, hashing: Workers) -> None:
    """Its outputs and entries are there without their offset: only a worker that may repeat them can go on."""
    run(hashing, stage, 20, LINES[:20], KP_DELIVERY="at_least_once")
    stage.produce(rows(LINES[20:40]))
    crashed = hashing({**stage.env, "KP_DELIVERY": "at_least_once", "TEST_CRASH_AT": "after_sends:1:kill"})
    assert crashed.wait() == -9, crashed.log()
    refused = hashing(stage.env)
    assert refused.wait() == 1
    assert "has committed offset 20, but the changelog has committed entries of records up to " in refused.log()
    assert "After a crash with KP_DELIVERY=at_least_once, let a worker with it continue first" in refused.log()
    run(hashing, stage, 40, KP_DELIVERY="at_least_once")
    run(hashing, stage, 50, LINES[40:50])
    by_offset = {document["scoring"]["source"]["offset"]: document for document in documents(stage)}
    assert nearest([by_offset[offset] for offset in range(50)]) == expected(LINES[:50])


@pytest.mark.sample(1)
@pytest.mark.parametrize("step", ["mid_sends", "after_sends"])
def test_a_step_back_that_crashes_in_its_first_commit_at_least_once(stage: Stage, hashing: Workers, step: str) -> None:
    stage.env["KP_DELIVERY"] = "at_least_once"
    run(hashing, stage, 40, LINES[:40])
    before = so_far(stage)
    commit(stage, 20)
    crashed = hashing({**stage.env, "TEST_CRASH_AT": f"{step}:1:kill"})
    assert crashed.wait() == -9, crashed.log()
    run(hashing, stage, 40)
    run(hashing, stage, 50, LINES[40:50])
    by_offset = {document["scoring"]["source"]["offset"]: document for document in scored_since(stage, before)}
    assert nearest([by_offset[offset] for offset in range(20, 50)]) == expected(LINES[:50])[20:]
    assert sorted(decode(value).source_offset for value in live(stage).values()) == list(range(50))


def test_the_entries_of_0_1_0_are_skipped_and_deleted(stage: Stage, hashing: Workers) -> None:
    """Entries without an epoch at bare slots, `kp1:` beside the offset: as 0.1.0 leaves them."""
    changelog = f"{stage.name}-novelty-changelog"
    create_topics(stage.bootstrap, {stage.name: 1, changelog: (1, CHANGELOG_CONFIG)})
    stage.produce(rows(LINES[:50]))
    vector = hash_vector("any text").tobytes()
    values = [[1, offset, offset, 0, "kp:trace:1", HashEmbedder.identity.key(), vector] for offset in range(30)]
    entries = [(b"%d" % offset, msgspec.msgpack.encode(value)) for offset, value in enumerate(values)]
    produce(stage.bootstrap, changelog, entries)
    commit(stage, 30, "kp1:0")
    worker = run(hashing, stage, 50)
    assert nearest(documents(stage)) == expected(LINES[30:50])
    assert worker.log().count("skipped 30 changelog records of an earlier version") == 1
    assert len(live(stage)) == 20


def test_an_embedder_that_comes_back_believes_what_is_below_the_time_without(
    stage: Stage, hashing: Workers, workers: Workers
) -> None:
    run(hashing, stage, 20, LINES[:20])
    commit(stage, 10)
    run(workers, stage, 20)  # KP_EMBEDDER=none
    run(workers, stage, 20)
    before = so_far(stage)
    run(hashing, stage, 30, LINES[20:30])
    assert nearest(scored_since(stage, before)) == expected([*LINES[:10], *LINES[20:30]])[10:]


def test_a_capacity_that_changes_both_ways_keeps_the_newest_entries_and_leaves_no_gap(
    stage: Stage, hashing: Workers
) -> None:
    """With restarts between, and fewer traces than slots, so that entries of all capacities are needed at once."""
    total, sequences, past, neighbours = 0, list[int](), list[Any](), list[Any]()
    for capacity, count in ((50, 1200), (20, 700), (20, 100), (200, 300), (200, 10), (30, 100), (30, 10)):
        lines = [LINES[i % len(LINES)] for i in range(total, total + count)]
        worker = hashing({**stage.env, "KP_CACHE_MAX_ELEMENTS": str(capacity)}).wait_ready()
        assert worker.metric("kp_restored_entries_total") == min(len(sequences), capacity + SLACK)
        stage.produce(rows(lines))
        stage.wait_committed(total + count)
        worker.finish()
        total += count
        sequences = sorted(decode(value).sequence for value in live(stage).values())
        assert sequences == list(range(total - len(sequences), total)), f"a gap, or something left, at {capacity}"
        assert capacity <= len(sequences) <= capacity + SLACK
        scorer = PartitionScorer(capacity, None)
        scorer.restore(past)
        for line in lines:
            trace = parse_trace(line)
            scored = scorer.score(trace, hash_vector(embedding_text(trace)), created_at_ms(trace))
            assert scored.sequence is not None
            past.append((scored.sequence, scored.stream_time_ms, cached_id(trace), scored.vector))
            neighbours.append(None if scored.nearest is None else (scored.nearest.trace_id, scored.nearest.similarity))
    assert nearest(documents(stage)) == neighbours

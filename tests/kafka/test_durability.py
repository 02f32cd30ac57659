"""What a worker finds when it comes back: other models' entries, rubbish, lost records, grown topics, refusals."""

import asyncio
import gc
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from aiokafka import TopicPartition
from aiokafka.admin import NewPartitions, RecordsToDelete

from tests.support.crash_worker import HashEmbedder, hash_vector
from tests.support.kafka_fixtures import (
    admin,
    commit_offset,
    consume_all,
    create_topics,
    create_topics_async,
    produce,
    produce_async,
    unique,
    wait_until,
)  # fmt: skip
from tests.support.proxy import Proxy
from tests.support.stage import LINES, Stage, Workers, documents, origins
from worker.core.changelog import MARKER_KEY, SLACK, decode, encode, slot_key, text_hash
from worker.core.restore import Log
from worker.core.trace import embedding_text, parse_trace
from worker.kafka.assignment import AT_ONCE, read_logs
from worker.kafka.topics import CHANGELOG_CONFIG
from worker.lab.broker.embedded_kafka import EmbeddedKafka

MODEL = HashEmbedder.identity.key()


def test_entries_of_another_model_and_rubbish_are_left_out(stage: Stage, hashing: Workers) -> None:
    changelog = f"{stage.name}-novelty-changelog"
    create_topics(stage.bootstrap, {stage.name: 1, changelog: (1, CHANGELOG_CONFIG)})
    stage.produce([(None, line, (), 0) for line in LINES[:3]])
    vector = hash_vector("any")

    def entry(sequence: int, offset: int, model: str) -> tuple[bytes, bytes]:
        value = encode(
            sequence=sequence, source_offset=offset, stream_time_ms=0, trace_id="kp:trace:old", model=model,
            vector=vector,
        )  # fmt: skip
        return slot_key(sequence, 1000), value

    rubbish = [(b"1", b"\x00rubbish"), (b"2", b""), (b"3", entry(3, 0, MODEL)[1][:-3])]
    others = [entry(0, 0, "another-model:00:384:256:fp32"), entry(4, 0, MODEL.replace(":256:", ":512:"))]
    produce(stage.bootstrap, changelog, [*others, *rubbish])
    worker = hashing(stage.env).wait_ready()
    stage.wait_committed(3)
    assert worker.metric("kp_changelog_entries_skipped_total", cause="other_model") == 2
    assert worker.metric("kp_changelog_entries_skipped_total", cause="corrupt") == 3
    assert worker.metric("kp_restored_entries_total") == 0
    assert worker.log().count("of another model (") == 1
    assert worker.log().count("the entry is skipped") == 1
    first = documents(stage)[0]
    assert first["scoring"]["nearest"] is None


def test_at_least_once_replays_with_the_embeddings_of_the_changelog(kafka: EmbeddedKafka, hashing: Workers) -> None:
    """Entries past the committed offset are ready embeddings, bound to their text: the model is asked for no such one.

    Without a hash, or with that of another text, an entry is none.
    """
    stage = Stage(kafka, KP_DELIVERY="at_least_once", KP_TOPIC_PARTITIONS="1")
    changelog = f"{stage.name}-novelty-changelog"
    create_topics(stage.bootstrap, {stage.name: 1, changelog: (1, CHANGELOG_CONFIG)})
    stage.produce([(None, line, (), 0) for line in LINES[:20]])
    odd = np.zeros(384, dtype=np.float32)
    odd[7] = 1.0  # no text has this vector: where it turns up, it came from the changelog
    hashes = [text_hash(embedding_text(parse_trace(LINES[0]))), text_hash("what stood there before"), b""]
    entries = [
        encode(
            sequence=i, source_offset=i, stream_time_ms=0, trace_id=json.loads(LINES[i])["id"], model=MODEL, vector=odd,
            text_hash=hashed,
        )
        for i, hashed in enumerate(hashes)
    ]  # fmt: skip
    produce(stage.bootstrap, changelog, [(slot_key(i, 1000), entry) for i, entry in enumerate(entries)])
    hashing(stage.env).wait_ready()
    stage.wait_committed(20)
    records = consume_all(stage.bootstrap, changelog)
    written = [decode(record.value) for record in records if record.value is not None and record.key != MARKER_KEY]
    assert [entry.source_offset for entry in written] == [0, 1, 2, *range(20)]
    assert written[3].vector == odd.tobytes()
    for i in (1, 2):
        assert written[3 + i].vector == hash_vector(embedding_text(parse_trace(LINES[i]))).tobytes()


def test_the_changelog_stays_bounded(hashing: Workers, long: bool) -> None:
    """After 4 or 20 times the slots the broker's cleaner has kept the topic near one entry a slot."""
    with EmbeddedKafka(config={"log.cleaner.backoff.ms": "200"}) as broker:
        stage = Stage(broker, KP_CACHE_MAX_ELEMENTS="10")
        changelog = f"{stage.name}-novelty-changelog"
        config = {**CHANGELOG_CONFIG, "segment.ms": "300", "min.cleanable.dirty.ratio": "0.01"}
        create_topics(stage.bootstrap, {stage.name: 1, changelog: (1, config)})
        hashing(stage.env).wait_ready()
        slots = 10 + SLACK
        total = (20 if long else 4) * slots
        for start in range(0, total, 4 * slots):
            stage.produce([(None, LINES[i % 1000], (), 0) for i in range(start, min(total, start + 4 * slots))])
            stage.wait_committed(min(total, start + 4 * slots))
        stage.produce([(None, LINES[0], (), 0)])  # rolls the last segment
        deadline = time.monotonic() + 60
        while (kept := len(consume_all(stage.bootstrap, changelog))) > 3 * slots:
            assert time.monotonic() < deadline, f"{kept} entries of {total} for {slots} slots"
            time.sleep(1)
            stage.produce([(None, LINES[0], (), 0)])
        assert kept >= slots


def test_a_source_topic_that_gains_partitions_is_followed(kafka: EmbeddedKafka, hashing: Workers) -> None:
    stage = Stage(kafka, KP_TOPIC_PARTITIONS="1")
    worker = hashing(stage.env | {"TEST_METADATA_MS": "2000"}).wait_ready()
    stage.produce([(None, line, (), 0) for line in LINES[:10]])
    stage.wait_committed(10)
    admin(stage.bootstrap, lambda client: client.create_partitions({stage.name: NewPartitions(3)}))
    worker.wait_metric("kp_assigned_partitions", 3)
    worker.wait_ready()
    stage.produce([(None, line, (), i % 3) for i, line in enumerate(LINES[10:40])])
    stage.wait_committed(40)
    assert len(documents(stage)) == 40
    assert {record.partition for record in consume_all(stage.bootstrap, f"{stage.name}-novelty-changelog")} == {0, 1, 2}


def test_records_that_are_gone_are_counted_as_lost_and_an_offset_behind_the_end_ends_the_worker(
    kafka: EmbeddedKafka, hashing: Workers
) -> None:
    stage = Stage(kafka, KP_TOPIC_PARTITIONS="1")
    worker = hashing(stage.env).wait_ready()
    stage.produce([(None, line, (), 0) for line in LINES[:10]])
    stage.wait_committed(10)
    worker.finish()
    stage.produce([(None, line, (), 0) for line in LINES[10:30]])
    tp = TopicPartition(stage.name, 0)
    admin(stage.bootstrap, lambda client: client.delete_records({tp: RecordsToDelete(17)}))
    worker = hashing(stage.env).wait_ready()
    stage.wait_committed(30)
    assert worker.metric("kp_source_records_lost_total") == 7
    assert "7 records deleted from" in worker.log()
    assert len(documents(stage)) == 23
    worker.finish()
    # The offsets of a deleted topic are deleted with it; an operator's reset too far shows the same.
    commit_offset(stage.bootstrap, stage.name, stage.name, 99)
    worker = hashing(stage.env)
    assert worker.wait() == 1
    assert "committed offset 99, the topic ends at 30" in worker.log()
    assert "--reset-offsets" in worker.log()


def test_the_breaker_stops_a_flood_of_dead_letters(kafka: EmbeddedKafka, workers: Workers) -> None:
    stage = Stage(kafka, KP_DEAD_LETTER_BREAKER_SHARE="0.5", KP_DEAD_LETTER_BREAKER_WINDOW="100")
    worker = workers(stage.env).wait_ready()
    stage.produce([(None, line, (), 0) for line in LINES[:100]])
    stage.produce([(None, b'{"deploy": "broken"}', (), 0) for _ in range(2000)])
    assert worker.wait() == 1
    assert "KP_DEAD_LETTER_BREAKER_SHARE" in worker.log()
    assert len(stage.outputs()["dead-letter"]) <= 51


def test_a_model_that_hangs_turns_liveness_false(kafka: EmbeddedKafka, hashing: Workers) -> None:
    stage = Stage(kafka, KP_STUCK_SECONDS="1")
    worker = hashing({**stage.env, "TEST_EMBED_MS": "600000"}).wait_ready()
    assert worker.get("/healthz")[0] == 200
    stage.produce([(None, LINES[0], (), 0)])
    assert wait_until(lambda: worker.get("/healthz")[0] != 200)
    status, said = worker.get("/healthz")
    assert status == 503
    assert "KP_STUCK_SECONDS" in said


def test_a_60_second_outage_ends_the_worker_with_a_reason_and_loses_nothing(tmp_path: Path, hashing: Workers) -> None:
    """Shorter outages are survived (test_crash.py); here the transaction's timeout is made shorter instead."""
    with EmbeddedKafka(data_dir=tmp_path) as broker:
        stage = Stage(broker, KP_TRANSACTION_TIMEOUT_SECONDS="5")
        worker = hashing(stage.env | {"TEST_EMBED_MS": "5"}).wait_ready()
        stage.produce([(None, line, (), i % 4) for i, line in enumerate(LINES)])
        broker.stop_node(0)
        assert worker.wait(60) == 1
        assert "KP_TRANSACTION_TIMEOUT_SECONDS" in worker.log() or "producer ended" in worker.log()
        assert len(worker.log().splitlines()) < 400, "log lines during an outage are rate-limited"
        del stage.env["KP_TRANSACTION_TIMEOUT_SECONDS"]  # a broker that has just started may answer late
        successor = hashing(stage.env)
        successor.wait_log("no Kafka broker answers")
        assert successor.returncode is None, "a worker waits for its broker at start"
        broker.start_node(0)
        stage.wait_committed(1000)
        assert origins(stage) == [(p, o) for p in range(4) for o in range(250)], worker.log() + successor.log()


async def test_a_restore_from_a_broker_that_falls_silent_ends(kafka: EmbeddedKafka) -> None:
    name = unique("silent")
    await create_topics_async(kafka.bootstrap_servers, {name: 1})
    await produce_async(kafka.bootstrap_servers, name, [(b"1", b"entry")])
    asked, spoken = threading.Event(), threading.Event()

    def silent(_: int, key: int) -> None:
        if key == 1:  # of a fetch
            asked.set()
            spoken.wait(60)

    with Proxy(kafka.bootstrap_servers, silent) as proxy:
        try:
            reading = read_logs({"bootstrap_servers": proxy.url}, name, [0], 1.0, 1 << 20, lambda *read: read)
            with pytest.raises(TimeoutError, match=f"nothing arrived from {name} for 1 s"):
                await asyncio.wait_for(reading, 30)
        finally:
            spoken.set()
    assert asked.is_set()


async def test_logs_are_read_a_few_at_a_time_however_many_partitions_there_are(kafka: EmbeddedKafka) -> None:
    """So memory does not grow with their number. A use may take longer than the brokers may be silent."""
    name = unique("logs")
    await create_topics_async(kafka.bootstrap_servers, {name: 16})
    rows = [(b"%d" % i, b"%d" % i if i % 7 else None, (), n) for n in range(15) for i in range(n)]
    await produce_async(kafka.bootstrap_servers, name, [*rows, (b"1", b"again", (), 14)])
    most = 0

    def use(number: int, log: Log) -> list[tuple[bytes, bytes]]:
        nonlocal most
        most = max(most, sum(type(it) is Log and it.end > 0 for it in gc.get_objects()))
        time.sleep(3.5 if number == 5 else 0)
        return list(log.live())

    read = await read_logs({"bootstrap_servers": kafka.bootstrap_servers}, name, range(16), 3.0, 1 << 20, use)
    assert 1 <= most <= AT_ONCE + 1, "a thread may just let go of the one before"
    assert read.pop(14)[-1] == (b"1", b"again")
    assert read == {n: [(b"%d" % i, b"%d" % i) for i in range(n) if i % 7] for n in range(14)} | {15: []}

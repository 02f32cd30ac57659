"""The worker as a process, on real Kafka: traces in, three topics out."""

from __future__ import annotations

import json
import time

import pytest

from tests.support.commands import header
from tests.support.kafka_fixtures import create_topics
from tests.support.stage import LINES, Stage, Workers, origin
from tests.support.surroundings import DATA
from worker.core.trace import InvalidTrace, Limits, parse_trace
from worker.lab.broker.embedded_kafka import EmbeddedKafka


def test_each_record_comes_out_once_with_its_key_headers_and_time(kafka: EmbeddedKafka, workers: Workers) -> None:
    stage = Stage(kafka)
    worker = workers(stage.env).wait_ready()
    now = int(time.time() * 1000)
    records = [
        (b"key-%d" % (i % 7), line, [("traceparent", b"00-%d" % i), ("n", b"%d" % i)], None, now + i)
        for i, line in enumerate(LINES[:200])
    ]
    records[5] = (b"key-5", b'{"broken":', [("n", b"5")], None, now + 5)
    places = stage.produce(records)
    stage.wait_committed(200)
    metrics = worker.metrics()
    worker.finish()

    outputs = stage.outputs()
    assert sorted(origin(record) for found in outputs.values() for record in found) == sorted(places)
    by_place = dict(zip(places, records, strict=True))
    for kind, found in outputs.items():
        for record in found:
            key, value, headers, _, timestamp = by_place[origin(record)]
            assert (record.key, record.timestamp) == (key, timestamp)
            assert list(record.headers)[: len(headers)] == headers
            if kind == "dead-letter":
                assert record.value == value
                assert header(record, "kp-error-reason") == "not_json"
            else:
                document = json.loads(record.value)
                assert document["scoring"]["decision"] == kind == header(record, "kp-decision")
                score = document["metadata"]["quality_score"]
                assert score == document["scoring"]["score"] == float(header(record, "kp-score"))
                parse_trace(record.value)
    for kind, found in outputs.items():  # the order of each source partition
        for partition in range(4):
            offsets = [origin(record)[1] for record in found if origin(record)[0] == partition]
            assert offsets == sorted(offsets), kind
    assert metrics["kp_records_consumed_total"] == 200
    assert metrics['kp_dead_letters_total{reason="not_json"}'] == len(outputs["dead-letter"]) == 1
    assert sum(v for name, v in metrics.items() if name.startswith("kp_traces_total{")) == 199
    assert metrics["kp_evaluation_duration_seconds_count"] == 200
    assert metrics["kp_end_to_end_latency_seconds_count"] == 200


def refusal(value: bytes | None, key_bytes: int) -> InvalidTrace | None:
    """What the parser says of a value, within what the key leaves of the size limit."""
    try:
        parse_trace(value, Limits(max_bytes=Limits().max_bytes - key_bytes))
    except InvalidTrace as error:
        return error
    return None


def test_bad_input_of_every_kind_becomes_a_dead_letter_and_stops_nothing(
    kafka: EmbeddedKafka, workers: Workers
) -> None:
    stage = Stage(kafka)
    big = (2, {"max.message.bytes": "8000000"})
    create_topics(stage.bootstrap, {stage.name: big})
    cases = [json.loads(line)["raw"] for line in (DATA / "validation_cases.jsonl").read_text("utf-8").splitlines()]
    values: list[bytes | None] = [case.encode("utf-8", "surrogatepass") for case in cases]
    good = LINES[0]
    values += [
        bytes(range(256)) * 10,
        b"\xff\xfe\x00",
        b"[" * 500_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b"[" * 60 + b"]" * 60,
        good[:-1] + b',"padding":"' + b"x" * (1 << 20) + b'"}',
        good[:-1] + b',"padding":"' + b"x" * (3 << 20) + b'"}',
        good[:-1] + b',"padding":"' + b"x" * ((1 << 20) - len(good) - 300) + b'"}',
        None,
        b"",
    ]
    sent = [(b"" if i % 3 else b"k", value, (), i % 2) for i, value in enumerate(values)]
    sent.append((b"last", good, (), 0))
    places = stage.produce(sent)
    workers(stage.env).wait_ready()
    stage.wait_committed(len(sent))
    outputs = stage.outputs()
    found = {origin(record): (kind, record) for kind, records in outputs.items() for record in records}
    assert set(found) == set(places)
    assert sum(len(records) for records in outputs.values()) == len(sent)
    for place, (key, value, _, _) in zip(places, sent, strict=True):
        kind, record = found[place]
        assert record.key == key
        problem = refusal(value, len(key))
        if problem is None:
            assert kind != "dead-letter", header(record, "kp-error-message")
        else:
            assert kind == "dead-letter"
            assert record.value == value, "the bytes of a dead letter are the source's"
            assert header(record, "kp-error-reason") == problem.reason
            assert header(record, "kp-error-message")


def test_sigterm_in_mid_stream_loses_and_repeats_nothing(kafka: EmbeddedKafka, workers: Workers) -> None:
    stage = Stage(kafka)
    worker = workers(stage.env).wait_ready()
    stage.produce([(None, line, (), i % 4) for i, line in enumerate(LINES * 5)])
    for _ in range(3):
        began = time.monotonic()
        worker.finish()
        assert time.monotonic() - began < 10
        worker = workers(stage.env).wait_ready()
        time.sleep(0.05)
    stage.wait_committed(5000)
    found = [origin(record) for records in stage.outputs().values() for record in records]
    assert sorted(found) == [(p, o) for p in range(4) for o in range(1250)]


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_two_workers_share_the_partitions(kafka: EmbeddedKafka, workers: Workers, delivery: str) -> None:
    stage = Stage(kafka, KP_DELIVERY=delivery)
    first = workers(stage.env).wait_ready()
    second = workers(stage.env).wait_ready()
    for worker in (first, second):
        worker.wait_metric("kp_assigned_partitions", 2)
    stage.produce([(None, line, (), i % 4) for i, line in enumerate(LINES)])
    stage.wait_committed(1000)
    shares = [worker.metrics()["kp_records_consumed_total"] for worker in (first, second)]
    assert sorted(shares) == [500, 500]
    second.finish()
    stage.produce([(None, line, (), i % 4) for i, line in enumerate(LINES[:400])])
    stage.wait_committed(1400)
    found = [origin(record) for records in stage.outputs().values() for record in records]
    assert sorted(found) == [(p, o) for p in range(4) for o in range(350)]


def test_the_same_input_gives_the_same_bytes(kafka: EmbeddedKafka, workers: Workers) -> None:
    runs = []
    for chunk in (1000, 90):  # fetched at once, and in small portions
        stage = Stage(kafka)
        workers(stage.env, cold=True).wait_ready()  # with a seed of its own for hashes
        lines = LINES[:300]
        for start in range(0, 300, chunk):
            stage.produce(
                [
                    (b"k", line, (), 1, 1_770_000_000_000 + start + i)
                    for i, line in enumerate(lines[start : start + chunk])
                ]
            )
        stage.wait_committed(300)
        runs.append(
            [
                (kind, record.key, record.value.replace(stage.name.encode(), b"NAME"))
                for kind, records in stage.outputs().items()
                for record in records
            ]
        )
    assert runs[0] == runs[1]


def test_output_topics_may_have_fewer_partitions(kafka: EmbeddedKafka, workers: Workers) -> None:
    stage = Stage(kafka)
    create_topics(stage.bootstrap, {f"{stage.name}.accepted": 1, f"{stage.name}.rejected": 3})
    workers(stage.env).wait_ready()
    stage.produce([(None, line, (), i % 4) for i, line in enumerate(LINES[:400])])
    stage.wait_committed(400)
    outputs = stage.outputs()
    assert sum(len(found) for found in outputs.values()) == 400
    for kind, partitions in (("accepted", 1), ("rejected", 3)):
        for source in range(4):
            mine = [record for record in outputs[kind] if origin(record)[0] == source]
            assert {record.partition for record in mine} == {source % partitions}
            assert [origin(record)[1] for record in mine] == sorted(origin(record)[1] for record in mine)


def test_a_missing_topic_is_named_at_start(kafka: EmbeddedKafka, workers: Workers) -> None:
    stage = Stage(kafka, KP_CREATE_TOPICS="false")
    create_topics(stage.bootstrap, {stage.name: 2, f"{stage.name}.accepted": 1, f"{stage.name}.rejected": 1})
    worker = workers(stage.env)
    assert worker.wait() == 2
    assert f"{stage.name}.dead-letter (KP_DEAD_LETTER_TOPIC)" in worker.log()
    assert "KP_CREATE_TOPICS" in worker.log()
    assert "Traceback" not in worker.log()


def test_a_changelog_that_deletes_is_refused(kafka: EmbeddedKafka, workers: Workers) -> None:
    stage = Stage(kafka)
    create_topics(stage.bootstrap, {f"{stage.name}-novelty-changelog": 4})
    worker = workers(stage.env)
    assert worker.wait() == 2
    assert "cleanup.policy=compact" in worker.log()


def test_an_unknown_broker_a_wrong_setting_and_a_missing_model_end_with_code_2(
    kafka: EmbeddedKafka, workers: Workers
) -> None:
    cases = (
        ({"KP_BOOTSTRAP_SERVERS": "127.0.0.1:1"}, "KP_BOOTSTRAP_SERVERS=127.0.0.1:1"),
        ({"KP_THRESHOLD": "7"}, "KP_THRESHOLD='7'"),
        ({"KP_EMBEDDER": "sentence-transformers", "KP_MODEL": "/nowhere/model"}, "/nowhere/model"),
    )
    started = [(workers({**Stage(kafka).env, **change}), text) for change, text in cases]
    for worker, text in started:
        assert worker.wait(90) in (1, 2), worker.log()
        assert text in worker.log()
        assert "Traceback" not in worker.log(), worker.log()

"""The worker as a process, on real Kafka: traces in, three topics out."""

import json
import time
from collections.abc import Iterator

import pytest

from tests.support.builders import trace_bytes
from tests.support.crash_worker import DIMENSIONS
from tests.support.kafka_fixtures import WorkerProcess, create_topics
from tests.support.output_embedding import decode
from tests.support.stage import LINES, Stage, Workers, documents, header, origin, origins
from tests.support.surroundings import DATA
from worker.core.documents import embedding_bytes
from worker.core.trace import InvalidTrace, Limits, parse_trace
from worker.kafka.topics import OUTPUT_OVERHEAD
from worker.lab.broker.embedded_kafka import EmbeddedKafka


def test_each_record_comes_out_once_with_its_key_headers_and_time(stage: Stage, workers: Workers) -> None:
    """Source partition p goes to partition p modulo their number of each output topic."""
    create_topics(stage.bootstrap, {f"{stage.name}.accepted": 1, f"{stage.name}.rejected": 3})
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
    for (kind, found), partitions in zip(outputs.items(), (1, 3, 4), strict=True):
        for partition in range(4):
            mine = [record for record in found if origin(record)[0] == partition]
            assert {record.partition for record in mine} <= {partition % partitions}
            offsets = [origin(record)[1] for record in mine]
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


def test_bad_input_of_every_kind_becomes_a_dead_letter_and_stops_nothing(stage: Stage, workers: Workers) -> None:
    big = (2, {"max.message.bytes": "8000000"})
    create_topics(stage.bootstrap, {stage.name: big})
    cases = [json.loads(line)["raw"] for line in (DATA / "validation_cases.jsonl").read_text("utf-8").splitlines()]
    values: list[bytes | None] = [case.encode("utf-8", "surrogatepass") for case in cases]
    good, kinds = LINES[0], ("thought", "tool_call", "observation", "error_recovery")
    steps = [{"step_id": i, "type": kinds[i % 4], "content": "step"} for i in range(10_001)]
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
        *(json.dumps(json.loads(good) | {"steps": steps[:count]}).encode() for count in (10_000, 10_001)),
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


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_two_workers_share_the_partitions_and_stops_lose_nothing(
    kafka: EmbeddedKafka, workers: Workers, delivery: str
) -> None:
    stage = Stage(kafka, KP_DELIVERY=delivery)
    first = workers(stage.env).wait_ready()
    second = workers(stage.env).wait_ready()
    for worker in (first, second):
        worker.wait_metric("kp_assigned_partitions", 2)
    stage.produce([(None, line, (), i % 4) for i, line in enumerate(LINES)])
    stage.wait_committed(1000)
    shares = [worker.metrics()["kp_records_consumed_total"] for worker in (first, second)]
    assert sorted(shares) == [500, 500]
    assert origins(stage) == [(p, o) for p in range(4) for o in range(250)]
    stage.produce([(None, line, (), i % 4) for i, line in enumerate(LINES * 4)])
    for worker in (second, first):
        began = time.monotonic()
        worker.finish()
        assert time.monotonic() - began < 10
        workers(stage.env).wait_ready()
    stage.wait_committed(5000)
    found = origins(stage)
    assert (found if delivery == "exactly_once" else sorted(set(found))) == [
        (p, o) for p in range(4) for o in range(1250)
    ]


def test_the_same_input_gives_the_same_bytes(kafka: EmbeddedKafka, workers: Workers) -> None:
    runs = []
    rows = [(b"k", line, (), 1, 1_770_000_000_000 + i) for i, line in enumerate(LINES[:300])]
    for chunk in (1000, 90):  # fetched at once, and in small portions
        stage = Stage(kafka)
        workers(stage.env, cold=True).wait_ready()  # with a seed of its own for hashes
        for start in range(0, 300, chunk):
            stage.produce(rows[start : start + chunk])
        stage.wait_committed(300)
        found = [(kind, record) for kind, records in stage.outputs().items() for record in records]
        runs.append([(kind, it.key, it.value.replace(stage.name.encode(), b"NAME")) for kind, it in found])
    assert runs[0] == runs[1]


def test_a_trace_that_does_not_fit_with_its_embedding_is_a_dead_letter(kafka: EmbeddedKafka, hashing: Workers) -> None:
    stage = Stage(kafka, KP_OUTPUT_EMBEDDING="true", KP_EMBEDDER="auto")
    topic_limit = 20_000
    fits = topic_limit - OUTPUT_OVERHEAD - embedding_bytes(DIMENSIONS)
    small = {"max.message.bytes": str(topic_limit)}
    create_topics(stage.bootstrap, {f"{stage.name}.{kind}": (1, small) for kind in ("accepted", "rejected")})
    hashing(stage.env).wait_ready()
    bare = len(trace_bytes(objective=""))
    stage.produce([(None, trace_bytes(objective="x" * (size - bare)), (), 0) for size in (fits, topic_limit)])
    stage.wait_committed(2)
    (letter,) = stage.outputs()["dead-letter"]
    assert header(letter, "kp-error-reason") == "too_large"
    assert f"accepts {topic_limit}" in header(letter, "kp-error-message")
    (document,) = documents(stage)
    assert len(decode(document)) == DIMENSIONS


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """A worker without a broker: it looks for one for 30 s, while the other tests run."""
    env = {"KP_EMBEDDER": "none", "KP_BOOTSTRAP_SERVERS": "127.0.0.1:1"}
    with WorkerProcess(env, log_path=tmp_path_factory.mktemp("alone") / "log") as worker:
        yield worker


def test_what_a_worker_cannot_start_with_is_named(kafka: EmbeddedKafka, workers: Workers, alone: WorkerProcess) -> None:
    """More that ends it: test_doctor.py."""
    lacking, deleting, other = Stage(kafka, KP_CREATE_TOPICS="false"), Stage(kafka), Stage(kafka)
    create_topics(lacking.bootstrap, dict.fromkeys([lacking.name, f"{lacking.name}.accepted"], 2))
    create_topics(deleting.bootstrap, {f"{deleting.name}-novelty-changelog": 4})
    model = {"KP_EMBEDDER": "sentence-transformers", "KP_MODEL": "/nowhere/model"}
    cases = [
        (lacking.env, (f"{lacking.name}.dead-letter (KP_DEAD_LETTER_TOPIC)", "KP_CREATE_TOPICS")),
        (deleting.env, ("cleanup.policy=compact",)),
        (other.env | {"KP_THRESHOLD": "7"}, ("KP_THRESHOLD='7'",)),
        (other.env | model, ("/nowhere/model",)),
    ]
    started = [(workers(env), texts) for env, texts in cases]
    for worker, texts in [*started, (alone, ("KP_BOOTSTRAP_SERVERS=127.0.0.1:1",))]:
        assert worker.wait(90) == 2, worker.log()
        assert all(text in worker.log() for text in texts), worker.log()
        assert "Traceback" not in worker.log(), worker.log()

"""Records that a topic refuses for good: each comes out once, as a dead letter, and changes nothing for the others."""

from __future__ import annotations

import time
from typing import Any

import pytest
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from tests.support.commands import header
from tests.support.kafka_fixtures import admin, create_topics, produce
from tests.support.raw_batches import RawRecord, encode_batch, produce_batch
from tests.support.refused_records import STRICT, Kind, good, program, results, run, scoring, stage_of
from tests.support.stage import OUTPUTS, Stage, Workers, origin
from worker.lab.broker.embedded_kafka import EmbeddedKafka

pytestmark = pytest.mark.timeout(300)


def reason(name: str) -> str:
    """Return the reason of a kind's dead letter."""
    if name.startswith("bad"):
        return "not_json"  # a topic's limit is a matter of outputs: what is read is judged by KP_MAX_MESSAGE_BYTES
    return "refused_by_topic"


def fill(stage: Stage, records: list[Kind], now: int) -> None:
    """Put the records on partition 0, and as many good ones on partition 1."""
    rows: list[tuple[Any, ...]] = []
    for n, (key, value, headers, later) in enumerate(records):
        rows.append((key, value, headers, 0, now + n + later))
        rows.append((b"other%d" % n, good(n), [("n", b"%d" % n)], 1, now + n))
    produce(stage.bootstrap, stage.name, rows)


@pytest.mark.sample(1)
@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_each_kind_and_each_pair_of_kinds_between_good_records(
    kafka: EmbeddedKafka, workers: Workers, delivery: str
) -> None:
    records = program()
    now = int(time.time() * 1000)
    strict = stage_of(kafka, STRICT, KP_DELIVERY=delivery)
    plain = stage_of(kafka, {}, KP_DELIVERY=delivery)
    for stage in (strict, plain):
        fill(stage, [record for _, record in records], now)
    worker = run(strict, workers, 2 * len(records))
    worker.wait_metric("kp_records_consumed_total", 2 * len(records))
    metrics = worker.metrics()
    worker.terminate()
    assert worker.wait() == 0, worker.log()
    run(plain, workers, 2 * len(records))

    found, expected = results(strict), results(plain)
    assert set(found) == set(expected) == {(p, n) for p in (0, 1) for n in range(len(records))}
    if delivery == "exactly_once":
        assert {len(each) for each in found.values()} == {1}
    refused = 0
    for n, (name, (_, value, _, _)) in enumerate(records):
        for kind, record in found[0, n]:
            if name == "good":
                assert kind != "dead-letter", (n, header(record, "kp-error-message"))
                assert scoring(record) == scoring(expected[0, n][0][1]), n
                continue
            assert kind == "dead-letter", (n, name)
            assert header(record, "kp-error-reason") == reason(name), (n, name)
            if name.startswith("null") or "bad, null" in name:
                assert record.key == f"{strict.name}/0/{n}".encode()
                assert header(record, "kp-source-key") == "null"
            if "large" not in name:
                assert record.value == value, "nothing but key and time had to go"
            else:
                assert value.startswith(record.value)
            if name == "bad, large key, future":
                assert "key (" in header(record, "kp-error-dropped")
            elif name == "bad, large header":
                assert "headers (1" in header(record, "kp-error-dropped")
        refused += name != "good" and reason(name) == "refused_by_topic"
    for n in range(len(records)):
        for _, record in found[1, n]:
            assert scoring(record) == scoring(expected[1, n][0][1])
    if delivery == "exactly_once":
        for records_of in strict.outputs().values():
            for partition in (0, 1):
                offsets = [origin(record)[1] for record in records_of if record.partition == partition]
                assert offsets == sorted(offsets)
        assert metrics['kp_dead_letters_total{reason="refused_by_topic"}'] == refused
        scored = sum(count for name, count in metrics.items() if name.startswith("kp_traces_total{"))
        assert scored == len(records) + sum(name == "good" for name, _ in records)


def test_the_large_kinds_that_no_client_sends(kafka: EmbeddedKafka, workers: Workers) -> None:
    """As Kafka's defaults take them on the source, and the topics that the worker creates on the outputs."""
    stage = Stage(kafka, KP_MAX_MESSAGE_BYTES="900000")
    create_topics(stage.bootstrap, {stage.name: 1})
    batches = [
        encode_batch([RawRecord(b"bad", b"k", [(b"", b"")] * 700_000)], "gzip"),
        encode_batch([RawRecord(b"bad", b"k" * (3 << 20))], "gzip"),
        encode_batch([RawRecord(b"bad", b"k" * 1_048_300)]),
        encode_batch([RawRecord(b"x" * 1_040_000, b"k", [("\N{GRINNING FACE}".encode() * 560, b"")])]),
    ]
    for n, batch in enumerate(batches):
        produce(stage.bootstrap, stage.name, [(b"k", good(2 * n))])
        produce_batch(stage.bootstrap, stage.name, 0, batch)
    worker = run(stage, workers, 2 * len(batches))
    found = results(stage)
    assert {place: len(each) for place, each in found.items()} == {(0, n): 1 for n in range(2 * len(batches))}
    letters = [record for _, record in (found[0, n][0] for n in range(1, 2 * len(batches), 2))]
    assert [header(record, "kp-source-offset") for record in letters] == ["1", "3", "5", "7"]
    assert letters[0].value == b"bad"
    assert header(letters[0], "kp-error-dropped") == "headers (700000 with 0 bytes)"
    assert header(letters[1], "kp-error-dropped") == f"key ({3 << 20} bytes)"
    assert all(found[0, n][0][0] != "dead-letter" for n in range(0, 2 * len(batches), 2))
    assert worker.returncode is None


@pytest.mark.sample(2)
@pytest.mark.parametrize("topic", ["accepted", "novelty-changelog", "source"])
def test_a_backlog_goes_through_a_topic_that_takes_small_batches(
    kafka: EmbeddedKafka, workers: Workers, topic: str
) -> None:
    stage = Stage(kafka)
    small = {"max.message.bytes": "65536"}
    if topic == "accepted":
        create_topics(stage.bootstrap, {f"{stage.name}.{kind}": (1, small) for kind in ("accepted", "rejected")})
    if topic == "novelty-changelog":
        create_topics(stage.bootstrap, {f"{stage.name}-{topic}": (1, {**small, "cleanup.policy": "compact"})})
    create_topics(stage.bootstrap, {stage.name: (1, small if topic == "source" else {})})
    for start in (0, 1000):
        produce(stage.bootstrap, stage.name, [(b"k", good(n, 1000), (), 0) for n in range(start, start + 1000)])
    run(stage, workers, 2000)
    found = results(stage)
    assert {place: [kind != "dead-letter" for kind, _ in each] for place, each in found.items()} == {
        (0, n): [True] for n in range(2000)
    }


def alter(bootstrap: str, topic: str, **config: str) -> None:
    admin(bootstrap, lambda it: it.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, config)]))


@pytest.mark.sample(1)
@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_a_limit_that_is_lowered_while_the_worker_runs(kafka: EmbeddedKafka, workers: Workers, delivery: str) -> None:
    strict, plain = (stage_of(kafka, {}, KP_DELIVERY=delivery) for _ in range(2))
    now = int(time.time() * 1000)
    records: list[Kind] = [(b"k%d" % n, good(n, 30_000 if n % 10 == 3 else 1000), [], 0) for n in range(100)]
    records[55] = (b"k55", b"bad" * 20_000, [], 0)
    worker = workers(strict.env, module="tests.support.crash_worker").wait_ready()
    produce(strict.bootstrap, strict.name, [(b"k", good(0), (), p, now) for p in (0, 1)])
    strict.wait_committed(2)
    for kind in ("accepted", "rejected", "dead-letter"):
        alter(strict.bootstrap, f"{strict.name}.{kind}", **{"max.message.bytes": "20000"})
    time.sleep(1)  # the broker takes it over a little later
    produce(plain.bootstrap, plain.name, [(b"k", good(0), (), p, now) for p in (0, 1)])
    for stage in (strict, plain):
        fill(stage, records, now)
    strict.wait_committed(202)
    run(plain, workers, 202)
    assert worker.returncode is None
    found, expected = results(strict), results(plain)
    for n, (_, value, _, _) in enumerate(records, 1):
        for kind, record in found[0, n]:
            if len(value) > 20_000:
                assert kind == "dead-letter"
                assert header(record, "kp-error-reason") == ("not_json" if value.startswith(b"bad") else "too_large")
                assert value.startswith(record.value)
                assert len(record.value) > 15_000
            else:
                assert scoring(record) == scoring(expected[0, n][0][1])
    assert set(found) == set(expected)
    if delivery == "exactly_once":
        assert {len(each) for each in found.values()} == {1}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_limit_that_is_raised_again_needs_no_restart(kafka: EmbeddedKafka, workers: Workers, when: str) -> None:
    """Lowered before the worker starts, or after: what fits is published, and once it is raised all else, too."""
    stage = stage_of(kafka, {})
    outputs = [f"{stage.name}.{kind}" for kind in OUTPUTS]

    def limit(size: int) -> None:
        for topic in outputs:
            alter(stage.bootstrap, topic, **{"max.message.bytes": str(size)})
        time.sleep(1)  # the broker takes it over a little later

    if when == "before":
        limit(4000)
    worker = workers(stage.env, module="tests.support.crash_worker").wait_ready()
    first = [(b"k", good(1), (), 1)]  # one that does not fit would have the limit looked up, and again in a minute
    if when == "after":
        limit(4000)
        first.append((b"k", good(2, 30_000), (), 1))  # a refusal shows that the limit is lower
    produce(stage.bootstrap, stage.name, first)
    stage.wait_committed(len(first))
    limit(1_048_588)
    produce(stage.bootstrap, stage.name, [(b"k", good(3, 30_000), (), 1), (b"k", b"bad" * 10_000, (), 1)])
    stage.wait_committed(len(first) + 2)
    assert worker.returncode is None, worker.log()
    found = results(stage)
    kinds_and_sizes = [(kind, len(record.value) > 30_000) for _, [(kind, record)] in sorted(found.items())]
    letter = [("dead-letter", False)] if when == "after" else []
    assert kinds_and_sizes[0][0] != "dead-letter"
    assert kinds_and_sizes[1:-2] == letter
    assert kinds_and_sizes[-2][0] != "dead-letter"
    assert len(found[1, len(first) + 1][0][1].value) == 30_000, "a dead letter with the whole value"


def test_a_changelog_that_refuses_one_entry_and_a_dead_letter_topic_that_refuses_the_last_resort_end_the_worker(
    kafka: EmbeddedKafka, workers: Workers
) -> None:
    for topic, value in (("-novelty-changelog", good(1)), (".dead-letter", b"bad")):
        stage = Stage(kafka)
        create_topics(
            stage.bootstrap, {f"{stage.name}{topic}": (4, {"max.message.bytes": "200", "cleanup.policy": "compact"})}
        )
        worker = workers(stage.env, module="tests.support.crash_worker").wait_ready()
        stage.produce([(b"k", value, (), 0)])
        assert worker.wait() == 1
        assert f"topic {stage.name}{topic} refuses" in worker.log()
        assert "raise its max.message.bytes" in worker.log()
        assert "Traceback" not in worker.log(), worker.log()

"""Hostile records that a broker takes, and records that a topic refuses for good, between good ones: each comes out
once, scored or as a dead letter, and no other record notices."""

import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from tests.support.hostile import (
    KINDS,
    LARGE,
    MAX_BATCH_BYTES,
    REFUSED,
    REFUSING,
    Sent,
    good_record,
    refused_program,
    results,
    scores,
    scoring,
    send,
    send_scored,
    stage_of,
)
from tests.support.kafka_fixtures import WorkerProcess, admin, create_topics, produce, wait_until
from tests.support.raw_batches import CODECS, RawRecord, encode_batch, produce_batch
from tests.support.stage import OUTPUTS, Desk, Stage, Workers, header, origin
from worker.lab.broker.embedded_kafka import EmbeddedKafka

pytestmark = pytest.mark.timeout(300)

CRASH_WORKER = "tests.support.crash_worker"


def check_letter(sent: Sent, offset: int, letter: Any, topic: str) -> None:
    """The reason, and all of the record that the dead letter can hold."""
    assert header(letter, "kp-error-reason") == sent.reason, sent.kind
    if sent.reason == "batch_too_large":
        assert letter.value is None
        assert header(letter, "kp-source-key") == "null"
        assert int(header(letter, "kp-source-first-offset")) <= offset == int(header(letter, "kp-source-last-offset"))
        return
    if sent.reason == "unreadable":
        return
    if sent.reason == "bad_header":
        assert letter.headers[1] == ("caf\\xe9", b"value")
    if sent.record.key is None:
        assert letter.key == f"{topic}/0/{offset}".encode()
        assert header(letter, "kp-source-key") == "null"
    elif dropped := KINDS[sent.kind].dropped:
        assert dropped in header(letter, "kp-error-dropped")
    else:
        assert letter.key == sent.record.key
    assert sent.record.value is not None
    if "large" in sent.kind:
        assert sent.record.value.startswith(letter.value)
    else:
        assert letter.value == sent.record.value, "nothing but key and time had to go"


@pytest.mark.sample(1)
@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_every_kind_comes_out_once_and_changes_no_other(
    kafka: EmbeddedKafka, workers: Workers, delivery: str, seed: int
) -> None:
    """Each kind, and each pair of refused ones next to each other; the topics of the second stage refuse nothing."""
    strict, plain = (stage_of(kafka, config, KP_DELIVERY=delivery) for config in (REFUSING, {}))
    now = int(time.time() * 1000)
    names = refused_program()
    for kind in KINDS.keys() - REFUSED.keys():  # other neighbours each time
        names.insert(random.Random(f"{seed}{kind}").randrange(len(names)), kind)
    names.append("good, none")
    sent = send(strict, names, now)
    send_scored(plain, sent.values())
    large = send(plain, [*LARGE], now, len(names))  # its topics are as the worker creates them
    for stage in (strict, plain):
        others = [good_record(n, now + n) for n in range(100)]
        produce_batch(stage.bootstrap, stage.name, 1, encode_batch(others))
    worker = workers(strict.env, module=CRASH_WORKER).wait_ready()
    strict.wait_committed(len(others) + max(sent) + 1)
    worker.wait_metric("kp_records_consumed_total", len(others) + len(sent))
    metrics = worker.metrics()
    worker.finish()
    assert "Traceback" not in worker.log()
    assert "caf" not in worker.log()
    run(plain, workers, len(others) + max(large) + 1)

    found, expected = results(strict), results(plain)
    assert found.keys() == {(0, offset) for offset in sent} | {(1, n) for n in range(len(others))}
    if delivery == "exactly_once":
        assert {len(each) for each in found.values()} == {1}
    for stage, each, of_stage in ((strict, sent, found), (plain, large, expected)):
        for offset, it in each.items():
            for kind, record in of_stage[0, offset]:
                assert (kind == "dead-letter") == (it.reason is not None), it.kind
                if it.reason is not None:
                    check_letter(it, offset, record, stage.name)
    scored = [scoring(found[0, offset][0][1]) for offset, it in sent.items() if it.reason is None]
    assert scored == scores(expected, sent.values())
    for n in range(len(others)):
        assert scoring(found[1, n][0][1]) == scoring(expected[1, n][0][1])
    if delivery == "exactly_once":
        for records in strict.outputs().values():
            for partition in (0, 1):
                offsets = [origin(record)[1] for record in records if record.partition == partition]
                assert offsets == sorted(offsets)
        for reason, count in Counter(it.reason for it in sent.values() if it.reason).items():
            assert metrics[f'kp_dead_letters_total{{reason="{reason}"}}'] == count
        traces = sum(count for name, count in metrics.items() if name.startswith("kp_traces_total{"))
        assert traces == len(others) + len(scored)


def test_a_restart_in_the_middle_loses_and_repeats_nothing(kafka: EmbeddedKafka, workers: Workers, seed: int) -> None:
    rng = random.Random(seed)
    stage = stage_of(kafka, REFUSING, KP_COMMIT_INTERVAL_SECONDS="0", KP_SESSION_TIMEOUT_SECONDS="2")
    names = list(KINDS)
    rng.shuffle(names)
    sent = send(stage, names, int(time.time() * 1000))
    for _ in range(4):
        worker = workers(stage.env).wait_ready()
        time.sleep(rng.random() / 2)
        worker.kill()
    workers(stage.env).wait_ready()
    stage.wait_committed(max(sent) + 1)
    assert {offset: [kind != "dead-letter" for kind, _ in each] for (_, offset), each in results(stage).items()} == {
        offset: [it.reason is None] for offset, it in sent.items()
    }


def test_redrive_sends_what_has_a_value_and_refuses_the_rest_in_words(desk: Desk, tmp_path: Path) -> None:
    worker = WorkerProcess(desk.env | {"KP_MAX_BATCH_BYTES": str(MAX_BATCH_BYTES)}, ("run",), log_path=tmp_path / "log")
    with worker:
        worker.wait_ready()
        good = good_record(1, int(time.time() * 1000))
        for partition, kind in ((0, "latin 1, zstd"), (1, "too large, gzip"), (1, "wrong offsets")):
            produce_batch(desk.bootstrap, desk.name, partition, KINDS[kind].batch(good))
        assert wait_until(lambda: len(desk.read("dead-letter")) >= 5), worker.log()
        done = desk.run("redrive", "--execute")
        assert "3 dead letters redriven" in done.stdout, done.stdout + done.stderr
        text = " ".join((done.stdout + done.stderr).split())
        assert "offsets 0 to 2 of partition 1" in text
        assert "KP_MAX_BATCH_BYTES" in text
        assert "no client can read" in text

        def redriven() -> int:
            scored = [*desk.read("accepted"), *desk.read("rejected")]
            return sum(any(name == "kp-redrive-count" for name, _ in record.headers) for record in scored)

        assert wait_until(lambda: redriven() >= 3), worker.log()
    report = ["report", "--from-kafka", "--page", str(tmp_path / "page.html")]
    for command in (["tail", "--dead-letters", "--no-follow"], report):
        done = desk.run(*command)
        assert done.returncode == 0, done.stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_all_codecs_on_every_topic_with_restarts(kafka: EmbeddedKafka, workers: Workers, delivery: str) -> None:
    for codec in CODECS.keys() - {"none"}:
        stage = Stage(kafka, KP_DELIVERY=delivery)
        packed = {"compression.type": codec}
        topics = dict.fromkeys([stage.name, *(f"{stage.name}.{kind}" for kind in OUTPUTS)], (2, packed))
        changelog = (2, {**packed, "cleanup.policy": "compact"})
        create_topics(stage.bootstrap, {**topics, f"{stage.name}-novelty-changelog": changelog})
        count = 0
        for _ in range(2):
            worker = workers(stage.env).wait_ready()
            for used in CODECS:  # mixed in one partition, too
                some = [good_record(n, int(time.time() * 1000)) for n in range(5)]
                for partition in (0, 1):
                    batch = encode_batch([*some, RawRecord(b"bad")], used)
                    produce_batch(stage.bootstrap, stage.name, partition, batch)
                    count += 6
            stage.wait_committed(count)
            worker.finish()
        outputs = stage.outputs()
        assert sum(map(len, outputs.values())) == count
        assert len(outputs["dead-letter"]) == count // 6


def value(number: int, size: int = 0) -> bytes | None:
    return good_record(number, 0, size).value


def run(stage: Stage, workers: Workers, count: int) -> WorkerProcess:
    worker = workers(stage.env, module=CRASH_WORKER).wait_ready()
    stage.wait_committed(count, 120)
    return worker


@pytest.mark.sample(2)
@pytest.mark.parametrize("topic", ["accepted", "novelty-changelog", "source"])
def test_a_backlog_goes_through_a_topic_that_takes_small_batches(stage: Stage, workers: Workers, topic: str) -> None:
    small = {"max.message.bytes": "65536"}
    if topic == "accepted":
        create_topics(stage.bootstrap, {f"{stage.name}.{kind}": (1, small) for kind in ("accepted", "rejected")})
    if topic == "novelty-changelog":
        create_topics(stage.bootstrap, {f"{stage.name}-{topic}": (1, {**small, "cleanup.policy": "compact"})})
    create_topics(stage.bootstrap, {stage.name: (1, small if topic == "source" else {})})
    for start in (0, 1000):
        produce(stage.bootstrap, stage.name, [(b"k", value(n, 1000), (), 0) for n in range(start, start + 1000)])
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
    values = [value(n, 30_000 if n % 10 == 3 else 1000) for n in range(100)]
    values[55] = b"bad" * 20_000
    worker = workers(strict.env, module=CRASH_WORKER).wait_ready()
    produce(strict.bootstrap, strict.name, [(b"k", value(0), (), p, now) for p in (0, 1)])
    strict.wait_committed(2)
    for kind in ("accepted", "rejected", "dead-letter"):
        alter(strict.bootstrap, f"{strict.name}.{kind}", **{"max.message.bytes": "20000"})
    time.sleep(1)  # the broker takes it over a little later
    produce(plain.bootstrap, plain.name, [(b"k", value(0), (), p, now) for p in (0, 1)])
    for stage in (strict, plain):
        rows = [(b"k%d" % n, each, (), 0, now + n) for n, each in enumerate(values)]
        rows += [(b"k%d" % n, value(n), (), 1, now + n) for n in range(100)]
        produce(stage.bootstrap, stage.name, rows)
    strict.wait_committed(202)
    run(plain, workers, 202)
    assert worker.returncode is None
    found, expected = results(strict), results(plain)
    for n, each in enumerate(values, 1):
        for kind, record in found[0, n]:
            if len(each) > 20_000:
                assert kind == "dead-letter"
                assert header(record, "kp-error-reason") == ("not_json" if each.startswith(b"bad") else "too_large")
                assert each.startswith(record.value)
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
    worker = workers(stage.env, module=CRASH_WORKER).wait_ready()
    first = [(b"k", value(1), (), 1)]  # one that does not fit would have the limit looked up, and again in a minute
    if when == "after":
        limit(4000)
        first.append((b"k", value(2, 30_000), (), 1))  # a refusal shows that the limit is lower
    produce(stage.bootstrap, stage.name, first)
    stage.wait_committed(len(first))
    limit(1_048_588)
    produce(stage.bootstrap, stage.name, [(b"k", value(3, 30_000), (), 1), (b"k", b"bad" * 10_000, (), 1)])
    stage.wait_committed(len(first) + 2)
    assert worker.returncode is None, worker.log()
    found = results(stage)
    kinds_and_sizes = [(kind, len(record.value) > 30_000) for _, [(kind, record)] in sorted(found.items())]
    letter = [("dead-letter", False)] if when == "after" else []
    assert kinds_and_sizes[0][0] != "dead-letter"
    assert kinds_and_sizes[1:-2] == letter
    assert kinds_and_sizes[-2][0] != "dead-letter"
    assert len(found[1, len(first) + 1][0][1].value) == 30_000, "a dead letter with the whole value"


@pytest.mark.parametrize(("topic", "refused"), [("-novelty-changelog", value(1)), (".dead-letter", b"bad")])
def test_a_topic_that_refuses_an_entry_or_the_last_resort_ends_the_worker(
    stage: Stage, workers: Workers, topic: str, refused: bytes
) -> None:
    small = {"max.message.bytes": "200", "cleanup.policy": "compact"}
    create_topics(stage.bootstrap, {f"{stage.name}{topic}": (4, small)})
    worker = workers(stage.env, module=CRASH_WORKER).wait_ready()
    stage.produce([(b"k", refused, (), 0)])
    assert worker.wait() == 1
    assert f"topic {stage.name}{topic} refuses" in worker.log()
    assert "raise its max.message.bytes" in worker.log()
    assert "Traceback" not in worker.log(), worker.log()

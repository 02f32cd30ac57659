"""Hostile records that a broker takes, between good ones: each comes out once, as a dead letter or scored, and no other
record notices. What the worker cannot publish is tests/kafka/test_refused_records.py."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Desk, header
from tests.support.kafka_fixtures import WorkerProcess, consume_all_async, create_topics, wait_until
from tests.support.raw_batches import (
    RawRecord,
    batch_of,
    blank_bomb,
    encode_batch,
    encode_record,
    produce_batch,
    varint,
)
from tests.support.stage import LINES, OUTPUTS, Stage, Workers, origin
from worker.kafka.reading.fetches import Consumer, Reading
from worker.lab.broker.embedded_kafka import EmbeddedKafka

T0 = 1_790_000_000_000
LIMIT = 2 << 20
"""KP_MAX_BATCH_BYTES of these tests."""


def good(number: int) -> RawRecord:
    return RawRecord(LINES[number], b"key-%d" % number, ((b"n", b"%d" % number),), int(time.time() * 1000))


def latin1(codec: str) -> tuple[bytes, dict[int, str]]:
    bad = RawRecord(LINES[7], b"k", ((b"a", b"1"), (b"caf\xe9", b"2")))
    return encode_batch([good(1), bad, good(2), bad, bad, good(3)], codec), {
        1: "bad_header", 3: "bad_header", 4: "bad_header",
    }  # fmt: skip


def too_large(codec: str) -> tuple[bytes, dict[int, str]]:
    return encode_batch([RawRecord(b" " * LIMIT), good(4), good(5)], codec), {2: "batch_too_large"}


def two_documents(codec: str) -> tuple[bytes, dict[int, str]]:
    """Two good records whose batch fits, behind each other."""
    return encode_batch([good(8), good(9)], codec), {}


def bomb(_: str) -> tuple[bytes, dict[int, str]]:
    return blank_bomb(80 << 20), {0: "batch_too_large"}


def many_headers(_: str) -> tuple[bytes, dict[int, str]]:
    count = 1_500_000
    body = b"\0\0\0" + varint(1) + b"k" + varint(2) + b"{}" + varint(count) + b"\0\0" * count
    now = int(time.time() * 1000)
    return batch_of(gzip.compress(varint(len(body)) + body), 1, "gzip", now, now), {0: "batch_too_large"}


def wrong_offsets(_: str) -> tuple[bytes, dict[int, str]]:
    now = int(time.time() * 1000)
    parts = [encode_record(good(n), delta, 0) for n, delta in ((1, 0), (2, 1), (3, 700))]
    return batch_of(b"".join(parts), 3, "none", now, now), {2: "unreadable"}


def same_offsets(_: str) -> tuple[bytes, dict[int, str]]:
    """Three records, all with the first offset; the others' place says which were theirs."""
    now = int(time.time() * 1000)
    parts = [encode_record(good(n), 0, 0) for n in (1, 2, 3)]
    return batch_of(b"".join(parts), 3, "none", now, now), {1: "unreadable", 2: "unreadable"}


KINDS: dict[str, Callable[[], tuple[bytes, dict[int, str]]]] = {
    **{f"latin1-{codec}": (lambda codec=codec: latin1(codec)) for codec in ("none", "gzip", "snappy", "lz4", "zstd")},
    **{f"too_large-{codec}": (lambda codec=codec: too_large(codec)) for codec in ("gzip", "snappy", "lz4", "zstd")},
    **{
        f"good-{codec}": (lambda codec=codec: two_documents(codec))
        for codec in ("none", "gzip", "snappy", "lz4", "zstd")
    },
    "bomb": lambda: bomb(""),
    "many_headers": lambda: many_headers(""),
    "wrong_offsets": lambda: wrong_offsets(""),
    "same_offsets": lambda: same_offsets(""),
}


def send(stage: Stage, kinds: Sequence[str], partition: int) -> dict[int, str | None]:
    """Send the kinds between good records; return what each offset must become: a reason, or None for scored."""
    expected: dict[int, str | None] = {}
    for number, kind in enumerate(kinds):
        ((_, offset),) = stage.produce([(b"k", LINES[20 + number], (), partition)])
        expected[offset] = None
        batch, reasons = KINDS[kind]()
        count = int.from_bytes(batch[57:61], "big")
        first = produce_batch(stage.bootstrap, stage.name, partition, batch)
        whole = "batch_too_large" in reasons.values()
        for delta in range(count):
            if not whole or delta == count - 1:
                expected[first + delta] = reasons.get(delta)
    ((_, offset),) = stage.produce([(b"k", LINES[99], (), partition)])
    expected[offset] = None
    return expected


def results(stage: Stage) -> dict[int, list[str | None]]:
    found: dict[int, list[str | None]] = {}
    for kind, records in stage.outputs().items():
        for record in records:
            reason = header(record, "kp-error-reason") if kind == "dead-letter" else None
            found.setdefault(origin(record)[1], []).append(reason)
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_every_kind_comes_out_once_and_changes_no_other(
    kafka: EmbeddedKafka, workers: Workers, delivery: str, seed: int
) -> None:
    stage = Stage(kafka, KP_MAX_BATCH_BYTES=str(LIMIT), KP_DELIVERY=delivery)
    create_topics(stage.bootstrap, {stage.name: (1, {"max.message.bytes": "8000000"})})
    kinds = list(KINDS)
    random.Random(seed).shuffle(kinds)  # other neighbours each time
    expected = send(stage, kinds, 0)
    worker = workers(stage.env).wait_ready()
    stage.wait_committed(max(expected) + 1)
    worker.terminate()
    assert worker.wait() == 0, worker.log()
    assert results(stage) == {offset: [reason] for offset, reason in expected.items()}
    assert "Traceback" not in worker.log()
    assert "caf" not in worker.log()
    letters = {origin(record)[1]: record for record in stage.outputs()["dead-letter"]}
    for offset, record in letters.items():
        if expected[offset] == "bad_header":
            assert (record.key, record.value) == (b"k", LINES[7])
            assert record.headers[:2] == (("a", b"1"), ("caf\\xe9", b"2"))
        elif expected[offset] == "batch_too_large":
            assert (record.key, record.value) == (None, None)
            assert int(header(record, "kp-source-first-offset")) <= offset
            assert int(header(record, "kp-source-last-offset")) == offset

    alone = Stage(kafka)  # the good ones by themselves: the same scores in the same order
    scored = by_offset(stage)
    source = {r.offset: r for r in read_good(stage, set(scored))}
    alone_worker = workers(alone.env).wait_ready()
    places = alone.produce(
        [(source[o].key, source[o].value, source[o].headers, 0, source[o].timestamp_ms) for o in sorted(scored)]
    )
    alone.wait_committed(len(places))
    alone_worker.terminate()
    assert list(by_offset(alone).values()) == list(scored.values())


def by_offset(stage: Stage) -> dict[int, tuple[str, object]]:
    """Return decision and score of the scored records, in the order of their source."""
    found = {
        origin(record)[1]: (kind, json.loads(record.value)["scoring"]["score"])
        for kind, records in stage.outputs().items()
        if kind != "dead-letter"
        for record in records
    }
    return dict(sorted(found.items()))


def read_good(stage: Stage, offsets: set[int]) -> list[Any]:
    """Read the source with the tolerant reader."""
    reader = partial(Consumer, reading=Reading(tolerant=True))
    found = asyncio.run(consume_all_async(stage.bootstrap, stage.name, make=reader))
    return [record for record in found if record.offset in offsets]


def test_a_restart_in_the_middle_loses_and_repeats_nothing(kafka: EmbeddedKafka, workers: Workers, seed: int) -> None:
    rng = random.Random(seed)
    stage = Stage(kafka, KP_MAX_BATCH_BYTES=str(LIMIT), KP_COMMIT_INTERVAL_SECONDS="0")
    create_topics(stage.bootstrap, {stage.name: (1, {"max.message.bytes": "8000000"})})
    kinds = list(KINDS) * 3
    rng.shuffle(kinds)
    expected = send(stage, kinds, 0)
    for _ in range(4):
        worker = workers(stage.env).wait_ready()
        time.sleep(rng.random() / 2)
        worker.kill()
    workers(stage.env).wait_ready()
    stage.wait_committed(max(expected) + 1)
    assert results(stage) == {offset: [reason] for offset, reason in expected.items()}


def test_redrive_sends_what_has_a_value_and_refuses_the_rest_in_words(kafka: EmbeddedKafka, tmp_path: Path) -> None:
    desk = Desk(kafka)
    worker = WorkerProcess(desk.env | {"KP_MAX_BATCH_BYTES": str(LIMIT)}, ("run",), log_path=tmp_path / "log")
    with worker:
        worker.wait_ready()
        produce_batch(desk.bootstrap, desk.name, 0, latin1("zstd")[0])
        produce_batch(desk.bootstrap, desk.name, 1, too_large("gzip")[0])
        produce_batch(desk.bootstrap, desk.name, 1, wrong_offsets("")[0])
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
    for codec in ("gzip", "snappy", "lz4", "zstd"):
        stage = Stage(kafka, KP_DELIVERY=delivery)
        packed = {"compression.type": codec}
        topics = dict.fromkeys([stage.name, *(f"{stage.name}.{kind}" for kind in OUTPUTS)], (2, packed))
        changelog = (2, {**packed, "cleanup.policy": "compact"})
        create_topics(stage.bootstrap, {**topics, f"{stage.name}-novelty-changelog": changelog})
        count = 0
        for _ in range(2):
            worker = workers(stage.env).wait_ready()
            for used in ("none", "gzip", "snappy", "lz4", "zstd"):  # mixed in one partition, too
                for partition in (0, 1):
                    produce_batch(
                        stage.bootstrap, stage.name, partition,
                        encode_batch([good(n) for n in range(5)] + [RawRecord(b"bad")], used),
                    )  # fmt: skip
                    count += 6
            stage.wait_committed(count)
            worker.terminate()
            assert worker.wait() == 0, worker.log()
        outputs = stage.outputs()
        assert sum(map(len, outputs.values())) == count
        assert len(outputs["dead-letter"]) == count // 6

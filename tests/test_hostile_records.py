"""Hostile records that a broker takes, between good ones: each comes out once, as a dead letter or scored, and no other
record notices. What the worker cannot publish is tests/test_refused_records.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from tests.kafka_fixtures import create_topics
from tests.raw_batches import RawRecord, batch_of, blank_bomb, encode_batch, encode_record, produce_batch, varint
from tests.test_worker import LINES, Stage, Workers, header, origin
from worker.embedded_kafka import EmbeddedKafka

pytestmark = pytest.mark.kafka

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
    import gzip

    return batch_of(gzip.compress(varint(len(body)) + body), 1, "gzip", now, now), {0: "batch_too_large"}


def wrong_offsets(_: str) -> tuple[bytes, dict[int, str]]:
    now = int(time.time() * 1000)
    parts = [encode_record(good(n), delta, 0) for n, delta in ((1, 0), (2, 0), (3, 700))]
    return batch_of(b"".join(parts), 3, "none", now, now), {}


def broken_inside(codec: str) -> tuple[bytes, dict[int, str]]:
    now = int(time.time() * 1000)
    body = b"\0" + varint(0) + varint(1) + varint(-1) + varint(2) + b"{}" + varint(1) + varint(50) + b"n" + varint(0)
    broken = varint(len(body)) + body
    parts = [encode_record(good(1), 0, 0), broken, encode_record(good(2), 2, 0)]
    from tests.raw_batches import compress

    return batch_of(compress(b"".join(parts), codec), 3, codec, now, now), {1: "unreadable"}


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
    "broken_inside-none": lambda: broken_inside("none"),
    "broken_inside-gzip": lambda: broken_inside("gzip"),
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


@pytest.mark.parametrize("kind", ["wrong_offsets", "broken_inside-none", "broken_inside-gzip", "many_headers"])
def test_probe(kafka: EmbeddedKafka, kind: str) -> None:
    stage = Stage(kafka)
    create_topics(stage.bootstrap, {stage.name: (1, {"max.message.bytes": "8000000"})})
    try:
        print(kind, send(stage, [kind], 0))
    except Exception as error:
        print(kind, repr(error))


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_every_kind_comes_out_once(kafka: EmbeddedKafka, workers: Workers, delivery: str) -> None:
    stage = Stage(kafka, KP_MAX_BATCH_BYTES=str(LIMIT), KP_DELIVERY=delivery)
    create_topics(stage.bootstrap, {stage.name: (1, {"max.message.bytes": "8000000"})})
    kinds = [kind for kind in KINDS if kind not in ("wrong_offsets", "broken_inside-none", "broken_inside-gzip")]
    expected = send(stage, kinds, 0)
    worker = workers(stage.env).wait_ready()
    stage.wait_committed(max(expected) + 1)
    worker.terminate()
    assert worker.wait() == 0, worker.log()
    assert results(stage) == {offset: [reason] for offset, reason in expected.items()}
    assert "Traceback" not in worker.log()

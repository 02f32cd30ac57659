"""No record and no batch exhausts the worker's memory: peak RSS with the real model, at the attack's partition count.

Each run draws one of the attacks, and looks for 12 s. `make test-long` runs all of them for 30 s.
"""

import time
from collections.abc import Callable

import pytest
from aiokafka.errors import NotLeaderForPartitionError

from tests.support.builders import trace_bytes
from tests.support.figures import peak_memory_mib
from tests.support.kafka_fixtures import WorkerProcess, committed, create_topics, unique
from tests.support.raw_batches import RawRecord, blank_bomb, encode_batch, produce_batch
from tests.support.surroundings import topic_settings
from worker.lab.broker.embedded_kafka import EmbeddedKafka

MIB = 1 << 20
PEAK_MIB = 700
FIRST_SECONDS = 120.0
"""How long the first record may take: on a busy machine longer than a measurement lasts."""


def trace(size: int = 0) -> bytes:
    """Return a valid trace whose text has about so many bytes."""
    return trace_bytes(created_at=int(time.time() * 1000), objective="very repetitive text " * (size // 21 + 1))


def large_header() -> RawRecord:
    return RawRecord(trace(), b"k", ((b"h", b"x" * 1_000_000),))


def many_headers() -> bytes:
    return encode_batch([RawRecord(b"{}", b"k", ((b"", b""),) * 700_000)], "gzip")


ATTACKS: dict[str, tuple[int, int, Callable[[], bytes]]] = {
    "bomb of 900 MiB": (1, 1, lambda: blank_bomb(900 * MIB)),
    "48 x 100 kB gzip, above": (48, 1, lambda: blank_bomb(98 * MIB)),
    "48 x gzip, one value, below": (48, 1, lambda: blank_bomb(60 * MIB)),
    "48 x gzip, 120 traces of 500 kB, below": (48, 1, lambda: encode_batch([RawRecord(trace(500_000))] * 120, "gzip")),
    "48 x gzip, 10 traces of 1 MB, below": (48, 1, lambda: encode_batch([RawRecord(trace(990_000))] * 10, "gzip")),
    "4 x 300 traces, 1 MB in a header": (4, 300, lambda: encode_batch([large_header()])),
    "4 x 300 traces, 1 MB in a header, gzip": (4, 6, lambda: encode_batch([large_header()] * 50, "gzip")),
    "4 x 300 traces, 1 MB keys": (4, 300, lambda: encode_batch([RawRecord(trace(), b"x" * 1_000_000)])),
    "700,000 empty headers": (1, 3, many_headers),
    "48 x 700,000 empty headers": (48, 1, many_headers),
    "48 x 30 traces of 1 MB": (48, 30, lambda: encode_batch([RawRecord(trace(990_000))])),
}
"""Partitions, how often a batch is sent to each, and the batch."""


def send(bootstrap: str, topic: str, partition: int, batch: bytes) -> None:
    for attempt in range(50):
        try:
            produce_batch(bootstrap, topic, partition, batch)
        except NotLeaderForPartitionError:  # many new partitions take a moment
            if attempt == 49:
                raise
            time.sleep(0.2)
        else:
            return


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ATTACKS)
def test_peak(kafka: EmbeddedKafka, workers: Callable[..., WorkerProcess], long: bool, name: str) -> None:
    partitions, times, make = ATTACKS[name]
    bootstrap, topic, batch = kafka.bootstrap_servers, unique("attack"), make()
    create_topics(bootstrap, {topic: partitions})
    for number in range(partitions * times):
        send(bootstrap, topic, number // times, batch)
    sent = partitions * times * int.from_bytes(batch[57:61], "big")
    worker = workers(topic_settings(bootstrap, topic), cold=True)
    worker.wait_ready()
    before, began, done = peak_memory_mib(worker.pid), time.monotonic(), 0
    while done < sent and time.monotonic() - began < ((30 if long else 12) if done else FIRST_SECONDS):
        time.sleep(0.5)
        assert worker.returncode is None, worker.log()
        done = sum(committed(bootstrap, topic, topic).values())
    seconds, peak = time.monotonic() - began, peak_memory_mib(worker.pid)
    worker.finish()
    assert "Traceback" not in worker.log(), worker.log()
    print(f"{name}: peak {peak:.0f} MiB (ready: {before:.0f}), {done} of {sent} records in {seconds:.0f} s")
    assert peak < PEAK_MIB
    assert done

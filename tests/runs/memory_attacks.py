"""What a producer can send to exhaust a worker's memory, and the peak that it reaches.

`python -m tests.runs.memory_attacks [NAME...]` measures them all with the real model, and prints one line each.
"""

from __future__ import annotations

import asyncio
import gzip
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from aiokafka.errors import NotLeaderForPartitionError

from tests.support.builders import trace_bytes
from tests.support.figures import peak_memory_mib
from tests.support.kafka_fixtures import WorkerProcess, committed, create_topics, unique
from tests.support.raw_batches import RawRecord, batch_of, blank_bomb, encode_batch, produce_batches, varint
from tests.support.surroundings import topic_settings
from worker.lab.broker.embedded_kafka import EmbeddedKafka

Send = Callable[[str, str], int]
MIB = 1 << 20


async def _patiently(bootstrap: str, topic: str, partition: int, batch: bytes) -> None:
    for attempt in range(50):
        try:
            await produce_batches(bootstrap, topic, [(partition, batch)])
        except NotLeaderForPartitionError:  # many new partitions take a moment
            if attempt == 49:
                raise
            await asyncio.sleep(0.2)
        else:
            return


def repeated(partitions: int, times: int, batch: bytes) -> Send:
    """Send a batch so many times to each partition; return how many records that is."""

    async def send(bootstrap: str, topic: str) -> None:
        for partition in range(partitions):
            for _ in range(times):
                await _patiently(bootstrap, topic, partition, batch)

    def run(bootstrap: str, topic: str) -> int:
        asyncio.run(send(bootstrap, topic))
        return partitions * times * int.from_bytes(batch[57:61], "big")

    return run


def many_headers(count: int) -> bytes:
    """Return a batch of one record with so many empty headers."""
    body = b"\0\0\0" + varint(1) + b"k" + varint(2) + b"{}" + varint(count) + b"\0\0" * count
    now = int(time.time() * 1000)
    return batch_of(gzip.compress(varint(len(body)) + body), 1, "gzip", now, now)


def trace(size: int = 0) -> bytes:
    """Return a valid trace whose text has about so many bytes."""
    return trace_bytes(created_at=int(time.time() * 1000), objective="very repetitive text " * (size // 21 + 1))


ATTACKS: dict[str, tuple[int, Callable[[], Send]]] = {
    "bomb of 900 MiB": (1, lambda: repeated(1, 1, blank_bomb(900 * MIB))),
    "48 x 100 kB gzip, above": (48, lambda: repeated(48, 1, blank_bomb(98 * MIB))),
    "48 x gzip, one value, below": (48, lambda: repeated(48, 1, blank_bomb(60 * MIB))),
    "48 x gzip, 120 traces of 500 kB, below": (
        48, lambda: repeated(48, 1, encode_batch([RawRecord(trace(500_000))] * 120, "gzip")),
    ),
    "48 x gzip, 10 traces of 1 MB, below": (
        48, lambda: repeated(48, 1, encode_batch([RawRecord(trace(990_000))] * 10, "gzip")),
    ),
    "4 x 300 traces, 1 MB in a header": (
        4, lambda: repeated(4, 300, encode_batch([RawRecord(trace(), b"k", ((b"h", b"x" * 1_000_000),))])),
    ),
    "4 x 300 traces, 1 MB in a header, gzip": (
        4, lambda: repeated(4, 6, encode_batch([RawRecord(trace(), b"k", ((b"h", b"x" * 1_000_000),))] * 50, "gzip")),
    ),
    "4 x 300 traces, 1 MB keys": (
        4, lambda: repeated(4, 300, encode_batch([RawRecord(trace(), b"x" * 1_000_000)])),
    ),
    "700,000 empty headers": (1, lambda: repeated(1, 3, many_headers(700_000))),
    "48 x 700,000 empty headers": (48, lambda: repeated(48, 1, many_headers(700_000))),
    "48 x 30 traces of 1 MB": (48, lambda: repeated(48, 30, encode_batch([RawRecord(trace(990_000))]))),
}  # fmt: skip


FIRST_SECONDS = 120.0
"""How long the first record may take: on a busy machine longer than a measurement lasts."""


def measure(
    kafka: EmbeddedKafka, partitions: int, send: Send, settings: Mapping[str, str], seconds: float = 120.0
) -> tuple[float, float, int, int, float]:
    """Return the peak (MiB) before and after, records committed and sent, seconds. Raises AssertionError on exit."""
    name = unique("attack")
    create_topics(kafka.bootstrap_servers, {name: partitions})
    sent = send(kafka.bootstrap_servers, name)
    env = topic_settings(kafka.bootstrap_servers, name, **settings)
    with tempfile.TemporaryDirectory() as folder:
        worker = WorkerProcess(env, ("run",), log_path=Path(folder) / "log", cold=True)
        try:
            worker.wait_ready()
            before, began = peak_memory_mib(worker.pid), time.monotonic()
            done = 0
            while done < sent and time.monotonic() - began < (seconds if done else max(seconds, FIRST_SECONDS)):
                time.sleep(0.5)
                assert worker.returncode is None, worker.log()
                done = sum(committed(kafka.bootstrap_servers, name, name).values())
            took, peak = time.monotonic() - began, peak_memory_mib(worker.pid)
            worker.finish()
            assert "Traceback" not in worker.log(), worker.log()
        finally:
            worker.close()
    return before, peak, done, sent, took


def main(names: list[str]) -> None:
    """Measure those attacks whose name holds one of the words."""
    with EmbeddedKafka() as kafka:
        for name, (partitions, make) in ATTACKS.items():
            if not names or any(word in name for word in names):
                before, peak, done, sent, took = measure(kafka, partitions, make(), {})
                print(f"{name}: peak {peak:.0f} MiB (idle {before:.0f}), {done} of {sent} in {took:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

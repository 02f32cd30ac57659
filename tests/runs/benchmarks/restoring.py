"""e) Restore of 4 x 1000 and 64 x 1000 cache entries: the call itself, and a cold start until /readyz."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.structs import OffsetAndMetadata

from tests.runs.benchmarks.bench import STAND_IN, Bench
from tests.runs.benchmarks.clients import is_ready
from tests.runs.benchmarks.job import DIMENSIONS, TABLE, table_vector
from tests.runs.benchmarks.watch import BenchmarkError, wait_until
from tests.runs.benchmarks.workload import Topics, fill, fresh_topics
from tests.support.kafka_fixtures import WorkerProcess
from worker.core.changelog import encode, slot_key
from worker.core.passes import Committed, Pass
from worker.kafka.restore import Position, restore

ENTRIES: Final = 1000


def run(bench: Bench) -> None:
    """Part e."""
    prepared = {}
    for partitions in (4, 64) if bench.seconds >= 1 else (4,):
        prepared[partitions] = with_full_caches(bench, partitions)
    for _ in bench.each_round():
        for partitions, (source_name, topics) in prepared.items():
            seconds = asyncio.run(_restore(bench.bootstrap, topics, partitions))
            with restored_worker(bench, topics, source_name, partitions) as (_, started):
                pass
            row = f"{partitions} x {ENTRIES}"
            bench.results.add("e", row, restore_s=seconds, start_to_ready_s=started)
            bench.say(f"{row}: restore {seconds:.2f} s, start to ready {started:.2f} s")
    values = bench.results.values["e"][f"4 x {ENTRIES}"]["restore_s"]
    bench.results.goal("e", f"restore of 4 x {ENTRIES}, s", values, 1.0, "max")


def with_full_caches(bench: Bench, partitions: int) -> tuple[str, Topics]:
    """Return a source with committed offsets, and topics whose changelog has full caches."""
    source = asyncio.run(fill(bench.bootstrap, [b"{}"] * (partitions * ENTRIES), partitions))
    topics = asyncio.run(fresh_topics(bench.bootstrap, partitions))
    asyncio.run(_prepare(bench.bootstrap, topics, source.name, partitions))
    return source.name, topics


async def _prepare(bootstrap: str, topics: Topics, source: str, partitions: int) -> None:
    """Write the entries of `ENTRIES` committed traces a partition, and commit their offsets."""
    now = time.time_ns() // 1_000_000
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, enable_idempotence=True, linger_ms=5) as producer:
        for sequence in range(ENTRIES):
            for partition in range(partitions):
                value = encode(
                    sequence=sequence,
                    source_offset=sequence,
                    stream_time_ms=now,
                    trace_id=f"kp:trace:{partition}-{sequence}",
                    model=TABLE.key(),
                    vector=table_vector(f"{partition} {sequence}"),
                    pass_number=1,
                )
                await producer.send(topics.changelog, value, slot_key(sequence, ENTRIES, 1), partition)
    async with AIOKafkaConsumer(
        bootstrap_servers=bootstrap, group_id=topics.group, enable_auto_commit=False
    ) as consumer:
        tps = [TopicPartition(source, partition) for partition in range(partitions)]
        consumer.assign(tps)
        await consumer.commit({tp: OffsetAndMetadata(ENTRIES, Pass(number=1).metadata(now)) for tp in tps})


async def _restore(bootstrap: str, topics: Topics, partitions: int) -> float:
    committed = Committed(None, None, 1)
    positions = {number: Position(ENTRIES, None, 0, ENTRIES, committed) for number in range(partitions)}
    began = time.perf_counter()
    found = await restore(
        {"bootstrap_servers": bootstrap}, topics.changelog, positions, TABLE.key(), DIMENSIONS, ENTRIES, 60.0, 64 << 20
    )
    seconds = time.perf_counter() - began
    if any(len(restored.entries) != ENTRIES for restored in found.values()) or len(found) != partitions:
        raise BenchmarkError("the restore did not find every entry")
    return seconds


@contextmanager
def restored_worker(
    bench: Bench, topics: Topics, source: str, partitions: int
) -> Iterator[tuple[WorkerProcess, float]]:
    """Start a worker that restores full caches; yield it when it is ready, and how long that took (s)."""
    with bench.worker(topics, source, {}, STAND_IN) as process:
        seconds = wait_until(lambda: process.returncode is not None or is_ready(process), 300, "ready")
        restored = process.metric("kp_restored_entries_total") if process.returncode is None else -1
        if restored != partitions * ENTRIES:
            raise BenchmarkError(f"restored {restored} of {partitions * ENTRIES} entries:\n{process.log()[-2000:]}")
        yield process, seconds

"""e) Restore of 4 and 64 full caches of 1000 entries: the call itself, and a cold start until /readyz."""

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
from worker.core.changelog import SLACK, Committed, SourceEpoch, encode, slot_key
from worker.core.restore import Log, ModelCache, SourcePosition, restore
from worker.core.scorer import PartitionScorer
from worker.kafka.assignment import read_logs

ENTRIES: Final = 1000
LIVE: Final = ENTRIES + SLACK  # records of such a cache on the changelog


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
    source = asyncio.run(fill(bench.bootstrap, [b"{}"] * (partitions * LIVE), partitions))
    topics = asyncio.run(fresh_topics(bench.bootstrap, partitions))
    asyncio.run(_prepare(bench.bootstrap, topics, source.name, partitions))
    return source.name, topics


async def _prepare(bootstrap: str, topics: Topics, source: str, partitions: int) -> None:
    """Write the entries of `LIVE` committed traces a partition, and commit their offsets."""
    now = time.time_ns() // 1_000_000
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, enable_idempotence=True, linger_ms=5) as producer:
        for sequence in range(LIVE):
            for partition in range(partitions):
                value = encode(
                    sequence=sequence,
                    source_offset=sequence,
                    stream_time_ms=now,
                    trace_id=f"kp:trace:{partition}-{sequence}",
                    model=TABLE.key(),
                    vector=table_vector(f"{partition} {sequence}"),
                    epoch=1,
                )
                await producer.send(topics.changelog, value, slot_key(sequence, ENTRIES, 1), partition)
    async with AIOKafkaConsumer(
        bootstrap_servers=bootstrap, group_id=topics.group, enable_auto_commit=False
    ) as consumer:
        tps = [TopicPartition(source, partition) for partition in range(partitions)]
        consumer.assign(tps)
        await consumer.commit({tp: OffsetAndMetadata(LIVE, SourceEpoch(number=1).metadata(now)) for tp in tps})


async def _restore(bootstrap: str, topics: Topics, partitions: int) -> float:
    where = SourcePosition(LIVE, committed=Committed(None, None, 1))
    cache = ModelCache(TABLE.key(), DIMENSIONS, ENTRIES)

    def use(number: int, log: Log) -> int:
        scorer = PartitionScorer(ENTRIES, dimensions=DIMENSIONS)
        scorer.restore(restore(log, where, cache).cache())
        return len(scorer.cache)

    began = time.perf_counter()
    found = await read_logs({"bootstrap_servers": bootstrap}, topics.changelog, range(partitions), 60.0, 64 << 20, use)
    seconds = time.perf_counter() - began
    if set(found.values()) != {ENTRIES} or len(found) != partitions:
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
        if restored != partitions * LIVE:
            raise BenchmarkError(f"restored {restored} of {partitions * LIVE} entries:\n{process.log()[-2000:]}")
        yield process, seconds

"""e) Restore of full caches, j) many partitions on one worker: throughput, wait for a turn, cost."""

import asyncio
import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean
from typing import Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.structs import OffsetAndMetadata

from tests.runs.benchmarks.bench import STAND_IN, Bench, cpu_seconds, quantile, read_outputs, wait_ready_or_ended
from tests.runs.benchmarks.clients import MODEL_SETTINGS
from tests.runs.benchmarks.embedding import traces_a_commit
from tests.runs.benchmarks.job import DIMENSIONS, TABLE, table_vector
from tests.runs.benchmarks.workload import BenchmarkError, Topics, check_count, documents
from tests.support.figures import memory_mib
from tests.support.kafka_fixtures import WorkerProcess
from worker.core.changelog import SLACK, Committed, SourceEpoch, encode, slot_key
from worker.core.restore import Log, ModelCache, SourcePosition, restore
from worker.core.scorer import PartitionScorer
from worker.kafka.assignment import read_logs

ENTRIES: Final = 1000
LIVE: Final = ENTRIES + SLACK  # records of such a cache on the changelog


def restores(bench: Bench) -> None:
    """Part e: restore of 4 and 64 full caches: the call itself, and a cold start until /readyz."""
    prepared = [with_full_caches(bench, partitions) for partitions in ((4, 64) if bench.seconds >= 1 else (4,))]
    for _ in bench.each_round():
        for topics in prepared:
            seconds = asyncio.run(_restore(bench.bootstrap, topics))
            with restored_worker(bench, topics) as (_, started):
                pass
            row = f"{topics.partitions} x {ENTRIES}"
            bench.results.add("e", row, restore_s=seconds, start_to_ready_s=started)
    values = bench.results.values["e"][f"4 x {ENTRIES}"]["restore_s"]
    bench.results.goal("e", f"restore of 4 x {ENTRIES}, s", values, 1.0, "max")


def with_full_caches(bench: Bench, partitions: int) -> Topics:
    """Return topics with committed offsets of the source, whose changelog has full caches."""
    topics = bench.topics(partitions=partitions)
    bench.produce(topics, [b"{}"] * (partitions * LIVE))
    asyncio.run(_prepare(bench.bootstrap, topics))
    return topics


async def _prepare(bootstrap: str, topics: Topics) -> None:
    """Write the entries of `LIVE` committed traces a partition, and commit their offsets."""
    now = time.time_ns() // 1_000_000
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, enable_idempotence=True, linger_ms=5) as producer:
        for sequence in range(LIVE):
            for partition in range(topics.partitions):
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
        tps = [TopicPartition(topics.source, partition) for partition in range(topics.partitions)]
        consumer.assign(tps)
        await consumer.commit({tp: OffsetAndMetadata(LIVE, SourceEpoch(number=1).metadata(now)) for tp in tps})


async def _restore(bootstrap: str, topics: Topics) -> float:
    where = SourcePosition(LIVE, committed=Committed(None, 1))
    cache = ModelCache(TABLE.key(), DIMENSIONS, ENTRIES)

    def use(number: int, log: Log) -> int:
        scorer = PartitionScorer(ENTRIES, dimensions=DIMENSIONS)
        scorer.restore(restore(log, where, cache).cache())
        return len(scorer.cache)

    began = time.perf_counter()
    partitions = range(topics.partitions)
    restored = await read_logs({"bootstrap_servers": bootstrap}, topics.changelog, partitions, 60.0, 64 << 20, use)
    seconds = time.perf_counter() - began
    if restored != dict.fromkeys(partitions, ENTRIES):
        raise BenchmarkError("the restore did not find every entry")
    return seconds


@contextmanager
def restored_worker(bench: Bench, topics: Topics) -> Iterator[tuple[WorkerProcess, float]]:
    """Start a worker that restores full caches; yield it when it is ready, and how long that took (s)."""
    with bench.worker(topics, {}, STAND_IN) as process:
        seconds = wait_ready_or_ended(process, 300)
        restored = process.metric("kp_restored_entries_total") if process.returncode is None else -1
        if restored != topics.partitions * LIVE:
            raise BenchmarkError(f"restored {restored} of {topics.partitions * LIVE} entries:\n{process.log()[-2000:]}")
        yield process, seconds


FEW: Final = 4
MANY: Final = 64
MOST: Final = 256

WARM_UP: Final = 128
"""Traces before the clock starts: two of each partition."""


def many(bench: Bench) -> None:
    count = max(MANY * 16, round(bench.seconds * 100))  # at least 16 of each partition
    values = documents(count + WARM_UP, broken=False)
    random.Random(1).shuffle(values)
    with ExitStack() as stack:
        held = {partitions: _Held(bench, partitions, stack) for partitions in (FEW, MANY)}
        for worker in held.values():
            worker.work_off(values[:WARM_UP])
        for number in bench.each_round():
            for partitions in (FEW, MANY) if number % 2 == 0 else (MANY, FEW):
                bench.results.add("j", _row(partitions), **held[partitions].work_off(values[WARM_UP:]))
    prepared = [with_full_caches(bench, partitions) for partitions in (FEW, MANY, MOST)]
    for _ in range(min(bench.rounds, 3)):  # the cost of partitions hardly varies
        for topics in prepared:
            _footprint(bench, topics)
    _goals(bench)


def _row(partitions: int) -> str:
    return f"backlog of {partitions} partitions"


class _Held:
    """A worker with its topics, which is frozen (SIGSTOP) while the other one works.

    It lives through all rounds: to create and delete some hundred partitions costs the broker seconds.
    """

    def __init__(self, bench: Bench, partitions: int, stack: ExitStack) -> None:
        self._bench = bench
        self._topics = bench.topics(partitions=partitions)
        settings = {**MODEL_SETTINGS, "KP_SESSION_TIMEOUT_SECONDS": "600"}
        self._process = stack.enter_context(bench.worker(self._topics, settings))
        stack.callback(self._process.cont)  # a frozen one does not stop
        self._process.wait_ready(120)
        self._done = 0
        self._process.stop()

    def work_off(self, values: list[bytes]) -> dict[str, float]:
        """Work off a backlog of all partitions, with the model; return what it took."""
        bench, topics, count = self._bench, self._topics, len(values)
        row = _row(topics.partitions)
        self._done += count
        began = time.time()
        bench.produce(topics, values)
        self._process.cont()
        before = self._process.metrics()
        timeline = bench.follow(topics, self._done, [self._process])
        after = self._process.metrics()
        self._process.stop()
        outputs = asyncio.run(read_outputs(bench.bootstrap, topics, began))
        check_count(row, outputs, count)
        cpu, broker = timeline.cpu_between(outputs.first, timeline[-1].at)
        rate = (count - 1) / (timeline[-1].at - outputs.first)
        return {
            "traces_s": rate,
            "traces_a_commit": traces_a_commit(before, after),
            "worker_CPU_ms_a_trace": cpu / count * 1e3,
            "broker_CPU_ms_a_trace": broker / count * 1e3,
            "wait_for_a_turn_p50_s": quantile(before, after, "kp_turn_wait_seconds", 0.5) / 1e3,
            "wait_for_a_turn_p99_s": quantile(before, after, "kp_turn_wait_seconds", 0.99) / 1e3,
        }


def _footprint(bench: Bench, topics: Topics) -> None:
    """Start a worker that restores full caches; then it idles."""
    with restored_worker(bench, topics) as (process, started):
        restoring = process.metric("kp_restore_duration_seconds_sum")
        cpu, broker, at = cpu_seconds(process.pid), cpu_seconds(bench.broker.pid(0)), time.monotonic()
        time.sleep(5)
        took = time.monotonic() - at
        bench.results.add(
            "j",
            f"{topics.partitions} partitions with full caches, idle",
            start_to_ready_s=started,
            restore_s=restoring,
            RSS_MiB=memory_mib(process.pid),
            threads=len(os.listdir(f"/proc/{process.pid}/task")),
            connections=_connections(process.pid),
            worker_CPU_percent=(cpu_seconds(process.pid) - cpu) / took * 100,
            broker_CPU_percent=(cpu_seconds(bench.broker.pid(0)) - broker) / took * 100,
        )


def _connections(pid: int) -> int:
    """Return how many TCP connections a process has."""
    mine = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(descriptor)
        if target.startswith("socket:["):
            mine.add(target[len("socket:[") : -1])
    established = "01"
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return sum(row[3] == established and row[9] in mine for row in rows)


def _goals(bench: Bench) -> None:
    r = bench.results
    rows = _row(MANY), _row(FEW)
    r.goal("j", f"{MANY} partitions / {FEW}, traces/s", r.ratio("j", "traces_s", *rows), 0.95, "min")
    few, many, most = (r.values["j"][f"{n} partitions with full caches, idle"] for n in (FEW, MANY, MOST))
    memory = [(a - b) / (MANY - FEW) for a, b in zip(many["RSS_MiB"], few["RSS_MiB"], strict=True)]
    r.goal("j", "RSS of a partition with a full cache, MiB", memory, 2.4, "max")  # docs/capacity.md
    costs = [
        f"{(fmean(most[name]) - fmean(few[name])) / (MOST - FEW):.3g} {unit}"
        for name, unit in (
            ("start_to_ready_s", "s of the start"),
            ("RSS_MiB", "MiB"),
            ("connections", "connections"),
            ("worker_CPU_percent", "% of a core"),
            ("broker_CPU_percent", "% of a core of the broker"),
        )
    ]
    r.note("j", f"a partition with a full cache costs an idle worker {', '.join(costs)}")

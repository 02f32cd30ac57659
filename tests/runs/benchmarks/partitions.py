"""j) Many partitions on one worker: throughput with the model, the wait of a partition for its turn, what one costs."""

from __future__ import annotations

import asyncio
import os
import random
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Final

from tests.runs.benchmarks import latency
from tests.runs.benchmarks.bench import PRODUCT, Bench
from tests.runs.benchmarks.clients import MODEL_SETTINGS
from tests.runs.benchmarks.embedding import traces_a_commit
from tests.runs.benchmarks.restoring import restored_worker, with_full_caches
from tests.runs.benchmarks.watch import cpu_seconds, memory_mib, read_outputs
from tests.runs.benchmarks.workload import Source, Topics, check_count, documents, fill, fresh_topics, produce

FEW: Final = 4
MANY: Final = 64
MOST: Final = 256

EACH: Final = 16
"""Fewest traces of one partition in a backlog."""

WARM_UP: Final = 128
"""Traces before the clock starts: two of each partition."""

IDLE_SECONDS: Final = 5.0

FOOTPRINT_ROUNDS: Final = 3
"""Most rounds in which the cost of partitions is measured; it hardly varies."""


def run(bench: Bench) -> None:
    """Part j."""
    count = max(MANY * EACH, round(bench.seconds * 100))
    values = documents(count + WARM_UP, broken_every=0)
    random.Random(1).shuffle(values)
    with ExitStack() as stack:
        held = {partitions: _Held(bench, partitions, stack) for partitions in (FEW, MANY)}
        for worker in held.values():
            worker.work_off(values[:WARM_UP])
        for number in bench.each_round():
            for partitions in (FEW, MANY) if number % 2 == 0 else (MANY, FEW):
                bench.results.add("j", _row(partitions), **held[partitions].work_off(values[WARM_UP:]))
    prepared = {partitions: with_full_caches(bench, partitions) for partitions in (FEW, MANY, MOST)}
    for _ in range(min(bench.rounds, FOOTPRINT_ROUNDS)):
        for partitions, (source, topics) in prepared.items():
            _footprint(bench, partitions, source, topics)
    _goals(bench)


def _row(partitions: int) -> str:
    return f"backlog of {partitions} partitions"


class _Held:
    """A worker with its topics, which is frozen (SIGSTOP) while the other one works.

    It lives through all rounds: to create and delete some hundred partitions costs the broker seconds.
    """

    def __init__(self, bench: Bench, partitions: int, stack: ExitStack) -> None:
        self._bench = bench
        self._partitions = partitions
        self._source = asyncio.run(fill(bench.bootstrap, [], partitions)).name
        self._topics = asyncio.run(fresh_topics(bench.bootstrap, partitions))
        settings = {**MODEL_SETTINGS, "KP_SESSION_TIMEOUT_SECONDS": "600"}
        self._process = stack.enter_context(bench.worker(self._topics, self._source, settings, PRODUCT))
        stack.callback(self._process.cont)  # a frozen one does not stop
        self._process.wait_ready(120)
        self._values: list[bytes] = []
        self._process.stop()

    def work_off(self, values: list[bytes]) -> dict[str, float]:
        """Work off a backlog of all partitions, with the model; return what it took."""
        bench, partitions, count = self._bench, self._partitions, len(values)
        new = Source(self._source, partitions, values, time.time_ns() // 1_000_000)
        self._values += values
        began = time.time()
        asyncio.run(produce(bench.bootstrap, new))
        self._process.cont()
        before = self._process.metrics()
        timeline = bench.follow(self._topics, replace(new, values=self._values), [self._process])
        after = self._process.metrics()
        self._process.stop()
        found = asyncio.run(read_outputs(bench.bootstrap, self._topics.outputs, partitions, began))
        check_count(_row(partitions), found, count)
        (cpu0, broker0), (cpu1, broker1) = timeline.cpu_at(found.first), timeline.cpu_at(timeline[-1].at)
        rate = (count - 1) / (timeline[-1].at - found.first)
        bench.say(f"{_row(partitions)}: {rate:.1f}/s")
        return {
            "traces_s": rate,
            "traces_a_commit": traces_a_commit(before, after),
            "worker_CPU_ms_a_trace": (cpu1 - cpu0) / count * 1e3,
            "broker_CPU_ms_a_trace": (broker1 - broker0) / count * 1e3,
            "wait_for_a_turn_p50_s": latency.quantile(before, after, "kp_turn_wait_seconds", 0.5) / 1e3,
            "wait_for_a_turn_p99_s": latency.quantile(before, after, "kp_turn_wait_seconds", 0.99) / 1e3,
        }


def _footprint(bench: Bench, partitions: int, source: str, topics: Topics) -> None:
    """Start a worker that restores full caches; then it idles."""
    with restored_worker(bench, topics, source, partitions) as (process, started):
        restoring = process.metric("kp_restore_duration_seconds_sum")
        cpu, broker, at = cpu_seconds(process.pid), cpu_seconds(bench.broker.pid(0)), time.monotonic()
        time.sleep(IDLE_SECONDS)
        took = time.monotonic() - at
        bench.results.add(
            "j",
            f"{partitions} partitions with full caches, idle",
            start_to_ready_s=started,
            restore_s=restoring,
            RSS_MiB=memory_mib(process.pid)[0],
            threads=len(os.listdir(f"/proc/{process.pid}/task")),
            connections=_connections(process.pid),
            worker_CPU_percent=(cpu_seconds(process.pid) - cpu) / took * 100,
            broker_CPU_percent=(cpu_seconds(bench.broker.pid(0)) - broker) / took * 100,
        )
    bench.say(f"{partitions} partitions: ready in {started:.1f} s")


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

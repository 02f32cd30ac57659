"""d) One scan of the novelty cache, f) several worker processes, g) memory and start."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

from tests.runs.benchmarks.bench import STAND_IN, Bench, apart, wait_ready_or_ended
from tests.runs.benchmarks.clients import offered_precisions, warm_up
from tests.runs.benchmarks.workload import (
    BenchmarkError,
    Outputs,
    Source,
    check,
    check_count,
    documents,
    expected,
    fill,
)
from tests.support.figures import memory_mib, peak_memory_mib

# -- d) one scan of the cache at 1k, 10k and 100k entries against a plain loop over numpy

SIZES: Final = (1000, 10_000, 100_000)
DIMENSIONS: Final = 384
FAMILIES: Final = 200
"""Vectors lie about so many centres, as texts on the same subject do."""


def scans(bench: Bench) -> None:
    """Part d. In a process of its own, with one thread for numpy, as in the worker."""
    for _ in bench.each_round():
        for row, metrics in apart("tests.runs.benchmarks.costs", str(bench.seconds), OMP_NUM_THREADS="1").items():
            bench.results.add("d", row, **metrics)
    values = bench.results.values["d"]["VectorCache"]["ms_at_1000"]
    bench.results.goal("d", "one scan of 1000 entries, ms", values, 0.03, "max")


def measure(seconds: float) -> dict[str, dict[str, float]]:
    """Return ms a query of each way to find the greatest similarity, by size."""
    import numpy as np

    from worker.core.novelty import VectorCache

    rng = np.random.default_rng(7)
    result: dict[str, dict[str, float]] = {}
    for size in SIZES if seconds >= 1 else SIZES[:2]:
        centres = rng.normal(size=(FAMILIES, DIMENSIONS))
        mixed = centres[rng.integers(FAMILIES, size=size + 200)] + rng.normal(size=(size + 200, DIMENSIONS))
        mixed = (mixed / np.linalg.norm(mixed, axis=1, keepdims=True)).astype(np.float32)
        vectors, queries = mixed[:size], mixed[size:]
        truth = [float((vectors @ query).max()) for query in queries]
        cache, listed = VectorCache(size, DIMENSIONS), list(vectors)
        for vector in vectors:
            cache.add(vector)

        def loop(query: Any, listed: list[Any] = listed) -> float:
            return max(float(np.dot(vector, query)) for vector in listed)

        for name, query_one in (("VectorCache", cache.max_cosine_similarity), ("numpy loop", loop)):
            ms, answers = _time(query_one, queries, seconds)
            row = result.setdefault(name, {})
            row[f"ms_at_{size}"] = ms
            right = sum(abs(f - t) < 1e-4 for f, t in zip(answers, truth, strict=False)) / len(answers)
            if right < 1:
                raise BenchmarkError(f"{name} at {size}: only {right:.0%} of its answers are right")
    return result


def _time(query_one: Callable[[Any], float], queries: Any, seconds: float) -> tuple[float, list[float]]:
    """Return the median ms of a query, over at least 10 queries or `seconds` / 10, and the answers."""
    answers, times = [], []
    ends = time.perf_counter() + seconds / 10
    for _ in range(3):
        query_one(queries[0])
    for query in queries:
        at = time.perf_counter()
        answers.append(query_one(query))
        times.append(time.perf_counter() - at)
        if len(times) >= 10 and time.perf_counter() > ends:
            break
    return sorted(times)[len(times) // 2] * 1000, answers


# -- f) 1, 2 and 4 worker processes without a model: what they do together, and what the broker takes of the machine

FLEET_PARTITIONS: Final = 8


def fleets(bench: Bench) -> None:
    count = max(1000, round(bench.seconds * 8000))
    values = documents(count)
    wanted = expected(Source("", FLEET_PARTITIONS, values, 0), None)
    warm_up(bench, asyncio.run(fill(bench.bootstrap, documents(min(count, 10_000)))))
    for _ in bench.each_round():
        for processes in (1, 2, 4):
            _measure_fleet(bench, processes, values, wanted)
    r = bench.results
    r.goal("f", "two processes / one, messages/s", r.ratio("f", "messages_s", _fleet(2), _fleet(1)), 1.6, "min")
    r.note("f", "shares of the whole machine: where workers and broker reach 100 %, no further process can be faster")


def _fleet(processes: int) -> str:
    return f"{processes} process{'es' if processes > 1 else ''}, exactly once"


def _measure_fleet(bench: Bench, processes: int, values: list[bytes], wanted: Outputs) -> None:
    topics = bench.topics(partitions=FLEET_PARTITIONS)
    # The session outlasts the pause in which the source is filled.
    settings = {"KP_EMBEDDER": "none", "KP_SESSION_TIMEOUT_SECONDS": "120"}
    with ExitStack() as stack:  # they join, are held while the source is filled, and go all at once
        workers = [stack.enter_context(bench.worker(topics, settings, STAND_IN)) for _ in range(processes)]
        for worker in workers:
            worker.wait_ready(120)
            worker.wait_metric("kp_assigned_partitions", FLEET_PARTITIONS // processes)
            worker.wait_metric("kp_ready", 1)
        for worker in workers:
            worker.stop()
        try:
            bench.produce(topics, values)
        finally:
            for worker in workers:
                worker.cont()
        timeline = bench.follow(topics, len(values), workers)
    outputs = bench.outputs(topics)
    check(_fleet(processes), outputs, wanted, bytes_too=False)  # offsets and times are in the bytes, and differ by run
    end = timeline[-1].at
    cpu, broker = timeline.cpu_between(outputs.first, end)
    seconds = end - outputs.first
    machine = seconds * (os.cpu_count() or 1) / 100
    bench.results.add(
        "f",
        _fleet(processes),
        messages_s=len(values) / seconds,
        workers_share_of_CPU_percent=cpu / machine,
        broker_share_of_CPU_percent=broker / machine,
    )


# -- g) memory, and time from start to ready, with and without the model, on a warm file cache


def footprints(bench: Bench) -> None:
    rows = {"with the model, fp32": {}, "without a model": {"KP_EMBEDDER": "none"}}
    rows |= {f"with the model, {p}": {"KP_PRECISION": p} for p in offered_precisions(bench, "g")}
    for _ in bench.each_round():
        for row, settings in rows.items():
            _measure_footprint(bench, row, settings)
    for row, plan in (("with the model, fp32", 600), ("without a model", 140)):  # docs/capacity.md
        values = bench.results.values["g"][row]
        bench.results.goal("g", f"RSS {row}, after load, MiB", values["RSS_MiB_after_load"], plan, "max")
        bench.results.goal("g", f"start to ready {row}, s", values["start_to_ready_s"], 5, "max")


def _measure_footprint(bench: Bench, row: str, settings: dict[str, str]) -> None:
    # The runtime keeps kernels for each length of text, so memory grows for the first thousands of texts.
    count = max(20, round(bench.seconds * (400 if "with the" in row else 1000)))
    topics = bench.topics()
    with bench.worker(topics, settings) as process:
        ready = wait_ready_or_ended(process)
        if process.returncode is not None:
            raise BenchmarkError(f"{row}: the worker ended:\n{process.log()[-2000:]}")
        idle = memory_mib(process.pid)
        bench.work_off(topics, process, documents(count))
        loaded, peak = memory_mib(process.pid), peak_memory_mib(process.pid)
    outputs = bench.outputs(topics)
    check_count(row, outputs, count)
    bench.results.add(
        "g", row, start_to_ready_s=ready, RSS_MiB_when_ready=idle, RSS_MiB_after_load=loaded, RSS_MiB_peak=peak
    )


if __name__ == "__main__":
    print(json.dumps(measure(float(sys.argv[1]))))

"""g) Memory, and time from start to ready, with and without the model, on a warm file cache."""

from __future__ import annotations

import asyncio
import time

from tests.runs.benchmarks.bench import PRODUCT, Bench
from tests.runs.benchmarks.clients import is_ready, offered_precisions
from tests.runs.benchmarks.watch import BenchmarkError, memory_mib, wait_until
from tests.runs.benchmarks.workload import PARTITIONS, Source, documents, fill, fresh_topics, produce


def run(bench: Bench) -> None:
    """Part g."""
    rows = {"with the model, fp32": {}, "without a model": {"KP_EMBEDDER": "none"}}
    rows |= {f"with the model, {p}": {"KP_PRECISION": p} for p in offered_precisions(bench, "g")}
    for _ in bench.each_round():
        for row, settings in rows.items():
            _measure(bench, row, settings)
    for row, plan in (("with the model, fp32", 600), ("without a model", 140)):  # docs/capacity.md
        values = bench.results.values["g"][row]
        bench.results.goal("g", f"RSS {row}, after load, MiB", values["RSS_MiB_after_load"], plan, "max")
        bench.results.goal("g", f"start to ready {row}, s", values["start_to_ready_s"], 5, "max")


def _measure(bench: Bench, row: str, settings: dict[str, str]) -> None:
    # The runtime keeps kernels for each length of text, so memory grows for the first thousands of texts.
    count = max(20, round(bench.seconds * (400 if "with the" in row else 1000)))
    source = Source(
        asyncio.run(fill(bench.bootstrap, [])).name, PARTITIONS, documents(count), time.time_ns() // 1_000_000
    )
    topics = asyncio.run(fresh_topics(bench.bootstrap))
    with bench.worker(topics, source.name, settings, PRODUCT) as process:
        ready = wait_until(lambda: process.returncode is not None or is_ready(process), 120, "ready")
        if process.returncode is not None:
            raise BenchmarkError(f"{row}: the worker ended:\n{process.log()[-2000:]}")
        idle, _ = memory_mib(process.pid)
        asyncio.run(produce(bench.bootstrap, source))
        bench.follow(topics, source, [process])
        loaded, peak = memory_mib(process.pid)
    found = bench.outputs(topics, PARTITIONS)
    if found.counts.total() != count:
        raise BenchmarkError(f"{row}: {found.counts.total()} outputs of {count}")
    bench.results.add(
        "g", row, start_to_ready_s=ready, RSS_MiB_when_ready=idle, RSS_MiB_after_load=loaded, RSS_MiB_peak=peak
    )
    bench.say(f"{row}: ready in {ready:.1f} s, {loaded:.0f} MiB")

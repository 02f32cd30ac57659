"""k) What sizes a fleet: the CPU of a text by its tokens and precision, and one and four workers with the model."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Final

from tests.runs.benchmarks.bench import Bench
from tests.runs.benchmarks.clients import MODEL_SETTINGS
from tests.runs.benchmarks.workload import Source, check_count, documents, fill, fresh_topics
from worker.embed.model_dir import find_exported, read_manifest
from worker.embed.openvino_embedder import OpenVinoEmbedder, runs_here

TOKENS: Final = (32, 64, 128, 256, 512)
TEXTS: Final = 20
"""Texts of one length in a round."""

PARTITIONS: Final = 16
FLEETS: Final = (1, 4)


def run(bench: Bench) -> None:
    """Part k."""
    directory = find_exported(None)
    if directory is None:
        bench.say("no exported model: kp-worker fetch-model")
        return
    precisions = [name for name in read_manifest(directory).precisions if runs_here(name)]
    embedders = {name: OpenVinoEmbedder(directory, max(TOKENS), 1, name) for name in precisions}
    values = documents(max(PARTITIONS * 16, round(bench.seconds * 60)), broken_every=0)
    for number in bench.each_round():
        for precision, embedder in embedders.items():
            for tokens in TOKENS:
                text = "word " * (tokens - 2)  # one token each, and two special ones
                embedder.embed(text)
                began = time.process_time()
                for _ in range(TEXTS):
                    embedder.embed(text)
                each = (time.process_time() - began) / TEXTS
                bench.results.add("k", f"text of {tokens} tokens, {precision}", CPU_ms=each * 1e3)
        for workers in FLEETS if number % 2 == 0 else FLEETS[::-1]:
            _fleet(bench, workers, values)


def _fleet(bench: Bench, count: int, values: list[bytes]) -> None:
    source = Source(
        asyncio.run(fill(bench.bootstrap, [], PARTITIONS)).name, PARTITIONS, values, time.time_ns() // 1_000_000
    )
    topics = asyncio.run(fresh_topics(bench.bootstrap, PARTITIONS))
    settings = {**MODEL_SETTINGS, "KP_SESSION_TIMEOUT_SECONDS": "120"}
    timeline, memory = bench.follow_fleet(topics, source, settings, count)
    found = bench.outputs(topics, PARTITIONS)
    row = f"{count} worker{'s' if count > 1 else ''}"
    check_count(row, found, len(values))
    (cpu0, broker0), (cpu1, broker1) = timeline.cpu_at(found.first), timeline.cpu_at(timeline[-1].at)
    seconds = timeline[-1].at - found.first
    worker_ms, broker_ms = (
        (after - before) / len(values) * 1e3 for before, after in ((cpu0, cpu1), (broker0, broker1))
    )
    bench.results.add(
        "k",
        row,
        traces_s=len(values) / seconds,
        workers_CPU_ms_a_trace=worker_ms,
        broker_CPU_ms_a_trace=broker_ms,
        formula_traces_s=(os.cpu_count() or 1) * 1e3 / (worker_ms + broker_ms),
        RSS_MiB_of_the_largest=memory,
    )
    bench.say(f"{row}: {len(values) / seconds:.1f}/s")

"""d) One scan of the novelty cache at 1k, 10k and 100k entries against a plain loop over numpy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from tests.runs.benchmarks.bench import Bench
from tests.runs.benchmarks.watch import BenchmarkError
from tests.support.surroundings import ROOT

SIZES: Final = (1000, 10_000, 100_000)
DIMENSIONS: Final = 384
FAMILIES: Final = 200
"""Vectors lie about so many centres, as texts on the same subject do."""


def run(bench: Bench) -> None:
    """Part d. In a process of its own, with one thread for numpy, as in the worker."""
    for _ in bench.each_round():
        command = [sys.executable, "-m", "tests.runs.benchmarks.scan", str(bench.seconds)]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=1800
        )
        if done.returncode:
            raise BenchmarkError(f"the scan ended with {done.returncode}: {done.stderr[-2000:]}")
        for row, metrics in json.loads(done.stdout.splitlines()[-1]).items():
            bench.results.add("d", row, **metrics)
    values = bench.results.values["d"]["VectorCache"]["ms_at_1000"]
    bench.results.goal("d", "one scan of 1000 entries, ms", values, 0.03, "max")


def measure(seconds: float) -> dict[str, dict[str, float]]:
    """Return ms a query of each way and size."""
    import numpy as np

    rng = np.random.default_rng(7)
    result: dict[str, dict[str, float]] = {}
    for size in SIZES if seconds >= 1 else SIZES[:2]:
        centres = rng.normal(size=(FAMILIES, DIMENSIONS))
        mixed = centres[rng.integers(FAMILIES, size=size + 200)] + rng.normal(size=(size + 200, DIMENSIONS))
        mixed = (mixed / np.linalg.norm(mixed, axis=1, keepdims=True)).astype(np.float32)
        vectors, queries = mixed[:size], mixed[size:]
        truth = [float((vectors @ query).max()) for query in queries]
        for name, query_one in _ways(vectors).items():
            ms, found = _time(query_one, queries, seconds)
            row = result.setdefault(name, {})
            row[f"ms_at_{size}"] = ms
            right = sum(abs(f - t) < 1e-4 for f, t in zip(found, truth, strict=False)) / len(found)
            if right < 1:
                raise BenchmarkError(f"{name} at {size}: only {right:.0%} of its answers are right")
    return result


def _time(query_one: Callable[[Any], float], queries: Any, seconds: float) -> tuple[float, list[float]]:
    """Return the median ms of a query, over at least 10 queries or `seconds` / 10, and the answers."""
    found, times = [], []
    ends = time.perf_counter() + seconds / 10
    for _ in range(3):
        query_one(queries[0])
    for query in queries:
        at = time.perf_counter()
        found.append(query_one(query))
        times.append(time.perf_counter() - at)
        if len(times) >= 10 and time.perf_counter() > ends:
            break
    return sorted(times)[len(times) // 2] * 1000, found


def _ways(vectors: Any) -> dict[str, Callable[[Any], float]]:
    """Return each way to find the greatest similarity of one query."""
    import numpy as np

    from worker.core.novelty import VectorCache

    size = len(vectors)
    cache = VectorCache(size, DIMENSIONS)
    for vector in vectors:
        cache.add(vector)
    listed = list(vectors)

    def loop(query: Any) -> float:
        return max(float(np.dot(vector, query)) for vector in listed)

    return {"VectorCache": cache.max_cosine_similarity, "numpy loop": loop}


if __name__ == "__main__":
    print(json.dumps(measure(float(sys.argv[1]))))

"""i) The scan of large caches against numpy's product of the same rows, and the restore of 100,000 entries.

The scan is measured in a process of its own, with one BLAS thread as in the worker. Each query is asked both ways in
turn, and the ratio is taken for each pair, so that other work on the machine hits both.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.runs.benchmarks import restoring
from tests.runs.benchmarks.bench import Bench
from tests.runs.benchmarks.scan import DIMENSIONS, FAMILIES, SIZES
from tests.runs.benchmarks.watch import BenchmarkError
from tests.support.surroundings import ROOT

ENTRIES: Final = 100_000
QUERIES: Final = 40


def run(bench: Bench) -> None:
    """Part i."""
    bench.results.note(
        "i",
        "vectors of " + (", ".join(path.stem for path in bench.traces) or "generated families")
        + "; equal: every entry has the same vector; copies: 1000 vectors, each in a hundredth of the entries",
    )  # fmt: skip
    vectors = bench.directory / "vectors.npz"
    if bench.traces:
        _embed(bench.traces, vectors)
    sizes = SIZES if bench.seconds >= 1 else SIZES[:2]
    restore = restoring.Large(bench, ENTRIES if bench.seconds >= 1 else ENTRIES // 10)
    for _ in bench.each_round():
        command = [sys.executable, "-m", "tests.runs.benchmarks.large_cache", json.dumps(sizes), str(vectors)]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=1800
        )
        if done.returncode:
            raise BenchmarkError(f"the scan ended with {done.returncode}: {done.stderr[-2000:]}")
        for row, metrics in json.loads(done.stdout.splitlines()[-1]).items():
            bench.results.add("i", row, **metrics)
        bench.results.add("i", f"restore of {restore.entries:,}", seconds=restore.seconds(), value_bytes=restore.bytes)
    rows = bench.results.values["i"]
    if ENTRIES in sizes:
        bench.results.goal("i", "scan of 100,000 entries / numpy", rows["100,000 entries"]["ratio"], 0.25, "max")
        bench.results.goal("i", "scan of 100,000 equal ones / numpy", rows["100,000 equal"]["ratio"], 1.05, "max")
        bench.results.goal("i", "restore of 100,000 entries, s", rows["restore of 100,000"]["seconds"], 2.5, "max")


def _embed(traces: Sequence[Path], output: Path) -> None:
    """Embed the traces of some files, and parts of them, and save a matrix with the trace of each row."""
    import numpy as np

    from worker import embedding_text, parse_trace
    from worker.embed.load import load_embedder

    embedder = load_embedder("auto", None, 256, 1, "fp32")
    assert embedder is not None
    rows, of = [], []
    for number, line in enumerate(line for path in traces for line in path.read_bytes().splitlines()):
        text = embedding_text(parse_trace(line))
        middle = len(text) // 2
        for part in (text, text[:middle], text[middle:]):
            rows.append(embedder.embed(part or text).vector)
            of.append(number)
    np.savez(output, rows=np.stack(rows), of=np.array(of))


def measure(sizes: Sequence[int], embedded: Path) -> dict[str, dict[str, float]]:
    """Return the median ms of both ways and their ratio, by size and kind of vectors."""
    import numpy as np

    rng = np.random.default_rng(7)
    result = {}
    for size in sizes:
        vectors = _vectors(rng, size + QUERIES, embedded)
        entries, queries = vectors[:size], vectors[size:]
        result[f"{size:,} entries"] = _compare(entries, queries)
        result[f"{size:,} copies"] = _compare(entries[rng.integers(1000, size=size)], entries[:QUERIES])
        result[f"{size:,} equal"] = _compare(np.repeat(entries[:1], size, axis=0), queries)
    return result


def _vectors(rng: Any, count: int, embedded: Path) -> Any:
    """Return unit vectors: means of two texts of one trace, as of a text in two windows, or families of random ones."""
    import numpy as np

    if embedded.exists():
        loaded = np.load(embedded)
        rows, of = loaded["rows"], loaded["of"]
        one, other = rng.integers(len(rows), size=count), rng.integers(3, size=count)
        weight = rng.random(size=(count, 1))
        mixed = weight * rows[one] + (1 - weight) * rows[of[one] * 3 + other]
    else:
        centres = rng.normal(size=(FAMILIES, DIMENSIONS))
        mixed = centres[rng.integers(FAMILIES, size=count)] + rng.normal(size=(count, DIMENSIONS))
    return (mixed / np.linalg.norm(mixed, axis=1, keepdims=True)).astype(np.float32)


def _compare(entries: Any, queries: Any) -> dict[str, float]:
    import numpy as np

    from worker.core.novelty import Label, VectorCache, unit

    cache = VectorCache(len(entries), DIMENSIONS)
    for entry in entries:
        cache.add_unit(unit(entry, DIMENSIONS), 0, Label("trace"))
    ours, numpys = [], []
    for query in [queries[0], *queries]:  # the first one warms up
        began = time.perf_counter()
        found = cache.nearest_unit(query)
        between = time.perf_counter()
        similarities = np.dot(entries, query)
        similarity = float(similarities[similarities.argmax()])
        numpys.append(time.perf_counter() - between)
        ours.append(between - began)
        if found is None or found.similarity != similarity:
            raise BenchmarkError(f"found {found}, numpy {similarity}")
    ratios = [one / other for one, other in zip(ours[1:], numpys[1:], strict=True)]
    return {
        "ms": statistics.median(ours[1:]) * 1000,
        "numpy_ms": statistics.median(numpys[1:]) * 1000,
        "ratio": statistics.median(ratios),
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]), Path(sys.argv[2]))))

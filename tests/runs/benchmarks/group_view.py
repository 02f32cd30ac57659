"""What the scope `group` costs a worker: 64 foreign partitions of 1000 entries, one scan, one entry, memory.

Times are CPU time of one thread.

`python -m tests.runs.benchmarks.group_view [VECTORS.npy]`: vectors of real traces, shape (n, dimensions); rows beyond
n are theirs with noise. Without a file: vectors about 200 centres.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as worker.cli

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.process_collector import ProcessCollector

from worker.core.changelog import Restored, decode, encode, slot_key
from worker.core.group_view import GroupView
from worker.core.novelty import Vector, VectorCache, unit
from worker.core.passes import Segment

PARTITIONS, CAPACITY, DIMENSIONS = 64, 1000, 384
QUERIES = 300


def vectors(count: int) -> list[Vector]:
    """Return unit vectors like those of texts."""
    rng = np.random.default_rng(7)
    real = np.load(sys.argv[1]) if len(sys.argv) > 1 else rng.normal(size=(200, DIMENSIONS)) / 14
    chosen = real[rng.integers(len(real), size=count)] + rng.normal(size=(count, DIMENSIONS)) * 0.02
    return [unit(row, DIMENSIONS) for row in chosen]


def resident() -> float:
    """Return the resident memory of this process, bytes."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry.get_sample_value("process_resident_memory_bytes") or 0.0


def median_ms(call: Callable[[Vector], object], queries: list[Vector]) -> float:
    """Return the median CPU time of a call, ms."""
    took = []
    for query in queries:
        begun = time.process_time()
        call(query)
        took.append(time.process_time() - begun)
    return float(np.median(took) * 1000)


def main() -> None:
    """Measure, and print one line for each figure."""
    entries = PARTITIONS * CAPACITY
    found = vectors(entries + QUERIES)
    values = [
        encode(
            sequence=number // PARTITIONS, source_offset=number, stream_time_ms=number, model="m",
            trace_id=f"kp:trace:{number:036}", vector=found[number], pass_number=1, text_hash=bytes(16),
            agent_id="kp:agent:one",
        )
        for number in range(entries)
    ]  # fmt: skip
    before = resident()
    view = GroupView("m", DIMENSIONS, CAPACITY, None, entries)
    for partition in range(PARTITIONS):
        view.load(partition, Restored(chain=(Segment(1, 0, 0),)))
    begun = time.process_time()
    for number, value in enumerate(values):
        view.apply(number % PARTITIONS, slot_key(number // PARTITIONS, CAPACITY, 1), value, number)
    applied = time.process_time() - begun
    queries = found[entries:]
    view.nearest(0, queries[0], 0)
    cache = VectorCache(CAPACITY, DIMENSIONS)
    for vector in found[:CAPACITY]:
        cache.add(vector)
    print(f"entries: {len(view)}, bytes of an entry on the changelog: {len(values[0])} and its key")
    print(f"resident memory: {(resident() - before) / 1e6:.0f} MB; memory_bytes says {view.memory_bytes / 1e6:.0f} MB")
    print(f"apply: {applied / entries * 1e6:.1f} us an entry (before the codes exist)")
    matrix = np.array(found[:entries])
    begun = time.process_time()
    for number in range(2000):
        view.apply(number % 64, slot_key(CAPACITY + number // 64, CAPACITY, 1), _next(values[number], number), entries)
    print(f"apply to a full view: {(time.process_time() - begun) / 2000 * 1e6:.1f} us an entry")
    print(f"own cache of {CAPACITY}: {median_ms(cache.nearest_unit, queries):.3f} ms a scan")
    print(f"numpy over {entries}: {median_ms(lambda query: float((matrix @ query).max()), queries):.3f} ms")
    print(f"group view of {entries}: {median_ms(lambda query: view.nearest(0, query, 0), queries):.3f} ms a scan")


def _next(value: bytes, number: int) -> bytes:
    entry = decode(value)
    return encode(
        sequence=CAPACITY + number // PARTITIONS, source_offset=entry.source_offset, stream_time_ms=10**6 + number,
        trace_id=entry.trace_id, model="m", vector=entry.array(), pass_number=1, text_hash=entry.text_hash,
    )  # fmt: skip


if __name__ == "__main__":
    main()

"""f) 1, 2 and 4 worker processes without a model: what they do together, and what the broker takes of the machine."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Final

from tests.runs.benchmarks.bench import STAND_IN, Bench
from tests.runs.benchmarks.clients import warm_up
from tests.runs.benchmarks.watch import Outputs
from tests.runs.benchmarks.workload import Source, check, documents, expected, fill, fresh_topics

PARTITIONS: Final = 8
FLEETS: Final = (1, 2, 4)

SETTINGS: Final = {"KP_EMBEDDER": "none", "KP_SESSION_TIMEOUT_SECONDS": "120"}
"""The session outlasts the pause in which the source is filled."""


def run(bench: Bench) -> None:
    """Part f."""
    count = max(1000, round(bench.seconds * 8000))
    values = documents(count)
    wanted: Outputs | None = None
    warm_up(bench, asyncio.run(fill(bench.bootstrap, documents(min(count, 10_000)))))
    for _ in bench.each_round():
        for processes in FLEETS:
            source = Source(
                asyncio.run(fill(bench.bootstrap, [], PARTITIONS)).name, PARTITIONS, values, time.time_ns() // 1_000_000
            )
            if wanted is None:
                wanted = expected(source, None)
            _measure(bench, processes, source, wanted)
    r = bench.results
    r.goal("f", "two processes / one, messages/s", r.ratio("f", "messages_s", _row(2), _row(1)), 1.6, "min")
    r.note(
        "f",
        "shares are of the whole machine in the same period; where workers and broker together reach 100 %, "
        "there is no room for another process to be faster",
    )


def _row(processes: int) -> str:
    return f"{processes} process{'es' if processes > 1 else ''}, exactly once"


def _measure(bench: Bench, processes: int, source: Source, wanted: Outputs) -> None:
    topics = asyncio.run(fresh_topics(bench.bootstrap, PARTITIONS))
    timeline = bench.follow_fleet(topics, source, SETTINGS, processes, STAND_IN)
    found = bench.outputs(topics, PARTITIONS)
    check(_row(processes), found, wanted, bytes_too=False)  # offsets and times are in the bytes, and differ by run
    end = timeline[-1].at
    (cpu0, broker0), (cpu1, broker1) = timeline.cpu_at(found.first), timeline.cpu_at(end)
    seconds = end - found.first
    machine = seconds * (os.cpu_count() or 1) / 100
    bench.results.add(
        "f",
        _row(processes),
        messages_s=len(source.values) / seconds,
        workers_share_of_CPU_percent=(cpu1 - cpu0) / machine,
        broker_share_of_CPU_percent=(broker1 - broker0) / machine,
    )
    bench.say(f"{_row(processes)}: {len(source.values) / seconds:,.0f}/s")

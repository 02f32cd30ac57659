"""Watching processes and topics from outside: CPU time, memory, committed offsets, what came out.

All times are of one clock, the machine's: output topics stamp records on arrival (LogAppendTime), so a run starts at
its first output's stamp for everybody. It ends, exactly once, when the last offset is committed (seen within
POLL_SECONDS), and at least once at the last output's stamp.
"""

import asyncio
import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from tests.runs.benchmarks.workload import BenchmarkError, Outputs, Topics
from tests.support.kafka_fixtures import LoggedProcess, WorkerProcess

POLL_SECONDS: Final = 0.025
"""Shortest time between two looks. A look costs the cores some 5 ms (the broker's work and ours), which at 40 a second
would be a tenth of what is measured: so a look comes after a third of the time that seems left."""

PATIENCE_SECONDS: Final = 120.0
"""A run in which nothing moves for so long is broken: no peer takes a tenth of it for a start or a commit."""


def cpu_seconds(pid: int) -> float:
    """Return user and system time of a process with its threads, s; 0.0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Moment(NamedTuple):
    """What was seen at one time (s since 1970): records done, CPU s of the processes, CPU s of the broker."""

    at: float
    done: int
    cpu: float
    broker: float


class Timeline(list[Moment]):
    """Moments in order."""

    def cpu_between(self, begin: float, end: float) -> tuple[float, float]:
        """Return CPU seconds of the processes and of the broker between two times."""
        at, _, cpu, broker = zip(*self, strict=True)
        (cpu0, cpu1), (broker0, broker1) = np.interp([begin, end], at, cpu), np.interp([begin, end], at, broker)
        return float(cpu1 - cpu0), float(broker1 - broker0)


async def follow(
    bootstrap: str, broker: int, topics: Topics, total: int, processes: Sequence[LoggedProcess]
) -> Timeline:
    """Return when the group has committed `total` records. `broker`: its process id.

    Raises BenchmarkError when a process ends before, or nothing moves for PATIENCE_SECONDS.
    """
    timeline = Timeline()
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    moved, best = time.time(), 0
    tps = [TopicPartition(topics.source, p) for p in range(topics.partitions)]
    try:
        while best < total:
            began = time.time()
            cpu, broker_cpu = sum(cpu_seconds(p.pid) for p in processes), cpu_seconds(broker)
            try:
                offsets = await admin.list_consumer_group_offsets(topics.group, partitions=tps)
                done = sum(max(0, o.offset) for o in offsets.values())
            except KafkaError:
                done = best  # the group's coordinator is just coming up
            timeline.append(Moment(time.time(), done, cpu, broker_cpu))
            if done > best:
                best, moved = done, time.time()
            for process in processes:
                if process.returncode is not None and best < total:
                    raise BenchmarkError(
                        f"ended with {process.returncode} after {best} of {total}:\n{process.log()[-3000:]}"
                    )
            if time.time() - moved > PATIENCE_SECONDS:
                raise BenchmarkError(f"stuck at {best} of {total}:\n{processes[0].log()[-3000:]}")
            await asyncio.sleep(max(POLL_SECONDS, min(1.0, _seconds_left(timeline, total) / 3) - (time.time() - began)))
    finally:
        await admin.close()
    return timeline


def _seconds_left(timeline: Timeline, total: int) -> float:
    """Estimate by the rate since the first progress; 0.0 before it."""
    first = next((moment for moment in timeline if moment.done), timeline[-1])
    last = timeline[-1]
    if last.done <= first.done:
        return 0.0
    return (total - last.done) * (last.at - first.at) / (last.done - first.done)


async def read_outputs(bootstrap: str, topics: Topics, since: float = 0.0) -> Outputs:
    """Read all that is committed in the output topics and stamped at `since` (s since 1970) or later."""
    counts, checksums = Counter[str](), Counter[str]()
    first, last = float("inf"), 0.0
    kinds = {topic: kind for kind, topic in topics.outputs.items()}
    tps = [TopicPartition(topic, p) for topic in kinds for p in range(topics.partitions)]
    async with AIOKafkaConsumer(
        bootstrap_servers=bootstrap,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        max_partition_fetch_bytes=4 << 20,
    ) as consumer:
        consumer.assign(tps)
        ends = await consumer.end_offsets(tps)
        left = {tp for tp in tps if ends[tp]}
        while left:
            for tp, records in (await consumer.getmany(*left, timeout_ms=200)).items():
                kind = kinds[tp.topic]
                counted = [record for record in records if record.timestamp >= since * 1000]
                if counted:
                    counts[kind] += len(counted)
                    checksums[kind] += sum(zlib.crc32(r.value or b"") for r in counted)
                    first = min(first, counted[0].timestamp / 1000)
                    last = max(last, counted[-1].timestamp / 1000)
            left = {tp for tp in left if await consumer.position(tp) < ends[tp]}
    return Outputs(counts, checksums, first, last)


def wait_until(condition: Callable[[], bool], seconds: float, what: str, every: float = 0.01) -> float:
    """Wait for a condition; return how long it took. Raises BenchmarkError when it takes longer than `seconds`."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise BenchmarkError(f"{what}: not in {seconds:.0f} s")
        time.sleep(every)
    return time.monotonic() - began


def wait_ready_or_ended(worker: WorkerProcess, seconds: float = 120) -> float:
    """Wait until a worker is ready, or has ended; return how long it took. Raises BenchmarkError as `wait_until`."""
    return wait_until(
        lambda: worker.returncode is not None or worker.readyz()[0] == 200, seconds, "a worker gets ready or ends"
    )

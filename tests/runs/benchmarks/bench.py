"""What every part of the measurement works with: the broker, processes, and what is seen of them from outside.

All times are of one clock, the machine's: output topics stamp records on arrival (LogAppendTime), so a run starts at
its first output's stamp for everybody. It ends, exactly once, when the last offset is committed (seen within
POLL_SECONDS), and at least once at the last output's stamp.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from tests.runs.benchmarks.results import Results
from tests.runs.benchmarks.workload import (
    PARTITIONS,
    BenchmarkError,
    Outputs,
    Source,
    Topics,
    documents,
    fill,
    fresh_topics,
    produce,
)
from tests.support.kafka_fixtures import LoggedProcess, WorkerProcess, admin
from tests.support.surroundings import ROOT, topic_settings
from worker.core.records import ACCEPTED
from worker.lab.broker.embedded_kafka import EmbeddedKafka
from worker.observe import metrics

PRODUCT: Final = "worker"
STAND_IN: Final = "tests.runs.benchmarks.bench_worker"
POLL_SECONDS: Final = 0.025
"""Shortest time between two looks. A look costs the cores some 5 ms (the broker's work and ours), which at 40 a second
would be a tenth of what is measured: so a look comes after a third of the time that seems left."""

PATIENCE_SECONDS: Final = 120.0
"""A run in which nothing moves for so long is broken: no peer takes a tenth of it for a start or a commit."""


class PeerProcess(LoggedProcess):
    """A peer as a process, its output in a file."""

    def __init__(self, module: str, arguments: list[str], log_path: Path) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("KP_", "Quix__"))}
        super().__init__(module, arguments, {**inherited, "OPENBLAS_NUM_THREADS": "1"}, log_path)


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


class Latencies(NamedTuple):
    """Milliseconds of each record, sorted; records sent a second, as it really was."""

    sorted_ms: list[float]
    rate: float

    def percentile(self, percent: float) -> float:
        return self.sorted_ms[min(len(self.sorted_ms) - 1, int(len(self.sorted_ms) * percent / 100))]


@dataclass
class Bench:
    """One run of the benchmarks."""

    results: Results
    directory: Path
    seconds: float
    rounds: int
    _broker: EmbeddedKafka | None = None
    _count: int = field(default=0)
    _worker_cores: set[int] = field(default_factory=set)

    @property
    def broker(self) -> EmbeddedKafka:
        """The broker of all parts; started, and warmed up, when first asked for."""
        if self._broker is None:
            # Twice the usual heap: a benchmark moves more than a test, and must not measure the collector. And both of
            # the JVM's compilers, as a broker in production has them; the embedded one saves the start of the second.
            self._broker = EmbeddedKafka(heap_mb=512, jvm_flags=["-XX:TieredStopAtLevel=4"]).start()
            asyncio.run(warm(self._broker.bootstrap_servers, transactions=round(self.seconds * 400)))
        return self._broker

    @property
    def bootstrap(self) -> str:
        return self.broker.bootstrap_servers

    @contextmanager
    def broker_apart(self) -> Iterator[None]:
        """Hold the broker on one core, and workers started meanwhile on the others: as if it ran on another machine."""
        cores = sorted(os.sched_getaffinity(0))
        self._worker_cores = set(cores[:-1])
        self._hold_broker({cores[-1]})
        try:
            yield
        finally:
            self._worker_cores = set()
            self._hold_broker(set(cores))

    def _hold_broker(self, cores: set[int]) -> None:
        for thread in Path(f"/proc/{self.broker.pid(0)}/task").iterdir():
            with suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(int(thread.name), cores)

    def stop_broker(self) -> None:
        if self._broker is not None:
            self._broker.stop()
            self._broker = None

    def each_round(self) -> Iterator[int]:
        for number in range(self.rounds):
            print(f"  round {number + 1} of {self.rounds}", flush=True)
            yield number

    def log_path(self, name: str) -> Path:
        self._count += 1
        return self.directory / f"{self._count:03d}-{name.replace(' ', '-').replace('/', '-')}.log"

    def topics(self, source: Source | None = None, partitions: int = PARTITIONS, *, stamped: bool = True) -> Topics:
        """Create the topics of a run: see `fresh_topics`."""
        return asyncio.run(fresh_topics(self.bootstrap, source, partitions, stamped=stamped))

    def produce(self, topics: Topics, values: Sequence[bytes]) -> None:
        """Send values to the source, dated now."""
        source = Source(topics.source, topics.partitions, values, time.time_ns() // 1_000_000)
        asyncio.run(produce(self.bootstrap, source))

    @contextmanager
    def peer(self, name: str, topics: Topics, *options: str) -> Iterator[PeerProcess]:
        """Run a peer; it is asked to stop at the end, and killed if it does not."""
        names = [f"--bootstrap={self.bootstrap}", f"--group={topics.group}", f"--source={topics.source}"]
        process = PeerProcess(f"tests.runs.benchmarks.peers.{name}", [*names, *options], self.log_path(name))
        with stopped(process):
            yield process

    @contextmanager
    def worker(self, topics: Topics, settings: Mapping[str, str], module: str = PRODUCT) -> Iterator[WorkerProcess]:
        """Run a worker; it is asked to stop at the end, and killed if it does not."""
        env = topic_settings(self.bootstrap, topics.group, KP_SOURCE_TOPIC=topics.source, KP_HTTP_HOST="127.0.0.1")
        env |= {"KP_CREATE_TOPICS": "false", "OPENBLAS_NUM_THREADS": "1", **settings}
        process = WorkerProcess(env, module=module, log_path=self.log_path("worker"))
        if self._worker_cores:  # before it has started a thread
            os.sched_setaffinity(process.pid, self._worker_cores)
        with stopped(process):
            yield process

    def follow(self, topics: Topics, total: int, processes: Sequence[LoggedProcess]) -> Timeline:
        """Watch processes until so many records of the source are committed."""
        return asyncio.run(follow(self.bootstrap, self.broker.pid(0), topics, total, processes))

    def latencies(
        self, topics: Topics, values: Sequence[bytes], rate: float, patience: float, in_flight: int | None = None
    ) -> Latencies:
        """Send values at a rate, and wait for the outputs: see `measure_latencies`."""
        return asyncio.run(measure_latencies(self.bootstrap, topics, values, rate, patience, in_flight))

    def work_off(
        self, topics: Topics, process: LoggedProcess, values: Sequence[bytes], done: int = 0
    ) -> tuple[float, Timeline]:
        """Send values to the source, and wait until a process that has `done` others is done with them.

        Returns the time (s since 1970) from which outputs count, and the timeline since then. A runtime makes its
        kernels for a text's length when it first meets that length: so what is measured comes after a warm-up.
        """
        began = time.time()
        self.produce(topics, values)
        return began, self.follow(topics, done + len(values), [process])

    def outputs(self, topics: Topics, since: float = 0.0) -> Outputs:
        """Read what a run gave (stamped at `since` or later, s since 1970), then delete its topics."""
        try:
            return asyncio.run(read_outputs(self.bootstrap, topics, since))
        finally:
            delete(self.bootstrap, *topics.outputs.values(), topics.changelog)


# -- processes and topics, watched from outside


def cpu_seconds(pid: int) -> float:
    """Return user and system time of a process with its threads, s; 0.0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def follow(
    bootstrap: str, broker: int, topics: Topics, total: int, processes: Sequence[LoggedProcess]
) -> Timeline:
    """Return when the group has committed `total` records. `broker`: its process id.

    Raises BenchmarkError when a process ends before, or nothing moves for PATIENCE_SECONDS.
    """
    timeline = Timeline()
    client = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await client.start()
    moved, best = time.time(), 0
    tps = [TopicPartition(topics.source, p) for p in range(topics.partitions)]
    try:
        while best < total:
            began = time.time()
            cpu, broker_cpu = sum(cpu_seconds(p.pid) for p in processes), cpu_seconds(broker)
            try:
                offsets = await client.list_consumer_group_offsets(topics.group, partitions=tps)
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
        await client.close()
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


# -- latency


async def measure_latencies(
    bootstrap: str, topics: Topics, values: Sequence[bytes], rate: float, patience: float, in_flight: int | None = None
) -> Latencies:
    """Send values at a mean rate, at random times as many independent senders give them (Poisson); wait for all outputs
    (read committed). The first tenth does not count.

    The key is the time of sending in microseconds: the output carries it. The producer never waits for the system
    under test: what is late stays late (no coordinated omission). With `in_flight` there is no rate: the next one is
    sent when fewer than that are on their way.
    """
    tps = [TopicPartition(topic, p) for topic in topics.outputs.values() for p in range(topics.partitions)]
    taken: dict[int, float] = {}
    async with (
        AIOKafkaConsumer(
            bootstrap_servers=bootstrap,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        ) as consumer,
        AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all") as producer,
    ):
        consumer.assign(tps)
        await consumer.seek_to_end(*tps)
        for tp in tps:
            await consumer.position(tp)
        sent: list[int] = []
        room = asyncio.Semaphore(in_flight or len(values))

        async def receive() -> None:
            while len(taken) < len(values):
                for records in (await consumer.getmany(timeout_ms=200)).values():
                    now = time.time()
                    for record in records:
                        taken[int(record.key)] = now
                        room.release()

        receiving = asyncio.create_task(receive())
        began = due = time.time()
        rng = random.Random(1)
        for i, value in enumerate(values):
            await room.acquire()
            due += rng.expovariate(rate)
            if in_flight is None:
                await asyncio.sleep(max(0.0, due - time.time()))
            stamp = time.time_ns() // 1000
            stamp += stamp in sent[-5:]
            sent.append(stamp)
            await producer.send(topics.source, value, b"%d" % stamp, i % topics.partitions, stamp // 1000)
        took = time.time() - began
        try:
            await asyncio.wait_for(receiving, patience)
        except TimeoutError:
            raise BenchmarkError(f"{len(values) - len(taken)} of {len(values)} outputs did not come") from None
        if taken.keys() != set(sent):
            raise BenchmarkError("outputs with other keys than were sent")
    return Latencies(sorted((taken[s] - s / 1e6) * 1000 for s in sent[len(sent) // 10 :]), len(values) / took)


def quantile(
    before: Mapping[str, float], after: Mapping[str, float], name: str, share: float, label: str = ""
) -> float:
    """Return a quantile (ms) of what a histogram of /metrics gained between two scrapes, linear within a bucket.

    `label`: only the series with this label (`stage="embed"`).
    """
    gained = {}
    for key, value in after.items():
        if key.startswith(f"{name}_bucket{{") and label in key:
            bound = float(key.partition('le="')[2].partition('"')[0])
            gained[bound] = value - before.get(key, 0.0)
    return 1000 * metrics.quantile(gained, share)


# -- the rest


def apart(module: str, argument: str, **env: str) -> Any:
    """Return what a module of the benchmarks measures in a process of its own: JSON, the last line that it prints."""
    command = [sys.executable, "-m", module, argument]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, check=False, timeout=1800
    )
    if done.returncode:
        raise BenchmarkError(f"{module} ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def delete(bootstrap: str, *topics: str) -> None:
    admin(bootstrap, lambda client: client.delete_topics([*topics]))


@contextmanager
def stopped(process: LoggedProcess) -> Iterator[None]:
    """Ask a process to stop at the end, and kill it if it does not within 15 s."""
    try:
        yield
    finally:
        process.terminate()
        with suppress(AssertionError):
            process.wait(15)
        process.close()


async def warm(bootstrap: str, transactions: int) -> None:
    """Make so many transactions like the worker's, one producer for each partition, with a reader behind them."""
    source = await fill(bootstrap, documents(20_000))  # large batches: the other half of what the runs do
    topics = await fresh_topics(bootstrap, source)
    output = topics.outputs[ACCEPTED]

    async def transact(partition: int) -> None:
        name, value = f"{topics.group}-warm-{partition}", source.values[partition]
        async with AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=name) as producer:
            for i in range(transactions // PARTITIONS):
                async with producer.transaction():
                    targets = output, topics.changelog
                    sent = [await producer.send(target, value, b"key", partition) for target in targets]
                    await asyncio.gather(*sent)
                    offsets = {TopicPartition(source.name, partition): i + 1}
                    await producer.send_offsets_to_transaction(offsets, topics.group)
                await asyncio.sleep(0.005)  # at once, it would wait for the markers of the last one (20 ms, aiokafka's)

    async with AIOKafkaConsumer(
        output, source.name, bootstrap_servers=bootstrap, isolation_level="read_committed", auto_offset_reset="earliest"
    ) as consumer:

        async def read() -> None:
            while True:
                await consumer.getmany(timeout_ms=500)

        reading = asyncio.create_task(read())
        await asyncio.gather(*map(transact, range(PARTITIONS)))
        reading.cancel()
    await asyncio.to_thread(delete, bootstrap, source.name, topics.changelog, *topics.outputs.values())

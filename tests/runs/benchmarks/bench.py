"""What every part of the measurement works with: the broker, the results, how long to measure, processes."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from tests.runs.benchmarks import latency
from tests.runs.benchmarks.results import Results
from tests.runs.benchmarks.watch import Timeline, follow, read_outputs
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

PRODUCT: Final = "worker"
STAND_IN: Final = "tests.runs.benchmarks.bench_worker"


class PeerProcess(LoggedProcess):
    """A peer as a process, its output in a file."""

    def __init__(self, module: str, arguments: list[str], log_path: Path) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("KP_", "Quix__"))}
        super().__init__(module, arguments, {**inherited, "OPENBLAS_NUM_THREADS": "1"}, log_path)


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
    ) -> latency.Latencies:
        """Send values at a rate, and wait for the outputs: see `latency.measure`."""
        return asyncio.run(latency.measure(self.bootstrap, topics, values, rate, patience, in_flight))

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
        try:
            process.terminate()
            process.wait(15)
        except AssertionError:
            pass
        finally:
            process.close()


async def warm(bootstrap: str, transactions: int) -> None:
    """Make so many transactions like the worker's, one producer for each partition, with a reader behind them."""
    source = await fill(bootstrap, documents(20_000))  # large batches: the other half of what the runs do
    topics = await fresh_topics(bootstrap, source)
    output = topics.outputs[ACCEPTED]
    async with AIOKafkaConsumer(
        output, source.name, bootstrap_servers=bootstrap, isolation_level="read_committed", auto_offset_reset="earliest"
    ) as consumer:
        reading = asyncio.create_task(_read(consumer))
        each = transactions // PARTITIONS
        targets = (output, topics.changelog)
        await asyncio.gather(*(_transact(bootstrap, source, n, topics.group, targets, each) for n in range(PARTITIONS)))
        reading.cancel()
    await asyncio.to_thread(delete, bootstrap, source.name, topics.changelog, *topics.outputs.values())


async def _read(consumer: AIOKafkaConsumer) -> None:
    while True:
        await consumer.getmany(timeout_ms=500)


async def _transact(
    bootstrap: str, source: Source, partition: int, group: str, targets: tuple[str, ...], count: int
) -> None:
    tp = TopicPartition(source.name, partition)
    value = source.values[partition]
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=f"{group}-warm-{partition}") as producer:
        for i in range(count):
            async with producer.transaction():
                sent = [await producer.send(target, value, b"key", partition) for target in targets]
                await asyncio.gather(*sent)
                await producer.send_offsets_to_transaction({tp: i + 1}, group)
            await asyncio.sleep(0.005)  # at once, it would wait for the markers of the last one (20 ms, aiokafka's)

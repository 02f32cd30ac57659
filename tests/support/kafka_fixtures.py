"""Fixtures and helpers for tests against a real Kafka; tests/conftest.py imports the fixtures.

One broker serves the whole session: take names from unique(). `name_async` is `name` for async tests.
"""

import asyncio
import contextlib
import functools
import http.client
import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import TopicAlreadyExistsError, for_code
from aiokafka.structs import OffsetAndMetadata
from prometheus_client.parser import text_string_to_metric_families

from tests.support.processes import start_fork
from tests.support.surroundings import environment
from worker.kafka import describe
from worker.lab.broker.embedded_kafka import EmbeddedKafka
from worker.lab.broker.kafka_node import free_ports

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE_S = 60.0  # one broker answer on a busy machine; it only decides when a broken test gives up


@pytest.fixture(scope="session")
def kafka() -> Iterator[EmbeddedKafka]:
    """Run one broker for the session. A broker that cannot start is an error, never a skip."""
    with EmbeddedKafka() as broker:
        yield broker


@pytest.fixture
def cluster() -> Iterator[EmbeddedKafka]:
    """Run three nodes for a test. They are not kept: idle they take 12 % of a core, for a start of 5 s of CPU."""
    with EmbeddedKafka(3) as brokers:
        yield brokers


class Record(NamedTuple):
    """A record to produce; None lets the producer choose partition and time (milliseconds)."""

    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes]] = ()
    partition: int | None = None
    timestamp_ms: int | None = None


def unique(name: str) -> str:
    """Return a topic, group or transaction name that no other test has."""
    return f"{name}-{uuid.uuid4().hex[:12]}"


def wait_until(condition: Callable[[], object], timeout: float = PATIENCE_S, pause: float = 0.1) -> bool:
    """Return whether the condition came true in time (seconds).

    Looks take a part of the cores that others wait for: the pause between two grows to three times its first length.
    """
    begun = time.monotonic()
    while not condition():
        waited = time.monotonic() - begun
        if waited > timeout:
            return False
        time.sleep(min(max(pause, waited / 10), 3 * pause))
    return True


TopicSpec = int | tuple[int, Mapping[str, str]]


@contextlib.asynccontextmanager
async def _admin(bootstrap: str) -> AsyncIterator[AIOKafkaAdminClient]:
    client = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


def admin(bootstrap: str, action: Callable[[AIOKafkaAdminClient], Awaitable[T]]) -> T:
    """Return what an action of an admin client returns."""

    async def run() -> T:
        async with _admin(bootstrap) as client:
            return await action(client)

    return asyncio.run(run())


async def create_topics_async(bootstrap: str, topics: Mapping[str, TopicSpec]) -> None:
    """Create topics, name -> partitions or (partitions, configs); replication is the cluster's default.

    Returns when the brokers know a leader of each partition: creation is seen a little later than done.
    """
    wanted = []
    for name, spec in topics.items():
        partitions, configs = (spec, {}) if isinstance(spec, int) else spec
        # aiokafka takes -1 (the default) only beside an assignment; an empty one means none to Kafka.
        wanted.append(NewTopic(name, partitions, -1, replica_assignments={}, topic_configs=dict(configs)))
    async with _admin(bootstrap) as client, asyncio.timeout(PATIENCE_S):
        answer = await client.create_topics(wanted)
        for name, code, *rest in answer.topic_errors:
            if code:
                raise for_code(code)(f"{name}: {rest}")
        while True:
            described = await client.describe_topics(list(topics))
            if all(not t["error_code"] and all(p["leader"] >= 0 for p in t["partitions"]) for t in described):
                return
            await asyncio.sleep(0.05)


async def produce_async(bootstrap: str, topic: str, records: Iterable[Sequence[Any]]) -> list[tuple[int, int]]:
    """Produce Records (or plain tuples, shorter ones too) with acks=all; return (partition, offset) of each."""
    producer = AIOKafkaProducer(
        bootstrap_servers=bootstrap, acks="all", enable_idempotence=True, max_request_size=16 << 20
    )
    try:  # `async with` would leave one open whose start fails
        await producer.start()
        sent = [
            await producer.send(topic, r.value, r.key, r.partition, r.timestamp_ms, list(r.headers))
            for r in (Record(*record) for record in records)
        ]
        done = await asyncio.gather(*sent)
    finally:
        await producer.stop()
    return [(metadata.partition, metadata.offset) for metadata in done]


async def consume_all_async(bootstrap: str, topic: str, isolation: str = "read_committed") -> list[Any]:
    """Return all records up to the end at the time of the call, partition by partition.

    With read_committed the end is the last stable offset: an open transaction hides what follows it. One that is just
    ending is waited for: the group's offset may be visible some ms before the records.
    """
    async with AIOKafkaConsumer(
        bootstrap_servers=bootstrap, isolation_level=isolation, auto_offset_reset="earliest", enable_auto_commit=False
    ) as consumer:
        partitions = [TopicPartition(topic, p) for p in sorted(await _partitions(consumer, topic))]
        ends = await consumer.end_offsets(partitions)
        patience = time.monotonic() + 2  # a transaction whose end is decided takes some ms to end in each partition
        while ends != await _all_ends(consumer, partitions) and time.monotonic() < patience:
            await asyncio.sleep(0.02)
            ends = await consumer.end_offsets(partitions)
        consumer.assign(partitions)
        records: list[Any] = []
        async with asyncio.timeout(PATIENCE_S):
            while [tp for tp in partitions if await consumer.position(tp) < ends[tp]]:
                for batch in (await consumer.getmany(timeout_ms=100)).values():
                    records += [it for it in batch if it.offset < ends[TopicPartition(it.topic, it.partition)]]
    return sorted(records, key=lambda record: (record.partition, record.offset))


async def _all_ends(consumer: AIOKafkaConsumer, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
    """Return the ends of the log, whatever the consumer's isolation; the consumer must not fetch meanwhile."""
    fetcher = consumer._fetcher
    isolation, fetcher._isolation_level = fetcher._isolation_level, 0
    try:
        return dict(await consumer.end_offsets(partitions))
    finally:
        fetcher._isolation_level = isolation


async def _partitions(consumer: AIOKafkaConsumer, topic: str) -> set[int]:
    for _ in range(10):  # a broker that has just come back may not know its topics yet
        await consumer._client.set_topics([topic])
        await consumer._client.force_metadata_update()
        if partitions := consumer.partitions_for_topic(topic):
            return set(partitions)
        await asyncio.sleep(0.5)
    raise AssertionError(f"no topic {topic}")


async def committed_async(bootstrap: str, group: str, topic: str) -> dict[int, int]:
    """Return the group's committed offsets of the topic: partition -> offset, without partitions that have none."""
    # Not the admin client: it does not retry while the group's coordinator comes up, and takes some errors
    # for "nothing committed".
    async with (
        asyncio.timeout(PATIENCE_S),
        AIOKafkaConsumer(bootstrap_servers=bootstrap, group_id=group, enable_auto_commit=False) as consumer,
    ):
        partitions = sorted(await _partitions(consumer, topic))
        offsets = {p: await consumer.committed(TopicPartition(topic, p)) for p in partitions}
    return {p: offset for p, offset in offsets.items() if offset is not None}


def _sync(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Return a coroutine function as an ordinary one."""
    return functools.wraps(function)(lambda *args, **kwargs: asyncio.run(function(*args, **kwargs)))


create_topics = _sync(create_topics_async)
produce = _sync(produce_async)
consume_all = _sync(consume_all_async)
committed = _sync(committed_async)


def topic_id(bootstrap: str, topic: str) -> str:
    found = admin(bootstrap, lambda client: describe.topic_id(client, topic))
    assert found is not None
    return found


def create_again(bootstrap: str, topic: str, spec: TopicSpec) -> None:
    """Create a topic as soon as its deletion is done: it gets another id."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return create_topics(bootstrap, {topic: spec})
        except TopicAlreadyExistsError:
            assert time.monotonic() < deadline


class LoggedProcess:
    """Run `python -m module` with this environment, its output in a file. close() kills it, by its own pid only.

    `cold`: with imports of its own, see tests/support/warm.py.
    """

    def __init__(
        self, module: str, args: Sequence[str], env: Mapping[str, str], log_path: Path | None = None, *,
        cold: bool = False,
    ) -> None:  # fmt: skip
        self.log_path = log_path or Path(tempfile.mkdtemp(prefix="kp-worker-")) / "log"
        env = {**env, "PYTHONUNBUFFERED": "1"}
        with self.log_path.open("ab") as output, open(os.devnull, "rb") as nothing:
            self.process = start_fork(
                module, args, env, stdin=nothing, stdout=output, stderr=output, cold=cold
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        return self.process.poll()

    def log(self) -> str:
        """Return everything it wrote to stdout and stderr so far."""
        return self.log_path.read_text(errors="replace")

    def terminate(self) -> None:
        """Send SIGTERM; wait() for the end."""
        self.process.terminate()

    def wait(self, timeout: float = PATIENCE_S) -> int:
        """Return the exit status when it has ended. Raises AssertionError with the log if it is late (seconds)."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the process did not end in {timeout} s:\n{self.log()}") from None

    def finish(self) -> None:
        """Stop it by SIGTERM: it must end with 0. Raises AssertionError with the log."""
        self.terminate()
        assert self.wait() == 0, self.log()

    def close(self) -> None:
        """Kill it by SIGKILL if it still runs, and wait."""
        self.process.kill()
        self.process.wait()


class WorkerProcess(LoggedProcess):
    """Run `python -m worker` (or another module) with the given KP_* settings; no KP_* of this process is passed on.

    Starts at once. KP_HTTP_PORT is a free port unless given. close() (also the end of `with`, and the
    `workers` fixture) kills the process, by its own pid only.
    """

    def __init__(
        self, env: Mapping[str, str], args: Sequence[str] = ("run",), *, log_path: Path | None = None,
        module: str = "worker", cold: bool = False,
    ) -> None:  # fmt: skip
        self.http_port = int(env.get("KP_HTTP_PORT") or free_ports(1)[0])
        settings = {**env, "KP_HTTP_PORT": str(self.http_port)}
        super().__init__(module, args, environment(**settings), log_path, cold=cold)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, path: str, timeout: float = 5) -> tuple[int, str]:
        """Return status and body of an HTTP GET. Raises OSError while nothing listens, or after `timeout` seconds."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=timeout)
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def readyz(self) -> tuple[int, str]:
        """Return status and body of /readyz; 0 and "" while nothing answers."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.get("/readyz")
        return 0, ""

    def _wait(self, condition: Callable[[], object], what: str, timeout: float = PATIENCE_S) -> None:
        """Return when the condition is true. Raises AssertionError with the log if that is late (seconds)."""
        try:
            assert wait_until(condition, timeout, 0.05), f"not in {timeout} s: {what}\n{self.log()}"
        except OSError as error:  # it has ended
            raise AssertionError(f"{error} before: {what}\n{self.log()}") from error

    def wait_ready(self, timeout: float = PATIENCE_S) -> Self:
        """Return when /readyz says 200. Raises AssertionError with the log if it ends or is late (seconds)."""

        def ready() -> bool:
            status, _ = self.readyz()  # another process may answer on its port
            assert self.returncode is None, f"ended with {self.returncode} before it was ready:\n{self.log()}"
            return status == 200

        self._wait(ready, "ready", timeout)
        return self

    def wait_words(self, words: str) -> None:
        """Return when /readyz says the words. Raises AssertionError with the log."""
        self._wait(lambda: words in self.readyz()[1], f"{words!r} on /readyz")

    def wait_log(self, words: str, timeout: float = PATIENCE_S) -> None:
        """Return when the log has the words. Raises AssertionError with the log."""
        self._wait(lambda: words in self.log(), f"{words!r} in the log", timeout)

    def _samples(self, name: str = "") -> list[Any]:
        lines = self.get("/metrics", PATIENCE_S)[1].splitlines()  # to read them all takes 10 ms
        text = "\n".join(line for line in lines if line.startswith(name))
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def metrics(self) -> dict[str, float]:
        """Return /metrics as sample -> value; with labels the key is name{a="x",b="y"}, labels in order."""
        samples = {}
        for sample in self._samples():
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return samples

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of all samples of that name that carry the given labels; 0 if there are none."""
        samples = (sample for sample in self._samples(name) if sample.name == name)
        return sum(float(sample.value) for sample in samples if labels.items() <= sample.labels.items())

    def wait_metric(self, name: str, value: float, **labels: str) -> None:
        """Return when the metric has that value: a reader sees a commit a moment before the worker counts it.

        Raises AssertionError with the log after PATIENCE_S.
        """
        self._wait(lambda: self.metric(name, **labels) == value, f"{name}{labels} is {value}")

    def kill(self) -> None:
        """Kill by SIGKILL, as a crash does, and wait."""
        self.close()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def cont(self) -> None:
        """Go on after stop()."""
        self.process.send_signal(signal.SIGCONT)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Callable[..., WorkerProcess]]:
    """Start workers as WorkerProcess(env, args) does; the rest of them are killed after the test."""
    started: list[WorkerProcess] = []

    def start(
        env: Mapping[str, str], args: Sequence[str] = ("run",), module: str = "worker", *, cold: bool = False
    ) -> WorkerProcess:
        log = tmp_path / f"worker-{len(started)}.log"
        started.append(WorkerProcess(env, args, log_path=log, module=module, cold=cold))
        return started[-1]

    yield start
    for worker in started:
        worker.close()


@pytest.fixture
def hashing(workers: Callable[..., WorkerProcess]) -> Callable[[Mapping[str, str]], WorkerProcess]:
    """Start real workers with the stand-in embedder of crash_worker.py."""
    return lambda env: workers(env, (), "tests.support.crash_worker")


def commit_offset(bootstrap: str, group: str, topic: str, offset: int, partition: int = 0, metadata: str = "") -> None:
    """Commit a group's offset, as a worker does, or without metadata, as Kafka's tools do."""

    async def commit() -> None:
        async with AIOKafkaConsumer(bootstrap_servers=bootstrap, group_id=group, enable_auto_commit=False) as consumer:
            tp = TopicPartition(topic, partition)
            consumer.assign([tp])
            await consumer.commit({tp: OffsetAndMetadata(offset, metadata)})

    asyncio.run(commit())


def wait_committed(bootstrap: str, group: str, topic: str, count: int, timeout: float = 90.0) -> None:
    """Return when the sum of the group's offsets of the topic is `count`. Raises AssertionError after the timeout."""

    def done() -> int:
        return sum(committed(bootstrap, group, topic).values())

    assert wait_until(lambda: done() >= count, timeout, 0.05), f"{done()} of {count} committed"

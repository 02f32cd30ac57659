"""Fixtures and helpers for tests against a real Kafka; tests/conftest.py imports the fixtures.

Belongs here: the shared brokers, plain-value access to topics and groups, and the worker as a process. Does not
belong here: knowledge of traces, scores or the worker's topics. Each helper exists as `name(...)` for sync tests
and `name_async(...)` for async ones. One broker serves the whole session: take names from unique().
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError, for_code
from aiokafka.structs import OffsetAndMetadata
from prometheus_client.parser import text_string_to_metric_families

from tests.support import warm
from tests.support.surroundings import ROOT, environment
from worker.kafka.cluster import describe
from worker.lab.broker.embedded_kafka import EmbeddedKafka
from worker.lab.broker.kafka_node import free_ports

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE_S = 60.0  # one broker answer on a busy machine; it only decides when a broken test gives up
METADATA_ATTEMPTS = 10
ENDING_S = 2.0  # a transaction whose end is decided takes some ms to end in each partition


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


async def create_topics_async(bootstrap: str, topics: Mapping[str, TopicSpec]) -> None:
    """Create topics, name -> partitions or (partitions, configs); replication is the cluster's default."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        wanted = []
        for name, spec in topics.items():
            partitions, configs = (spec, {}) if isinstance(spec, int) else spec
            # aiokafka takes -1 (the default) only beside an assignment; an empty one means none to Kafka.
            wanted.append(NewTopic(name, partitions, -1, replica_assignments={}, topic_configs=dict(configs)))
        answer = await admin.create_topics(wanted)
        for name, code, *rest in answer.topic_errors:
            if code:
                raise for_code(code)(f"{name}: {rest}")
        await _wait_leaders(admin, topics)
    finally:
        await admin.close()


async def _wait_leaders(admin: AIOKafkaAdminClient, topics: Mapping[str, TopicSpec]) -> None:
    """Return when the brokers know a leader of each partition: creation is seen a little later than done."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = await admin.describe_topics(list(topics))
            if all(not t["error_code"] and all(p["leader"] >= 0 for p in t["partitions"]) for t in found):
                return
            await asyncio.sleep(0.05)


async def produce_async(bootstrap: str, topic: str, records: Iterable[Sequence[Any]]) -> list[tuple[int, int]]:
    """Produce Records (or plain tuples, shorter ones too) with acks=all; return (partition, offset) of each."""
    async with AIOKafkaProducer(
        bootstrap_servers=bootstrap, acks="all", enable_idempotence=True, max_request_size=16 << 20
    ) as producer:
        sent = []
        for record in (Record(*r) for r in records):
            future = await producer.send(
                topic,
                key=record.key,
                value=record.value,
                headers=list(record.headers),
                partition=record.partition,
                timestamp_ms=record.timestamp_ms,
            )
            sent.append(future)
        done = await asyncio.gather(*sent)
    return [(metadata.partition, metadata.offset) for metadata in done]


async def consume_all_async(
    bootstrap: str, topic: str, isolation: str = "read_committed", make: Callable[..., Any] = AIOKafkaConsumer
) -> list[Any]:
    """Return all records up to the end at the time of the call, partition by partition. `make`: the consumer's class.

    With read_committed the end is the last stable offset: an open transaction hides what follows it. One that is just
    ending is waited for: the group's offset may be visible some ms before the records.
    """
    async with make(
        bootstrap_servers=bootstrap, isolation_level=isolation, auto_offset_reset="earliest", enable_auto_commit=False
    ) as consumer:
        partitions = [TopicPartition(topic, p) for p in sorted(await _partitions(consumer, topic))]
        ends = await consumer.end_offsets(partitions)
        patience = time.monotonic() + ENDING_S
        while ends != await _all_ends(consumer, partitions) and time.monotonic() < patience:
            await asyncio.sleep(0.02)
            ends = await consumer.end_offsets(partitions)
        consumer.assign(partitions)
        records: list[Any] = []
        async with asyncio.timeout(PATIENCE_S):
            while [tp for tp in partitions if await consumer.position(tp) < ends[tp]]:
                for batch in (await consumer.getmany(timeout_ms=100)).values():
                    records += [record for record in batch if record.offset < ends[_tp(record)]]
    return sorted(records, key=lambda record: (record.partition, record.offset))


async def _all_ends(consumer: AIOKafkaConsumer, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
    """Return the ends of the log, whatever the consumer's isolation; the consumer must not fetch meanwhile."""
    fetcher = consumer._fetcher
    isolation, fetcher._isolation_level = fetcher._isolation_level, 0
    try:
        return dict(await consumer.end_offsets(partitions))
    finally:
        fetcher._isolation_level = isolation


def _tp(record: Any) -> TopicPartition:
    return TopicPartition(record.topic, record.partition)


async def _partitions(consumer: AIOKafkaConsumer, topic: str) -> set[int]:
    for _ in range(METADATA_ATTEMPTS):  # a broker that has just come back may not know its topics yet
        await consumer._client.set_topics([topic])
        await consumer._client.force_metadata_update()
        found = consumer.partitions_for_topic(topic)
        if found:
            return set(found)
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


async def topic_id_async(bootstrap: str, topic: str) -> str:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        found = await describe.topic_id(admin, topic)
    finally:
        await admin.close()
    assert found is not None
    return found


def _sync(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Return a coroutine function as an ordinary one."""
    return functools.wraps(function)(lambda *args, **kwargs: asyncio.run(function(*args, **kwargs)))


topic_id = _sync(topic_id_async)
create_topics = _sync(create_topics_async)
produce = _sync(produce_async)
consume_all = _sync(consume_all_async)
committed = _sync(committed_async)


def recreate_topic(bootstrap: str, topic: str, partitions: int) -> None:
    """Delete a topic, and create it again under the same name: it gets another id."""
    admin(bootstrap, lambda client: client.delete_topics([topic]))
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return create_topics(bootstrap, {topic: partitions})
        except KafkaError:  # the deletion is not done yet
            assert time.monotonic() < deadline
            time.sleep(0.2)


class LoggedProcess:
    """Run `python -m module` with this environment, its output in a file. close() kills it, by its own pid only.

    `cold`: with imports of its own, see tests/support/warm.py.
    """

    def __init__(
        self,
        module: str,
        args: Sequence[str],
        env: Mapping[str, str],
        log_path: Path | None = None,
        *,
        cold: bool = False,
    ) -> None:
        if log_path is None:
            handle, name = tempfile.mkstemp(prefix="kp-worker-", suffix=".log")
            os.close(handle)
            log_path = Path(name)
        self.log_path = log_path
        env = {**env, "PYTHONUNBUFFERED": "1"}
        self.process: subprocess.Popen[bytes] | warm.WarmProcess
        with log_path.open("ab") as output:
            if warm.enabled and not cold:
                self.process = warm.WarmProcess(module, args, env, ROOT, stdout=output, stderr=output)
            else:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", module, *args],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=ROOT,
                )

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
        self,
        env: Mapping[str, str],
        args: Sequence[str] = ("run",),
        *,
        log_path: Path | None = None,
        module: str = "worker",
        cold: bool = False,
    ) -> None:
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

    def wait_ready(self, timeout: float = PATIENCE_S) -> Self:
        """Return when /readyz says 200. Raises AssertionError with the log if it ends or is late (seconds)."""

        def ready() -> bool:
            with contextlib.suppress(OSError, http.client.HTTPException):
                return self.get("/readyz")[0] == 200
            return False

        deadline = time.monotonic() + timeout
        while not ready() or self.returncode is not None:  # another process may answer on its port
            if self.returncode is not None:
                raise AssertionError(f"the worker ended with {self.returncode} before it was ready:\n{self.log()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"the worker was not ready in {timeout} s:\n{self.log()}")
            time.sleep(0.05)
        return self

    def wait_words(self, words: str, timeout: float = PATIENCE_S) -> None:
        """Return when /readyz says the words. Raises AssertionError with the log if it is late (seconds)."""
        deadline = time.monotonic() + timeout
        said = ""
        while words not in said:
            assert time.monotonic() < deadline, f"/readyz says {said!r}, not {words!r}:\n{self.log()}"
            time.sleep(0.1)
            with contextlib.suppress(OSError, http.client.HTTPException):
                said = self.get("/readyz")[1]

    def metrics(self) -> dict[str, float]:
        """Return /metrics as sample -> value; with labels the key is name{a="x",b="y"}, labels in order."""
        samples = {}
        for family in text_string_to_metric_families(self.get("/metrics", PATIENCE_S)[1]):
            for sample in family.samples:
                labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
                samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return samples

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of all samples of that name that carry the given labels; 0 if there are none."""
        lines = self.get("/metrics", PATIENCE_S)[1].splitlines()  # to read them all takes 10 ms
        families = text_string_to_metric_families("\n".join(line for line in lines if line.startswith(name)))
        samples = (sample for family in families for sample in family.samples if sample.name == name)
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def wait_metric(self, name: str, value: float, **labels: str) -> None:
        """Return when the metric has that value: a reader sees a commit a moment before the worker counts it.

        Raises AssertionError with the log after PATIENCE_S.
        """
        deadline = time.monotonic() + PATIENCE_S
        while (found := self.metric(name, **labels)) != value:
            assert time.monotonic() < deadline, f"{name}{labels} is {found}, not {value}:\n{self.log()}"
            time.sleep(0.1)

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

    assert wait_until(lambda: done() >= count, timeout, 0.2), f"{done()} of {count} committed"


def admin(bootstrap: str, action: Callable[[AIOKafkaAdminClient], Awaitable[T]]) -> T:
    """Return what an action of an admin client returns."""

    async def run() -> T:
        client = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
        await client.start()
        try:
            return await action(client)
        finally:
            await client.close()

    return asyncio.run(run())

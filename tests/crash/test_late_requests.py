"""Requests that reach the broker in a later transaction: nothing is torn, lost, doubled or out of order.

Two groups of workers run side by side through a proxy (tests/support/late_requests.py), with verdicts among their
traces. The topics of one of them refuse every eighth record, so that transactions are also aborted.
"""

import asyncio
import contextlib
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import ProducerFenced

from tests.support import chaos, kafka_versions, oracle
from tests.support.chaos import Fleet, Load, wait_settled
from tests.support.contribute import Booth, accepted_document
from tests.support.crash_worker import hash_vector
from tests.support.kafka_fixtures import (
    WorkerProcess,
    consume_all,
    create_topics,
    create_topics_async,
    topic_id,
    unique,
    wait_until,
)
from tests.support.kafka_tools import write_scripts
from tests.support.late_requests import ABORTS_V1, ABORTS_V2, V1, V2, LateRequests, Scenario, kafka_behind_a_proxy
from tests.support.registry import RegistryThread
from tests.support.stage import Desk, header, origin
from worker.core.trace import Reason
from worker.kafka.producer import Producer
from worker.kafka.rows import OutputTopic, PartitionRows
from worker.lab.broker.embedded_kafka import EmbeddedKafka

pytestmark = pytest.mark.timeout(600)

PARTITIONS = 6
LATE = 25
"""Late requests that a run must have, at least. On a busy machine the load goes on until it has them."""
OUTPUTS = ("accepted", "rejected", "dead-letter", "judged")
REFUSING = ".refusing"
"""Part of the name of the group whose topics refuse records."""

TRANSACTION_SECONDS = 20


class Watch:
    """Looks for a torn state when a request was late: outputs without their offset, or an offset without outputs."""

    def __init__(self) -> None:
        self.torn: list[str] = []
        self.looks = 0
        self.direct = ""
        self._readers: dict[str, AIOKafkaConsumer] = {}
        self._seen: dict[str, dict[int, int]] = {}

    async def __call__(self, transactional_id: str, scenario: Scenario) -> None:
        group, _, number = transactional_id.rpartition("-")
        partition = int(number)
        for _ in range(20):
            await self._read(group)
            visible = self._seen[group].get(partition, -1) + 1
            offset = await self._offset(group, partition)
            if visible == offset:
                break
            await asyncio.sleep(0.1)  # markers are written one after the other
        else:
            self.torn.append(f"{scenario}: {transactional_id}: outputs to {visible}, offset {offset}")
        self.looks += 1

    async def _read(self, group: str) -> None:
        if group not in self._readers:
            reader = AIOKafkaConsumer(
                bootstrap_servers=self.direct, isolation_level="read_committed", enable_auto_commit=False
            )
            self._readers[group], self._seen[group] = reader, {}
            await reader.start()
            reader.assign([TopicPartition(f"{group}.{kind}", p) for kind in OUTPUTS for p in range(PARTITIONS)])
            await reader.seek_to_beginning()
        while found := await self._readers[group].getmany(timeout_ms=50):
            for records in found.values():
                for record in records:
                    partition, offset = origin(record)
                    self._seen[group][partition] = max(offset, self._seen[group].get(partition, -1))

    async def _offset(self, group: str, partition: int) -> int:
        tp = TopicPartition(group, partition)
        reader = AIOKafkaConsumer(bootstrap_servers=self.direct, group_id=group, enable_auto_commit=False)
        try:
            await reader.start()
            return await reader.committed(tp) or 0
        finally:
            await reader.stop()

    async def close(self) -> None:
        for reader in self._readers.values():
            await reader.stop()


ENDS = [each for each in V1 if each.held.startswith("Add") and each.step in ("InitProducerId", "")]
"""A late AddPartitions or AddOffsets in front of InitProducerId opens a transaction of the old epoch. The broker ends
it by fencing, and cannot tell the producer from a former owner: the process ends, and its successor goes on."""


def refused(record: Any) -> bool:
    """Whether the compacted output topics refuse a record: it has no key."""
    return record.key is None


both_protocols = pytest.mark.parametrize(
    "transactions",
    [pytest.param(0, id="V1"), pytest.param(2, id="V2", marks=pytest.mark.since_kafka("4.0", "transactions V2"))],
)


@pytest.mark.sample(1)
@both_protocols
def test_nothing_is_torn_lost_or_doubled(transactions: int, tmp_path: Path, seed: int) -> None:
    plain, aborts = (V1, ABORTS_V1) if transactions < 2 else (V2, ABORTS_V2)
    watch = Watch()
    late = LateRequests(lambda name: aborts if REFUSING in name else plain, seed, on_late=watch)
    with kafka_behind_a_proxy(late, transactions) as (kafka, proxy):
        watch.direct = direct = kafka.bootstrap("PLAINTEXT")
        environments = [settings(kafka, unique("late")), settings(kafka, unique("late") + REFUSING)]
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: proxy.call(watch.close()))
            fleets = [run(stack, kafka, env, tmp_path, seed) for env in environments]
            wait_until(lambda: sum(late.delivered.values()) >= LATE, 180)
            for env, fleet, load in fleets:
                assert wait_settled(direct, env, load.finish(180), 120), fleet.tails()
                assert {exit_.code for exit_ in fleet.unexpected()} <= {1}, f"{fleet.exits}\n{fleet.tails()}"
            late.active = False
            for _, fleet, _ in fleets:
                assert set(fleet.stop_all()) == {0}, fleet.tails()
            topics = [topic for env in environments for topic in written(env["KP_GROUP_ID"])]
            held_up = wait_until(lambda: not unstable(direct, topics), TRANSACTION_SECONDS + 5, 1)
            assert held_up, f"a transaction stays open: {unstable(direct, topics)}"
            reports = [oracle.check(direct, env, hash_vector, refused=refused) for env in environments]
            for _, fleet, _ in fleets:  # a restart publishes nothing again
                fleet.add()
                assert wait_until(fleet.all_ready, 60), fleet.tails()
                assert set(fleet.stop_all()) == {0}, fleet.tails()
        for env, report in zip(environments, reports, strict=True):
            again = oracle.check(direct, env, hash_vector, refused=refused)
            print(again)
            assert not again.problems()
            assert again.judged == report.judged > 0
            assert (again.accepted, again.dead_letters) == (report.accepted, report.dead_letters)
    total, exits = sum(late.delivered.values()), sum(len(fleet.unexpected()) for _, fleet, _ in fleets)
    print(f"{total} late requests, {watch.looks} looked at, {exits} workers ended and were restarted")
    for scenario in sorted(late.delivered):
        print(f"  {scenario}: {late.delivered[scenario]}")
    logs = "\n".join(fleet.tails() for _, fleet, _ in fleets)
    assert exits <= sum(late.delivered[each] for each in ENDS), logs  # a session may also have ended: the log says why
    assert not watch.torn
    assert total >= LATE


def written(name: str) -> list[str]:
    return [f"{name}.{kind}" for kind in OUTPUTS] + [f"{name}-novelty-changelog"]


def unstable(bootstrap: str, topics: Sequence[str]) -> list[TopicPartition]:
    """Return the partitions whose last stable offset is behind their end: a transaction is open."""
    tps = [TopicPartition(topic, number) for topic in topics for number in range(PARTITIONS)]

    async def ends(isolation: str) -> dict[TopicPartition, int]:
        async with AIOKafkaConsumer(bootstrap_servers=bootstrap, isolation_level=isolation) as consumer:
            return await consumer.end_offsets(tps)  # type: ignore[no-any-return]

    stable, all_of_it = asyncio.run(ends("read_committed")), asyncio.run(ends("read_uncommitted"))
    return [tp for tp in tps if stable[tp] < all_of_it[tp]]


def settings(kafka: EmbeddedKafka, name: str) -> dict[str, str]:
    return chaos.settings(
        kafka.bootstrap("PROXIED"),
        name,
        KP_SESSION_TIMEOUT_SECONDS="3",
        KP_TRANSACTION_TIMEOUT_SECONDS=str(TRANSACTION_SECONDS),
    )


def run(
    stack: contextlib.ExitStack, kafka: EmbeddedKafka, env: dict[str, str], logs: Path, seed: int
) -> tuple[dict[str, str], Fleet, Load]:
    """Start a worker on topics of its own, and the load."""
    name = env["KP_GROUP_ID"]
    direct = kafka.bootstrap("PLAINTEXT")
    created = chaos.topics(env, PARTITIONS)
    if REFUSING in name:
        created |= {f"{name}.{kind}": (PARTITIONS, {"cleanup.policy": "compact"}) for kind in ("accepted", "rejected")}
    created[f"{name}.judged"] = PARTITIONS, {}
    create_topics(direct, created)
    logs = logs / name
    logs.mkdir()
    env |= chaos.judging(env, logs)
    fleet = stack.enter_context(Fleet(env, logs))
    fleet.add()
    records = chaos.with_verdicts(seed, chaos.traces(seed, PARTITIONS), name, topic_id(direct, name), share=0.15)
    if REFUSING in name:
        records = (r._replace(key=None) if n % 8 == 5 and r.value else r for n, r in enumerate(records))
    load = Load(direct, name, records, 480, 24, open_end=True)
    load.start()
    return env, fleet, load


@pytest.mark.sample(1, "elsewhere")
@both_protocols
def test_redrive_and_contribute(transactions: int, tmp_path: Path, seed: int) -> None:
    """Each letter goes back once, and the receipts are those of the accepted topic, offset for offset."""
    plain = V1 if transactions < 2 else V2
    plain = [each for each in plain if each not in ENDS]
    without_offsets = [each for each in plain if "Offset" not in each.held + each.step]
    late = LateRequests(lambda name: without_offsets if name.endswith("-redrive") else plain, seed, share=0.6)
    with kafka_behind_a_proxy(late, transactions) as (kafka, _), RegistryThread() as registry:
        direct, proxied = kafka.bootstrap("PLAINTEXT"), kafka.bootstrap("PROXIED")
        booth = Booth(direct, registry, 4)
        documents = [accepted_document(f"kp:trace:{number}") for number in range(160)]
        places = dict(zip((document["id"] for document in documents), booth.put(documents), strict=True))
        with WorkerProcess({**booth.env, "KP_BOOTSTRAP_SERVERS": proxied}, ("contribute",)) as process:
            desk = Desk(kafka)
            desk.letters([(Reason.NOT_JSON, b"not a trace") for _ in range(210)])
            small = "tests.support.crash_redrive"  # transactions
            done = desk.run("redrive", "--execute", module=small, KP_BOOTSTRAP_SERVERS=proxied)
            assert done.returncode == 0, done.stderr
            booth.wait_committed(len(documents))
            late.active = False
            process.finish()
        assert "0 dead letters redriven" in desk.run("redrive", "--execute").stdout
        assert sorted(int(header(record, "n")) for record in desk.read()) == list(range(210))
        receipts = Counter(record.key.decode() for record in consume_all(direct, booth.contributed))
        assert receipts == Counter(places.keys())
        assert booth.committed() == len(documents)
    print(f"late requests: {late.delivered}")
    assert late.delivered.total() >= 10


@pytest.mark.since_kafka("4.0", "transactions V2")
@pytest.mark.sample(1, "elsewhere")
@pytest.mark.parametrize("levels", [(1, 2, 1), (2, 1, 2)])
def test_the_cluster_s_transaction_version_changes_under_load(
    levels: tuple[int, ...], tmp_path: Path, seed: int
) -> None:
    """Raised and lowered, workers go on as they began, and later ones as the cluster is.

    To 1, not 0: Kafka 4.1 then leaves each transactional id that has used transactions V2 waiting until its coordinator
    restarts (docs/operations.md).
    """
    write_scripts(tmp_path)
    first, *others = levels
    with EmbeddedKafka(features={"transaction.version": first}) as kafka, contextlib.ExitStack() as stack:
        direct = kafka.bootstrap_servers
        env, fleet, load = run(stack, kafka, chaos.settings(direct, KP_SESSION_TIMEOUT_SECONDS="3"), tmp_path, seed)
        for level in others:
            assert wait_until(fleet.all_ready, 60), fleet.tails()
            change = "upgrade" if level == 2 else "downgrade"
            script = [tmp_path / "kafka-features.sh", "--bootstrap-server", direct, change]
            subprocess.run([*script, "--feature", f"transaction.version={level}"], check=True)
            fleet.add()
        assert wait_settled(direct, env, load.finish(180), 120), fleet.tails()
        assert set(fleet.stop_all()) == {0}, fleet.tails()
        assert not fleet.unexpected(), fleet.tails()
        report = oracle.check(direct, env, hash_vector)
        print(report)
        assert not report.problems()
        logs = "".join(path.read_text() for path in (tmp_path / env["KP_GROUP_ID"]).glob("*.log"))
        assert "transactions V1" in logs
        assert "transactions V2" in logs


async def test_a_former_owner_s_new_epoch_fences_a_successor_only_in_a_transaction() -> None:
    """An idle one stays, and Kafka refuses the former owner. `owns` keeps this from happening as far as it knows."""
    features = {"transaction.version": 0} if kafka_versions.since("4.0") else None
    async with contextlib.AsyncExitStack() as stack:
        kafka = stack.enter_context(EmbeddedKafka(features=features))
        await create_topics_async(kafka.bootstrap_servers, {"out": (1, {})})
        part = PartitionRows(OutputTopic("out", 1, 1 << 20), 0, [(b"k", b"v", None, [])])

        async def producer(name: str, *, owns: bool = True) -> Producer:
            started = Producer({"bootstrap_servers": kafka.bootstrap_servers}, name, 30, owns=lambda: owns)
            stack.push_async_callback(started.stop)
            await started.start()
            assert started.transactions == 1
            return started

        async def former_owner(name: str, *, owns: bool = True) -> Producer:
            """Return a producer that has ended a transaction, and asks for the next epoch as soon as it may."""
            former = await producer(name, owns=owns)
            await former.begin()
            await former.send([part])
            former._late = True  # something was not answered
            former._known = False  # and the transaction's end was
            return former

        former = await former_owner("idle")
        successor = await producer("idle")
        with pytest.raises(ProducerFenced):
            await former.commit()
        async with successor.transaction():
            await successor.send([part])

        former = await former_owner("busy")
        successor = await producer("busy")
        await successor.begin()
        await successor.send([part])
        with pytest.raises(ProducerFenced):
            await former.commit()
        with pytest.raises(ProducerFenced):
            await successor.commit()

        former = await former_owner("known", owns=False)
        successor = await producer("known")
        await successor.begin()
        await successor.send([part])
        with pytest.raises(ProducerFenced, match="now belongs to another worker"):
            await former.commit()
        await successor.commit()

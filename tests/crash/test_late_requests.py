"""Requests that reach the broker in a later transaction: nothing is torn, lost, doubled or out of order.

Two groups of workers run side by side through a proxy (tests/support/late_requests.py). The topics of one of them
refuse every eighth record, so that transactions are also aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition

from tests.support import chaos, oracle
from tests.support.chaos import Fleet, Load, ready, wait_settled, wait_until
from tests.support.crash_worker import hash_vector
from tests.support.figures import open_transactions
from tests.support.kafka_fixtures import create_topics, unique
from tests.support.late_requests import (
    ABORTS_V1,
    ABORTS_V2,
    V1,
    V2,
    LateRequests,
    Scenario,
    kafka_behind_a_proxy,
)
from tests.support.stage import origin
from worker.broker.embedded_kafka import EmbeddedKafka

pytestmark = pytest.mark.timeout(600)

PARTITIONS = 6
RECORDS = 480
RATE = 24
OUTPUTS = ("accepted", "rejected", "dead-letter")
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
        if not scenario.step:
            return  # the next transaction may have ended meanwhile
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


def refused(record: Any) -> bool:
    """Whether the compacted output topics refuse a record: it has no key."""
    return record.key is None


@pytest.mark.parametrize(
    "transactions",
    [pytest.param(0, id="V1"), pytest.param(2, id="V2", marks=pytest.mark.since_kafka("4.0", "transactions V2"))],
)
def test_nothing_is_torn_lost_or_doubled(transactions: int, tmp_path: Path, seed: int) -> None:
    plain, aborts = (V1, ABORTS_V1) if transactions < 2 else (V2, ABORTS_V2)
    watch = Watch()
    late = LateRequests(lambda name: aborts if REFUSING in name else plain, seed, on_late=watch)
    with kafka_behind_a_proxy(late, transactions) as (kafka, proxy):
        watch.direct = direct = kafka.bootstrap("PLAINTEXT")
        environments = [settings(kafka, unique("late")), settings(kafka, unique("late") + REFUSING)]
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: proxy.run_there(watch.close()))
            fleets = [run(stack, kafka, env, tmp_path, seed) for env in environments]
            for env, fleet, load in fleets:
                assert wait_settled(direct, env, load.finish(180), 120), fleet.tails()
                assert {exit_.code for exit_ in fleet.unexpected()} <= {1}, f"{fleet.exits}\n{fleet.tails()}"
            late.active = False
            for _, fleet, _ in fleets:
                assert set(fleet.stop_all()) == {0}, fleet.tails()
            reports = [oracle.check(direct, env, hash_vector, refused=refused) for env in environments]
            for _, fleet, _ in fleets:  # a restart publishes nothing again
                fleet.add()
                assert wait_until(lambda: all(map(ready, fleet.running())), 60), fleet.tails()  # noqa: B023
                assert set(fleet.stop_all()) == {0}, fleet.tails()
        for env, report in zip(environments, reports, strict=True):
            again = oracle.check(direct, env, hash_vector, refused=refused)
            print(again)
            assert not again.problems()
            assert (again.accepted, again.dead_letters) == (report.accepted, report.dead_letters)
            open_now = asyncio.run(open_transactions(direct, env["KP_GROUP_ID"], TRANSACTION_SECONDS * 1000))
            assert not open_now, "older than the transaction timeout"
    total, exits = sum(late.delivered.values()), sum(len(fleet.unexpected()) for _, fleet, _ in fleets)
    print(f"{total} late requests, {watch.looks} looked at, {exits} workers ended and were restarted")
    for scenario in sorted(late.delivered):
        print(f"  {scenario}: {late.delivered[scenario]}")
    # A late AddPartitions or AddOffsets in front of InitProducerId opens a transaction of the old epoch. The broker
    # ends it by fencing, and cannot tell the producer from a former owner.
    assert exits <= sum(late.delivered[each] for each in V1 if each.held[:3] == "Add" and each.step == "InitProducerId")
    assert not watch.torn
    assert total >= 25


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
    create_topics(direct, created)
    logs = logs / name
    logs.mkdir()
    fleet = stack.enter_context(Fleet(env, logs))
    fleet.add()
    records = chaos.traces(seed, PARTITIONS)
    if REFUSING in name:
        records = (r._replace(key=None) if n % 8 == 5 and r.value else r for n, r in enumerate(records))
    load = Load(direct, name, records, RECORDS, RATE)
    load.start()
    return env, fleet, load

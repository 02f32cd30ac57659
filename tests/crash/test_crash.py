"""Workers and brokers die at random moments under load; an independent oracle judges what came out."""

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor

from tests.support import chaos, oracle
from tests.support.chaos import Chaos, Fleet, Load, settings, shuffled, traces, wait_settled
from tests.support.crash_worker import hash_vector
from tests.support.kafka_fixtures import admin, create_topics, create_topics_async, produce_async, topic_id, wait_until
from worker.lab.broker.embedded_kafka import EmbeddedKafka

pytestmark = pytest.mark.timeout(900)

PATIENCE_S = 300.0


@pytest.fixture(autouse=True)
def _quiet() -> None:
    chaos.quiet_clients()


def finish(kafka: EmbeddedKafka, fleet: Fleet, load: Load) -> oracle.Report:
    """Let the fleet work off the rest, stop it, and judge."""
    ends = load.finish(PATIENCE_S)
    assert wait_settled(kafka.bootstrap_servers, fleet.env, ends, PATIENCE_S), f"not settled\n{fleet.tails()}"
    assert set(fleet.stop_all()) <= {0}, fleet.tails()
    print(chaos.log_report(fleet.logs))
    print(f"exits that nobody asked for: {fleet.unexpected()}")
    report = oracle.check(kafka.bootstrap_servers, fleet.env, hash_vector)
    print(report)
    assert report.source == sum(ends.values())
    return report


ALL = {"sigkill": 2, "sigterm": 1, "zombie": 1, "join": 1, "leave": 1, "restart_broker": 1}
MORE = {"sigkill": 6, "sigterm": 2, "zombie": 1, "join": 3, "leave": 3, "restart_broker": 1}
CASES: dict[str, tuple[dict[str, str], tuple[dict[str, int], ...], tuple[tuple[int, int], ...]]] = {
    # A trace of the view "objective" is two texts, equal objectives are embedded once.
    "whole": ({"TEST_EMBED_MS": "12"}, (ALL, MORE), ((1000, 30), (3500, 50))),
    "objective": ({"TEST_EMBED_MS": "8", "KP_EMBED_TEXT": "objective"}, (ALL, MORE), ((1000, 30), (3500, 50))),
    # The oracle reads the source topic, and counts the verdicts in front of each trace.
    "verdicts": (
        {"TEST_EMBED_MS": "8"}, ({"sigkill": 2, "join": 1}, {"sigkill": 3, "join": 1}), ((900, 80), (1600, 80))
    ),
    "at least once": (
        {"TEST_EMBED_MS": "3", "KP_DELIVERY": "at_least_once"},
        ({"sigkill": 2, "join": 1, "zombie": 1}, {"sigkill": 5, "join": 1, "zombie": 1}), ((1200, 120), (5000, 250)),
    ),
}  # fmt: skip
"""Settings; disturbances, and records and their rate, each for a short run and for a long one."""


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", CASES)
def test_kills_zombies_rebalances_and_a_broker_s_restart(
    kafka: EmbeddedKafka, tmp_path: Path, seed: int, long: bool, case: str
) -> None:
    """Each record comes out once; at least once, repeats are the same bytes."""
    extra, plans, amounts = CASES[case]
    env = settings(kafka.bootstrap_servers, **extra)
    create_topics(kafka.bootstrap_servers, chaos.topics(env))
    records = traces(seed, 4)
    if case == "verdicts":
        env |= chaos.judging(env, tmp_path)
        identity = topic_id(kafka.bootstrap_servers, env["KP_SOURCE_TOPIC"])
        records = chaos.with_verdicts(seed, records, env["KP_SOURCE_TOPIC"], identity, share=0.3)
    plan = shuffled(seed, **plans[long])
    with Fleet(env, tmp_path) as fleet:
        fleet.add()
        load = Load(kafka.bootstrap_servers, env["KP_SOURCE_TOPIC"], records, *amounts[long])
        load.start()
        violence = Chaos(kafka, fleet, seed)
        violence.run(plan)
        report = finish(kafka, fleet, load)
    assert violence.done >= Counter(plan)
    assert not report.problems(at_least_once=case == "at least once")
    assert min(report.accepted, report.rejected, report.dead_letters) > (50 if long else 20)
    assert (report.judged > 100) == (case == "verdicts")


@pytest.mark.sample(1, "brokers")
def test_three_brokers_lose_one_after_the_other(cluster: EmbeddedKafka, tmp_path: Path, seed: int, long: bool) -> None:
    """By the seed one of the three that matter; all of them in a long run."""
    env = settings(cluster.bootstrap_servers, TEST_EMBED_MS="10")
    create_topics(cluster.bootstrap_servers, {env["KP_SOURCE_TOPIC"]: 4})
    rng = random.Random(seed)
    roles = ["the transaction coordinator", "a leader of the source", "the group's coordinator"]
    roles = roles if long else [rng.choice(roles)]
    with Fleet(env, tmp_path) as fleet:
        fleet.add()
        fleet.add()
        load = Load(cluster.bootstrap_servers, env["KP_SOURCE_TOPIC"], traces(seed, 4), 800 * len(roles), 60)
        load.start()
        violence = Chaos(cluster, fleet, seed)
        for role in roles:
            assert wait_until(fleet.all_ready, 90), fleet.tails()
            node = holder(cluster.bootstrap_servers, env, role)
            time.sleep(rng.uniform(0.5, 3))
            violence.say(f"SIGKILL broker {node}, {role}")
            cluster.kill_node(node)
            time.sleep(rng.uniform(1, 6))
            if rng.random() < 0.5:
                violence.sigkill()
            cluster.start_node(node)
            violence.say(f"broker {node} is back")
            assert wait_until(lambda: in_sync(cluster.bootstrap_servers, env), 90, 0.5), "replicas lag"
        report = finish(cluster, fleet, load)
    assert not report.problems()


@pytest.mark.sample(1, "brokers")
@pytest.mark.parametrize("seconds", [4, 14])
def test_a_broker_that_hangs_and_goes_on(tmp_path: Path, seed: int, long: bool, seconds: int) -> None:
    """Shorter and longer than the session timeout of 6 s."""
    with EmbeddedKafka(data_dir=tmp_path / "kafka") as broker:
        env = settings(broker.bootstrap_servers, TEST_EMBED_MS="5")
        create_topics(broker.bootstrap_servers, chaos.topics(env))
        with Fleet(env, tmp_path) as fleet:
            fleet.add()
            fleet.add()
            load = Load(broker.bootstrap_servers, env["KP_SOURCE_TOPIC"], traces(seed, 4), 1000 if long else 500, 60)
            load.start()
            for _ in range(2 if long else 1):
                wait_until(fleet.all_ready, 60)
                time.sleep(2)
                broker.pause_node(0)
                time.sleep(seconds)
                broker.resume_node(0)
            report = finish(broker, fleet, load)
        assert not report.problems()


def holder(bootstrap: str, env: dict[str, str], role: str) -> int:
    """Return the node that plays a role for the group."""
    if role == "a leader of the source":
        (topic,) = admin(bootstrap, lambda client: client.describe_topics([env["KP_SOURCE_TOPIC"]]))
        return int(topic["partitions"][0]["leader"])
    name, kind = (env["KP_GROUP_ID"], 0) if "group" in role else (f"{env['KP_GROUP_ID']}-0", 1)
    return int(admin(bootstrap, lambda client: client.find_coordinator(name, kind)))


def in_sync(bootstrap: str, env: dict[str, str]) -> bool:
    """Whether all replicas of all topics that matter are in sync."""
    topics = [value for name, value in env.items() if name.endswith("_TOPIC")]
    topics += [f"{env['KP_GROUP_ID']}-novelty-changelog", "__consumer_offsets", "__transaction_state"]
    found = admin(bootstrap, lambda client: client.describe_topics(topics))
    return all(len(p["isr"]) == 3 for topic in found for p in topic["partitions"])


def test_aborted_transactions_upstream_are_not_scored(kafka: EmbeddedKafka, tmp_path: Path, seed: int) -> None:
    env = settings(kafka.bootstrap_servers, TEST_EMBED_MS="10")
    create_topics(kafka.bootstrap_servers, {env["KP_SOURCE_TOPIC"]: 2})
    ends, sent = asyncio.run(produce_transactions(kafka.bootstrap_servers, env["KP_SOURCE_TOPIC"], seed))
    with Fleet(env, tmp_path) as fleet:
        slot = fleet.add()
        assert wait_until(lambda: chaos.ready(slot), 90), fleet.tails()
        time.sleep(0.5)
        fleet.kill(slot)
        assert wait_settled(kafka.bootstrap_servers, env, ends, PATIENCE_S), fleet.tails()
        assert fleet.stop_all() == [0], fleet.tails()
    report = oracle.check(kafka.bootstrap_servers, env, hash_vector)
    assert not report.problems()
    assert report.source == sent["committed"]
    assert sent["aborted"] > 50


async def produce_transactions(bootstrap: str, topic: str, seed: int) -> tuple[dict[int, int], Counter[str]]:
    """Produce 60 transactions, every third aborted; return where each partition's committed records end, and counts."""
    records, ends, sent = traces(seed, 2), {}, Counter[str]()
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", transactional_id=topic)
    async with producer:
        for number in range(60):
            await producer.begin_transaction()
            size = 1 + number % 7
            futures = [
                await producer.send(topic, record.value, record.key, record.partition, record.timestamp_ms)
                for record in (next(records) for _ in range(size))
            ]
            placed = await asyncio.gather(*futures)
            if number % 3 == 1 or number == 59:
                await producer.abort_transaction()
                sent["aborted"] += size
                continue
            await producer.commit_transaction()
            sent["committed"] += size
            for metadata in placed:
                ends[metadata.partition] = metadata.offset + 1
    return ends, sent


class Slow(ConsumerRebalanceListener):  # type: ignore[misc]
    """Takes its time to give partitions up, so that everybody waits for the next assignment."""

    async def on_partitions_revoked(self, revoked: object) -> None:
        await asyncio.sleep(4)

    async def on_partitions_assigned(self, assigned: object) -> None:
        pass


async def test_a_rebalance_that_begins_during_a_restore_does_not_stop_the_flow(
    kafka: EmbeddedKafka, tmp_path: Path, seed: int
) -> None:
    """The restore ends between the revocation and the next assignment, when records must not flow yet, but soon."""
    bootstrap = kafka.bootstrap_servers
    env = settings(bootstrap, TEST_RESTORE_MS="2000")
    await create_topics_async(bootstrap, chaos.topics(env))
    placed = await produce_async(bootstrap, env["KP_SOURCE_TOPIC"], islice(traces(seed, 4), 400))
    slow, third = member(env, Slow()), member(env, None)
    async with slow:
        await eventually(slow.assignment)  # all four
        with Fleet(env, tmp_path) as fleet:
            worker = fleet.add()
            await eventually(lambda: len(slow.assignment()) == 2)  # the worker has two and restores them
            async with third:
                await eventually(third.assignment)
                await eventually(lambda: chaos.ready(worker))
                assert worker.process.metric("kp_assigned_partitions") > 0
                # The other members score nothing: what is the worker's, and only that, must come out.
                await eventually(lambda: re.search(r"generation ([3-9]|\d\d)", worker.process.log()))
                mine = {0, 1, 2, 3} - {tp.partition for tp in slow.assignment() | third.assignment()}
                ends = {p: 1 + max(offset for q, offset in placed if q == p) for p in mine}
                settled = await asyncio.to_thread(wait_settled, bootstrap, env, ends, 60)
                assert settled, f"ready, and nothing flows:\n{fleet.tails()}"


def test_a_producer_that_starts_slowly_fences_no_worker_that_has_its_partition_by_now(
    kafka: EmbeddedKafka, tmp_path: Path, seed: int
) -> None:
    """A rebalance begins while the first worker starts its producers: it must wait for them."""
    env = settings(kafka.bootstrap_servers)
    create_topics(kafka.bootstrap_servers, chaos.topics(env))
    load = Load(kafka.bootstrap_servers, env["KP_SOURCE_TOPIC"], traces(seed, 4), 600, 60)
    with Fleet(env, tmp_path) as fleet:
        first = fleet.add(TEST_START_MS="5000")
        first.process.wait_log("starts slowly")
        fleet.add()
        load.start()
        report = finish(kafka, fleet, load)
        assert not fleet.unexpected(), fleet.tails()
    assert not report.problems()


def member(env: dict[str, str], listener: ConsumerRebalanceListener | None) -> AIOKafkaConsumer:
    """Return a member of the workers' group that scores nothing."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=env["KP_BOOTSTRAP_SERVERS"],
        group_id=env["KP_GROUP_ID"],
        enable_auto_commit=False,
        heartbeat_interval_ms=500,
        rebalance_timeout_ms=60_000,
        partition_assignment_strategy=[StickyPartitionAssignor],
    )
    consumer.subscribe([env["KP_SOURCE_TOPIC"]], listener=listener)
    return consumer


async def eventually(condition: Callable[[], object]) -> None:
    """Return when the condition is true; raise AssertionError when that takes too long."""
    assert await asyncio.to_thread(wait_until, lambda: bool(condition()), 90), "did not come true"

"""The producer behind a refusal, on real Kafka: sequence numbers, several batches, retries, broker restarts."""

import asyncio
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from aiokafka import TopicPartition

from tests.support.kafka_fixtures import consume_all_async, create_topics_async, unique
from worker.core.records import OutputRecord, SourceRecord
from worker.kafka import producer as producers
from worker.kafka.aiokafka_private import Brokers, UnansweredError
from worker.kafka.describe import current_limit
from worker.kafka.producer import DoubtfulRefusalError, Producer
from worker.kafka.protocol import ProduceV1, ProduceV2
from worker.kafka.publisher import Commit, Publisher
from worker.kafka.rows import OutputTopic
from worker.lab.broker.embedded_kafka import EmbeddedKafka

pytestmark = pytest.mark.timeout(300)

CONFIG = {"message.timestamp.after.max.ms": "60000"}


class Stage:
    """Topics of one test, a publisher for source partition 0, and batches for it."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self.name = unique("refusals")
        self.topics = {
            kind: OutputTopic(f"{self.name}.{kind}", 1, 1 << 20) for kind in ("accepted", "rejected", "dead_letter")
        }
        self.changelog = OutputTopic(f"{self.name}.changelog", 1, 1 << 20)
        self.offset = 0
        self.refused: set[int] = set()
        self.commits: list[int] = []

    async def create(self) -> None:
        names = [topic.name for topic in self.topics.values()]
        await create_topics_async(
            self.bootstrap, {self.name: 1, **dict.fromkeys(names, (1, CONFIG)), self.changelog.name: 1}
        )

    def exactly_once(self, brokers: Brokers | None = None) -> Publisher:
        client = {"bootstrap_servers": self.bootstrap}
        return Publisher(
            Producer(client, f"{self.name}-0", 60, cluster=brokers),
            self.name,
            TopicPartition(self.name, 0),
            self.topics,
            self.changelog,
            partial(current_limit, client),
        )

    def at_least_once(self, brokers: Brokers | None = None) -> Publisher:
        async def commit(tp: TopicPartition, offset: int, metadata: str) -> None:
            self.commits.append(offset)

        source = TopicPartition(self.name, 0)
        producer = Producer({"bootstrap_servers": self.bootstrap}, None, 60, cluster=brokers)
        return Publisher(producer, self.name, source, self.topics, self.changelog, commit_offset=commit)

    def batch(self, count: int, refused: Callable[[int], bool]) -> Commit:
        """Return a batch of accepted outputs, some of them with a time that the topic refuses."""
        now = int(time.time() * 1000)
        outputs, records = [], []
        for n in range(self.offset, self.offset + count):
            moment = now + 1_200_000 if refused(n) else now
            if refused(n):
                self.refused.add(n)
            value = b"%d %s" % (n, b"x" * 100)
            outputs.append(OutputRecord("accepted", b"k%d" % n, value, [], moment))
            records.append(SourceRecord(self.name, 0, n, moment, b"k%d" % n, value))
        entries = [(b"%d" % n, b"entry") for n in range(self.offset, self.offset + count)]
        self.offset += count
        return Commit(outputs, entries, self.offset, "", records)

    async def numbers(self, kind: str, count: int = 0) -> list[int]:
        """Return the records, so many if they come: a transaction's markers follow its commit, and readers wait."""
        for _ in range(200):
            records = await consume_all_async(self.bootstrap, self.topics[kind].name)
            if len(records) >= count:
                break
            await asyncio.sleep(0.05)
        return [int(record.value.split()[0]) for record in records]

    async def check(self) -> None:
        """Everything is there once and in order."""
        accepted = [n for n in range(self.offset) if n not in self.refused]
        assert await self.numbers("dead_letter", len(self.refused)) == sorted(self.refused)
        assert await self.numbers("accepted", len(accepted)) == accepted
        assert len(await consume_all_async(self.bootstrap, self.changelog.name)) == self.offset


@pytest.fixture
async def stage(kafka: EmbeddedKafka) -> Stage:
    stage = Stage(kafka.bootstrap_servers)
    await stage.create()
    return stage


async def test_several_batches_in_flight_of_which_any_are_refused(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of 16 records or so: a transaction has dozens to one partition, sent one behind the other."""
    monkeypatch.setattr(producers, "MAX_BATCH_BYTES", 2048)
    publisher = stage.exactly_once()
    await publisher.start()
    for refused in (lambda n: n == 5, lambda n: n % 50 == 7, lambda n: n % 2 == 0, lambda n: True, lambda n: False):
        replaced = await publisher.publish(stage.batch(200, refused))
        assert {stage.offset - 200 + position for position in replaced} == {
            n for n in stage.refused if n >= stage.offset - 200
        }
        await publisher.publish(stage.batch(3, lambda n: False))
    await publisher.stop()
    await stage.check()


async def test_two_lanes_on_one_output_partition(stage: Stage) -> None:
    """At least once: neither's refusals disturb the other's records."""
    first, second = stage.at_least_once(), stage.at_least_once()
    await first.start()
    await second.start()
    for _ in range(20):
        await asyncio.gather(
            first.publish(stage.batch(50, lambda n: n % 10 == 3)), second.publish(stage.batch(50, lambda n: False))
        )
    await first.stop()
    await second.stop()
    assert set(await stage.numbers("dead_letter")) == stage.refused
    assert set(await stage.numbers("accepted")) == set(range(stage.offset)) - stage.refused
    assert sorted(stage.commits) == list(range(50, stage.offset + 1, 50))


@pytest.mark.since_kafka("4.0", "V1: a killed broker forgets that it has given the next epoch, so the worker may end")
async def test_a_broker_that_restarts_anywhere_around_a_refusal(seed: int, long: bool) -> None:
    """Killed while batches are refused, found and published again: the same producer goes on, all is there once."""
    pauses = [0.0, 0.02, 0.1, 0.3]
    with EmbeddedKafka() as kafka:
        stage = Stage(kafka.bootstrap_servers)
        await stage.create()
        publisher = stage.exactly_once()
        await publisher.start()
        for pause in pauses if long else random.Random(seed).sample(pauses, 2):
            publishing_all = asyncio.create_task(_publish_many(publisher, stage))
            await asyncio.sleep(pause)
            await asyncio.to_thread(kafka.kill_node, 0)
            await asyncio.to_thread(kafka.start_node, 0)
            await publishing_all
        await publisher.stop()
        await stage.check()


async def _publish_many(publisher: Publisher, stage: Stage) -> None:
    for _ in range(10):
        await publisher.publish(stage.batch(30, lambda n: n % 9 == 4))


class LosingBrokers(Brokers):
    """Connections that lose the first answer to a Produce request."""

    lost = False

    async def send(self, node: int, request: Any) -> Any:
        answer = await super().send(node, request)
        if isinstance(request, ProduceV1 | ProduceV2) and not self.lost:
            self.lost = True
            raise UnansweredError("the connection was closed")
        return answer


async def test_a_refusal_after_a_lost_answer(stage: Stage) -> None:
    """A second try is refused: whether the first one is in the log is unknown, so the next epoch begins anew."""
    brokers = LosingBrokers({"bootstrap_servers": stage.bootstrap}, 60_000)
    publisher = stage.exactly_once(brokers)
    await publisher.start()
    for _ in range(2):
        await publisher.publish(stage.batch(30, lambda n: n % 9 == 4))
    assert brokers.lost
    await publisher.stop()
    await stage.check()


async def test_a_refusal_after_a_lost_answer_at_least_once(stage: Stage) -> None:
    publisher = stage.at_least_once(LosingBrokers({"bootstrap_servers": stage.bootstrap}, 60_000))
    await publisher.start()
    with pytest.raises(DoubtfulRefusalError, match="it is unknown whether an earlier attempt was written"):
        await publisher.publish(stage.batch(30, lambda n: n == 4))
    assert stage.commits == []
    await publisher.stop()

"""The producer behind a refusal, on real Kafka: sequence numbers, several batches, retries, broker restarts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import RequestTimedOutError
from aiokafka.protocol.produce import ProduceRequest

from tests.support.kafka_fixtures import consume_all_async, create_topics_async, unique
from worker.broker.embedded_kafka import EmbeddedKafka
from worker.core.records import OutputRecord, SourceRecord
from worker.kafka import producer as producers
from worker.kafka.aiokafka_private_producer import put_back_sequence
from worker.kafka.describe import current_limit
from worker.kafka.producer import producer_arguments, send_rows
from worker.kafka.publication import Batch, OutputTopic, Refused, Shipment
from worker.kafka.publisher import AtLeastOncePublisher, ExactlyOncePublisher
from worker.kafka.refusals import DoubtfulRefusalError, TopicRefusedError, survive_refusals
from worker.kafka.refused_records import settle_doubt

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.since_kafka("3.6", "it has message.timestamp.after.max.ms"),
]

CONFIG = {"message.timestamp.after.max.ms": "60000"}
LATER = 1_200_000


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

    def exactly_once(self) -> ExactlyOncePublisher:
        return ExactlyOncePublisher(
            {"bootstrap_servers": self.bootstrap},
            self.name,
            TopicPartition(self.name, 0),
            self.topics,
            self.changelog,
            60,
            partial(current_limit, {"bootstrap_servers": self.bootstrap}),
        )

    def at_least_once(self, producer: AIOKafkaProducer) -> AtLeastOncePublisher:
        async def commit(tp: TopicPartition, offset: int, metadata: str) -> None:
            self.commits.append(offset)

        source = TopicPartition(self.name, 0)
        return AtLeastOncePublisher(producer, source, self.topics, self.changelog, commit, 60)

    def batch(self, count: int, refused: Callable[[int], bool], size: int = 100) -> Batch:
        """Return a batch of accepted outputs, some of them with a time that the topic refuses."""
        now = int(time.time() * 1000)
        outputs, records = [], []
        for n in range(self.offset, self.offset + count):
            moment = now + LATER if refused(n) else now
            if refused(n):
                self.refused.add(n)
            value = b"%d %s" % (n, b"x" * size)
            outputs.append(OutputRecord("accepted", b"k%d" % n, value, [], moment))
            records.append(SourceRecord(self.name, 0, n, moment, b"k%d" % n, value))
        entries = [(b"%d" % n, b"entry") for n in range(self.offset, self.offset + count)]
        self.offset += count
        return Batch(outputs, entries, self.offset, None, records)

    async def numbers(self, kind: str) -> list[int]:
        records = await consume_all_async(self.bootstrap, self.topics[kind].name)
        return [int(record.value.split()[0]) for record in records]

    async def check(self) -> None:
        """Everything is there once and in order."""
        letters = await self.numbers("dead_letter")
        assert letters == sorted(self.refused)
        assert await self.numbers("accepted") == [n for n in range(self.offset) if n not in self.refused]
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


async def test_the_shared_producer_goes_on_for_all_lanes(stage: Stage) -> None:
    """At least once, two lanes on one output partition: neither's refusals disturb the other's records."""
    producer = survive_refusals(AIOKafkaProducer(**producer_arguments({"bootstrap_servers": stage.bootstrap})))
    await producer.start()
    first, second = stage.at_least_once(producer), stage.at_least_once(producer)
    work: list[Coroutine[Any, Any, Any]] = []
    for _ in range(20):
        work.append(first.publish(stage.batch(50, lambda n: n % 10 == 3)))
        work.append(second.publish(stage.batch(50, lambda n: False)))
    await asyncio.gather(*work)
    await producer.stop()
    assert set(await stage.numbers("dead_letter")) == stage.refused
    assert set(await stage.numbers("accepted")) == set(range(stage.offset)) - stage.refused
    assert sorted(stage.commits) == list(range(50, stage.offset + 1, 50))


async def test_a_broker_that_restarts_anywhere_around_a_refusal() -> None:
    """Killed while batches are refused, found and published again: the same producer goes on, all is there once."""
    with EmbeddedKafka() as kafka:
        stage = Stage(kafka.bootstrap_servers)
        await stage.create()
        publisher = stage.exactly_once()
        await publisher.start()
        for pause in (0.0, 0.02, 0.1, 0.3):
            publishing_all = asyncio.create_task(_publish_many(publisher, stage))
            await asyncio.sleep(pause)
            await asyncio.to_thread(kafka.kill_node, 0)
            await asyncio.to_thread(kafka.start_node, 0)
            await publishing_all
        await publisher.stop()
        await stage.check()


async def _publish_many(publisher: ExactlyOncePublisher, stage: Stage) -> None:
    for _ in range(10):
        await publisher.publish(stage.batch(30, lambda n: n % 9 == 4))


@pytest.mark.parametrize("count", [1, 3])
async def test_a_refusal_after_a_lost_answer(stage: Stage, count: int) -> None:
    """The batch is on the topic, the answer is lost, and the second attempt is refused: nothing may count twice."""
    producer = survive_refusals(
        AIOKafkaProducer(**producer_arguments({"bootstrap_servers": stage.bootstrap}), transactional_id=stage.name)
    )
    await producer.start()
    topic = stage.topics["accepted"]
    answers = lose_first_answer(producer, stage)
    now = int(time.time() * 1000)
    await producer.begin_transaction()
    rows = [(b"k", b"v", now + LATER, [])] * count
    (refused,) = await send_rows(producer, topic, 0, rows)  # type: ignore[arg-type]
    assert answers == ["lost"]
    assert refused.error.doubtful
    shipment = Shipment(topic, 0, list(rows))
    with pytest.raises(DoubtfulRefusalError, match="it is unknown"):
        await settle_doubt(producer, shipment, refused, aborting=False)
    await settle_doubt(producer, shipment, refused, aborting=True)  # it was refused the first time, too
    await producer.abort_transaction()
    await producer.begin_transaction()
    assert not await send_rows(producer, topic, 0, [(b"k", b"after", now, [])] * count)
    await producer.commit_transaction()
    await producer.stop()
    assert [record.value for record in await consume_all_async(stage.bootstrap, topic.name)] == [b"after"] * count


def lose_first_answer(producer: AIOKafkaProducer, stage: Stage) -> list[str]:
    """Let the answer to the producer's first batches never arrive."""
    send, answers = producer.client.send, []

    async def lossy(node: int, request: Any, **group: Any) -> Any:
        answer = await send(node, request, **group)
        if isinstance(request, ProduceRequest) and not answers:
            answers.append("lost")
            raise RequestTimedOutError
        return answer

    producer.client.send = lossy
    return answers


@pytest.mark.parametrize("count", [1, 3])
async def test_a_refusal_after_a_lost_answer_of_a_batch_that_was_taken(stage: Stage, count: int) -> None:
    """As when the topic's limits change in between: the producer must not go on, or records would be lost."""
    producer = survive_refusals(
        AIOKafkaProducer(**producer_arguments({"bootstrap_servers": stage.bootstrap}), transactional_id=stage.name)
    )
    await producer.start()
    topic = stage.topics["accepted"]
    await producer.begin_transaction()
    assert not await send_rows(producer, topic, 0, [(b"k", b"v", None, [])] * count)
    # What a second attempt finds that is refused now, after the first one was taken:
    put_back_sequence(producer._txn_manager, TopicPartition(topic.name, 0), count)
    error = TopicRefusedError(topic.name, 0, 32, "", {}, True)
    refused = Refused(0, count, 100, 1 << 20, error)
    with pytest.raises(DoubtfulRefusalError):
        await settle_doubt(producer, Shipment(topic, 0, []), refused, aborting=True)
    await producer.stop()

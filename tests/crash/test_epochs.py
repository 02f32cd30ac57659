"""Transactions of one id over the turn of its epoch: after 32,766 the broker gives a new producer id.

Transactions V2 use an epoch each: on a partition with five commits a second the turn comes every 1.8 hours.
"""

import asyncio
import random
import time

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import ProducerFenced
from aiokafka.structs import OffsetAndMetadata

from tests.support.kafka_fixtures import committed_async, consume_all_async, create_topics, unique
from worker.kafka.producer import TRANSACTION, Producer, PublishError
from worker.kafka.protocol import InitProducerId
from worker.kafka.rows import OutputTopic, PartitionRows
from worker.kafka.transaction import run_transaction, unknown_limit
from worker.lab.broker.embedded_kafka import EmbeddedKafka

pytestmark = pytest.mark.timeout(3600)  # 40,000 transactions on three brokers take a quarter of an hour

LAST_EPOCH = 32_766  # the broker leaves the last of a 16-bit number free


class Values:
    """One record for a transaction."""

    def __init__(self, topic: OutputTopic, value: bytes) -> None:
        self._part = PartitionRows(topic, 0, [(b"k", value, None, [])])

    def partition_rows(self) -> list[PartitionRows]:
        return [self._part]

    def replace(self, part: PartitionRows, refused: object) -> None:
        raise AssertionError(refused)


class Line:
    """Transactions of one id, one after the other, as a worker runs them: after a failure from the committed offset."""

    def __init__(self, cluster: EmbeddedKafka, name: str) -> None:
        self.bootstrap = cluster.bootstrap_servers
        self.client = {"bootstrap_servers": self.bootstrap}
        self.name = name
        self.tp = TopicPartition(name, 0)
        self.topic = OutputTopic(name, 1, 1 << 20)
        self.failures: list[str] = []
        self.producer = Producer(self.client, name, 30.0)

    @property
    def epoch(self) -> int:
        return self.producer._producer.epoch

    async def skip_to(self, epoch: int) -> None:
        """Ask for one epoch after the other: a transaction each would take several minutes."""
        brokers, current = self.producer._cluster, self.producer._producer
        node = await self.coordinator()
        while current.epoch < epoch:
            answer = await brokers.send(node, InitProducerId(self.name, 30_000, current))
            assert answer.error_code == 0
            current = type(current)(answer.producer_id, answer.producer_epoch)
        self.producer._enter(current)

    async def coordinator(self) -> int:
        return await self.producer._cluster.coordinator(TRANSACTION, self.name)

    async def run(self, first: int, end: int) -> None:
        """Write the numbers from `first` on, each in a transaction with its offset."""
        number = first
        while number < end:
            offsets = self.name, {self.tp: OffsetAndMetadata(number + 1, "")}
            try:
                await run_transaction(
                    self.producer, Values(self.topic, b"%d" % number), unknown_limit, offsets=offsets, where=self.name
                )
            except (ProducerFenced, PublishError) as error:  # a worker restarts
                self.failures.append(f"{number}: {error!r}")
                await self.producer.stop()
                self.producer = Producer(self.client, self.name, 30.0)
                await self.producer.start()
                number = await self.committed()
            else:
                number += 1

    async def committed(self) -> int:
        return (await committed_async(self.bootstrap, self.name, self.name)).get(0, 0)


@pytest.mark.long
@pytest.mark.parametrize("whole", [False, True], ids=["its end", "40,000 transactions"])
def test_the_turn_of_an_epoch_while_the_coordinator_moves(cluster: EmbeddedKafka, seed: int, whole: bool) -> None:
    """The coordinator's broker is killed a moment before the turn; nothing is lost, doubled or torn, and it goes on."""
    name = unique("epochs")
    create_topics(cluster.bootstrap_servers, {name: 1})
    rng = random.Random(seed)
    count = 40_000 if whole else 600

    async def drive() -> None:
        line = Line(cluster, name)
        await line.producer.start()
        if not whole:
            await line.skip_to(LAST_EPOCH - 300)
        before = line.producer._producer
        at = (LAST_EPOCH if whole else 300) - rng.randrange(8)
        await line.run(0, at - 200)
        node = await line.coordinator()
        kill = asyncio.create_task(asyncio.to_thread(kill_at, line, LAST_EPOCH - rng.randrange(3), node))
        await line.run(at - 200, at + 150)
        await kill
        await asyncio.to_thread(cluster.start_node, node)
        await line.run(at + 150, count)
        assert line.producer._producer.producer_id != before.producer_id
        read = await consume_all_async(line.bootstrap, name)
        assert [int(record.value) for record in read] == list(range(count)), line.failures
        assert await line.committed() == count
        assert len(line.failures) <= 2, line.failures
        await line.producer.stop()

    def kill_at(line: Line, epoch: int, node: int) -> None:
        while line.epoch < epoch and not line.failures:
            time.sleep(0.0005)
        time.sleep(rng.uniform(0, 0.01))
        cluster.kill_node(node)

    asyncio.run(drive())

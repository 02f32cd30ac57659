"""A producer that does not end its transaction keeps what is behind it from being read: each process names it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aiokafka import AIOKafkaProducer

from tests.support.commands import Diagnosis
from tests.support.contribute import Booth, accepted_document
from tests.support.kafka_fixtures import committed, wait_until
from tests.support.registry import RegistryProcess
from tests.support.stage import LINES, Stage, Workers
from worker.lab.broker.embedded_kafka import EmbeddedKafka


@contextmanager
def open_transaction(bootstrap: str, topic: str) -> Iterator[None]:
    """Send a record to partition 0 in a transaction, and end it at the end."""
    with asyncio.Runner() as runner:
        producer: list[AIOKafkaProducer] = []

        async def begin() -> None:
            producer.append(AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=topic))
            await producer[0].start()
            await producer[0].begin_transaction()
            await producer[0].send_and_wait(topic, LINES[0], partition=0)

        async def end() -> None:
            await producer[0].commit_transaction()
            await producer[0].stop()

        runner.run(begin())
        try:
            yield
        finally:
            runner.run(end())


def test_an_open_transaction_on_the_source_is_named_until_it_ends(kafka: EmbeddedKafka, workers: Workers) -> None:
    stage = Stage(kafka, KP_TOPIC_PARTITIONS="2", KP_TRANSACTION_TIMEOUT_SECONDS="6")
    worker = workers(stage.env).wait_ready()
    stage.produce([(None, line, (), number % 2) for number, line in enumerate(LINES[:10])])
    stage.wait_committed(10)
    gauges = [f'kp_open_transaction_{unit}{{partition="0"}}' for unit in ("offsets", "seconds")]
    assert wait_until(lambda: [worker.metrics().get(name) for name in gauges] == [0, 0])
    with open_transaction(stage.bootstrap, stage.name):
        stage.produce([(None, line, (), number % 2) for number, line in enumerate(LINES[10:20])])
        stage.wait_committed(15)  # those of the other partition
        worker.wait_metric("kp_open_transaction_offsets", 6)
        where = f"{stage.name}/0: 6 offsets from 5 on cannot be read: a producer's transaction has been open there for "
        assert wait_until(lambda: where in worker.log()), worker.log()
        assert f"find-hanging --topic {stage.name} --partition 0 finds it" in worker.log()
        assert worker.metrics()[gauges[1]] > 6
        assert worker.metrics()['kp_consumer_lag{partition="0"}'] == 0
        assert worker.metrics()['kp_open_transaction_offsets{partition="1"}'] == 0
        (found,) = [words for level, words in Diagnosis(stage.env).of(f"topic {stage.name}") if "transaction" in words]
        assert found.startswith("partition 0: 6 offsets from 5 on cannot be read")
    stage.wait_committed(21)
    worker.wait_metric("kp_open_transaction_offsets", 0)
    assert worker.log().count(where) == 1
    assert wait_until(lambda: f"the transaction at offset 5 of {stage.name}/0 has ended" in worker.log()), worker.log()
    assert not [words for _, words in Diagnosis(stage.env).of(f"topic {stage.name}") if "transaction" in words]


def test_contribute_names_one_on_the_accepted_topic(kafka: EmbeddedKafka, workers: Workers) -> None:
    with RegistryProcess("--limit", "60000") as registry:
        booth = Booth(
            kafka.bootstrap_servers, registry.url, registry.key, partitions=1, KP_TRANSACTION_TIMEOUT_SECONDS="4"
        )
        contributor = workers(booth.env, ("contribute",)).wait_ready()
        with open_transaction(booth.bootstrap, booth.accepted):
            booth.put([accepted_document("kp:trace:1")])
            words = f"{booth.accepted}/0: 2 offsets from 0 on cannot be read: a producer's transaction has been open"
            assert wait_until(lambda: words in contributor.log()), contributor.log()
        assert wait_until(lambda: "kp:trace:1" in booth.receipts()), contributor.log()
        assert sum(committed(booth.bootstrap, f"{booth.name}-contribute", booth.accepted).values())

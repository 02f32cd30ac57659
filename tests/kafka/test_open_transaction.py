"""A producer that does not end its transaction keeps what is behind it from being read: each process names it."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aiokafka import AIOKafkaProducer

from tests.support.contribute import Booth, accepted_document
from tests.support.kafka_fixtures import committed, unique, wait_until
from tests.support.registry import RegistryThread
from tests.support.stage import LINES, Diagnosis, Stage, Workers
from worker.lab.broker.embedded_kafka import EmbeddedKafka


@contextmanager
def open_transaction(bootstrap: str, topic: str) -> Iterator[None]:
    """Send a record to partition 0 in a transaction, and end it at the end."""

    async def begin() -> AIOKafkaProducer:
        producer = AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=topic)
        await producer.start()
        await producer.begin_transaction()
        await producer.send_and_wait(topic, LINES[0], partition=0)
        return producer

    async def end(producer: AIOKafkaProducer) -> None:
        await producer.commit_transaction()
        await producer.stop()

    with asyncio.Runner() as runner:
        producer = runner.run(begin())
        try:
            yield
        finally:
            runner.run(end(producer))


async def commit_and_abort(bootstrap: str, topic: str) -> None:
    """Leave behind a commit's marker on partition 0, and an abort's with its records on 1."""
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=unique("upstream")) as producer:
        async with producer.transaction():
            await producer.send_and_wait(topic, LINES[0], partition=0)
        await producer.begin_transaction()
        for _ in range(3):
            await producer.send_and_wait(topic, LINES[0], partition=1)
        await producer.abort_transaction()


def test_an_open_transaction_on_the_source_is_named_until_it_ends(kafka: EmbeddedKafka, workers: Workers) -> None:
    """And a topic has no lag, whatever ends it: markers, aborted records, an old record."""
    stage = Stage(kafka, KP_TOPIC_PARTITIONS="3", KP_TRANSACTION_TIMEOUT_SECONDS="6")
    worker = workers(stage.env).wait_ready()
    asyncio.run(commit_and_abort(stage.bootstrap, stage.name))
    stage.produce([(None, LINES[0], (), 2, 1_000_000)])
    lags = [f'{name}{{partition="{p}"}}' for name in ("kp_consumer_lag", "kp_consumer_lag_seconds") for p in range(3)]
    worker.wait_metric("kp_records_consumed_total", 2)
    assert wait_until(lambda: [worker.metrics().get(name) for name in lags] == [0] * 6), worker.log()
    assert worker.metric("kp_committed_offset", partition="0") == 1  # and the marker lies at 1
    assert worker.metric("kp_committed_offset", partition="1") == 0
    assert worker.metric("kp_build_info", group=stage.name) == 1
    stage.produce([(None, line, (), number % 2) for number, line in enumerate(LINES[:10])])
    stage.wait_committed(7 + 9 + 1)
    gauges = [f'kp_open_transaction_{unit}{{partition="0"}}' for unit in ("offsets", "seconds")]
    assert wait_until(lambda: [worker.metrics().get(name) for name in gauges] == [0, 0])
    with open_transaction(stage.bootstrap, stage.name):
        stage.produce([(None, line, (), number % 2) for number, line in enumerate(LINES[10:20])])
        stage.wait_committed(7 + 14 + 1)  # those of the other partition
        worker.wait_metric("kp_open_transaction_offsets", 6)
        where = f"{stage.name}/0: 6 offsets from 7 on cannot be read: a producer's transaction has been open there for "
        worker.wait_log(where)
        assert f"find-hanging --topic {stage.name} --partition 0 finds it" in worker.log()
        assert worker.metrics()[gauges[1]] > 6
        assert worker.metrics()['kp_consumer_lag{partition="0"}'] == 0
        assert worker.metrics()['kp_open_transaction_offsets{partition="1"}'] == 0
        (found,) = [words for level, words in Diagnosis(stage.env).of(f"topic {stage.name}") if "transaction" in words]
        assert found.startswith("partition 0: 6 offsets from 7 on cannot be read")
    stage.wait_committed(13 + 14 + 1)
    worker.wait_metric("kp_open_transaction_offsets", 0)
    assert worker.log().count(where) == 1
    worker.wait_log(f"the transaction at offset 7 of {stage.name}/0 has ended")
    assert not [words for _, words in Diagnosis(stage.env).of(f"topic {stage.name}") if "transaction" in words]


def test_contribute_names_one_on_the_accepted_topic(kafka: EmbeddedKafka, workers: Workers) -> None:
    with RegistryThread() as registry:
        booth = Booth(kafka.bootstrap_servers, registry, partitions=1, KP_TRANSACTION_TIMEOUT_SECONDS="4")
        contributor = workers(booth.env, ("contribute",)).wait_ready()
        with open_transaction(booth.bootstrap, booth.accepted):
            booth.put([accepted_document("kp:trace:1")])
            words = f"{booth.accepted}/0: 2 offsets from 0 on cannot be read: a producer's transaction has been open"
            contributor.wait_log(words)
        assert wait_until(lambda: "kp:trace:1" in booth.receipts()), contributor.log()
        assert sum(committed(booth.bootstrap, f"{booth.name}-contribute", booth.accepted).values())

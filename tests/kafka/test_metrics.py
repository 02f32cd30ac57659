"""Lag as a worker says it of a real topic."""

import asyncio

from aiokafka import AIOKafkaProducer

from tests.support.builders import trace_bytes
from tests.support.kafka_fixtures import create_topics, produce, unique, wait_until
from tests.support.stage import Workers
from worker.lab.broker.embedded_kafka import EmbeddedKafka


async def produce_in_transactions(bootstrap: str, topic: str) -> None:
    """Leave behind a commit's marker on partition 0, an abort's with its records on 1, old records on 2."""
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=unique("upstream")) as producer:
        async with producer.transaction():
            await producer.send_and_wait(topic, trace_bytes("kp:trace:1"), partition=0)
        await producer.begin_transaction()
        for _ in range(3):
            await producer.send_and_wait(topic, trace_bytes("kp:trace:never"), partition=1)
        await producer.abort_transaction()


def test_an_idle_topic_has_no_lag_whatever_ends_it(kafka: EmbeddedKafka, workers: Workers) -> None:
    topic = unique("traces")
    create_topics(kafka.bootstrap_servers, {topic: 3})
    worker = workers(
        {
            "KP_BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
            "KP_GROUP_ID": topic,
            "KP_SOURCE_TOPIC": topic,
            "KP_CREATE_TOPICS": "true",
            "KP_EMBEDDER": "none",
        }
    ).wait_ready()
    asyncio.run(produce_in_transactions(kafka.bootstrap_servers, topic))
    produce(kafka.bootstrap_servers, topic, [(None, trace_bytes("kp:trace:2"), (), 2, 1_000_000)])

    def lags() -> list[float | None]:
        found = worker.metrics()
        names = ("kp_consumer_lag", "kp_consumer_lag_seconds")
        return [found.get(f'{name}{{partition="{partition}"}}') for name in names for partition in range(3)]

    worker.wait_metric("kp_records_consumed_total", 2)
    assert wait_until(lambda: lags() == [0.0] * 6), f"{worker.metrics()}\n{worker.log()}"
    assert worker.metric("kp_committed_offset", partition="0") == 1  # and the marker lies at 1
    assert worker.metric("kp_committed_offset", partition="1") == 0
    assert worker.metric("kp_build_info", group=topic) == 1

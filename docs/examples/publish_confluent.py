"""Publishes traces with confluent-kafka (docs/publishing.md): call `close` once, when the process ends."""

import json
import os

from confluent_kafka import Producer

producer = Producer(
    {
        "bootstrap.servers": os.environ["KP_BOOTSTRAP_SERVERS"],
        "enable.idempotence": True,  # implies acks=all
        "linger.ms": 5,
        "partitioner": "murmur2_random",  # as in Java, aiokafka and kafkajs: a key has one partition, whoever sends it
    }
)


def on_delivery(error, message):
    if error is not None:
        raise RuntimeError(f"trace {message.key()!r} was not published: {error}")


def publish(trace, traceparent=None):
    producer.produce(
        os.environ.get("KP_SOURCE_TOPIC", "traces"),
        key=trace["metadata"]["agent_id"],
        value=json.dumps(trace, ensure_ascii=False).encode(),
        headers=[("traceparent", traceparent.encode())] if traceparent else [],
        on_delivery=on_delivery,
    )
    producer.poll(0)  # calls on_delivery for what was sent before


def close():
    producer.flush()

"""Publishes traces with aiokafka (docs/publishing.md)."""

import json
import os

from aiokafka import AIOKafkaProducer


def new_producer():
    """Make the producer of the process: `async with new_producer() as producer` flushes at the end."""
    return AIOKafkaProducer(
        bootstrap_servers=os.environ["KP_BOOTSTRAP_SERVERS"],
        enable_idempotence=True,  # implies acks="all"
        linger_ms=5,
    )


async def publish(producer, traces, traceparent=None):
    """Send traces (dicts) and return where each one is: (partition, offset)."""
    sent = [
        await producer.send(
            os.environ.get("KP_SOURCE_TOPIC", "traces"),
            key=trace["metadata"]["agent_id"].encode(),
            value=json.dumps(trace, ensure_ascii=False).encode(),
            headers=[("traceparent", traceparent.encode())] if traceparent else [],
        )
        for trace in traces
    ]
    return [(done.partition, done.offset) for done in [await future for future in sent]]

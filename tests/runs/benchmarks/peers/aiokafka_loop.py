"""A raw aiokafka loop: the least that a Python program on asyncio can do. At least once, or in transactions.

Settings as the worker's publisher has them (idempotent, 256 KiB batches, 20 ms back-off), because they measured best;
one commit for each round of getmany, which takes what is there (at most 2000 records).
"""

import asyncio
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from tests.runs.benchmarks.peers.options import Options, job, parse, stop_asked
from worker.core.records import SourceRecord

MAX_RECORDS = 2000
"""With the model it is one: tens of milliseconds of work are a batch of their own, and a commit costs two."""


async def run(options: Options) -> None:
    """Consume, process, produce, commit until stopped."""
    work, stop = job(options), stop_asked()
    transaction = {"transactional_id": f"{options.group}-0"} if options.exactly_once else {}
    producer = AIOKafkaProducer(
        bootstrap_servers=options.bootstrap,
        enable_idempotence=True,
        acks="all",
        max_batch_size=262_144,
        max_request_size=16 << 20,
        retry_backoff_ms=20,
        **transaction,
    )
    consumer = AIOKafkaConsumer(
        options.source,
        bootstrap_servers=options.bootstrap,
        group_id=options.group,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
        max_poll_interval_ms=600_000,
    )
    await producer.start()
    await consumer.start()

    async def process(fetched: dict[Any, list[Any]]) -> dict[TopicPartition, int]:
        futures, offsets = [], {}
        for tp, records in fetched.items():
            for r in records:
                record = SourceRecord(r.topic, r.partition, r.offset, r.timestamp, r.key, r.value, r.headers)
                output, entry = work.handle(record)
                if entry is not None:
                    futures.append(await producer.send(options.changelog, entry[1], entry[0], tp.partition))
                topic = options.outputs[output.kind]
                futures.append(
                    await producer.send(
                        topic, output.value, output.key, tp.partition, output.timestamp_ms, output.headers
                    )
                )
            offsets[tp] = records[-1].offset + 1
        await asyncio.gather(*futures)
        return offsets

    try:
        while not stop():
            fetched = await consumer.getmany(
                timeout_ms=200, max_records=1 if options.vectors == "model" else MAX_RECORDS
            )
            if not fetched:
                continue
            if options.exactly_once:
                async with producer.transaction():
                    await producer.send_offsets_to_transaction(await process(fetched), options.group)
            else:
                await consumer.commit(await process(fetched))
    finally:
        await consumer.stop()
        await producer.stop()


if __name__ == "__main__":
    asyncio.run(run(parse()))

"""Let the broker's JVM compile what the runs will need: a broker that has just started takes twice the CPU.

A transaction of one trace takes 10 ms on a broker that has done a few hundred of them, and 4.5 ms after 5000 (measured
on two cores of an AMD EPYC): whoever measures the first ones measures the compiler.
"""

from __future__ import annotations

import asyncio
from typing import Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from tests.runs.benchmarks.workload import PARTITIONS, Source, documents, fill, fresh_topics
from worker.core.records import ACCEPTED

RECORDS: Final = 20_000
"""Records written in large batches and read: the other half of what the runs do."""


async def warm(bootstrap: str, transactions: int) -> None:
    """Make so many transactions like the worker's, one producer for each partition, with a reader behind them."""
    source = await fill(bootstrap, documents(RECORDS))
    topics = await fresh_topics(bootstrap)
    output = topics.outputs[ACCEPTED]
    async with AIOKafkaConsumer(
        output, source.name, bootstrap_servers=bootstrap, isolation_level="read_committed", auto_offset_reset="earliest"
    ) as consumer:
        reading = asyncio.create_task(_read(consumer))
        each = transactions // PARTITIONS
        await asyncio.gather(
            *(
                _transact(bootstrap, source, n, topics.group, (output, topics.changelog), each)
                for n in range(PARTITIONS)
            )
        )
        reading.cancel()
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    await admin.delete_topics([source.name, topics.changelog, *topics.outputs.values()])
    await admin.close()


async def _read(consumer: AIOKafkaConsumer) -> None:
    while True:
        await consumer.getmany(timeout_ms=500)


async def _transact(
    bootstrap: str, source: Source, partition: int, group: str, targets: tuple[str, ...], count: int
) -> None:
    tp = TopicPartition(source.name, partition)
    value = source.values[partition]
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=f"{group}-warm-{partition}") as producer:
        for i in range(count):
            async with producer.transaction():
                sent = [await producer.send(target, value, b"key", partition) for target in targets]
                await asyncio.gather(*sent)
                await producer.send_offsets_to_transaction({tp: i + 1}, group)
            await asyncio.sleep(0.005)  # at once, it would wait for the markers of the last one (20 ms, aiokafka's)

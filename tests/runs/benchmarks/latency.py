"""A producer that keeps a rate and a consumer beside it: how long each record takes until its output is there."""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from tests.runs.benchmarks.workload import BenchmarkError, Topics
from worker.observe import metrics


class Latencies(NamedTuple):
    """Milliseconds of each record, sorted; records sent a second, as it really was."""

    sorted_ms: list[float]
    rate: float

    def percentile(self, percent: float) -> float:
        return self.sorted_ms[min(len(self.sorted_ms) - 1, int(len(self.sorted_ms) * percent / 100))]


async def measure(
    bootstrap: str, topics: Topics, values: Sequence[bytes], rate: float, patience: float, in_flight: int | None = None
) -> Latencies:
    """Send values at a mean rate, at random times as many independent senders give them (Poisson); wait for all outputs
    (read committed). The first tenth does not count.

    The key is the time of sending in microseconds: the output carries it. The producer never waits for the system
    under test: what is late stays late (no coordinated omission). With `in_flight` there is no rate: the next one is
    sent when fewer than that are on their way.
    """
    tps = [TopicPartition(topic, p) for topic in topics.outputs.values() for p in range(topics.partitions)]
    taken: dict[int, float] = {}
    async with (
        AIOKafkaConsumer(
            bootstrap_servers=bootstrap,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        ) as consumer,
        AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all") as producer,
    ):
        consumer.assign(tps)
        await consumer.seek_to_end(*tps)
        for tp in tps:
            await consumer.position(tp)
        sent: list[int] = []
        room = asyncio.Semaphore(in_flight or len(values))

        async def receive() -> None:
            while len(taken) < len(values):
                for records in (await consumer.getmany(timeout_ms=200)).values():
                    now = time.time()
                    for record in records:
                        taken[int(record.key)] = now
                        room.release()

        receiving = asyncio.create_task(receive())
        began = due = time.time()
        rng = random.Random(1)
        for i, value in enumerate(values):
            await room.acquire()
            due += rng.expovariate(rate)
            if in_flight is None:
                await asyncio.sleep(max(0.0, due - time.time()))
            stamp = time.time_ns() // 1000
            stamp += stamp in sent[-5:]
            sent.append(stamp)
            await producer.send(topics.source, value, b"%d" % stamp, i % topics.partitions, stamp // 1000)
        took = time.time() - began
        try:
            await asyncio.wait_for(receiving, patience)
        except TimeoutError:
            raise BenchmarkError(f"{len(values) - len(taken)} of {len(values)} outputs did not come") from None
        if taken.keys() != set(sent):
            raise BenchmarkError("outputs with other keys than were sent")
    return Latencies(sorted((taken[s] - s / 1e6) * 1000 for s in sent[len(sent) // 10 :]), len(values) / took)


def quantile(
    before: Mapping[str, float], after: Mapping[str, float], name: str, share: float, label: str = ""
) -> float:
    """Return a quantile (ms) of what a histogram of /metrics gained between two scrapes, linear within a bucket.

    `label`: only the series with this label (`stage="embed"`).
    """
    gained = {}
    for key, value in after.items():
        if key.startswith(f"{name}_bucket{{") and label in key:
            bound = float(key.partition('le="')[2].partition('"')[0])
            gained[bound] = value - before.get(key, 0.0)
    return 1000 * metrics.quantile(gained, share)

"""A steady load over all partitions, and a reader of the outputs: how long each record waited for its output.

Both run in a thread of their own, so that the caller can start and stop processes meanwhile. The time of a record is
that of its sending, whether or not a worker is there to take it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Final, Self

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from tests.runs.benchmarks.watch import BenchmarkError
from tests.runs.benchmarks.workload import Topics, traces

SENDS: Final = 100
"""Sends a second, to one partition after the other: each of 16 partitions gets records every 0.16 s, each of 64 every
0.64 s. A stall is measured from the first record that waits, so it may be longer by that."""

RECORDS: Final = 2
"""Records of one send."""

PATIENCE_SECONDS: Final = 90.0


class Load:
    """Sends and reads while it is entered; `sent` and `arrived` are by the number of the record, which is its key."""

    def __init__(self, bootstrap: str, source: str, topics: Topics, partitions: int) -> None:
        self.sent: list[tuple[int, float]] = []
        """Partition and time, s since 1970."""
        self.arrived: dict[int, float] = {}
        self._bootstrap = bootstrap
        self._source = source
        self._topics = topics
        self._partitions = partitions
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="load")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def finish(self) -> None:
        """Send no more, and wait for all outputs. Raises BenchmarkError if one is missing, or there twice."""
        self.__exit__()
        if self._failure is not None:
            raise self._failure

    def stalls(self, since: float, until: float = float("inf")) -> dict[int, float]:
        """Return the longest wait (s) of each partition's records that were sent between two times; after `finish`."""
        found = dict.fromkeys(range(self._partitions), 0.0)
        for number, (partition, at) in enumerate(self.sent):
            if since <= at < until:
                found[partition] = max(found[partition], self.arrived[number] - at)
        return found

    def first_outputs(self, since: float) -> dict[int, float]:
        """Return for each partition when (s after `since`) the first record that was sent later has its output."""
        found: dict[int, float] = {}
        for number, (partition, at) in enumerate(self.sent):
            if at >= since:
                found[partition] = min(found.get(partition, float("inf")), self.arrived[number] - since)
        return found

    def all_flow(self, since: float) -> bool:
        """Whether each partition has the output of a record that was sent after a time."""
        flowing = set()
        for number in range(len(self.sent) - 1, -1, -1):
            partition, at = self.sent[number]
            if at < since:
                break
            if number in self.arrived:
                flowing.add(partition)
        return len(flowing) == self._partitions

    def _run(self) -> None:
        try:
            asyncio.run(self._send_and_read())
        except BaseException as error:
            self._failure = error

    async def _send_and_read(self) -> None:
        async with (
            AIOKafkaConsumer(
                bootstrap_servers=self._bootstrap,
                isolation_level="read_committed",
                auto_offset_reset="earliest",
                fetch_min_bytes=1 << 20,  # wait and answer 40 times a second, not after each transaction
                fetch_max_wait_ms=25,
            ) as consumer,
            AIOKafkaProducer(bootstrap_servers=self._bootstrap, acks="all") as producer,
        ):
            names = self._topics.outputs.values()
            consumer.assign([TopicPartition(name, p) for name in names for p in range(self._partitions)])
            reading = asyncio.create_task(self._read(consumer))
            await self._send(producer)
            done, _ = await asyncio.wait({reading}, timeout=PATIENCE_SECONDS)
            if not done:
                reading.cancel()
                raise BenchmarkError(f"{len(self.sent) - len(self.arrived)} of {len(self.sent)} outputs did not come")
            reading.result()

    async def _send(self, producer: AIOKafkaProducer) -> None:
        values = traces()
        began, sends = time.time(), 0
        while not self._ended.is_set():
            partition = sends % self._partitions
            for _ in range(RECORDS):
                number = len(self.sent)
                self.sent.append((partition, time.time()))
                await producer.send(self._source, values[number % len(values)], b"%d" % number, partition)
            sends += 1
            await asyncio.sleep(max(0.0, began + sends / SENDS - time.time()))
        await producer.flush()

    async def _read(self, consumer: AIOKafkaConsumer) -> None:
        while not self._ended.is_set() or len(self.arrived) < len(self.sent):
            for records in (await consumer.getmany(timeout_ms=100)).values():
                now = time.time()
                for record in records:
                    if self.arrived.setdefault(int(record.key), now) != now:
                        raise BenchmarkError(f"record {int(record.key)} has two outputs")

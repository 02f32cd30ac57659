"""sentry-arroyo: a strategy that processes and produces like arroyo's own Produce, to several topics. At least once.

Commits once a second, arroyo's default policy; producer settings are librdkafka's with idempotence, futures the light
ones (`use_simple_futures`) as Sentry's own services use them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from arroyo import Topic
from arroyo.backends.kafka import KafkaConsumer, KafkaPayload, KafkaProducer
from arroyo.backends.kafka.configuration import build_kafka_configuration, build_kafka_consumer_configuration
from arroyo.commit import ONCE_PER_SECOND
from arroyo.processing import StreamProcessor
from arroyo.processing.strategies import CommitOffsets, MessageRejected, ProcessingStrategy, ProcessingStrategyFactory
from arroyo.types import BrokerValue, Commit, Message, Partition

from tests.runs.benchmarks.job import Job
from tests.runs.benchmarks.peers.options import Options, Stop, parse
from worker.core.records import SourceRecord

BUFFER = 10_000
"""Records that may wait for acknowledgements: the default of arroyo's Produce."""


class ProcessAndProduce(ProcessingStrategy[KafkaPayload]):  # type: ignore[misc,unused-ignore]
    """Arroyo's Produce with the job in front and one topic for each kind of output."""

    def __init__(self, job: Job, options: Options, producer: KafkaProducer, next_step: ProcessingStrategy[Any]) -> None:
        self._job = job
        self._producer = producer
        self._topics = {kind: Topic(name) for kind, name in options.outputs.items()}
        self._changelog = Topic(options.changelog)
        self._next = next_step
        self._waiting: deque[tuple[Message[KafkaPayload], list[Any]]] = deque()

    def poll(self) -> None:
        """Hand on what is acknowledged, in order."""
        while self._waiting and all(future.done() for future in self._waiting[0][1]):
            message, futures = self._waiting.popleft()
            for future in futures:
                future.result()
            self._next.submit(message)
        self._next.poll()

    def submit(self, message: Message[KafkaPayload]) -> None:
        """Process one record and produce what comes out."""
        if len(self._waiting) >= BUFFER:
            raise MessageRejected
        value, payload = message.value, message.payload
        assert isinstance(value, BrokerValue)
        tp = value.partition
        timestamp_ms = round(value.timestamp.timestamp() * 1000)
        output, entry = self._job.handle(
            SourceRecord(
                tp.topic.name, tp.index, value.offset, timestamp_ms, payload.key, payload.value, payload.headers
            )
        )
        futures = []
        if entry is not None:
            futures.append(self._producer.produce(Partition(self._changelog, tp.index), KafkaPayload(*entry, [])))
        target = Partition(self._topics[output.kind], tp.index)
        futures.append(self._producer.produce(target, KafkaPayload(output.key, output.value or b"", output.headers)))
        self._waiting.append((message, futures))

    def close(self) -> None:
        """Take no more."""

    def terminate(self) -> None:
        """Drop everything."""
        self._next.terminate()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the acknowledgements, then commit."""
        ends = time.time() + (10 if timeout is None else timeout)
        while self._waiting and time.time() < ends:
            self.poll()
            time.sleep(0.01)
        self._next.close()
        self._next.join(timeout)


class Factory(ProcessingStrategyFactory[KafkaPayload]):  # type: ignore[misc,unused-ignore]
    """Makes the chain at each assignment."""

    def __init__(self, options: Options, producer: KafkaProducer) -> None:
        self._options = options
        self._job = options.job()
        self._producer = producer

    def create_with_partitions(
        self, commit: Commit, partitions: Mapping[Partition, int]
    ) -> ProcessingStrategy[KafkaPayload]:
        """Return the chain: process, produce, commit."""
        return ProcessAndProduce(self._job, self._options, self._producer, CommitOffsets(commit))


def main(options: Options) -> None:
    """Run until stopped."""
    stop = Stop()
    servers = [options.bootstrap]
    config = build_kafka_configuration(
        {},
        bootstrap_servers=servers,
        override_params={"enable.idempotence": True, "queue.buffering.max.messages": 10**6},
    )
    producer = KafkaProducer(config, use_simple_futures=True)
    consumer = KafkaConsumer(build_kafka_consumer_configuration({}, group_id=options.group, bootstrap_servers=servers))
    processor = StreamProcessor(
        consumer, Topic(options.source), Factory(options, producer), ONCE_PER_SECOND, join_timeout=10
    )
    # As StreamProcessor.run, with our way of stopping.
    while not stop:
        processor._run_once()
    processor._shutdown()
    producer.close()


if __name__ == "__main__":
    main(parse())

"""A confluent-kafka loop (librdkafka). At least once, or in transactions.

One commit for each round of `consume`, which takes what is there (at most 2000 records); linger 5 ms is librdkafka's
default. Consumer and producer work on their own C threads beside the loop.
"""

from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition

from tests.runs.benchmarks.job import Job
from tests.runs.benchmarks.peers.options import Options, job, parse, stop_asked
from worker.core.records import SourceRecord


def main(options: Options) -> None:
    """Consume, process, produce, commit until stopped."""
    work, stop = job(options), stop_asked()
    producer_config = {
        "bootstrap.servers": options.bootstrap,
        "enable.idempotence": True,
        "queue.buffering.max.messages": 1_000_000,
    }
    if options.exactly_once:
        producer_config["transactional.id"] = f"{options.group}-0"
    producer = Producer(producer_config)
    if options.exactly_once:
        producer.init_transactions()
    consumer = Consumer(
        {
            "bootstrap.servers": options.bootstrap,
            "group.id": options.group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
        }
    )
    consumer.subscribe([options.source])
    try:
        while not stop():
            messages = consumer.consume(2000, timeout=0.05)
            if not messages:
                continue
            if options.exactly_once:
                producer.begin_transaction()
            offsets = [TopicPartition(options.source, p, o) for p, o in _process(work, options, producer, messages)]
            if options.exactly_once:
                producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata())
                producer.commit_transaction()
            else:
                if producer.flush(60):
                    raise TimeoutError("records were not acknowledged in 60 s")
                consumer.commit(offsets=offsets, asynchronous=False)
    finally:
        consumer.close()


def _process(work: Job, options: Options, producer: Producer, messages: list[Message]) -> list[tuple[int, int]]:
    """Produce the outputs; return the next offset of each partition."""
    failures: list[object] = []

    def delivered(error: object, _: object) -> None:
        if error is not None:
            failures.append(error)

    offsets: dict[int, int] = {}
    for m in messages:
        if m.error():
            raise KafkaException(m.error())
        partition = m.partition()
        record = SourceRecord(m.topic(), partition, m.offset(), m.timestamp()[1], m.key(), m.value(), m.headers() or ())
        output, entry = work.handle(record)
        if entry is not None:
            producer.produce(options.changelog, entry[1], entry[0], partition, delivered)
        producer.produce(
            options.outputs[output.kind],
            output.value,
            output.key,
            partition,
            on_delivery=delivered,
            timestamp=output.timestamp_ms or 0,
            headers=output.headers,
        )
        producer.poll(0)
        offsets[partition] = m.offset() + 1
    if failures:
        raise RuntimeError(f"not acknowledged: {failures[0]}")
    return list(offsets.items())


if __name__ == "__main__":
    main(parse())

"""l) What verdicts cost: the worker's CPU for one, beside a trace without a model; and a restore of track records."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

import msgspec
from aiokafka import AIOKafkaProducer

from tests.runs.benchmarks.bench import Bench
from tests.runs.benchmarks.watch import cpu_seconds
from tests.runs.benchmarks.workload import PARTITIONS, Source, documents, fresh_topics, unique
from tests.support.kafka_fixtures import Record, create_topics, topic_id
from worker.core.changelog import Restored
from worker.core.passes import Found
from worker.core.track_record import TrackRecord, encode_row, read_stored, record_key
from worker.core.verdicts import issued_ms, make_verdict, sign_verdict
from worker.kafka.cluster.topic_plan import CHANGELOG_CONFIG
from worker.kafka.state.restore import read_logs

JUDGE: Final = b"k" * 64

ON_AN_AGENT: Final = (10, 200)
RESTORED: Final = ((10_000, 10), (10_000, 200), (100_000, 10))
"""Track records of a partition, and verdicts in each."""


def run(bench: Bench) -> None:
    """Part l."""
    count = max(1000, round(bench.seconds * 4000))
    for _ in bench.each_round():
        cost = _cpu_us(bench, count, None)
        bench.results.add("l", "trace", CPU_us=cost)
        for each in ON_AN_AGENT:
            verdict = _cpu_us(bench, count, each)
            bench.results.add("l", f"verdict, {each} on an agent", CPU_us=verdict)
            bench.say(f"trace {cost:.1f} us, verdict {verdict:.1f} us ({each} on an agent)")
        for records, each in RESTORED if bench.seconds >= 1 else RESTORED[:1]:
            row, (seconds, cpu) = f"{records} records with {each} verdicts", asyncio.run(_restore(bench, records, each))
            bench.results.add("l", row, restore_s=seconds, restore_CPU_s=cpu)
            bench.say(f"{row}: restore {seconds:.2f} s, CPU {cpu:.2f} s")


def _cpu_us(bench: Bench, count: int, on_an_agent: int | None) -> float:
    """Return the worker's CPU for a verdict, microseconds, so many on an agent; None: for a trace."""
    topics, name = asyncio.run(fresh_topics(bench.bootstrap)), unique("source")
    create_topics(bench.bootstrap, {name: PARTITIONS, f"{name}.judged": PARTITIONS})
    records = _records(name, topic_id(bench.bootstrap, name), count, on_an_agent)
    keys = bench.log_path("judges")
    keys.write_bytes(b"ci " + JUDGE)
    settings = {
        "KP_EMBEDDER": "none", "KP_VERDICT_KEY_FILE": str(keys), "KP_JUDGED_TOPIC": f"{name}.judged",
        "KP_CONFIDENCE": "record", "KP_SESSION_TIMEOUT_SECONDS": "120",
    }  # fmt: skip
    with bench.worker(topics, name, settings) as worker:
        worker.wait_ready(120)
        worker.stop()
        before = cpu_seconds(worker.pid)
        try:
            asyncio.run(_send(bench.bootstrap, name, records))
        finally:
            worker.cont()
        bench.follow(topics, Source(name, PARTITIONS, [b""] * count, 0), [worker])
        return (cpu_seconds(worker.pid) - before) / count * 1e6


def _records(topic: str, identity: str, count: int, on_an_agent: int | None) -> Iterator[Record]:
    for number, value in enumerate(documents(count, broken_every=0)):
        partition = number % PARTITIONS
        if on_an_agent is None:
            yield Record(b"key", value, (), partition)
            continue
        agent = f"kp:agent:{number // PARTITIONS % max(1, count // PARTITIONS // on_an_agent)}"
        line = {
            "trace_id": f"{json.loads(value)['id']}-{number}", "agent_id": agent, "task_domain": "code",
            "partition": partition, "success": number % 3 > 0, "judge": "ci",
        }  # fmt: skip
        made = make_verdict(line, topic=topic, topic_id=identity, issued_at=datetime.now(UTC))
        signed = sign_verdict(made, JUDGE)
        yield Record(signed.key, signed.value, signed.headers, partition)


async def _send(bootstrap: str, topic: str, records: Iterator[Record]) -> None:
    async with AIOKafkaProducer(
        bootstrap_servers=bootstrap, enable_idempotence=True, max_batch_size=262_144, linger_ms=5
    ) as producer:
        for it in records:
            await producer.send(topic, it.value, it.key, it.partition, headers=it.headers)


async def _restore(bench: Bench, records: int, each: int) -> tuple[float, float]:
    """Read, check and take the records of a partition; return the time and the CPU, s."""
    changelog, identity = unique("changelog"), "a" * 22
    create = {changelog: (1, dict(CHANGELOG_CONFIG))}
    await asyncio.to_thread(create_topics, bench.bootstrap, create)
    await _send(bench.bootstrap, changelog, _rows(records, each, identity))
    began, before = time.perf_counter(), time.process_time()
    client = {"bootstrap_servers": bench.bootstrap}
    read, restored = (await read_logs(client, changelog, [0], 600)).pop(0), Restored()
    read.restore_records(restored, Found(each, True, None, identity, False))
    record = TrackRecord(identity)
    record.restore(restored.records, each)
    took = time.perf_counter() - began, time.process_time() - before
    if len(record) != records:
        raise RuntimeError(f"{len(record)} of {records} records restored")
    return took


def _rows(records: int, each: int, topic_id: str) -> Iterator[Record]:
    """Yield changelog records of so many track records, with the same verdicts in all."""
    record = TrackRecord(topic_id)
    for offset in range(each):
        line = {
            "trace_id": f"kp:trace:{offset}", "agent_id": "ada", "task_domain": "code", "partition": 0,
            "success": offset % 2, "judge": "ci",
        }  # fmt: skip
        made = make_verdict(line, topic="-", topic_id=topic_id, issued_at=datetime.now(UTC))
        (change,) = record.add(made, issued_ms(made, None), offset).changes
    key, value = encode_row(change)
    stored = read_stored(key, value or b"")
    for number in range(records):
        name = f"kp:agent:{number}"
        other = msgspec.structs.replace(stored, agent_id=name)
        yield Record(*encode_row((record_key(name, stored.domain), other)), (), 0)

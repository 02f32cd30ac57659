"""What is fed in, and what must come out: documents, topics, filled sources, expected outputs.

A source is filled once for a part and read by every run under a group of its own: the same records at the same
offsets with the same timestamps, so the outputs of all runs must have the same bytes, and a run with others is an
error.
"""

import json
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, NamedTuple

from aiokafka import AIOKafkaProducer

from tests.runs.benchmarks.job import Embedder, Job, changelog_topic, output_topics
from tests.support.kafka_fixtures import create_topics_async, unique
from tests.support.surroundings import DATA
from worker.core.records import SourceRecord
from worker.kafka.topics import CHANGELOG_CONFIG

PARTITIONS: Final = 4


class BenchmarkError(Exception):
    """A run did not do its work; the message says what is wrong. A wrong fast result is an error."""


@cache
def traces() -> list[bytes]:
    """Return the thousand sample traces (1.5 kB on average), in order."""
    return [line for line in (DATA / "traces.jsonl").read_bytes().split(b"\n") if line]


def documents(count: int, *, broken: bool = True) -> list[bytes]:
    """Return so many documents: the sample traces again and again. `broken`: one in a hundred is cut short."""
    lines = traces()
    return [lines[i % len(lines)][: 200 if broken and i % 100 == 99 else None] for i in range(count)]


def long_documents(count: int, words: list[str]) -> list[bytes]:
    """Return traces whose texts have exactly 256 tokens: words that are one token each, plus [CLS] and [SEP]."""
    template = json.loads(traces()[0])
    result = []
    for i in range(count):
        text = [words[(i * 7919 + j * 104_729) % len(words)] for j in range(254)]
        template["id"] = f"kp:trace:long-{i}"
        template["task"]["objective"] = " ".join(text[:20])
        template["steps"] = [{"step_id": 0, "type": "tool_call", "tool": {"name": "x"}, "content": " ".join(text[20:])}]
        result.append(json.dumps(template).encode())
    return result


@dataclass(frozen=True)
class Source:
    """A filled topic: record i of `values` is in partition i % partitions."""

    name: str
    partitions: int
    values: Sequence[bytes]
    timestamp_ms: int


def _key(i: int) -> bytes:
    return b"kp:agent:%d" % (i % 50)


async def fill(bootstrap: str, values: Sequence[bytes]) -> Source:
    """Create a source that several runs read."""
    source = Source(unique("source"), PARTITIONS, values, time.time_ns() // 1_000_000)
    await create_topics_async(bootstrap, {source.name: PARTITIONS})
    await produce(bootstrap, source)
    return source


async def produce(bootstrap: str, source: Source) -> None:
    """Send all records of a source, in order."""
    async with AIOKafkaProducer(
        bootstrap_servers=bootstrap, enable_idempotence=True, max_batch_size=262_144, linger_ms=5
    ) as producer:
        for i, value in enumerate(source.values):
            await producer.send(source.name, value, _key(i), i % source.partitions, source.timestamp_ms)


class Topics(NamedTuple):
    """What one run reads, the group that it reads as, and where it writes, named after the group."""

    source: str
    partitions: int
    group: str

    @property
    def outputs(self) -> dict[str, str]:
        """By kind."""
        return output_topics(self.group)

    @property
    def changelog(self) -> str:
        return changelog_topic(self.group)


async def fresh_topics(
    bootstrap: str, source: Source | None, partitions: int = PARTITIONS, *, stamped: bool = True
) -> Topics:
    """Create the topics of one run, and an empty source where none is given.

    `stamped`: the broker stamps outputs on arrival; otherwise the producer does.
    """
    group = unique("run")
    topics = Topics(f"{group}.source" if source is None else source.name, partitions, group)
    config = {"message.timestamp.type": "LogAppendTime"} if stamped else {}
    specs = dict.fromkeys(topics.outputs.values(), (partitions, config))
    specs[topics.changelog] = partitions, dict(CHANGELOG_CONFIG)
    if source is None:
        specs[topics.source] = partitions, {}
    await create_topics_async(bootstrap, specs)
    return topics


class Outputs(NamedTuple):
    """What came out: records and sum of checksums by kind, first and last stamp (s since 1970)."""

    counts: Counter[str]
    checksums: Counter[str]
    first: float = 0.0
    last: float = 0.0


def expected(source: Source, embedder: Embedder | None) -> Outputs:
    """Do the job here and now: what every run over this source must give."""
    job = Job(embedder)
    counts, checksums = Counter[str](), Counter[str]()
    for i, value in enumerate(source.values):
        offset, partition = divmod(i, source.partitions)
        output = job.handle(SourceRecord(source.name, partition, offset, source.timestamp_ms, _key(i), value)).output
        counts[output.kind] += 1
        checksums[output.kind] += zlib.crc32(output.value or b"")
    return Outputs(counts, checksums)


def check_count(name: str, outputs: Outputs, count: int) -> None:
    """Raise BenchmarkError unless a run gave so many outputs."""
    if outputs.counts.total() != count:
        raise BenchmarkError(f"{name}: {outputs.counts.total()} outputs of {count}")


def check(name: str, outputs: Outputs, wanted: Outputs, *, bytes_too: bool = True) -> None:
    """Raise BenchmarkError unless a run gave what it must."""
    if outputs.counts != wanted.counts:
        raise BenchmarkError(f"{name}: outputs {dict(outputs.counts)}, expected {dict(wanted.counts)}")
    if bytes_too and outputs.checksums != wanted.checksums:
        raise BenchmarkError(f"{name}: as many outputs as expected, but with other bytes")

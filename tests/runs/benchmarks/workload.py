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

from tests.runs.benchmarks.job import Embedder, Job
from tests.support.kafka_fixtures import create_topics_async, unique
from tests.support.surroundings import DATA
from worker.core.records import ACCEPTED, DEAD_LETTER, REJECTED, SourceRecord
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


def long_documents(count: int, words: list[str], tokens: int = 256) -> list[bytes]:
    """Return traces whose texts have exactly so many tokens: words that are one token each, plus [CLS] and [SEP]."""
    template = json.loads(traces()[0])
    result = []
    for i in range(count):
        text = [words[(i * 7919 + j * 104_729) % len(words)] for j in range(tokens - 2)]
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

    def records(self) -> list[SourceRecord]:
        """Return the records, as a consumer gets them."""
        return [
            SourceRecord(self.name, i % self.partitions, i // self.partitions, self.timestamp_ms, _key(i), value)
            for i, value in enumerate(self.values)
        ]


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


@dataclass(frozen=True)
class Topics:
    """What one run reads and where it writes, and the group that it reads as."""

    source: str
    partitions: int
    group: str
    outputs: dict[str, str]
    changelog: str

    def settings(self) -> dict[str, str]:
        return {
            "KP_GROUP_ID": self.group,
            "KP_SOURCE_TOPIC": self.source,
            "KP_ACCEPTED_TOPIC": self.outputs[ACCEPTED],
            "KP_REJECTED_TOPIC": self.outputs[REJECTED],
            "KP_DEAD_LETTER_TOPIC": self.outputs[DEAD_LETTER],
            "KP_CHANGELOG_TOPIC": self.changelog,
        }

    def arguments(self) -> list[str]:
        topics = {"group": self.group, "source": self.source, **self.outputs, "changelog": self.changelog}
        return [f"--{name.replace('_', '-')}={topic}" for name, topic in topics.items()]


async def fresh_topics(
    bootstrap: str, source: Source | None = None, partitions: int = PARTITIONS, *, stamped: bool = True
) -> Topics:
    """Create the topics of one run, and an empty source where none is given.

    `stamped`: the broker stamps outputs on arrival; otherwise the producer does.
    """
    group = unique("run")
    outputs = {kind: f"{group}.{kind}" for kind in (ACCEPTED, REJECTED, DEAD_LETTER)}
    name = f"{group}.source" if source is None else source.name
    topics = Topics(name, partitions, group, outputs, f"{group}-novelty-changelog")
    config = {"message.timestamp.type": "LogAppendTime"} if stamped else {}
    await create_topics_async(
        bootstrap,
        dict.fromkeys(outputs.values(), (partitions, config))
        | {topics.changelog: (partitions, dict(CHANGELOG_CONFIG))}
        | ({name: partitions} if source is None else {}),
    )
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
    for record in source.records():
        output = job.handle(record).output
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

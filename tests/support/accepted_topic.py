"""An accepted topic with what a reader may meet, and what its tables must hold in the end.

Two producers of the worker write to each partition, as where the source topic has more partitions than the accepted
one: their transactions overlap, and some are aborted. A client that skips the wrong records stores kp:trace:never, or
loses a trace.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from tests.support.builders import make_record, trace_document
from tests.support.kafka_fixtures import create_topics, create_topics_async, produce, unique
from worker.core.documents import scored_record
from worker.core.records import SourceRecord
from worker.core.scorer import PartitionScorer
from worker.core.trace import parse_trace
from worker.core.verdicts import Ruling, judged_record, make_verdict
from worker.kafka.producer import Producer
from worker.kafka.rows import OutputTopic, PartitionRows
from worker.lab.broker.embedded_kafka import EmbeddedKafka

PARTITIONS: Final = 2
UNREADABLE: Final = (
    None,  # a tombstone: somebody else made the topic compacted, or writes to it
    b"\xff\xfe",
    b"{",
    b"[]",
    b"null",
    b'{"id": "kp:trace:unscored"}',
    b'{"id": null, "scoring": {"score": 0.8, "source": {}}}',
    b'{"id": "kp:trace:text", "scoring": {"score": "high", "source": {}}}',
    b'{"id": "kp:trace:infinite", "scoring": {"score": 1e999, "source": {}}}',
    b'{"id": "kp:trace:nan", "scoring": {"score": NaN, "source": {}}}',
    b'{"id": "kp:trace:nowhere", "scoring": {"score": 0.8}}',
    b"[" * 100_000,
)


@dataclass
class AcceptedTopic:
    """`rows`: id -> score, and the document as it was committed last. `unreadable`: the values that are no such."""

    name: str
    rows: dict[str, tuple[float, str]] = field(default_factory=dict)
    unreadable: list[bytes | None] = field(default_factory=list)

    def note(self, value: bytes | None) -> None:
        if value is not None and value not in self.unreadable:
            document = json.loads(value)
            self.rows[document["id"]] = (document["scoring"]["score"], value.decode())


def scored(rng: random.Random, trace_id: str) -> bytes:
    """Return an accepted document of the worker's own making."""
    document = trace_document(trace_id, confidence=rng.random(), objective="a\0b")
    document["x_large"] = 2**60 + 1  # an unknown field; JavaScript's numbers do not hold it
    record = make_record(json.dumps(document).encode(), offset=rng.randrange(10**6))
    result = PartitionScorer(threshold=0.0).score(parse_trace(record.value or b""), None, 0)
    return scored_record(record, result, None).value or b""


def judge(kafka: EmbeddedKafka, topic: AcceptedTopic) -> tuple[str, bytes, set[str]]:
    """Create and fill a topic with verdicts on stored documents.

    Return its name, the value of one more verdict, and the ids of what has failed in the end: by one of two judges, or
    by the last word of a judge. A verdict that does not count changes nothing.
    """
    name = f"{topic.name}.judged"
    failed, mended, copied, later = (topic.rows[each][1] for each in sorted(topic.rows)[:4])
    create_topics(kafka.bootstrap_servers, {name: 1})
    values = [
        _judged(failed, 1, success=0), _judged(failed, 2, success=1, judge="ann"), _judged(mended, 3, success=0.2),
        _judged(mended, 4, success=1), _judged(copied, 5, success=0, counts=False),
    ]  # fmt: skip
    produce(kafka.bootstrap_servers, name, [(None, value) for value in values])
    return name, _judged(later, 6, success=0), {json.loads(each)["id"] for each in (failed, later)}


def _judged(document: str, offset: int, *, success: float, counts: bool = True, judge: str = "ci") -> bytes:
    """Return the record on KP_JUDGED_TOPIC of a verdict on a stored document."""
    stored = json.loads(document)
    at = stored["scoring"]["source"]
    line = {
        "trace_id": stored["id"], "agent_id": "ada", "task_domain": "d", "partition": at["partition"],
        "offset": at["offset"], "success": success, "judge": judge,
    }  # fmt: skip
    verdict = make_verdict(line, topic=at["topic"], topic_id="a" * 22, issued_at=datetime.now(UTC))
    record = SourceRecord(at["topic"], at["partition"], offset, None, None, b"")
    return judged_record(record, Ruling(verdict, counts, 0.5)).value or b""


IdOf = Callable[[int, int], str]
"""Returns a trace's id, given its partition and its number there."""


def versions(rng: random.Random, partition: int, traces: int, id_of: IdOf) -> list[bytes]:
    """Return documents in their order: new traces, repeats byte for byte, and later versions with another score."""
    found: list[bytes] = []
    for number in range(traces):
        found.append(scored(rng, id_of(partition, number)))
        if number % 7 == 3:
            found.append(rng.choice(found))
        if number % 7 == 5:
            found.append(scored(rng, json.loads(rng.choice(found))["id"]))
    return found


def accepted_topic(
    kafka: EmbeddedKafka, seed: int, traces: int, special: Sequence[bytes] = (), id_of: IdOf = "kp:trace:{}-{}".format
) -> AcceptedTopic:
    """Create and fill a topic with `traces` per partition. `special`: documents that the reader's database refuses."""
    return asyncio.run(_filled(kafka, seed, traces, special, id_of))


async def _filled(kafka: EmbeddedKafka, seed: int, traces: int, special: Sequence[bytes], id_of: IdOf) -> AcceptedTopic:
    rng = random.Random(seed)
    result = AcceptedTopic(unique("accepted"), unreadable=[*UNREADABLE, *special] * PARTITIONS)
    await create_topics_async(kafka.bootstrap_servers, {result.name: PARTITIONS})
    topic = OutputTopic(result.name, PARTITIONS, 1 << 20)
    client = {"bootstrap_servers": kafka.bootstrap_servers}
    producers = [Producer(client, f"{result.name}-{n}", 60) for n in range(2)]
    for producer in producers:
        await producer.start()
    try:
        for partition in range(PARTITIONS):
            rows: list[bytes | None] = [*versions(rng, partition, traces, id_of), *UNREADABLE, *special]
            commits: dict[Producer, bool] = {}  # the open transactions
            while rows or commits:
                producer = rng.choice(producers)
                if producer not in commits:
                    await producer.begin()
                    commits[producer] = rng.random() < 0.6
                elif not rows or rng.random() < 0.3:
                    await (producer.commit() if commits.pop(producer) else producer.abort())
                    commits.pop(producer, None)
                else:
                    value = rows.pop(0) if commits[producer] else scored(rng, "kp:trace:never")
                    await producer.send([PartitionRows(topic, partition, [(b"agent", value, None, [])])])
                    if commits[producer]:
                        result.note(value)
    finally:
        for producer in producers:
            await producer.stop()
    return result


def start_reader(command: Sequence[str], folder: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a reader of the page in a folder; what it prints goes to the file `log` there."""
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, cwd=folder, env={**os.environ, **env}, stdout=log, stderr=log)


@contextmanager
def two_readers(command: Sequence[str], folder: Path, env: Mapping[str, str]) -> Iterator[None]:
    """Run two readers at once; at the end SIGTERM must end both with 0."""
    readers = [start_reader(command, folder, env) for _ in range(2)]
    try:
        yield
        for reader in readers:
            reader.send_signal(signal.SIGTERM)
        assert [reader.wait(30) for reader in readers] == [0, 0], (folder / "log").read_text()
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()

"""A compacted topic in memory, with a publisher that fails and a pool that embeds in any order.

For the tests of crashes: what Kafka holds for one partition, and a random past of it.
"""

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from tests.support.builders import T0, TOPIC_ID, TextEmbedder, make_record, random_trace_bytes
from worker import InvalidTrace, PartitionScorer
from worker.core.changelog import Log, Restored
from worker.core.passes import MARKER_KEY, Found, committed_from
from worker.core.records import OutputRecord, SourceRecord
from worker.embed.embedder import Embedding
from worker.kafka.writing.publisher import Commit, offset_metadata
from worker.stream.partition import Partition

DIMENSIONS = 6
IDENTITY = TextEmbedder(DIMENSIONS).identity


@dataclass(frozen=True)
class Plan:
    """The settings of one run; small ones, so that the ring wraps and entries expire all the time."""

    capacity: int
    ttl_ms: int | None
    slack: int
    exactly_once: bool

    @classmethod
    def random(cls, rng: random.Random) -> "Plan":
        return cls(
            rng.choice([1, 2, 5, 9]), rng.choice([None, 3000, 20_000]), rng.choice([1, 2, 5]), rng.random() < 0.5
        )

    def scorer(self) -> PartitionScorer:
        return PartitionScorer(self.capacity, self.ttl_ms, DIMENSIONS)


def random_records(rng: random.Random, count: int) -> list[SourceRecord]:
    """Return one partition: late times, times ahead, equal texts, dead letters of all kinds, gaps between offsets."""
    records, offset, now = [], 0, T0
    for number in range(count):
        offset += rng.choice([1, 1, 1, 2])
        now += rng.choice([0, 10, 500, 2000])
        created_at = now + rng.choice([0, 0, 0, -1000, -10_000, 10**12])
        trace = random_trace_bytes(rng, number, created_at)
        value: bytes | None = trace
        if rng.random() < 0.15:
            value = rng.choice([None, b"{}", trace[:-1], trace.replace(b'"task ', b'"poison ')])
        records.append(make_record(value, offset, timestamp_ms=rng.choice([now, now, now, None, -1])))
    return records


def as_bytes(output: OutputRecord) -> tuple[object, ...]:
    return (output.kind, output.key, output.value, tuple(output.headers), output.timestamp_ms)


Record = tuple[int, bytes, bytes | None]
"""Offset on the changelog, key, value."""


class Topics:
    """What Kafka holds for one partition: the changelog, the outputs, and the group's offset."""

    def __init__(self, topic_id: str | None = TOPIC_ID) -> None:
        self.topic_id = topic_id
        self.log: list[Record] = []
        self.outputs: list[tuple[object, ...]] = []
        self.offset = 0
        self.metadata: str | None = None  # None: no offset is committed

    def commit(self, batch: Commit) -> None:
        """Make a whole transaction visible."""
        self.write(batch)
        self.commit_offset(batch)

    def write(self, batch: Commit, count: int | None = None) -> None:
        """Make the first `count` records of a batch visible, entries first, all without a count."""
        for key, value in batch.entries[:count]:
            self.append(key, value)
        left = None if count is None else max(0, count - len(batch.entries))
        self.outputs += [as_bytes(output) for output in batch.outputs[:left]]

    def append(self, key: bytes, value: bytes | None) -> None:
        self.log.append((self.log[-1][0] + 1 if self.log else 0, key, value))

    def commit_offset(self, batch: Commit) -> None:
        self.offset = batch.next_offset
        self.metadata = offset_metadata(batch)

    def compacted(self) -> list[Record]:
        """Return the log as compaction leaves it: the last record of each key, no tombstones; never without its end."""
        last = {key: position for position, key, _ in self.log}
        end = self.log[-1][0] if self.log else 0
        return [it for it in self.log if it[0] == end or (it[2] is not None and last[it[1]] == it[0])]

    def entries(self) -> dict[bytes, bytes]:
        """Return the live entries."""
        return {key: value for _, key, value in self.compacted() if value is not None and key != MARKER_KEY}

    def restored(self, capacity: int, model: str = IDENTITY.key()) -> Restored:
        """Read the changelog as worker/kafka/state/restore.py does; whether compaction has run makes no difference."""
        committed = None if self.metadata is None else committed_from(self.metadata)
        recreated = committed is not None and committed.topic_id not in (None, self.topic_id)
        if recreated:
            committed, self.offset = None, 0
        found = Found(self.offset, self.metadata is not None, committed, self.topic_id, recreated)
        whole, compact = (self._read(records, found, model, capacity) for records in (self.log, self.compacted()))
        assert (whole.entries, whole.replay, whole.current) == (compact.entries, compact.replay, compact.current)
        assert not whole.skipped["corrupt"]
        return whole

    def _read(self, records: Sequence[Record], found: Found, model: str, capacity: int) -> Restored:
        log = Log()
        for position, key, value in records:
            log.apply(key, value, position)
        return log.restore(found, model, DIMENSIONS, capacity)

    def scorer(self, plan: Plan, found: Restored) -> PartitionScorer:
        scorer = plan.scorer()
        committed = committed_from(self.metadata or "")
        scorer.restore(found.cache(), None if committed is None else committed.stream_time_ms)
        return scorer


class CrashError(Exception):
    """The simulated broker is gone; what was asked last may be done or not."""


@dataclass
class SimulatedPublisher:
    """Publishes to `Topics`, slowly, and fails at random before, in, or after a commit."""

    topics: Topics
    plan: Plan
    rng: random.Random
    failing: float
    batches: list[int] = field(default_factory=list)

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    async def publish(self, batch: Commit) -> Mapping[int, InvalidTrace]:
        fate = self.rng.random()
        await self._pause()
        if fate < self.failing:
            if not self.plan.exactly_once:
                self.topics.write(batch, self.rng.randint(0, len(batch.entries) + len(batch.outputs)))
            raise CrashError
        if self.plan.exactly_once:
            self.topics.commit(batch)
        else:
            self.topics.write(batch)
            await self._pause()
            self.topics.commit_offset(batch)
        self.batches.append(len(batch.outputs))
        if fate > 1 - self.failing:
            raise CrashError  # the answer to the commit got lost
        await self._pause()
        return {}

    async def _pause(self) -> None:
        for _ in range(self.rng.choice([0, 1, 5])):
            await asyncio.sleep(0)


class RandomPool:
    """Embeds in any order, whenever `work` is called."""

    def __init__(self, rng: random.Random) -> None:
        self.identity = IDENTITY
        self._embedder = TextEmbedder(DIMENSIONS)
        self._rng = rng
        self._waiting: list[tuple[str, Future[Embedding]]] = []

    def embed(self, text: str) -> asyncio.Future[Embedding]:
        future: Future[Embedding] = Future()
        self._waiting.append((text, future))
        return asyncio.wrap_future(future)

    def work(self) -> None:
        if not self._waiting:
            return
        text, future = self._waiting.pop(self._rng.randrange(len(self._waiting)))
        try:
            future.set_result(self._embedder.embed(text))
        except RuntimeError as error:
            future.set_exception(error)


async def live_on(
    task: Partition,
    failures: Sequence[BaseException],
    pool: RandomPool,
    rng: random.Random,
    todo: list[SourceRecord],
    failing: float,
    most: float = math.inf,
) -> None:
    """Live one life: take records and embed texts in random order, until all is done, or something fails.

    A quarter of `failing` is the chance, at each step, that the partition is given up. `most`: records at once.
    """
    task.start()
    while (todo or len(task)) and not failures:
        if rng.random() < failing / 4:
            break  # the partition is given up
        if todo and task.has_room() and rng.random() < 0.7:
            task.take(todo.pop(0))
        elif rng.random() < 0.7:
            pool.work()
        else:
            await asyncio.sleep(0)
        assert len(task) <= most
    assert all(isinstance(failure, CrashError) for failure in failures)
    await task.close()

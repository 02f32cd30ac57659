"""Crashes at any instant change no byte of any output: hundreds of random lives on a simulated compacted topic.

Two workers are tried: one that is nothing but the core, so that every interleaving can be forced, and the real lane
with the real filter of the restore. The judge is an undisturbed run over the same records.
"""

import asyncio
import random
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from tests.support.builders import T0, TextEmbedder, make_record, random_trace_bytes, text_vector
from worker import InvalidTrace, PartitionScorer, changelog, embedding_text, lane, parse_trace
from worker.embedder import Embedding
from worker.lane import Lane, Rules
from worker.metrics import Metrics
from worker.pipeline import (
    OutputRecord,
    SourceRecord,
    cached_id,
    dead_letter,
    embedding_failed,
    event_time_ms,
    scored_record,
)
from worker.publisher import Batch, offset_metadata, stream_time_from
from worker.store import Restored, _take
from worker.trace import DEFAULT_LIMITS

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
        value: bytes | None = random_trace_bytes(rng, number, created_at)
        if rng.random() < 0.15:
            value = rng.choice([None, b"{}", value[:-1], value.replace(b'"task ', b'"poison ')])
        records.append(make_record(value, offset, timestamp_ms=rng.choice([now, now, now, None, -1])))
    return records


def as_bytes(output: OutputRecord) -> tuple[object, ...]:
    return (output.kind, output.key, output.value, tuple(output.headers), output.timestamp_ms)


class Topics:
    """What Kafka holds for one partition: a compacted changelog, the outputs, and the group's offset."""

    def __init__(self) -> None:
        self.changelog: dict[bytes, bytes] = {}
        self.outputs: list[tuple[object, ...]] = []
        self.offset = 0
        self.metadata = ""

    def commit(self, batch: Batch) -> None:
        """Make a whole transaction visible."""
        self.write(batch)
        self.commit_offset(batch)

    def write(self, batch: Batch, count: int | None = None) -> None:
        """Make the first `count` records of a batch visible, entries first, all without a count."""
        for key, value in batch.entries[:count]:
            self.changelog.pop(key, None)  # compaction keeps the order of the latest writes
            self.changelog[key] = value
        left = None if count is None else max(0, count - len(batch.entries))
        self.outputs += [as_bytes(output) for output in batch.outputs[:left]]

    def commit_offset(self, batch: Batch) -> None:
        self.offset = batch.next_offset
        self.metadata = offset_metadata(batch)

    def restored(self) -> Restored:
        """Read the changelog as worker/store.py does."""
        found = Restored()
        records = [SimpleNamespace(value=value) for value in self.changelog.values()]
        _take(found, records, self.offset, IDENTITY.key(), DIMENSIONS)
        assert not found.skipped
        return found

    def scorer(self, plan: Plan, found: Restored) -> PartitionScorer:
        scorer = plan.scorer()
        entries = found.cache()
        scorer.restore(entries, stream_time_from(self.metadata))
        return scorer


# -- the core alone


class CoreWorker:
    """One life of a worker without a lane: restore, then score records, and commit when it is told to."""

    def __init__(self, plan: Plan, topics: Topics, embedder: TextEmbedder) -> None:
        found = topics.restored()
        self.topics = topics
        self.scorer = topics.scorer(plan, found)
        self.replay = dict(found.replay)
        self.embedder = embedder
        self.capacity = plan.capacity
        self.waiting: list[Batch] = []

    def handle(self, record: SourceRecord) -> None:
        entries: list[tuple[bytes, bytes]] = []
        try:
            trace = parse_trace(record.value)
            entry = self.replay.pop(record.offset, None)
            if entry is not None:
                assert entry.trace_id == trace.id
                vector = entry.array()
            else:
                try:
                    vector = self.embedder.embed(embedding_text(trace)).vector
                except RuntimeError as error:
                    raise embedding_failed(error) from error
            scored = self.scorer.score(trace, vector, event_time_ms(trace, record.timestamp_ms))
            output = scored_record(record, scored, IDENTITY)
            assert scored.sequence is not None
            assert scored.vector is not None
            value = changelog.encode(
                sequence=scored.sequence,
                source_offset=record.offset,
                stream_time_ms=scored.stream_time_ms,
                trace_id=cached_id(trace),
                model=IDENTITY.key(),
                vector=scored.vector,
            )
            entries.append((changelog.slot_key(scored.sequence, self.capacity), value))
        except InvalidTrace as error:
            output = dead_letter(record, error)
        self.waiting.append(Batch([output], entries, record.offset + 1, self.scorer.stream_time_ms))

    def next_batch(self, size: int) -> Batch:
        parts, self.waiting = self.waiting[:size], self.waiting[size:]
        return Batch(
            [output for part in parts for output in part.outputs],
            [entry for part in parts for entry in part.entries],
            parts[-1].next_offset,
            parts[-1].stream_time_ms,
        )


def undisturbed(plan: Plan, records: Sequence[SourceRecord]) -> list[tuple[object, ...]]:
    worker = CoreWorker(plan, Topics(), TextEmbedder(DIMENSIONS))
    for record in records:
        worker.handle(record)
    return [as_bytes(output) for batch in worker.waiting for output in batch.outputs]


def live(
    rng: random.Random, plan: Plan, topics: Topics, records: Sequence[SourceRecord], bound: int, idle: float = 0.3
) -> bool:
    """Live one life; return whether it ended by a crash. At most `bound` traces are past the committed offset.

    `idle` is how often the worker commits where it could score.
    """
    worker = CoreWorker(plan, topics, TextEmbedder(DIMENSIONS))
    todo = [record for record in records if record.offset >= topics.offset]
    while todo or worker.waiting:
        if rng.random() < 0.04:
            if worker.waiting and not plan.exactly_once:  # in the middle of a batch: some of it is visible
                batch = worker.next_batch(rng.randint(1, len(worker.waiting)))
                topics.write(batch, rng.randint(0, len(batch.entries) + len(batch.outputs)))
            return True
        if todo and len(worker.waiting) < bound and rng.random() > idle:
            worker.handle(todo.pop(0))
        elif worker.waiting:
            topics.commit(worker.next_batch(rng.randint(1, len(worker.waiting))))
    return False


def check_outputs(plan: Plan, topics: Topics, expected: list[tuple[object, ...]]) -> None:
    if plan.exactly_once:
        assert topics.outputs == expected
    else:  # copies are allowed, but each is equal, and the first ones are in order
        assert list(dict.fromkeys(topics.outputs)) == expected


@pytest.mark.parametrize("exactly_once", [True, False], ids=["exactly_once", "at_least_once"])
def test_crashes_change_no_byte(exactly_once: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    lives = 0
    for _ in range(150):
        drawn = Plan.random(rng)
        plan = Plan(drawn.capacity, drawn.ttl_ms, drawn.slack, exactly_once)
        monkeypatch.setattr(changelog, "SLACK", plan.slack)
        records = random_records(rng, rng.randint(5, 70))
        topics = Topics()
        while live(rng, plan, topics, records, bound=plan.slack):
            lives += 1
        check_outputs(plan, topics, undisturbed(plan, records))
        assert len(topics.changelog) <= plan.capacity + plan.slack
    assert lives > 150


def count_wrong(seed: int, monkeypatch: pytest.MonkeyPatch, *, slack: int, bound: int) -> int:
    """Return how many of 25 at-least-once runs come out wrong in a world where a part of the design is left out."""
    rng = random.Random(seed)
    monkeypatch.setattr(changelog, "SLACK", slack)
    wrong = 0
    for _ in range(25):
        plan = Plan(5, None, slack, exactly_once=False)
        records, topics = random_records(rng, 60), Topics()
        while live(rng, plan, topics, records, bound, idle=0.1):
            pass
        wrong += list(dict.fromkeys(topics.outputs)) != undisturbed(plan, records)
    return wrong


def test_the_simulation_can_fail(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_wrong(seed, monkeypatch, slack=5, bound=5) == 0
    assert count_wrong(seed, monkeypatch, slack=0, bound=5) > 0  # entries are overwritten that a restart needs
    assert count_wrong(seed, monkeypatch, slack=5, bound=20) > 0  # more on the way than the slack covers


def test_after_a_reset_to_an_older_offset_crashes_change_no_byte_either(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The changelog still holds the first pass's last entries; the second pass begins before the oldest of them."""
    rng = random.Random(seed)
    plan = Plan(capacity=5, ttl_ms=None, slack=5, exactly_once=True)
    monkeypatch.setattr(changelog, "SLACK", plan.slack)
    for _ in range(300):
        records = [make_record(random_trace_bytes(rng, n, T0 + n), n) for n in range(rng.randint(30, 40))]
        topics = Topics()
        while live(rng, plan, topics, records, plan.slack):
            pass
        again = records[-rng.randint(11, 14) :]
        topics.offset, topics.metadata, topics.outputs = again[0].offset, "", []
        calm = CoreWorker(plan, topics, TextEmbedder(DIMENSIONS))
        for record in again:
            calm.handle(record)
        while live(rng, plan, topics, again, plan.slack):
            pass
        assert topics.outputs == [as_bytes(output) for batch in calm.waiting for output in batch.outputs]


def test_entries_of_another_model_or_dimension_and_rubbish_are_left_out() -> None:
    def value(sequence: int, model: str = IDENTITY.key(), dimensions: int = DIMENSIONS) -> bytes:
        return changelog.encode(
            sequence=sequence,
            source_offset=sequence,
            stream_time_ms=T0,
            trace_id="kp:trace:x",
            model=model,
            vector=text_vector("x", dimensions),
        )

    found = Restored()
    values = [value(0), value(1, model="other"), value(2, dimensions=7), b"rubbish", None, value(5), value(7, "other")]
    _take(found, [SimpleNamespace(value=v, topic="c", partition=0, offset=0) for v in values], 5, IDENTITY.key(), 6)
    assert [entry.sequence for entry in found.entries] == [0]
    assert list(found.replay) == [5]
    assert (found.skipped["other_model"], found.skipped["corrupt"]) == (3, 2)


# -- the real lane


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

    async def publish(self, batch: Batch) -> None:
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

    def submit(self, text: str) -> Future[Embedding]:
        future: Future[Embedding] = Future()
        self._waiting.append((text, future))
        return future

    def work(self) -> None:
        if not self._waiting:
            return
        text, future = self._waiting.pop(self._rng.randrange(len(self._waiting)))
        try:
            future.set_result(self._embedder.embed(text))
        except RuntimeError as error:
            future.set_exception(error)


async def live_in_a_lane(
    rng: random.Random, plan: Plan, topics: Topics, records: Sequence[SourceRecord], failing: float
) -> list[int]:
    """Live one life of a real lane, until it fails, is given up, or has committed everything; return batch sizes."""
    found = topics.restored()
    pool = RandomPool(rng)
    publisher = SimulatedPublisher(topics, plan, rng, failing)
    failures: list[BaseException] = []
    worker = Lane(
        0,
        topics.scorer(plan, found),
        publisher,
        pool,  # type: ignore[arg-type]
        Rules(DEFAULT_LIMITS, "created_at", 0.1),
        Metrics(CollectorRegistry()),
        replay=found.replay,
        next_offset=topics.offset,
        waiting=lambda: 0,
        on_room=lambda: None,
        on_failure=failures.append,
    )
    worker.start()
    todo = [record for record in records if record.offset >= topics.offset]
    embeddings = []
    while (todo or len(worker)) and not failures:
        if rng.random() < failing / 4:
            break  # the partition is given up
        if todo and worker.has_room() and rng.random() < 0.7:
            embeddings.append(worker.take(todo.pop(0)))
        elif rng.random() < 0.7:
            pool.work()
        else:
            await asyncio.sleep(0)
        assert len(worker) <= plan.slack
    assert all(isinstance(failure, CrashError) for failure in failures)
    await worker.close()
    for embedding in embeddings:  # asyncio complains about errors that nobody looked at
        if embedding is not None and embedding.done():
            embedding.exception()
    return publisher.batches


async def test_a_real_lane_that_crashes_changes_no_byte(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    lives, sizes = 0, set()
    for _ in range(80):
        plan = Plan.random(rng)
        monkeypatch.setattr(changelog, "SLACK", plan.slack)
        monkeypatch.setattr(lane, "SLACK", plan.slack)
        records = random_records(rng, rng.randint(5, 50))
        topics = Topics()
        end = records[-1].offset + 1
        while topics.offset < end:
            sizes.update(await live_in_a_lane(rng, plan, topics, records, failing=0.08))
            lives += 1
        check_outputs(plan, topics, undisturbed(plan, records))
    assert lives > 160
    assert {1, 2, 3, 4} <= sizes

"""Crashes at any instant change no byte of any output: hundreds of random lives on a simulated compacted topic.

Two workers are tried: one that is nothing but the core, so that every interleaving can be forced, and the real lane
with the real filter of the restore. The judge is an undisturbed run over the same records.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from tests.support.builders import T0, TextEmbedder, make_record, random_trace_bytes, text_vector
from tests.support.partition import new_partition
from tests.support.simulated_log import (
    DIMENSIONS,
    IDENTITY,
    Plan,
    RandomPool,
    SimulatedPublisher,
    Topics,
    as_bytes,
    live_on,
    random_records,
)
from worker import InvalidTrace, embedding_text, parse_trace
from worker.core import changelog
from worker.core.changelog import Log, Restored
from worker.core.documents import dead_letter, embedding_failed, scored_record
from worker.core.passes import MARKER_KEY, Committed, Found
from worker.core.records import SourceRecord
from worker.core.scorer import cached_id, event_time_ms
from worker.core.trace import DEFAULT_LIMITS, Limits
from worker.kafka.writing.publisher import Commit
from worker.stream import partition
from worker.stream.state import PartitionState

# -- the core alone


class CoreWorker:
    """One life of a worker without a partition task: restore, then score records, and commit when it is told to."""

    def __init__(self, plan: Plan, topics: Topics, embedder: TextEmbedder, limits: Limits = DEFAULT_LIMITS) -> None:
        self.restored = found = topics.restored(plan.capacity)
        self.topics = topics
        self.scorer = topics.scorer(plan, found)
        self.replay = dict(found.replay)
        self.embedder = embedder
        self.limits = limits
        self.capacity = plan.capacity
        self.waiting: list[tuple[Commit, int | None]] = []  # with the sequence

    def handle(self, record: SourceRecord) -> None:
        entries: list[tuple[bytes, bytes | None]] = []
        sequence = None
        number = self.restored.current.number
        assert number is not None
        try:
            trace = parse_trace(record.value, self.limits)
            text = embedding_text(trace)
            entry = self.replay.pop(record.offset, None)
            if entry is not None and entry.text_hash == changelog.text_hash(text):
                vector = entry.array()
            else:
                try:
                    vector = self.embedder.embed(text).vector
                except RuntimeError as error:
                    raise embedding_failed(error) from error
            scored = self.scorer.score(trace, vector, event_time_ms(trace, record.timestamp_ms))
            output = scored_record(record, scored, IDENTITY)
            sequence = scored.sequence
            assert sequence is not None
            assert scored.vector is not None
            value = changelog.encode(
                sequence=sequence,
                source_offset=record.offset,
                stream_time_ms=scored.stream_time_ms,
                trace_id=cached_id(trace),
                model=IDENTITY.key(),
                vector=scored.vector,
                pass_number=number,
                text_hash=changelog.text_hash(text),
            )
            entries.append((changelog.slot_key(sequence, self.capacity, number), value))
        except InvalidTrace as error:
            output = dead_letter(record, error)
        self.waiting.append((Commit([output], entries, record.offset + 1, self.scorer.stream_time_ms), sequence))

    def next_batch(self, size: int) -> Commit:
        parts, self.waiting = self.waiting[:size], self.waiting[size:]
        last = parts[-1][0]
        newest = max((sequence for _, sequence in parts if sequence is not None), default=None)
        entries = [entry for part, _ in parts for entry in part.entries]
        return Commit(
            [output for part, _ in parts for output in part.outputs],
            self.restored.housekeeping.rows(entries, newest, last.next_offset),
            last.next_offset,
            last.stream_time_ms,
            source_pass=self.restored.current,
        )


def undisturbed(plan: Plan, records: Sequence[SourceRecord]) -> list[tuple[object, ...]]:
    worker = CoreWorker(plan, Topics(), TextEmbedder(DIMENSIONS))
    for record in records:
        worker.handle(record)
    return [as_bytes(output) for batch, _ in worker.waiting for output in batch.outputs]


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


@pytest.mark.slow
@pytest.mark.parametrize("exactly_once", [True, False], ids=["exactly_once", "at_least_once"])
def test_crashes_change_no_byte(exactly_once: bool, seed: int, long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    lives, rounds = 0, 150 if long else 40
    for _ in range(rounds):
        drawn = Plan.random(rng)
        plan = Plan(drawn.capacity, drawn.ttl_ms, drawn.slack, exactly_once)
        monkeypatch.setattr(changelog, "SLACK", plan.slack)
        records = random_records(rng, rng.randint(5, 70))
        topics = Topics()
        while live(rng, plan, topics, records, bound=plan.slack):
            lives += 1
        check_outputs(plan, topics, undisturbed(plan, records))
        assert len(topics.entries()) <= plan.capacity + plan.slack
    assert lives > rounds


@pytest.mark.slow
def test_after_a_reset_to_an_older_offset_crashes_change_no_byte_either(
    seed: int, long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The changelog still holds the first pass's last entries; the second pass begins before the oldest of them."""
    rng = random.Random(seed)
    plan = Plan(capacity=5, ttl_ms=None, slack=5, exactly_once=True)
    monkeypatch.setattr(changelog, "SLACK", plan.slack)
    for _ in range(300 if long else 60):
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
        assert topics.outputs == [as_bytes(output) for batch, _ in calm.waiting for output in batch.outputs]


# -- passes, topics, capacities


@dataclass
class Past:
    """What an undisturbed worker would remember: the entries of the records that count, and how many must be there."""

    entries: list[tuple[int, int, str, bytes]] = field(default_factory=list)  # offset, sequence, trace id, vector
    may_be_gone: set[tuple[int, int, str, bytes]] = field(
        default_factory=set
    )  # once too old for a cache and a step back

    def below(self, offset: int) -> "Past":
        return Past([entry for entry in self.entries if entry[0] < offset], self.may_be_gone)

    def check(self, found: Restored, capacity: int) -> None:
        """Nothing foreign, no gap, nothing missing that a changelog of `capacity + slack` entries can hold."""
        restored = [(it.source_offset, it.sequence, it.trace_id, it.vector) for it in found.entries]
        assert restored == self.entries[len(self.entries) - len(restored) :]
        must = [entry for entry in self.entries[-capacity:] if entry not in self.may_be_gone]
        assert must == restored[len(restored) - len(must) :]

    def written(self, found: Restored, batch: Commit, slots: int) -> None:
        """Take note of what may go with these rows, committed or not: what is `slots` behind the newest."""
        newest = [entry.sequence for entry in found.entries]
        newest += [sequence for _, value in batch.entries if (sequence := _sequence(value)) is not None]
        self.may_be_gone.update(entry for entry in self.entries if entry[1] <= max(newest, default=0) - slots)

    def committed(self, batch: Commit) -> None:
        for key, value in batch.entries:
            if value is not None and key != MARKER_KEY:
                entry = changelog.decode(value)
                self.entries.append((entry.source_offset, entry.sequence, entry.trace_id, entry.vector))
                self.may_be_gone.discard(self.entries[-1])


def _sequence(value: bytes | None) -> int | None:
    try:
        return changelog.decode(value).sequence
    except changelog.CorruptEntry:  # the marker, or a tombstone
        return None


class World:
    """One group over a source topic that is reset and recreated, and read by workers of all capacities."""

    def __init__(self, rng: random.Random, exactly_once: bool) -> None:
        self.rng = rng
        self.exactly_once = exactly_once
        self.topics = Topics()
        self.records = random_records(rng, 80)
        self.past = Past()  # as of the last commit
        self.lives = self.inherited = self.carried = 0

    def disturb(self) -> None:
        """Move the offset, make the source anew, or do nothing."""
        rng, topics = self.rng, self.topics
        event = rng.random()
        end = self.records[-1].offset + 1
        if event < 0.35:  # kafka-consumer-groups --reset-offsets
            # Forward only where nothing is written past the committed offset: at least once it could not be told apart.
            highest = end if self.exactly_once else topics.offset
            lowest = max(0, topics.offset - rng.choice([2, 5, 100]))
            topics.offset = rng.randint(lowest, max(lowest, highest))
            topics.metadata = ""
        elif event < 0.45:  # deleted and recreated; the offsets go with it, or stay behind
            topics.topic_id = f"topic-{rng.randrange(10**16):016}"
            self.records = random_records(rng, 80)
            if topics.metadata is None or rng.random() < 0.5:
                topics.offset, topics.metadata = 0, None
            elif not topics.metadata.startswith("kp2"):
                topics.offset, topics.metadata = 0, ""
            self.past = Past()
        elif event < 0.5 and topics.metadata is not None:  # the offsets expired
            topics.offset, topics.metadata = 0, None

    def live(self) -> None:
        """Live one life of a worker, from a restore that is right until it stops or crashes."""
        rng, topics = self.rng, self.topics
        self.lives += 1
        capacity = rng.choice([1, 2, 5, 9])
        plan = Plan(capacity, None, changelog.SLACK, self.exactly_once)
        limits = rng.choice([DEFAULT_LIMITS, Limits(max_steps=3)])
        worker = CoreWorker(plan, topics, TextEmbedder(DIMENSIONS), limits)
        past = self.past.below(topics.offset)
        past.check(worker.restored, capacity)
        self.carried += len(worker.restored.entries)
        slots = capacity + changelog.SLACK
        todo = [record for record in self.records if record.offset >= topics.offset]
        for _ in range(rng.randint(1, 60)):
            if todo and len(worker.waiting) < plan.slack and rng.random() < 0.7:
                worker.handle(todo.pop(0))
            elif worker.waiting:
                batch = worker.next_batch(rng.randint(1, len(worker.waiting)))
                past.written(worker.restored, batch, slots)
                if rng.random() < 0.1 and not self.exactly_once:
                    topics.write(batch, rng.randint(0, len(batch.entries) + len(batch.outputs)))
                    return
                topics.commit(batch)
                assert len(topics.entries()) <= (slots if self.exactly_once else 2 * slots)
                past.committed(batch)
                self.past = past


@pytest.mark.slow
@pytest.mark.parametrize("exactly_once", [True, False], ids=["exactly_once", "at_least_once"])
def test_a_restored_cache_is_the_undisturbed_one_whatever_was_done_to_the_offsets(
    exactly_once: bool, seed: int, long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    lives = carried = 0
    for _ in range(40 if long else 12):
        monkeypatch.setattr(changelog, "SLACK", rng.choice([1, 2, 5]))
        world = World(rng, exactly_once)
        for _ in range(25):
            world.live()
            world.disturb()
        lives += world.lives
        carried += world.carried
    assert carried > lives


def test_entries_of_another_model_or_dimension_and_rubbish_are_left_out() -> None:
    def value(sequence: int, model: str = IDENTITY.key(), dimensions: int = DIMENSIONS) -> bytes:
        return changelog.encode(
            sequence=sequence,
            source_offset=sequence,
            stream_time_ms=T0,
            trace_id="kp:trace:x",
            model=model,
            vector=text_vector("x", dimensions),
            pass_number=1,
            text_hash=changelog.text_hash("x"),
        )

    log = Log()
    values = [value(0), value(1, model="other"), value(2, dimensions=7), b"rubbish", b"", value(5), value(7, "other")]
    for number, raw in enumerate(values):
        log.apply(changelog.slot_key(number, 1000, 1), raw, number)
    found = log.restore(Found(5, committed=Committed(T0, None, 1)), IDENTITY.key(), 6, 1000)
    assert [entry.sequence for entry in found.entries] == [0]
    assert list(found.replay) == [5]
    assert (found.skipped["other_model"], found.skipped["corrupt"]) == (3, 2)


# -- the real partition task


async def live_in_a_task(
    rng: random.Random, plan: Plan, topics: Topics, records: Sequence[SourceRecord], failing: float
) -> list[int]:
    """Live one life of a real task, until it fails, is given up, or has committed everything; return batch sizes."""
    found = topics.restored(plan.capacity)
    pool = RandomPool(rng)
    publisher = SimulatedPublisher(topics, plan, rng, failing)
    failures: list[BaseException] = []
    state = PartitionState(topics.scorer(plan, found), topics.offset, found.replay, found.current, found.housekeeping)
    worker = new_partition(0, state, publisher, failures, pool=pool)
    todo = [record for record in records if record.offset >= topics.offset]
    await live_on(worker, failures, pool, rng, todo, failing, plan.slack)
    return publisher.batches


@pytest.mark.slow
async def test_a_real_task_that_crashes_changes_no_byte(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    lives, sizes = 0, set()
    for _ in range(80):
        plan = Plan.random(rng)
        monkeypatch.setattr(changelog, "SLACK", plan.slack)
        monkeypatch.setattr(partition, "SLACK", plan.slack)
        records = random_records(rng, rng.randint(5, 50))
        topics = Topics()
        end = records[-1].offset + 1
        while topics.offset < end:
            sizes.update(await live_in_a_task(rng, plan, topics, records, failing=0.08))
            lives += 1
        check_outputs(plan, topics, undisturbed(plan, records))
    assert lives > 160
    assert {1, 2, 3, 4} <= sizes

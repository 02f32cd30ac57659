"""Crashes change no byte of any output, and every restore finds what an undisturbed worker would remember.

Hypothesis decides what the source holds, when the real partition task takes records, which embedding is ready next,
what becomes of each commit, and who moves the offset or recreates the topic between two lives. The changelog is a
compacted topic in memory (tests/support/simulated_log.py). Three judges:

- an undisturbed run, byte for byte, from wherever the offset was moved to;
- what must be in the cache of each restore (`Past`);
- the oracle (tests/support/oracle.py), which scores by brute force, as long as nothing was moved.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from prometheus_client import CollectorRegistry

from tests.support import oracle
from tests.support.builders import T0, TextEmbedder, make_record, trace_document
from tests.support.partition import new_partition
from tests.support.simulated_log import DIMENSIONS, IDENTITY, Topics, consumed
from worker import InvalidTrace, PartitionScorer, make_verdict, sign_verdict
from worker.commands.shared.placed_verdicts import Standings, in_order, judged_verdict
from worker.core import changelog, track_record
from worker.core.changelog import committed_from
from worker.core.records import SourceRecord
from worker.core.restore import Restored
from worker.core.scorer import EvaluationConfig
from worker.core.trace import DEFAULT_LIMITS, Limits
from worker.embed.embedder import Embedding
from worker.kafka.publisher import Commit
from worker.observe.metrics import Metrics
from worker.stream import partition
from worker.stream.evaluator import PartitionState
from worker.stream.partition import Partition

JUDGES = {"ci": b"c" * 32, "ann": b"a" * 32}
STEPS = ["thought", "tool_call:search", "tool_call:sheet", "tool_call", "observation", "error_recovery"]
CAPACITIES = st.sampled_from([5, 1, 2, 9])
SMALL = st.integers(0, 40)
METRICS = Metrics(CollectorRegistry())
"""Of all lives: to make them takes longer than most lives."""


class DrawnTrace(NamedTuple):
    """A trace of the source."""

    gap: int  # between its offset and the one before it
    passed: int  # ms since then
    created: int  # its time, later than now by so many ms
    dated: str  # the record's time
    agent: str
    domain: str
    task: int
    success: bool
    confidence: float
    steps: list[str]
    broken: str


TRACES = st.builds(
    DrawnTrace,
    gap=st.sampled_from([0, 0, 1]),
    passed=st.sampled_from([500, 0, 10, 2000]),
    created=st.sampled_from([0, 0, 0, -1000, -10_000, 10**12]),
    dated=st.sampled_from(["now", "now", "now", "never", "before 1970"]),
    agent=st.sampled_from(["ada", "bob"]),
    domain=st.sampled_from(["finance", "code", "gardening"]),
    task=st.integers(0, 7),
    success=st.booleans(),
    confidence=st.sampled_from([0.9, 0.0, 0.5, 1.0]),
    steps=st.lists(st.sampled_from(STEPS), min_size=1, max_size=5),
    broken=st.sampled_from([*[""] * 20, "null", "empty", "cut", "poison"]),
)


class DrawnVerdict(NamedTuple):
    """A verdict on one of the traces before it."""

    trace: int  # counted from the last one
    success: float
    judge: str
    issued: int  # seconds after the record's time
    kind: str


VERDICTS = st.builds(
    DrawnVerdict,
    trace=SMALL,
    success=st.sampled_from([True, False, 0.5]),
    judge=st.sampled_from(sorted(JUDGES)),
    issued=st.sampled_from([0, -10, 30]),
    kind=st.sampled_from([*["new"] * 6, "forged", "copy"]),
)


class CrashError(Exception):
    """The broker is gone; what was asked last may be done or not."""


class Pool:
    """Embeds a text when the test says so; `at_once`: immediately."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.identity = IDENTITY
        self.waiting: list[tuple[str, Future[Embedding]]] = []
        self._embedder = TextEmbedder(DIMENSIONS)
        self._at_once = at_once

    def embed(self, text: str) -> asyncio.Future[Embedding]:
        future: Future[Embedding] = Future()
        self.waiting.append((text, future))
        wrapped = asyncio.wrap_future(future)
        if self._at_once:
            self.finish(0)
        return wrapped

    def finish(self, which: int) -> None:
        text, future = self.waiting.pop(which % len(self.waiting))
        try:
            future.set_result(self._embedder.embed(text))
        except RuntimeError as error:
            future.set_exception(error)


class Publisher:
    """Holds each batch until the test says what becomes of it; with `topics` it commits at once."""

    def __init__(self, topics: Topics | None = None) -> None:
        self.held: tuple[Commit, asyncio.Future[None]] | None = None
        self._topics = topics

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    async def publish(self, batch: Commit) -> Mapping[int, InvalidTrace]:
        if self._topics is not None:
            self._topics.commit(batch)
            return {}
        answer = asyncio.get_running_loop().create_future()
        self.held = batch, answer
        try:
            await answer
        finally:
            self.held = None
        return {}


class Remembered(NamedTuple):
    """An entry of a cache."""

    offset: int
    sequence: int
    trace_id: str
    vector: bytes


class Past:
    """What an undisturbed worker would remember: the entries of the traces that count."""

    def __init__(self, entries: Sequence[Remembered] = (), may_be_gone: set[Remembered] | None = None) -> None:
        self.entries = [*entries]
        self.may_be_gone = set() if may_be_gone is None else may_be_gone
        """Entries that were once too old for a cache and a step back."""

    def below(self, offset: int) -> Past:
        return Past([entry for entry in self.entries if entry.offset < offset], self.may_be_gone)

    def check(self, restored: Restored, capacity: int) -> None:
        """Nothing foreign, no gap, nothing missing that a changelog of `capacity + slack` entries can hold."""
        entries = [Remembered(it.source_offset, it.sequence, it.trace_id, it.vector) for it in restored.entries]
        assert entries == self.entries[len(self.entries) - len(entries) :]
        must = [entry for entry in self.entries[-capacity:] if entry not in self.may_be_gone]
        assert must == entries[len(entries) - len(must) :]

    def written(self, restored: Restored, batch: Commit, slots: int) -> None:
        """Note what may go with these rows, committed or not: what is `slots` behind the newest."""
        newest = max([it.sequence for it in (*restored.entries, *entries_of(batch))], default=0)
        self.may_be_gone.update(entry for entry in self.entries if entry.sequence <= newest - slots)

    def committed(self, batch: Commit) -> None:
        self.entries += entries_of(batch)
        self.may_be_gone.difference_update(entries_of(batch))


def entries_of(batch: Commit) -> list[Remembered]:
    entries = [
        changelog.decode(value)
        for key, value in batch.entries
        if value is not None and changelog.kind_of(key) is changelog.Kind.ENTRY
    ]
    return [Remembered(it.source_offset, it.sequence, it.trace_id, it.vector) for it in entries]


class Setup(NamedTuple):
    """The settings of one life; small ones, so that the ring wraps and entries expire all the time."""

    capacity: int
    ttl_ms: int | None
    judges: bool  # verdicts count
    limits: Limits = DEFAULT_LIMITS


class Life:
    """A worker's partition, restored from the topics as stream/partition_factory.py does."""

    def __init__(self, topics: Topics, setup: Setup, pool: Pool, publisher: Publisher) -> None:
        self.pool, self.publisher = pool, publisher
        self.failures: list[BaseException] = []
        self.restored = restored = topics.restored(setup.capacity)
        confidence = "record" if setup.judges else "stated"
        judges = {name: [key] for name, key in JUDGES.items()} if setup.judges else {}
        scorer = PartitionScorer(setup.capacity, setup.ttl_ms, DIMENSIONS, confidence=confidence)
        committed = committed_from(topics.metadata or "")
        scorer.restore(restored.cache(), None if committed is None else committed.stream_time_ms)
        if setup.judges:
            scorer.record = restored.track_record
        state = PartitionState(scorer, topics.offset, restored.replay, restored.report.current, restored.housekeeping)
        evaluation = EvaluationConfig(setup.limits, judges=judges)
        self.task = new_partition(0, state, publisher, self.failures, pool=pool, metrics=METRICS, evaluation=evaluation)


async def undisturbed(topics: Topics, setup: Setup, todo: deque[SourceRecord]) -> None:
    """Let a worker take all records, in peace."""
    life = Life(topics, setup, Pool(at_once=True), Publisher(topics))
    life.task.start()
    while todo or len(life.task):
        if todo and life.task.has_room():
            life.task.take(todo.popleft())
        await asyncio.sleep(0)
    await life.task.close()
    assert not life.failures


def busy(machine: RecoveryMachine) -> bool:
    """Whether the worker has something to do."""
    return bool(machine.todo or len(machine.life.task))


class RecoveryMachine(RuleBasedStateMachine):
    """One group, one source partition, one worker after the other."""

    @initialize(
        capacity=CAPACITIES,
        ttl_ms=st.sampled_from([None, 3000, 20_000]),
        slack=st.sampled_from([5, 1, 2]),
        kept=st.sampled_from([200, 1, 3]),
        delivery=st.sampled_from(["exactly_once", "at_least_once", "with_verdicts"]),
    )
    def begin(self, capacity: int, ttl_ms: int | None, slack: int, kept: int, delivery: str) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(changelog, "SLACK", slack)
        self.patch.setattr(partition, "SLACK", slack)
        self.patch.setattr(track_record, "KEPT", kept)
        self.slack, self.kept = slack, kept
        self.once = delivery != "at_least_once"
        self.setup = Setup(capacity, ttl_ms, judges=delivery == "with_verdicts")
        self.loop = asyncio.new_event_loop()
        self.topics = Topics()
        self.moved, self.recreated = False, 0
        self.past = Past()  # as of the last commit
        self.recreate()
        self.now = T0
        self.start()
        self.since = self.topics.without_outputs()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.loop.run_until_complete(coroutine)

    # -- the source

    def recreate(self) -> None:
        """Begin with an empty topic."""
        self.records: list[SourceRecord] = []
        self.end = 0
        self.traces: list[tuple[int, Mapping[str, Any]]] = []
        self.verdicts: list[SourceRecord] = []

    def append(self, value: bytes | None, timestamp_ms: int | None, **fields: Any) -> None:
        record = make_record(value, self.end, timestamp_ms=timestamp_ms, **fields)
        self.end += 1
        self.records.append(record)
        self.todo.append(record)

    @rule(drawn=st.lists(TRACES | VERDICTS, min_size=1, max_size=8))
    def write(self, drawn: list[DrawnTrace | DrawnVerdict]) -> None:
        for it in drawn:
            if isinstance(it, DrawnTrace):
                self.write_trace(it)
            elif self.setup.judges and self.traces:
                self.write_verdict(it)

    def write_trace(self, it: DrawnTrace) -> None:
        self.end += it.gap
        self.now += it.passed
        document = trace_document(
            f"kp:trace:{it.task}", created_at=self.now + it.created, domain=it.domain, success=it.success,
            confidence=it.confidence, objective=f"{'poison' if it.broken == 'poison' else 'task'} {it.task}",
            steps=it.steps,
        )  # fmt: skip
        document["metadata"]["agent_id"] = it.agent
        raw = json.dumps(document).encode()
        value = {"null": None, "empty": b"{}", "cut": raw[:-1]}.get(it.broken, raw)
        if not it.broken:
            self.traces.append((self.end, document))
        self.append(value, {"now": self.now, "never": None}.get(it.dated, -1))

    def write_verdict(self, it: DrawnVerdict) -> None:
        self.now += 1000
        if it.kind == "copy" and self.verdicts:
            of = self.verdicts[-1 - it.trace % len(self.verdicts)]
            self.append(of.value, self.now, key=of.key, headers=of.headers)
            return
        offset, trace = self.traces[-1 - it.trace % len(self.traces)]
        line = {
            "offset": offset,
            "trace_id": trace["id"], "agent_id": trace["metadata"]["agent_id"], "partition": 0, "judge": it.judge,
            "task_domain": trace["metadata"]["task_domain"], "success": it.success,
        }  # fmt: skip
        at = datetime.fromtimestamp(self.now / 1000, UTC) + timedelta(seconds=it.issued)
        verdict = make_verdict(line, topic="traces", topic_id=self.topics.topic_id, issued_at=at)
        signed = sign_verdict(verdict, b"x" * 32 if it.kind == "forged" else JUDGES[it.judge])
        self.append(signed.value, self.now, key=signed.key, headers=signed.headers)
        self.verdicts.append(self.records[-1])

    # -- the worker

    def start(self) -> None:
        self.life = Life(self.topics, self.setup, Pool(), Publisher())
        self.here = self.past.below(self.topics.offset)
        self.here.check(self.life.restored, self.setup.capacity)
        assert not self.once or self.life.restored.report.ahead is None
        self.todo = deque(record for record in self.records if record.offset >= self.topics.offset)

        async def begin(task: Partition) -> None:
            task.start()

        self.run(begin(self.life.task))

    def settle(self) -> None:
        """Let the task run until it waits; if it has failed, another worker takes over."""

        async def wait() -> None:
            for _ in range(8):
                await asyncio.sleep(0)

        self.run(wait())
        assert len(self.life.task) <= self.slack
        if self.life.failures:
            assert [type(failure) for failure in self.life.failures] == [CrashError]
            self.give_up()

    @precondition(busy)
    @rule(choices=st.lists(st.integers(0, 60), min_size=1, max_size=20))
    def act(self, choices: list[int]) -> None:
        """Do one of the things that can happen now, again and again."""
        for choice in choices:
            possible: list[Callable[[int], None]] = []
            if self.life.publisher.held:
                possible += [self.commit, self.lose_the_answer, self.crash]
            if self.life.pool.waiting:
                possible += [self.embed, self.embed]
            if self.todo and self.life.task.has_room():
                possible += [self.take, self.take]
            if len(self.life.task):
                possible += [self.give_up]
            if not possible:
                return
            possible[choice % len(possible)](choice // len(possible))

    def take(self, fewer: int) -> None:
        async def take(task: Partition) -> None:
            for _ in range(5 - fewer % 5):
                if self.todo and task.has_room():
                    task.take(self.todo.popleft())

        self.run(take(self.life.task))
        self.settle()

    def embed(self, which: int) -> None:
        self.life.pool.finish(which)
        self.settle()

    def commit(self, _: int) -> None:
        self.answer(None, committed=True)

    def lose_the_answer(self, _: int) -> None:
        self.answer(CrashError(), committed=True)

    def crash(self, part: int) -> None:
        """Crash in the middle of a batch; at least once, a part of it is visible."""
        if not self.once:
            assert self.life.publisher.held is not None
            batch, _ = self.life.publisher.held
            self.topics.write(batch, part % (1 + len(batch.entries) + len(batch.outputs)))
        self.answer(CrashError(), committed=False)

    def answer(self, error: Exception | None, *, committed: bool) -> None:
        assert self.life.publisher.held is not None
        batch, answer = self.life.publisher.held
        slots = self.setup.capacity + self.slack
        if committed or not self.once:
            self.here.written(self.life.restored, batch, slots)
        if committed:
            self.topics.commit(batch)
            self.here.committed(batch)
            self.past = self.here
            assert len(self.topics.entries()) <= (slots if self.once else 2 * slots)
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(error)
        self.settle()

    def give_up(self, _: int = 0) -> None:
        """Lose the partition to another worker."""
        self.run(self.life.task.close())
        self.start()

    @precondition(busy)
    @rule()
    def work(self) -> None:
        """Let the worker come to the end of the source."""
        while busy(self):
            if self.life.publisher.held:
                self.commit(0)
            if self.life.pool.waiting:
                self.embed(0)
            if self.todo and self.life.task.has_room():
                self.take(0)

    # -- whoever moves things between two lives

    @precondition(lambda self: self.past.entries)
    @rule(
        what=st.sampled_from(["offset", "settings", "offset", "settings", "expiry", "topic"]),
        by=st.integers(-6, 3),
        capacity=CAPACITIES,
        most_steps=st.sampled_from([DEFAULT_LIMITS.max_steps, 3]),
    )
    def move(self, what: str, by: int, capacity: int, most_steps: int) -> None:
        """Judge what came out so far, and move something: what follows is compared with a run from there."""
        self.judge()
        self.run(self.life.task.close())
        topics = self.topics
        if what == "offset":
            # Forward only where nothing is written past the committed offset: at least once it cannot be told apart.
            most = self.end if self.once else topics.offset
            topics.offset, topics.metadata = max(0, min(topics.offset + by, most)), ""
        elif what == "expiry":
            topics.offset, topics.metadata = 0, None
        elif what == "topic":
            self.recreated += 1
            topics.topic_id = f"another-topic-{self.recreated:08}"
            if by < 0 or not topics.metadata:  # else it stays, as that of an active group does
                topics.offset, topics.metadata = 0, None
            self.past = Past()
            self.recreate()
        else:
            self.setup = self.setup._replace(capacity=capacity, limits=Limits(max_steps=most_steps))
        self.start()
        self.since, self.moved = topics.without_outputs(), True
        topics.outputs = []

    # -- the judges

    def judge(self) -> None:
        """Compare what came out since the last move with an undisturbed run."""
        calm = self.since.without_outputs()
        todo = deque(record for record in self.records if record.offset >= calm.offset)
        committed = sum(record.offset < self.topics.offset for record in todo)
        self.run(undisturbed(calm, self.setup, todo))
        outputs = self.topics.outputs
        if not self.once:  # copies are allowed, but each is equal, and the first ones are in order
            outputs = list(dict.fromkeys(outputs))
            assert len(outputs) >= committed
            committed = len(outputs)
        assert outputs == calm.outputs[:committed]

    def judge_by_brute_force(self) -> None:
        """Compare all that came out with the oracle."""
        verdicts = oracle.judge(
            [consumed(record) for record in self.records],
            lambda text: TextEmbedder(DIMENSIONS).embed(text).vector,
            self.setup.capacity,
            self.setup.ttl_ms,
            lambda record: "embedding_failed" if b'"poison ' in (record.value or b"") else None,
            topic_id=self.topics.topic_id,
            judges=JUDGES if self.setup.judges else None,
        )
        kinds = ("accepted", "rejected", "dead-letter", "judged")
        outputs = {kind: [it for it in self.topics.outputs if it.kind == kind] for kind in kinds}
        assert not oracle.compare(verdicts, outputs).problems(at_least_once=not self.once)
        if not self.setup.judges:
            return
        judged = (judged_verdict(it.value or b"") for it in outputs["judged"])
        standings = Standings(in_order(it for it in judged if it is not None))  # as the commands read them
        for output in outputs["accepted"] + outputs["rejected"]:
            document = json.loads(output.value or b"")
            used, about = document["scoring"]["confidence"], document["metadata"]
            offset = document["scoring"]["source"]["offset"]
            standing = standings.at(0, offset, about["agent_id"], about["task_domain"])
            assert (used["judged"], used["succeeded"]) == standing[1:]

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                self.work()
                self.judge()
                if not self.moved and self.kept == 200:
                    self.judge_by_brute_force()
        finally:
            self.run(self.life.task.close())
            self.loop.close()
            self.patch.undo()


TestRecovery = RecoveryMachine.TestCase
TestRecovery.settings = settings(stateful_step_count=60)
TestRecovery.pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

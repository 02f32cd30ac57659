"""A partition task with a model and a publisher that the test controls."""

import asyncio
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from prometheus_client import CollectorRegistry

from tests.support.builders import TextEmbedder, make_record, text_vector, trace_bytes
from worker import PartitionScorer
from worker.core.changelog import NO_EPOCH, Entry, Housekeeping, SourceEpoch
from worker.core.records import Clean, Screen, SourceRecord
from worker.core.scorer import Decision, EvaluationConfig
from worker.core.trace import DEFAULT_LIMITS, InvalidTrace, Limits
from worker.core.verdicts import Judges
from worker.embed.embedder import Embedding
from worker.kafka.budget import Share
from worker.kafka.publisher import Commit
from worker.observe.metrics import Metrics
from worker.observe.tracing import NO_TRACING, Tracing
from worker.stream.evaluator import Evaluator, PartitionState
from worker.stream.fetch_buffer import FetchBuffer
from worker.stream.partition import DeadLetterLimit, Partition

DIMENSIONS = 8
OTHER = 1
"""The number of another partition of the same worker."""


class ManualPool:
    """The embedding pool, with embeddings that are ready when the test says so."""

    def __init__(self) -> None:
        self.identity = TextEmbedder(DIMENSIONS).identity
        self.submitted: list[tuple[str, Future[Embedding]]] = []

    def embed(self, text: str) -> asyncio.Future[Embedding]:
        future: Future[Embedding] = Future()
        self.submitted.append((text, future))
        return asyncio.wrap_future(future)

    def finish(self, number: int, error: BaseException | None = None) -> None:
        text, future = self.submitted[number]
        if error is None:
            future.set_result(Embedding(text_vector(text, DIMENSIONS), "long" in text, "longest" in text))
        else:
            future.set_exception(error)


class ManualPublisher:
    """Records the batches; holds each commit while `gate` is closed, fails with `error`."""

    def __init__(self) -> None:
        self.begun: list[Commit] = []
        self.committed: list[Commit] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.replaced: dict[int, InvalidTrace] = {}  # of each batch
        self.stopped = False

    async def start(self) -> None:
        pass

    async def publish(self, batch: Commit) -> Mapping[int, InvalidTrace]:
        self.begun.append(batch)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.committed.append(batch)
        return self.replaced

    async def stop(self) -> None:
        self.stopped = True

    def outputs(self) -> list[tuple[str, int]]:
        """Return (kind, source offset) of every committed output."""
        return [(o.kind, source_offset(o)) for batch in self.committed for o in batch.outputs]

    def sizes(self) -> list[int]:
        return [len(batch.outputs) for batch in self.committed]


def source_offset(output: Any) -> int:
    if output.kind == "dead_letter":
        return int(dict(output.headers)["kp-source-offset"])
    return int(json.loads(output.value)["scoring"]["source"]["offset"])


class CommittedRecords:
    """The status page's place: notes what is committed."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []

    def committed(self, decisions: Iterable[Decision]) -> None:
        self.decisions.extend(decisions)


def new_partition(
    number: int,
    state: PartitionState,
    publisher: Any,
    failures: list[BaseException],
    *,
    pool: Any = None,
    buffer: FetchBuffer | None = None,
    metrics: Metrics | None = None,
    evaluation: EvaluationConfig | None = None,
    latency_budget_seconds: float = 0.1,
    tracing: Tracing = NO_TRACING,
    **more: Any,
) -> Partition:
    """Return a partition, by default of a worker in which no record waits; failures go to the list."""
    metrics = metrics or Metrics(CollectorRegistry())
    evaluation = evaluation or EvaluationConfig(DEFAULT_LIMITS)
    evaluator = Evaluator(state, pool, evaluation, latency_budget_seconds, metrics, tracing)
    buffer = FetchBuffer(Share(1 << 20)) if buffer is None else buffer
    return Partition(number, state, publisher, evaluator, buffer, metrics, fail=failures.append, **more)


class TaskHarness:
    """A partition task and everything around it."""

    def __init__(
        self,
        *,
        embed: bool = True,
        replay: Mapping[int, Entry] | None = None,
        next_offset: int = 0,
        stream_time_ms: int | None = None,
        dead_letter_limit: DeadLetterLimit | None = None,
        limits: Limits = DEFAULT_LIMITS,
        screen: Screen | None = None,
        clean: Clean | None = None,
        ttl_ms: int = 60_000,
        commit_interval: float = 1000.0,
        tracing: Tracing = NO_TRACING,
        epoch: SourceEpoch = NO_EPOCH,
        housekeeping: Housekeeping | None = None,
        judges: Judges | None = None,
        drain_seconds: float | None = None,
    ) -> None:
        self.pool = ManualPool()
        self.publisher = ManualPublisher()
        self.metrics = Metrics(CollectorRegistry())
        self.scorer = PartitionScorer(5, ttl_ms, DIMENSIONS)
        self.scorer.restore([], stream_time_ms)
        self.now = 0.0
        self.share = Share(1 << 20)
        self.buffer = FetchBuffer(self.share, clock=lambda: self.now)
        self.buffer.assign([0, OTHER])
        self.buffer.hold(OTHER)
        self.status = CommittedRecords()
        self.failures: list[BaseException] = []
        state = PartitionState(self.scorer, next_offset, replay, epoch, housekeeping)
        self.task = new_partition(
            0, state, self.publisher, self.failures,
            pool=self.pool if embed else None,
            buffer=self.buffer,
            metrics=self.metrics,
            evaluation=EvaluationConfig(limits, clean=clean, clean_rejected=True, screen=screen, judges=judges or {}),
            tracing=tracing,
            commit_interval_seconds=commit_interval,
            dead_letter_limit=dead_letter_limit,
            status=self.status,
            drain_seconds=drain_seconds,
        )  # fmt: skip
        self.task.start()

    def fetch(self, offsets: Iterable[int]) -> None:
        self.buffer.add(0, [record(offset) for offset in offsets])

    def take(self, *offsets: int, **fields: Any) -> None:
        """Let the task take the records that wait, or, if none does, ones that are just fetched."""
        for offset in offsets:
            self.pass_on(record(offset, **fields))

    def pass_on(self, fetched: SourceRecord) -> None:
        if not self.buffer.waiting(0):
            self.buffer.add(0, [fetched])
        taken = self.buffer.next()
        assert taken is not None
        assert taken.offset == fetched.offset
        self.task.take(taken)

    def fetch_other(self) -> None:
        """Let a record of another partition wait."""
        self.buffer.add(OTHER, [record(0)])

    def take_other(self) -> None:
        """Take it; the turn of this task's partition ends."""
        self.buffer.release(OTHER)
        self.now += 10
        assert self.buffer.next() is not None
        self.buffer.hold(OTHER)

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


def record(offset: int, **fields: Any) -> SourceRecord:
    fields.setdefault("objective", f"task {offset}")
    return make_record(trace_bytes(f"kp:trace:{offset}", **fields), offset)


async def settle() -> None:
    """Let every task run until it waits for something that only the test can do."""
    for _ in range(20):
        await asyncio.sleep(0)

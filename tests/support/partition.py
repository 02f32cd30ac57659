"""A partition task with a model and a publisher that the test controls."""

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from prometheus_client import CollectorRegistry

from tests.support.builders import (
    TextEmbedder,
    make_record,
    text_vector,
    trace_bytes,
)
from worker import PartitionScorer
from worker.core.changelog import Entry, Housekeeping
from worker.core.forgetting import ControlConfig, Forgetting
from worker.core.passes import NO_PASS, Pass
from worker.core.records import OutputRecord, SourceRecord
from worker.core.scorer import EvaluationConfig
from worker.core.scoring import ScoredTrace
from worker.core.trace import DEFAULT_LIMITS, InvalidTrace, Limits
from worker.embed.embedder import Embedding
from worker.kafka.writing.publisher import Batch
from worker.observe.metrics import Metrics
from worker.observe.tracing import NO_TRACING, NoTracing, Tracing
from worker.stream.dead_letter_limit import DeadLetterLimit
from worker.stream.group_scope import GroupScope
from worker.stream.partition_state import PartitionState
from worker.stream.partition_task import Callbacks, PartitionTask, TaskConfig

DIMENSIONS = 8


class ManualPool:
    """The embedding pool, with embeddings that are ready when the test says so."""

    def __init__(self) -> None:
        self.identity = TextEmbedder(DIMENSIONS).identity
        self.submitted: list[tuple[str, Future[Embedding]]] = []

    def embed(self, text: str) -> asyncio.Future[Embedding]:
        future: Future[Embedding] = Future()
        self.submitted.append((text, future))
        return asyncio.wrap_future(future)

    def drop_remembered(self) -> None:
        pass

    def finish(self, number: int, error: BaseException | None = None) -> None:
        text, future = self.submitted[number]
        if error is None:
            future.set_result(Embedding(text_vector(text, DIMENSIONS), "long" in text))
        else:
            future.set_exception(error)


class ManualPublisher:
    """Records the batches; holds each commit while `gate` is closed, fails with `error`."""

    def __init__(self) -> None:
        self.begun: list[Batch] = []
        self.committed: list[Batch] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.replaced: dict[int, InvalidTrace] = {}  # of each batch
        self.stopped = False

    async def start(self) -> None:
        pass

    def delivery(self) -> str:
        return "by hand"

    async def publish(self, batch: Batch) -> Mapping[int, InvalidTrace]:
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


async def same_topic(topic_id: str | None) -> None:
    """Find that the source topic has this id."""


def idle_callbacks(failures: list[BaseException]) -> Callbacks:
    """Return the callbacks of a worker in which no record waits; failures go to the list."""
    return Callbacks(
        waiting=lambda _: 0,
        has_turn=lambda _: False,
        busy=lambda: False,
        on_room=lambda: None,
        on_failure=lambda _, error: failures.append(error),
        confirm_topic=same_topic,
    )


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
        commit_interval: float = 1000.0,
        tracing: Tracing | NoTracing = NO_TRACING,
        source_pass: Pass = NO_PASS,
        housekeeping: Housekeeping | None = None,
        group: GroupScope | None = None,
        control: ControlConfig | None = None,
    ) -> None:
        self.pool = ManualPool()
        self.publisher = ManualPublisher()
        self.metrics = Metrics(CollectorRegistry())
        self.scorer = PartitionScorer(5, 60_000, DIMENSIONS)
        self.scorer.restore([], stream_time_ms)
        self.room = 0
        self.waiting = 0
        self.has_turn = True
        self.others_wait = False
        self.failures: list[BaseException] = []
        self.given_back = 0
        self.confirmed: list[str | None] = []
        self.not_confirmed: Exception | None = None
        self.committed: list[tuple[SourceRecord, OutputRecord, ScoredTrace | None]] = []
        self.task = PartitionTask(
            0,
            PartitionState(
                self.scorer,
                next_offset,
                replay,
                source_pass,
                housekeeping,
                None if control is None else Forgetting({}, [], 0, self.pool.identity.key(), None),
            ),
            self.publisher,
            self.pool if embed else None,  # type: ignore[arg-type]
            TaskConfig(EvaluationConfig(limits), 0.1, commit_interval, dead_letter_limit, tracing, group, control),
            self.metrics,
            Callbacks(
                waiting=lambda _: self.waiting,
                has_turn=lambda _: self.has_turn,
                busy=lambda: self.waiting > 0 or self.others_wait,
                on_room=self._count_room,
                on_failure=lambda _, error: self.failures.append(error),
                confirm_topic=self._confirm_topic,
                on_committed=lambda *what: self.committed.append(what),
                give_back=self._give_back,
            ),
        )
        self.task.start()

    def _give_back(self, size: int) -> None:
        self.given_back += size

    async def _confirm_topic(self, topic_id: str | None) -> None:
        self.confirmed.append(topic_id)
        if self.not_confirmed is not None:
            raise self.not_confirmed

    def _count_room(self) -> None:
        self.room += 1

    def take(self, *offsets: int, **fields: Any) -> None:
        for offset in offsets:
            self.task.take(record(offset, **fields))

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


def record(offset: int, **fields: Any) -> SourceRecord:
    fields.setdefault("objective", f"task {offset}")
    return make_record(trace_bytes(f"kp:trace:{offset}", **fields), offset)


async def settle() -> None:
    """Let every task run until it waits for something that only the test can do."""
    for _ in range(20):
        await asyncio.sleep(0)

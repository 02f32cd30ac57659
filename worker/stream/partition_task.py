"""The partition task: processes one source partition's records in offset order.

taken -> evaluated (evaluator.py; texts are embedded by a pool that all partitions share) -> committed (committer.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from worker.core.changelog import SLACK
from worker.core.forgetting import ControlConfig
from worker.core.records import OutputRecord, SourceRecord
from worker.core.scorer import EvaluationConfig
from worker.core.scoring import ScoredTrace
from worker.core.trace import InvalidTrace
from worker.embed.pool import EmbeddingPool
from worker.kafka.writing.publisher import Publisher
from worker.observe.metrics import Metrics
from worker.observe.tracing import NO_TRACING, NoTracing, Tracing
from worker.stream.committer import Committer
from worker.stream.dead_letter_limit import DeadLetterLimit
from worker.stream.evaluator import Evaluator, Taken
from worker.stream.group_scope import GroupScope
from worker.stream.partition_state import Decided, PartitionState

log = logging.getLogger(__name__)

MAX_TASK_BYTES: Final = 16 << 20
"""Most bytes of one partition's uncommitted records (SourceRecord.size); budget.py limits all partitions together."""

LINGER_SECONDS_EACH: Final = 0.025
"""Behind a backlog of its own, a partition's batch lingers this long for each record that can still join it, and at
most KP_COMMIT_INTERVAL_SECONDS."""

BUSY_LINGER_SECONDS: Final = 0.1
"""While records of any partition wait, it lingers at least this long: 44 traces a second of 4 partitions then make 20
transactions a second, not 44."""

STOP_SECONDS: Final = 5.0
"""How long closing a partition waits for its producer to stop."""


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """The settings that apply to a partition's records. `group`: the novelty scope `group`, None without it."""

    evaluation: EvaluationConfig
    latency_budget_seconds: float = 0.1
    commit_interval_seconds: float = 1.0
    dead_letter_limit: DeadLetterLimit | None = None
    tracing: Tracing | NoTracing = NO_TRACING
    group: GroupScope | None = None
    control: ControlConfig | None = None


@dataclass(frozen=True, slots=True)
class Callbacks:
    """The worker's functions that a partition task calls.

    `waiting` returns how many records of a partition wait to be taken, `has_turn` whether they are taken next, `busy`
    whether records of any partition wait; who ends a turn, or takes the last record, calls `flush`. `on_room`: the task
    may take records again. `on_failure`, once: the partition and the error that ended it; the task's state is then
    ahead of the committed offset and must not be used again. `confirm_topic` raises if the source topic's id, as a
    broker knows it now, is not this one. `on_committed`: a committed record, its output, and its score (None: a dead
    letter). `on_forgotten`: a control record is committed. `give_back`: the bytes (SourceRecord.size) of records that
    the task has released.
    """

    waiting: Callable[[int], int]
    has_turn: Callable[[int], bool]
    busy: Callable[[], bool]
    on_room: Callable[[], None]
    on_failure: Callable[[int, BaseException], None]
    confirm_topic: Callable[[str | None], Awaitable[None]]
    on_committed: Callable[[SourceRecord, OutputRecord, ScoredTrace | None], None] | None = None
    on_forgotten: Callable[[], None] = lambda: None
    give_back: Callable[[int], None] = lambda _: None


class PartitionTask:
    """One assigned partition: its state, its uncommitted records, its committer."""

    def __init__(
        self,
        partition: int,
        state: PartitionState,
        publisher: Publisher,
        pool: EmbeddingPool | None,
        config: TaskConfig,
        metrics: Metrics,
        callbacks: Callbacks,
    ) -> None:
        self.partition = partition
        self.state = state
        self.generation = -1
        self.failed = False
        self._publisher = publisher
        self._config = config
        self._tracing = config.tracing
        self._callbacks = callbacks
        self._evaluator = Evaluator(
            state, pool, config.evaluation, config.latency_budget_seconds, metrics, config.tracing, config.control
        )
        self._committer = Committer(
            publisher,
            state,
            metrics,
            config.commit_interval_seconds,
            linger=self._linger,
            is_full=lambda: not self.has_room(),
            refuse=self._evaluator.refused_by_topic,
            on_commit=self._on_commit,
            confirm=lambda: callbacks.confirm_topic(state.topic_id),
        )
        self._taken_to = state.next_offset - 1
        self._taken: deque[Taken] = deque()
        self._records = self._bytes = 0  # past the committed offset
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._committing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start committing."""
        self._committing = asyncio.create_task(self._commit_forever(), name=f"commit-{self.partition}")

    def __len__(self) -> int:
        """Return the number of records past the committed offset."""
        return self._records

    @property
    def committed(self) -> int:
        """The committed offset: that of the next record of the source to read after a restart."""
        return self._committer.committed

    def oldest(self) -> SourceRecord | None:
        """Return the first record taken that is past the committed offset."""
        return self._committer.oldest() or (self._taken[0].record if self._taken else None)

    def has_room(self) -> bool:
        """Whether another record may be taken. The bound is the changelog's slack: see changelog.py."""
        return self._records < SLACK and self._bytes < MAX_TASK_BYTES and not self.failed

    def take(self, record: SourceRecord) -> None:
        """Admit the partition's next record."""
        if record.offset <= self._taken_to:
            self._callbacks.give_back(record.size)
            return  # fetched twice around a rebalance
        self._taken_to = record.offset
        if not self._records:
            self._idle.clear()
        self._records += 1
        self._bytes += record.size
        taken = self._evaluator.take(record)
        self._taken.append(taken)
        if isinstance(taken.embedding, asyncio.Future):
            taken.embedding.add_done_callback(lambda _: self.advance())
        else:
            self.advance()

    def flush(self) -> None:
        """Note that the partition's turn has ended, or that no more records wait to be taken."""
        self._committer.flush()

    def _linger(self) -> float:
        """Return how long a batch waits for further records, s."""
        callbacks = self._callbacks
        if not callbacks.busy():
            return 0.0
        waiting = callbacks.waiting(self.partition)
        if waiting and callbacks.has_turn(self.partition):
            return max(BUSY_LINGER_SECONDS, waiting * LINGER_SECONDS_EACH)
        if self._taken:  # they leave the embedder soon
            return self._config.commit_interval_seconds
        return 0.0 if waiting else BUSY_LINGER_SECONDS  # after its turn, nothing else can join the batch

    async def drain(self) -> None:
        """Wait until every record taken is committed, or the task has failed.

        Records that may not be decided now are dropped, and will be read again.
        """
        self._committer.stop_lingering()
        self._draining = True
        self.advance()
        await self._idle.wait()
        self._draining = False
        self._committer.linger_again()

    async def close(self) -> None:
        """Close the partition: uncommitted records are dropped, an open transaction is aborted."""
        self.failed = True
        self._idle.set()
        self._abandon_embeddings()
        if self._committing is not None:
            self._committing.cancel()
            await asyncio.gather(self._committing, return_exceptions=True)
        self._callbacks.give_back(self._bytes)
        self._records = self._bytes = 0
        try:
            await asyncio.wait_for(self._publisher.stop(), STOP_SECONDS)
        except Exception as error:  # the partition is lost anyway; its next owner fences this producer
            log.warning("partition %d: producer did not stop cleanly: %r", self.partition, error)

    def _abandon_embeddings(self) -> None:
        """Mark the exceptions of embeddings that nobody waits for any more as retrieved."""
        for taken in self._taken:
            if isinstance(taken.embedding, asyncio.Future):
                taken.embedding.add_done_callback(lambda future: future.cancelled() or future.exception())

    def _drop_undecided(self) -> None:
        size = sum(taken.record.size for taken in self._taken)
        log.info("partition %d: %d records are not decided, and will be read again", self.partition, len(self._taken))
        self._abandon_embeddings()
        self._taken_to = self._taken[0].record.offset - 1
        self._release(len(self._taken), size)
        self._taken.clear()

    def advance(self) -> None:
        """Decide all embedded records, in offset order, if traces may be decided now."""
        if self.failed or not self._taken:
            return
        if self._config.group is not None and not self._config.group.may_decide():
            if self._draining:
                self._drop_undecided()
            return
        try:
            while self._taken and self._taken[0].ready():
                decided = self._evaluator.decide(self._taken.popleft())
                if self._config.dead_letter_limit is not None:
                    self._config.dead_letter_limit.record(isinstance(decided.result, InvalidTrace))
                self._committer.add(decided)
            ended = not self._taken and not self._callbacks.has_turn(self.partition)
            if ended or self._committer.batch_is_full() or not self.has_room():
                self._committer.flush()
        except Exception as error:
            self._fail(error)

    async def _commit_forever(self) -> None:
        try:
            await self._committer.run()
        except Exception as error:
            self._fail(error)

    def _on_commit(self, batch: Sequence[Decided]) -> None:
        on_committed = self._callbacks.on_committed
        if on_committed is not None:
            for decided in batch:
                if decided.forgotten is not None:
                    self._callbacks.on_forgotten()
                if decided.result is not None:
                    scored = None if isinstance(decided.result, InvalidTrace) else decided.result
                    on_committed(decided.record, decided.output, scored)
        self._tracing.end(decided.span for decided in batch)
        self._release(len(batch), sum([decided.record.size for decided in batch]))
        self._callbacks.on_room()

    def _release(self, records: int, size: int) -> None:
        self._records -= records
        self._bytes -= size
        self._callbacks.give_back(size)
        if not self._records:
            self._idle.set()

    def _fail(self, error: BaseException) -> None:
        if not self.failed:
            self.failed = True
            self._idle.set()
            self._callbacks.on_failure(self.partition, error)

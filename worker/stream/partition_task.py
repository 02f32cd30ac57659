"""A lane: the way of one source partition's records through the worker, in offset order.

record -> parse -> embed (shared pool) -> score -> the lane's next transaction. Lives here: that order, the bound on
what is not committed, and the measuring of each stage. Must not live here: fetching, rebalance decisions, model or
transaction details.

Scoring never waits for a commit: while one transaction is on its way, the traces that follow gather for the next. A
lane with nothing waiting behind it commits at once. Behind a backlog it lets traces gather (GATHER_SECONDS_EACH),
because a transaction costs the cores as much as an embedding, whether it carries one trace or hundreds.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from worker.core.changelog import SLACK, Entry, Housekeeping, encode, slot_key, text_hash
from worker.core.passes import NO_PASS, Pass
from worker.core.pipeline import (
    CACHED_ID_LENGTH,
    OutputRecord,
    PartitionScorer,
    ScoredTrace,
    SourceRecord,
    cached_id,
    dead_letter,
    embedding_failed,
    event_time_ms,
    scored_record,
)
from worker.core.records import RECORD_OVERHEAD, encoded_size
from worker.core.trace import InvalidTrace, Limits, Reason, ReasoningTrace, embedding_text, parse_trace
from worker.embed.embedder import Embedding, ModelError
from worker.embed.pool import EmbeddingPool
from worker.kafka.publication import Batch
from worker.kafka.publisher import Publisher
from worker.observe.metrics import Metrics
from worker.stream.dead_letter_limit import Breaker

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from worker.observe.tracing import Tracing

log = logging.getLogger(__name__)

MAX_COMMIT_RECORDS: Final = 512
"""Most records of one transaction. A commit costs the same for 1 or 500; more would only hold memory and latency."""

GATHER_SECONDS_EACH: Final = 0.01
"""A lane gathers as long as this for each record that waits, and no longer than Rules.commit_interval_seconds: no
output is held back longer than the wait that is there anyway."""

MAX_COMMIT_BYTES: Final = 8 << 20
"""Most bytes of one transaction, source records (SourceRecord.size) and output values, so that large documents do not
add up."""

MAX_LANE_BYTES: Final = 16 << 20
"""Source bytes of one partition (SourceRecord.size) that may be on the way; all partitions together: budget.py."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What a lane needs to know of the settings."""

    limits: Limits
    event_time: str
    latency_budget_seconds: float
    commit_interval_seconds: float = 1.0
    breaker: Breaker | None = None
    tracing: Tracing | None = None
    output_embedding: bool = False


class _Pending:
    """A record between admission and scoring."""

    __slots__ = ("embedding", "error", "future", "record", "span", "started", "submitted", "text_hash", "trace")

    def __init__(self, record: SourceRecord, started: float) -> None:
        self.record = record
        self.started = started
        self.submitted = started
        self.trace: ReasoningTrace | None = None
        self.error: InvalidTrace | None = None
        self.embedding: Embedding | None = None
        self.future: asyncio.Future[Embedding] | None = None  # of an embedding that has to be waited for
        self.span: Span | None = None
        self.text_hash = b""  # of what is embedded

    def ready(self) -> bool:
        return self.future is None or self.future.done()


@dataclass(frozen=True, slots=True)
class _Done:
    """A record that is decided and waits for its commit."""

    record: SourceRecord
    output: OutputRecord
    entry: tuple[bytes, bytes] | None
    scored: ScoredTrace | None
    reason: Reason | None
    span: Span | None = None


class Lane:
    """One assigned partition: its state, its records on the way, its publisher.

    `waiting` tells how many records wait to be taken; whoever knows that calls `hurry` when the last one was.
    `on_room` is called when the lane can take records again, `on_failure` once with the error that ended it: its
    state is then ahead of what is committed and must not be used again. `on_committed` is called with each
    record that is committed, its output and its score (None: a dead letter). `give_back` is called with the bytes
    (SourceRecord.size) of records that the lane no longer holds.
    """

    def __init__(
        self,
        partition: int,
        scorer: PartitionScorer,
        publisher: Publisher,
        pool: EmbeddingPool | None,
        rules: Rules,
        metrics: Metrics,
        *,
        replay: Mapping[int, Entry],
        next_offset: int,
        waiting: Callable[[], int],
        on_room: Callable[[], None],
        on_failure: Callable[[BaseException], None],
        on_committed: Callable[[SourceRecord, OutputRecord, ScoredTrace | None], None] | None = None,
        source_pass: Pass = NO_PASS,
        housekeeping: Housekeeping | None = None,
        give_back: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.partition = partition
        self.scorer = scorer
        self.publisher = publisher
        self.committed = next_offset
        self.generation = -1
        self._pool = pool
        self._rules = rules
        self._metrics = metrics
        self._replay = dict(replay)
        self._taken = next_offset - 1
        self._waiting = waiting
        self._on_room = on_room
        self._on_failure = on_failure
        self._on_committed = on_committed
        self._model = "" if pool is None else pool.identity.key()
        self._pass = source_pass
        self._housekeeping = housekeeping or Housekeeping()
        self._give_back = give_back
        self._pending: deque[_Pending] = deque()
        self._done: deque[_Done] = deque()
        self._publishing = 0
        self._bytes = 0  # of the records past the committed offset
        self._gathered: SourceRecord | None = None  # the first record of the last batch
        self._published_stream_time = scorer.stream_time_ms
        self._work = asyncio.Event()
        self._hurry = asyncio.Event()
        self._begun = 0.0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self.failed = False

    def start(self) -> None:
        """Begin to publish."""
        self._task = asyncio.create_task(self._publish_forever(), name=f"publish-{self.partition}")

    def __len__(self) -> int:
        """Return the number of records past the committed offset."""
        return len(self._pending) + len(self._done) + self._publishing

    def oldest(self) -> SourceRecord | None:
        """Return the first record past the committed offset, of those that were taken."""
        if self._publishing:
            return self._gathered
        waiting = self._done or self._pending
        return waiting[0].record if waiting else None

    def has_room(self) -> bool:
        """Whether another record may be taken. The bound is the changelog's slack: see changelog.py."""
        return len(self) < SLACK and self._bytes < MAX_LANE_BYTES and not self.failed

    def take(self, record: SourceRecord) -> asyncio.Future[Embedding] | None:
        """Admit the partition's next record; returns the future of its embedding where it has to wait for one.

        The clock of the evaluation starts here.
        """
        if record.offset <= self._taken:
            self._give_back(record.size)
            return None  # fetched twice around a rebalance
        self._taken = record.offset
        self._bytes += record.size
        self._idle.clear()
        pending = _Pending(record, time.perf_counter())
        if self._rules.tracing is not None:
            pending.span = self._rules.tracing.begin(record)
        try:
            if record.fault is not None:
                raise InvalidTrace(record.fault.reason, "", record.fault.message)
            check_size(record, self._rules.limits)
            pending.trace = parse_trace(record.value, self._rules.limits)
        except InvalidTrace as error:
            pending.error = error.with_traceback(None)  # it leads to this frame: a circle that would keep the record
        pending.submitted = time.perf_counter()
        self._metrics.stages["parse"].observe(pending.submitted - pending.started)
        if pending.trace is not None and self._pool is not None:
            embedding = self._embed(pending, pending.trace, self._pool)
            if isinstance(embedding, Embedding):
                pending.embedding = embedding
            else:
                pending.future = asyncio.wrap_future(embedding)
        self._pending.append(pending)
        if pending.future is None:
            self.advance()
        else:
            pending.future.add_done_callback(lambda _: self.advance())
        return pending.future

    def advance(self) -> None:
        """Score whatever is ready, in offset order."""
        if self.failed:
            return
        try:
            while self._pending and self._pending[0].ready():
                done = self._decide(self._pending.popleft())
                if self._rules.breaker is not None:
                    self._rules.breaker.record(done.scored is None)
                self._done.append(done)
                self._work.set()
            if len(self._done) >= MAX_COMMIT_RECORDS or not self.has_room():
                self.hurry()
        except Exception as error:
            self._fail(error)

    def hurry(self) -> None:
        """Commit what is scored now: nothing waits any more."""
        self._hurry.set()

    async def drain(self) -> None:
        """Wait until everything that was taken is committed (or the lane has failed)."""
        self._draining = True
        self.hurry()
        await self._idle.wait()
        self._draining = False

    async def close(self) -> None:
        """Give the partition up: what is not committed is dropped, an open transaction is aborted."""
        self.failed = True
        self._idle.set()
        for pending in self._pending:
            if pending.future is not None:  # nobody will ask for its exception any more
                pending.future.add_done_callback(lambda future: future.cancelled() or future.exception())
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._give_back(self._bytes)
        self._bytes = 0
        try:
            await asyncio.wait_for(self.publisher.stop(), 5)
        except Exception as error:  # the partition is lost to us anyway; its next owner fences this producer
            log.warning("partition %d: producer did not stop cleanly: %r", self.partition, error)

    def _embed(
        self, pending: _Pending, trace: ReasoningTrace, pool: EmbeddingPool
    ) -> concurrent.futures.Future[Embedding] | Embedding:
        text = embedding_text(trace)
        pending.text_hash = text_hash(text)
        entry = self._replay.pop(pending.record.offset, None)
        if entry is not None and entry.text_hash == pending.text_hash:  # else another text stood at this offset
            return Embedding(entry.array(), False)
        return pool.submit(text)

    def _decide(self, pending: _Pending) -> _Done:
        record, trace, metrics = pending.record, pending.trace, self._metrics
        if pending.future is not None:
            failure = pending.future.exception()
            if failure is None:
                pending.embedding = pending.future.result()
            elif isinstance(failure, ModelError | MemoryError) or not isinstance(failure, Exception):
                raise failure  # says nothing about this text: the worker itself cannot go on
            else:
                about = _about(record, trace)
                log.warning("the model failed on this text alone: %s", type(failure).__name__, extra=about)
                log.debug("the model's words: %r", failure, extra=about)  # they may quote the text
                pending.error = embedding_failed(failure)
        vector = None
        if pending.embedding is not None:
            metrics.stages["embed"].observe(time.perf_counter() - pending.submitted)
            vector = pending.embedding.vector
            if pending.span is not None:
                pending.span.add_event("embedded")
            if pending.embedding.truncated:
                metrics.truncated.inc()
        if pending.error is not None or trace is None:
            error = pending.error or InvalidTrace(Reason.NOT_JSON, "", "this is a bug: neither trace nor error")
            about = {**_about(record, trace), "reason": str(error.reason), "path": error.path}
            log.info("dead letter", extra=about)
            log.debug("dead letter: %s", error.message, extra=about)  # the message may quote the document
            self._finish(pending)
            if pending.span is not None and self._rules.tracing is not None:
                self._rules.tracing.refused(pending.span, error.reason)
            return _Done(record, dead_letter(record, error), None, None, error.reason, pending.span)

        begun = time.perf_counter()
        comparison = self.scorer.compare(vector, event_time_ms(trace, record.timestamp_ms, self._rules.event_time))
        compared = time.perf_counter()
        scored = self.scorer.decide(trace, comparison)
        identity = None if self._pool is None else self._pool.identity
        metrics.stages["novelty"].observe(compared - begun)
        metrics.stages["score"].observe(time.perf_counter() - compared)
        self._finish(pending)
        output = scored_record(record, scored, identity, embedding=self._rules.output_embedding)
        if pending.span is not None and self._rules.tracing is not None:
            output = self._rules.tracing.scored(pending.span, trace, scored, output)
        entry = None
        if scored.sequence is not None and scored.vector is not None and identity is not None:
            entry = (
                slot_key(scored.sequence, self.scorer.cache.max_elements, self._pass.number or 0),
                encode(
                    sequence=scored.sequence,
                    source_offset=record.offset,
                    stream_time_ms=scored.stream_time_ms,
                    trace_id=cached_id(trace),
                    model=self._model,
                    vector=scored.vector,
                    pass_number=self._pass.number,
                    text_hash=pending.text_hash,
                    agent_id=trace.metadata.agent_id[:CACHED_ID_LENGTH],
                ),
            )
        return _Done(record, output, entry, scored, None, pending.span)

    def _not_taken(self, done: _Done, error: InvalidTrace) -> _Done:
        """Return what became of a scored trace that its topic did not take: a dead letter."""
        log.info("dead letter", extra={**_about(done.record, None), "reason": str(error.reason), "path": error.path})
        if done.span is not None and self._rules.tracing is not None:
            self._rules.tracing.refused(done.span, error.reason)
        return _Done(done.record, dead_letter(done.record, error), done.entry, None, error.reason, done.span)

    def _finish(self, pending: _Pending) -> None:
        seconds = time.perf_counter() - pending.started
        self._metrics.evaluation.observe(seconds)
        if seconds > self._rules.latency_budget_seconds:
            self._metrics.over_budget.inc()
            if log.isEnabledFor(logging.DEBUG):
                about = {**_about(pending.record, pending.trace), "seconds": round(seconds, 4)}
                log.debug("over KP_LATENCY_BUDGET_SECONDS", extra=about)

    async def _publish_forever(self) -> None:
        try:
            while True:
                await self._work.wait()
                await self._let_gather()
                batch = self._gather()
                self._publishing = len(batch)
                self._begun = started = time.perf_counter()
                replaced = await self.publisher.publish(
                    Batch(
                        outputs=[done.output for done in batch],
                        entries=self._entries(batch),
                        next_offset=batch[-1].record.offset + 1,
                        stream_time_ms=self._stream_time(batch),
                        records=[done.record for done in batch],
                        source_pass=self._pass,
                    )
                )
                for position, error in replaced.items():
                    batch[position] = self._not_taken(batch[position], error)
                self._publishing = 0
                size = sum(done.record.size for done in batch)
                self._bytes -= size
                self._give_back(size)
                self.committed = batch[-1].record.offset + 1
                self._count(batch, time.perf_counter() - started)
                if self._rules.tracing is not None:
                    self._rules.tracing.end(done.span for done in batch)
                del batch  # not kept while the next one gathers
                self._gathered = None
                if not self:
                    self._idle.set()
                self._on_room()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._fail(error)

    async def _let_gather(self) -> None:
        """Wait while records wait behind these, until the transaction is full or the last one is long enough ago."""
        while self.has_room() and len(self._done) < MAX_COMMIT_RECORDS and not self._draining:
            gather = min(self._rules.commit_interval_seconds, self._waiting() * GATHER_SECONDS_EACH)
            left = self._begun + gather - time.perf_counter()
            if left <= 0:
                return
            self._hurry.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._hurry.wait()

    def _gather(self) -> list[_Done]:
        batch: list[_Done] = []
        size = 0
        while self._done and len(batch) < MAX_COMMIT_RECORDS and size < MAX_COMMIT_BYTES:
            done = self._done.popleft()
            size += done.record.size + len(done.output.value or b"")  # key and headers are the source record's
            batch.append(done)
        if not self._done:
            self._work.clear()
        self._gathered = batch[0].record
        return batch

    def _entries(self, batch: list[_Done]) -> list[tuple[bytes, bytes | None]]:
        """Return the batch's rows for the changelog: its cache entries, and what belongs around them."""
        rows: list[tuple[bytes, bytes | None]] = []
        newest = None
        for done in batch:
            if done.entry is not None and done.scored is not None:
                rows.append(done.entry)
                newest = done.scored.sequence
        return self._housekeeping.rows(rows, newest, batch[-1].record.offset + 1)

    def _stream_time(self, batch: list[_Done]) -> int | None:
        for done in reversed(batch):
            if done.scored is not None:
                self._published_stream_time = done.scored.stream_time_ms
                break
        return self._published_stream_time

    def _count(self, batch: list[_Done], seconds: float) -> None:
        metrics = self._metrics
        metrics.stages["publish"].observe(seconds)
        metrics.commit_traces.observe(len(batch))
        metrics.consumed.inc(len(batch))
        now = time.time()
        verdicts: Counter[tuple[str, str]] = Counter()  # finding a labelled counter costs more than counting
        for done in batch:
            if done.record.timestamp_ms is not None and done.record.timestamp_ms >= 0:
                metrics.end_to_end.observe(max(0.0, now - done.record.timestamp_ms / 1000))
            if done.scored is None:
                metrics.dead_letters.labels(str(done.reason)).inc()
            else:
                verdicts[done.output.kind, done.scored.profile] += 1
                metrics.score.observe(done.scored.score)
            if self._on_committed is not None:
                self._on_committed(done.record, done.output, done.scored)
        for labels, count in verdicts.items():
            metrics.traces.labels(*labels).inc(count)

    def _fail(self, error: BaseException) -> None:
        if not self.failed:
            self.failed = True
            self._idle.set()
            self._on_failure(error)


def _about(record: SourceRecord, trace: ReasoningTrace | None) -> dict[str, object]:
    """Return the fields of a log event about one source record (logs.py)."""
    place = {"topic": record.topic, "partition": record.partition, "offset": record.offset}
    return place if trace is None else {**place, "trace": cached_id(trace)}


def check_size(record: SourceRecord, limits: Limits) -> None:
    """Raise InvalidTrace for a record that is too large with its key and headers, in bytes as they are encoded.

    The record's own few bytes do not count: KP_MAX_MESSAGE_BYTES is the largest value of a record without more.
    """
    if 0 < record.size <= limits.max_bytes:  # in memory it is never less than encoded
        return
    size = encoded_size(record.key, record.value, record.headers) - RECORD_OVERHEAD
    if size > limits.max_bytes:
        raise InvalidTrace(
            Reason.TOO_LARGE,
            "",
            f"the message has {size} bytes with its key and headers, the limit is {limits.max_bytes} "
            "(KP_MAX_MESSAGE_BYTES, and the output topics' max.message.bytes)",
        )

"""The evaluator: reads and decides one partition's records, with measurements, log events and spans; and its state."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from worker.core.changelog import NO_EPOCH, Entry, Housekeeping, Kind, SourceEpoch, kind_of, text_hash
from worker.core.dead_letters import dead_letter, embedding_failed, evaluation_failed
from worker.core.novelty import Vector
from worker.core.records import Row, SourceRecord
from worker.core.scorer import Decision, Evaluation, EvaluationConfig, PartitionScorer, cached_id, refused
from worker.core.scoring import ScoredTrace
from worker.core.trace import InvalidTrace, Reason, ReasoningTrace, embedded_texts, joined
from worker.core.track_record import Change, encode_row
from worker.core.verdicts import Verdict
from worker.embed.embedder import Embedding, ModelError
from worker.embed.pool import EmbeddingPool
from worker.kafka.publisher import Commit
from worker.observe.metrics import Metrics
from worker.observe.tracing import Tracing

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = logging.getLogger(__name__)


class PartitionState:
    """The restored state of a partition, updated by each batch."""

    def __init__(
        self,
        scorer: PartitionScorer,
        next_offset: int,  # of the first record to take
        replay: Mapping[int, Entry] | None = None,  # of records that will be read again, by source offset
        epoch: SourceEpoch = NO_EPOCH,
        housekeeping: Housekeeping | None = None,
    ) -> None:
        self.scorer = scorer
        self.next_offset = next_offset
        self._replay = dict(replay or {})
        self.epoch = epoch
        self._housekeeping = housekeeping or Housekeeping()
        self._stream_time_ms = scorer.stream_time_ms  # after the last batch

    def ready_embedding(self, offset: int, text_hash: bytes) -> Entry | None:
        """Return the entry of a record that was embedded before a restart, unless this offset had another text."""
        entry = self._replay.pop(offset, None)
        return entry if entry is not None and entry.text_hash == text_hash else None

    def commit(self, decided: Sequence[Decision]) -> Commit:
        """Return what to commit for these records, the partition's next in offset order."""
        rows: list[Row | Change] = []
        newest = None
        for each in decided:
            rows += each.rows
            if isinstance(each.result, ScoredTrace):
                self._stream_time_ms = each.result.stream_time_ms
                if each.rows:
                    newest = each.result.sequence
        next_offset = decided[-1].record.offset + 1
        return Commit(
            outputs=[each.output for each in decided],
            entries=self._housekeeping.rows(_encoded(rows), newest, next_offset),
            next_offset=next_offset,
            metadata=self.epoch.metadata(self._stream_time_ms),
            records=[each.record for each in decided],
        )


def _encoded(rows: Sequence[Row | Change]) -> list[Row]:
    """Return the rows without track records that a later row of the batch replaces: these need no encoding."""
    last = {key: place for place, (key, _) in enumerate(rows) if kind_of(key) is Kind.TRACK_RECORD}
    return [encode_row(row) for place, row in enumerate(rows) if last.get(row[0], place) == place]


class Taken(NamedTuple):
    """A record that waits for its embedding, and for the records before it."""

    record: SourceRecord
    parsed: ReasoningTrace | Verdict | InvalidTrace
    text_hash: bytes  # of what is embedded
    embedding: Embedding | asyncio.Future[Embedding] | None  # None: nothing is embedded
    started: float  # when it was taken, s of the performance counter
    submitted: float  # when its text was
    span: Span | None

    def ready(self) -> bool:
        """Whether the record can be decided."""
        return not isinstance(self.embedding, asyncio.Future) or self.embedding.done()


class Evaluator:
    """Evaluates the records of one partition in order; without `pool`, traces are not embedded."""

    def __init__(
        self,
        state: PartitionState,
        pool: EmbeddingPool | None,
        config: EvaluationConfig,
        latency_budget_seconds: float,
        metrics: Metrics,
        tracing: Tracing,
    ) -> None:
        self._state = state
        self._pool = pool
        self._latency_budget_seconds = latency_budget_seconds
        self._metrics = metrics
        self._parsing, self._embedding, self._comparing, self._scoring = (
            metrics.stages[stage] for stage in ("parse", "embed", "novelty", "score")
        )
        self._tracing = tracing
        identity = None if pool is None else pool.identity
        self._evaluation = Evaluation(state.scorer, identity, config, state.epoch)

    def take(self, record: SourceRecord) -> Taken:
        """Parse a record and submit its text. The evaluation time starts here."""
        started = time.perf_counter()
        span = self._tracing.begin(record)
        parsed: ReasoningTrace | Verdict | InvalidTrace
        texts: Sequence[str] = ()
        hashed = b""
        try:
            parsed = self._evaluation.read(record)
            if self._pool is not None and isinstance(parsed, ReasoningTrace):
                texts = embedded_texts(parsed, self._pool.identity.embed_text)
                hashed = text_hash(joined(texts))
        except InvalidTrace as error:
            parsed = _without_frames(error)
        except Exception as error:  # with a context manager here and below, each trace would cost 4 % more
            parsed = _without_frames(evaluation_failed(error))
        submitted = time.perf_counter()
        self._parsing.observe(submitted - started)
        embedding: Embedding | asyncio.Future[Embedding] | None = None
        if self._pool is not None and isinstance(parsed, ReasoningTrace):
            ready = self._state.ready_embedding(record.offset, hashed)
            embedding = self._pool.embed(*texts) if ready is None else Embedding(ready.array(), False)
        return Taken(record, parsed, hashed, embedding, started, submitted, span)

    def decide(self, taken: Taken) -> Decision:
        """Decide what becomes of a record that is ready. Raises errors after which the worker cannot continue."""
        record, parsed, span = taken.record, taken.parsed, taken.span
        error: InvalidTrace
        try:
            if isinstance(parsed, InvalidTrace):
                error = parsed
            else:
                vector = self._vector(taken)
                decision = self._evaluation.decide(record, parsed, vector, taken.text_hash, time.perf_counter)
                return self._succeeded(taken, decision)
        except InvalidTrace as failure:
            error = _without_frames(failure)
        if error.reason is Reason.EVALUATION_FAILED:
            log.error("%s", error.message, extra=_about(record, parsed))
        self._evaluated(taken, time.perf_counter())
        self._say_refused(span, error, _about(record, parsed))
        return refused(record, error)._replace(span=span)

    def _succeeded(self, taken: Taken, decision: Decision) -> Decision:
        scored, span = decision.result, taken.span
        if decision.moments is None or not isinstance(scored, ScoredTrace):
            self._evaluated(taken, time.perf_counter())
            self._tracing.judged(span)
        else:
            begun, compared, done = decision.moments
            self._comparing.observe(compared - begun)
            self._scoring.observe(done - compared)
            self._evaluated(taken, done)
            if span is not None:
                decision = decision._replace(output=self._tracing.scored(span, scored, decision.output))
        return decision if span is None else decision._replace(span=span)

    def refuse(self, decision: Decision, error: InvalidTrace) -> Decision:
        """Put a dead letter in place of an output that its topic refuses. The changelog keeps the rows."""
        self._say_refused(decision.span, error, _about(decision.record, None))
        return decision._replace(result=error, output=dead_letter(decision.record, error))

    def committed(self, batch: Sequence[Decision]) -> None:
        """End the spans of records that are committed."""
        self._tracing.end(each.span for each in batch)

    def _vector(self, taken: Taken) -> Vector | None:
        """Return the trace's vector; None without an embedder. Raises InvalidTrace if the model failed."""
        embedding = taken.embedding
        if isinstance(embedding, asyncio.Future):
            failure = embedding.exception()
            if failure is not None:
                raise self._embedding_failed(taken, failure)
            embedding = embedding.result()
        if embedding is None:
            if self._pool is not None and isinstance(taken.parsed, ReasoningTrace):
                record = taken.record
                place = f"{record.topic}/{record.partition}/{record.offset}"
                raise RuntimeError(f"this is a bug: record {place} was not embedded")
            return None
        self._embedding.observe(time.perf_counter() - taken.submitted)
        self._tracing.embedded(taken.span)
        if embedding.truncated:
            self._metrics.truncated.inc()
        if embedding.objective_truncated:
            self._metrics.truncated_objectives.inc()
        return embedding.vector

    def _embedding_failed(self, taken: Taken, failure: BaseException) -> InvalidTrace:
        """Return the reason for the dead letter. Raises the failure if this text alone did not cause it."""
        if isinstance(failure, ModelError | MemoryError) or not isinstance(failure, Exception):
            raise failure
        about = _about(taken.record, taken.parsed)
        log.warning("the model failed on this text alone: %s", type(failure).__name__, extra=about)
        log.debug("the model's error: %r", failure, extra=about)  # it may quote the text
        return embedding_failed(failure)

    def _say_refused(self, span: Span | None, error: InvalidTrace, about: dict[str, object]) -> None:
        about |= {"reason": str(error.reason), "path": error.path}
        log.info("dead letter", extra=about)
        log.debug("dead letter: %s", error.message, extra=about)  # the message may quote the document
        self._tracing.refused(span, error.reason)

    def _evaluated(self, taken: Taken, now: float) -> None:
        seconds = now - taken.started
        self._metrics.evaluation.observe(seconds, self._tracing.trace_id(taken.span))
        if seconds > self._latency_budget_seconds:
            self._metrics.over_budget.inc()
            if log.isEnabledFor(logging.DEBUG):
                about = {**_about(taken.record, taken.parsed), "seconds": round(seconds, 4)}
                log.debug("over KP_LATENCY_BUDGET_SECONDS", extra=about)


def _without_frames(error: InvalidTrace) -> InvalidTrace:
    """Return the error without its references to frames: such a cycle would keep the record in memory."""
    if error.__cause__ is not None:
        log.debug("the error: %r", error.__cause__, exc_info=error.__cause__)  # it may quote the record
        error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _about(record: SourceRecord, trace: object) -> dict[str, object]:
    """Return the fields of a log event about one source record (logs.py)."""
    place = {"topic": record.topic, "partition": record.partition, "offset": record.offset}
    return {**place, "trace": cached_id(trace)} if isinstance(trace, ReasoningTrace) else place

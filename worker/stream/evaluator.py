"""The evaluator: evaluates one partition's records, with measurements, log events and spans."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from worker.core.changelog import text_hash
from worker.core.control import Judges, control_kind
from worker.core.documents import dead_letter, embedding_failed, evaluation_failed
from worker.core.novelty import Vector
from worker.core.records import SourceRecord
from worker.core.scorer import Evaluation, EvaluationConfig, cached_id
from worker.core.trace import InvalidTrace, Reason, ReasoningTrace, embedded_texts, joined
from worker.core.verdicts import Ruling, Verdict, issued_ms, judged_record, read_verdict
from worker.embed.embedder import Embedding, ModelError
from worker.embed.pool import EmbeddingPool
from worker.observe.metrics import Metrics
from worker.observe.tracing import Tracing
from worker.stream.state import PartitionState, Pending

log = logging.getLogger(__name__)


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
        judges: Judges,
    ) -> None:
        identity = None if pool is None else pool.identity
        self._state = state
        self._pool = pool
        self._model = "" if identity is None else identity.key()
        self._latency_budget_seconds = latency_budget_seconds
        self._metrics = metrics
        self._parsing, self._embedding, self._comparing, self._scoring = (
            metrics.stages[stage] for stage in ("parse", "embed", "novelty", "score")
        )
        self._tracing = tracing
        self._judges = judges
        self._evaluation = Evaluation(state.scorer, identity, config)

    def take(self, record: SourceRecord) -> Pending:
        """Parse a record and submit its text. The evaluation time starts here."""
        pending = Pending(record)
        pending.span = self._tracing.begin(record)
        texts: Sequence[str] = ()
        try:
            pending.parsed = parsed = self._read(record)
            if self._pool is not None and isinstance(parsed, ReasoningTrace):
                texts = embedded_texts(parsed, self._pool.identity.embed_text)
                pending.text_hash = text_hash(joined(texts))
        except InvalidTrace as error:
            pending.parsed = _without_frames(error)
        except Exception as error:  # with a context manager here and below, each trace would cost 4 % more
            pending.parsed = _without_frames(evaluation_failed(error))
        pending.submitted = time.perf_counter()
        self._parsing.observe(pending.submitted - pending.started)
        if self._pool is not None and isinstance(pending.parsed, ReasoningTrace):
            pending.embedding = self._embed(pending, texts, self._pool)
        return pending

    def _read(self, record: SourceRecord) -> ReasoningTrace | Verdict:
        if record.fault is None and control_kind(record.headers) is not None:
            return read_verdict(record, self._judges, self._state.topic_id)
        return self._evaluation.read(record)

    def _embed(
        self, pending: Pending, texts: Sequence[str], pool: EmbeddingPool
    ) -> asyncio.Future[Embedding] | Embedding:
        ready = self._state.ready_embedding(pending.record.offset, pending.text_hash)
        return pool.embed(*texts) if ready is None else Embedding(ready.array(), False)

    def decide(self, pending: Pending) -> None:
        """Decide what becomes of a record that is ready. Raises errors after which the worker cannot continue."""
        trace = pending.parsed
        try:
            if isinstance(trace, ReasoningTrace):
                self._score(pending, trace, self._vector(pending))
            elif isinstance(trace, Verdict):
                self._judge(pending, trace)
            elif trace is not None:
                self._refuse(pending, trace)
        except InvalidTrace as error:
            self._refuse(pending, _without_frames(error))
        pending.parsed = pending.embedding = None  # a commit may take a while, and they are large

    def _vector(self, pending: Pending) -> Vector | None:
        """Return the trace's vector; None without an embedder. Raises InvalidTrace if the model failed."""
        embedding = pending.embedding
        if isinstance(embedding, asyncio.Future):
            failure = embedding.exception()
            if failure is not None:
                raise self._embedding_failed(pending, failure)
            embedding = embedding.result()
        if embedding is None:
            if self._pool is not None:
                record = pending.record
                place = f"{record.topic}/{record.partition}/{record.offset}"
                raise RuntimeError(f"this is a bug: record {place} was not embedded")
            return None
        self._embedding.observe(time.perf_counter() - pending.submitted)
        self._tracing.embedded(pending.span)
        if embedding.truncated:
            self._metrics.truncated.inc()
        if embedding.objective_truncated:
            self._metrics.truncated_objectives.inc()
        return embedding.vector

    def _embedding_failed(self, pending: Pending, failure: BaseException) -> InvalidTrace:
        """Return the reason for the dead letter. Raises the failure if this text alone did not cause it."""
        if isinstance(failure, ModelError | MemoryError) or not isinstance(failure, Exception):
            raise failure
        about = _about(pending.record, pending.parsed)
        log.warning("the model failed on this text alone: %s", type(failure).__name__, extra=about)
        log.debug("the model's error: %r", failure, extra=about)  # it may quote the text
        return embedding_failed(failure)

    def _score(self, pending: Pending, trace: ReasoningTrace, vector: Vector | None) -> None:
        record, evaluation, scorer = pending.record, self._evaluation, self._state.scorer
        mark = scorer.mark()
        begun = time.perf_counter()
        try:
            comparison = scorer.compare(vector, evaluation.event_time_ms(record, trace))
            compared = time.perf_counter()
            scored = scorer.weigh(trace, comparison)
            done = time.perf_counter()
            output = evaluation.document(record, scored)
            pending.entry = self._state.entry(record, trace, scored, pending.text_hash, self._model)
            scorer.keep(trace, scored)  # last: nothing can fail behind it
        except Exception as error:
            scorer.back_to(mark)
            raise evaluation_failed(error) from error
        self._comparing.observe(compared - begun)
        self._scoring.observe(done - compared)
        self._evaluated(pending, done)
        pending.output = self._tracing.scored(pending.span, trace, scored, output)
        pending.result = scored

    def _judge(self, pending: Pending, verdict: Verdict) -> None:
        """Let a verdict count for the traces behind it."""
        record, track = pending.record, self._state.scorer.record
        try:
            weighed = track.weigh(verdict, issued_ms(verdict, record.timestamp_ms), record.offset)
            ruling = Ruling(verdict, weighed.record is not None, weighed.standing.used)
            output = judged_record(record, ruling)
        except Exception as error:
            raise evaluation_failed(error) from error
        track.keep(weighed)
        self._evaluated(pending, time.perf_counter())
        self._tracing.judged(pending.span)
        pending.output = output
        pending.ruling, pending.changes = ruling, weighed.changes

    def _refuse(self, pending: Pending, error: InvalidTrace) -> None:
        if error.reason is Reason.EVALUATION_FAILED:
            log.error("%s", error.message, extra=_about(pending.record, pending.parsed))
        self._evaluated(pending, time.perf_counter())
        self.dead_letter(pending, error)

    def dead_letter(self, pending: Pending, error: InvalidTrace) -> None:
        """Make a dead letter the output, also in place of a scored trace or a verdict's; the rows of these stay."""
        about = {**_about(pending.record, pending.parsed), "reason": str(error.reason), "path": error.path}
        log.info("dead letter", extra=about)
        log.debug("dead letter: %s", error.message, extra=about)  # the message may quote the document
        self._tracing.refused(pending.span, error.reason)
        pending.output = dead_letter(pending.record, error)
        pending.result = error

    def _evaluated(self, pending: Pending, now: float) -> None:
        seconds = now - pending.started
        self._metrics.evaluation.observe(seconds, self._tracing.trace_id(pending.span))
        if seconds > self._latency_budget_seconds:
            self._metrics.over_budget.inc()
            if log.isEnabledFor(logging.DEBUG):
                about = {**_about(pending.record, pending.parsed), "seconds": round(seconds, 4)}
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

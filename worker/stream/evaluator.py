"""The evaluator: evaluates one partition's records, with measurements, log events and spans."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from worker.core.changelog import text_hash
from worker.core.documents import dead_letter, embedding_failed
from worker.core.forgetting import ControlConfig, ForgetRequest, is_control, read_control, receipt_record
from worker.core.novelty import Vector
from worker.core.records import SourceRecord
from worker.core.scorer import Evaluation, EvaluationConfig, cached_id
from worker.core.trace import InvalidTrace, ReasoningTrace, embedded_texts, joined
from worker.embed.embedder import Embedding, ModelError
from worker.embed.pool import EmbeddingPool
from worker.observe.metrics import Metrics
from worker.observe.tracing import NoTracing, Tracing
from worker.stream.partition_state import Decided, PartitionState

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = logging.getLogger(__name__)


class Taken:
    """A record between its admission and its decision. `embedding` None: nothing is embedded."""

    __slots__ = ("embedding", "parsed", "record", "span", "started", "submitted", "text_hash")

    def __init__(self, record: SourceRecord) -> None:
        self.started = self.submitted = time.perf_counter()
        self.record = record
        self.span: Span | None = None
        self.parsed: ReasoningTrace | InvalidTrace | ForgetRequest
        self.embedding: Embedding | asyncio.Future[Embedding] | None = None
        self.text_hash = b""  # of what is embedded

    def ready(self) -> bool:
        """Whether the record can be decided."""
        return not isinstance(self.embedding, asyncio.Future) or self.embedding.done()


class Evaluator:
    """Evaluates the records of one partition in order.

    `pool` None: traces are not embedded. `control` None: control records are not honoured.
    """

    def __init__(
        self,
        state: PartitionState,
        pool: EmbeddingPool | None,
        config: EvaluationConfig,
        latency_budget_seconds: float,
        metrics: Metrics,
        tracing: Tracing | NoTracing,
        control: ControlConfig | None = None,
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
        self._control = control
        self._evaluation = Evaluation(state.scorer, identity, config)

    def take(self, record: SourceRecord) -> Taken:
        """Parse a record and submit its text. The evaluation time starts here."""
        taken = Taken(record)
        taken.span = self._tracing.begin(record)
        try:
            taken.parsed = self._evaluation.read(record) if self._control is None else self._read(record, self._control)
        except InvalidTrace as error:
            taken.parsed = error.with_traceback(None)  # it leads to this frame: a cycle that would keep the record
        taken.submitted = time.perf_counter()
        self._parsing.observe(taken.submitted - taken.started)
        if self._pool is not None and isinstance(taken.parsed, ReasoningTrace):
            taken.embedding = self._embed(taken, taken.parsed, self._pool)
        return taken

    def _read(self, record: SourceRecord, control: ControlConfig) -> ReasoningTrace | ForgetRequest:
        """Return the trace or the request in a record. Raises InvalidTrace."""
        if record.fault is None and is_control(record.headers):
            return read_control(record, control.keys, self._state.topic_id)
        return self._evaluation.read(record)

    def _embed(self, taken: Taken, trace: ReasoningTrace, pool: EmbeddingPool) -> asyncio.Future[Embedding] | Embedding:
        texts = embedded_texts(trace, pool.identity.embed_text)
        taken.text_hash = text_hash(joined(texts))
        ready = self._state.ready_embedding(taken.record.offset, taken.text_hash)
        return pool.embed(*texts) if ready is None else Embedding(ready.array(), False)

    def decide(self, taken: Taken) -> Decided:
        """Return what becomes of a record that is ready. Raises errors after which the worker cannot continue."""
        trace = taken.parsed
        if isinstance(trace, InvalidTrace):
            return self._refused(taken, trace)
        if isinstance(trace, ForgetRequest):
            return self._forget(taken, trace)
        try:
            vector = self._vector(taken)
        except InvalidTrace as error:
            return self._refused(taken, error.with_traceback(None), trace)
        return self._scored(taken, trace, vector)

    def _vector(self, taken: Taken) -> Vector | None:
        """Return the trace's vector; None without an embedder. Raises InvalidTrace if the model failed."""
        embedding = taken.embedding
        if isinstance(embedding, asyncio.Future):
            failure = embedding.exception()
            if failure is not None:
                raise self._embedding_failed(taken, failure)
            embedding = embedding.result()
        if embedding is None:
            if self._pool is not None:
                record = taken.record
                place = f"{record.topic}/{record.partition}/{record.offset}"
                raise RuntimeError(f"this is a bug: record {place} was not embedded")
            return None
        self._embedding.observe(time.perf_counter() - taken.submitted)
        self._tracing.embedded(taken.span)
        if embedding.truncated:
            self._metrics.truncated.inc()
        return embedding.vector

    def _embedding_failed(self, taken: Taken, failure: BaseException) -> InvalidTrace:
        """Return the reason for the dead letter. Raises the failure if this text alone did not cause it."""
        if isinstance(failure, ModelError | MemoryError) or not isinstance(failure, Exception):
            raise failure
        about = _about(taken.record, taken.parsed)
        log.warning("the model failed on this text alone: %s", type(failure).__name__, extra=about)
        log.debug("the model's error: %r", failure, extra=about)  # it may quote the text
        return embedding_failed(failure)

    def _scored(self, taken: Taken, trace: ReasoningTrace, vector: Vector | None) -> Decided:
        record, evaluation = taken.record, self._evaluation
        begun = time.perf_counter()
        comparison = evaluation.compare(record, trace, vector)
        compared = time.perf_counter()
        scored = evaluation.decide(record, trace, comparison)
        done = time.perf_counter()
        self._comparing.observe(compared - begun)
        self._scoring.observe(done - compared)
        self._evaluated(taken, done)
        output = self._tracing.scored(taken.span, trace, scored, evaluation.document(record, scored))
        entry = self._state.entry(record, trace, scored, taken.text_hash, self._model)
        return Decided(record, output, scored, entry, taken.span)

    def _forget(self, taken: Taken, request: ForgetRequest) -> Decided:
        """Honour a control record. All traces before it are decided, so what is embedded now belongs to later ones."""
        state, control, record = self._state, self._control, taken.record
        if state.forgetting is None or control is None:
            raise RuntimeError("this is a bug: a control record was read that is not honoured")
        refusal = state.forgetting.refusal(request, record.offset)
        if refusal is not None:
            return self._refused(taken, refusal)
        forgotten = state.forget(request, record.offset)
        if self._pool is not None:
            self._pool.drop_remembered()
        self._evaluated(taken, time.perf_counter())
        self._tracing.forgotten(taken.span)
        about = _about(record, None)
        log.info("request %s: %d entries are forgotten", request.request_id, len(forgotten.removed), extra=about)
        output = receipt_record(record, request, control.group, forgotten.removed)
        return Decided(record, output, None, None, taken.span, forgotten)

    def _refused(self, taken: Taken, error: InvalidTrace, trace: ReasoningTrace | None = None) -> Decided:
        self._evaluated(taken, time.perf_counter())
        return self._dead_letter(taken.record, error, None, taken.span, trace)

    def refused_by_topic(self, decided: Decided, error: InvalidTrace) -> Decided:
        """Return the dead letter of a scored trace or a receipt that its topic refused; its rows stay."""
        letter = self._dead_letter(decided.record, error, decided.entry, decided.span)
        return letter if decided.forgotten is None else letter._replace(forgotten=decided.forgotten)

    def _dead_letter(
        self,
        record: SourceRecord,
        error: InvalidTrace,
        entry: tuple[bytes, bytes] | None,
        span: Span | None,
        trace: ReasoningTrace | None = None,
    ) -> Decided:
        about = {**_about(record, trace), "reason": str(error.reason), "path": error.path}
        log.info("dead letter", extra=about)
        log.debug("dead letter: %s", error.message, extra=about)  # the message may quote the document
        self._tracing.refused(span, error.reason)
        return Decided(record, dead_letter(record, error), error, entry, span)

    def _evaluated(self, taken: Taken, now: float) -> None:
        seconds = now - taken.started
        self._metrics.evaluation.observe(seconds)
        if seconds > self._latency_budget_seconds:
            self._metrics.over_budget.inc()
            if log.isEnabledFor(logging.DEBUG):
                about = {**_about(taken.record, taken.parsed), "seconds": round(seconds, 4)}
                log.debug("over KP_LATENCY_BUDGET_SECONDS", extra=about)


def _about(record: SourceRecord, trace: ReasoningTrace | InvalidTrace | ForgetRequest | None) -> dict[str, object]:
    """Return the fields of a log event about one source record (logs.py)."""
    place = {"topic": record.topic, "partition": record.partition, "offset": record.offset}
    return {**place, "trace": cached_id(trace)} if isinstance(trace, ReasoningTrace) else place

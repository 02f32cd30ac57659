"""The scorer of one partition: it keeps the novelty cache and the stream time, and decides on each trace.

Call `PartitionScorer.score` once for each valid trace, in offset order, and never for a dead letter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, NamedTuple

import numpy.typing as npt

from worker.core.documents import evaluation_failed, scored_record
from worker.core.findings import Clean, Screen
from worker.core.novelty import CACHED_ID_LENGTH, CacheMark, Neighbour, Vector, VectorCache, unit
from worker.core.records import RECORD_OVERHEAD, EmbedderIdentity, OutputRecord, SourceRecord, encoded_size
from worker.core.scoring import (
    DEFAULT_THRESHOLD,
    NEUTRAL_NOVELTY,
    PROFILES,
    Confidence,
    Profile,
    ScoredTrace,
    score_trace,
)
from worker.core.trace import LATEST_MS, InvalidTrace, Limits, Reason, ReasoningTrace, created_at_ms, parse_trace
from worker.core.track_record import Standing, TrackRecord
from worker.core.verdicts import issued_ms, make_verdict


class Comparison(NamedTuple):
    """The result of comparing a trace with the cache."""

    vector: Vector | None  # the trace's, unit length
    nearest: Neighbour | None  # live
    stream_time_ms: int  # at the comparison


Mark = tuple[CacheMark, int | None]  # a cache's mark and the stream time (`PartitionScorer.mark`)


class PartitionScorer:
    """The state of one source partition: its novelty cache, its stream time, and its agents' track records.

    `confidence`: "stated" uses a trace's outcome confidence as it is; "record" uses its agent's success rate by the
    verdicts if the trace claims success without an evaluation. Raises ValueError for settings out of range.
    """

    def __init__(
        self,
        max_elements: int = 1000,
        ttl_ms: int | None = 3_600_000,  # None: entries do not expire
        dimensions: int = 384,
        threshold: float = DEFAULT_THRESHOLD,  # 0..1, for profiles without their own
        profiles: Mapping[str, Profile] = PROFILES,
        max_step_ms: int | None = None,  # how far one trace may advance stream time; None: no limit
        confidence: Literal["stated", "record"] = "stated",
    ) -> None:
        if confidence not in ("stated", "record"):
            raise ValueError(f'confidence must be "stated" or "record", got {confidence!r}')
        if not 0.0 <= threshold <= 1.0:
            raise ValueError(f"threshold must lie in 0..1, got {threshold}")
        if max_step_ms is not None and max_step_ms < 1:
            raise ValueError(f"max_step_ms must be at least 1, or None for any distance, got {max_step_ms}")
        self.cache = VectorCache(max_elements, dimensions, ttl_ms)
        self._threshold = threshold
        self._profiles = profiles
        self._max_step_ms = max_step_ms
        self._stream_time_ms: int | None = None
        self._by_record = confidence == "record"
        self._verdicts = 0
        self.record = TrackRecord()  # the agents' track records: empty, or as restored

    @property
    def stream_time_ms(self) -> int | None:
        """The latest event time seen (ms since 1970), limited by `max_step_ms`; None before the first trace."""
        return self._stream_time_ms

    def score(self, trace: ReasoningTrace, vector: npt.ArrayLike | None, event_time_ms: int) -> ScoredTrace:
        """Score the partition's next trace and add its vector to the cache, whatever the decision.

        `vector`: shape (dimensions,), any length, or None without an embedder. Raises ValueError for a wrong dimension
        or values that are not finite; the state is then unchanged.
        """
        return self.decide(trace, self.compare(vector, event_time_ms))

    def compare(self, vector: npt.ArrayLike | None, event_time_ms: int) -> Comparison:
        """Do the first half of `score`: advance stream time and find the nearest live entry. Raises ValueError."""
        query = None if vector is None else unit(vector, self.cache.dimensions)
        time, step = self._stream_time_ms, self._max_step_ms
        if time is None:  # the first trace: no earlier time to limit the step from
            time = event_time_ms
        elif event_time_ms > time:
            time = event_time_ms if step is None else min(event_time_ms, time + step)
        self._stream_time_ms = time
        now = self.cache.advance(time)
        return Comparison(query, None if query is None else self.cache.nearest_unit(query), now)

    def decide(self, trace: ReasoningTrace, comparison: Comparison) -> ScoredTrace:
        """Do the second half of `score`: score, decide, and add the vector to the cache."""
        scored = self.weigh(trace, comparison)
        self.keep(trace, scored)
        return scored

    def keep(self, trace: ReasoningTrace, scored: ScoredTrace) -> None:
        """Add the vector of the trace weighed last to the cache."""
        if scored.vector is not None:
            self.cache.add_unit(scored.vector, scored.stream_time_ms, cached_id(trace))

    def mark(self) -> Mark:
        """Return a mark with which `back_to` undoes a `compare`."""
        return self.cache.mark(), self._stream_time_ms

    def back_to(self, mark: Mark) -> None:
        """Undo the `compare` since the mark, as if the trace had never come. Too late after `keep`."""
        cache, self._stream_time_ms = mark
        self.cache.back_to(cache)

    def weigh(self, trace: ReasoningTrace, comparison: Comparison) -> ScoredTrace:
        """Score and decide without changing the state. `sequence` is the number that `keep` will give the vector."""
        query, nearest, now = comparison
        novelty = NEUTRAL_NOVELTY if nearest is None else 1.0 - nearest.similarity
        confidence = self._confidence(trace) if self._by_record else None
        result = score_trace(trace, novelty, self._profiles, None if confidence is None else confidence.used)
        threshold = self._profiles[result.profile].threshold
        if threshold is None:
            threshold = self._threshold
        return ScoredTrace(
            trace_id=trace.id,
            domain=trace.metadata.task_domain,
            score=result.score,
            accepted=result.score >= threshold,
            threshold=threshold,
            components=result.components,
            profile=result.profile,
            weights=result.weights,
            overrides=result.overrides,
            nearest=nearest,
            stream_time_ms=now,
            sequence=None if query is None else self.cache.next_sequence,
            vector=query,
            confidence=confidence,
        )

    def judge(
        self, trace_id: str, agent_id: str, task_domain: str, success: bool | float, *,
        judge: str = "judge", issued_at: datetime | None = None,
    ) -> Standing:  # fmt: skip
        """Apply a verdict on a trace; return the resulting standing of its agent in its domain.

        `success`: true, false, or 0 to 1. Of one judge's verdicts on a trace, the one with the latest `issued_at`
        counts (with a time zone; None: in the order of the calls). Raises ValueError.
        """
        self._verdicts += 1
        issued = datetime.fromtimestamp(self._verdicts, UTC) if issued_at is None else issued_at
        line = {
            "trace_id": trace_id, "agent_id": agent_id, "task_domain": task_domain, "partition": 0, "success": success,
            "judge": judge,
        }  # fmt: skip
        verdict = make_verdict(line, topic="-", topic_id="-" * 22, issued_at=issued)
        return self.record.add(verdict, issued_ms(verdict, None), self._verdicts).standing

    def _confidence(self, trace: ReasoningTrace) -> Confidence:
        stated = trace.outcome.confidence
        used, judged, succeeded = self.record.standing(trace.metadata.agent_id, trace.metadata.task_domain)
        claimed = trace.metadata.success and trace.outcome.evaluated is not True
        return Confidence(stated, used if claimed else stated, judged, succeeded)

    def restore(self, entries: Iterable[tuple[int, int, str, Vector]], stream_time_ms: int | None = None) -> None:
        """Rebuild the state from (sequence, stream time in ms, trace id, unit vector) of committed traces.

        Leave out entries at or past the committed source offset: their traces are read again.
        """
        self.cache.restore(entries, stream_time_ms)
        self._stream_time_ms = self.cache.now_ms


def cached_id(trace: ReasoningTrace) -> str:
    """Return a trace's id as the cache and the changelog store it."""
    return trace.id[:CACHED_ID_LENGTH]


def event_time_ms(trace: ReasoningTrace, record_timestamp_ms: int | None, source: str = "created_at") -> int:
    """Return the trace's event time, ms since 1970, at most the end of 9999.

    `created_at`: the trace's own time, but never later than the record's timestamp, so that one trace dated 2099 cannot
    expire every entry; `record`: the record's timestamp, if it has one.
    """
    if record_timestamp_ms is None or record_timestamp_ms < 0:
        return created_at_ms(trace)
    if source == "record":
        return min(record_timestamp_ms, LATEST_MS)
    return min(created_at_ms(trace), record_timestamp_ms)


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """The settings of an evaluation."""

    limits: Limits
    event_time: str = "created_at"  # which time counts (KP_EVENT_TIME)
    output_embedding: bool = False  # whether documents contain their vector
    clean: Clean | None = None  # redacts accepted documents; None: no redaction (KP_REDACT=off)
    clean_rejected: bool = False  # whether rejected documents are redacted too (KP_REDACT=all)
    screen: Screen | None = None  # screens documents; None: no screening (KP_SCREEN=off)


def _check_size(record: SourceRecord, limits: Limits) -> None:
    """Raise InvalidTrace if the record is too large, counting key and headers but not Kafka's framing."""
    size = encoded_size(record.key, record.value, record.headers) - RECORD_OVERHEAD
    if size > limits.max_bytes:
        raise InvalidTrace(
            Reason.TOO_LARGE,
            "",
            f"the record has {size} bytes with key and headers, the limit is {limits.max_bytes} (KP_MAX_MESSAGE_BYTES)",
        )


class Evaluation:
    """The evaluation of one partition's records.

    `evaluate` does all steps. To time each step, call the scorer's `compare`, `weigh` and `keep` instead.
    """

    def __init__(self, scorer: PartitionScorer, identity: EmbedderIdentity | None, config: EvaluationConfig) -> None:
        self._scorer = scorer
        self._identity = identity
        self._config = config

    def read(self, record: SourceRecord) -> ReasoningTrace:
        """Return the trace in a record. Raises InvalidTrace, for which the record becomes a dead letter."""
        limits = self._config.limits
        if record.fault is not None:
            raise InvalidTrace(record.fault.reason, "", record.fault.message)
        try:
            if record.size > limits.max_bytes:  # the size in memory is never smaller than the encoded one
                _check_size(record, limits)
            return parse_trace(record.value, limits)
        except InvalidTrace:
            raise
        except Exception as error:
            raise evaluation_failed(error) from error

    def event_time_ms(self, record: SourceRecord, trace: ReasoningTrace) -> int:
        """Return a trace's event time (KP_EVENT_TIME), ms since 1970."""
        return event_time_ms(trace, record.timestamp_ms, self._config.event_time)

    def document(self, record: SourceRecord, scored: ScoredTrace) -> OutputRecord:
        """Build the accepted or rejected record."""
        config = self._config
        return scored_record(
            record,
            scored,
            self._identity,
            embedding=config.output_embedding,
            clean=config.clean if scored.accepted or config.clean_rejected else None,
            screen=config.screen,
        )

    def evaluate(
        self, record: SourceRecord, trace: ReasoningTrace, vector: Vector | None
    ) -> tuple[ScoredTrace, OutputRecord]:
        """Score the partition's next trace; return its score and the record to publish.

        Raises InvalidTrace if a bug in the worker makes that fail; the state is then unchanged.
        """
        scorer = self._scorer
        mark = scorer.mark()
        try:
            comparison = scorer.compare(vector, self.event_time_ms(record, trace))
            scored = scorer.weigh(trace, comparison)
            document = self.document(record, scored)
            scorer.keep(trace, scored)  # last: nothing may fail after it
        except Exception as error:
            scorer.back_to(mark)
            raise evaluation_failed(error) from error
        return scored, document

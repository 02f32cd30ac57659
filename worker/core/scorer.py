"""The scorer of one partition: its novelty cache and its stream time, and the decision on each trace.

`PartitionScorer.score` is called once for each valid trace, in offset order, and never for a dead letter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, NamedTuple

import numpy.typing as npt

from worker.core.documents import evaluation_failed, scored_record
from worker.core.findings import Clean, Screen
from worker.core.forgetting import Processed
from worker.core.group_view import GroupView
from worker.core.novelty import CACHED_ID_LENGTH, CacheMark, Label, Neighbour, Vector, VectorCache, unit
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
    """A trace's vector (unit length), its nearest live neighbour, and the stream time at which they were compared."""

    vector: Vector | None
    nearest: Neighbour | None
    stream_time_ms: int


Mark = tuple[CacheMark, int | None]  # a cache's mark and the stream time (`PartitionScorer.mark`)


class PartitionScorer:
    """The state of one source partition: its novelty cache, its stream time, and its agents' track records.

    `confidence`: "stated" takes a trace's outcome confidence as it is; "record" takes its agent's share of successes by
    the verdicts, if the trace claims success and no evaluation says so. `ttl_ms` None: entries do not expire.
    `threshold` (0..1) is that of profiles without their own. `max_step_ms`: how far one trace may advance stream time;
    None: no limit. Raises ValueError for settings out of range.
    """

    def __init__(
        self,
        max_elements: int = 1000,
        ttl_ms: int | None = 3_600_000,
        dimensions: int = 384,
        threshold: float = DEFAULT_THRESHOLD,
        profiles: Mapping[str, Profile] = PROFILES,
        max_step_ms: int | None = None,
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
        self._partition: int | None = None
        self._group: GroupView | None = None
        self._stream_time_ms: int | None = None
        self._by_record = confidence == "record"
        self._verdicts = 0
        self.record = TrackRecord()  # the agents' track records: empty, or as restored

    @property
    def stream_time_ms(self) -> int | None:
        """The greatest event time seen (ms since 1970), as far as it may advance; None before the first trace."""
        return self._stream_time_ms

    def score(self, trace: ReasoningTrace, vector: npt.ArrayLike | None, event_time_ms: int) -> ScoredTrace:
        """Score the partition's next trace and add its vector to the cache, whatever the decision.

        `vector`: shape (dimensions,), any length, or None without an embedder. Raises ValueError for a wrong dimension
        or values that are not finite; the state is then unchanged.
        """
        return self.decide(trace, self.compare(vector, event_time_ms))

    def join_group(self, partition: int, view: GroupView | None) -> None:
        """Take the novelty scope `group`: neighbours have a partition and an offset, and may be of other partitions.

        `partition`: the number of this source partition. `view`: the entries of the others; None: there are none.
        """
        self._partition = partition
        self._group = view

    def compare(self, vector: npt.ArrayLike | None, event_time_ms: int) -> Comparison:
        """Do the first half of `score`: advance stream time and find the nearest live entry (raises ValueError)."""
        query = None if vector is None else unit(vector, self.cache.dimensions)
        time, step = self._stream_time_ms, self._max_step_ms
        if time is None:  # the first trace: there is nothing to measure a step from
            time = event_time_ms
        elif event_time_ms > time:
            time = event_time_ms if step is None else min(event_time_ms, time + step)
        self._stream_time_ms = time
        now = self.cache.advance(time)
        if query is None or self._partition is None:
            return Comparison(query, None if query is None else self.cache.nearest_unit(query), now)
        return Comparison(query, self._nearest_in_group(query, self._partition, now), now)

    def _nearest_in_group(self, query: Vector, partition: int, now_ms: int) -> Neighbour | None:
        """Return the nearest live entry of this partition, or of another one if that is nearer."""
        found = self.cache.nearest_label(query)
        own = None if found is None else Neighbour(found[0].trace_id, found[1], partition, found[0].offset)
        foreign = None if self._group is None else self._group.nearest(partition, query, now_ms)
        if own is None or foreign is None:
            return own or foreign
        return foreign if foreign.similarity > own.similarity else own

    def forget_in_group(self, request: Processed) -> None:
        """Compare with no entry of another partition that a request matches, which this partition has processed."""
        if self._group is not None and self._partition is not None:
            self._group.forget(self._partition, request)

    def decide(self, trace: ReasoningTrace, comparison: Comparison, offset: int | None = None) -> ScoredTrace:
        """Do the second half of `score`: score, decide, and add the vector, with its source offset, to the cache."""
        scored = self.weigh(trace, comparison)
        self.keep(trace, scored, offset)
        return scored

    def keep(self, trace: ReasoningTrace, scored: ScoredTrace, offset: int | None = None) -> None:
        """Add the vector of the trace that was weighed last, with its source offset, to the cache."""
        if scored.vector is not None:
            self.cache.add_unit(scored.vector, scored.stream_time_ms, label(trace, offset))

    def mark(self) -> Mark:
        """Return what `back_to` needs to undo a `compare`."""
        return self.cache.mark(), self._stream_time_ms

    def back_to(self, mark: Mark) -> None:
        """Undo the `compare` since the mark, as if there had been no trace. After `keep` it is too late."""
        cache, self._stream_time_ms = mark
        self.cache.back_to(cache)

    def weigh(self, trace: ReasoningTrace, comparison: Comparison) -> ScoredTrace:
        """Score and decide; the state stays as it is. `sequence` is that which `keep` gives the vector."""
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
        """Take a verdict on a trace; return what is known of its agent in its domain then.

        `success`: true, false, or 0 to 1. Of a judge's verdicts on a trace, the one with the latest `issued_at` counts
        (with a time zone; None: in the order of the calls). Raises ValueError.
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

    def restore(
        self,
        entries: Iterable[tuple[int, int, str | Label, Vector]],
        stream_time_ms: int | None = None,
        next_sequence: int = 0,
    ) -> None:
        """Rebuild the state from (sequence, stream time in ms, trace id or label, unit vector) of committed traces.

        Entries at or past the committed source offset must not be among them: their traces are read again. The next
        entry's sequence number is at least `next_sequence` (the newest entries may be forgotten).
        """
        self.cache.restore(entries, stream_time_ms, next_sequence)
        self._stream_time_ms = self.cache.now_ms


def cached_id(trace: ReasoningTrace) -> str:
    """Return the id under which the cache and the changelog know a trace."""
    return trace.id[:CACHED_ID_LENGTH]


def label(trace: ReasoningTrace, offset: int | None = None) -> Label:
    """Return the label of a trace's cache entry."""
    return Label(cached_id(trace), trace.metadata.agent_id[:CACHED_ID_LENGTH], offset)


def event_time_ms(trace: ReasoningTrace, record_timestamp_ms: int | None, source: str = "created_at") -> int:
    """Return the trace's event time, ms since 1970, not after the year 9999.

    `created_at`: the trace's own, but never later than the record's timestamp, so that one trace dated 2099 cannot
    expire every entry; `record`: the record's timestamp alone, if it has one.
    """
    if record_timestamp_ms is None or record_timestamp_ms < 0:
        return created_at_ms(trace)
    if source == "record":
        return min(record_timestamp_ms, LATEST_MS)
    return min(created_at_ms(trace), record_timestamp_ms)


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """The settings: limits, which time counts (KP_EVENT_TIME), and what a document contains."""

    limits: Limits
    event_time: str = "created_at"  # which time counts (KP_EVENT_TIME)
    output_embedding: bool = False
    clean: Clean | None = None  # redacts accepted documents; None: none is redacted (KP_REDACT=off)
    clean_rejected: bool = False  # whether rejected documents are redacted, too (KP_REDACT=all)
    screen: Screen | None = None  # finds what marks a document; None: none is marked (KP_SCREEN=off)


def _check_size(record: SourceRecord, limits: Limits) -> None:
    """Raise InvalidTrace for a record that is too large, with key and headers, without Kafka's framing."""
    size = encoded_size(record.key, record.value, record.headers) - RECORD_OVERHEAD
    if size > limits.max_bytes:
        raise InvalidTrace(
            Reason.TOO_LARGE,
            "",
            f"the record has {size} bytes with key and headers, the limit is {limits.max_bytes} (KP_MAX_MESSAGE_BYTES)",
        )


class Evaluation:
    """The evaluation of one partition's records.

    `evaluate` does all steps; a caller that measures each one calls the scorer's `compare`, `weigh` and `keep` itself.
    """

    def __init__(self, scorer: PartitionScorer, identity: EmbedderIdentity | None, config: EvaluationConfig) -> None:
        self._scorer = scorer
        self._identity = identity
        self._config = config

    def read(self, record: SourceRecord) -> ReasoningTrace:
        """Return the trace in a record. Raises InvalidTrace, which makes the record a dead letter."""
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
        """Return the time that counts for a trace (KP_EVENT_TIME), ms since 1970."""
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

        Raises InvalidTrace where that fails by a fault of the worker; the state is then unchanged.
        """
        scorer = self._scorer
        mark = scorer.mark()
        try:
            comparison = scorer.compare(vector, self.event_time_ms(record, trace))
            scored = scorer.weigh(trace, comparison)
            document = self.document(record, scored)
            scorer.keep(trace, scored, record.offset)  # last: nothing can fail behind it
        except Exception as error:
            scorer.back_to(mark)
            raise evaluation_failed(error) from error
        return scored, document

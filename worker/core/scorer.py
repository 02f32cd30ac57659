"""Scoring, the same everywhere: a trace by `PartitionScorer`, a source record by `Evaluation`.

`PartitionScorer` has the state of one partition. The stream, `kp-worker score` and the Python API all call its `weigh`
and `keep`, once for each valid trace, in offset order, and never for a dead letter.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

import numpy.typing as npt

from worker.core.changelog import SourceEpoch, encode, slot_key
from worker.core.dead_letters import dead_letter, evaluation_failed
from worker.core.documents import scored_record
from worker.core.novelty import CACHED_ID_LENGTH, Vector, VectorCache, unit
from worker.core.records import (
    RECORD_OVERHEAD,
    Clean,
    EmbedderIdentity,
    OutputRecord,
    Row,
    Screen,
    SourceRecord,
    encoded_size,
)
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
from worker.core.track_record import Change, Standing, TrackRecord
from worker.core.verdicts import (
    Judges,
    Ruling,
    Verdict,
    control_kind,
    issued_ms,
    judged_record,
    read_verdict,
    unsigned_verdict,
)

Clock = Callable[[], float]  # seconds
Moments = tuple[float, float, float]  # when it was begun, compared and scored, by the caller's clock


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
        self._by_record = confidence == "record"
        self._verdicts = 0
        self.record = TrackRecord()  # the agents' track records: empty, or as restored

    @property
    def stream_time_ms(self) -> int | None:
        """The latest event time seen (ms since 1970), limited by `max_step_ms`; None before the first trace."""
        return self.cache.now_ms

    def score(self, trace: ReasoningTrace, vector: npt.ArrayLike | None, event_time_ms: int) -> ScoredTrace:
        """Score the partition's next trace and add its vector to the cache, whatever the decision.

        `vector`: shape (dimensions,), any length, or None without an embedder. Raises ValueError for a wrong dimension
        or values that are not finite; the state is then unchanged.
        """
        scored, _ = self.weigh(trace, vector, event_time_ms)
        self.keep(scored)
        return scored

    def weigh(
        self, trace: ReasoningTrace, vector: npt.ArrayLike | None, event_time_ms: int, clock: Clock = lambda: 0.0
    ) -> tuple[ScoredTrace, Moments]:
        """Score as `score` does, and say when; nothing changes before `keep`."""
        query = None if vector is None else unit(vector, self.cache.dimensions)
        begun = clock()
        now = self._next_stream_time(event_time_ms)
        nearest = None if query is None else self.cache.nearest_unit(query, now)
        compared = clock()
        novelty = NEUTRAL_NOVELTY if nearest is None else 1.0 - nearest.similarity
        confidence = self._confidence(trace) if self._by_record else None
        result = score_trace(trace, novelty, self._profiles, None if confidence is None else confidence.used)
        threshold = self._profiles[result.profile].threshold_or(self._threshold)
        scored = ScoredTrace(
            result.score,
            result.components,
            result.profile,
            result.weights,
            result.overrides,
            trace_id=trace.id,
            domain=trace.metadata.task_domain,
            accepted=result.score >= threshold,
            threshold=threshold,
            nearest=nearest,
            stream_time_ms=now,
            sequence=None if query is None else self.cache.next_sequence,
            vector=query,
            confidence=confidence,
        )
        return scored, (begun, compared, clock())

    def keep(self, scored: ScoredTrace) -> None:
        """Advance stream time, and add the vector of the trace weighed last. Nothing here may fail."""
        if scored.vector is None:
            self.cache.advance(scored.stream_time_ms)
        else:
            self.cache.add_unit(scored.vector, scored.stream_time_ms, scored.trace_id[:CACHED_ID_LENGTH])

    def _next_stream_time(self, event_time_ms: int) -> int:
        time, step = self.stream_time_ms, self._max_step_ms
        if time is None:  # the first trace: no earlier time to limit the step from
            return event_time_ms
        return max(time, event_time_ms if step is None else min(event_time_ms, time + step))

    def judge(
        self, trace_id: str, agent_id: str, task_domain: str, success: bool | float, *,
        judge: str = "judge", issued_at: datetime | None = None, offset: int | None = None,
    ) -> Standing:  # fmt: skip
        """Apply a verdict on a trace; return the resulting standing of its agent in its domain.

        `success`: true, false, or 0 to 1. Of one judge's verdicts on a trace, the one with the latest `issued_at`
        counts (with a time zone; None: in the order of the calls). `offset`: of the trace's record; None: ids differ.
        Raises ValueError.
        """
        self._verdicts += 1
        issued = datetime.fromtimestamp(self._verdicts, UTC) if issued_at is None else issued_at
        line = {
            "trace_id": trace_id, "agent_id": agent_id, "task_domain": task_domain, "partition": 0, "success": success,
            "judge": judge, "offset": offset,
        }  # fmt: skip
        verdict = unsigned_verdict(line, issued)
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
    judges: Judges = field(default_factory=dict)  # whose verdicts count; none: every verdict is a dead letter


class Decision(NamedTuple):
    """What becomes of one source record. The trace and its text are gone: they are large."""

    record: SourceRecord
    result: ScoredTrace | Ruling | InvalidTrace
    output: OutputRecord
    rows: Sequence[Row | Change] = ()  # for the changelog: a cache entry, or what a verdict changes
    moments: Moments | None = None  # of a scored trace
    span: Any = None  # the record's, if the caller traces

    def size(self) -> int:
        """Return the bytes of the record and its output's value; the output's key and headers are the record's."""
        return self.record.size + len(self.output.value or b"")


def refused(record: SourceRecord, error: InvalidTrace) -> Decision:
    """Return the decision on a record that becomes a dead letter; it changes no state."""
    return Decision(record, error, dead_letter(record, error))


class Evaluation:
    """The evaluation of one partition's records, in offset order: `read`, then `decide`.

    `epoch`: the epoch of the source that cache entries belong to; None: nothing is written to a changelog.
    """

    def __init__(
        self,
        scorer: PartitionScorer,
        identity: EmbedderIdentity | None,
        config: EvaluationConfig,
        epoch: SourceEpoch | None = None,
    ) -> None:
        self._scorer = scorer
        self._identity = identity
        self._model = "" if identity is None else identity.key()
        self._config = config
        self._epoch = epoch

    def read(self, record: SourceRecord) -> ReasoningTrace | Verdict:
        """Return what a record holds. Raises InvalidTrace, for which the record becomes a dead letter."""
        limits = self._config.limits
        if record.fault is not None:
            raise InvalidTrace(record.fault.reason, "", record.fault.message)
        try:
            if record.headers and control_kind(record.headers) is not None:
                topic_id = None if self._epoch is None else self._epoch.topic_id
                return read_verdict(record, self._config.judges, topic_id)
            if record.size > limits.max_bytes:  # the size in memory is never smaller than the encoded one
                size = encoded_size(record.key, record.value, record.headers) - RECORD_OVERHEAD
                if size > limits.max_bytes:
                    problem = f"the record has {size} bytes with key and headers, the limit is {limits.max_bytes}"
                    raise InvalidTrace(Reason.TOO_LARGE, "", f"{problem} (KP_MAX_MESSAGE_BYTES)")
            return parse_trace(record.value, limits)
        except InvalidTrace:
            raise
        except Exception as error:
            raise evaluation_failed(error) from error

    def decide(
        self,
        record: SourceRecord,
        parsed: ReasoningTrace | Verdict,
        vector: Vector | None = None,
        text_hash: bytes = b"",
        clock: Clock = lambda: 0.0,
    ) -> Decision:
        """Decide on what `read` returned for the partition's next record.

        `text_hash`: of the embedded text, for the changelog. Raises InvalidTrace if a bug in the worker makes that
        fail; the state is then unchanged.
        """
        try:
            if isinstance(parsed, Verdict):
                return self._judge(record, parsed)
            event_time = event_time_ms(parsed, record.timestamp_ms, self._config.event_time)
            scored, moments = self._scorer.weigh(parsed, vector, event_time, clock)
            output, rows = self._published(record, parsed, scored, text_hash)
            self._scorer.keep(scored)  # last: nothing can fail after it
        except Exception as error:
            raise evaluation_failed(error) from error
        return Decision(record, scored, output, rows, moments)

    def _judge(self, record: SourceRecord, verdict: Verdict) -> Decision:
        track = self._scorer.record
        weighed = track.weigh(verdict, issued_ms(verdict, record.timestamp_ms), record.offset)
        ruling = Ruling(verdict, weighed.record is not None, weighed.standing.used)
        output = judged_record(record, ruling)
        track.keep(weighed)  # last, as above
        return Decision(record, ruling, output, weighed.changes)

    def _published(
        self, record: SourceRecord, trace: ReasoningTrace, scored: ScoredTrace, text_hash: bytes
    ) -> tuple[OutputRecord, Sequence[Row]]:
        """Return the accepted or rejected record, and the cache entry for the changelog."""
        config, epoch = self._config, self._epoch
        output = scored_record(
            record,
            scored,
            self._identity,
            embedding=config.output_embedding,
            clean=config.clean if scored.accepted or config.clean_rejected else None,
            screen=config.screen,
        )
        if epoch is None or scored.sequence is None or scored.vector is None:
            return output, ()
        entry = encode(
            sequence=scored.sequence,
            source_offset=record.offset,
            stream_time_ms=scored.stream_time_ms,
            trace_id=cached_id(trace),
            model=self._model,
            vector=scored.vector,
            epoch=epoch.number,
            text_hash=text_hash,
            agent_id=trace.metadata.agent_id[:CACHED_ID_LENGTH],
        )
        return output, [(slot_key(scored.sequence, self._scorer.cache.max_elements, epoch.number or 0), entry)]

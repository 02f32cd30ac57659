"""One partition's scoring: the only way into the core, and the records that come out of it.

Lives here: the state of one source partition (novelty cache, stream time), event time, and the exact keys, headers
and bytes of every output record. Must not live here: Kafka clients, asyncio, models, clock, environment, logging.

The order of calls is the order of the partition: `PartitionScorer.score` is called once for each valid trace, in
offset order, and never for a dead letter.
"""

from __future__ import annotations

import functools
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from worker.core.novelty import Neighbour, Vector, VectorCache, unit
from worker.core.scoring import (
    DEFAULT_THRESHOLD,
    NEUTRAL_NOVELTY,
    PROFILES,
    Components,
    Profile,
    Weights,
    score_trace,
)
from worker.core.trace import InvalidTrace, Reason, ReasoningTrace, created_at_ms, splice
from worker.version import __version__

ACCEPTED: Final = "accepted"
REJECTED: Final = "rejected"
DEAD_LETTER: Final = "dead_letter"

FIRST_OFFSET: Final = "kp-source-first-offset"
LAST_OFFSET: Final = "kp-source-last-offset"

CACHED_ID_LENGTH: Final = 256
"""Characters of a trace id that the cache keeps for `nearest`. An id may be as long as a message; 1000 of those in
memory, and one in every output, would be a way to exhaust the worker."""

Headers = Sequence[tuple[str, bytes]]


class Fault(NamedTuple):
    """Why a record, or all that is left of a batch, cannot be taken as it is (found while it was read).

    `first_offset`: of the records that this one stands for; its own offset is their last. None: it stands for itself.
    """

    reason: Reason
    message: str
    first_offset: int | None = None


class SourceRecord(NamedTuple):
    """A record as it was read; `timestamp_ms` is None where it has none, `size` is its records.memory_size.

    A tuple, because one is made for every message. With a `fault` it becomes a dead letter, whatever it holds.
    """

    topic: str
    partition: int
    offset: int
    timestamp_ms: int | None
    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    size: int = 0
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class OutputRecord:
    """A record to publish; `kind` (accepted, rejected, dead_letter) names its topic."""

    kind: str
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]
    timestamp_ms: int | None


@dataclass(frozen=True, slots=True)
class ScoredTrace:
    """The verdict on one trace and everything that explains it.

    `sequence` and `vector` (unit length) say what entered the cache; None where there was no vector.
    `stream_time_ms` is the partition's stream time after this trace.
    """

    trace_id: str
    score: float
    accepted: bool
    threshold: float
    components: Components
    profile: str
    weights: Weights
    overrides: tuple[str, ...]
    nearest: Neighbour | None
    stream_time_ms: int
    sequence: int | None
    vector: Vector | None


class Comparison(NamedTuple):
    """A trace's vector (unit length), its nearest live neighbour, and the stream time at which they were compared."""

    vector: Vector | None
    nearest: Neighbour | None
    stream_time_ms: int


class PartitionScorer:
    """The state of one source partition: its novelty cache and its stream time.

    `ttl_ms` None means that entries do not expire. `threshold` (0..1) holds for every profile that has none of its
    own. `max_step_ms`: how far one trace may move stream time; None: any distance. Raises ValueError for settings out
    of range.
    """

    def __init__(
        self,
        max_elements: int = 1000,
        ttl_ms: int | None = 3_600_000,
        dimensions: int = 384,
        threshold: float = DEFAULT_THRESHOLD,
        profiles: Mapping[str, Profile] = PROFILES,
        max_step_ms: int | None = None,
    ) -> None:
        if not 0.0 <= threshold <= 1.0:
            raise ValueError(f"threshold must lie in 0..1, got {threshold}")
        if max_step_ms is not None and max_step_ms < 1:
            raise ValueError(f"max_step_ms must be at least 1, or None for any distance, got {max_step_ms}")
        self.cache = VectorCache(max_elements, dimensions, ttl_ms)
        self._threshold = threshold
        self._profiles = profiles
        self._max_step_ms = max_step_ms
        self._stream_time_ms: int | None = None

    @property
    def stream_time_ms(self) -> int | None:
        """The greatest event time seen (ms since 1970), as far as it may move; None before the first trace."""
        return self._stream_time_ms

    def score(self, trace: ReasoningTrace, vector: npt.ArrayLike | None, event_time_ms: int) -> ScoredTrace:
        """Score the partition's next trace and add its vector to the cache, whatever the verdict.

        `vector`: shape (dimensions,), any length, or None where no embedder is configured. Raises ValueError for a
        wrong dimension or values that are not finite; the state is then unchanged.
        """
        return self.decide(trace, self.compare(vector, event_time_ms))

    def compare(self, vector: npt.ArrayLike | None, event_time_ms: int) -> Comparison:
        """Do the first half of `score`: move stream time on and find the nearest live entry (raises ValueError)."""
        query = None if vector is None else unit(vector, self.cache.dimensions)
        time, step = self._stream_time_ms, self._max_step_ms
        if time is None:  # the first trace: there is nothing to measure a step from
            time = event_time_ms
        elif event_time_ms > time:
            time = event_time_ms if step is None else min(event_time_ms, time + step)
        self._stream_time_ms = time
        now = self.cache.advance(time)
        return Comparison(query, None if query is None else self.cache.nearest_unit(query), now)

    def decide(self, trace: ReasoningTrace, comparison: Comparison) -> ScoredTrace:
        """Do the second half of `score`: the score, the verdict, and the vector into the cache."""
        query, nearest, now = comparison
        novelty = NEUTRAL_NOVELTY if nearest is None else 1.0 - nearest.similarity
        result = score_trace(trace, novelty, self._profiles)
        sequence = None
        if query is not None:
            sequence = self.cache.add_unit(query, now, cached_id(trace))

        threshold = self._profiles[result.profile].threshold
        if threshold is None:
            threshold = self._threshold
        return ScoredTrace(
            trace_id=trace.id,
            score=result.score,
            accepted=result.score >= threshold,
            threshold=threshold,
            components=result.components,
            profile=result.profile,
            weights=result.weights,
            overrides=result.overrides,
            nearest=nearest,
            stream_time_ms=now,
            sequence=sequence,
            vector=query,
        )

    def restore(self, entries: Iterable[tuple[int, int, str, Vector]], stream_time_ms: int | None = None) -> None:
        """Rebuild the state from (sequence, stream time in ms, trace id, unit vector) of committed traces.

        Careful: entries at or past the committed source offset must not be among them, their traces come again.
        `stream_time_ms` is the committed stream time, where it is known.
        """
        self.cache.restore(entries, stream_time_ms)
        self._stream_time_ms = self.cache.now_ms


class EmbedderIdentity(msgspec.Struct, frozen=True, omit_defaults=True):
    """What made an embedding: two vectors may only be compared when these agree, `runtime` apart.

    `long_texts`: what was done with a text beyond `max_tokens`; not written where it was cut.
    """

    name: str
    weights_sha256: str
    dimensions: int
    max_tokens: int
    runtime: str
    precision: str
    long_texts: str = "cut"

    def key(self) -> str:
        """Return the identity as one string, without the runtime (runtimes agree to 1e-6 in fp32)."""
        key = f"{self.name}:{self.weights_sha256}:{self.dimensions}:{self.max_tokens}:{self.precision}"
        return key if self.long_texts == "cut" else f"{key}:{self.long_texts}"


class _Source(msgspec.Struct, frozen=True):
    topic: str
    partition: int
    offset: int


class _Embedding(msgspec.Struct, frozen=True):
    """A vector for readers that fill a vector database; `data` is base64 of little-endian float32."""

    dtype: str
    dimensions: int
    data: str


class _Scoring(msgspec.Struct, frozen=True):
    """The `scoring` object of an output document (schemas/scored-trace.schema.json)."""

    score: float
    decision: str
    threshold: float
    profile: str
    weights: Weights
    components: Components
    overrides: tuple[str, ...]
    nearest: dict[str, object] | None
    stream_time: str
    embedder: EmbedderIdentity | None
    source: _Source
    worker_version: str
    embedding: _Embedding | msgspec.UnsetType = msgspec.UNSET


_encoder = msgspec.json.Encoder()
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def cached_id(trace: ReasoningTrace) -> str:
    """Return the id under which the cache and the changelog know a trace."""
    return trace.id[:CACHED_ID_LENGTH]


def event_time_ms(trace: ReasoningTrace, record_timestamp_ms: int | None, source: str = "created_at") -> int:
    """Return the trace's event time, ms since 1970.

    `created_at`: the trace's own, but never later than the record's timestamp, so that one trace dated 2099 cannot
    expire every entry; `record`: the record's timestamp alone, where it has one.
    """
    if record_timestamp_ms is None or record_timestamp_ms < 0:
        return created_at_ms(trace)
    if source == "record":
        return record_timestamp_ms
    return min(created_at_ms(trace), record_timestamp_ms)


def rfc3339(ms: int) -> str:
    """Write a time (ms since 1970) as RFC 3339 in UTC, with milliseconds; clamped to the years 1..9999."""
    seconds, milliseconds = divmod(ms, 1000)
    return f"{_rfc3339_seconds(seconds)}.{milliseconds:03d}Z"


@functools.lru_cache(maxsize=1024)  # stream time moves slowly: most traces share their second with the one before
def _rfc3339_seconds(seconds: int) -> str:
    try:
        moment = _EPOCH + timedelta(seconds=seconds)
    except OverflowError:
        moment = datetime.min if seconds < 0 else datetime.max
    return moment.replace(microsecond=0, tzinfo=None).isoformat()


def scored_record(
    record: SourceRecord, scored: ScoredTrace, embedder: EmbedderIdentity | None, *, embedding: bool = False
) -> OutputRecord:
    """Build the accepted or rejected record: the document with its score, same key, headers passed on.

    `embedding`: with the vector (KP_OUTPUT_EMBEDDING), as it is in the cache.

    Holds no wall clock and no random id: the same input from the same state gives the same bytes.
    """
    decision = ACCEPTED if scored.accepted else REJECTED
    nearest: dict[str, object] | None = None
    if scored.nearest is not None:
        nearest = {"id": scored.nearest.trace_id, "similarity": scored.nearest.similarity}
    scoring = _Scoring(
        score=scored.score,
        decision=decision,
        threshold=scored.threshold,
        profile=scored.profile,
        weights=scored.weights,
        components=scored.components,
        overrides=scored.overrides,
        nearest=nearest,
        stream_time=rfc3339(scored.stream_time_ms),
        embedder=embedder,
        source=_Source(record.topic, record.partition, record.offset),
        worker_version=__version__,
        embedding=_embedding(scored.vector) if embedding and scored.vector is not None else msgspec.UNSET,
    )
    headers = [header for header in record.headers if header[0] not in ("kp-score", "kp-decision")]
    headers.append(("kp-score", _encoder.encode(scored.score)))
    headers.append(("kp-decision", decision.encode()))
    value = splice(record.value or b"", scored.score, _encoder.encode(scoring))
    return OutputRecord(decision, record.key, value, headers, record.timestamp_ms)


def _embedding(vector: Vector) -> _Embedding:
    return _Embedding("float32", len(vector), b64encode(vector.astype("<f4").tobytes()).decode())


def embedding_bytes(dimensions: int) -> int:
    """Return how many bytes the embedding adds to an output document."""
    return len(_encoder.encode(_embedding(np.zeros(dimensions, np.float32)))) + len(b',"embedding":')


def embedding_failed(error: BaseException) -> InvalidTrace:
    """Return the dead letter's reason for a text on which the model failed alone."""
    return InvalidTrace(
        Reason.EMBEDDING_FAILED,
        "",
        f"the model raised {type(error).__name__} on this trace's text; other texts work. "
        "Look at unusual characters in task.objective and the steps' content",
    )


def dead_letter(record: SourceRecord, error: InvalidTrace) -> OutputRecord:
    """Build the dead letter: the original bytes, key and headers unchanged, plus headers that say what is wrong.

    One that stands for several records says which, first and last.
    """
    headers = [*record.headers]
    for name, value in (
        ("kp-error-reason", str(error.reason)),
        ("kp-error-path", error.path),
        ("kp-error-message", error.message),
        ("kp-source-topic", record.topic),
        ("kp-source-partition", str(record.partition)),
        ("kp-source-offset", str(record.offset)),
        ("kp-source-timestamp", "" if record.timestamp_ms is None else str(record.timestamp_ms)),
        ("kp-worker-version", __version__),
    ):
        headers.append((name, value.encode("utf-8", "backslashreplace")))
    if record.fault is not None and record.fault.first_offset is not None:
        headers.append((FIRST_OFFSET, b"%d" % record.fault.first_offset))
        headers.append((LAST_OFFSET, b"%d" % record.offset))
    return OutputRecord(DEAD_LETTER, record.key, record.value, headers, record.timestamp_ms)

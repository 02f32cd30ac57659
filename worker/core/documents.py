"""Scored documents, as the worker writes them and as commands read them.

A command decodes the smallest struct that has what it needs. schemas/scored-trace.schema.json describes `Scoring`. No
wall clock and no random ids: the same input and state give the same bytes.
"""

import functools
from base64 import b64encode
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType

from worker.core.novelty import Vector
from worker.core.records import (
    ACCEPTED,
    REJECTED,
    Clean,
    EmbedderIdentity,
    OutputRecord,
    Screen,
    Screening,
    SourceRecord,
)
from worker.core.scoring import Components, Confidence, ScoredTrace, Weights
from worker.core.trace import Fraction, ReasoningTrace, splice
from worker.version import __version__

SCREEN_HEADER: Final = "kp-screen"
"""The screening rules that matched, comma-separated. Absent if none did, so that consumers can test its presence."""


_encoder = msgspec.json.Encoder()
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


PartitionNumber = Annotated[int, Meta(ge=0, lt=2**31)]
RecordOffset = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class RecordPlace(Struct, frozen=True):
    """The place of a record; as text, an argument of `kp-worker explain`."""

    topic: str
    partition: PartitionNumber
    offset: RecordOffset

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}:{self.offset}"


class Nearest(Struct, frozen=True):
    """The nearest earlier trace and its cosine similarity."""

    id: str
    similarity: float

    def __str__(self) -> str:
        return f"{self.id}, similarity {self.similarity:.4f}"


class StoredVector(Struct, frozen=True):
    """A vector for readers that fill a vector database."""

    dtype: str
    dimensions: int
    data: str  # base64 of little-endian float32


class Scoring(Struct, frozen=True, kw_only=True):
    """The `scoring` object as the worker writes it."""

    score: Fraction
    decision: str
    threshold: Fraction
    profile: str
    weights: Weights
    components: Components
    overrides: tuple[str, ...]
    nearest: Nearest | None
    stream_time: str  # RFC 3339
    embedder: EmbedderIdentity | None
    source: RecordPlace
    worker_version: str
    embedding: StoredVector | UnsetType = UNSET
    redactions: dict[str, int] | UnsetType = UNSET
    screen: Screening | UnsetType | None = UNSET
    confidence: Confidence | UnsetType | None = UNSET


# -- what commands read of it; documents by 0.2.0 and later have all of these fields


class ReadScoring(Scoring, frozen=True, kw_only=True):
    """The whole object, for commands that compute the score again."""

    stream_time: Annotated[datetime, Meta(tz=True)]  # type: ignore[assignment]
    screen: Screening | None = None
    confidence: Confidence | None = None

    @property
    def stream_time_ms(self) -> int:
        """Stream time, ms since 1970."""
        return (self.stream_time - _EPOCH) // timedelta(milliseconds=1)


class ScoredDocument(ReasoningTrace, frozen=True, kw_only=True):
    """An output document: the trace and its `scoring` object."""

    scoring: ReadScoring

    @property
    def used(self) -> float | None:
        """The outcome confidence behind the score; None: the stated one."""
        return None if self.scoring.confidence is None else self.scoring.confidence.used


class ScoringSource(Struct, frozen=True):
    """The place of the source record."""

    source: RecordPlace


class ScoredId(Struct):
    """A document's id and its source record."""

    id: str
    scoring: ScoringSource


class PartitionPlace(Struct, frozen=True):
    """A place on a topic that is known."""

    partition: PartitionNumber
    offset: RecordOffset


class UsedConfidence(Struct, frozen=True):
    """The outcome confidence behind a score."""

    used: float | None = None


class ScoringVerdict(Struct, frozen=True):
    """What a verdict repeats of the score that it judges."""

    source: RecordPlace
    decision: str | None = None
    score: float | None = None
    confidence: UsedConfidence | None = None


# -- how they are made


def rfc3339(ms: int) -> str:
    """Return a time (ms since 1970) as RFC 3339 in UTC with milliseconds, clamped to the years 1..9999."""
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
    record: SourceRecord,
    scored: ScoredTrace,
    embedder: EmbedderIdentity | None,
    *,
    embedding: bool = False,
    clean: Clean | None = None,
    screen: Screen | None = None,
) -> OutputRecord:
    """Build the accepted or rejected record: the document with its score, the same key, the source's headers and ours.

    `embedding`: include the vector (KP_OUTPUT_EMBEDDING). `clean` redacts the document (KP_REDACT; None: no redaction).
    `screen` screens the document as published (KP_SCREEN; None: no screening).
    """
    decision = ACCEPTED if scored.accepted else REJECTED
    value, redactions = record.value or b"", None
    if clean is not None:
        value, redactions = clean(value)
    # Screened as published: without an earlier `scoring`, and with one member of each duplicate name.
    screened = None if screen is None else screen(splice(value, scored.score, b"{}"))
    scoring = Scoring(
        score=scored.score,
        decision=decision,
        threshold=scored.threshold,
        profile=scored.profile,
        weights=scored.weights,
        components=scored.components,
        overrides=scored.overrides,
        nearest=None if scored.nearest is None else Nearest(*scored.nearest),
        stream_time=rfc3339(scored.stream_time_ms),
        embedder=embedder,
        source=RecordPlace(record.topic, record.partition, record.offset),
        worker_version=__version__,
        embedding=_embedding(scored.vector) if embedding and scored.vector is not None else UNSET,
        redactions=UNSET if redactions is None else redactions,
        screen=UNSET if screened is None else screened,
        confidence=UNSET if scored.confidence is None else scored.confidence,
    )
    own = ("kp-score", "kp-decision") if screened is None else ("kp-score", "kp-decision", SCREEN_HEADER)
    headers = [header for header in record.headers if header[0] not in own]
    headers.append(("kp-score", _encoder.encode(scored.score)))
    headers.append(("kp-decision", decision.encode()))
    matched = () if screened is None else screened.rules
    if matched:
        headers.append((SCREEN_HEADER, ",".join(matched).encode()))
    value = splice(value, scored.score, _encoder.encode(scoring))
    return OutputRecord(decision, record.key, value, headers, record.timestamp_ms, redactions, matched)


def _embedding(vector: Vector) -> StoredVector:
    return StoredVector("float32", len(vector), b64encode(vector.astype("<f4").tobytes()).decode())


def embedding_bytes(dimensions: int) -> int:
    """Return how many bytes the embedding adds to an output document."""
    return len(_encoder.encode(_embedding(np.zeros(dimensions, np.float32)))) + len(b',"embedding":')

"""The `scoring` object of a scored document: as the worker writes it, and the parts of it that commands read.

A command decodes the smallest struct that has what it needs. schemas/scored-trace.schema.json describes `Scoring`.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from worker.core.records import EmbedderIdentity, Screening
from worker.core.scoring import Components, Confidence, Weights
from worker.core.trace import Fraction, ReasoningTrace

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


class ScoringDecision(Struct, frozen=True):
    """The place of the source record on its topic, and the decision."""

    source: PartitionPlace
    decision: str | None = None
    score: float | None = None


class UsedConfidence(Struct, frozen=True):
    """The outcome confidence behind a score."""

    used: float | None = None


class ScoringVerdict(Struct, frozen=True):
    """What a verdict repeats of the score that it judges."""

    source: RecordPlace
    decision: str | None = None
    score: float | None = None
    confidence: UsedConfidence | None = None

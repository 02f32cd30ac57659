"""A scored document of the accepted or rejected topic, for commands that compute its score again."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Final

from msgspec import Meta, Struct

from worker.core.records import EmbedderIdentity
from worker.core.scoring import Components, Weights
from worker.core.trace import ReasoningTrace

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_Fraction = Annotated[float, Meta(ge=0, le=1)]


class Nearest(Struct, frozen=True):
    """The nearest earlier trace and its cosine similarity."""

    id: str
    similarity: float

    def __str__(self) -> str:
        return f"{self.id}, similarity {self.similarity:.4f}"


class RecordPlace(Struct, frozen=True):
    """The place of a record; as text, an argument of `kp-worker explain`."""

    topic: str
    partition: Annotated[int, Meta(ge=0, lt=2**31)]
    offset: Annotated[int, Meta(ge=0, le=2**63 - 1)]

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}:{self.offset}"


class DocumentScreening(Struct, frozen=True):
    """The `scoring.screen` object."""

    rules: list[str]


class DocumentConfidence(Struct, frozen=True):
    """The `scoring.confidence` object, present with KP_CONFIDENCE=record."""

    stated: _Fraction
    used: _Fraction
    judged: Annotated[int, Meta(ge=0)]
    succeeded: Annotated[float, Meta(ge=0)]


class DocumentScoring(Struct, frozen=True):
    """The `scoring` object."""

    score: _Fraction
    decision: str
    threshold: _Fraction
    profile: str
    weights: Weights
    components: Components
    overrides: list[str]
    nearest: Nearest | None
    stream_time: Annotated[datetime, Meta(tz=True)]
    embedder: EmbedderIdentity | None
    source: RecordPlace
    worker_version: str
    screen: DocumentScreening | None = None
    confidence: DocumentConfidence | None = None

    @property
    def stream_time_ms(self) -> int:
        """Stream time, ms since 1970."""
        return (self.stream_time - _EPOCH) // timedelta(milliseconds=1)


class ScoredDocument(ReasoningTrace, frozen=True, kw_only=True):
    """An output document: the trace and its `scoring` object."""

    scoring: DocumentScoring

    @property
    def used(self) -> float | None:
        """The outcome confidence behind the score; None: the stated one."""
        return None if self.scoring.confidence is None else self.scoring.confidence.used

"""What report and whatif read of an output document: its `scoring` object (schemas/scored-trace.schema.json).

Must not live here: the rows that are made of it (scored_rows.py), where documents come from (scored_input.py).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final

from msgspec import Meta, Struct

from worker.core.identity import EmbedderIdentity
from worker.core.scoring import Components, Weights

TakeDocument = Callable[[bytes | None, str, int], None]
"""Takes an output document, where it was found, and its record's timestamp (ms; 0: it comes from a file)."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_Fraction = Annotated[float, Meta(ge=0, le=1)]


class NearestTrace(Struct, frozen=True):
    """The nearest earlier trace and its cosine similarity."""

    id: str
    similarity: float


class TraceSource(Struct, frozen=True):
    """Where the trace was read."""

    topic: str
    partition: Annotated[int, Meta(ge=0, lt=2**31)]
    offset: Annotated[int, Meta(ge=0, le=2**63 - 1)]


class DocumentScoring(Struct, frozen=True):
    """The `scoring` object."""

    score: _Fraction
    decision: str
    threshold: _Fraction
    profile: str
    weights: Weights
    components: Components
    overrides: list[str]
    nearest: NearestTrace | None
    stream_time: Annotated[datetime, Meta(tz=True)]
    embedder: EmbedderIdentity | None
    source: TraceSource
    worker_version: str

    @property
    def stream_time_ms(self) -> int:
        """Stream time, ms since 1970."""
        return (self.stream_time - _EPOCH) // timedelta(milliseconds=1)

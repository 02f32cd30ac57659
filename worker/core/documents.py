"""The documents: the output record of a scored trace or a dead letter, byte by byte.

Lives here: keys, headers and values of every output record. Must not live here: decisions (scorer.py), fitting a
dead letter to its topic (fitting.py), Kafka clients, clock, environment, logging.

No wall clock and no random id: the same input from the same state gives the same bytes.
"""

from __future__ import annotations

import functools
from base64 import b64encode
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec
import numpy as np

from worker.core.identity import EmbedderIdentity
from worker.core.novelty import Neighbour, Vector
from worker.core.records import ACCEPTED, DEAD_LETTER, REJECTED, OutputRecord, SourceRecord
from worker.core.redaction import redact_json
from worker.core.scorer import ScoredTrace
from worker.core.scoring import Components, Weights
from worker.core.trace import InvalidTrace, Reason, splice
from worker.version import __version__

FIRST_OFFSET: Final = "kp-source-first-offset"
LAST_OFFSET: Final = "kp-source-last-offset"


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
    redactions: dict[str, int] | msgspec.UnsetType = msgspec.UNSET


_encoder = msgspec.json.Encoder()
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def rfc3339(ms: int) -> str:
    """Return a time (ms since 1970) as RFC 3339 in UTC with milliseconds, clamped to the years 1..9999."""
    seconds, milliseconds = divmod(ms, 1000)
    return f"{_rfc3339_seconds(seconds)}.{milliseconds:03d}Z"


@functools.lru_cache(maxsize=1024)  # stream time moves slowly: most traces have the same second as the one before
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
    redact: str = "off",
) -> OutputRecord:
    """Build the accepted or rejected record: the document with its score, the same key, the source's headers and ours.

    `embedding`: include the vector (KP_OUTPUT_EMBEDDING), as it is in the cache. `redact` (KP_REDACT): off, accepted or
    all, the decisions whose documents are redacted.
    """
    decision = ACCEPTED if scored.accepted else REJECTED
    value, redactions = record.value or b"", None
    if redact in ("all", decision):
        value, redactions = redact_json(value)
    scoring = _Scoring(
        score=scored.score,
        decision=decision,
        threshold=scored.threshold,
        profile=scored.profile,
        weights=scored.weights,
        components=scored.components,
        overrides=scored.overrides,
        nearest=None if scored.nearest is None else _nearest(scored.nearest),
        stream_time=rfc3339(scored.stream_time_ms),
        embedder=embedder,
        source=_Source(record.topic, record.partition, record.offset),
        worker_version=__version__,
        embedding=_embedding(scored.vector) if embedding and scored.vector is not None else msgspec.UNSET,
        redactions=msgspec.UNSET if redactions is None else redactions,
    )
    headers = [header for header in record.headers if header[0] not in ("kp-score", "kp-decision")]
    headers.append(("kp-score", _encoder.encode(scored.score)))
    headers.append(("kp-decision", decision.encode()))
    value = splice(value, scored.score, _encoder.encode(scoring))
    return OutputRecord(decision, record.key, value, headers, record.timestamp_ms, redactions)


def _nearest(neighbour: Neighbour) -> dict[str, object]:
    nearest: dict[str, object] = {"id": neighbour.trace_id, "similarity": neighbour.similarity}
    if neighbour.partition is not None:  # in the novelty scope `group` alone
        nearest |= {"partition": neighbour.partition, "offset": neighbour.offset}
    return nearest


def _embedding(vector: Vector) -> _Embedding:
    return _Embedding("float32", len(vector), b64encode(vector.astype("<f4").tobytes()).decode())


def embedding_bytes(dimensions: int) -> int:
    """Return how many bytes the embedding adds to an output document."""
    return len(_encoder.encode(_embedding(np.zeros(dimensions, np.float32)))) + len(b',"embedding":')


def embedding_failed(error: BaseException) -> InvalidTrace:
    """Return the reason of a dead letter on whose text alone the model failed."""
    return InvalidTrace(
        Reason.EMBEDDING_FAILED,
        "",
        f"the model failed with {type(error).__name__} on this text, but not on others. "
        "Look for unusual characters in task.objective and the steps' content",
    )


def dead_letter(record: SourceRecord, error: InvalidTrace) -> OutputRecord:
    """Build the dead letter: the original bytes, key and headers unchanged, plus headers with the reason.

    A dead letter that stands for several records has the offsets of the first and the last one.
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

"""What the worker publishes: scored documents, as they are written and as commands read them, and dead letters.

A command decodes the smallest struct that has what it needs. schemas/scored-trace.schema.json describes `Scoring`. No
wall clock and no random ids: the same input and state give the same bytes.
"""

from __future__ import annotations

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
    BATCH_OVERHEAD,
    DEAD_LETTER,
    NO_FAULT_OF_A_RECORD,
    REJECTED,
    Clean,
    EmbedderIdentity,
    OutputRecord,
    Screen,
    Screening,
    SourceRecord,
    encoded_size,
    exact_size,
    raised,
)
from worker.core.scoring import Components, Confidence, ScoredTrace, Weights
from worker.core.trace import Fraction, InvalidTrace, Reason, ReasoningTrace, splice
from worker.version import __version__

FIRST_OFFSET: Final = "kp-source-first-offset"
LAST_OFFSET: Final = "kp-source-last-offset"

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


def embedding_failed(error: BaseException) -> InvalidTrace:
    """Return the error of a dead letter: the model failed on its text, but not on others."""
    return InvalidTrace(
        Reason.EMBEDDING_FAILED,
        "",
        f"the model failed with {type(error).__name__} on this text, but not on others. "
        "Look for unusual characters in task.objective and the steps' content",
    )


def evaluation_failed(error: Exception) -> InvalidTrace:
    """Return the error of a dead letter on which the worker failed, with the worker's error as its cause.

    Raises the worker's error if no record can have caused it (NO_FAULT_OF_A_RECORD).
    """
    if isinstance(error, NO_FAULT_OF_A_RECORD):
        raise error
    failed = InvalidTrace(
        Reason.EVALUATION_FAILED,
        "",
        f"the worker fails on this record with {raised(error)}. That is a bug: please report it, with the record if "
        "you may, and redrive it once a version fixes it",
    )
    failed.__cause__ = error
    return failed


def dead_letter(record: SourceRecord, error: InvalidTrace) -> OutputRecord:
    """Build the dead letter: value, key and headers unchanged, plus headers with the reason and the record's place."""
    headers = [*record.headers, *error_headers(record, error.reason, error.path, error.message)]
    if record.fault is not None and record.fault.first_offset is not None:
        headers.append((FIRST_OFFSET, b"%d" % record.fault.first_offset))
        headers.append((LAST_OFFSET, b"%d" % record.offset))
    return OutputRecord(DEAD_LETTER, record.key, record.value, headers, record.timestamp_ms)


def error_headers(record: SourceRecord, reason: str, path: str, message: str, **more: str) -> list[Header]:
    """Return the headers that say why a record is refused, and where it is. `more`: others, without their kp-error-."""
    texts = {
        "kp-error-reason": reason,
        "kp-error-path": path,
        "kp-error-message": message,
        **{f"kp-error-{name}": text for name, text in more.items()},
        "kp-source-topic": record.topic,
        "kp-source-partition": str(record.partition),
        "kp-source-offset": str(record.offset),
        "kp-source-timestamp": "" if record.timestamp_ms is None else str(record.timestamp_ms),
        "kp-worker-version": __version__,
    }
    return [(name, text.encode("utf-8", "backslashreplace")) for name, text in texts.items()]


TRUNCATED_HEADER: Final = "kp-error-truncated"  # how much of the value was kept; only if it was truncated

DROPPED_HEADER: Final = "kp-error-dropped"
"""Which parts of the source record were dropped besides: `headers`, `key`, each with its size."""

SOURCE_KEY_HEADER: Final = "kp-source-key"
"""`null` if the source record has no key, and the dead letter was given one because its topic is compacted."""

FIRST_OF_OURS: Final = "kp-error-reason"
"""The worker's own headers start at the last header of this name; a producer may have used the name too."""

Header = tuple[str, bytes]


def fits(record: OutputRecord, limit: int) -> bool:
    """Return whether a topic with max.message.bytes `limit` accepts the record; exact only near the limit."""
    if len(record.key or b"") + len(record.value or b"") + 2 * len(record.headers) > limit:
        return False
    if encoded_size(record.key, record.value, record.headers) + BATCH_OVERHEAD <= limit:
        return True
    return exact_size(record.key, record.value, record.headers) <= limit


def fit_dead_letter(record: OutputRecord, limit: int) -> OutputRecord:
    """Return the dead letter reduced to a topic's max.message.bytes (`limit`); unchanged if it fits.

    First the value is truncated, then the original headers are dropped, then the key. A header reports each step, and
    the value keeps as many bytes as fit.
    """
    if fits(record, limit):
        return record
    original, own = split(record.headers)
    lost: list[str] = []
    fitted = _cut(record, record.key, record.headers, limit)
    if fitted is None and original:
        lost.append(_about_headers(original))
        fitted = _cut(record, record.key, [*own, _dropped(lost)], limit)
    if fitted is None and record.key is not None:
        lost.append(_about_key(record.key))
        fitted = _cut(record, None, [*own, _dropped(lost)], limit)
    return last_resort(record, limit, key=None) if fitted is None else fitted


def source_place(record: OutputRecord) -> bytes:
    """Return the source record's topic/partition/offset, a key unique to this dead letter."""
    headers = dict(record.headers)
    return b"/".join((headers["kp-source-topic"], headers["kp-source-partition"], headers["kp-source-offset"]))


def last_resort(record: OutputRecord, limit: int, key: bytes | None) -> OutputRecord:
    """Return a dead letter that no topic has a reason to refuse: no value, no timestamp, only our headers.

    `key` is `source_place(record)` if the topic is compacted. The value is empty rather than null, which would delete
    the key there.
    """
    original, own = split(record.headers)
    lost = [_about_headers(original)] if original else []
    if record.key is not None:
        lost.append(_about_key(record.key))
    elif key is not None:
        own = [*own, (SOURCE_KEY_HEADER, b"null")]
    headers = [*own, *([_dropped(lost)] if lost else []), truncated_header(0, record.value)]
    for name in ("kp-error-message", "kp-error-path"):  # too long only for a topic that accepts less than about 2 kB
        over = exact_size(key, b"", headers) - limit
        if over > 0:
            headers = [(n, _shortened(content, over) if n == name else content) for n, content in headers]
    return OutputRecord(record.kind, key, b"", headers, None)


def readdressed(record: OutputRecord) -> OutputRecord:
    """Return the dead letter with `source_place` as its key, for a topic that accepts no null key."""
    return OutputRecord(
        record.kind,
        source_place(record),
        record.value,
        [*record.headers, (SOURCE_KEY_HEADER, b"null")],
        record.timestamp_ms,
    )


def split(headers: list[Header]) -> tuple[list[Header], list[Header]]:
    """Return a dead letter's headers in two lists: the source record's, and the worker's own."""
    for index in range(len(headers) - 1, -1, -1):
        if headers[index][0] == FIRST_OF_OURS:
            return headers[:index], headers[index:]
    return headers, []


def _cut(record: OutputRecord, key: bytes | None, headers: list[Header], limit: int) -> OutputRecord | None:
    whole = OutputRecord(record.kind, key, record.value, headers, record.timestamp_ms)
    if fits(whole, limit):
        return whole
    if not record.value or len(key or b"") + 2 * len(headers) > limit:
        return None
    size = len(record.value)
    varints = 8  # two, the value's length and the record's, may grow with the value by so many bytes
    room = limit - varints - exact_size(key, b"", [*headers, truncated_header(size, record.value)])
    if room < 0:
        return None
    value = record.value[:room]
    headers = [*headers, truncated_header(len(value), record.value)]
    return OutputRecord(record.kind, key, value, headers, record.timestamp_ms)


def truncated_header(kept: int, value: bytes | None) -> Header:
    """Return the header that says how much of a value was kept."""
    return TRUNCATED_HEADER, b"%d of %d bytes kept" % (kept, len(value or b""))


def _dropped(lost: list[str]) -> Header:
    return DROPPED_HEADER, ", ".join(lost).encode()


def _about_headers(headers: list[Header]) -> str:
    size = sum(len(name.encode()) + len(content or b"") for name, content in headers)
    return f"headers ({len(headers)} with {size} bytes)"


def _about_key(key: bytes) -> str:
    return f"key ({len(key)} bytes)"


def _shortened(content: bytes, over: int) -> bytes:
    kept = content[: max(0, len(content) - over)]
    return kept.decode("utf-8", "ignore").encode()

"""Verdicts: control records, signed with a judge's key, that say how a trace's task turned out.

A verdict is signed for one record: the topic's id (a recreated topic has a new one), partition and offset of its trace.
It is not signed for an offset of its own, so it can be redriven. What a copy of it changes, track_record.py says.

Control records share the source topic with the traces because a replay loses the order between two topics. They are
signed because many clients may write there. Verdicts are the only kind.
"""

import functools
import hashlib
import hmac
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from worker.core.documents import RecordOffset, ScoringVerdict
from worker.core.novelty import CACHED_ID_LENGTH
from worker.core.records import JUDGED, Headers, OutputRecord, SourceRecord
from worker.core.trace import EARLIEST_MS, LATEST_MS, InvalidTrace, Reason
from worker.version import __version__

# -- control records: their headers and signatures

CONTROL_HEADER: Final = "kp-control"
SIGNATURE_HEADER: Final = "kp-control-signature"  # the signature: HMAC-SHA256 of the exact value, 64 hexadecimal digits

VERDICT: Final = b"verdict"

Judges = Mapping[str, Sequence[bytes]]  # the keys of each judge, by name


def control_headers(body: bytes, key: bytes) -> list[tuple[str, bytes]]:
    """Return the headers of a verdict: its kind of control record, and its signature."""
    return [(CONTROL_HEADER, VERDICT), (SIGNATURE_HEADER, _signer(key)(body))]


def control_kind(headers: Headers) -> bytes | None:
    """Return the kind of control record that the headers name, known or not; None for any other record."""
    return next((content or b"" for name, content in headers if name == CONTROL_HEADER), None)


def bad_control(message: str) -> InvalidTrace:
    """Return why a control record must not be honoured."""
    return InvalidTrace(Reason.BAD_CONTROL, "", message)


@functools.lru_cache(64)
def _signer(key: bytes) -> Callable[[bytes], bytes]:
    """Return HMAC-SHA256 with a key (RFC 2104). Copying two prepared hashes takes a sixth of hmac.digest's time."""
    padded = (key if len(key) <= 64 else hashlib.sha256(key).digest()).ljust(64, b"\0")  # a block of SHA-256
    inner_start, outer_start = (hashlib.sha256(bytes(byte ^ pad for byte in padded)) for pad in (0x36, 0x5C))

    def sign(body: bytes) -> bytes:
        inner, outer = inner_start.copy(), outer_start.copy()
        inner.update(body)
        outer.update(inner.digest())
        return outer.hexdigest().encode()

    return sign


# -- verdicts

MILLION: Final = 1_000_000  # successes are kept in millionths, so that sums are exact in any order

_Id = Annotated[str, Meta(min_length=1, max_length=CACHED_ID_LENGTH)]
_Name = Annotated[str, Meta(max_length=CACHED_ID_LENGTH)]
JudgeName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._@:/-]{1,64}(?![\s\S])")]


class Verdict(Struct, frozen=True, forbid_unknown_fields=True):
    """The value of a verdict (schemas/verdict.schema.json)."""

    version: Literal[1]
    trace_id: _Id
    agent_id: _Name
    task_domain: _Id
    success: Annotated[float, Meta(ge=0, le=1)]
    judge: JudgeName
    issued_at: Annotated[datetime, Meta(tz=True)]
    topic: Annotated[str, Meta(min_length=1, max_length=249)]
    topic_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{22}$")]
    partition: Annotated[int, Meta(ge=0)]
    offset: RecordOffset | None = None  # of the trace's record; None: signed by an earlier build, about the id
    # From the scored document that the verdict was made from; null without one.
    score: Annotated[float, Meta(ge=0, le=1)] | None = None
    decision: Literal["accepted", "rejected"] | None = None
    used: Annotated[float, Meta(ge=0, le=1)] | None = None  # the confidence that the score was computed with

    @property
    def millionths(self) -> int:
        """The success, in millionths."""
        return round(self.success * MILLION)


class Ruling(NamedTuple):
    """A verdict and its effect."""

    verdict: Verdict
    counts: bool  # False: a verdict that was issued later counts already
    used: float  # the agent's confidence in the domain after the verdict


class _Metadata(Struct):
    task_domain: str
    agent_id: str = ""


class _Judged(Struct):
    success: bool | float
    judge: str


class _Fields(_Judged):
    """The fields that a verdict is made from."""

    trace_id: str
    agent_id: str
    task_domain: str
    partition: int
    offset: int | None = None
    topic: str | None = None


class _Document(_Judged):
    """A scored document. Its trace may have other members of any name; none of them affects the verdict."""

    id: str
    metadata: _Metadata
    scoring: ScoringVerdict


_GIVE: Final = (
    "a scored document with success and judge beside its fields, or trace_id, agent_id, task_domain, partition, "
    "offset, success and judge"
)
_decoder = msgspec.json.Decoder(Verdict)
_encoder = msgspec.json.Encoder(decimal_format="number")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)


def issued_ms(verdict: Verdict, record_timestamp_ms: int | None) -> int:
    """Return the issue time (ms since 1970) that orders a judge's verdicts on a trace: at most the record's own."""
    issued = (verdict.issued_at - _EPOCH) // _MS
    if record_timestamp_ms is not None and record_timestamp_ms >= 0:
        issued = min(issued, record_timestamp_ms)
    return min(max(issued, EARLIEST_MS), LATEST_MS)


class SignedVerdict(NamedTuple):
    """The record to write."""

    topic: str
    partition: int  # the only valid one: the verdict is signed for it
    key: bytes
    value: bytes
    headers: list[tuple[str, bytes]]


def sign_verdict(verdict: Verdict, key: bytes) -> SignedVerdict:
    """Return the record of a verdict, signed with a key of the judge (KP_VERDICT_KEY_FILE)."""
    body = _encoder.encode(verdict)
    return SignedVerdict(verdict.topic, verdict.partition, verdict.agent_id.encode(), body, control_headers(body, key))


def make_verdict(judged: Mapping[str, Any], *, topic: str, topic_id: str, issued_at: datetime) -> Verdict:
    """Make a verdict from a scored document with `success` and `judge` added, or from the fields alone.

    A document from an output topic names its record in `scoring.source`; without one, give trace_id, agent_id,
    task_domain, partition and offset. `issued_at`: with a time zone. Raises ValueError.
    """
    fields, scoring = _read(judged)
    if fields.offset is None:
        raise ValueError(f"Object missing required field `offset`: give {_GIVE}")
    if fields.topic not in (None, topic):
        raise ValueError(f"the trace was read from topic {fields.topic}, and the verdict would be written to {topic}")
    return _verdict(fields, scoring, topic, topic_id, issued_at)


def unsigned_verdict(judged: Mapping[str, Any], issued_at: datetime) -> Verdict:
    """Do the same for a verdict that is never written: it may be about any topic, or about a trace's id alone."""
    return _verdict(*_read(judged), "-", "-" * 22, issued_at)


def _read(judged: Mapping[str, Any]) -> tuple[_Fields, ScoringVerdict | None]:
    try:
        if "scoring" not in judged:
            return msgspec.convert(judged, _Fields), None
        document = msgspec.convert(judged, _Document)
    except msgspec.ValidationError as error:
        raise ValueError(f"{error}: give {_GIVE}") from None
    about, at = document.metadata, document.scoring.source
    fields = _Fields(
        document.success, document.judge, document.id, about.agent_id, about.task_domain, at.partition, at.offset,
        at.topic,
    )  # fmt: skip
    return fields, document.scoring


def _verdict(
    fields: _Fields, scoring: ScoringVerdict | None, topic: str, topic_id: str, issued_at: datetime
) -> Verdict:
    success = float(fields.success)
    if not (math.isfinite(success) and 0.0 <= success <= 1.0):
        raise ValueError(f"success must be true, false or a number from 0 to 1, got {fields.success}")
    confidence = scoring and scoring.confidence
    return msgspec.convert(
        {
            "version": 1,
            "trace_id": fields.trace_id[:CACHED_ID_LENGTH],
            "agent_id": fields.agent_id[:CACHED_ID_LENGTH],
            "task_domain": fields.task_domain[:CACHED_ID_LENGTH],
            "partition": fields.partition,
            "offset": fields.offset,
            "success": success,
            "judge": fields.judge,
            "issued_at": issued_at,
            "topic": topic,
            "topic_id": topic_id,
            "score": scoring and scoring.score,
            "decision": scoring and scoring.decision,
            "used": confidence and confidence.used,
        },
        Verdict,
    )


def read_verdict(record: SourceRecord, judges: Judges, topic_id: str | None) -> Verdict:
    """Return the verdict in a control record of a topic with this id. Raises InvalidTrace if it must not count."""
    body = record.value or b""
    if control_kind(record.headers) != VERDICT:
        raise bad_control(f"unknown control record: the header {CONTROL_HEADER} must be {VERDICT.decode()}")
    if not judges:
        raise bad_control("verdicts do not count here: set KP_VERDICT_KEY_FILE, the same for all workers of the group")
    try:
        verdict = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_control(f"the value is not a verdict (schemas/verdict.schema.json): {error}") from error
    keys = judges.get(verdict.judge)
    if keys is None:
        raise bad_control(f"KP_VERDICT_KEY_FILE has no key of judge {verdict.judge}")
    signatures = [content or b"" for name, content in record.headers if name == SIGNATURE_HEADER]
    if len(signatures) != 1:
        raise bad_control(f"a control record needs one header {SIGNATURE_HEADER}, got {len(signatures)}")
    if not any(hmac.compare_digest(_signer(key)(body), signatures[0]) for key in keys):
        raise bad_control(
            f"{SIGNATURE_HEADER} is not the signature of this value by the key of judge {verdict.judge} in "
            "KP_VERDICT_KEY_FILE"
        )
    if (verdict.topic, verdict.partition) != (record.topic, record.partition):
        raise bad_control("the verdict was signed for another topic or partition")
    if verdict.topic_id != topic_id:
        raise bad_control(
            f"the verdict was signed for another topic of this name, with the id {verdict.topic_id}. This one has the "
            f"id {topic_id}: it was recreated, or is on another cluster; run kp-worker verdict again"
        )
    if verdict.offset is not None and verdict.offset >= record.offset:
        raise bad_control(f"the verdict is about offset {verdict.offset}, which does not precede it")
    return verdict


def judged_record(record: SourceRecord, ruling: Ruling) -> OutputRecord:
    """Build a verdict's record for KP_JUDGED_TOPIC, without a timestamp, which the topic could refuse."""
    verdict, issued_at, latest_ms = ruling.verdict, ruling.verdict.issued_at, record.timestamp_ms
    if latest_ms is not None and 0 <= latest_ms < (issued_at - _EPOCH) // _MS:  # as `issued_ms` does
        issued_at = _EPOCH + latest_ms * _MS
    value = {
        "version": 1,
        "trace_id": verdict.trace_id,
        "agent_id": verdict.agent_id,
        "task_domain": verdict.task_domain,
        "trace_offset": verdict.offset,
        "verdict": {"success": verdict.success, "judge": verdict.judge, "issued_at": issued_at},
        "counts": ruling.counts,
        "used": {"then": verdict.used, "now": ruling.used},
        "score": verdict.score,
        "decision": verdict.decision,
        "source": {"topic": record.topic, "partition": record.partition, "offset": record.offset},
        "worker_version": __version__,
    }
    return OutputRecord(JUDGED, record.key, _encoder.encode(value), [], None)

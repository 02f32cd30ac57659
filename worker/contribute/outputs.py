"""The records that `contribute` writes: receipts, and traces that are refused for good.

Lives here: keys, headers and values, byte by byte. Pure. Must not live here: Kafka clients (publisher.py).

A refused record has the headers of a dead letter, with the accepted topic as its source: `redrive --refused` reads it.
Its value, key and headers are redacted, as what is posted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from worker.contribute.cleaning import STRICTEST, clean_bytes, clean_unit, clean_words, secret_in_id
from worker.contribute.unit import Refusal, Unit, decode_json
from worker.core.records import OutputRecord, SourceRecord
from worker.core.redaction import LEVELS
from worker.version import __version__

CONTRIBUTED: Final = "contributed"
REFUSED: Final = "refused"

KEPT_HEADERS: Final = ("kp-redriven-from", "kp-redrive-count")
"""Headers of `kp-worker redrive`: they hold a place and a number."""


class _Receipt(msgspec.Struct, frozen=True):
    """The value of a receipt. `status`: 201 it was posted, 200 the registry had it. `sha256`: of the body."""

    id: str
    status: int
    registry_time: str
    sha256: str
    source: Mapping[str, str | int]
    worker_version: str


def receipt(record: SourceRecord, unit: Unit, status: int, registry_time: str) -> OutputRecord:
    """Build the receipt of a trace that the registry holds."""
    source: dict[str, str | int] = {"topic": record.topic, "partition": record.partition, "offset": record.offset}
    value = msgspec.json.encode(_Receipt(unit.trace_id, status, registry_time, unit.sha256, source, __version__))
    return OutputRecord(CONTRIBUTED, unit.trace_id.encode(), value, [], None)


def refused_record(record: SourceRecord, refusal: Refusal) -> OutputRecord:
    """Build the record of a trace that is refused for good: the redacted record, and headers with the reason."""
    headers = [
        (name if name in KEPT_HEADERS else clean_words(name), value if name in KEPT_HEADERS else clean_bytes(value))
        for name, value in ((name, content or b"") for name, content in record.headers)
    ]
    for name, text in (
        ("kp-error-reason", refusal.reason),
        ("kp-error-path", refusal.path),
        ("kp-error-message", refusal.message),
        ("kp-error-status", "" if refusal.status is None else str(refusal.status)),
        ("kp-error-issues", refusal.issues or ""),
        ("kp-source-topic", record.topic),
        ("kp-source-partition", str(record.partition)),
        ("kp-source-offset", str(record.offset)),
        ("kp-source-timestamp", "" if record.timestamp_ms is None else str(record.timestamp_ms)),
        ("kp-worker-version", __version__),
    ):
        headers.append((name, text.encode("utf-8", "backslashreplace")))
    key = None if record.key is None else clean_bytes(record.key)
    # The time is that of sending: a topic may refuse an old one.
    return OutputRecord(REFUSED, key, _redacted(record.value), headers, None)


def _redacted(value: bytes | None) -> bytes | None:
    """Return the value of a record without anything secret; as text where it is no JSON object."""
    if value is None:
        return None
    try:
        document = decode_json(value)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        document = None
    if not isinstance(document, dict):
        return clean_bytes(value)
    level = _level(document)
    cleaned, _ = clean_unit(document, level)
    known_as = document.get("id")
    harmless = known_as is None or (isinstance(known_as, str) and not secret_in_id(known_as, level))
    if not harmless:
        cleaned["id"] = clean_unit({"value": known_as}, level)[0]["value"]
    return msgspec.json.encode(cleaned)


def _level(document: Mapping[str, Any]) -> str:
    metadata = document.get("metadata")
    level = metadata.get("privacy_level") if isinstance(metadata, dict) else None
    return level if isinstance(level, str) and level in LEVELS else STRICTEST

"""A dead letter as it is read from its topic: its source record, the reason, and its JSON form."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from worker.core.documents import DROPPED_HEADER, FIRST_OFFSET, SOURCE_KEY_HEADER, TRUNCATED_HEADER, split
from worker.core.records import REDRIVE_COUNT, SourceRecord
from worker.core.trace import Reason

REDRIVEN_FROM: Final = "kp-redriven-from"
WORKERS_OWN: Final = ("kp-error-", "kp-source-", "kp-worker-version", REDRIVEN_FROM, REDRIVE_COUNT)
"""Prefixes of the headers that a redriven record does not copy from its dead letter."""

NO_VALUE: Final[Mapping[str, str]] = {
    Reason.BATCH_TOO_LARGE: "publish them again from their origin, in smaller batches "
    "(docs/publishing.md), or raise the worker's KP_MAX_BATCH_BYTES and score them again (docs/operations.md)",
    Reason.UNREADABLE: "no client can read them there; publish them again from their origin",
}
"""What to do with dead letters that have no value, by reason."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A dead letter: of one source record, or of those from `first_offset` to `source_offset`."""

    record: SourceRecord
    reason: str
    path: str
    message: str
    source_topic: str
    source_partition: int
    source_offset: int
    timestamp_ms: int | None  # the source record's, if it has one
    redriven: int  # how often
    truncated: bool
    dropped: frozenset[str] = frozenset()
    null_key: bool = False
    first_offset: int | None = None

    @property
    def key(self) -> bytes | None:
        """Return the source record's key, if it was not dropped."""
        key: bytes | None = self.record.key
        return None if self.null_key else key

    @property
    def incomplete(self) -> bool:
        """Whether the source record contained more than this dead letter does."""
        return self.truncated or bool(self.dropped)

    def is_of(self, source: SourceRecord) -> bool:
        """Return whether this source record is the dead letter's own: everything that was kept must agree."""
        return (
            source.timestamp_ms == self.timestamp_ms
            and ("key" in self.dropped or source.key == self.key)
            and ("headers" in self.dropped or originals(source.headers) == self.original_headers())
            and (source.value or b"").startswith(self.record.value or b"")
        )

    @property
    def place(self) -> str:
        """Return topic/partition/offset of the dead letter itself."""
        return f"{self.record.topic}/{self.record.partition}/{self.record.offset}"

    @property
    def source(self) -> str:
        """Return topic/partition/offset of the source record."""
        return f"{self.source_topic}/{self.source_partition}/{self.source_offset}"

    @property
    def source_range(self) -> str:
        """Return the source record, or all records that the dead letter stands for, as text."""
        if self.first_offset in (None, self.source_offset):
            return f"offset {self.source_offset} of partition {self.source_partition}"
        return f"the offsets {self.first_offset} to {self.source_offset} of partition {self.source_partition}"

    def original_headers(self) -> list[tuple[str, bytes]]:
        """Return the headers of the source record, without those that the worker or redrive added."""
        return originals(self.record.headers)


def originals(headers: Sequence[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """Return the headers that neither the worker nor redrive added."""
    return [(name, value) for name, value in headers if not name.startswith(WORKERS_OWN)]


def read_dead_letter(record: SourceRecord) -> DeadLetter | None:
    """Read a record of the dead-letter topic; None if the worker did not write it."""
    ours = split(list(record.headers))[1]  # a producer may have sent headers with these names too
    headers = {name: (value or b"").decode("utf-8", "replace") for name, value in ours}
    try:
        timestamp = headers["kp-source-timestamp"]
        return DeadLetter(
            record=record,
            reason=headers["kp-error-reason"],
            path=headers["kp-error-path"],
            message=headers["kp-error-message"],
            source_topic=headers["kp-source-topic"],
            source_partition=int(headers["kp-source-partition"]),
            source_offset=int(headers["kp-source-offset"]),
            timestamp_ms=int(timestamp) if timestamp else None,
            redriven=_count(dict(record.headers).get(REDRIVE_COUNT, b"")),
            truncated=TRUNCATED_HEADER in headers,
            dropped=frozenset(part.split(" ")[0] for part in headers.get(DROPPED_HEADER, "").split(", ") if part),
            null_key=SOURCE_KEY_HEADER in headers,
            first_offset=int(headers[FIRST_OFFSET]) if FIRST_OFFSET in headers else None,
        )
    except (KeyError, ValueError):
        return None


def _count(text: bytes | None) -> int:
    return int(text) if text is not None and text.isdigit() and len(text) < 10 else 0


def as_json(letter: DeadLetter, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes]]) -> bytes:
    """Return a dead letter as one line of JSON with its content: `value`, or `value_base64` if it is not UTF-8."""
    document: dict[str, Any] = {
        "partition": letter.record.partition,
        "offset": letter.record.offset,
        "reason": letter.reason,
        "path": letter.path,
        "message": letter.message,
        "source": {
            "topic": letter.source_topic,
            "partition": letter.source_partition,
            "offset": letter.source_offset,
            "timestamp_ms": letter.timestamp_ms,
        },
        "redriven": letter.redriven,
        "headers": [[name, (content or b"").decode("utf-8", "replace")] for name, content in headers],
    }
    return msgspec.json.encode(document | _content("key", key) | _content("value", value))


def _content(name: str, content: bytes | None) -> dict[str, str | None]:
    if content is None:
        return {name: None}
    try:
        return {name: content.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(content).decode()}

"""Dead letters: why a record is refused, the record written for it, cut to its topic's limit, and reading it back."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from worker.core.records import (
    BATCH_OVERHEAD,
    DEAD_LETTER,
    NO_FAULT_OF_A_RECORD,
    REDRIVE_COUNT,
    OutputRecord,
    SourceRecord,
    encoded_size,
    exact_size,
    raised,
)
from worker.core.trace import InvalidTrace, Reason
from worker.version import __version__

FIRST_OFFSET: Final = "kp-source-first-offset"
LAST_OFFSET: Final = "kp-source-last-offset"

TRUNCATED_HEADER: Final = "kp-error-truncated"  # how much of the value was kept; only if it was truncated

DROPPED_HEADER: Final = "kp-error-dropped"
"""Which parts of the source record were dropped besides: `headers`, `key`, each with its size."""

SOURCE_KEY_HEADER: Final = "kp-source-key"
"""`null` if the source record has no key, and the dead letter was given one because its topic is compacted."""

Header = tuple[str, bytes]


# -- written


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
    headers = [*record.headers, (SOURCE_KEY_HEADER, b"null")]
    return replace(record, key=source_place(record), headers=headers)


def split(headers: list[Header]) -> tuple[list[Header], list[Header]]:
    """Return a dead letter's headers in two lists: the source record's, and the worker's own.

    Ours start at the last kp-error-reason; a producer may have used the name too.
    """
    for index in range(len(headers) - 1, -1, -1):
        if headers[index][0] == "kp-error-reason":
            return headers[:index], headers[index:]
    return headers, []


def _cut(record: OutputRecord, key: bytes | None, headers: list[Header], limit: int) -> OutputRecord | None:
    whole = replace(record, key=key, headers=headers)
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
    return replace(whole, value=value, headers=[*headers, truncated_header(len(value), record.value)])


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


# -- read

REDRIVEN_FROM: Final = "kp-redriven-from"

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
    added = ("kp-error-", "kp-source-", "kp-worker-version", REDRIVEN_FROM, REDRIVE_COUNT)
    return [(name, value) for name, value in headers if not name.startswith(added)]


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

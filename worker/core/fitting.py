"""Dead letters that fit their topic: what is removed from a large one, in which order, and which header says so.

Lives here: the steps from the whole record down to the last resort. Must not live here: Kafka clients, topics, and
handling a refusal (publication.py).

The source topic still has the whole record, at the offset in the dead letter's headers. Without a dead letter
that fits, the partition would stop.
"""

from __future__ import annotations

from typing import Final

from worker.core.records import BATCH_OVERHEAD, OutputRecord, encoded_size, exact_size

TRUNCATED_HEADER: Final = "kp-error-truncated"
"""How much of the value was kept; only if it was truncated."""

DROPPED_HEADER: Final = "kp-error-dropped"
"""What else of the source record was dropped: `headers`, `key`, each with its size."""

SOURCE_KEY_HEADER: Final = "kp-source-key"
"""`null` if the source record has no key and the dead letter was given one, for a compacted topic."""

FIRST_OF_OURS: Final = "kp-error-reason"
"""The worker's own headers start at the last header of this name; a producer may have used the name too."""

VARINTS: Final = 8
"""Bytes by which the varints of the value's and the record's lengths may grow with the value."""

Header = tuple[str, bytes]


def fits(record: OutputRecord, limit: int) -> bool:
    """Whether a topic whose max.message.bytes is `limit` accepts the record; measured exactly only near the limit."""
    if len(record.key or b"") + len(record.value or b"") + 2 * len(record.headers) > limit:
        return False
    if encoded_size(record.key, record.value, record.headers) + BATCH_OVERHEAD <= limit:
        return True
    return exact_size(record.key, record.value, record.headers) <= limit


def fit_dead_letter(record: OutputRecord, limit: int) -> OutputRecord:
    """Return the dead letter reduced to a topic's max.message.bytes (`limit`); unchanged if it fits.

    First the value is truncated, then the original headers are dropped, then the key; a header reports each step. If
    headers or key are dropped, the value keeps as many bytes as then fit.
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
    """Return the source record's topic/partition/offset: a key that no other dead letter has."""
    said = dict(record.headers)
    return b"/".join((said["kp-source-topic"], said["kp-source-partition"], said["kp-source-offset"]))


def last_resort(record: OutputRecord, limit: int, key: bytes | None) -> OutputRecord:
    """Return a dead letter that no topic has a reason to refuse: no value, only our headers, the time of sending.

    `key` is `source_place(record)` if the topic is compacted. The value is empty, not null: there, null deletes.
    """
    original, own = split(record.headers)
    lost = [_about_headers(original)] if original else []
    if record.key is not None:
        lost.append(_about_key(record.key))
    elif key is not None:
        own = [*own, (SOURCE_KEY_HEADER, b"null")]
    headers = [*own, *([_dropped(lost)] if lost else []), _truncated(0, record.value)]
    for name in ("kp-error-message", "kp-error-path"):  # too long only for a topic that accepts less than about 2 kB
        over = exact_size(key, b"", headers) - limit
        if over > 0:
            headers = [(n, _shortened(content, over) if n == name else content) for n, content in headers]
    return OutputRecord(record.kind, key, b"", headers, None)


def readdressed(record: OutputRecord) -> OutputRecord:
    """Return the dead letter of a record without a key with `source_place` as its key: some topics accept no null."""
    return OutputRecord(
        record.kind,
        source_place(record),
        record.value,
        [*record.headers, (SOURCE_KEY_HEADER, b"null")],
        record.timestamp_ms,
    )


def split(headers: list[Header]) -> tuple[list[Header], list[Header]]:
    """Return a dead letter's headers as the source record's and the worker's own."""
    for index in range(len(headers) - 1, -1, -1):
        if headers[index][0] == FIRST_OF_OURS:
            return headers[:index], headers[index:]
    return headers, []


def _cut(record: OutputRecord, key: bytes | None, headers: list[Header], limit: int) -> OutputRecord | None:
    """Return the record with this key, these headers, and as much of its value as fits; None if nothing fits."""
    whole = OutputRecord(record.kind, key, record.value, headers, record.timestamp_ms)
    if fits(whole, limit):
        return whole
    if not record.value or len(key or b"") + 2 * len(headers) > limit:
        return None
    size = len(record.value)
    room = limit - VARINTS - exact_size(key, b"", [*headers, _truncated(size, record.value)])
    if room < 0:
        return None
    value = record.value[:room]
    headers = [*headers, _truncated(len(value), record.value)]
    return OutputRecord(record.kind, key, value, headers, record.timestamp_ms)


def _truncated(kept: int, value: bytes | None) -> Header:
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

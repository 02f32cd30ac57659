"""Redaction of all that `contribute` sends, writes or logs.

Lives here: which level applies where, for texts that are no trace. Pure. Must not live here: the patterns
(core/redaction.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from worker.core.redaction import redact_document, redact_text

STRICTEST: Final = "aggregated"
"""The level for texts that state none: the one that redacts most."""

MAX_ISSUES: Final = 2000
"""Most characters of the registry's issues: they travel in a Kafka header."""

NUMBERS: Final = frozenset({"phone"})
"""What an id may seem to hold: in 1 of 100 random UUIDs ten digits look like a phone number."""


def clean_unit(document: Mapping[str, Any], level: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the redacted document, and how many markers of each type were set."""
    return redact_document(dict(document), level)


def secret_in_id(trace_id: str, level: str) -> bool:
    """Whether the id of a trace holds what must not leave."""
    return not redact_text(trace_id, level)[1].keys() <= NUMBERS


def clean_words(text: str) -> str:
    """Return a text without anything secret."""
    return redact_text(text, STRICTEST)[0]


def clean_bytes(text: bytes) -> bytes:
    """Return a key or a header's content without anything secret, whatever bytes it has."""
    return clean_words(text.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def clean_issues(issues: Any) -> str:
    """Return the registry's issues as JSON without anything secret, cut to MAX_ISSUES characters."""
    cleaned = redact_document({"issues": issues}, STRICTEST)[0]["issues"]
    return msgspec.json.encode(cleaned).decode()[:MAX_ISSUES]

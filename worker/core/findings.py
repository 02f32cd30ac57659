"""Names of what redaction and the screen find. The rules are in worker/redact/, which is imported only when used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

LEVELS: Final = ("aggregated", "federated", "private")
"""The values of metadata.privacy_level. Secrets are removed at every level; `private` keeps personal data."""

TYPES: Final = ("connection_string", "bearer_token", "api_key", "password", "email", "phone", "ip", "filepath")
"""Marker types of the reference's rules, in the order of their patterns."""

STRICT_TYPES: Final = (
    *TYPES, "private_key", "basic_auth", "jwt", "cookie", "signed_url", "webhook", "card", "iban", "ssn",
)  # fmt: skip
"""Marker types of the strict rules."""

SCREEN_RULES: Final = (
    "bidi-override-chars", "zero-width-steganography", "direction-override", "tag-characters", "invisible-in-word",
)  # fmt: skip
"""The screening rules (KP_SCREEN)."""

SCREEN_HIDDEN: Final = frozenset({"direction-override", "tag-characters", "zero-width-steganography"})
"""Rules for hidden text that no language or emoji needs: KP_CONTRIBUTE_SCREEN=hidden."""


class Screening(msgspec.Struct, frozen=True):
    """The result of screening one document."""

    rules: tuple[str, ...]  # those that matched


Clean = Callable[[bytes], tuple[bytes, dict[str, int]]]
"""Returns a trace document (JSON) without secrets, and the number of markers by type. Raises InvalidTrace."""

Screen = Callable[[bytes], Screening]  # returns what the screen finds in a JSON document

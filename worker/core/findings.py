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

SCREEN_WEIGHTS: Final = {
    **dict.fromkeys(
        (
            "ignore-previous-instructions", "forget-instructions", "disregard-instructions", "override-prompt",
            "new-updated-instructions",
        ), 0.3,
    ),
    **dict.fromkeys(("you-are-now", "pretend-to-be", "act-as", "from-now-on-you", "imagine-you-are"), 0.25),
    **dict.fromkeys(
        (
            "llama-inst-tag", "llama-inst-close-tag", "chatml-im-start", "chatml-im-end", "llama-sys-open",
            "llama-sys-close", "system-tag-bracket", "markdown-role-header",
        ), 0.2,
    ),
    **dict.fromkeys(
        (
            "long-base64-block", "bidi-override-chars", "zero-width-steganography", "excessive-whitespace-encoding",
        ), 0.15,
    ),
    **dict.fromkeys(("send-data-pattern", "output-to-endpoint", "suspicious-url-in-code-block"), 0.2),
}  # fmt: skip
"""The SDK's screening rules, in its order, with their weights."""

SCREEN_RULES: Final = (*SCREEN_WEIGHTS, "direction-override", "tag-characters", "invisible-in-word")
"""All screening rules: the SDK's, and rules for hidden text that the SDK lacks or has in its sanitizer."""

SCREEN_HIDDEN: Final = frozenset({"direction-override", "tag-characters", "zero-width-steganography"})
"""Rules for hidden text that no language or emoji needs: KP_CONTRIBUTE_SCREEN=hidden."""

SCREEN_OFF: Final = frozenset({"excessive-whitespace-encoding"})
"""Rules that are off by default: they match in more than 1 % of the traces of real runs (docs/redaction.md)."""

SCREEN_DEFAULT: Final = frozenset(SCREEN_RULES) - SCREEN_OFF


def rules_from(text: str) -> frozenset[str]:
    """Return the rules named in a comma-separated list (KP_SCREEN_RULES): default, all, NAME, -NAME.

    Raises ValueError.
    """
    chosen: set[str] = set()
    for part in [part.strip() for part in text.split(",")]:
        name = part.removeprefix("-")
        named = {"default": SCREEN_DEFAULT, "all": frozenset(SCREEN_RULES)}.get(name, frozenset({name}))
        if not named <= frozenset(SCREEN_RULES):
            known = ", ".join(SCREEN_RULES)
            raise ValueError(f"{part!r} is not a rule; use default, all, or some of {known}, with commas")
        chosen = chosen - named if part.startswith("-") else chosen | named
    if not chosen:
        raise ValueError("no rule is left; begin with default or all, or switch the screen off")
    return frozenset(chosen)


class Screening(msgspec.Struct, frozen=True):
    """The result of screening one document."""

    rules: tuple[str, ...]  # those that matched
    sdk_score: float  # the SDK's: their weights over the sum of all, 0..1; rules that the SDK lacks weigh nothing
    sdk_verdict: str  # the SDK's: safe, suspicious (from 0.3 on) or rejected (from 0.6 on)


Clean = Callable[[bytes], tuple[bytes, dict[str, int]]]
"""Returns a trace document (JSON) without secrets, and the number of markers by type. Raises InvalidTrace."""

Screen = Callable[[bytes], Screening]  # returns what the screen finds in a JSON document

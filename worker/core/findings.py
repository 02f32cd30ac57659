"""What redaction and the screen find, by name. The rules are in worker/redact/, which loads where they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

LEVELS: Final = ("aggregated", "federated", "private")
"""The values of metadata.privacy_level. Secrets go at every level; `private` keeps what only identifies somebody."""

TYPES: Final = ("connection_string", "bearer_token", "api_key", "password", "email", "phone", "ip", "filepath")
"""Types of markers of the reference's rules, in the order of their patterns."""

STRICT_TYPES: Final = (
    *TYPES, "private_key", "basic_auth", "jwt", "cookie", "signed_url", "webhook", "card", "iban", "ssn",
)  # fmt: skip
"""Types of markers of the strict rules."""

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
"""The SDK's rules of the screen, in its order, with their weights."""

SCREEN_RULES: Final = (*SCREEN_WEIGHTS, "direction-override", "tag-characters", "invisible-in-word")
"""All rules of the screen: the SDK's, and those of hidden text that it does not have, or has in its sanitizer."""

SCREEN_HIDDEN: Final = frozenset({"direction-override", "tag-characters", "zero-width-steganography"})
"""Rules of hidden text that no language and no emoji needs: KP_CONTRIBUTE_SCREEN=hidden."""

SCREEN_OFF: Final = frozenset({"excessive-whitespace-encoding"})
"""Rules that are off by default, as they match in more than 1 % of traces of real runs (docs/redaction.md)."""

SCREEN_DEFAULT: Final = frozenset(SCREEN_RULES) - SCREEN_OFF


def rules_from(text: str) -> frozenset[str]:
    """Return the rules of a list with commas (KP_SCREEN_RULES): default, all, NAME, -NAME. Raises ValueError."""
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
    """What the screen found: the rules that matched, and the SDK's score and verdict for them."""

    rules: tuple[str, ...]
    sdk_score: float  # the weights of these rules over those of all, 0..1; rules that the SDK lacks weigh nothing
    sdk_verdict: str  # safe, suspicious (from 0.3 on) or rejected (from 0.6 on)


Clean = Callable[[bytes], tuple[bytes, dict[str, int]]]
"""Returns a trace document (JSON) without secrets, and how many markers of each type were set. Raises InvalidTrace."""

Screen = Callable[[bytes], Screening]  # returns what the screen finds in a JSON document

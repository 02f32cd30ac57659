"""The patterns of the KnowledgePulse SDK's cleaner: `redact_as_reference` returns exactly what the cleaner returns.

The patterns have JavaScript's semantics: they ignore case in ASCII only, a word is [0-9A-Za-z_], white space includes
U+00A0 and U+FEFF, and a character beyond U+FFFF counts as two. Each pattern works on the result of the previous one.

Time is linear in the length of the text. At each place a pattern reads a bounded number of characters, or characters
that it reads from no other place: an address is found from its @, and unbounded repeats never backtrack. Lookaheads at
the beginning of a pattern only save time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from worker.redact.markers import Found, bounded

PASSWORD_MARKER: Final = "[REDACTED:password]"  # noqa: S105 no password

_SHORTEST: Final = 6
"""Length of the shortest text in which a pattern finds something: a@b.cc, xoxb-1."""

_SIGNS: Final = re.compile("[-0-9:=@/_AB]")
"""Every match has one of these characters; the letters come from AKIA and Bearer."""

_SPACE: Final = r"\t-\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_BREAK: Final = f"[-.{_SPACE}]"
_OCTET: Final = "(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)"
_URL_SCHEME: Final = r"(?=[AMPRampr])(?i:postgres(?:ql)?|mysql|rediss?|mongodb(?:\+srv)?|amqps?)"
_ASSIGNED: Final = "(?=[APSTapst])(?i:passw(?:or)?d|secret|token|api_?key|api_secret|access_token|auth_token)"
_BARE: Final = rf"""[^{_SPACE}'"`,;)}}\[\]]"""
# At least two of JavaScript's characters, which one character beyond U+FFFF is.
_PASSWORD: Final = rf"(?:(['\"])[^'\"]*+\2|(?:{_BARE}{{2}}|(?=[\U00010000-\U0010ffff]){_BARE}){_BARE}*+)"
_USER_NAME: Final = "[a-zA-Z0-9._-]++"
_REST_OF_PATH: Final = rf"""[^{_SPACE}'"`,;)}}\]]*+"""


class _Rule(NamedTuple):
    """A pattern of the cleaner."""

    kind: str
    hint: str  # a text without it has no match
    pattern: re.Pattern[str]
    replacement: str | Callable[[re.Match[str]], str]


def _rule(kind: str, hint: str, pattern: str, kept: str = "") -> _Rule:
    """Return the rule; `kept` is the text before the marker that is kept."""
    return _Rule(kind, hint, re.compile(pattern, re.ASCII), f"{kept}[REDACTED:{kind}]")


_SECRETS: Final = (
    # first, so that no later rule finds half of an address with a password
    _rule("connection_string", "://", rf"""{_URL_SCHEME}://[^{_SPACE}'"`,)}}\]]++"""),
    _rule("bearer_token", "Bearer", rf"Bearer[{_SPACE}]++(?!kp_)[A-Za-z0-9_.~+/=-]{{20,}}+", "Bearer "),
    _rule("api_key", "sk-", "sk-[A-Za-z0-9]{20,}+"),  # OpenAI
    _rule("api_key", "gh", "gh[poas]_[A-Za-z0-9]{36,}+"),  # GitHub
    _rule("api_key", "AKIA", "AKIA[A-Z0-9]{16}"),  # AWS
    _rule("api_key", "kp_", "kp_[a-f0-9]{16,}+"),  # KnowledgePulse
    _rule("api_key", "xox", "xox[bpras]-[A-Za-z0-9-]++"),  # Slack
    _Rule(
        "password",
        "",
        re.compile(rf"(\b{_ASSIGNED}[{_SPACE}]*+[=:][{_SPACE}]*+)(?!\[(?i:REDACTED)){_PASSWORD}", re.ASCII),
        lambda match: f"{match[1]}{PASSWORD_MARKER}",
    ),
)

_LOCAL_PART: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz._%+-"
_ADDRESS_FROM_AT: Final = re.compile(r"@(?<=[0-9A-Za-z._%+-]@)[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}+")

# NANP numbers: the ten digits, and what may precede them.
_TEN_DIGITS: Final = re.compile(rf"[0-9]{{3}}\)?{_BREAK}?[{_SPACE}]?[0-9]{{3}}{_BREAK}[0-9]{{4}}\b", re.ASCII)
_COUNTRY_CODE: Final = re.compile(rf"(?:\+?1{_BREAK}?\(?|\()\Z")

_IDENTIFIERS: Final = (
    _rule("phone", "+", r"\+[1-9][0-9]{6,14}\b"),
    _rule("ip", ".", rf"\b(?=[0-9]){_OCTET}\.{_OCTET}\.{_OCTET}\.{_OCTET}\b"),
    _rule("filepath", "/", rf"/(?:home|Users)/{_USER_NAME}(?:/{_REST_OF_PATH})?"),
    _rule("filepath", ":\\Users\\", rf"[A-Z]:\\Users\\{_USER_NAME}(?:\\{_REST_OF_PATH})?"),
)


def redact_as_reference(text: str, level: str, counts: dict[str, int]) -> str:
    """Return the text with the SDK's markers, and add them to `counts`."""
    if len(text) < _SHORTEST or not _SIGNS.search(text):
        return text
    text = _apply(_SECRETS, text, counts)
    if level == "private":
        return text
    for kind, pattern, begin in _LEFTWARDS:
        text = _apply_leftwards(kind, pattern, begin, text, counts)
    return _apply(_IDENTIFIERS, text, counts)


def _apply(rules: tuple[_Rule, ...], text: str, counts: dict[str, int]) -> str:
    for rule in rules:
        if rule.hint in text:
            text, found = rule.pattern.subn(rule.replacement, text)
            if found:
                counts[rule.kind] = counts.get(rule.kind, 0) + found
    return text


_Begin = Callable[[str, int, int], int | None]
"""`begin(text, done, start)` returns the beginning of a match that a pattern found at `start`, not before `done`; None:
it is not a match."""


def _apply_leftwards(kind: str, pattern: re.Pattern[str], begin: _Begin, text: str, counts: dict[str, int]) -> str:
    """Replace the matches of the pattern, extended to the left."""
    pieces: list[str] = []
    done = 0
    for start, end in _leftwards(pattern, begin, text):
        pieces.append(text[done:start])
        done = end
    if not pieces:
        return text
    counts[kind] = counts.get(kind, 0) + len(pieces)
    return f"[REDACTED:{kind}]".join([*pieces, text[done:]])


def _leftwards(pattern: re.Pattern[str], begin: _Begin, text: str) -> Iterator[tuple[int, int]]:
    """Yield the places of the pattern's matches, extended to the left."""
    done = 0
    for match in pattern.finditer(text):
        start = begin(text, done, match.start())
        if start is not None:
            done = match.end()
            yield start, done


def _local_part(text: str, done: int, at: int) -> int | None:
    """Return where an address begins. A pattern starting there would read a long word again from each letter."""
    # If the @ is at `done`, the part before it belongs to the previous address.
    return None if at == done else done + len(text[done:at].rstrip(_LOCAL_PART))


def _country_code(text: str, done: int, start: int) -> int:
    """Return where a phone number begins. A pattern starting there would try each of its forms at every digit."""
    before = _COUNTRY_CODE.search(text, max(done, start - 4), start)
    return start if before is None else before.start()


_LEFTWARDS: Final[tuple[tuple[str, re.Pattern[str], _Begin], ...]] = (
    ("email", _ADDRESS_FROM_AT, _local_part),
    ("phone", _TEN_DIGITS, _country_code),
)


def found_by_reference(text: str, level: str) -> Iterator[Found]:
    """Yield what the reference's patterns find in a text without disguises."""
    for rule in (*_SECRETS, *(_IDENTIFIERS if level != "private" else ())):
        if rule.hint in text:
            group = 1 if rule.kind == "password" else 0
            places = (
                Found(match.end(1) if group else match.start(), match.end(), rule.kind)
                for match in rule.pattern.finditer(text)
            )
            yield from bounded(places, len(text))
    if level != "private":
        for kind, pattern, begin in _LEFTWARDS:
            places = (Found(start, end, kind) for start, end in _leftwards(pattern, begin, text))
            yield from bounded(places, len(text))

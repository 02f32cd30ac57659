"""The patterns of the KnowledgePulse SDK's cleaner: `redact_as_reference` returns exactly what the cleaner returns.

The patterns have JavaScript's semantics: they ignore case in ASCII only, a word is [0-9A-Za-z_], white space includes
U+00A0 and U+FEFF, and a character beyond U+FFFF counts as two. Each pattern works on the result of the previous one.

Time is linear in the length of the text. At each place a pattern reads a bounded number of characters, or characters
that it reads from no other place: an address is found from its @, and unbounded repeats never backtrack. Lookaheads at
the beginning of a pattern only save time.
"""

import re
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from worker.redact.markers import Found, bounded

PASSWORD_MARKER: Final = "[REDACTED:password]"  # noqa: S105 no password

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


_Begin = Callable[[str, int, re.Match[str]], int | None]
"""Returns where the marker of a match begins, not before the end of the match before (the number); None: not a match.

A pattern that began there would read the characters to the left again from each of them.
"""


def _local_part(text: str, done: int, at: re.Match[str]) -> int | None:
    """Return where an address begins. If the @ is at `done`, the part before it belongs to the previous address."""
    return None if at.start() == done else done + len(text[done : at.start()].rstrip(_LOCAL_PART))


def _country_code(text: str, done: int, digits: re.Match[str]) -> int:
    """Return where a phone number begins."""
    before = _COUNTRY_CODE.search(text, max(done, digits.start() - 4), digits.start())
    return (before or digits).start()


class _Rule(NamedTuple):
    """A pattern of the cleaner."""

    kind: str
    hint: str  # a text without it has no match
    pattern: re.Pattern[str]
    marker: str  # with the text before it that is kept
    begin: _Begin | None = None  # None: where the match begins

    def places(self, text: str) -> Iterator[Found]:
        """Yield what the pattern finds."""
        done = 0
        for match in self.pattern.finditer(text):
            start = match.start() if self.begin is None else self.begin(text, done, match)
            if start is not None:
                done = match.end()
                yield Found(start, done, self.kind)


def _rule(kind: str, hint: str, pattern: str, kept: str = "", begin: _Begin | None = None) -> _Rule:
    return _Rule(kind, hint, re.compile(pattern, re.ASCII), f"{kept}[REDACTED:{kind}]", begin)


_SECRETS: Final = (
    # first, so that no later rule finds half of an address with a password
    _rule("connection_string", "://", rf"""{_URL_SCHEME}://[^{_SPACE}'"`,)}}\]]++"""),
    _rule("bearer_token", "Bearer", rf"Bearer[{_SPACE}]++(?!kp_)[A-Za-z0-9_.~+/=-]{{20,}}+", "Bearer "),
    _rule("api_key", "sk-", "sk-[A-Za-z0-9]{20,}+"),  # OpenAI
    _rule("api_key", "gh", "gh[poas]_[A-Za-z0-9]{36,}+"),  # GitHub
    _rule("api_key", "AKIA", "AKIA[A-Z0-9]{16}"),  # AWS
    _rule("api_key", "kp_", "kp_[a-f0-9]{16,}+"),  # KnowledgePulse
    _rule("api_key", "xox", "xox[bpras]-[A-Za-z0-9-]++"),  # Slack
    _rule(
        "password",
        "",
        rf"(\b{_ASSIGNED}[{_SPACE}]*+[=:][{_SPACE}]*+)(?!\[(?i:REDACTED)){_PASSWORD}",
        begin=lambda _text, _done, match: match.end(1),
    ),
)

_LOCAL_PART: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz._%+-"

# NANP numbers: the ten digits, and what may precede them.
_TEN_DIGITS: Final = rf"[0-9]{{3}}\)?{_BREAK}?[{_SPACE}]?[0-9]{{3}}{_BREAK}[0-9]{{4}}\b"
_COUNTRY_CODE: Final = re.compile(rf"(?:\+?1{_BREAK}?\(?|\()\Z")

_ALL: Final = (
    *_SECRETS,
    _rule("email", "@", r"@(?<=[0-9A-Za-z._%+-]@)[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}+", begin=_local_part),
    _rule("phone", "", _TEN_DIGITS, begin=_country_code),
    _rule("phone", "+", r"\+[1-9][0-9]{6,14}\b"),
    _rule("ip", ".", rf"\b(?=[0-9]){_OCTET}\.{_OCTET}\.{_OCTET}\.{_OCTET}\b"),
    _rule("filepath", "/", rf"/(?:home|Users)/{_USER_NAME}(?:/{_REST_OF_PATH})?"),
    _rule("filepath", ":\\Users\\", rf"[A-Z]:\\Users\\{_USER_NAME}(?:\\{_REST_OF_PATH})?"),
)


def redact_as_reference(text: str, level: str, counts: dict[str, int]) -> str:
    """Return the text with the SDK's markers, and add them to `counts`."""
    if len(text) < 6 or not _SIGNS.search(text):  # the shortest that a pattern finds: a@b.cc, xoxb-1
        return text
    for rule in _SECRETS if level == "private" else _ALL:
        if rule.hint not in text:
            continue
        if rule.begin is None:
            text, count = rule.pattern.subn(rule.marker, text)  # in C
        else:
            pieces: list[str] = []
            done = 0
            for start, end, _ in rule.places(text):
                pieces.append(text[done:start])
                done = end
            count = len(pieces)
            text = rule.marker.join([*pieces, text[done:]]) if pieces else text
        if count:
            counts[rule.kind] = counts.get(rule.kind, 0) + count
    return text


def found_by_reference(text: str, level: str) -> Iterator[Found]:
    """Yield what the reference's patterns find in a text without disguises."""
    for rule in _SECRETS if level == "private" else _ALL:
        if rule.hint in text:
            yield from bounded(rule.places(text), len(text))

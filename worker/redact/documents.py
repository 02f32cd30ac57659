"""Redaction: secrets and personal data in a text, and in a trace document, become markers such as [REDACTED:email].

`redact_text` gives, character by character, what the KnowledgePulse SDK's cleaner gives. The SDK's patterns are
JavaScript's: case is ignored in ASCII only, a word is [0-9A-Za-z_], white space includes U+00A0 and U+FEFF, and a
character beyond U+FFFF counts as two. Each pattern works on the result of the one before.

Time is linear in the length of the text. At each place a pattern looks at a bounded number of characters, or at
characters at which it looks from no other place: an address is found from its @, and unbounded repeats never back off.
Lookaheads at the beginning of a pattern only save time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import msgspec

from worker.core.findings import LEVELS, STRICT_TYPES, TYPES
from worker.core.trace import InvalidTrace, Metadata, Outcome, Reason, ReasoningTrace, Step, Task, Tool
from worker.redact import strict
from worker.redact.fold import fold
from worker.redact.markers import Found, bounded, put_markers
from worker.redact.names import is_named_secret, is_secret_after, is_secret_member
from worker.redact.own import OwnPattern, replace_own

RULES: Final = ("reference", "strict")
"""The sets of rules: the SDK's, and those with what else transcripts contain (strict.py)."""


class Rules(NamedTuple):
    """What is replaced: one of RULES, and a team's own patterns (KP_REDACT_PATTERNS_FILE)."""

    name: str = "reference"
    own: tuple[OwnPattern, ...] = ()

    @property
    def types(self) -> tuple[str, ...]:
        """Return the types of markers that these rules set."""
        return (*(STRICT_TYPES if self.name == "strict" else TYPES), *(pattern.name for pattern in self.own))


_PASSWORD_MARKER: Final = "[REDACTED:password]"  # noqa: S105 no password

_SHORTEST: Final = 6
"""Characters of the shortest text in which a pattern finds something: a@b.cc, xoxb-1."""

_SIGNS: Final = re.compile("[-0-9:=@/_AB]")
"""Whatever a pattern finds has one of these characters; the letters are those of AKIA and Bearer."""

_SPACE: Final = r"\t-\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_BREAK: Final = f"[-.{_SPACE}]"
_OCTET: Final = "(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)"
_URL_SCHEME: Final = r"(?=[AMPRampr])(?i:postgres(?:ql)?|mysql|rediss?|mongodb(?:\+srv)?|amqps?)"
_ASSIGNED: Final = "(?=[APSTapst])(?i:passw(?:or)?d|secret|token|api_?key|api_secret|access_token|auth_token)"
_BARE: Final = rf"""[^{_SPACE}'"`,;)}}\[\]]"""
# Two of JavaScript's characters at least, which one character beyond U+FFFF is.
_PASSWORD: Final = rf"(?:(['\"])[^'\"]*+\2|(?:{_BARE}{{2}}|(?=[\U00010000-\U0010ffff]){_BARE}){_BARE}*+)"
_USER_NAME: Final = "[a-zA-Z0-9._-]++"
_REST_OF_PATH: Final = rf"""[^{_SPACE}'"`,;)}}\]]*+"""


class _Rule(NamedTuple):
    """One pattern, and a text without which it finds nothing."""

    kind: str
    hint: str
    pattern: re.Pattern[str]
    replacement: str | Callable[[re.Match[str]], str]


def _rule(kind: str, hint: str, pattern: str, kept: str = "") -> _Rule:
    """Return the rule; `kept` is what stays before the marker."""
    return _Rule(kind, hint, re.compile(pattern, re.ASCII), f"{kept}[REDACTED:{kind}]")


_SECRETS: Final = (
    # first, so that no later rule finds half of an address with a password in it
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
        lambda match: f"{match[1]}{_PASSWORD_MARKER}",
    ),
)

_LOCAL_PART: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz._%+-"
_ADDRESS_FROM_AT: Final = re.compile(r"(?<=[0-9A-Za-z._%+-])@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}+")

# NANP numbers: the ten digits, and what may stand before them.
_TEN_DIGITS: Final = re.compile(rf"[0-9]{{3}}\)?{_BREAK}?[{_SPACE}]?[0-9]{{3}}{_BREAK}[0-9]{{4}}\b", re.ASCII)
_COUNTRY_CODE: Final = re.compile(rf"(?:\+?1{_BREAK}?\(?|\()\Z")

_IDENTIFIERS: Final = (
    _rule("phone", "+", r"\+[1-9][0-9]{6,14}\b"),
    _rule("ip", ".", rf"\b(?=[0-9]){_OCTET}\.{_OCTET}\.{_OCTET}\.{_OCTET}\b"),
    _rule("filepath", "/", rf"/(?:home|Users)/{_USER_NAME}(?:/{_REST_OF_PATH})?"),
    _rule("filepath", ":\\Users\\", rf"[A-Z]:\\Users\\{_USER_NAME}(?:\\{_REST_OF_PATH})?"),
)

_PASSWORD_NAME: Final = re.compile(r"(?i:passw(?:or)?d|secret|token|api[\W_]?key)[\W_]*+\Z")
"""Names of members that hold a password: those of the pattern above, also at the end of a longer name."""


def redact_text(text: str, level: str, rules: str | Rules = "reference") -> tuple[str, dict[str, int]]:
    """Return the text with a marker in place of each secret, and how many markers of each type were set.

    `level` is one of LEVELS, `rules` one of RULES. What `reference` replaces, `strict` replaces by the same markers.
    Raises ValueError for another level or other rules.
    """
    rules = _checked(level, rules)
    counts: dict[str, int] = {}
    return _redact(text, level, rules, counts), counts


def redact_document(
    document: dict[str, Any], level: str, rules: str | Rules = "reference"
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return a trace document without secrets, and how many markers of each type were set; `document` stays as it is.

    Every string and every name of a member is cleaned, at any depth, except the trace's own `id`. The value of a
    member with a password-like name (`{"db_password": "x"}`) becomes the marker as a whole, unless it is null, a
    boolean or empty; in task.input_schema, which describes such members, only where it is a string or a number.
    Members whose names become equal get #2, #3 ... in the order of the document. A valid trace stays valid. With the
    strict rules also `{"name": "DB_PASSWORD", "value": "x"}` and `["--password", "x"]` lose their value.

    `document` is decoded JSON; values of other types stay as they are. Raises ValueError as `redact_text` does.
    """
    walk = _Walk(level, _checked(level, rules))
    return walk.cleaned(document), dict(walk.counts)


def redact_json(raw: bytes, rules: str | Rules = "reference") -> tuple[bytes, dict[str, int]]:
    """Return a trace document as JSON without secrets, and how many markers of each type were set.

    The level is the document's own metadata.privacy_level, or `aggregated` where that is none of LEVELS. The document
    is written anew, so nothing stays in an earlier value of a duplicate key; numbers keep their spelling. Raises
    InvalidTrace for what is no JSON object.
    """
    try:
        document = _decoder.decode(raw)
        metadata = document.get("metadata")
        level = metadata.get("privacy_level") if isinstance(metadata, dict) else None
        cleaned, counts = redact_document(document, level if level in LEVELS else LEVELS[0], rules)
        return msgspec.json.encode(cleaned), counts
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        # without the library's message, which may quote the text
        raise InvalidTrace(Reason.NOT_JSON, "", "cannot be redacted; send one JSON object") from None


def _checked(level: str, rules: str | Rules) -> Rules:
    """Return the rules. Raises ValueError for an unknown level or unknown rules."""
    if level not in LEVELS:
        raise ValueError(f"unknown privacy level {level!r}; use one of {', '.join(LEVELS)}")
    rules = Rules(rules) if isinstance(rules, str) else rules
    if rules.name not in RULES:
        raise ValueError(f"unknown rules {rules.name!r}; use one of {', '.join(RULES)}")
    return rules


def _redact(text: str, level: str, rules: Rules, counts: dict[str, int]) -> str:
    before, text = text, _redact_as_reference(text, level, counts)
    if rules.name == "strict":
        text = _redact_strictly(text, level, counts)
        for _ in range(
            _MOST_ROUNDS if len(text) <= _SHORT else 1
        ):  # markers show what is a secret behind or between them, so that twice is once
            if text == before:
                break
            before, text = text, _redact_strictly(_redact_as_reference(text, level, counts), level, counts)
    return replace_own(rules.own, text, counts) if rules.own else text


_MOST_ROUNDS: Final = 4
_SHORT: Final = 1 << 14
"""Characters of a text that is read so often; a longer one is read twice, so that time is bounded."""


def _redact_strictly(text: str, level: str, counts: dict[str, int]) -> str:
    folded = fold(text)
    found = strict.find_secrets(folded.text, level)
    if folded.text is not text:
        found += _found_by_reference(folded.text, level)
        found = [Found(*folded.original(start, end), kind) for start, end, kind in found]
    return put_markers(text, found, counts) if found else text


def _found_by_reference(text: str, level: str) -> Iterator[Found]:
    """Find what the reference's patterns find once the disguise is off."""
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


def _redact_as_reference(text: str, level: str, counts: dict[str, int]) -> str:
    if len(text) < _SHORTEST or not _SIGNS.search(text):
        return text
    text = _apply(_SECRETS, text, counts)
    if level == "private":
        return text
    if "@" in text:
        text = _apply_leftwards("email", _ADDRESS_FROM_AT, _local_part, text, counts)
    text = _apply_leftwards("phone", _TEN_DIGITS, _country_code, text, counts)
    return _apply(_IDENTIFIERS, text, counts)


def _apply(rules: tuple[_Rule, ...], text: str, counts: dict[str, int]) -> str:
    for rule in rules:
        if rule.hint in text:
            text, found = rule.pattern.subn(rule.replacement, text)
            if found:
                counts[rule.kind] = counts.get(rule.kind, 0) + found
    return text


def _apply_leftwards(
    kind: str, pattern: re.Pattern[str], begin: Callable[[str, int, int], int | None], text: str, counts: dict[str, int]
) -> str:
    """Replace what the pattern finds, and what belongs to it on its left."""
    pieces: list[str] = []
    done = 0
    for start, end in _leftwards(pattern, begin, text):
        pieces.append(text[done:start])
        done = end
    if not pieces:
        return text
    counts[kind] = counts.get(kind, 0) + len(pieces)
    return f"[REDACTED:{kind}]".join([*pieces, text[done:]])


def _leftwards(
    pattern: re.Pattern[str], begin: Callable[[str, int, int], int | None], text: str
) -> Iterator[tuple[int, int]]:
    """Yield the places of what the pattern finds with what belongs to it on its left.

    `begin(text, done, start)` returns where the match that the pattern finds at `start` begins, not before `done`;
    None: it is no match.
    """
    done = 0
    for match in pattern.finditer(text):
        start = begin(text, done, match.start())
        if start is not None:
            done = match.end()
            yield start, done


def _local_part(text: str, done: int, at: int) -> int | None:
    """Return where an address begins. A pattern that begins there would read a long word from each of its letters."""
    # At `done` the part before the @ belongs to the previous address.
    return None if at == done else done + len(text[done:at].rstrip(_LOCAL_PART))


def _country_code(text: str, done: int, start: int) -> int:
    """Return where a phone number begins. A pattern that begins there would try each of its forms at every digit."""
    before = _COUNTRY_CODE.search(text, max(done, start - 4), start)
    return start if before is None else before.start()


_LEFTWARDS: Final = (("email", _ADDRESS_FROM_AT, _local_part), ("phone", _TEN_DIGITS, _country_code))

_decoder: Final = msgspec.json.Decoder(dict[str, Any], float_hook=lambda number: msgspec.Raw(number.encode()))

_FREE, _TRACE, _TASK, _SCHEMA = range(4)
"""Where a value is: anywhere, or it is the document, its task, or the task's input_schema (or inside that)."""

_PLACES: Final = {(_TRACE, "task"): _TASK, (_TASK, "input_schema"): _SCHEMA}


_FIELDS: Final[dict[str, tuple[str, dict[str, int], bool]]] = {
    info.encode_name: (info.encode_name, {}, False)
    for struct in (ReasoningTrace, Metadata, Task, Step, Tool, Outcome)
    for info in msgspec.structs.fields(struct)
}
"""The names of the schema: cleaned, with their counts, and not password-like."""


class _Walk:
    """One pass over a document, without recursion: what JSON parsers read may be deeper than Python's stack."""

    def __init__(self, level: str, rules: Rules) -> None:
        self.counts: Counter[str] = Counter()
        self._level = level
        self._rules = rules
        self._strict = rules.name == "strict"
        self._names: dict[str, tuple[str, dict[str, int], bool]] = dict(_FIELDS)  # most names are repeated
        self._pending: list[tuple[Any, Any, int]] = []

    def cleaned(self, document: dict[str, Any]) -> dict[str, Any]:
        """Return the cleaned copy."""
        copy: dict[str, Any] = self._begin(document, _TRACE)
        while self._pending:
            source, target, place = self._pending.pop()
            if isinstance(source, dict):
                self._fill_object(source, target, place)
            else:
                inside = _SCHEMA if place == _SCHEMA else _FREE
                target.extend(self._items(source, inside))
        return copy

    def _begin(self, container: Any, place: int) -> Any:
        """Return an empty copy of an object or array, to be filled later."""
        copy: Any = {} if isinstance(container, dict) else []
        self._pending.append((container, copy, place))
        return copy

    def _value(self, value: Any, place: int) -> Any:
        if isinstance(value, str):
            return _redact(value, self._level, self._rules, self.counts)
        return self._begin(value, place) if isinstance(value, dict | list) else value

    def _fill_object(self, source: dict[str, Any], target: dict[str, Any], place: int) -> None:
        read = [self._name(name) for name in source]
        named = self._strict and is_named_secret(source)
        taken = {name for name, (cleaned, _) in zip(source, read, strict=True) if name == cleaned}
        numbers: dict[str, int] = {}
        for (name, value), (cleaned, is_password) in zip(source.items(), read, strict=True):
            unique = cleaned if name == cleaned else _unique(cleaned, taken, numbers)
            if place == _TRACE and name == "id":
                target[unique] = value
            elif (is_password and not (place == _SCHEMA and isinstance(value, dict | list))) or (
                self._strict and place != _SCHEMA and name not in _FIELDS and is_secret_member(name, value, named=named)
            ):
                target[unique] = self._password(value)
            else:
                inside = _SCHEMA if place == _SCHEMA else _PLACES.get((place, name), _FREE)
                target[unique] = self._value(value, inside)

    def _items(self, source: list[Any], inside: int) -> Iterator[Any]:
        """Yield the cleaned items of an array."""
        before: Any = None
        for item in source:
            secret = self._strict and isinstance(before, str) and isinstance(item, str)
            yield self._password(item) if secret and is_secret_after(before, item) else self._value(item, inside)
            before = item

    def _name(self, name: str) -> tuple[str, bool]:
        """Return the cleaned name of a member, and whether it is password-like."""
        known = self._names.get(name)
        if known is None:
            counts: dict[str, int] = {}
            known = self._names[name] = (
                _redact(name, self._level, self._rules, counts),
                counts,
                _PASSWORD_NAME.search(name) is not None,
            )
        cleaned, counts, is_password = known
        if counts:
            self.counts.update(counts)
        return cleaned, is_password

    def _password(self, value: Any) -> Any:
        if value is None or value is True or value is False or value in ("", [], {}, _PASSWORD_MARKER):
            return value
        self.counts["password"] += 1
        return _PASSWORD_MARKER


def _unique(name: str, taken: set[str], numbers: dict[str, int]) -> str:
    """Return the name, or the name with the next free number, and take it."""
    unique = name
    while unique in taken:
        numbers[name] = numbers.get(name, 1) + 1
        unique = f"{name}#{numbers[name]}"
    taken.add(unique)
    return unique

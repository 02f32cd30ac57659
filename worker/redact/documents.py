"""Redaction: secrets and personal data in a text or a trace document become markers such as [REDACTED:email]."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from worker.core.records import LEVELS, STRICT_TYPES, TYPES
from worker.core.trace import InvalidTrace, Metadata, Outcome, Reason, ReasoningTrace, Step, Task, Tool
from worker.redact.markers import OwnPattern, replace_own
from worker.redact.names import (
    IF_RANDOM,
    NO,
    PASSWORD,
    TOKEN,
    VALUE_MEMBERS,
    is_given,
    labels_secret,
    looks_secret,
    strength_of,
)  # fmt: skip
from worker.redact.reference import PASSWORD_MARKER, redact_as_reference
from worker.redact.strict import fold, redact_strictly

RULES: Final = ("reference", "strict")
"""The sets of rules: the SDK's, and those plus rules for other secrets in transcripts (strict.py)."""


class Rules(NamedTuple):
    """The rules to apply."""

    name: str = "reference"  # one of RULES
    own: tuple[OwnPattern, ...] = ()  # a team's own patterns (KP_REDACT_PATTERNS_FILE)

    @property
    def types(self) -> tuple[str, ...]:
        """Return the types of markers that these rules produce."""
        return (*(STRICT_TYPES if self.name == "strict" else TYPES), *(pattern.name for pattern in self.own))


_PASSWORD_NAME: Final = re.compile(r"(?i:passw(?:or)?d|secret|token|api[\W_]?key)[\W_]*+\Z")
"""Names of members that hold a password: the SDK's names (reference.py), also at the end of a longer name."""


def redact_text(text: str, level: str, rules: str | Rules = "reference") -> tuple[str, dict[str, int]]:
    """Return the text with a marker in place of each secret, and the number of markers of each type.

    `level` is one of LEVELS, `rules` one of RULES. `strict` replaces all that `reference` replaces, by the same
    markers. Raises ValueError for an unknown level or unknown rules.
    """
    rules = _checked(level, rules)
    counts: dict[str, int] = {}
    return _redact(text, level, rules, counts), counts


def redact_document(
    document: dict[str, Any], level: str, rules: str | Rules = "reference"
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return a trace document without secrets, and the number of markers of each type; `document` is not changed.

    Every string and every member name is cleaned, at any depth, except the trace's own `id`. If a member has a
    password-like name (`{"db_password": "x"}`), its whole value becomes the marker, unless it is null, a boolean or
    empty; in task.input_schema, which describes such members, only if it is a string or a number. Members whose names
    become equal get #2, #3 ... in document order. A valid trace stays valid. The strict rules also replace the value
    in `{"name": "DB_PASSWORD", "value": "x"}` and `["--password", "x"]`.

    `document` is decoded JSON; values of other types are kept. Raises ValueError as `redact_text` does.
    """
    walk = _Walk(level, _checked(level, rules))
    return walk.cleaned(document), dict(walk.counts)


def redact_json(raw: bytes, rules: str | Rules = "reference") -> tuple[bytes, dict[str, int]]:
    """Return a trace document as JSON without secrets, and the number of markers of each type.

    The level is the document's own (`level_of`). The document is encoded again, so no earlier value of a duplicate key
    survives; numbers keep their spelling. Raises InvalidTrace if `raw` is not a JSON object.
    """
    try:
        document = _decoder.decode(raw)
        cleaned, counts = redact_document(document, level_of(document), rules)
        return msgspec.json.encode(cleaned), counts
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        # drop the library's message, which may quote the text
        raise InvalidTrace(Reason.NOT_JSON, "", "cannot be redacted; send one JSON object") from None


def level_of(document: Mapping[str, Any]) -> str:
    """Return a document's metadata.privacy_level; `aggregated`, which redacts most, if it is not one of LEVELS."""
    metadata = document.get("metadata")
    level = metadata.get("privacy_level") if isinstance(metadata, dict) else None
    return level if isinstance(level, str) and level in LEVELS else LEVELS[0]


def _checked(level: str, rules: str | Rules) -> Rules:
    """Return the rules. Raises ValueError for an unknown level or unknown rules."""
    if level not in LEVELS:
        raise ValueError(f"unknown privacy level {level!r}; use one of {', '.join(LEVELS)}")
    rules = Rules(rules) if isinstance(rules, str) else rules
    if rules.name not in RULES:
        raise ValueError(f"unknown rules {rules.name!r}; use one of {', '.join(RULES)}")
    return rules


def _redact(text: str, level: str, rules: Rules, counts: dict[str, int]) -> str:
    before, text = text, redact_as_reference(text, level, counts)
    if rules.name == "strict":
        text = redact_strictly(text, level, counts)
        # Markers reveal secrets after or between them; after these rounds, redaction is idempotent.
        # A long text gets one round, so that time is bounded.
        for _ in range(4 if len(text) <= 1 << 14 else 1):
            if text == before:
                break
            before, text = text, redact_strictly(redact_as_reference(text, level, counts), level, counts)
    return replace_own(rules.own, text, counts) if rules.own else text


_decoder: Final = msgspec.json.Decoder(dict[str, Any], float_hook=lambda number: msgspec.Raw(number.encode()))

_FREE, _TRACE, _TASK, _SCHEMA = range(4)
"""The place of a value: the document, its task, or the task's input_schema and anything inside it; _FREE elsewhere."""

_PLACES: Final = {(_TRACE, "task"): _TASK, (_TASK, "input_schema"): _SCHEMA}

_FIELDS: Final[dict[str, tuple[str, dict[str, int], bool]]] = {
    info.encode_name: (info.encode_name, {}, False)
    for struct in (ReasoningTrace, Metadata, Task, Step, Tool, Outcome)
    for info in msgspec.structs.fields(struct)
}
"""The schema's names: cleaned name, counts, not password-like."""


class _Walk:
    """One pass over a document, without recursion: a JSON document may be deeper than Python's stack."""

    def __init__(self, level: str, rules: Rules) -> None:
        self.counts: Counter[str] = Counter()
        self._level = level
        self._rules = rules
        self._strict = rules.name == "strict"
        self._names: dict[str, tuple[str, dict[str, int], bool]] = dict(_FIELDS)  # most names repeat
        self._pending: list[tuple[Any, Any, int]] = []

    def cleaned(self, document: dict[str, Any]) -> dict[str, Any]:
        """Return the cleaned copy."""
        copy: dict[str, Any] = self._begin(document, _TRACE)
        while self._pending:
            source, target, place = self._pending.pop()
            if isinstance(source, dict):
                self._fill_object(source, target, place)
            else:
                target.extend(self._items(source, _SCHEMA if place == _SCHEMA else _FREE))
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
        named = _named_secret(source) if self._strict else NO
        taken = {name for name, (cleaned, _) in zip(source, read, strict=True) if name == cleaned}
        numbers: dict[str, int] = {}
        for (name, value), (cleaned, is_password) in zip(source.items(), read, strict=True):
            unique = cleaned if name == cleaned else _unique(cleaned, taken, numbers)
            if place == _TRACE and name == "id" and isinstance(value, str):
                target[unique] = value
            elif (is_password and not (place == _SCHEMA and isinstance(value, dict | list))) or (
                self._strict and place != _SCHEMA and name not in _FIELDS and _is_secret_member(name, value, named)
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
            yield self._password(item) if secret and _is_secret_after(before, item) else self._value(item, inside)
            before = item

    def _name(self, name: str) -> tuple[str, bool]:
        """Return the cleaned name of a member, and whether it is password-like."""
        known = self._names.get(name)
        if known is None:
            counts: dict[str, int] = {}
            cleaned = _redact(name, self._level, self._rules, counts)
            known = self._names[name] = cleaned, counts, _PASSWORD_NAME.search(name) is not None
        cleaned, counts, is_password = known
        if counts:
            self.counts.update(counts)
        return cleaned, is_password

    def _password(self, value: Any) -> Any:
        if value is None or value is True or value is False or value in ("", [], {}, PASSWORD_MARKER):
            return value
        self.counts["password"] += 1
        return PASSWORD_MARKER


def _unique(name: str, taken: set[str], numbers: dict[str, int]) -> str:
    """Return the name, or the name with the next free number, and mark it as taken."""
    unique = name
    while unique in taken:
        numbers[name] = numbers.get(name, 1) + 1
        unique = f"{name}#{numbers[name]}"
    taken.add(unique)
    return unique


# -- members of a document whose whole values are secrets


def _is_secret_member(name: str, value: Any, named: int) -> bool:
    """Return whether the whole value of a member is a secret. `named`: `_named_secret` of its object."""
    strength = strength_of(fold(name).text.strip().strip("-.:"))
    if named and name.lower() in VALUE_MEMBERS:
        strength = max(strength, named)
    if strength == NO:
        return False
    if isinstance(value, str):
        return is_given(fold(value).text.strip(), strength)
    if isinstance(value, dict | list):
        # only numbers: this is usage (`"tokens": {"prompt": 5}`)
        parts = value.values() if isinstance(value, dict) else value
        return strength >= TOKEN and any(isinstance(part, str | dict | list) for part in parts)
    return strength == PASSWORD and isinstance(value, int | float) and not isinstance(value, bool)


def _named_secret(source: dict[str, Any]) -> int:
    """Return how strongly a member names the secret in another one: {"name": "DB_PASSWORD", "value": "x"}."""
    strength = NO
    if len(source) <= 8:
        for name, value in source.items():
            if isinstance(value, str) and len(value) <= 100:
                if name.lower() in _NAME_MEMBERS and (of_value := strength_of(value)) > IF_RANDOM:
                    strength = max(strength, min(of_value, TOKEN))
                elif labels_secret(name, value):
                    strength = TOKEN
    return strength


_NAME_MEMBERS: Final = frozenset(("name", "key", "header", "variable", "field", "env", "param", "parameter", "option"))


def _is_secret_after(before: str, value: str) -> bool:
    """Return whether an array item is a secret because of the item before it: ["--password", "x"]."""
    strength = strength_of(before.strip("-:")) if len(before) <= 100 else NO
    if strength <= IF_RANDOM:
        return False
    return is_given(value, strength) and not value.startswith("-") if before.startswith("--") else looks_secret(value)

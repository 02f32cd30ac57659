"""Members of a document whose whole values are secrets, because of their names or of neighbouring members."""

from __future__ import annotations

from typing import Any, Final

from worker.redact.strict.fold import fold
from worker.redact.strict.names import (
    IF_RANDOM,
    NO,
    PASSWORD,
    TOKEN,
    VALUE_MEMBERS,
    harmless,
    is_random,
    labels_secret,
    looks_secret,
    strength_of,
)  # fmt: skip


def is_secret_member(name: str, value: Any, *, named: bool) -> bool:
    """Return whether the whole value of a member is a secret. `named`: `is_named_secret` of its object."""
    strength = strength_of(fold(name).text.strip().strip("-.:"))
    if named and name.lower() in VALUE_MEMBERS:
        strength = max(strength, TOKEN)
    if strength == NO:
        return False
    if isinstance(value, str):
        value = fold(value).text.strip()
        return is_random(value) and " " not in value if strength == IF_RANDOM else not harmless(value)
    if isinstance(value, dict | list):
        # only numbers: this is usage (`"tokens": {"prompt": 5}`)
        parts = value.values() if isinstance(value, dict) else value
        return strength > IF_RANDOM and any(isinstance(part, str | dict | list) for part in parts)
    return strength == PASSWORD and isinstance(value, int | float) and not isinstance(value, bool)


def is_named_secret(source: dict[str, Any]) -> bool:
    """Return whether an object has a secret's name and value as members: {"name": "DB_PASSWORD", "value": "x"}."""
    if len(source) > 8:
        return False
    return any(
        isinstance(value, str)
        and len(value) <= 100
        and ((name.lower() in _NAME_MEMBERS and strength_of(value) > IF_RANDOM) or labels_secret(name, value))
        for name, value in source.items()
    )


_NAME_MEMBERS: Final = frozenset(("name", "key", "header", "variable", "field", "env", "param", "parameter", "option"))


def is_secret_after(before: str, value: str) -> bool:
    """Return whether an array item is a secret because of the item before it: ["--password", "x"]."""
    if len(before) > 100 or strength_of(before.strip("-:")) <= IF_RANDOM:
        return False
    return not harmless(value) and not value.startswith("-") if before.startswith("--") else looks_secret(value)

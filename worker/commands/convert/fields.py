"""Values that a log does not have: constants, or paths to fields of a run, as `kp-worker convert` takes them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, get_args

from worker.core.trace import CREATED_AT_PATTERN, Metadata

FieldPath = tuple[str, ...]

VISIBILITIES: Final[tuple[str, ...]] = get_args(Metadata.__annotations__["visibility"])
PRIVACY_LEVELS: Final[tuple[str, ...]] = get_args(Metadata.__annotations__["privacy_level"])

MAX_SHOWN: Final = 60


class RunRefused(ValueError):
    """A run that gives no trace: a short `reason` for the counts, and a message that says where and what to do."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class RunField:
    """The value of one option: the same for every run, or that of a field of each run (`path`)."""

    option: str
    check: Callable[[Any], Any]
    constant: Any = None
    path: FieldPath | None = None

    def value(self, run: Any) -> Any:
        """Return the value for a run. Raises RunRefused where the run does not have the field, or a wrong value."""
        if self.path is None:
            return self.constant
        found = find_field(run, self.path)
        if found is None or found[1] is None:
            name = ".".join(self.path)
            raise RunRefused("missing_value", f"the run has no field {name}, which {self.option} names")
        try:
            return self.check(found[1])
        except ValueError as error:
            raise RunRefused("invalid_value", f"{'.'.join(self.path)}: {error} ({self.option})") from None


def parse_field(option: str, text: str, check: Callable[[Any], Any]) -> RunField:
    """Return what an option says: `@path.to.field`, or a constant; `@@` begins a constant with @. Raises ValueError."""
    if text.startswith("@") and not text.startswith("@@"):
        return RunField(option, check, path=parse_path(text[1:]))
    return RunField(option, check, check(text.removeprefix("@")))


def parse_success(option: str, text: str) -> RunField:
    """Return what --success says; `@path=TEXT` is true where the field is TEXT. Raises ValueError."""
    path, equals, wanted = text.partition("=")
    if not (text.startswith("@") and equals):
        return parse_field(option, text, as_success)
    return parse_field(option, path, lambda value: as_text(value) == wanted)


def parse_path(text: str) -> FieldPath:
    """Return the parts of `path.to.field`. Raises ValueError."""
    path = tuple(text.split("."))
    if not all(path):
        raise ValueError(f"@{text} is no path; write the names of the fields, joined by dots: @metadata.domain")
    return path


def find_field(value: Any, path: FieldPath) -> tuple[FieldPath, Any] | None:
    """Return the keys that lead to a field, and its value; None where it is not there.

    A number is a position in a list (-1 the last). A name may have dots: the longest that is there counts.
    """
    if not path:
        return (), value
    if isinstance(value, list):
        try:
            found = find_field(value[int(path[0])], path[1:])
        except (ValueError, IndexError):
            return None
        return found and ((path[0], *found[0]), found[1])
    if isinstance(value, dict):
        for end in range(len(path), 0, -1):
            name = ".".join(path[:end])
            found = find_field(value[name], path[end:]) if name in value else None
            if found is not None:
                return (name, *found[0]), found[1]
    return None


def unused_fields(value: dict[str, Any], used: set[FieldPath], above: FieldPath = ()) -> Iterator[str]:
    """Yield the names of the fields that no used path leads to; empty ones are not counted."""
    for name, inner in value.items():
        path = (*above, name)
        if path in used or is_empty(inner):
            continue
        if isinstance(inner, dict) and any(other[: len(path)] == path for other in used):
            yield from unused_fields(inner, used, path)
        else:
            yield ".".join(path)


def is_empty(value: Any) -> bool:
    """Return whether a field says nothing: null, or an empty text, list or object."""
    return value is None or value in ("", [], {})


def as_success(value: Any) -> bool:
    """Return a success: true, false, or their usual spellings. Raises ValueError."""
    known = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
    text = str(value).lower() if isinstance(value, bool | int | float | str) else ""
    if text not in known:
        raise ValueError(
            f"{shown(value)} is neither true nor false (nor 1 or 0); --success @field=TEXT compares a text"
        )
    return known[text]


def as_confidence(value: Any) -> float:
    """Return a number from 0 to 1. Raises ValueError."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number <= 1:
        raise ValueError(f"{shown(value)} is not a number from 0 to 1")
    return number


def as_text(value: Any) -> str:
    """Return a text that is not blank. Raises ValueError."""
    text = _as_plain_text(value)
    if text is None or not text.strip():
        raise ValueError(f"{shown(value)} is not a text")
    return text


def as_visibility(value: Any) -> str:
    """Return a metadata.visibility. Raises ValueError."""
    return _one_of(value, VISIBILITIES)


def as_privacy(value: Any) -> str:
    """Return a metadata.privacy_level. Raises ValueError."""
    return _one_of(value, PRIVACY_LEVELS)


def as_time(value: Any) -> str:
    """Return a time as ISO 8601 in UTC, from seconds since 1970 or ISO 8601 with a zone. Raises ValueError."""
    if isinstance(value, str) and re.match(CREATED_AT_PATTERN, value):
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        moment = datetime.fromtimestamp(value, UTC) if number else datetime.fromisoformat(value)
        utc = moment.astimezone(UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        known = "use ISO 8601 such as 2026-04-14T08:00:00Z, or seconds (not milliseconds) since 1970"
        raise ValueError(f"{shown(value)} is no time; {known}") from None
    if moment.tzinfo is None:
        raise ValueError(f"{shown(value)} has no time zone; end it with Z if it is UTC")
    return utc.replace(tzinfo=None).isoformat() + "Z"


def as_anything(value: Any) -> Any:
    """Return the value."""
    return value


def _one_of(value: Any, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{shown(value)} is none of {', '.join(allowed)}")
    return str(value)


def _as_plain_text(value: Any) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, str | int | float) else None


def shown(value: Any) -> str:
    """Return the beginning of a value for a message; of a list or object its kind alone."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."

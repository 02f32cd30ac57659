"""The options of `kp-worker convert`: values that a log does not have, as constants or as fields of each run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, get_args

import msgspec

from worker.core.trace import CREATED_AT_PATTERN, Limits, Metadata, ReasoningTrace

FieldPath = tuple[str, ...]

VISIBILITIES: Final[tuple[str, ...]] = get_args(Metadata.__annotations__["visibility"])

PRIVACY_LEVELS: Final[tuple[str, ...]] = get_args(Metadata.__annotations__["privacy_level"])

RESERVED: Final = frozenset(info.encode_name for info in msgspec.structs.fields(ReasoningTrace)) | {"scoring"}
"""Fields that --keep may not set."""

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


@dataclass(frozen=True, slots=True)
class Options:
    """What the options say: a field for each value that a log lacks, and how steps are made.

    `fields` has the names of the options without dashes: success, confidence, domain, visibility, privacy, and where
    given agent_id, framework, created_at, objective, result_summary.
    """

    fields: Mapping[str, RunField]
    keep: Mapping[str, RunField]
    messages: FieldPath
    error_prefixes: tuple[str, ...]
    max_content: int | None
    limits: Limits


def shown(value: Any) -> str:
    """Return the beginning of a value for a message; of a list or object its kind alone."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def is_empty(value: Any) -> bool:
    """Return whether a field says nothing: null, or an empty text, list or object."""
    return value is None or value in ("", [], {})


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
    text = str(value) if isinstance(value, str | int | float) else ""
    if not text.strip():
        raise ValueError(f"{shown(value)} is not a text")
    return text.lower() if isinstance(value, bool) else text


def as_visibility(value: Any) -> str:
    """Return a metadata.visibility. Raises ValueError."""
    return _one_of(value, VISIBILITIES)


def as_privacy(value: Any) -> str:
    """Return a metadata.privacy_level. Raises ValueError."""
    return _one_of(value, PRIVACY_LEVELS)


def _one_of(value: Any, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{shown(value)} is none of {', '.join(allowed)}")
    return str(value)


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


CHECKS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "success": as_success,
    "confidence": as_confidence,
    "domain": as_text,
    "visibility": as_visibility,
    "privacy": as_privacy,
    "created_at": as_time,
    "agent_id": as_text,
    "framework": as_text,
    "objective": as_text,
    "result_summary": as_text,
}


def parse_options(
    values: Mapping[str, str | None],
    keep: Iterable[str],
    messages: str,
    error_prefixes: tuple[str, ...],
    max_content: int | None,
    limits: Limits,
) -> Options:
    """Return what the options say; `values` has the names of CHECKS. Raises ValueError, with the option's name."""
    fields = {name: _parse(name, text) for name, text in values.items() if text is not None}
    kept = dict(_parse_keep(text) for text in keep)
    if not messages.startswith("@"):
        raise ValueError(f"--messages: {messages!r} is no path; begin it with @")
    if "" in error_prefixes:
        raise ValueError("--error-prefix: every result begins with an empty text")
    return Options(fields, kept, parse_path(messages[1:]), error_prefixes, max_content, limits)


def _parse(name: str, text: str) -> RunField:
    option = f"--{name.replace('_', '-')}"
    try:
        text.encode()  # an argument may be bytes that are not UTF-8
        return parse_success(option, text) if name == "success" else parse_field(option, text, CHECKS[name])
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def _parse_keep(text: str) -> tuple[str, RunField]:
    name, equals, path = text.partition("=")
    if not name or not equals or not path.startswith("@"):
        raise ValueError(f"--keep: {text!r} is not NAME=@path")
    if name in RESERVED:
        raise ValueError(f"--keep: {name} is a field of every trace; choose another name, such as x_{name}")
    return name, RunField("--keep", as_anything, path=parse_path(path[1:]))


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

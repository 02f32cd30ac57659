"""The options of `kp-worker convert`: values that logs lack, as constants or as fields of each run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from worker.core.trace import Limits, ReasoningTrace
from worker.runs.fields import (
    FieldPath,
    RunRefused,
    as_anything,
    as_confidence,
    as_privacy,
    as_success,
    as_text,
    as_time,
    as_visibility,
    find_field,
)

RESERVED: Final = frozenset(info.encode_name for info in msgspec.structs.fields(ReasoningTrace)) | {"scoring"}
"""Fields that --keep may not set."""


@dataclass(frozen=True, slots=True)
class RunField:
    """The value of one option."""

    option: str
    check: Callable[[Any], Any]
    constant: Any = None  # the same for every run
    path: FieldPath | None = None  # or a field of each run

    def value(self, run: Any) -> Any:
        """Return the value for a run. Raises RunRefused if the run lacks the field, or has a wrong value in it."""
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
    """The options: where each value comes from that a log lacks, and how steps are made."""

    fields: Mapping[str, RunField]
    """By option without dashes: success, confidence, domain, visibility, privacy, and if given agent_id, framework,
    created_at, objective, result_summary."""
    keep: Mapping[str, RunField]
    form: str  # "auto", or the form of every run
    messages: FieldPath | None  # path of a run's messages
    append: FieldPath | None  # path of a response
    group_by: FieldPath | None  # path of a conversation's name
    error_prefixes: tuple[str, ...]
    max_content: int | None
    limits: Limits


def parse_path(text: str) -> FieldPath:
    """Return the parts of `path.to.field`. Raises ValueError."""
    path = tuple(text.split("."))
    if not all(path):
        raise ValueError(f"@{text} is not a path; write the names of the fields, joined by dots: @metadata.domain")
    return path


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
    paths: Mapping[str, str | None],
    form: str,
    error_prefixes: tuple[str, ...],
    max_content: int | None,
    limits: Limits,
) -> Options:
    """Parse the options. Raises ValueError, with the option's name.

    `values` has the names of CHECKS, `paths` has messages, append and group_by.
    """
    fields = {name: _parse(name, text) for name, text in values.items() if text is not None}
    kept = dict(_parse_keep(text) for text in keep)
    found = {name: _parse_path_option(name, text) for name, text in paths.items() if text is not None}
    if "" in error_prefixes:
        raise ValueError("--error-prefix must not be empty: every result begins with an empty text")
    return Options(fields, kept, form, found.get("messages"), found.get("append"), found.get("group_by"),
                   error_prefixes, max_content, limits)  # fmt: skip


def _parse_path_option(name: str, text: str) -> FieldPath:
    if not text.startswith("@"):
        raise ValueError(f"--{name.replace('_', '-')}: {text!r} is not a path; begin it with @")
    return parse_path(text[1:])


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
    """Parse an option: `@path.to.field`, or a constant; `@@` begins a constant with @. Raises ValueError."""
    if text.startswith("@") and not text.startswith("@@"):
        return RunField(option, check, path=parse_path(text[1:]))
    return RunField(option, check, check(text.removeprefix("@")))


def parse_success(option: str, text: str) -> RunField:
    """Parse --success; `@path=TEXT` is true if the field is TEXT. Raises ValueError."""
    path, equals, wanted = text.partition("=")
    if not (text.startswith("@") and equals):
        return parse_field(option, text, as_success)
    return parse_field(option, path, lambda value: as_text(value) == wanted)

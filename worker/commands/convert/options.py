"""The options of `kp-worker convert` that have values: parsed, each with its check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from worker.commands.convert.fields import (
    RunField,
    as_anything,
    as_confidence,
    as_privacy,
    as_success,
    as_text,
    as_time,
    as_visibility,
    parse_field,
    parse_path,
    parse_success,
)
from worker.commands.convert.trace import RESERVED, ConvertOptions
from worker.core.trace import Limits

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
) -> ConvertOptions:
    """Return what the options say; `values` has the names of CHECKS. Raises ValueError, with the option's name."""
    fields = {name: _parse(name, text) for name, text in values.items() if text is not None}
    kept = dict(_parse_keep(text) for text in keep)
    if not messages.startswith("@"):
        raise ValueError(f"--messages: {messages!r} is no path; begin it with @")
    if "" in error_prefixes:
        raise ValueError("--error-prefix: every result begins with an empty text")
    return ConvertOptions(fields, kept, parse_path(messages[1:]), error_prefixes, max_content, limits)


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

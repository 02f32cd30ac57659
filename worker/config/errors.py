"""Errors about a setting, in words: where it is written, its value, the allowed values, its meaning."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Final

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from worker.config.checks import PEM
from worker.config.profiles import ProfileSetting
from worker.config.sources import KeyPath, Source, nearest, secret_fields

NOT_SHOWN: Final = "(not shown)"  # in place of what is a secret, or may be one
PASSWORD_IN_URL: Final = re.compile(r"://(?:[^/]*@|.*\?)")  # a password, or a query, which may hold a key
SHOWN: Final = 120  # characters of a wrong value that a message repeats


WORDS: Final[Mapping[str, str]] = {
    "bool_parsing": "give true or false",
    "bool_type": "give true or false",
    "dict_type": "give a table: in the config file [profiles.DOMAIN], in a variable a JSON object",
    "finite_number": "give a finite number",
    "float_parsing": "give a number",
    "float_type": "give a number",
    "int_from_float": "give a whole number",
    "int_parsing": "give a whole number",
    "int_parsing_size": "give a whole number",
    "int_type": "give a whole number",
    "model_type": "give a table with weights, threshold or both",
    "path_type": "give a path",
    "string_too_short": "give some text",
    "string_type": "give text",
}
"""Pydantic's types of findings, in words for a user who knows no Python."""


class ConfigError(Exception):
    """A setting is missing or wrong; each line names where it is written, the value and what is allowed."""


def explain(error: ValidationError, sources: Sequence[Source], fields: Mapping[str, FieldInfo]) -> Iterator[str]:
    """Yield a line for each finding, with the source that gave the value."""
    secrets = set(secret_fields(fields))
    for issue in error.errors():
        message = WORDS.get(issue["type"]) or issue["msg"].removeprefix("Value error, ")
        message = message.replace("Input should be", "it must be").replace("String should", "it must")
        path = tuple(str(part) for part in issue["loc"] if part != "[key]")
        if not path:
            yield f"settings conflict: {message}"
            continue
        info = fields.get(path[0]) if len(path) == 1 else None
        about = f" ({info.description})" if info is not None and info.description else ""
        unknown = issue["type"] == "extra_forbidden"
        if unknown:
            message = f"it is not a key of a profile{nearest(path[-1], ProfileSetting.model_fields)}"
        before, value, after = _place(path, sources, issue.get("input"))
        # A setting below the tables of a file is taken for a key of the last one, whatever it is.
        hidden = not secrets.isdisjoint(path) or (unknown and isinstance(value, str))
        yield f"{before}{NOT_SHOWN if hidden else _shown(value, secrets)} is wrong{after}: {message}{about}"


def _place(path: KeyPath, sources: Iterable[Source], given: Any) -> tuple[str, Any, str]:
    """Return the words before a value, the value, and the words behind it: (KP_PROFILES=, {...}, at code.threshold)."""
    source = next((source for source in sources if _reached(source, path)), Source("call", {}))
    if source.kind == "file" or (source.kind == "option" and source.gives(path)):
        value = source.get(path) if source.gives(path) else given
        return f"{source.written(path)}{' = ' if source.kind == 'file' else '='}", value, ""
    # A variable holds a whole table, as JSON.
    where = f" at {'.'.join(path[1:])}" if path[1:] else ""
    return f"{source.written(path[:1])}=", source.values.get(path[0], given), where


def _reached(source: Source, path: KeyPath) -> bool:
    """Whether the source gives the value, or the table in which it is missing."""
    return source.gives(path) or (len(path) > 1 and source.gives(path[:-1]))


def _shown(value: object, secrets: Set[str]) -> str:
    if PEM in str(value) or PASSWORD_IN_URL.search(str(value)):
        return NOT_SHOWN
    if isinstance(value, Mapping | list):
        return json.dumps(_without_texts(value, secrets))[:SHOWN]
    return repr(value[:SHOWN]) if isinstance(value, str) else str(value)[:SHOWN]


def _without_texts(value: object, secrets: Set[str]) -> object:
    """Return a table or list with its numbers alone: the tables of the settings hold no texts, and this one may."""
    if isinstance(value, Mapping):
        return {key: NOT_SHOWN if key in secrets else _without_texts(inner, secrets) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_texts(inner, secrets) for inner in value]
    return value if value is None or isinstance(value, int | float) else NOT_SHOWN

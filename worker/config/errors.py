"""What is wrong with a setting, in words: where it is written, its value, what is allowed, what it is for.

Lives here: the error of the room, and pydantic's findings put so that the user finds the place. Must not live here: the
rules themselves (settings.py, profiles.py, security.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from worker.config.profiles import ProfileSetting
from worker.config.sources import KeyPath, Source, nearest

PEM: Final = "-----BEGIN"
SECRETS: Final = frozenset({"sasl_password", "tls_key_password", "registry_key", "registry_url"})
"""Fields whose value a message never shows: secrets, and a URL that may hold a password."""

SHOWN: Final = 120
"""Characters of a wrong value that a message repeats."""


WORDS: Final[Mapping[str, str]] = {
    "bool_parsing": "give true or false",
    "bool_type": "give true or false",
    "dict_type": "give a table: in the config file [profiles.DOMAIN], in a variable a JSON object",
    "finite_number": "give a finite number",
    "float_parsing": "give a number",
    "float_type": "give a number",
    "int_from_float": "give a whole number",
    "int_parsing": "give a whole number",
    "int_type": "give a whole number",
    "model_type": "give a table with weights, threshold or both",
    "path_type": "give a path",
    "string_too_short": "give some text",
    "string_type": "give text",
}
"""Pydantic's types of findings, in the words of a user who knows no Python."""


class ConfigError(Exception):
    """A setting is missing or wrong; each line names where it is written, the value and what is allowed."""


def explain(error: ValidationError, sources: Sequence[Source], fields: Mapping[str, FieldInfo]) -> Iterator[str]:
    """Yield a line for each finding, with the source that gave the value."""
    for issue in error.errors():
        message = WORDS.get(issue["type"]) or issue["msg"].removeprefix("Value error, ")
        message = message.replace("Input should be", "it must be").replace("String should", "it must")
        path = tuple(str(part) for part in issue["loc"] if part != "[key]")
        if not path:
            yield f"settings conflict: {message}"
            continue
        info = fields.get(path[0]) if len(path) == 1 else None
        about = f" ({info.description})" if info is not None and info.description else ""
        if issue["type"] == "extra_forbidden":
            message = f"it is not a key of a profile{nearest(path[-1], ProfileSetting.model_fields)}"
        yield f"{_place(path, sources, issue.get('input'))}: {message}{about}"


def _place(path: KeyPath, sources: Iterable[Source], given: Any) -> str:
    """Return where a value is written, and the value: KP_THRESHOLD='2' is wrong."""
    source = next((source for source in sources if _reached(source, path)), Source("call", {}))
    if source.kind == "file" or (source.kind == "option" and source.gives(path)):
        shown = _shown(path[0], source.get(path) if source.gives(path) else given)
        return f"{source.written(path)}{' = ' if source.kind == 'file' else '='}{shown} is wrong"
    # A variable holds a whole table, as JSON.
    value = source.values.get(path[0], given)
    where = f" at {'.'.join(path[1:])}" if path[1:] else ""
    return f"{source.written(path[:1])}={_shown(path[0], value)} is wrong{where}"


def _reached(source: Source, path: KeyPath) -> bool:
    """Whether the source gives the value, or the table in which it is missing."""
    return source.gives(path) or (len(path) > 1 and source.gives(path[:-1]))


def _shown(field: str, value: object) -> str:
    if field in SECRETS or PEM in str(value):
        return "(not shown)"
    if isinstance(value, Mapping):
        return json.dumps(value, default=str)[:SHOWN]
    return repr(str(value)[:SHOWN]) if isinstance(value, str) else str(value)[:SHOWN]

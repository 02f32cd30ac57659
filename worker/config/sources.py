"""Where the values of settings come from: options, the environment, the config file."""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from pydantic import SecretStr
from pydantic.fields import FieldInfo

PREFIX: Final = "KP_"
CONFIG_VARIABLE: Final = "KP_CONFIG"

OPTIONS: Final[Mapping[str, str]] = {"bootstrap_servers": "--bootstrap-servers", "group_id": "--group"}
"""Settings with their own option; any other is given by --set."""

_LEAVE: Final = "entries leave caches by their lifetime or by capacity, and a new KP_CHANGELOG_TOPIC drops all at once"
_CUT: Final = "texts beyond KP_MAX_TOKENS are cut; KP_EMBED_TEXT=objective also compares the objective"
_PARTITION: Final = "novelty is each partition's; docs/publishing.md says which key to choose"
REMOVED: Final[Mapping[str, str]] = {
    "forget": _LEAVE,
    "forget_key": _LEAVE,
    "forget_key_file": _LEAVE,
    "forgotten_topic": _LEAVE,
    "novelty_scope": _PARTITION,
    "group_max_elements": _PARTITION,
    "group_max_lag_seconds": _PARTITION,
    "group_lag_action": _PARTITION,
    "long_texts": _CUT,
    "max_windows": _CUT,
    "screen_rules": "KP_SCREEN=mark and KP_CONTRIBUTE_SCREEN=hidden find hidden text, without rules to choose",
}
"""Settings of earlier versions, and what to do without each. Ignoring one could change a score in silence."""

KeyPath = tuple[str, ...]  # a key and the keys below it: ("profiles", "code", "threshold")


class SourceError(ValueError):
    """A source cannot be read; the message names it."""


@dataclass(frozen=True, slots=True)
class Source:
    """The values that one source gives, by key; tables are nested. `label`: the path of a config file."""

    kind: Literal["call", "option", "environment", "file"]
    values: Mapping[str, Any]
    label: str = ""

    def written(self, path: KeyPath) -> str:
        """Return how this source writes the key: KP_THRESHOLD, --set threshold, kp.toml: threshold."""
        if self.kind == "file":
            return f"{self.label}: {dotted(path)}"
        if self.kind == "option":
            return OPTIONS.get(path[0]) or f"--set {dotted(path)}"
        return PREFIX + path[0].upper()

    def get(self, path: KeyPath) -> Any:
        """Return the value at the path. Raises KeyError where this source gives none."""
        value: Any = self.values
        for key in path:
            if not isinstance(value, Mapping):
                raise KeyError(key)
            value = value[key]
        return value

    def gives(self, path: KeyPath) -> bool:
        """Whether this source gives a value at the path."""
        try:
            self.get(path)
        except KeyError:
            return False
        return True


def environment(fields: Iterable[str]) -> Source:
    """Return what the KP_ variables give; an empty one counts as not set. Raises SourceError for wrong JSON."""
    values = _variables(fields)
    if "profiles" in values:
        try:
            values["profiles"] = json.loads(values["profiles"])
        except ValueError as error:
            raise SourceError(f"{error}; KP_PROFILES must be JSON (one object)") from None
    return Source("environment", values)


def _variables(names: Iterable[str]) -> dict[str, Any]:
    """Return the values of those variables of settings that are set, whatever the case of their names."""
    variables = {name.upper(): value for name, value in os.environ.items() if value}
    return {name: variables[key] for name in names if (key := PREFIX + name.upper()) in variables}


def config_file(path: Path) -> Source:
    """Return what a TOML file gives. Raises SourceError where it cannot be read or is not TOML."""
    try:
        if not path.is_file():  # a device or a pipe might never end
            path.stat()
            raise SourceError(f"{path} is not a file; --config and {CONFIG_VARIABLE} name a TOML file")
        values = tomllib.loads(path.read_bytes().decode())
        str(values)  # a ValueError for a hexadecimal integer that Python reads and cannot print
        return Source("file", values, str(path))
    except SourceError:
        raise
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not TOML: byte {error.start} is not UTF-8") from None
    except ValueError as error:  # the parser's, or Python's of an integer of thousands of digits
        raise SourceError(f"{path} is not TOML: {error}") from None
    except OSError as error:
        raise SourceError(
            f"cannot read {path}: {error.strerror}; --config and {CONFIG_VARIABLE} name a TOML file"
        ) from None


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """Return nested values from NAME=VALUE, where VALUE is text. Raises SourceError, without what may be a secret.

    A name may be dotted, and quoted where TOML wants it: profiles."a b".threshold=0.8.
    """
    result: dict[str, Any] = {}
    for number, assignment in enumerate(assignments, 1):
        name, equals, value = assignment.partition("=")
        keys = _keys(name) if equals else None
        if keys is None:
            raise SourceError(
                f"--set number {number} is not NAME=VALUE, for example --set threshold=0.8 or "
                "--set profiles.code.threshold=0.8 (it is not shown, since it may hold a secret)"
            )
        if not value:
            raise SourceError(f"--set {dotted(keys)}: give NAME=VALUE, for example --set threshold=0.8")
        place = result
        for key in keys[:-1]:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise SourceError(f"--set {dotted(keys)}: {key} has a value already")
        place[keys[-1]] = value
    return result


def _keys(name: str) -> KeyPath | None:
    """Return the parts of a dotted key; None where the text is not a key."""
    keys: list[str] = []
    try:
        value: Any = tomllib.loads(f"{name} = 0") if "\n" not in name else {}
        while isinstance(value, dict):
            ((key, value),) = value.items()
            keys.append(key)
    except ValueError:  # no TOML, or none or several keys: a comment, a table
        return None
    return tuple(keys)


def merged(sources: Iterable[Source]) -> dict[str, Any]:
    """Return the values of all sources, the first one winning; tables are merged key by key."""
    result: dict[str, Any] = {}
    for source in sources:
        _fill(result, source.values)
    return result


def _fill(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if key not in into:
            into[key] = {} if isinstance(value, Mapping) else value
        if isinstance(value, Mapping) and isinstance(into[key], dict):
            _fill(into[key], value)


def removed_variables() -> Iterator[str]:
    """Describe each KP_ variable that was a setting of an earlier version, with what to do without it."""
    for name in sorted(_variables(REMOVED)):
        yield f"{PREFIX}{name.upper()} is no longer a setting: {REMOVED[name]}. Unset it"


def unknown_variables(fields: Iterable[str]) -> Iterator[str]:
    """Describe each KP_ variable that is not a setting (usually a misspelt one), with the nearest one that is."""
    known = [PREFIX + name.upper() for name in (*fields, *REMOVED)] + [CONFIG_VARIABLE]
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in known:
            yield f"{name} is not a setting{nearest(name, known)}"


def unknown_keys(source: Source, fields: Mapping[str, FieldInfo]) -> Iterator[str]:
    """Describe each key of a config file, or of --set, that is not a setting, with the nearest one that is."""
    for key in source.values:
        if key not in fields:
            name = key.lower().removeprefix(PREFIX.lower()).replace("-", "_")
            written = source.written((key,))
            if name in REMOVED:
                yield f"{written} is no longer a setting: {REMOVED[name]}. Remove it"
                continue
            # --set sasl_passwordSECRET== has lost its first "=".
            glued = [secret for secret in secret_fields(fields) if name.startswith(secret) and name not in fields]
            if source.kind == "option" and glued:
                written = f"--set {glued[0]}..."
            yield f"{written} is not a setting{nearest(name, fields)}"


def secret_fields(fields: Mapping[str, FieldInfo]) -> list[str]:
    """Return the settings whose value no message shows: secrets, and a URL that may hold a password."""
    return [
        name
        for name, info in fields.items()
        if name == "registry_url" or SecretStr in (info.annotation, *get_args(info.annotation))
    ]


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a question that names the nearest known name, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def dotted(path: KeyPath) -> str:
    """Write a path as TOML writes a key: profiles.code.threshold, with quotes where a part needs them."""
    return ".".join(
        part if part and part.isascii() and part.replace("-", "_").replace("_", "a").isalnum() else f'"{part}"'
        for part in path
    )

"""Where the values of settings come from: options, the environment, the config file.

Lives here: reading each source, which one wins, how each writes a key, and keys that no setting has. Must not live
here: what the settings are (settings.py), the words for a wrong value (errors.py).
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsError, TomlConfigSettingsSource

PREFIX: Final = "KP_"
CONFIG_VARIABLE: Final = "KP_CONFIG"

OPTIONS: Final[Mapping[str, str]] = {"bootstrap_servers": "--bootstrap-servers", "group_id": "--group"}
"""Settings that have an option of their own; any other is given by --set."""

KeyPath = tuple[str, ...]
"""A key and the keys below it: ("profiles", "code", "threshold")."""


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


def environment(settings: type[BaseSettings]) -> Source:
    """Return what the KP_ variables give. Raises SourceError for one that must be JSON and is not."""
    try:
        return Source("environment", EnvSettingsSource(settings)())
    except SettingsError as error:
        raise SourceError(f"{error.__cause__ or error}; KP_PROFILES must be JSON (one object)") from None


def config_file(settings: type[BaseSettings], path: Path) -> Source:
    """Return what a TOML file gives. Raises SourceError where it cannot be read or is not TOML."""
    try:
        if not path.is_file():  # the library takes a missing file for an empty one
            path.stat()
            raise SourceError(f"{path} is not a file; --config and {CONFIG_VARIABLE} name a TOML file")
        source = TomlConfigSettingsSource(settings, path)
    except tomllib.TOMLDecodeError as error:
        raise SourceError(f"{path} is not TOML: {error}") from None
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not TOML: byte {error.start} is not UTF-8") from None
    except OSError as error:
        raise SourceError(
            f"cannot read {path}: {error.strerror}; --config and {CONFIG_VARIABLE} name a TOML file"
        ) from None
    return Source("file", source.toml_data, str(path))


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """Return nested values from NAME=VALUE; NAME is a key as in the config file. Raises SourceError.

    VALUE is text, as in an environment variable. A name may be dotted, and quoted where TOML wants it:
    profiles."a b".threshold=0.8.
    """
    result: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not value:
            raise SourceError(f"--set {assignment}: give NAME=VALUE, for example --set threshold=0.8")
        try:
            keys = _keys(tomllib.loads(f"{name} = 0"))
        except tomllib.TOMLDecodeError:
            raise SourceError(
                f"--set {assignment}: {name!r} is not a key; for example profiles.code.threshold"
            ) from None
        place = result
        for key in keys[:-1]:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise SourceError(f"--set {assignment}: {key} has a value already")
        place[keys[-1]] = value
    return result


def _keys(table: Mapping[str, Any]) -> list[str]:
    keys = []
    value: Any = table
    while isinstance(value, dict):
        ((key, value),) = value.items()
        keys.append(key)
    return keys


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


def unknown_variables(fields: Iterable[str]) -> Iterator[str]:
    """Describe each KP_ variable that is not a setting (usually a misspelt one), with the nearest one that is."""
    known = [PREFIX + name.upper() for name in fields] + [CONFIG_VARIABLE]
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in known:
            yield f"{name} is not a setting{nearest(name, known)}"


def unknown_keys(source: Source, fields: Iterable[str]) -> Iterator[str]:
    """Describe each key of a config file, or of --set, that is not a setting, with the nearest one that is."""
    known = list(fields)
    for key in source.values:
        if key not in known:
            name = key.lower().removeprefix(PREFIX.lower()).replace("-", "_")
            yield f"{source.written((key,))} is not a setting{nearest(name, known)}"


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

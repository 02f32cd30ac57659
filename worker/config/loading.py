"""Reading the settings: options override the environment, that the config file, and that the defaults."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from worker.config.errors import ConfigError, explain
from worker.config.settings import Settings
from worker.config.sources import (
    CONFIG_VARIABLE,
    KeyPath,
    Source,
    SourceError,
    config_file,
    environment,
    merged,
    removed_variables,
    unknown_keys,
    unknown_variables,
)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings, the sources that gave values (the one that wins first), and what is odd but no error."""

    settings: Settings
    sources: tuple[Source, ...]
    warnings: tuple[str, ...]

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of the config files that were read: one or none."""
        return tuple(source.label for source in self.sources if source.kind == "file")

    def origin(self, path: KeyPath) -> str:
        """Return what gives the value of a key: KP_THRESHOLD, --set threshold, the path of the file, or default."""
        for source in self.sources:
            if source.gives(path):
                return source.label if source.kind == "file" else source.written(path)
        return "default"

    def given(self) -> dict[str, str]:
        """Return the settings that some source gives, and which one: {"group_id": "KP_GROUP_ID"}."""
        names = {name for source in self.sources for name in source.values}
        return {name: self.origin((name,)) for name in Settings.model_fields if name in names}


def load(file: Path | None = None, options: Mapping[str, Any] | None = None, **fields: Any) -> Settings:
    """Read the settings: a file (default: KP_CONFIG), `options` (nested, --set), `fields`. Raises ConfigError."""
    return read(file, options, **fields).settings


def read(file: Path | None = None, options: Mapping[str, Any] | None = None, **fields: Any) -> Loaded:
    """Read the settings as `load` does, and keep their sources. Raises ConfigError: a line for all that is wrong."""
    try:
        return _read(_sources(file, options or {}, fields))
    except SourceError as error:
        raise ConfigError(str(error)) from None
    except RecursionError:
        raise ConfigError("a value is nested too deeply; the settings have four levels") from None


def _read(sources: tuple[Source, ...]) -> Loaded:
    problems = [line for source in sources for line in _odd_keys(source)]
    settings = None
    try:
        settings = Settings(**_known(sources))
    except ValidationError as error:
        problems += explain(error, sources, Settings.model_fields)
    problems += _hidden_problems(sources, problems)
    if problems or settings is None:
        raise ConfigError("\n".join(problems))
    return Loaded(settings, sources, tuple(unknown_variables(Settings.model_fields)))


def _sources(file: Path | None, options: Mapping[str, Any], fields: Mapping[str, Any]) -> tuple[Source, ...]:
    named = os.environ.get(CONFIG_VARIABLE)
    path = file or (Path(named) if named else None)
    found = [
        Source("call", {name: value for name, value in fields.items() if value is not None}),
        Source("option", options),
        environment(Settings.model_fields),
    ]
    if path:
        found.append(config_file(path))
    return tuple(found)


def _known(sources: tuple[Source, ...]) -> dict[str, Any]:
    return {name: value for name, value in merged(sources).items() if name in Settings.model_fields}


def _hidden_problems(sources: tuple[Source, ...], known: list[str]) -> list[str]:
    """Return the errors in values of the file that another source hides: they would surprise the user later."""
    files = tuple(source for source in sources if source.kind == "file")
    hidden = tuple(source for source in sources if source.kind != "file")
    if not files or not any(source.values for source in hidden):
        return []
    try:
        Settings(**_known((*files, *hidden)))
    except ValidationError as error:
        lines = explain(error, files, Settings.model_fields)
        return [line for line in lines if line.startswith(files[0].label) and line not in known]
    return []


def _odd_keys(source: Source) -> list[str]:
    """Return the errors in keys, and in values that pydantic would take for another type."""
    if source.kind == "call":
        return []
    if source.kind == "environment":
        return list(removed_variables())
    problems = list(unknown_keys(source, Settings.model_fields))
    for name, value in source.values.items():
        info = Settings.model_fields.get(name)
        if isinstance(value, bool) and info is not None and bool not in (info.annotation, *get_args(info.annotation)):
            written = source.written((name,))
            problems.append(f"{written} = {str(value).lower()} is wrong: the setting takes neither true nor false")
    return problems

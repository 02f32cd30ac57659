"""`kp-worker config`: check the settings, show them with their origin, print the schema of the config file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from worker.commands.shared.console import checked_settings, say_warnings, write_line
from worker.config import PREFIX, Loaded, Settings, config_schema
from worker.config.sources import dotted
from worker.core.terminal import clean, clean_json

HIDDEN: Final = "(set, not shown)"
VALUE_COLUMNS: Final = 24
"""Width of the values' column; a longer value moves its origin to the right."""


class Setting(NamedTuple):
    """A setting as it takes effect. `value` is what JSON can say; None: it has none."""

    name: str
    value: Any
    origin: str


def run_check(file: Path | None) -> None:
    """Say that the settings are right, or raise SettingsError with all that is wrong."""
    loaded = checked_settings(file)
    given = loaded.given()
    for source in loaded.sources:
        if source.kind == "file":
            write_line(clean(f"{source.label}: ok, {len(source.values)} settings"))
            hidden = [f"{name} by {given[name]}" for name in source.values if given[name] != source.label]
            if hidden:
                write_line(clean(f"set there, and overridden: {', '.join(hidden)}"))
    others = [origin for origin in given.values() if origin not in loaded.files]
    if others:
        write_line(clean(f"set elsewhere: {', '.join(others)}: ok"))
    if not given:
        write_line("nothing is set: all settings have their defaults")
    say_warnings(loaded)


def run_show(*, changed: bool, as_json: bool) -> None:
    """Write every setting with its origin; with `changed` only those that some source gives."""
    loaded = checked_settings()
    rows = [row for row in _rows(loaded) if not changed or row.origin not in ("default", "threshold")]
    width = max((len(row.name) for row in rows), default=0)
    for row in rows:
        if as_json:
            shown = row._asdict() | {"variable": PREFIX + row.name.partition(".")[0].upper()}
            write_line(clean_json(json.dumps(shown, ensure_ascii=False)))
        else:
            write_line(clean(f"{row.name:{width}}  {_text(row.value):{VALUE_COLUMNS}}  {row.origin}"))
    say_warnings(loaded)


def run_schema() -> None:
    """Write the JSON Schema of the config file."""
    write_line(json.dumps(config_schema(), indent=2))


def _rows(loaded: Loaded) -> Iterator[Setting]:
    settings = loaded.settings
    for name in Settings.model_fields:
        if name != "profiles":
            yield Setting(name, _plain(_effective(settings, name)), loaded.origin((name,)))
    for domain, profile in settings.scoring_profiles().items():
        path = ("profiles", domain)
        name, own = dotted((*path, "threshold")), profile.threshold
        yield (
            Setting(name, settings.threshold, "threshold")
            if own is None
            else Setting(name, own, loaded.origin((*path, "threshold")))
        )
        weights = dataclasses.asdict(profile.weights)
        yield Setting(dotted((*path, "weights")), weights, loaded.origin((*path, "weights")))


def _effective(settings: Settings, name: str) -> object:
    if name == "changelog_topic":
        return settings.changelog
    if name == "cache_ttl_seconds" and settings.cache_ttl_seconds is None:
        return "none"
    return getattr(settings, name)


def _plain(value: object) -> Any:
    if hasattr(value, "get_secret_value"):
        return HIDDEN
    return str(value) if isinstance(value, Path) else value


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{name} {number:g}" for name, number in value.items())
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)

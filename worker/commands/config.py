"""`kp-worker config`: check the settings, show them with their origin."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from worker.commands.shared.console import CommandGroup, say, write_line
from worker.commands.shared.options import json_option, load_settings, say_warnings, settings_options
from worker.core.terminal import clean, clean_json, number_of

if TYPE_CHECKING:
    from worker.config import Loaded, Settings

HIDDEN: Final = "(set, not shown)"


class Setting(NamedTuple):
    """A setting in effect."""

    name: str
    value: Any  # as in JSON; None: it has none
    origin: str


@click.group(cls=CommandGroup)
def config() -> None:
    """Check and show the settings: options, environment variables, config file, defaults."""


@config.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--strict", is_flag=True, help="Exit with 1 if there are warnings.")
@settings_options
def check(file: Path | None, strict: bool) -> None:
    """Check a config file together with the environment, without Kafka and without the model.

    Files that settings name (keys, certificates, patterns) are read as well; one that is not here is only a warning.
    FILE is a TOML file [--config or KP_CONFIG]. Names all errors at once, each with its key and the allowed values. An
    unknown KP_ variable is only a warning: Kubernetes sets such variables for a service named kp.

    Exit codes: 0 no errors; 1 warnings, with --strict; 2 errors.
    """
    loaded = load_settings(file)
    given = loaded.given()
    for source in loaded.sources:
        if source.kind == "file":
            write_line(clean(f"{source.label}: ok, {number_of(len(source.values), 'setting')}"))
            if hidden := [f"{name} by {given[name]}" for name in source.values if given[name] != source.label]:
                write_line(clean(f"set there, and overridden: {', '.join(hidden)}"))
    if others := [origin for origin in given.values() if origin not in loaded.files]:
        write_line(clean(f"set elsewhere: {', '.join(others)}: ok"))
    if not given:
        write_line("nothing is set: all settings have their defaults")
    say_warnings(loaded)
    missing = _check_files(loaded.settings)
    for warning in missing:
        say(f"warning: {warning}")
    if strict and (loaded.warnings or missing):
        sys.exit(1)


def _check_files(settings: Settings) -> list[str]:
    """Read the files that settings name, as the commands do; return which are not here. Raises ConfigError."""
    from worker.config import PREFIX, ConfigError
    from worker.config.keys import Token, TokenError, judge_keys
    from worker.config.redaction_rules import redaction_rules
    from worker.kafka.connections import client_arguments

    files = {name: path for name in type(settings).model_fields if isinstance(path := getattr(settings, name), Path)}
    missing = [name for name, path in files.items() if not path.exists()]
    here = files.keys() - missing
    try:
        if not any(name.startswith(("tls_", "sasl_")) for name in missing):
            client_arguments(settings)
        if "verdict_key_file" in here:
            judge_keys(settings)
        if "redact_patterns_file" in here:
            redaction_rules(settings)
        for name in ("embedder_token_file", "registry_key_file"):
            if name in here:
                Token(PREFIX + name.upper(), files[name])
    except TokenError as error:
        raise ConfigError(str(error)) from None
    unchecked = "is not on this machine: its content is not checked"
    return [f"{PREFIX}{name.upper()}={files[name]} {unchecked}" for name in missing]


@config.command()
@click.option("--changed", is_flag=True, help="Only settings that differ from the default.")
@json_option
@settings_options
def show(changed: bool, as_json: bool) -> None:
    """Show the effective value of every setting, and where it comes from. Secrets are not shown.

    Settings that conflict are shown as they are written, and then the errors. Exit codes: 0 no errors; 2 errors.
    """
    from worker.config import PREFIX, ConfigError

    problem = None
    try:
        loaded = load_settings()
    except ConfigError as error:
        problem = error
        try:
            loaded = load_settings(checked=False)
        except ConfigError:  # a source that cannot be read
            raise problem from None
    rows = [row for row in _rows(loaded) if not changed or row.origin not in ("default", "threshold")]
    width = max((len(row.name) for row in rows), default=0)
    for row in rows:
        if as_json:
            shown = row._asdict() | {"variable": PREFIX + row.name.partition(".")[0].upper()}
            write_line(clean_json(json.dumps(shown, ensure_ascii=False)))
        else:
            # Width of the column of values; a longer value moves its origin to the right
            write_line(clean(f"{row.name:{width}}  {_text(row.value):24}  {row.origin}"))
    say_warnings(loaded)
    if problem is not None:
        raise problem


def _rows(loaded: Loaded) -> Iterator[Setting]:
    from worker.config.loading import dotted

    settings = loaded.settings
    effective = {name: getattr(settings, name) for name in type(settings).model_fields if name != "profiles"}
    effective["changelog_topic"] = settings.changelog
    if settings.cache_ttl_seconds is None:
        effective["cache_ttl_seconds"] = "none"
    for name, value in effective.items():
        yield Setting(name, _plain(name, value), loaded.origin((name,)))
    if not loaded.checked:
        yield from _written(loaded, ("profiles",), settings.profiles)
        return
    for domain, profile in settings.scoring_profiles().items():
        path = ("profiles", domain)
        origin = "threshold" if profile.threshold is None else loaded.origin((*path, "threshold"))
        yield Setting(dotted((*path, "threshold")), profile.threshold_or(settings.threshold), origin)
        weights = dataclasses.asdict(profile.weights)
        yield Setting(dotted((*path, "weights")), weights, loaded.origin((*path, "weights")))


def _written(loaded: Loaded, path: tuple[str, ...], value: object) -> Iterator[Setting]:
    """Yield the numbers of a table as they are written; a text may be a secret at the wrong place."""
    from worker.config.loading import dotted

    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _written(loaded, (*path, key), inner)
    else:
        shown = re.fullmatch(r"-?[0-9.]{1,24}", str(value))
        yield Setting(dotted(path), str(value) if shown else HIDDEN, loaded.origin(path))


def _plain(name: str, value: object) -> Any:
    """Return a value as in JSON, hidden if it is a secret, or may hold one where the settings are not checked."""
    from worker.config.loading import SECRETS, may_hold_secret

    if hasattr(value, "get_secret_value") or isinstance(value, Mapping | list):
        return HIDDEN
    if isinstance(value, str) and (may_hold_secret(value) or (value and name in SECRETS)):
        return HIDDEN
    return str(value) if isinstance(value, Path) else value


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{name} {number:g}" for name, number in value.items())
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)

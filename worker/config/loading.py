"""Reading the settings: options override the environment, that the config file, and that the defaults.

From top to bottom: reading and merging; the sources; errors in words, which say where a value is written.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from pydantic import SecretStr, ValidationError

from worker.config.checks import PEM
from worker.config.settings import PREFIX, ProfileSetting, Settings


class ConfigError(Exception):
    """A setting is missing or wrong; each line names where it is written, the value and what is allowed."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings, the sources that gave values (the one that wins first), and what is odd but no error."""

    settings: Settings
    sources: tuple[Source, ...]
    warnings: tuple[str, ...]
    checked: bool = True

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of the config files that were read: one or none."""
        return tuple(source.label for source in self.sources if source.kind == "file")

    def origin(self, path: KeyPath) -> str:
        """Return what gives the value of a key: KP_THRESHOLD, --set threshold, the path of the file, or default."""
        source = giver(path, self.sources)
        return "default" if source is None else source.label or source.written(path)

    def given(self) -> dict[str, str]:
        """Return the settings that some source gives, and which one: {"group_id": "KP_GROUP_ID"}."""
        names = {name for source in self.sources for name in source.values}
        return {name: self.origin((name,)) for name in FIELDS if name in names}


def load(file: Path | None = None, options: Mapping[str, Any] | None = None, **fields: Any) -> Settings:
    """Read the settings: a file (default: KP_CONFIG), `options` (nested, --set), `fields`. Raises ConfigError."""
    return read(file, options, **fields).settings


def read(
    file: Path | None = None, options: Mapping[str, Any] | None = None, *, checked: bool = True, **fields: Any
) -> Loaded:
    """Read the settings as `load` does, and keep their sources. Raises ConfigError: a line for all that is wrong.

    Not `checked`: the values as they are written, to show where wrong ones come from; a source must still be readable.
    """
    named = file or os.environ.get(CONFIG_VARIABLE)
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        sources: tuple[Source, ...] = (Source("call", given), Source("option", options or {}), environment())
        if named:
            sources += (config_file(Path(named)),)
        values = merged(*(source.values for source in sources))
        if not checked:
            written = {name: values[name] for name in values.keys() & FIELDS}
            return Loaded(Settings.model_construct(**written), sources, (), checked=False)
        problems = [line for source in sources for line in _odd_keys(source)]
        settings = None
        try:
            settings = Settings.model_validate(values)
        except ValidationError as error:
            problems += explain(error, sources)
        problems += _hidden_problems(sources, problems)
    except RecursionError:
        raise ConfigError(TOO_DEEP) from None
    if problems or settings is None:
        raise ConfigError("\n".join(problems))
    return Loaded(settings, sources, tuple(_unknown_variables()))


def _hidden_problems(sources: tuple[Source, ...], known: list[str]) -> list[str]:
    """Return the errors in values of the file that another source hides: they would surprise the user later."""
    *others, file = sources
    if file.kind != "file":
        return []
    try:
        Settings.model_validate(merged(file.values, *(source.values for source in others)))
    except ValidationError as error:
        return [line for line in explain(error, (file,)) if line.startswith(file.label) and line not in known]
    return []


def _odd_keys(source: Source) -> Iterator[str]:
    """Describe each key that is not a setting, and each value that pydantic would take for another type."""
    if source.kind == "environment":
        for name in sorted(_variables(REMOVED)):
            yield f"{PREFIX}{name.upper()} is no longer a setting: {REMOVED[name]}. Unset it"
    elif source.kind != "call":
        for key, value in source.values.items():
            info, written = FIELDS.get(key), source.written((key,))
            if info is None:
                yield _unknown_key(source, key)
            elif isinstance(value, bool) and bool not in (info.annotation, *get_args(info.annotation)):
                yield f"{written} = {str(value).lower()} is wrong: the setting takes neither true nor false"


def _unknown_key(source: Source, key: str) -> str:
    name, written = key.lower().removeprefix(PREFIX.lower()).replace("-", "_"), source.written((key,))
    if name in REMOVED:
        return f"{written} is no longer a setting: {REMOVED[name]}. Remove it"
    # --set sasl_passwordSECRET== has lost its first "=".
    glued = [secret for secret in SECRETS if name.startswith(secret) and name not in FIELDS]
    if source.kind == "option" and glued:
        written = f"--set {glued[0]}..."
    return f"{written} is not a setting{_nearest(name, FIELDS)}"


def _unknown_variables() -> Iterator[str]:
    """Describe each KP_ variable that is not a setting (usually a misspelt one), with the nearest one that is."""
    known = [PREFIX + name.upper() for name in (*FIELDS, *REMOVED)] + [CONFIG_VARIABLE]
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in known:
            yield f"{name} is not a setting{_nearest(name, known)}"


def _nearest(name: str, known: Iterable[str]) -> str:
    """Return a question that names the nearest known name, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


# -- the sources

CONFIG_VARIABLE: Final = "KP_CONFIG"
FIELDS: Final = Settings.model_fields

SECRETS: Final = tuple(
    name
    for name, info in FIELDS.items()
    if name == "registry_url" or SecretStr in (info.annotation, *get_args(info.annotation))
)
"""The settings whose value no message shows: secrets, and a URL that may hold a password."""

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


def giver(path: KeyPath, sources: Iterable[Source]) -> Source | None:
    """Return the first source that gives a value at the path."""
    for source in sources:
        with contextlib.suppress(KeyError):
            source.get(path)
            return source
    return None


def environment() -> Source:
    """Return what the KP_ variables give; an empty one counts as not set. Raises ConfigError for wrong JSON."""
    values = _variables(FIELDS)
    if "profiles" in values:
        try:
            values["profiles"] = json.loads(values["profiles"])
        except ValueError as error:
            raise ConfigError(f"{error}; KP_PROFILES must be JSON (one object)") from None
    return Source("environment", values)


def _variables(names: Iterable[str]) -> dict[str, Any]:
    """Return the values of those variables of settings that are set, whatever the case of their names."""
    variables = {name.upper(): value for name, value in os.environ.items() if value}
    return {name: variables[key] for name in names if (key := PREFIX + name.upper()) in variables}


def config_file(path: Path) -> Source:
    """Return what a TOML file gives. Raises ConfigError where it cannot be read or is not TOML."""
    try:
        if not path.is_file():  # a device or a pipe might never end
            path.stat()
            raise ConfigError(f"{path} is not a file; --config and {CONFIG_VARIABLE} name a TOML file")
        values = tomllib.loads(path.read_bytes().decode())
        str(values)  # a ValueError for a hexadecimal integer that Python reads and cannot print
        _without_texts(values)  # a RecursionError where no message could show a value
        return Source("file", values, str(path))
    except ConfigError:
        raise
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not TOML: byte {error.start} is not UTF-8") from None
    except ValueError as error:  # the parser's, or Python's of an integer of thousands of digits
        raise ConfigError(f"{path} is not TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: {TOO_DEEP}") from None
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; --config and {CONFIG_VARIABLE} name a TOML file"
        ) from None


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """Return nested values from NAME=VALUE, where VALUE is text. Raises ConfigError, without what may be a secret.

    A name may be dotted, and quoted where TOML wants it: profiles."a b".threshold=0.8.
    """
    result: dict[str, Any] = {}
    for number, assignment in enumerate(assignments, 1):
        name, equals, value = assignment.partition("=")
        keys = _keys(name) if equals else None
        if keys is None:
            raise ConfigError(
                f"--set number {number} is not NAME=VALUE, for example --set threshold=0.8 or "
                "--set profiles.code.threshold=0.8 (it is not shown, since it may hold a secret)"
            )
        if not value:
            raise ConfigError(f"--set {dotted(keys)}: give NAME=VALUE, for example --set threshold=0.8")
        place = result
        for key in keys[:-1]:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise ConfigError(f"--set {dotted(keys)}: {key} has a value already")
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


def merged(first: Mapping[str, Any], *others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all tables, the first one winning; tables within them are merged key by key."""
    result = dict(first)
    for key, value in (item for other in others for item in other.items()):
        given = result.setdefault(key, value)
        if isinstance(given, Mapping) and isinstance(value, Mapping):
            result[key] = merged(given, value)
    return result


def dotted(path: KeyPath) -> str:
    """Write a path as TOML writes a key: profiles.code.threshold, with quotes where a part needs them."""
    return ".".join(
        part if part and part.isascii() and part.replace("-", "_").replace("_", "a").isalnum() else f'"{part}"'
        for part in path
    )


# -- errors

TOO_DEEP: Final = "a value is nested too deeply; the settings have four levels"
NOT_SHOWN: Final = "(not shown)"  # in place of what is a secret, or may be one
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


def explain(error: ValidationError, sources: Sequence[Source]) -> Iterator[str]:
    """Yield a line for each finding, with the source that gave the value."""
    for issue in error.errors():
        message = WORDS.get(issue["type"]) or issue["msg"].removeprefix("Value error, ")
        message = message.replace("Input should be", "it must be").replace("String should", "it must")
        path = tuple(str(part) for part in issue["loc"] if part != "[key]")
        if not path:
            yield f"settings conflict: {message}"
            continue
        hidden = not set(SECRETS).isdisjoint(path)
        if issue["type"] == "extra_forbidden":
            message = f"it is not a key of a profile{_nearest(path[-1], ProfileSetting.model_fields)}"
            # A setting below the tables of a file is taken for a key of the last one, whatever it is.
            hidden |= isinstance(issue["input"], str)
        about = f" ({FIELDS[path[0]].description})" if len(path) == 1 else ""
        source = giver(path, sources) or Source("call", {})  # one that these sources do not give
        if source.kind in ("file", "option"):
            written, value, where = source.written(path), source.get(path), ""
        else:  # a variable holds a whole table, as JSON
            written, value = source.written(path[:1]), source.values.get(path[0])
            where = f" at {'.'.join(path[1:])}" if path[1:] else ""
        equals = " = " if source.kind == "file" else "="
        yield f"{written}{equals}{NOT_SHOWN if hidden else _shown(value)} is wrong{where}: {message}{about}"


def _shown(value: object) -> str:
    if may_hold_secret(str(value)):
        return NOT_SHOWN
    if isinstance(value, Mapping | list):
        return json.dumps(_without_texts(value))[:SHOWN]
    return repr(value[:SHOWN]) if isinstance(value, str) else str(value)[:SHOWN]


def may_hold_secret(text: str) -> bool:
    """Return whether a text may hold a secret, whatever its setting: a key in PEM; a password or a query in a URL."""
    return PEM in text or re.search(r"://(?:[^/]*@|.*\?)", text) is not None


def _without_texts(value: object) -> object:
    """Return a table or list with its numbers alone: the tables of the settings hold no texts, and this one may."""
    if isinstance(value, Mapping):
        return {key: NOT_SHOWN if key in SECRETS else _without_texts(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_texts(inner) for inner in value]
    return value if value is None or isinstance(value, int | float) else NOT_SHOWN

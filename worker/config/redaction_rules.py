"""The rules of redaction: KP_REDACT_RULES, and the patterns of KP_REDACT_PATTERNS_FILE."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Final

from worker.config.errors import ConfigError
from worker.config.settings import Settings
from worker.core.redaction import STRICT_TYPES, Rules
from worker.core.redaction_patterns import OwnPattern, own_pattern

MOST_PATTERNS: Final = 100
MOST_BYTES: Final = 1 << 20

_FORM: Final = """give tables such as [[pattern]] with name = "customer_number" and pattern = 'KD-[0-9]{8}'"""


def redaction_rules(settings: Settings, unset: str = "reference") -> Rules:
    """Return the rules; `unset`: their name where KP_REDACT_RULES is not set. Raises ConfigError for a wrong file."""
    file = settings.redact_patterns_file
    return Rules(settings.redact_rules or unset, () if file is None else _read(file))


def _read(file: Path) -> tuple[OwnPattern, ...]:
    where = f"KP_REDACT_PATTERNS_FILE={file}"
    try:
        if not file.is_file():  # a device or a pipe might never end
            file.stat()
            raise ConfigError(f"{where} is not a file; {_FORM}")
        raw = file.read_bytes()
        if len(raw) > MOST_BYTES:
            raise ConfigError(f"{where} has {len(raw)} bytes, more than {MOST_BYTES}; {_FORM}")
        content = tomllib.loads(raw.decode())
    except OSError as error:
        raise ConfigError(
            f"{where} cannot be read: {error.strerror}; check the path, the mount and the permissions"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ConfigError(f"{where} is not TOML: {error}; {_FORM}") from None
    tables = content.get("pattern")
    if content.keys() != {"pattern"} or not isinstance(tables, list) or not 0 < len(tables) <= MOST_PATTERNS:
        raise ConfigError(f"{where} must hold 1 to {MOST_PATTERNS} patterns and nothing else; {_FORM}")
    patterns = tuple(_pattern(where, number, table) for number, table in enumerate(tables, 1))
    names = [pattern.name for pattern in patterns]
    for name in names:
        if names.count(name) > 1 or name in STRICT_TYPES:
            raise ConfigError(f"{where}: the name {name!r} is taken; choose another one")
    return patterns


def _pattern(where: str, number: int, table: Any) -> OwnPattern:
    place = f"{where}: pattern {number}"
    known = {"name", "pattern", "replacement"}
    if not isinstance(table, dict) or not {"name", "pattern"} <= table.keys() <= known:
        raise ConfigError(f"{place} must have name and pattern, may have replacement, and nothing else; {_FORM}")
    if not all(isinstance(value, str) for value in table.values()):
        raise ConfigError(f"{place}: name, pattern and replacement are texts; {_FORM}")
    try:
        return own_pattern(table["name"], table["pattern"], table.get("replacement"))
    except ValueError as error:
        raise ConfigError(f"{place} ({table['name']!r}): {error}") from None

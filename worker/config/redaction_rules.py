"""The rules of redaction and of the screen as the settings choose them. worker/redact/ loads where they do."""

from __future__ import annotations

import tomllib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from worker.config.loading import ConfigError
from worker.config.settings import Settings
from worker.core.records import STRICT_TYPES, Clean, Screen

if TYPE_CHECKING:
    from worker.core.scorer import EvaluationConfig
    from worker.core.verdicts import Judges
    from worker.redact.documents import Rules
    from worker.redact.markers import OwnPattern

_FORM: Final = """give tables such as [[pattern]] with name = "customer_number" and pattern = 'KD-[0-9]{8}'"""


def redaction_rules(settings: Settings, unset: str = "reference") -> Rules:
    """Return the rules; `unset`: their name where KP_REDACT_RULES is not set. Raises ConfigError for a wrong file."""
    from worker.redact.documents import Rules

    file = settings.redact_patterns_file
    return Rules(settings.redact_rules or unset, () if file is None else _read(file))


def output_rules(settings: Settings) -> Rules | None:
    """Return the rules for the worker's outputs; None where none is redacted, and there is no file to check."""
    off = settings.redact == "off" and settings.redact_patterns_file is None
    return None if off else redaction_rules(settings)


def _read(file: Path) -> tuple[OwnPattern, ...]:
    from worker.redact.markers import MOST_INSTRUCTIONS

    where = f"KP_REDACT_PATTERNS_FILE={file}"
    try:
        if not file.is_file():  # a device or a pipe might never end
            file.stat()
            raise ConfigError(f"{where} is not a file; {_FORM}")
        raw = file.read_bytes()
        if len(raw) > 1 << 20:
            raise ConfigError(f"{where} has {len(raw)} bytes, more than 1048576; {_FORM}")
        content = tomllib.loads(raw.decode())
    except OSError as error:
        raise ConfigError(
            f"{where} cannot be read: {error.strerror}; check the path, the mount and the permissions"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ConfigError(f"{where} is not TOML: {error}; {_FORM}") from None
    tables = content.get("pattern")
    if content.keys() != {"pattern"} or not isinstance(tables, list) or not 0 < len(tables) <= 100:
        raise ConfigError(f"{where} must hold 1 to 100 patterns and nothing else; {_FORM}")
    patterns = tuple(_pattern(where, number, table) for number, table in enumerate(tables, 1))
    instructions = 0
    for number, pattern in enumerate(patterns, 1):
        instructions += pattern.instructions
        if instructions > MOST_INSTRUCTIONS:
            raise ConfigError(
                f"{where}: pattern {number} ({pattern.name!r}) has {pattern.instructions} instructions of RE2, which "
                f"makes {instructions}, more than {MOST_INSTRUCTIONS}: a text of 1 MiB could take more than 25 s. Use "
                r"shorter repeats than x{0,500}, and ASCII such as [a-z] in place of \pL"
            )
    names = [pattern.name for pattern in patterns]
    for name in names:
        if names.count(name) > 1 or name in STRICT_TYPES:
            raise ConfigError(f"{where}: the name {name!r} is taken; choose another one")
    return patterns


def _pattern(where: str, number: int, table: Any) -> OwnPattern:
    from worker.redact.markers import own_pattern

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


def evaluation_config(settings: Settings, rules: Rules | None, judges: Judges | None = None) -> EvaluationConfig:
    """Return how records are evaluated. `rules`: those of `output_rules`; `judges`: whose verdicts count."""
    from worker.core.scorer import EvaluationConfig  # numpy: other commands redact without it

    clean: Clean | None = None
    screen: Screen | None = None
    if rules is not None and settings.redact != "off":
        from worker.redact.documents import redact_json

        clean = partial(redact_json, rules=rules)
    if settings.screen != "off":
        from worker.redact.screen import screen_json

        screen = screen_json
    return EvaluationConfig(
        settings.limits,
        settings.event_time,
        settings.output_embedding,
        clean=clean,
        clean_rejected=settings.redact == "all",
        screen=screen,
        judges=judges or {},
    )

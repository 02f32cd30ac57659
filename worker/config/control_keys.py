"""The keys of control records: those of the judges, which sign verdicts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from worker.config.errors import ConfigError
from worker.config.settings import Settings
from worker.core.control import MIN_KEY_BYTES

_MAKE: Final = "make one with: openssl rand -hex 32"
_JUDGE: Final = re.compile(r"[A-Za-z0-9._@:/-]{1,64}")


def judge_keys(settings: Settings) -> dict[str, list[bytes]]:
    """Return the keys of each judge, the one that signs first; none without KP_VERDICT_KEY_FILE. Raises ConfigError.

    A judge may have several, so that one can be replaced. No two share a key: the key tells who signed.
    """
    path = settings.verdict_key_file
    if path is None:
        if settings.confidence == "record":  # a worker's error: report and score need no key
            raise ConfigError(
                "KP_CONFIDENCE=record needs KP_VERDICT_KEY_FILE: without the judges' keys no verdict counts "
                "(docs/verdicts.md)"
            )
        return {}
    variable = f"KP_VERDICT_KEY_FILE={path}"
    judges: dict[str, list[bytes]] = {}
    owners: dict[bytes, str] = {}
    for number, line in enumerate(_lines(path), 1):
        name, _, key = (part.strip() for part in line.partition(b" "))
        judge = name.decode("utf-8", "replace")
        if not _JUDGE.fullmatch(judge) or not key:
            raise ConfigError(
                f"{variable}, entry {number}: a line is JUDGE KEY, the judge's name in 1 to 64 letters, digits or "
                f"._@:/- and a key; {_MAKE}"
            )
        if len(key) < MIN_KEY_BYTES:
            raise ConfigError(f"{variable}: the key of judge {judge} has less than {MIN_KEY_BYTES} bytes; {_MAKE}")
        owner = owners.setdefault(key, judge)
        if owner != judge:
            raise ConfigError(f"{variable}: judge {judge} has the same key as {owner}; give each its own: {_MAKE}")
        judges.setdefault(judge, []).append(key)
    if not judges:
        raise ConfigError(f"{variable} is empty; write a line JUDGE KEY for each judge ({_MAKE})")
    return judges


def _lines(path: Path) -> list[bytes]:
    """Return the lines of a file that are not empty. Raises ConfigError."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(
            f"KP_VERDICT_KEY_FILE={path} cannot be read: {error.strerror}; check the path, the mount and the "
            "permissions"
        ) from None
    return [line.strip() for line in lines if line.strip()]

"""Keys and tokens from files: those of the judges, which sign verdicts, and bearer tokens of services."""

import logging
import re
import stat
from pathlib import Path
from typing import Final

from worker.config.loading import ConfigError
from worker.config.settings import Settings

log = logging.getLogger(__name__)

_MAKE: Final = "make one with: openssl rand -hex 32"


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
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(
            f"{variable} cannot be read: {error.strerror}; check the path, the mount and the permissions"
        ) from None
    judges: dict[str, list[bytes]] = {}
    owners: dict[bytes, str] = {}
    for number, line in enumerate(filter(None, map(bytes.strip, lines)), 1):
        name, _, key = (part.strip() for part in line.partition(b" "))
        judge = name.decode("utf-8", "replace")
        if not re.fullmatch(r"[A-Za-z0-9._@:/-]{1,64}", judge) or not key:
            raise ConfigError(
                f"{variable}, entry {number}: a line is JUDGE KEY, the judge's name in 1 to 64 letters, digits or "
                f"._@:/- and a key; {_MAKE}"
            )
        if len(key) < 32:  # as long as the hash, as RFC 2104 advises
            raise ConfigError(f"{variable}: the key of judge {judge} has less than 32 bytes; {_MAKE}")
        owner = owners.setdefault(key, judge)
        if owner != judge:
            raise ConfigError(f"{variable}: judge {judge} has the same key as {owner}; give each its own: {_MAKE}")
        judges.setdefault(judge, []).append(key)
    if not judges:
        raise ConfigError(f"{variable} is empty; write a line JUDGE KEY for each judge ({_MAKE})")
    return judges


class TokenError(Exception):
    """The token cannot be used at the moment; the message says why, without the token."""


class Token:
    """A bearer token. A file is read again when its time, size, inode or mode changes."""

    def __init__(self, variable: str, given: str | Path) -> None:
        """Take the token itself, or the path of its file. Raises TokenError. `variable`: the setting that gave it."""
        self.source = variable
        self._path = given if isinstance(given, Path) else None
        self._seen: tuple[int, int, int, int] | None = None
        self._value = "" if isinstance(given, Path) else _checked(given, variable)
        self.read()

    def read(self) -> str:
        """Return the token as it is now. Raises TokenError."""
        path = self._path
        if path is None:
            return self._value
        try:
            now = path.stat()
            seen = (now.st_mtime_ns, now.st_size, now.st_ino, now.st_mode)
            if seen == self._seen:
                return self._value
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise TokenError(f"{self.source}={path} cannot be read: {reason}; check the mount") from None
        self._value = _checked(text, f"{self.source}={path}")
        self._seen = seen
        if now.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            log.warning(
                "%s=%s may be written by others (mode %03o), who could replace the key; run chmod go-w on it",
                self.source, path, stat.S_IMODE(now.st_mode),
            )  # fmt: skip
        return self._value


def _checked(text: str, where: str) -> str:
    """Return the token. Raises TokenError for what no HTTP header may hold."""
    token = text.strip()
    if not token:
        raise TokenError(f"{where} is empty; the secret that provides it has not been written yet")
    if not all("!" <= character <= "~" for character in token):
        raise TokenError(f"{where} holds more than one word of ASCII; give the key alone")
    return token

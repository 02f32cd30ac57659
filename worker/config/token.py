"""A bearer token for a service: from a setting, or from a file that may change while the process runs."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

log = logging.getLogger(__name__)


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
        if self._path is not None:
            self._refresh(self._path)
        return self._value

    def _refresh(self, path: Path) -> None:
        try:
            now = path.stat()
            seen = (now.st_mtime_ns, now.st_size, now.st_ino, now.st_mode)
            if seen == self._seen:
                return
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


def _checked(text: str, where: str) -> str:
    """Return the token. Raises TokenError for what no HTTP header may hold."""
    token = text.strip()
    if not token:
        raise TokenError(f"{where} is empty; the secret that provides it has not been written yet")
    if not all("!" <= character <= "~" for character in token):
        raise TokenError(f"{where} holds more than one word of ASCII; give the key alone")
    return token

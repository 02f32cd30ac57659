"""The key for the registry: from its variable, or from a file that may change.

Lives here: reading it, and what a key looks like. Must not live here: requests (registry_client.py). No message holds
the key.
"""

from __future__ import annotations

from pathlib import Path

from worker.config import ConfigError, Settings


class KeyFileError(Exception):
    """The key's file cannot be used at the moment; the message says why, without the key."""


class RegistryKey:
    """The key. A file is read again when its time, size or inode changes."""

    def __init__(self, settings: Settings) -> None:
        """Raise ConfigError where there is no key."""
        self._path = settings.registry_key_file
        self._seen: tuple[int, int, int] | None = None
        self._value = ""
        if self._path is not None:
            try:
                self.read()
            except KeyFileError as error:
                raise ConfigError(str(error)) from None
        elif settings.registry_key is not None:
            try:
                self._value = _checked(settings.registry_key.get_secret_value(), "KP_REGISTRY_KEY")
            except KeyFileError as error:
                raise ConfigError(str(error)) from None
        else:
            raise ConfigError("contribute needs the registry's key: set KP_REGISTRY_KEY_FILE or KP_REGISTRY_KEY")

    @property
    def source(self) -> str:
        """Return the variable that names the key."""
        return "KP_REGISTRY_KEY" if self._path is None else "KP_REGISTRY_KEY_FILE"

    def read(self) -> str:
        """Return the key as it is now. Raises KeyFileError."""
        if self._path is not None:
            self._refresh(self._path)
        return self._value

    def _refresh(self, path: Path) -> None:
        try:
            now = path.stat()
            seen = (now.st_mtime_ns, now.st_size, now.st_ino)
            if seen == self._seen:
                return
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise KeyFileError(f"KP_REGISTRY_KEY_FILE={path} cannot be read: {reason}; check the mount") from None
        self._value = _checked(text, f"KP_REGISTRY_KEY_FILE={path}")
        self._seen = seen


def _checked(text: str, where: str) -> str:
    """Return the key. Raises KeyFileError for what no HTTP header may hold."""
    key = text.strip()
    if not key:
        raise KeyFileError(f"{where} is empty; the secret that provides it has not been written yet")
    if not all("!" <= character <= "~" for character in key):
        raise KeyFileError(f"{where} holds more than one word of ASCII; give the key alone")
    return key

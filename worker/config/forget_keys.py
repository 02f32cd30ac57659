"""The keys of control records: KP_FORGET_KEY, or the lines of KP_FORGET_KEY_FILE."""

from __future__ import annotations

from worker.config.errors import ConfigError
from worker.config.settings import Settings
from worker.core.control import MIN_KEY_BYTES

_MAKE = "make one with: openssl rand -hex 32"


def forget_keys(settings: Settings) -> tuple[bytes, ...]:
    """Return the keys, the one that signs first. Raises ConfigError, without a key's content.

    A file may contain several, one on each line: a worker accepts all of them, so that control records that an earlier
    key has signed still count when the topic is read again.
    """
    if settings.forget_key is not None:
        variable, keys = "KP_FORGET_KEY", [settings.forget_key.get_secret_value().encode()]
    elif settings.forget_key_file is not None:
        variable = f"KP_FORGET_KEY_FILE={settings.forget_key_file}"
        try:
            lines = settings.forget_key_file.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(
                f"{variable} cannot be read: {error.strerror}; check the path, the mount and the permissions"
            ) from None
        keys = [line.strip() for line in lines if line.strip()]
    else:
        raise ConfigError(
            "control records are signed: set KP_FORGET_KEY_FILE or KP_FORGET_KEY, the "
            f"same for all workers, which run with KP_FORGET=true ({_MAKE})"
        )
    if not keys:
        raise ConfigError(f"{variable} is empty; {_MAKE}")
    if any(len(key) < MIN_KEY_BYTES for key in keys):
        raise ConfigError(f"{variable} has a key of less than {MIN_KEY_BYTES} bytes; {_MAKE}")
    return tuple(keys)

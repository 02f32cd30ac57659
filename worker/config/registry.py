"""The form of the settings of `contribute`: the registry's URL, and lists of allowed values.

Lives here: checks of one value each. Must not live here: the settings themselves (settings.py), requests (contribute/).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

FORM: Final = "give the base URL, such as https://registry.example.org"


def check_registry_url(url: str) -> str:
    """Return the URL without a slash at its end. Raises ValueError, without quoting the URL."""
    try:
        parts = urlsplit(url.strip())
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise ValueError(f"it is not a URL; {FORM}") from None
    if parts.scheme not in ("http", "https") or not host or any(ord(character) <= 32 for character in url.strip()):
        raise ValueError(f"it is not a URL with https:// and a host; {FORM}")
    if parts.username is not None or parts.password is not None:
        raise ValueError("it holds a user or a password; give the key by KP_REGISTRY_KEY_FILE or KP_REGISTRY_KEY")
    if parts.query or parts.fragment:
        raise ValueError(f"it has a query or a fragment; {FORM}")
    if parts.scheme == "http" and not _is_loopback(host):
        raise ValueError("plain http would send the key and the traces unencrypted; use https (http only to loopback)")
    return url.strip().rstrip("/")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_choices(*allowed: str) -> Callable[[str], str]:
    """Return a check of a list with commas: each part must be one of `allowed`."""

    def check(text: str) -> str:
        parts = [part.strip() for part in text.split(",")]
        wrong = [part for part in parts if part not in allowed]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is not one of {', '.join(allowed)}; several have a comma between them")
        return ",".join(dict.fromkeys(parts))

    return check

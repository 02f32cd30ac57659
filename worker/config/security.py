"""Which security settings fit together: none may contradict another one, and none would be ignored silently.

Lives here: the rules, on names of settings. Must not live here: the settings themselves (settings.py), connections
(kafka/client.py).
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final

TLS: Final = ("SSL", "SASL_SSL")
SASL: Final = ("SASL_PLAINTEXT", "SASL_SSL")
"""Protocols (KP_SECURITY_PROTOCOL) that encrypt, and those that log in."""

_LOGIN: Final = ("sasl_username", "sasl_password", "sasl_password_file")
_KEY: Final = ("tls_key_file", "tls_key_password", "tls_key_password_file")
_TLS_FILES: Final = ("tls_ca_file", "tls_certificate_file", *_KEY)


def check_security(given: Set[str], protocol: str, mechanism: str | None) -> None:
    """Raise ValueError where settings contradict each other, or would be ignored. `given`: fields that have a value."""
    for name in ("sasl_password", "tls_key_password", "registry_key"):
        if len(both := _variables(given, name, f"{name}_file")) == 2:
            raise ValueError(f"{both[0]} and {both[1]} are both set; keep one")
    if (tls := _variables(given, *_TLS_FILES)) and protocol not in TLS:
        raise ValueError(f"{tls[0]} is set, but KP_SECURITY_PROTOCOL={protocol} uses no TLS; set SSL or SASL_SSL")
    if (key := _variables(given, *_KEY)) and "tls_certificate_file" not in given:
        raise ValueError(f"{key[0]} is set without KP_TLS_CERTIFICATE_FILE; set both")
    if protocol in SASL:
        _check_login(given, protocol, mechanism)
    elif sasl := _variables(given, "sasl_mechanism", *_LOGIN, "sasl_token_file"):
        raise ValueError(f"{sasl[0]} is set, but KP_SECURITY_PROTOCOL={protocol} uses no SASL; set SASL_SSL")


def _check_login(given: Set[str], protocol: str, mechanism: str | None) -> None:
    login, token = _variables(given, *_LOGIN), _variables(given, "sasl_token_file")
    if mechanism is None:
        raise ValueError(
            f"KP_SECURITY_PROTOCOL={protocol} needs KP_SASL_MECHANISM: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 or "
            "OAUTHBEARER"
        )
    if mechanism == "OAUTHBEARER":
        if login:
            raise ValueError(
                f"{login[0]} is set, but KP_SASL_MECHANISM=OAUTHBEARER uses only KP_SASL_TOKEN_FILE; unset it"
            )
        if not token:
            raise ValueError("KP_SASL_MECHANISM=OAUTHBEARER needs KP_SASL_TOKEN_FILE")
        return
    if token:
        raise ValueError(f"{token[0]} is set, but KP_SASL_MECHANISM={mechanism} uses a user and a password; unset it")
    if "sasl_username" not in given or len(login) < 2:
        raise ValueError(
            f"KP_SASL_MECHANISM={mechanism} needs KP_SASL_USERNAME, and KP_SASL_PASSWORD_FILE or KP_SASL_PASSWORD"
        )


def _variables(given: Set[str], *names: str) -> list[str]:
    """Return the variables of those of the fields that have a value."""
    return [f"KP_{name.upper()}" for name in names if name in given]

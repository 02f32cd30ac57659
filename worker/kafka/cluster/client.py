"""The arguments that all Kafka clients of a process share, with TLS and SASL, and the patches of aiokafka."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Any, Final

from aiokafka.abc import AbstractTokenProvider
from aiokafka.errors import KafkaError

from worker.config import PREFIX, ConfigError, Settings
from worker.kafka.aiokafka_private import check_oauth_answers, notice_lost_brokers

log = logging.getLogger(__name__)

METADATA_MS: Final = 30_000
"""How often clients refresh the metadata: the longest time until new partitions of the source are noticed."""

LOST_SECONDS: Final = 10
"""How long a broker may be unreachable before its connections end. Longer than a switch or a route takes to fail over;
shorter than KP_SESSION_TIMEOUT_SECONDS and KP_TRANSACTION_TIMEOUT_SECONDS, so that time is left for another broker."""

SENT_IN_THE_CLEAR: Final = {
    "PLAIN": "the password",
    "SCRAM-SHA-256": "password proofs (open to offline guessing)",
    "SCRAM-SHA-512": "password proofs (open to offline guessing)",
    "OAUTHBEARER": "the token",
}


def prepare_clients(settings: Settings) -> dict[str, Any]:
    """Patch aiokafka and return the `client_arguments`. Raises ConfigError for an unusable file."""
    patch_aiokafka()
    return client_arguments(settings)


def patch_aiokafka() -> None:
    """Patch aiokafka for all clients of this process; call it before the first one starts. May be called again."""
    check_oauth_answers()
    notice_lost_brokers(LOST_SECONDS)


def client_arguments(settings: Settings) -> dict[str, Any]:
    """Return the aiokafka arguments shared by all clients; never log them. Raises ConfigError for an unusable file."""
    arguments: dict[str, Any] = {
        "bootstrap_servers": settings.bootstrap_servers,
        "client_id": settings.group_id,
        "metadata_max_age_ms": METADATA_MS,
        "security_protocol": settings.security_protocol,
    }
    if settings.uses_tls:
        arguments["ssl_context"] = _tls(settings)
    if settings.uses_sasl:
        arguments |= _login(settings)
        if not settings.uses_tls:
            log.warning(
                "KP_SECURITY_PROTOCOL=SASL_PLAINTEXT: %s and all records cross the network unencrypted; use SASL_SSL",
                SENT_IN_THE_CLEAR[str(settings.sasl_mechanism)],
            )
    return arguments


def _tls(settings: Settings) -> ssl.SSLContext:
    authority = settings.tls_ca_file
    try:
        context = ssl.create_default_context(cafile=authority)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(_unusable("KP_TLS_CA_FILE", authority, error, "PEM file of certificates")) from error
    context.minimum_version = max(context.minimum_version, ssl.TLSVersion.TLSv1_2)  # Debian's Python sets none
    certificate, key = settings.tls_certificate_file, settings.tls_key_file
    if certificate is not None:
        password = _secret(settings, "tls_key_password")
        for variable, path in (("KP_TLS_CERTIFICATE_FILE", certificate), ("KP_TLS_KEY_FILE", key)):
            if path is not None:
                _read(variable, path)  # OpenSSL does not say which of the two it cannot open
        try:
            context.load_cert_chain(certificate, key, _KeyPassword(password))
        except OSError as error:
            hint = "a PEM certificate and its private key"
            if password is not None:
                hint += ", and KP_TLS_KEY_PASSWORD must be the key's"
            raise ConfigError(_unusable("KP_TLS_CERTIFICATE_FILE", certificate, error, hint, key)) from error
    return context


class _KeyPassword:
    """Gives a key's password to OpenSSL, which would otherwise ask on the terminal."""

    def __init__(self, password: str | None) -> None:
        self._password = password

    def __call__(self) -> str:
        if self._password is None:
            raise ConfigError("the private key is encrypted: set KP_TLS_KEY_PASSWORD_FILE or KP_TLS_KEY_PASSWORD")
        return self._password


def _unusable(variable: str, path: Path | None, error: OSError, needed: str, key: Path | None = None) -> str:
    files = f"{variable}={path}" + ("" if key is None else f" with KP_TLS_KEY_FILE={key}")
    return f"{files} cannot be used: {error.strerror or error}; it must be a {needed}"


def _login(settings: Settings) -> dict[str, Any]:
    if settings.sasl_token_file is not None:
        provider = TokenFile(settings.sasl_token_file)
        provider.read()
        return {"sasl_mechanism": settings.sasl_mechanism, "sasl_oauth_token_provider": provider}
    return {
        "sasl_mechanism": settings.sasl_mechanism,
        "sasl_plain_username": settings.sasl_username,
        "sasl_plain_password": _secret(settings, "sasl_password"),
    }


def _secret(settings: Settings, name: str) -> str | None:
    value, path = getattr(settings, name), getattr(settings, f"{name}_file")
    if path is not None:
        return _read(f"{PREFIX}{name.upper()}_FILE", path).rstrip("\r\n")
    return None if value is None else str(value.get_secret_value())


def _read(variable: str, path: Path) -> str:
    """Return a file's text. Raises ConfigError if it cannot be read or is empty, without its content."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"{variable}={path} cannot be read: {reason}; check the path, the mount and the permissions"
        ) from None
    if not text.strip():
        raise ConfigError(f"{variable}={path} is empty; the secret or sidecar that provides it has not written it yet")
    return text


class TokenFile(AbstractTokenProvider):  # type: ignore[misc]
    """Reads the bearer token from its file for each new connection, so the file may be replaced at any time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> str:
        """Return the token. Raises ConfigError."""
        return _read("KP_SASL_TOKEN_FILE", self._path).strip()

    async def token(self) -> str:
        """Return the token. Raises KafkaError, after which aiokafka retries the connection later."""
        try:
            return await asyncio.to_thread(self.read)
        except ConfigError as error:
            raise KafkaError(str(error)) from None

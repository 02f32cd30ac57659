"""Checks of single settings, and of those that need each other. Each raises ValueError with what is wrong."""

import ipaddress
import re
from collections.abc import Callable, Set
from typing import Final
from urllib.parse import urlsplit

TOPIC_NAME: Final = r"^[a-zA-Z0-9._-]{1,249}$"
PEM: Final = "-----BEGIN"
BROKERS_FORM: Final = "give host:port, and several with a comma between them, such as kafka-1:9092,kafka-2:9092"

_ADDRESS = re.compile(r"(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?\]):([0-9]{1,5})")


def check_brokers(servers: str) -> str:
    """Return the addresses without the spaces around them. Raises ValueError that says which one is wrong, and why."""
    addresses = [part.strip() for part in servers.split(",")]
    for address in addresses:
        match = _ADDRESS.fullmatch(address)
        if match is not None and 0 < int(match[1]) < 65_536:
            continue
        if "://" in address:
            shown = re.sub("//[^/]*@", "//", address)  # without a password
            raise ValueError(f"{shown!r} is a URL, not the address of a broker; {BROKERS_FORM}")
        if match is not None:
            raise ValueError(f"{address!r}: a port is a number from 1 to 65535; {BROKERS_FORM}")
        if re.fullmatch(r"[A-Za-z0-9_.-]+:?", address):
            raise ValueError(f"{address!r} has no port; {BROKERS_FORM}")
        raise ValueError(f"{address!r} is not the address of a broker; {BROKERS_FORM}")
    return ",".join(addresses)


TLS: Final = ("SSL", "SASL_SSL")
SASL: Final = ("SASL_PLAINTEXT", "SASL_SSL")  # protocols (KP_SECURITY_PROTOCOL) that encrypt, and those that log in

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


def check_registry_url(url: str) -> str:
    """Return the URL without a slash at its end. Raises ValueError, without quoting the URL."""
    given, host = _checked_url(
        url, "give the base URL, such as https://registry.example.org", "KP_REGISTRY_KEY_FILE or KP_REGISTRY_KEY"
    )
    if given.startswith("http:") and not is_loopback(host):
        raise ValueError("plain http would send the key and the traces unencrypted; use https (http only to loopback)")
    return given


def check_embedder_url(url: str) -> str:
    """Return the URL without a slash at its end. Raises ValueError, without quoting the URL."""
    return _checked_url(url, "give the base URL, such as https://embeddings.example.org", "KP_EMBEDDER_TOKEN_FILE")[0]


def _checked_url(url: str, form: str, key: str) -> tuple[str, str]:
    """Return the URL without a slash at its end, and its host. Raises ValueError. `key`: the settings for secrets."""
    try:
        parts = urlsplit(url.strip())
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise ValueError(f"it is not a URL; {form}") from None
    if parts.scheme not in ("http", "https") or not host or any(ord(character) <= 32 for character in url.strip()):
        raise ValueError(f"it is not a URL with https:// and a host; {form}")
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"it holds a user or a password; give the key by {key}")
    if parts.query or parts.fragment:
        raise ValueError(f"it has a query or a fragment; {form}")
    return url.strip().rstrip("/"), host


def is_loopback(host: str) -> bool:
    """Whether a host of a URL is this machine."""
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


def check_topics(text: str) -> str:
    """Return topics without the spaces around them. Raises ValueError that says which name is wrong."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if re.fullmatch(TOPIC_NAME, name) is None:
            raise ValueError(f"{name!r} is not the name of a topic; give letters, digits, dots, _ and -, at most 249")
    if len(set(names)) != len(names):
        raise ValueError("a topic is given twice; give each once")
    return ",".join(names)


def check_path(value: object) -> object:
    """Return a setting that names a file. Raises ValueError, without quoting it, for a PEM file's content."""
    if PEM in str(value):
        raise ValueError("give the path of a PEM file, not its content")
    return value

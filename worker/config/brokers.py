"""KP_BOOTSTRAP_SERVERS: what the address of a broker looks like."""

from __future__ import annotations

import re

FORM = "give host:port, and several with a comma between them, such as kafka-1:9092,kafka-2:9092"

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
            raise ValueError(f"{shown!r} is a URL, and a broker has none; {FORM}")
        if match is not None:
            raise ValueError(f"{address!r}: a port is a number from 1 to 65535; {FORM}")
        if re.fullmatch(r"[A-Za-z0-9_.-]+:?", address):
            raise ValueError(f"{address!r} has no port; {FORM}")
        raise ValueError(f"{address!r} is no address of a broker; {FORM}")
    return ",".join(addresses)

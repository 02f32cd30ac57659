"""The network of an own engine: a bridge, a range of addresses, and the rules that let containers out.

The engine itself adds no rule (`--iptables=false`): Docker's chains belong to the machine's own engine, if it has one.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.runs.engine.errors import EngineError, attempt, call

FORWARD = Path("/proc/sys/net/ipv4/ip_forward")


@dataclass(frozen=True)
class Network:
    """A bridge, its own address with prefix, and the range that all networks of the engine are taken from."""

    bridge: str
    address: str
    addresses: str

    @property
    def rules(self) -> list[list[str]]:
        """Return the rules, each as table, chain and match: out with the machine's address, and back."""
        mark = ["-m", "comment", "--comment", self.bridge]
        return [
            ["nat", "POSTROUTING", "-s", self.addresses, "!", "-d", self.addresses, *mark, "-j", "MASQUERADE"],
            ["filter", "FORWARD", "-s", self.addresses, *mark, "-j", "ACCEPT"],
            ["filter", "FORWARD", "-d", self.addresses, *mark, "-j", "ACCEPT"],
        ]


def choose(bridge: str) -> Network:
    """Return a network whose addresses no route of this machine uses. Raises EngineError when there is none."""
    routes = json.loads(call(["ip", "-json", "route"]).stdout)
    taken = [ipaddress.ip_network(it["dst"], strict=False) for it in routes if it["dst"] != "default"]
    for number in random.sample(range(64, 255), 191):
        addresses = ipaddress.ip_network(f"10.{number}.0.0/16")
        if not any(addresses.overlaps(it) for it in taken if it.version == 4):
            return Network(bridge, f"10.{number}.0.1/24", str(addresses))
    raise EngineError("no free range of addresses for the engine: each 10.N.0.0/16 has a route already")


@contextlib.contextmanager
def connected(network: Network) -> Iterator[None]:
    """Make the bridge and the rules; remove them, and the bridges of the engine's other networks, at the end."""
    before = FORWARD.read_text()
    try:
        call(["ip", "link", "add", network.bridge, "type", "bridge"])
        call(["ip", "address", "add", network.address, "dev", network.bridge])
        call(["ip", "link", "set", network.bridge, "up"])
        for table, chain, *match in network.rules:
            call(["iptables", "-w", "-t", table, "-I", chain, *match])
        FORWARD.write_text("1\n")
        yield
    finally:
        remove(network)
        if not any(Path("/sys/class/net").glob("*/bridge")):  # another engine may need it by now
            FORWARD.write_text(before)


def remove(network: Network) -> None:
    """Remove what connected() made, as far as it is there."""
    for table, chain, *match in network.rules:
        attempt(["iptables", "-w", "-t", table, "-D", chain, *match])
    own = ipaddress.ip_network(network.addresses)
    for link in json.loads(attempt(["ip", "-json", "-4", "address"]).stdout or "[]"):
        addresses = [ipaddress.ip_address(it["local"]) for it in link.get("addr_info", ())]
        if any(it in own for it in addresses):
            attempt(["ip", "link", "delete", link["ifname"]])
    attempt(["ip", "link", "delete", network.bridge])

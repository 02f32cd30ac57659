"""Ports on which a process can listen, now and after a restart."""

from __future__ import annotations

import random
import socket
from collections import deque

from worker.lab.broker.kafka_jars import BrokerError

HOST = "127.0.0.1"
# Below the ephemeral ranges of Linux (32768-) and macOS (49152-): in those an outgoing connection could take the port
# before the process listens, or while a node is down.
PORT_RANGE = range(20_000, 32_000)

_given: deque[int] = deque(maxlen=500)
"""The ports returned last: their users may not listen yet."""


def free_ports(count: int) -> list[int]:
    """Return this many free random ports, none of them among the last 500 returned. Raises BrokerError."""
    found: list[int] = []
    for port in random.SystemRandom().sample(PORT_RANGE, len(PORT_RANGE)):
        if len(found) == count:
            _given.extend(found)
            return found
        if port not in _given and is_free(port):
            found.append(port)
    raise BrokerError(f"no {count} free ports in {PORT_RANGE}")


def is_free(port: int) -> bool:
    """Return whether a process can listen on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # like the broker: TIME_WAIT counts as free
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True

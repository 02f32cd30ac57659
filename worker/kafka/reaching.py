"""Whether brokers can be reached, asked by single connections, and why not.

Lives here: the reason that aiokafka's clients log and do not raise, and the error for people. Must not live here:
opening a client (connections.py), words for Kafka's errors (errors.py).
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aiokafka.errors import KafkaConnectionError, KafkaError
from aiokafka.protocol.metadata import MetadataRequest

from worker.config import ConfigError, Settings
from worker.kafka.aiokafka_private import ask_once, split_servers
from worker.kafka.errors import HungUpError, error_text, is_final, remedy

PROBE_MS: Final = 5000
"""How long one broker may take to answer."""

NAMED: Final = 3
"""Brokers that an error names, each with its reason."""

CONNECTION_ARGUMENTS: Final = (
    "client_id", "security_protocol", "ssl_context", "sasl_mechanism", "sasl_plain_username", "sasl_plain_password",
    "sasl_oauth_token_provider",
)  # fmt: skip
"""What a single connection takes of a client's arguments."""

Address = tuple[str, int]


class UnreachableError(ConfigError):
    """No broker can be reached, or the login is refused. `final`: trying again cannot help."""

    def __init__(self, message: str, *, final: bool) -> None:
        super().__init__(message)
        self.final = final


@dataclass(frozen=True, slots=True)
class BrokerFault:
    """Why a broker cannot be reached; `advertised`: another broker named its address, and not the settings."""

    address: Address
    cause: Exception
    advertised: bool = False

    @property
    def where(self) -> str:
        """Return the address as it is written in the settings."""
        host, port = self.address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def words(self) -> str:
        """Say what happened."""
        if isinstance(self.cause, socket.gaierror):
            return "unknown host name"
        if f"[Errno {errno.ECONNREFUSED}]" in str(self.cause):  # also among several addresses of one name
            return "connection refused"
        if isinstance(self.cause, TimeoutError):
            return f"no answer in {PROBE_MS / 1000:g} s"
        return error_text(self.cause)

    def advice(self) -> str | None:
        """Say what to do where the words do not; None: they do."""
        if self.advertised:
            return (
                "a broker advertises this address: correct its advertised.listeners, or use a listener whose address "
                "this machine can reach"
            )
        if is_final(self.cause) or (remedy(self.cause) and not isinstance(self.cause, TimeoutError)):
            return None
        return (
            "start the broker or correct the address (-b, KP_BOOTSTRAP_SERVERS); kp-worker broker runs one to try "
            "things out"
        )


async def reach_any(settings: Settings, client: Mapping[str, Any]) -> UnreachableError | None:
    """Ask the brokers of KP_BOOTSTRAP_SERVERS, all at once; return None as soon as one answers, otherwise the error."""
    asked = [asyncio.create_task(_ask(client, address)) for address in split_servers(client["bootstrap_servers"])]
    faults: list[BrokerFault] = []
    try:
        for answer in asyncio.as_completed(asked):
            found = await answer
            if not isinstance(found, BrokerFault):
                return None
            faults.append(found)
    finally:
        for task in asked:
            task.cancel()
    return _no_answer(settings, faults)


async def unreachable(settings: Settings, client: Mapping[str, Any], error: KafkaError) -> UnreachableError:
    """Return the error for a client that did not start, with the reason that aiokafka hides."""
    fault = await find_fault(client)
    if fault is None:  # the brokers can be reached: what failed came after that
        return UnreachableError(error_text(error), final=is_final(error))
    return _no_answer(settings, [fault])


async def find_fault(client: Mapping[str, Any]) -> BrokerFault | None:
    """Connect once to each broker, also at its advertised address, and return why that fails; None if it succeeds.

    A refusal takes precedence over a broker that is down.
    """
    given = split_servers(client["bootstrap_servers"])
    todo, faults = list(given), []
    for address in todo:
        answer = await _ask(client, address, advertised=address not in given)
        if isinstance(answer, BrokerFault):
            faults.append(answer)
        else:
            todo += [other for other in answer if other not in todo]
    return min(faults, key=lambda fault: not is_final(fault.cause), default=None)


async def _ask(client: Mapping[str, Any], address: Address, *, advertised: bool = False) -> list[Address] | BrokerFault:
    """Connect to a broker, and return the addresses that it advertises."""
    arguments = {name: client[name] for name in CONNECTION_ARGUMENTS if name in client}
    try:
        async with asyncio.timeout(PROBE_MS / 1000):  # a name server may be silent, too
            answer = await ask_once(*address, MetadataRequest([]), request_timeout_ms=PROBE_MS, **arguments)
    except (KafkaConnectionError, ConnectionResetError) as error:
        hung_up = HungUpError("the connection was closed")
        hung_up.__cause__ = error
        return BrokerFault(address, hung_up, advertised)
    except (KafkaError, OSError, TimeoutError) as error:
        return BrokerFault(address, error, advertised)
    return [(host, port) for _, host, port, *_ in answer.brokers]


def _no_answer(settings: Settings, faults: Sequence[BrokerFault]) -> UnreachableError:
    """Return the error that names the brokers; a refusal comes first, and alone."""
    final = [fault for fault in faults if is_final(fault.cause)]
    named = final[:1] or faults[:NAMED]
    alone = named[0].where == settings.bootstrap_servers
    text = ", ".join(fault.words() if alone else f"{fault.where} ({fault.words()})" for fault in named)
    advice = next((advice for fault in named if (advice := fault.advice())), None)
    return UnreachableError(
        f"no Kafka broker answers at KP_BOOTSTRAP_SERVERS={settings.bootstrap_servers}: {text}"
        + (f"; {advice}, kp-worker doctor tells more" if advice else ""),
        final=bool(final),
    )

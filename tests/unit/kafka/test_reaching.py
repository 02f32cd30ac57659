"""Brokers that cannot be reached: which, why, and what to do."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from worker.config import Settings
from worker.kafka.cluster.connections import BrokerFault, UnreachableError, client_arguments, connected_admin


@contextmanager
def listening(backlog: int | None) -> Iterator[int]:
    """Take a port; None: nobody listens on it, otherwise connections are taken and nothing answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if backlog is not None:
            taken.listen(backlog)
        yield taken.getsockname()[1]


def failure(servers: str) -> UnreachableError:
    settings = Settings(bootstrap_servers=servers)

    async def connect() -> None:
        async with connected_admin(settings, client_arguments(settings)):
            raise AssertionError("nobody is there")

    with pytest.raises(UnreachableError) as error:
        asyncio.run(connect())
    return error.value


@pytest.mark.slow
def test_each_broker_is_named_with_its_reason_and_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    with listening(None) as closed, listening(5) as silent:
        error = failure(f"127.0.0.1:{closed},nowhere.invalid:9092,127.0.0.1:{silent}")
    assert not error.final
    assert f"127.0.0.1:{closed} (connection refused)" in str(error)
    assert "nowhere.invalid:9092 (unknown host name)" in str(error)
    assert f"127.0.0.1:{silent} (no answer in 5 s)" in str(error)
    assert "start the broker or correct the address (-b, KP_BOOTSTRAP_SERVERS)" in str(error)
    assert caplog.records == [], "the library says nothing of its own"


def test_one_address_is_named_once() -> None:
    with listening(None) as closed:
        text = str(failure(f"127.0.0.1:{closed}"))
    assert text.startswith(f"no Kafka broker answers at KP_BOOTSTRAP_SERVERS=127.0.0.1:{closed}: connection refused; ")


def test_an_advertised_address_is_a_matter_of_the_broker() -> None:
    refused = ConnectionRefusedError(111, "Connect call failed")
    assert "advertised.listeners" in (BrokerFault(("b", 9092), refused, advertised=True).advice() or "")
    assert "advertised.listeners" not in (BrokerFault(("b", 9092), refused).advice() or "")
    assert BrokerFault(("::1", 9092), refused).where == "[::1]:9092"

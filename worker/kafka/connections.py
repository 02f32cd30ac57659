"""Opening clients: an admin client, a consumer or a producer, and why that fails.

Lives here: how the worker and its commands start and stop a client, and the error for people if that fails. Must not
live here: the arguments of clients (client.py), words for Kafka's errors (errors.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any, Final, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaConnectionError, KafkaError
from aiokafka.protocol.metadata import MetadataRequest

from worker.config import ConfigError, Settings
from worker.kafka.aiokafka_private import ask_once, split_servers
from worker.kafka.errors import HungUpError, error_text, is_final
from worker.kafka.reading import tolerant as reading_tolerantly

log = logging.getLogger(__name__)

Client = TypeVar("Client", AIOKafkaConsumer, AIOKafkaProducer)

CONNECT_ATTEMPTS: Final = 30
"""How often the worker tries to reach a broker at start, once a second, before it exits."""

PROBE_MS: Final = 5000
"""How long one broker may take to answer when the reason of a failed connection is looked for."""

CONNECTION_ARGUMENTS: Final = (
    "client_id", "security_protocol", "ssl_context", "sasl_mechanism", "sasl_plain_username", "sasl_plain_password",
    "sasl_oauth_token_provider",
)  # fmt: skip
"""What a single connection takes of a client's arguments."""


class UnreachableError(ConfigError):
    """No broker can be reached, or the login is refused. `final`: trying again cannot help."""

    def __init__(self, message: str, *, final: bool) -> None:
        super().__init__(message)
        self.final = final


@asynccontextmanager
async def admin_client(client: Mapping[str, Any]) -> AsyncIterator[AIOKafkaAdminClient]:
    """Start an admin client, close it at the end. Raises KafkaError."""
    admin = AIOKafkaAdminClient(**client)
    try:
        await admin.start()
        yield admin
    finally:
        await admin.close()


@asynccontextmanager
async def running(client: Client) -> AsyncIterator[Client]:
    """Start a consumer or producer, stop it at the end. Raises KafkaError."""
    try:
        await client.start()
        yield client
    finally:
        await client.stop()


def committed_reader(client: Mapping[str, Any], *topics: str, **more: Any) -> AIOKafkaConsumer:
    """Return a consumer without a group that reads committed records, by default from the oldest on; not started."""
    return AIOKafkaConsumer(
        *topics,
        **client,
        **more,
        enable_auto_commit=False,
        auto_offset_reset="earliest",  # without it a reader of a compacted topic reads nothing, silently
        isolation_level="read_committed",
    )


@asynccontextmanager
async def connected_admin(
    settings: Settings, client: Mapping[str, Any], attempts: int = 0
) -> AsyncIterator[AIOKafkaAdminClient]:
    """Start an admin client, close it at the end. Raises UnreachableError.

    `attempts`: how often to try again, once a second, so that a worker that is restarted while the brokers are away
    waits for them.
    """
    attempt = 0
    async with AsyncExitStack() as stack:
        while True:
            try:
                admin = await stack.enter_async_context(admin_client(client))
                break
            except KafkaError as error:
                failure = await unreachable(settings, client, error)
                attempt += 1
                if attempt > attempts or failure.final:
                    raise failure from error
                if attempt == 1:
                    log.warning("%s; trying again for %d s", failure, attempts)
                await asyncio.sleep(1)
        yield admin


@asynccontextmanager
async def connected(
    settings: Settings, arguments: Mapping[str, Any], client: Client, *, tolerant: bool = False
) -> AsyncIterator[Client]:
    """Start a consumer or producer, stop it at the end. Raises UnreachableError.

    `tolerant`: records that cannot be read come as faults (reading.py); otherwise they are an error.
    """
    async with AsyncExitStack() as stack:
        try:
            with reading_tolerantly(settings.max_batch_bytes) if tolerant else nullcontext():
                await stack.enter_async_context(running(client))
        except KafkaError as error:
            raise await unreachable(settings, arguments, error) from error
        yield client


async def unreachable(settings: Settings, client: Mapping[str, Any], error: KafkaError) -> UnreachableError:
    """Return the error for a client that did not start, with the reason that aiokafka hides."""
    cause = await connection_error(client)
    if cause is None:  # the brokers can be reached: what failed came after that
        return UnreachableError(error_text(error), final=is_final(error))
    return UnreachableError(
        f"no Kafka broker answers at KP_BOOTSTRAP_SERVERS={settings.bootstrap_servers}: {error_text(cause)}",
        final=is_final(cause),
    )


async def connection_error(client: Mapping[str, Any]) -> Exception | None:
    """Connect once to each broker, also at its advertised address, and return why that fails; None if it succeeds.

    aiokafka's clients log the reason and raise an error without it. A refusal takes precedence over a broker that is
    down.
    """
    arguments = {name: client[name] for name in CONNECTION_ARGUMENTS if name in client}
    todo = split_servers(client["bootstrap_servers"])
    found: list[Exception] = []
    for host, port in todo:
        try:
            answer = await ask_once(host, port, MetadataRequest([]), request_timeout_ms=PROBE_MS, **arguments)
        except (KafkaConnectionError, ConnectionResetError) as error:
            hung_up = HungUpError(f"{host}:{port} closed the connection")
            hung_up.__cause__ = error
            found.append(hung_up)
        except (KafkaError, OSError, TimeoutError) as error:
            found.append(error)
        else:
            todo += [broker[1:3] for broker in answer.brokers if broker[1:3] not in todo]
    return next((error for error in found if is_final(error)), found[0] if found else None)

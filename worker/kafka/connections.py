"""Opening clients: an admin client, a consumer or a producer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any, Final, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from worker.config import ConfigError, Settings
from worker.kafka.aiokafka_private import sender_task
from worker.kafka.errors import error_text
from worker.kafka.producer import Producer, PublishError
from worker.kafka.reaching import reach_any, unreachable
from worker.kafka.reading import tolerant as reading_tolerantly

log = logging.getLogger(__name__)

Client = TypeVar("Client", AIOKafkaConsumer, AIOKafkaProducer, Producer)
Result = TypeVar("Result")

CONNECT_SECONDS: Final = 30.0
"""How long the worker tries to reach a broker at start before it exits."""

RETRY_SECONDS: Final = 1.0
"""Pause between two attempts."""


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
async def running(client: Client, *, tolerant: bool = False) -> AsyncIterator[Client]:
    """Start a consumer or producer, stop it at the end. Raises KafkaError.

    `tolerant`: records that cannot be read come as faults (reading.py); otherwise they are an error.
    """
    try:
        with reading_tolerantly() if tolerant else nullcontext():
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


def idempotent_producer(client: Mapping[str, Any], timeout_seconds: float, **more: Any) -> AIOKafkaProducer:
    """Return aiokafka's producer, not started: for commands that send records one by one."""
    return AIOKafkaProducer(
        **client, **more, acks="all", enable_idempotence=True, request_timeout_ms=round(timeout_seconds * 1000)
    )


async def while_sending(producer: AIOKafkaProducer, work: Coroutine[Any, Any, Result]) -> Result:
    """Await work that needs aiokafka's sender task, or raise the error that ended that task.

    Acknowledgements would then be awaited forever.
    """
    task = asyncio.ensure_future(work)
    sender = sender_task(producer)
    try:
        await asyncio.wait({task, sender}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            cause = None if sender.cancelled() else sender.exception()
            raise PublishError(f"the producer ended: {cause!r}") from cause
        return task.result()
    finally:
        task.cancel()


@asynccontextmanager
async def connected_admin(
    settings: Settings, client: Mapping[str, Any], patience_seconds: float = 0.0
) -> AsyncIterator[AIOKafkaAdminClient]:
    """Start an admin client, close it at the end. Raises UnreachableError.

    `patience_seconds`: how long to try again, so that a worker that is restarted while the brokers are away waits for
    them. A client would log each failure, and wait for one that is silent: so single connections ask first.
    """
    loop = asyncio.get_running_loop()
    until, told = loop.time() + patience_seconds, False
    async with AsyncExitStack() as stack:
        while True:
            failure = await reach_any(settings, client)
            if failure is None:
                try:
                    admin = await stack.enter_async_context(admin_client(client))
                    break
                except KafkaError as error:
                    failure = await unreachable(settings, client, error)
            if loop.time() >= until or failure.final:
                raise failure
            if not told:
                told = True
                log.warning("%s; trying again for %.0f s", failure, patience_seconds)
            await asyncio.sleep(RETRY_SECONDS)
        yield admin


async def prepare_patiently(
    settings: Settings,
    client: Mapping[str, Any],
    work: Callable[[AIOKafkaAdminClient], Awaitable[Result]],
    patience_seconds: float,
) -> Result:
    """Return what `work` returns with an admin client. Raises ConfigError.

    If a broker closes a connection or does not answer, the work begins anew, for `patience_seconds`; so it may be done
    twice.
    """
    loop = asyncio.get_running_loop()
    until, told = loop.time() + patience_seconds, False
    while True:
        try:
            async with connected_admin(settings, client, max(0.0, until - loop.time())) as admin:
                return await work(admin)
        except (KafkaError, OSError, TimeoutError) as error:
            where = f"KP_BOOTSTRAP_SERVERS={settings.bootstrap_servers}"
            failure = ConfigError(f"the topics cannot be prepared at {where}: {error_text(error)}")
            if loop.time() >= until or (isinstance(error, KafkaError) and not error.retriable):
                raise failure from error
            if not told:
                told = True
                log.warning("%s; trying again for %.0f s", failure, patience_seconds)
            await asyncio.sleep(RETRY_SECONDS)


@asynccontextmanager
async def connected(
    settings: Settings, arguments: Mapping[str, Any], client: Client, *, tolerant: bool = False
) -> AsyncIterator[Client]:
    """Do `running`, but raise UnreachableError."""
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(running(client, tolerant=tolerant))
        except KafkaError as error:
            raise await unreachable(settings, arguments, error) from error
        yield client

"""Open admin clients, consumers and producers, and find out why brokers cannot be reached."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaConnectionError, KafkaError
from aiokafka.protocol.metadata import MetadataRequest

from worker.config import ConfigError, Settings
from worker.kafka.aiokafka_private import ask_once, closed, sender_task, split_servers
from worker.kafka.cluster.errors import HungUpError, error_text, is_final, remedy
from worker.kafka.reading.fetches import Consumer, Reading
from worker.kafka.writing.producer import Producer, PublishError

log = logging.getLogger(__name__)

PROBE_MS: Final = 5000  # how long one broker may take to answer
NAMED: Final = 3  # brokers that an error names, each with its reason

CONNECTION_ARGUMENTS: Final = (
    "client_id", "security_protocol", "ssl_context", "sasl_mechanism", "sasl_plain_username", "sasl_plain_password",
    "sasl_oauth_token_provider",
)  # fmt: skip
"""A client's arguments that a single connection takes."""

Address = tuple[str, int]


class UnreachableError(ConfigError):
    """No broker can be reached, or the login fails."""

    def __init__(self, message: str, *, final: bool) -> None:
        super().__init__(message)
        self.final = final  # retrying is useless


@dataclass(frozen=True, slots=True)
class BrokerFault:
    """Why a broker cannot be reached."""

    address: Address
    cause: Exception
    advertised: bool = False  # whether the address comes from another broker, not from the settings

    @property
    def where(self) -> str:
        """Return the address as the settings write it."""
        host, port = self.address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def words(self) -> str:
        """Return what happened."""
        if isinstance(self.cause, socket.gaierror):
            return "unknown host name"
        if f"[Errno {errno.ECONNREFUSED}]" in str(self.cause):  # also if one name has several addresses
            return "connection refused"
        if isinstance(self.cause, TimeoutError):
            return f"no answer in {PROBE_MS / 1000:g} s"
        return error_text(self.cause)

    def advice(self) -> str | None:
        """Return what to do; None if `words` says it already."""
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
    """Ask all brokers of KP_BOOTSTRAP_SERVERS at once; return None as soon as one answers, otherwise the error."""
    asked = [asyncio.create_task(_ask(client, address)) for address in split_servers(client["bootstrap_servers"])]
    faults: list[BrokerFault] = []
    try:
        for next_answer in asyncio.as_completed(asked):
            answer = await next_answer
            if not isinstance(answer, BrokerFault):
                return None
            faults.append(answer)
    finally:
        for task in asked:
            task.cancel()
    return _no_answer(settings, faults)


async def unreachable(settings: Settings, client: Mapping[str, Any], error: KafkaError) -> UnreachableError:
    """Return the error for a client that failed to start, with the reason that aiokafka hides."""
    fault = await find_fault(client)
    if fault is None:  # the brokers can be reached: a later step failed
        return UnreachableError(error_text(error), final=is_final(error))
    return _no_answer(settings, [fault])


async def find_fault(client: Mapping[str, Any]) -> BrokerFault | None:
    """Connect to each broker, also at its advertised address; return the worst fault (a failed login), or None."""
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
    arguments = {name: client[name] for name in CONNECTION_ARGUMENTS if name in client}
    try:
        async with asyncio.timeout(PROBE_MS / 1000):  # a name server may not answer either
            answer = await ask_once(*address, MetadataRequest([]), request_timeout_ms=PROBE_MS, **arguments)
    except (KafkaConnectionError, ConnectionResetError) as error:
        hung_up = HungUpError("the connection was closed")
        hung_up.__cause__ = error
        return BrokerFault(address, hung_up, advertised)
    except (KafkaError, OSError, TimeoutError) as error:
        return BrokerFault(address, error, advertised)
    return [(host, port) for _, host, port, *_ in answer.brokers]


def _no_answer(settings: Settings, faults: Sequence[BrokerFault]) -> UnreachableError:
    """Return the error that names the brokers, or only the one with a failed login."""
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


Client = TypeVar("Client", bound=AIOKafkaConsumer | AIOKafkaProducer | Producer)
Result = TypeVar("Result")

CONNECT_SECONDS: Final = 30.0  # how long a starting worker tries to reach a broker before it exits
RETRY_SECONDS: Final = 1.0  # between two attempts


@asynccontextmanager
async def admin_client(client: Mapping[str, Any]) -> AsyncIterator[AIOKafkaAdminClient]:
    """Start an admin client and close it at the end. Raises KafkaError."""
    admin = AIOKafkaAdminClient(**client)
    try:
        await admin.start()
        yield admin
    finally:
        await closed(admin.close())


@asynccontextmanager
async def running(client: Client) -> AsyncIterator[Client]:
    """Start a consumer or producer and stop it at the end. Raises KafkaError."""
    try:
        await client.start()
        yield client
    finally:
        # Only a consumer needs the limit: aiokafka's producer still sends its records, and ours has its own limit.
        await (closed(client.stop()) if isinstance(client, AIOKafkaConsumer) else client.stop())


def committed_reader(client: Mapping[str, Any], reading: Reading, *topics: str, **more: Any) -> Consumer:
    """Return a consumer, not started, that reads committed records without a group, by default from the oldest on."""
    return Consumer(
        *topics,
        reading=reading,
        **client,
        **more,
        enable_auto_commit=False,
        auto_offset_reset="earliest",  # without it a reader of a compacted topic silently reads nothing
        isolation_level="read_committed",
    )


def idempotent_producer(client: Mapping[str, Any], timeout_seconds: float, **more: Any) -> AIOKafkaProducer:
    """Return aiokafka's producer, not started, for commands that send records one by one."""
    return AIOKafkaProducer(
        **client, **more, acks="all", enable_idempotence=True, request_timeout_ms=round(timeout_seconds * 1000)
    )


async def while_sending(producer: AIOKafkaProducer, work: Coroutine[Any, Any, Result]) -> Result:
    """Await work that needs aiokafka's sender task, or raise the error that ended that task."""
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


class _Patience:
    """Limits how long something is retried; the log says so once."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        self._told = False

    def left(self) -> float:
        """Return the seconds left."""
        return max(0.0, self._until - time.monotonic())

    async def bear(self, failure: Exception, *, final: bool) -> None:
        """Pause before the next attempt. Raises the failure if it is final or the time is up."""
        if final or not self.left():
            raise failure
        if not self._told:
            self._told = True
            log.warning("%s; trying again for %.0f s", failure, self._seconds)
        await asyncio.sleep(RETRY_SECONDS)


@asynccontextmanager
async def connected_admin(
    settings: Settings, client: Mapping[str, Any], patience_seconds: float = 0.0
) -> AsyncIterator[AIOKafkaAdminClient]:
    """Start an admin client and close it at the end. Raises UnreachableError.

    `patience_seconds`: how long to retry. Single connections probe first, because a client would log each failure and
    wait for a silent broker.
    """
    patience = _Patience(patience_seconds)
    async with AsyncExitStack() as stack:
        while True:
            failure = await reach_any(settings, client)
            if failure is None:
                try:
                    admin = await stack.enter_async_context(admin_client(client))
                    break
                except KafkaError as error:
                    failure = await unreachable(settings, client, error)
            await patience.bear(failure, final=failure.final)
        yield admin


async def prepare_patiently(
    settings: Settings, client: Mapping[str, Any], work: Callable[[AIOKafkaAdminClient], Awaitable[Result]]
) -> Result:
    """Return the result of `work` with an admin client. Raises ConfigError.

    If a broker closes a connection or does not answer, the work is retried for CONNECT_SECONDS.
    """
    patience = _Patience(CONNECT_SECONDS)
    while True:
        try:
            async with connected_admin(settings, client, patience.left()) as admin:
                return await work(admin)
        except (KafkaError, OSError, TimeoutError) as error:
            where = f"KP_BOOTSTRAP_SERVERS={settings.bootstrap_servers}"
            failure = ConfigError(f"the topics cannot be prepared at {where}: {error_text(error)}")
            failure.__cause__ = error
            await patience.bear(failure, final=isinstance(error, KafkaError) and not error.retriable)


@asynccontextmanager
async def connected(settings: Settings, arguments: Mapping[str, Any], client: Client) -> AsyncIterator[Client]:
    """Do the same as `running`, but raise UnreachableError."""
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(running(client))
        except KafkaError as error:
            raise await unreachable(settings, arguments, error) from error
        yield client

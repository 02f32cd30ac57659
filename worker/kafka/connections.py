"""A process's clients: their common arguments, with TLS and SASL, opening them, and why no broker can be reached."""

import asyncio
import errno
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.abc import AbstractTokenProvider
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaConnectionError, KafkaError
from aiokafka.protocol.metadata import MetadataRequest

from worker.config import PREFIX, ConfigError, Settings
from worker.kafka.aiokafka_private import (
    ask_once,
    check_oauth_answers,
    closed,
    notice_lost_brokers,
    sender_task,
    split_servers,
)
from worker.kafka.errors import HungUpError, error_text, is_final, remedy
from worker.kafka.fetches import Consumer, Reading
from worker.kafka.producer import Producer, PublishError

log = logging.getLogger(__name__)

METADATA_MS: Final = 30_000  # the longest time until new partitions of the source are noticed

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

        def key_password() -> str:  # otherwise OpenSSL would ask for one on the terminal
            if password is None:
                raise ConfigError("the private key is encrypted: set KP_TLS_KEY_PASSWORD_FILE or KP_TLS_KEY_PASSWORD")
            return password

        for variable, path in (("KP_TLS_CERTIFICATE_FILE", certificate), ("KP_TLS_KEY_FILE", key)):
            if path is not None:
                _read(variable, path)  # OpenSSL does not say which of the two it cannot open
        try:
            context.load_cert_chain(certificate, key, key_password)
        except OSError as error:
            hint = "a PEM certificate and its private key"
            if password is not None:
                hint += ", and KP_TLS_KEY_PASSWORD must be the key's"
            raise ConfigError(_unusable("KP_TLS_CERTIFICATE_FILE", certificate, error, hint, key)) from error
    return context


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


# -- why no broker can be reached

PROBE_MS: Final = 5000  # how long one broker may take to answer

Address = tuple[str, int]


class UnreachableError(ConfigError):
    """No broker can be reached, the login fails, or the topics cannot be prepared."""

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
    not_of_a_connection = ("bootstrap_servers", "metadata_max_age_ms", "request_timeout_ms")
    arguments = {name: value for name, value in client.items() if name not in not_of_a_connection}
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
    named = final[:1] or faults[:3]
    alone = named[0].where == settings.bootstrap_servers
    text = ", ".join(fault.words() if alone else f"{fault.where} ({fault.words()})" for fault in named)
    advice = next((advice for fault in named if (advice := fault.advice())), None)
    return UnreachableError(
        f"no Kafka broker answers at KP_BOOTSTRAP_SERVERS={settings.bootstrap_servers}: {text}"
        + (f"; {advice}, kp-worker doctor tells more" if advice else ""),
        final=bool(final),
    )


# -- opening clients

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


async def _retried(seconds: float, attempt: Callable[[], Awaitable[Result]]) -> Result:
    """Return the result of the first attempt that succeeds within so many seconds; the log says once why one failed.

    Raises the UnreachableError of the last attempt, and at once a final one.
    """
    until, logged = time.monotonic() + seconds, False
    while True:
        try:
            return await attempt()
        except UnreachableError as failure:
            if failure.final or time.monotonic() >= until:
                raise
            if not logged:
                log.warning("%s; trying again for %.0f s", failure, seconds)
                logged = True
        await asyncio.sleep(RETRY_SECONDS)


@asynccontextmanager
async def connected_admin(
    settings: Settings, client: Mapping[str, Any], patience_seconds: float = 0.0
) -> AsyncIterator[AIOKafkaAdminClient]:
    """Start an admin client and close it at the end. Raises UnreachableError.

    `patience_seconds`: how long to retry. Single connections probe first, because a client would log each failure and
    wait for a silent broker.
    """
    async with AsyncExitStack() as stack:

        async def connect() -> AIOKafkaAdminClient:
            failure = await reach_any(settings, client)
            if failure is not None:
                raise failure
            try:
                return await stack.enter_async_context(admin_client(client))
            except KafkaError as error:
                raise await unreachable(settings, client, error) from error

        yield await _retried(patience_seconds, connect)


async def prepare_patiently(
    settings: Settings, client: Mapping[str, Any], work: Callable[[AIOKafkaAdminClient], Awaitable[Result]]
) -> Result:
    """Return the result of `work` with an admin client. Raises ConfigError.

    If a broker closes a connection or does not answer, the work is retried for CONNECT_SECONDS.
    """

    async def prepare() -> Result:
        try:
            async with connected_admin(settings, client) as admin:
                return await work(admin)
        except (KafkaError, OSError, TimeoutError) as error:
            raise UnreachableError(
                f"the topics cannot be prepared at KP_BOOTSTRAP_SERVERS={settings.bootstrap_servers}: "
                f"{error_text(error)}",
                final=isinstance(error, KafkaError) and not error.retriable,
            ) from error

    return await _retried(CONNECT_SECONDS, prepare)


@asynccontextmanager
async def connected(settings: Settings, arguments: Mapping[str, Any], client: Client) -> AsyncIterator[Client]:
    """Do the same as `running`, but raise UnreachableError."""
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(running(client))
        except KafkaError as error:
            raise await unreachable(settings, arguments, error) from error
        yield client

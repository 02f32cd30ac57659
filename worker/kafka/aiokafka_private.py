"""All uses of aiokafka's private names.

One function or class for each use of an underscored or undocumented name; its docstring gives that name, and why the
public API does not suffice. No other module touches them. tests/unit/kafka/test_aiokafka_private.py guards each one;
docs/contributing.md lists what belongs upstream.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition, conn
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.client import AIOKafkaClient
from aiokafka.conn import AIOKafkaConnection, AIOKafkaProtocol, OAuthAuthenticator, collect_hosts, create_conn
from aiokafka.consumer import fetcher
from aiokafka.coordinator.protocol import ConsumerProtocol
from aiokafka.errors import (
    GroupAuthorizationFailedError,
    IncompatibleBrokerVersion,
    KafkaError,
    NodeNotReadyError,
    SaslAuthenticationFailed,
    TransactionalIdAuthorizationFailed,
    for_code,
)
from aiokafka.protocol.admin import DescribeGroupsRequest
from aiokafka.protocol.api import Request, RequestStruct
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

log = logging.getLogger(__name__)

CLOSE_SECONDS: Final = 5.0
"""How long a client may take to end its tasks and connections (normally a few ms); aiokafka itself has no limit."""

RecordBatch: Final = DefaultRecordBatch
"""aiokafka's parser of a batch (magic 2); the public API only parses whole fetches."""


# -- requests


async def send_request(admin: AIOKafkaAdminClient, request: Request[Any], node: int | None = None) -> Any:
    """Send a request to a broker, by default to each in turn (`AIOKafkaAdminClient._send_request`, `._client.cluster`).

    The public methods cannot send a request of ours, drop some arguments, or overlook an error of the whole response.
    A random broker, aiokafka's choice, may be the one again that has not answered.
    """
    if node is None and (brokers := sorted(broker.nodeId for broker in admin._client.cluster.brokers())):
        turn = _turns[admin] = _turns.get(admin, -1) + 1
        node = brokers[turn % len(brokers)]
    return await admin._send_request(request, node)


_turns: Final[WeakKeyDictionary[AIOKafkaAdminClient, int]] = WeakKeyDictionary()


def has_version(request: type[Request[Any]], least: int, most: int) -> bool:
    """Whether aiokafka can send a request in one of these versions (`Request._CLASSES`)."""
    return any(least <= version.API_VERSION <= most for version in request._CLASSES)


class InOneVersion(Request[RequestStruct]):  # type: ignore[misc]  # aiokafka is untyped
    """A request that exists here in one version only (`Request._CLASSES`).

    aiokafka derives the versions from its class's type argument, so they could not be made by a function.
    """

    API_KEY = -1

    def __init_subclass__(cls, *, version: Any) -> None:
        super().__init_subclass__()
        cls.API_KEY, cls._CLASSES = version.API_KEY, (version,)

    def __init__(self, *values: Any) -> None:
        self.values = values

    def build(self, request_struct_class: Any) -> Any:
        """Return the request."""
        return request_struct_class(*self.values)

    def prepare(self, versions: dict[int, tuple[int, int]]) -> Any:
        """Return the request for a broker with these versions. Raises IncompatibleBrokerVersion."""
        try:
            return super().prepare(versions)
        except NotImplementedError as error:
            raise IncompatibleBrokerVersion(
                f"the broker does not understand {type(self).__name__}: kp-worker needs Kafka 3.9 or later"
            ) from error


# -- connections


async def ask_once(host: str, port: int, request: Request[Any], **connection: Any) -> Any:
    """Connect to a broker, send a request and disconnect (`conn.create_conn`); public clients hide why that fails."""
    opened = await create_conn(host, port, **connection)
    try:
        return await opened.send(request)
    finally:
        opened.close()


def split_servers(servers: str) -> list[tuple[str, int]]:
    """Return host and port of each bootstrap server, as the clients parse them (`conn.collect_hosts`)."""
    return [(host, port) for host, port, _ in collect_hosts(servers)]


class _OAuth(OAuthAuthenticator):  # type: ignore[misc]  # aiokafka is untyped
    async def step(self, payload: bytes | None) -> Any:
        """Return the next message to send; None: done."""
        if payload:
            raise SaslAuthenticationFailed(f"the token is refused: {payload.decode('utf-8', 'replace')}")
        return await super().step(payload)


def _authenticator_oauth(connection: AIOKafkaConnection) -> _OAuth:
    return _OAuth(sasl_oauth_token_provider=connection._sasl_oauth_token_provider)


def check_oauth_answers() -> None:
    """Make every connection of this process fail if the broker rejects its token; may be called again.

    aiokafka ignores the rejection (RFC 7628, 3.2.2), and its client goes on with a connection that the broker then
    closes. Replaces `AIOKafkaConnection.authenticator_oauth`; the public API does not accept an authenticator.
    """
    AIOKafkaConnection.authenticator_oauth = _authenticator_oauth


class _NoticingProtocol(AIOKafkaProtocol):  # type: ignore[misc]  # aiokafka is untyped
    seconds = 0

    def connection_made(self, transport: Any) -> None:
        """Let the system close the connection if the broker's machine acknowledges nothing for `seconds`."""
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        third = max(1, self.seconds // 3)
        # The user timeout covers unacknowledged data; keepalive probes cover an idle connection.
        wanted = {
            "TCP_USER_TIMEOUT": self.seconds * 1000,
            "TCP_KEEPIDLE": third, "TCP_KEEPALIVE": third, "TCP_KEEPINTVL": third, "TCP_KEEPCNT": 2,
        }  # fmt: skip
        for name, value in wanted.items():
            if hasattr(socket, name):  # Linux and macOS differ
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def notice_lost_brokers(seconds: int) -> None:
    """Make every connection of this process fail once its broker has been unreachable for so long; may be called again.

    A broker that loses its network or power closes no connection: a request would wait for the client's request
    timeout, which must be long, as a busy broker may take as long. The operating system knows the difference: no
    acknowledgements. Replaces `conn.AIOKafkaProtocol` and `AIOKafkaConnection.connect`; the public API does not give
    the socket away.
    """
    _NoticingProtocol.seconds = seconds
    conn.AIOKafkaProtocol = _NoticingProtocol
    AIOKafkaConnection.connect = _connect_in_time


_connect: Final = AIOKafkaConnection.connect


async def _connect_in_time(connection: AIOKafkaConnection) -> Any:
    patience = connection._request_timeout
    connection._request_timeout = min(patience, _NoticingProtocol.seconds)
    try:
        return await _connect(connection)
    finally:
        connection._request_timeout = patience


async def closed(close: Coroutine[Any, Any, None]) -> None:
    """Await the closing of a client, for CLOSE_SECONDS at most: its caller no longer needs it."""
    closing = asyncio.ensure_future(close)
    done, _ = await asyncio.wait({closing}, timeout=CLOSE_SECONDS)
    if done:
        closing.result()
    else:
        closing.cancel()
        log.warning("a Kafka client has not closed in %.0f s; the worker goes on without waiting for it", CLOSE_SECONDS)


# -- producers


def sender_task(producer: AIOKafkaProducer) -> asyncio.Task[None]:
    """Return the task that sends records (`AIOKafkaProducer._sender`, `Sender.sender_task`).

    The first fatal error ends it, and acknowledgements then never arrive; the public API does not report that.
    """
    task: asyncio.Task[None] = producer._sender.sender_task
    return task


class UnsentError(Exception):
    """A request was not sent: no broker is available."""


class UnansweredError(Exception):
    """A request was sent but not answered: it may still reach the broker."""


class Brokers:
    """A producer's connections, one to each broker (`AIOKafkaClient`).

    aiokafka's producer has two to each, and no public way to send our own requests.
    """

    def __init__(self, client: Mapping[str, Any], timeout_ms: int) -> None:
        self._arguments = {**client, "request_timeout_ms": timeout_ms}
        self._client: Any = None

    async def start(self) -> None:
        """Connect. Raises KafkaError."""
        self._client = AIOKafkaClient(**self._arguments)
        await self._client.bootstrap()

    async def stop(self) -> None:
        """Disconnect."""
        if self._client is not None:
            await closed(self._client.close())

    async def send(self, node: int, request: Any) -> Any:
        """Send a request to a broker. Raises UnsentError, UnansweredError, IncompatibleBrokerVersion."""
        if not await self._client.ready(node):
            raise UnsentError(f"broker {node} cannot be reached")
        try:
            return await self._client.send(node, request)
        except IncompatibleBrokerVersion:
            raise
        except NodeNotReadyError as error:
            raise UnsentError(f"broker {node} cannot be reached") from error
        except KafkaError as error:
            raise UnansweredError(f"broker {node} did not answer: {error!r}") from error

    async def any_node(self) -> int:
        """Return any broker. Raises UnsentError."""
        node = self._client.get_random_node()
        if node is None:
            raise UnsentError("no broker is known")
        return int(node)

    async def coordinator(self, kind: int, key: str) -> int:
        """Return the coordinator of a group (0) or transactional id (1). Raises UnsentError, authorization errors."""
        await self.any_node()
        try:
            return int(await self._client.coordinator_lookup(kind, key))
        except (GroupAuthorizationFailedError, TransactionalIdAuthorizationFailed) as error:
            raise type(error)(key) from error
        except KafkaError as error:
            raise UnsentError(f"its coordinator is not known: {error!r}") from error

    async def leader(self, partition: TopicPartition) -> int | None:
        """Return the broker that leads a partition; None if there is none."""
        cluster = self._client.cluster
        if cluster.leader_for_partition(partition) is None:
            await self._client.add_topic(partition.topic)  # requests its metadata, now and at each refresh
        node = cluster.leader_for_partition(partition)
        return None if node is None or node < 0 else int(node)

    async def refresh(self) -> None:
        """Request leaders and brokers again."""
        await self._client.force_metadata_update()


class BatchBuilder:
    """One batch of records in its wire format (`DefaultRecordBatchBuilder`).

    The public `create_batch` is tied to aiokafka's producer, which assigns its own sequence numbers.
    """

    def __init__(self, max_bytes: int, *, transactional: bool) -> None:
        self._builder = DefaultRecordBatchBuilder(
            magic=2,
            compression_type=DefaultRecordBatch.CODEC_NONE,
            is_transactional=transactional,
            producer_id=-1,
            producer_epoch=-1,
            base_sequence=-1,
            batch_size=max_bytes,
        )
        self._records = 0
        self._data: bytes | None = None

    def append(
        self, timestamp_ms: int | None, key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes]]
    ) -> bool:
        """Append a record (timestamp None: now); return False if it does not fit and is not the first."""
        done = self._builder.append(self._records, timestamp_ms, key=key, value=value, headers=headers) is not None
        self._records += done
        return done

    def size(self) -> int:
        """Return the bytes of the batch."""
        return int(self._builder.size()) if self._data is None else len(self._data)

    def build(self, producer: tuple[int, int], sequence: int) -> bytes:
        """Return the batch, numbered from `sequence`; the same bytes for each try."""
        if self._data is None:
            self._builder.set_producer_state(*producer, sequence)
            self._data = bytes(self._builder.build())
        return self._data


# -- the consumer group


def raise_group_error(consumer: AIOKafkaConsumer) -> None:
    """Raise the error of the group's coordinator, a missing ACL for example (`AIOKafkaConsumer._coordinator`).

    The public API raises it only from a fetch, and a member without partitions never fetches.
    """
    if consumer._coordinator is not None:
        consumer._coordinator.check_errors()


async def group_assignment(consumer: AIOKafkaConsumer, group: str) -> tuple[str, set[TopicPartition]]:
    """Return the state of the consumer's group and the partitions that its members own. Raises KafkaError.

    Uses `GroupCoordinator._send_req` and `ConsumerProtocol`: the public API needs another connection and does not
    decode assignments.
    """
    answer = await consumer._coordinator._send_req(DescribeGroupsRequest([group], False))
    error, _, state, _, _, members, *_ = answer.groups[0]
    if error:
        raise for_code(error)(group)
    assignments = [ConsumerProtocol.ASSIGNMENT.decode(assignment) for *_, assignment in members if assignment]
    return state, {tp for assignment in assignments for tp in assignment.partitions()}


def rejoin_group(consumer: AIOKafkaConsumer) -> None:
    """Join the group again (`GroupCoordinator.request_rejoin`); the public API can only leave a group."""
    consumer._coordinator.request_rejoin()


async def count_partitions(consumer: AIOKafkaConsumer, topics: Iterable[str]) -> dict[str, int] | None:
    """Return the current number of partitions of subscribed topics; None if no broker answered.

    Uses `AIOKafkaClient.force_metadata_update`. If there are new partitions, the consumer rejoins its group.
    """
    if not await consumer._client.force_metadata_update():
        return None
    return {topic: len(consumer.partitions_for_topic(topic) or ()) for topic in topics}


# -- what a consumer fetches


class Consumer(AIOKafkaConsumer):  # type: ignore[misc]
    """A consumer whose fetcher reads responses with other classes, and forgets cancelled fetches.

    `names`: what stands for `MemoryRecords`, `PartitionRecords` and `FetchResult` in the functions of
    `aiokafka.consumer.fetcher.Fetcher` that name them. The public API accepts no reader; aiokafka's is not bounded in
    memory, and stops at a record that it cannot parse.
    """

    def __init__(self, *topics: str, names: Mapping[str, Any], **arguments: Any) -> None:
        super().__init__(*topics, **arguments)
        self._names = names

    async def start(self) -> None:
        """Connect. A consumer with a group subscribes afterwards: what it fetched until then, aiokafka would read."""
        await super().start()
        theirs = self._fetcher
        for name in ("_proc_fetch_request", "next_record", "fetched_records"):
            function = getattr(fetcher.Fetcher, name)
            own = FunctionType(function.__code__, {**function.__globals__, **self._names}, name, function.__defaults__)
            setattr(theirs, name, MethodType(own, theirs))
        theirs._proc_fetch_request = partial(_false_if_cancelled, theirs._proc_fetch_request)
        # A cancelled `getmany` leaves its future in the fetcher's set: each rebalance would leave one a partition.
        theirs._fetch_waiters = WeakSet()
        self._subscription.register_fetch_waiters(theirs._fetch_waiters)


async def _false_if_cancelled(fetch: Callable[..., Awaitable[bool]], *request: Any) -> bool:
    """Return whether a fetch found something; False if it was cancelled.

    `Fetcher.close` cancels and awaits its requests. One that pauses after an error would end `stop` with CancelledError
    and leave the connections open.
    """
    try:
        return await fetch(*request)
    except asyncio.CancelledError:
        return False

"""A guard for each private name of aiokafka that worker/ uses: a version that changes one fails here by name.

The names are in worker/kafka/aiokafka_private.py; tests/unit/test_layering.py holds that no other module touches any.
 Read aiokafka's source anew before the pin of its version is moved.
"""

import asyncio
import contextlib
import gc
import inspect
import socket
import sys
from types import SimpleNamespace
from typing import Any

import aiokafka
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.client import AIOKafkaClient, CoordinationType
from aiokafka.cluster import ClusterMetadata
from aiokafka.conn import AIOKafkaConnection, OAuthAuthenticator, collect_hosts, create_conn
from aiokafka.consumer import fetcher
from aiokafka.consumer.group_coordinator import GroupCoordinator, NoGroupCoordinator
from aiokafka.coordinator.protocol import ConsumerProtocol
from aiokafka.errors import KafkaConnectionError, SaslAuthenticationFailed
from aiokafka.producer.sender import Sender
from aiokafka.protocol.admin import ApiVersionRequest, DescribeGroupsRequest, DescribeGroupsResponse_v3
from aiokafka.protocol.api import Request
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.transaction import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    TxnOffsetCommitRequest,
)
from aiokafka.structs import BrokerMetadata

from worker.kafka import aiokafka_private as private
from worker.kafka.connections import LOST_SECONDS, patch_aiokafka
from worker.kafka.fetches import Consumer, PartitionFetch, Reading

TP = TopicPartition("t", 0)


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def lines(function: Any) -> list[str]:
    """Return the lines of a function without its docstring."""
    body = inspect.getsource(function).split('"""')[-1]
    return [line.strip() for line in body.splitlines() if line.strip()]


def test_the_version_is_the_one_that_was_read() -> None:
    assert aiokafka.__version__.startswith("0.14.")


SIGNATURES = [
    (AIOKafkaAdminClient._send_request, "self request node_id"),
    (
        AIOKafkaAdminClient.describe_topics,
        "self topics",
    ),  # contributing.md (Fixes that belong upstream): when it changes
    (OAuthAuthenticator.step, "self payload"),
    (GroupCoordinator._send_req, "self request"),
    (GroupCoordinator.request_rejoin, "self"),
    (ConsumerProtocol.ASSIGNMENT.partitions, "self"),
    (AIOKafkaConsumer.getmany, "self partitions timeout_ms max_records"),
    (AIOKafkaConsumer.last_stable_offset, "self partition"),
    (
        fetcher.PartitionRecords.__init__,
        """self tp records aborted_transactions fetch_offset key_deserializer value_deserializer check_crcs
        isolation_level""",
    ),
    (fetcher.FetchResult.__init__, "self tp assignment partition_records backoff"),
    (fetcher.FetchResult.getall, "self max_records"),
    # `AIOKafkaClient` is not documented; these methods are what `Brokers` uses of it.
    (AIOKafkaClient.force_metadata_update, "self"),
    (AIOKafkaClient.send, "self node_id request group"),
    (AIOKafkaClient.ready, "self node_id group"),
    (AIOKafkaClient.coordinator_lookup, "self coordinator_type coordinator_key"),
    (ClusterMetadata.leader_for_partition, "self partition"),
]

SOURCES = [
    (AIOKafkaAdminClient._get_cluster_metadata, ["MetadataRequest(topics)"]),
    (
        AIOKafkaConsumer,
        ["self._coordinator = GroupCoordinator(", "self._client =", "self._fetcher = Fetcher("],
    ),
    (AIOKafkaProducer, ["self._sender = Sender("]),
    (AIOKafkaClient._md_synchronizer, ["_md_update_fut.set_result(ret)"]),
    (AIOKafkaClient.__init__, ["self.cluster = ClusterMetadata("]),
    (GroupCoordinator._on_metadata_change, ["request_rejoin"]),
    # What `PartitionFetch` replaces asks the same of the assignment.
    (
        fetcher.FetchResult.check_assignment,
        [
            "if assignment.active:", "assignment.state_value(tp)", "if tp_state.paused:",
            "position != self._partition_records.next_fetch_offset",
        ],
    ),
    (fetcher.FetchResult._update_position, ["state.consumed_to("]),
    (fetcher.Fetcher.fetched_records, ["res_or_error.getall(max_records)", "if not res_or_error.has_more():"]),
    (fetcher.Fetcher.next_record, ["res_or_error.getone()"]),
    (fetcher.Fetcher._get_actions_per_node, ["record.calculate_backoff()"]),
]  # fmt: skip


@pytest.mark.parametrize(("function", "expected"), SIGNATURES, ids=lambda it: getattr(it, "__qualname__", ""))
def test_the_parameters_of(function: Any, expected: str) -> None:
    assert parameters(function) == expected.split()


@pytest.mark.parametrize(("function", "expected"), SOURCES, ids=lambda it: getattr(it, "__qualname__", ""))
def test_the_source_of(function: Any, expected: list[str]) -> None:
    source = inspect.getsource(function)
    assert [text for text in expected if text not in source] == []


def test_names_without_a_signature() -> None:
    assert inspect.iscoroutinefunction(AIOKafkaAdminClient._send_request)
    assert {"check_errors"} <= set(dir(GroupCoordinator)) & set(dir(NoGroupCoordinator))
    assert hasattr(ConsumerProtocol.ASSIGNMENT, "decode")
    assert isinstance(Sender.sender_task, property)
    assert (CoordinationType.GROUP, CoordinationType.TRANSACTION) == (0, 1)
    for name in ("bootstrap", "close", "get_random_node", "add_topic", "force_metadata_update"):
        assert callable(getattr(AIOKafkaClient, name))


# -- requests


async def test_admin_asks_the_brokers_in_turn() -> None:
    """One that does not answer is then asked once in a round, not by chance again and again."""
    asked = []

    async def send(node: int, request: Any) -> None:
        asked.append(node)

    admin = AIOKafkaAdminClient()
    admin._client.cluster._brokers = {node: BrokerMetadata(node, "host", 9092, None) for node in (7, 3, 5)}
    admin._client.send = send
    for _ in range(6):
        await private.send_request(admin, ApiVersionRequest())
    await private.send_request(admin, ApiVersionRequest(), 9)
    assert asked == [3, 5, 7, 3, 5, 7, 9]


def test_request_classes() -> None:
    assert "reversed(self._CLASSES)" in inspect.getsource(Request.prepare)
    assert max(version.API_VERSION for version in ProduceRequest._CLASSES) == 7, "ProduceV1 could be aiokafka's"
    assert max(version.API_VERSION for version in MetadataRequest._CLASSES) == 5, (
        "the requests in kafka/describe.py could go"
    )
    assert private.has_version(ProduceRequest, 7, 9)
    assert not private.has_version(ProduceRequest, 8, 12)


def test_describe_groups_v3_has_its_answer() -> None:
    (version,) = [each for each in DescribeGroupsRequest._CLASSES if each.API_VERSION == 3]
    assert version.RESPONSE_TYPE is not DescribeGroupsResponse_v3, "describe.py could use aiokafka's request"
    assert "authorized_operations" in str(DescribeGroupsResponse_v3.SCHEMA.fields[-1].array_of.names)


# -- connections


def test_create_conn_and_collect_hosts() -> None:
    assert parameters(create_conn)[:2] == ["host", "port"]
    assert inspect.iscoroutinefunction(create_conn)
    assert {"send", "close"} <= set(dir(AIOKafkaConnection))
    assert [address[:2] for address in collect_hosts("a:1,b:2", randomize=False)] == [("a", 1), ("b", 2)]
    assert sorted(private.split_servers("a:1,b:2")) == [("a", 1), ("b", 2)]


async def test_authenticator_oauth() -> None:
    patch_aiokafka()
    patch_aiokafka()  # it may be replaced again
    assert AIOKafkaConnection.authenticator_oauth is private._authenticator_oauth
    assert "authenticator = self.authenticator_oauth()" in inspect.getsource(AIOKafkaConnection._do_sasl_handshake)
    assert "self._sasl_oauth_token_provider = sasl" in inspect.getsource(AIOKafkaConnection.__init__)
    assert parameters(OAuthAuthenticator.step) == ["self", "payload"]

    async def token() -> str:
        return "secret"

    provider = SimpleNamespace(token=token)
    authenticator = private._authenticator_oauth(SimpleNamespace(_sasl_oauth_token_provider=provider))
    assert await authenticator.step(None) == (b"n,,\x01auth=Bearer secret\x01\x01", True)
    assert await authenticator.step(b"") is None
    with pytest.raises(SaslAuthenticationFailed, match="the token is refused: no"):
        await authenticator.step(b"no")


async def test_a_connection_notices_that_its_broker_is_lost() -> None:
    patch_aiokafka()
    patch_aiokafka()  # it may be replaced again
    assert "protocol = AIOKafkaProtocol(self._closed_fut" in inspect.getsource(private._connect)
    assert "timeout(self._request_timeout)" in inspect.getsource(private._connect)
    assert "wait_for(fut, self._request_timeout)" in inspect.getsource(AIOKafkaConnection.send)
    asked: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()

    async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        asked.set_result(writer)

    async with await asyncio.start_server(silence, "127.0.0.1", 0) as silent:
        port = silent.sockets[0].getsockname()[1]
        connection = AIOKafkaConnection("127.0.0.1", port, request_timeout_ms=60_000)
        connecting = asyncio.create_task(connection.connect())
        broker = await asked
        opened = connection._writer.get_extra_info("socket")
        assert connection._request_timeout == LOST_SECONDS, "the first requests get no longer than connecting"
        assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        if sys.platform == "linux":
            assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == LOST_SECONDS * 1000
            assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == LOST_SECONDS // 3
        broker.close()
        await broker.wait_closed()
        with pytest.raises(KafkaConnectionError):
            await connecting
    assert connection._request_timeout == 60


def test_aiokafka_ignores_the_answer_to_a_token() -> None:
    """When it does not, docs/contributing.md#fixes-that-belong-upstream says what to delete."""
    assert lines(OAuthAuthenticator.step)[1:3] == ["if self._token_sent:", "return None"]


# -- what a consumer fetches


def test_the_fetcher_s_functions_that_name_the_classes() -> None:
    names = {"MemoryRecords", "PartitionRecords", "FetchResult"}
    functions = {
        name: function.__code__
        for name, function in vars(fetcher.Fetcher).items()
        if inspect.isfunction(function) and not names.isdisjoint(function.__code__.co_names)
    }
    assert set(functions) == {"_proc_fetch_request", "next_record", "fetched_records"}
    assert not any(code.co_freevars for code in functions.values())
    source = inspect.getsource(fetcher.Fetcher)
    assert "records = MemoryRecords(part_data[-1])" in source
    assert "partition_records = PartitionRecords(" in source
    assert "type(res_or_error) is FetchResult" in source
    assert "self._proc_fetch_request(assignment, node_id, request)" in source, "it is looked up at each fetch"
    assert "self._fetcher = Fetcher(" in inspect.getsource(AIOKafkaConsumer.start)


async def test_only_our_consumers_read_with_our_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Consumer(reading=Reading(), enable_auto_commit=False), AIOKafkaConsumer(enable_auto_commit=False)
    for consumer, result in ((ours, PartitionFetch), (theirs, fetcher.FetchResult)):
        await started(consumer, monkeypatch)
        assert consumer._fetcher.fetched_records.__globals__["FetchResult"] is result
        await consumer.stop()


async def started(consumer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a consumer without a broker."""

    async def nothing() -> None:
        pass

    monkeypatch.setattr(consumer._client, "bootstrap", nothing)
    await consumer.start()
    await asyncio.sleep(0)  # a task that has not begun cannot be ended without an error


@pytest.mark.parametrize("ours", [False, True])
async def test_a_cancelled_fetch_leaves_nothing_behind(ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With aiokafka's consumer it does: once that is mended, ours need not care."""
    consumer: Any = Consumer(reading=Reading()) if ours else AIOKafkaConsumer(enable_auto_commit=False)
    await started(consumer, monkeypatch)
    consumer.assign([TP])
    theirs = consumer._fetcher
    try:
        for _ in range(10):
            fetching = asyncio.create_task(theirs.fetched_records([TP], 60))
            await asyncio.sleep(0.01)
            assert theirs._fetch_waiters, "it waits"
            fetching.cancel()
            await asyncio.wait({fetching})
            del fetching
        gc.collect()
        assert len(theirs._fetch_waiters) == (0 if ours else 10)
        assert consumer._subscription._fetch_waiters is theirs._fetch_waiters
    finally:
        await consumer.stop()


@pytest.mark.parametrize("ours", [False, True])
async def test_a_consumer_stops_while_a_fetch_pauses(ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With aiokafka's consumer `close` raises CancelledError: once that is mended, ours need not care."""
    more = {"enable_auto_commit": False, "retry_backoff_ms": 60_000}
    consumer: Any = Consumer(reading=Reading(), **more) if ours else AIOKafkaConsumer(**more)
    await started(consumer, monkeypatch)
    theirs = consumer._fetcher

    async def away(*_: Any) -> None:
        raise KafkaConnectionError("the broker is away")

    monkeypatch.setattr(consumer._client, "send", away)
    monkeypatch.setattr(theirs, "_invalidate_preferred_read_replica_for_node", lambda *_: None)
    fetching = asyncio.create_task(theirs._proc_fetch_request({}, 0, None))
    await asyncio.sleep(0.01)
    assert not fetching.done(), "it pauses"
    theirs._pending_tasks.add(fetching)
    with contextlib.nullcontext() if ours else pytest.raises(asyncio.CancelledError):
        await theirs.close()
    assert fetching.cancelled() is not ours
    theirs._pending_tasks.clear()
    await consumer.stop()


# -- the producer


def test_a_request_that_left_and_one_that_did_not() -> None:
    """`send` looks for a connection first, and raises NodeNotReadyError only where there is none."""
    before, after = inspect.getsource(AIOKafkaClient.send).split("future = self._conns", 1)
    assert "raise NodeNotReadyError" in before
    assert "NodeNotReadyError" not in after
    assert "raise RequestTimedOutError" in after


def test_a_producer_s_old_requests_end_where_ours_begin() -> None:
    """When aiokafka knows more, kafka/protocol.py could use it."""
    newest = {request: max(each.API_VERSION for each in request._CLASSES) for request in (
        InitProducerIdRequest, AddPartitionsToTxnRequest, AddOffsetsToTxnRequest, TxnOffsetCommitRequest, EndTxnRequest,
    )}  # fmt: skip
    assert set(newest.values()) == {0}


def test_a_batch_is_built_as_sent() -> None:
    builder = private.BatchBuilder(1 << 20, transactional=True)
    assert builder.append(77, b"k", b"v", [("h", b"1")])
    assert builder.append(78, None, None, [])
    assert builder.size() > 61
    data = builder.build((4711, 3), 2**31 - 1)
    assert builder.build((4712, 4), 0) == data, "the same for each try"
    batch = private.RecordBatch(data)
    assert (batch.producer_id, batch.producer_epoch, batch.base_sequence) == (4711, 3, 2**31 - 1)
    assert batch.is_transactional
    records = [(record.timestamp, record.key, record.value, list(record.headers)) for record in batch]
    assert records == [(77, b"k", b"v", [("h", b"1")]), (78, None, None, [])]


def test_a_batch_ends_at_its_size_but_takes_any_first_record() -> None:
    builder = private.BatchBuilder(100, transactional=False)
    assert builder.append(1, b"k", b"v" * 500, [])
    assert not builder.append(1, b"k", b"v", [])
    assert [record.value for record in private.RecordBatch(builder.build((-1, -1), -1))] == [b"v" * 500]

"""A guard for each private name of aiokafka that worker/ uses: a version that changes one fails here by name.

The names are in worker/kafka/aiokafka_private.py and aiokafka_private_producer.py; tests/unit/test_layering.py holds
that no other module touches any. Read aiokafka's source anew before the pin of its version is moved.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
import sys
from types import SimpleNamespace
from typing import Any

import aiokafka
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.client import AIOKafkaClient
from aiokafka.conn import AIOKafkaConnection, OAuthAuthenticator, collect_hosts, create_conn
from aiokafka.consumer import fetcher
from aiokafka.consumer.group_coordinator import GroupCoordinator, NoGroupCoordinator
from aiokafka.coordinator.protocol import ConsumerProtocol
from aiokafka.errors import KafkaConnectionError, SaslAuthenticationFailed
from aiokafka.producer.message_accumulator import BatchBuilder, MessageAccumulator, MessageBatch
from aiokafka.producer.sender import Sender, SendProduceReqHandler
from aiokafka.producer.transaction_manager import TransactionManager
from aiokafka.protocol.admin import DescribeGroupsRequest, DescribeGroupsResponse_v3
from aiokafka.protocol.api import Request
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.produce import ProduceRequest

from worker.config import load
from worker.kafka import aiokafka_private as private
from worker.kafka.aiokafka_private_producer import _ProduceRequest, put_back_sequence
from worker.kafka.client import LOST_SECONDS, client_arguments
from worker.kafka.fetch_results import install_reader
from worker.kafka.metadata import DescribeTopicsRequest

THEIR_RECORDS: Any = private.PartitionRecords.__base__
THEIR_RESULT: Any = private.FetchResult.__base__
TP = TopicPartition("t", 0)


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def lines(function: Any) -> list[str]:
    """Return the lines of a function without its docstring."""
    body = inspect.getsource(function).split('"""')[-1]
    return [line.strip() for line in body.splitlines() if line.strip()]


def test_the_version_is_the_one_that_was_read() -> None:
    assert aiokafka.__version__.startswith("0.14.")


# -- requests


def test_admin_send_request() -> None:
    assert parameters(AIOKafkaAdminClient._send_request) == ["self", "request", "node_id"]
    assert inspect.iscoroutinefunction(AIOKafkaAdminClient._send_request)


def test_request_classes() -> None:
    assert "reversed(self._CLASSES)" in inspect.getsource(Request.prepare)
    assert [version.API_VERSION for version in ProduceRequest._CLASSES] == list(range(8)), "8 need not be added"
    assert [version.API_VERSION for version in _ProduceRequest._CLASSES] == list(range(9))
    assert private.has_version(ProduceRequest, 7, 9)
    assert not private.has_version(ProduceRequest, 8, 12)


def test_a_subclass_speaks_more_versions_and_its_parent_does_not() -> None:
    assert [version.API_VERSION for version in DescribeTopicsRequest._CLASSES] == [0, 1, 2, 3, 4, 5, 8, 10]
    assert max(version.API_VERSION for version in MetadataRequest._CLASSES) == 5, "metadata.py could go"


def test_the_admin_client_cannot_forbid_the_creation_of_topics() -> None:
    """When it can, docs/contributing.md#fixes-that-belong-upstream says what to delete."""
    assert parameters(AIOKafkaAdminClient.describe_topics) == ["self", "topics"]
    assert "MetadataRequest(topics)" in inspect.getsource(AIOKafkaAdminClient._get_cluster_metadata)


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
    client_arguments(load())
    client_arguments(load())  # it may be replaced again
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
    client_arguments(load())
    client_arguments(load())  # it may be replaced again
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


# -- the consumer group


def test_consumer_coordinator() -> None:
    assert "self._coordinator = GroupCoordinator(" in inspect.getsource(AIOKafkaConsumer)
    assert {"check_errors"} <= set(dir(GroupCoordinator)) & set(dir(NoGroupCoordinator))
    assert parameters(GroupCoordinator._send_req) == ["self", "request"]
    assert parameters(GroupCoordinator.request_rejoin) == ["self"]
    assert hasattr(ConsumerProtocol.ASSIGNMENT, "decode")
    assert parameters(ConsumerProtocol.ASSIGNMENT.partitions) == ["self"]


def test_consumer_methods() -> None:
    assert parameters(AIOKafkaConsumer.getmany) == ["self", "partitions", "timeout_ms", "max_records"]
    assert parameters(AIOKafkaConsumer.last_stable_offset) == ["self", "partition"]


# -- what a consumer fetches


def test_fetcher_uses_the_names_that_are_replaced() -> None:
    source = inspect.getsource(fetcher.Fetcher)
    assert "records = MemoryRecords(part_data[-1])" in source
    assert "partition_records = PartitionRecords(" in source
    assert "type(res_or_error) is FetchResult" in source
    assert "self._fetch_task = create_task(" in source, "the task inherits the context of the consumer's start"
    install_reader()
    assert issubclass(fetcher.PartitionRecords, private.PartitionRecords)
    assert issubclass(fetcher.FetchResult, private.FetchResult)


def test_partition_records() -> None:
    unpack = inspect.getsource(THEIR_RECORDS._unpack_records)
    for name in ("has_next()", "next_batch()", "validate_crc()", "producer_id", "base_offset", "is_control_batch",
                 "is_transactional", "next_offset", "_contains_abort_marker(next_batch)",
                 "self._consumer_record(tp, record)"):  # fmt: skip
        assert name in unpack, name
    assert "control_record = next(next_batch)" in inspect.getsource(THEIR_RECORDS._contains_abort_marker)
    assert parameters(THEIR_RECORDS.__init__) == [
        "self", "tp", "records", "aborted_transactions", "fetch_offset", "key_deserializer", "value_deserializer",
        "check_crcs", "isolation_level",
    ]  # fmt: skip
    init = inspect.getsource(THEIR_RECORDS.__init__)
    for name in ("_key_deserializer", "_value_deserializer", "next_fetch_offset", "_records_iterator"):
        assert f"self.{name} = " in init, name
    assert "record.checksum" in inspect.getsource(THEIR_RECORDS._consumer_record)


def test_a_reader_s_consumer_record_is_called_without_a_detour() -> None:
    install_reader()
    assert fetcher.PartitionRecords._consumer_record is fetcher.PartitionRecords.consumer_record


def test_fetch_result() -> None:
    assert parameters(THEIR_RESULT.getall) == ["self", "max_records"]
    assert "_partition_records" in inspect.getsource(THEIR_RESULT.has_more)
    assert "self._topic_partition = tp" in inspect.getsource(THEIR_RESULT.__init__)
    assert parameters(THEIR_RESULT._update_position) == ["self"]


# -- the producer


def test_sender_task() -> None:
    assert isinstance(Sender.sender_task, property)
    assert "self._sender = Sender(" in inspect.getsource(AIOKafkaProducer)


def test_transaction_error() -> None:
    assert "self._txn_manager = TransactionManager(" in inspect.getsource(AIOKafkaProducer)
    assert parameters(TransactionManager.wait_for_transaction_end) == ["self"]


def test_coordinator_lookup() -> None:
    assert "self.client.coordinator_lookup(" in inspect.getsource(Sender._find_coordinator)
    assert parameters(AIOKafkaClient.coordinator_lookup) == ["self", "coordinator_type", "coordinator_key"]


def test_a_closed_connection_ends_the_sender() -> None:
    """When it does not, docs/contributing.md#fixes-that-belong-upstream says what to delete."""
    retried = inspect.getsource(Sender._find_coordinator).split("except (")[1].split(")")[0]
    assert "Errors.NodeNotReadyError" in retried
    assert "KafkaConnectionError" not in retried


def test_send_produce_req() -> None:
    assert parameters(Sender._send_produce_req) == ["self", "node_id", "batches"]
    assert lines(Sender._send_produce_req) == [
        "handler = SendProduceReqHandler(self, batches)",
        "await handler.do(node_id)",
        "self._in_flight.remove(node_id)",
        "for tp in batches:",
        "self._muted_partitions.remove(tp)",
    ]


def test_produce_handler() -> None:
    assert parameters(SendProduceReqHandler.__init__) == ["self", "sender", "batches"]
    assert parameters(SendProduceReqHandler.handle_response) == ["self", "response"]
    assert parameters(SendProduceReqHandler._can_retry) == ["self", "error", "batch"]
    assert "self._batches = batches" in inspect.getsource(SendProduceReqHandler.__init__)
    init = inspect.getsource(ProduceRequest.__init__)
    for name in ("transactional_id", "required_acks", "timeout", "topics"):
        assert f"self._{name} = {name}" in init, name


def test_message_batch() -> None:
    assert {"future", "failure", "tp", "record_count"} <= set(dir(MessageBatch)) | {"future"}
    source = inspect.getsource(MessageBatch.__init__)
    assert "self.future = " in source
    assert "self._builder = builder" in source
    assert "return self._buffer" in inspect.getsource(BatchBuilder._build)


def test_sequence_numbers() -> None:
    assert "increment_sequence_number" in inspect.getsource(MessageAccumulator._pop_batch)
    assert "_sequence_numbers" in inspect.getsource(TransactionManager.sequence_number)


async def test_a_sequence_number_goes_back_as_it_went_on() -> None:
    manager = TransactionManager(None, 1000)
    for start in (0, 5, 2**31 - 3, -(2**31)):
        manager._sequence_numbers[TP] = start
        manager.increment_sequence_number(TP, 10)
        put_back_sequence(manager, TP, 10)
        assert manager.sequence_number(TP) == start

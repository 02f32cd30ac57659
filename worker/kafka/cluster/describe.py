"""Ask a broker about topics and groups, this login's permissions on them, and the requests that it supports."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Final, NamedTuple

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import IncompatibleBrokerVersion, KafkaError, NoError, for_code
from aiokafka.protocol.abstract import AbstractType
from aiokafka.protocol.admin import ApiVersionRequest, DescribeConfigsRequest, DescribeGroupsResponse_v3
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.commit import OffsetCommitRequest, OffsetFetchRequest
from aiokafka.protocol.coordination import FindCoordinatorRequest
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.group import HeartbeatRequest, JoinGroupRequest, LeaveGroupRequest, SyncGroupRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.offset import OffsetRequest
from aiokafka.protocol.transaction import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    TxnOffsetCommitRequest,
)
from aiokafka.protocol.types import (
    Array,
    Boolean,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Schema,
    String,
    TaggedFields,
)

from worker.kafka.aiokafka_private import has_version, send_request, with_versions
from worker.kafka.cluster.connections import admin_client
from worker.kafka.writing.protocol import (
    FeaturesRequest,
    InitProducerId,
    InOneVersion,
    ProduceV1,
    may_hang_at_last_epoch,
    transaction_protocol,
)

NO_ID: Final = bytes(16)


class Uuid(AbstractType[bytes]):  # type: ignore[misc]  # aiokafka is untyped
    """A UUID as its 16 bytes."""

    @classmethod
    def encode(cls, value: bytes) -> bytes:
        """Write the 16 bytes."""
        return value

    @classmethod
    def decode(cls, data: BytesIO) -> bytes:
        """Read 16 bytes. Raises ValueError if fewer are left."""
        value = data.read(16)
        if len(value) != 16:
            raise ValueError("Buffer underrun decoding UUID")
        return value


_TAGS: Final = ("tags", TaggedFields)
_FLAGS: Final = (
    ("allow_auto_topic_creation", Boolean),
    ("include_cluster_authorized_operations", Boolean),
    ("include_topic_authorized_operations", Boolean),
)


def _answer(*, with_ids: bool) -> Schema:
    """Return the format of the response; the version with ids is a flexible one (compact types, tags)."""
    array, string = (CompactArray, CompactString) if with_ids else (Array, String)
    topic_id, tags = ([("topic_id", Uuid)], [_TAGS]) if with_ids else ([], [])
    partitions = array(
        ("error_code", Int16),
        ("partition", Int32),
        ("leader", Int32),
        ("leader_epoch", Int32),
        ("replicas", array(Int32)),
        ("isr", array(Int32)),
        ("offline_replicas", array(Int32)),
        *tags,
    )
    topics = array(
        ("error_code", Int16),
        ("topic", string()),
        *topic_id,
        ("is_internal", Boolean),
        ("partitions", partitions),
        ("authorized_operations", Int32),
        *tags,
    )
    brokers = array(("node_id", Int32), ("host", string()), ("port", Int32), ("rack", string()), *tags)
    return Schema(
        ("throttle_time_ms", Int32),
        ("brokers", brokers),
        ("cluster_id", string()),
        ("controller_id", Int32),
        ("topics", topics),
        ("authorized_operations", Int32),
        *tags,
    )


class MetadataResponse_v8(Response):  # type: ignore[misc]
    API_KEY, API_VERSION, SCHEMA = 3, 8, _answer(with_ids=False)


class MetadataResponse_v10(Response):  # type: ignore[misc]
    API_KEY, API_VERSION, SCHEMA = 3, 10, _answer(with_ids=True)


class MetadataRequest_v8(RequestStruct):  # type: ignore[misc]
    API_KEY, API_VERSION, RESPONSE_TYPE = 3, 8, MetadataResponse_v8
    SCHEMA = Schema(("topics", Array(String())), *_FLAGS)


class MetadataRequest_v10(RequestStruct):  # type: ignore[misc]
    API_KEY, API_VERSION, RESPONSE_TYPE, FLEXIBLE_VERSION = 3, 10, MetadataResponse_v10, True
    SCHEMA = Schema(("topics", CompactArray(("topic_id", Uuid), ("name", CompactString()), _TAGS)), *_FLAGS, _TAGS)


@with_versions(MetadataRequest_v8, MetadataRequest_v10)
class DescribeTopicsRequest(MetadataRequest):  # type: ignore[misc]
    """Request topics by name, in the highest version that the broker supports. Creates none."""

    def __init__(self, topics: Sequence[str], operations: bool = False) -> None:
        # Without the flag a broker with auto.create.topics.enable would create missing topics.
        super().__init__(list(topics), allow_auto_topic_creation=False)
        self._names = list(topics)
        self._operations = operations

    def build(self, request_struct_class: type[Any]) -> Any:
        """Return the request in one version. Raises IncompatibleBrokerVersion."""
        if request_struct_class is MetadataRequest_v10:
            names: list[Any] = [(NO_ID, name, {}) for name in self._names]
            return MetadataRequest_v10(names, False, False, self._operations, {})
        if request_struct_class is MetadataRequest_v8:
            return MetadataRequest_v8(self._names, False, False, self._operations)
        if self._operations:
            raise IncompatibleBrokerVersion(
                "the broker is older than Kafka 2.3 and does not report permitted operations"
            )
        return super().build(request_struct_class)


OPERATIONS: Final[Mapping[int, str]] = {
    3: "Read", 4: "Write", 5: "Create", 6: "Delete", 7: "Alter", 8: "Describe", 9: "ClusterAction",
    10: "DescribeConfigs", 11: "AlterConfigs", 12: "IdempotentWrite",
}  # fmt: skip
"""Names of the bits that stand for operations (KIP-430)."""

NOT_TOLD: Final = -(2**31)  # the value from a broker that does not report operations
LIMIT_SECONDS: Final = 5.0  # how long reading a topic's limit may take; a transaction waits for it


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic as a broker describes it."""

    name: str
    error: type[KafkaError] | None  # why the description is missing or incomplete
    partitions: int  # number of partitions
    replicas: int  # fewest of any partition
    leaderless: int  # number of partitions without a leader
    topic_id: str | None = None  # as Kafka's tools print it (22 characters); None if the broker has no topic ids
    operations: frozenset[str] | None = None  # this login's permissions; None: not requested, or not reported


async def describe_topics(
    admin: AIOKafkaAdminClient, names: Sequence[str], *, operations: bool = False
) -> dict[str, TopicDescription]:
    """Return the topics by name, including missing and denied ones. Creates none.

    Raises KafkaError, and IncompatibleBrokerVersion if `operations` are requested from a broker before Kafka 2.3.
    """
    response = await send_request(admin, DescribeTopicsRequest(names, operations))
    return {topic["topic"]: _topic(topic) for topic in response.to_object()["topics"]}


def _topic(answer: Mapping[str, Any]) -> TopicDescription:
    parts = answer["partitions"]
    identity = answer.get("topic_id", NO_ID)
    error = for_code(answer["error_code"])
    return TopicDescription(
        name=answer["topic"],
        error=None if error is NoError else error,
        partitions=len(parts),
        replicas=min((len(part["replicas"]) for part in parts), default=0),
        leaderless=sum(part["leader"] < 0 for part in parts),
        topic_id=None if identity == NO_ID else base64.urlsafe_b64encode(identity).decode().rstrip("="),
        operations=_names(answer.get("authorized_operations", NOT_TOLD)),
    )


async def topic_id(admin: AIOKafkaAdminClient, name: str) -> str | None:
    """Return a topic's id; None before Kafka 2.8. Raises KafkaError, also if the topic is missing."""
    topic = (await describe_topics(admin, [name]))[name]
    if topic.topic_id is None and topic.error is not None:
        raise topic.error(f"topic {name}")
    return topic.topic_id


async def topic_configs(
    admin: AIOKafkaAdminClient, names: Sequence[str]
) -> tuple[dict[str, Mapping[str, str]], dict[str, tuple[type[KafkaError], str]]]:
    """Return settings by topic, and by topic whose settings cannot be read, the error and the broker's message.

    Raises KafkaError.
    """
    configs: dict[str, Mapping[str, str]] = {}
    unreadable: dict[str, tuple[type[KafkaError], str]] = {}
    if not names:
        return configs, unreadable
    for response in await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name) for name in names]):
        for code, message, _, name, entries in response.resources:
            if code:
                unreadable[name] = for_code(code), message or for_code(code).__name__
            else:
                configs[name] = {entry[0]: entry[1] for entry in entries}
    return configs, unreadable


async def broker_configs(admin: AIOKafkaAdminClient) -> Mapping[str, str]:
    """Return one broker's settings; none if this login may not read them. Raises KafkaError."""
    broker = (await admin.describe_cluster())["brokers"][0]["node_id"]
    for response in await admin.describe_configs([ConfigResource(ConfigResourceType.BROKER, str(broker))]):
        for _, _, _, _, entries in response.resources:
            return {entry[0]: entry[1] for entry in entries}
    return {}


async def current_limit(client: Mapping[str, Any], name: str) -> int | None:
    """Return a topic's current max.message.bytes; None if the broker does not report it."""
    try:
        async with asyncio.timeout(LIMIT_SECONDS), admin_client(client) as admin:
            configs, _ = await topic_configs(admin, [name])
        return int(configs[name]["max.message.bytes"])
    except (KafkaError, TimeoutError, KeyError):
        return None


class _DescribeGroups(RequestStruct):  # type: ignore[misc]
    # aiokafka's own v3 request parses the response as v2, without operations.
    API_KEY, API_VERSION, RESPONSE_TYPE = 15, 3, DescribeGroupsResponse_v3
    SCHEMA = Schema(("groups", Array(String())), ("include_authorized_operations", Boolean))


class _DescribeGroupsRequest(InOneVersion[_DescribeGroups]):
    API_KEY = 15


async def describe_group(admin: AIOKafkaAdminClient, group: str) -> tuple[dict[str, Any], frozenset[str] | None]:
    """Return a group's description, and this login's permissions on it (None: not reported). Raises KafkaError.

    If no group was ever used, looking up a coordinator makes the broker create __consumer_offsets.
    """
    coordinator = await admin.find_coordinator(group)
    answer = (await send_request(admin, _DescribeGroupsRequest([group], True), coordinator)).to_object()["groups"][0]
    if answer["error_code"]:
        raise for_code(answer["error_code"])(group)
    return answer, _names(answer["authorized_operations"])


def _names(bits: int) -> frozenset[str] | None:
    if bits == NOT_TOLD:
        return None
    return frozenset(name for bit, name in OPERATIONS.items() if bits >> bit & 1)


SENT_ALWAYS: Final[tuple[type[Request[Any]], ...]] = (
    MetadataRequest, ProduceV1, FetchRequest, OffsetRequest, OffsetCommitRequest, OffsetFetchRequest,
    FindCoordinatorRequest, JoinGroupRequest, SyncGroupRequest, HeartbeatRequest, LeaveGroupRequest,
    DescribeConfigsRequest, InitProducerId,
)  # fmt: skip
"""Requests that the worker's clients always send."""

SENT_IN_TRANSACTIONS: Final[tuple[type[Request[Any]], ...]] = (
    AddPartitionsToTxnRequest, AddOffsetsToTxnRequest, EndTxnRequest, TxnOffsetCommitRequest,
)  # fmt: skip
"""Requests that they send only with KP_DELIVERY=exactly_once."""


async def lacking_apis(admin: AIOKafkaAdminClient, *, transactions: bool) -> tuple[list[str], int]:
    """Return the names of requests that have no version in common with the broker, and the number needed."""
    needed = SENT_ALWAYS + (SENT_IN_TRANSACTIONS if transactions else ())
    answer = await send_request(admin, ApiVersionRequest())
    versions = {key: (least, most) for key, least, most in answer.api_versions}
    lacking = [request for request in needed if not has_version(request, *versions.get(request.API_KEY, (0, -1)))]
    return [request.__name__.removesuffix("Request").removesuffix("V1") for request in lacking], len(needed)


class Transactions(NamedTuple):
    """The transaction protocol of a cluster."""

    version: int  # 1 or 2; the worker's producers use it
    may_hang: bool  # whether the brokers have the bug of protocol.may_hang_at_last_epoch


async def transactions_of(admin: AIOKafkaAdminClient) -> Transactions:
    """Return the cluster's transaction protocol, as one of its brokers reports it."""
    try:
        response = await send_request(admin, FeaturesRequest())
    except NotImplementedError:  # before Kafka 2.4
        return Transactions(1, may_hang=False)
    return Transactions(transaction_protocol(response), may_hang_at_last_epoch(response))

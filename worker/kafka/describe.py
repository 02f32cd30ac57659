"""Ask a broker about topics and groups, this login's permissions on them, and the requests that it supports."""

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
from aiokafka.protocol.api import Request, RequestStruct
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
from aiokafka.protocol.types import Array, Boolean, CompactArray, Int16, Int32, Schema, String

from worker.kafka.aiokafka_private import InOneVersion, has_version, send_request
from worker.kafka.connections import admin_client
from worker.kafka.protocol import TEXT, FetchOffsets, Fields, InitProducerId, ProduceV1, fields_array, flexible

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


METADATA: Final = flexible(
    "Metadata", 3, 10,
    Fields(
        ("topics", fields_array(("topic_id", Uuid), ("name", TEXT))),
        ("allow_auto_topic_creation", Boolean),
        ("include_cluster_authorized_operations", Boolean),
        ("include_topic_authorized_operations", Boolean),
    ),
    Fields(
        ("throttle_time_ms", Int32),
        ("brokers", fields_array(("node_id", Int32), ("host", TEXT), ("port", Int32), ("rack", TEXT))),
        ("cluster_id", TEXT),
        ("controller_id", Int32),
        (
            "topics",
            fields_array(
                ("error_code", Int16),
                ("topic", TEXT),
                ("topic_id", Uuid),
                ("is_internal", Boolean),
                (
                    "partitions",
                    fields_array(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline_replicas", CompactArray(Int32)),
                    ),
                ),
                ("authorized_operations", Int32),
            ),
        ),
        ("authorized_operations", Int32),
    ),
)  # fmt: skip


class DescribeTopicsRequest(InOneVersion, version=METADATA):
    """Request topics by name. Creates none."""

    def __init__(self, topics: Sequence[str], operations: bool = False) -> None:
        # Without the first flag a broker with auto.create.topics.enable would create missing topics.
        super().__init__([(NO_ID, name) for name in topics], False, False, operations)


OPERATIONS: Final[Mapping[int, str]] = {
    3: "Read", 4: "Write", 5: "Create", 6: "Delete", 7: "Alter", 8: "Describe", 9: "ClusterAction",
    10: "DescribeConfigs", 11: "AlterConfigs", 12: "IdempotentWrite",
}  # fmt: skip
"""Names of the bits that stand for operations (KIP-430)."""


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic as a broker describes it."""

    name: str
    error: type[KafkaError] | None  # why the description is missing or incomplete
    partitions: int  # number of partitions
    replicas: int  # fewest of any partition
    leaderless: int  # number of partitions without a leader
    topic_id: str | None = None  # as Kafka's tools print it (22 characters); None if the topic is missing or denied
    operations: frozenset[str] | None = None  # this login's permissions; None: not requested, or not reported


async def describe_topics(
    admin: AIOKafkaAdminClient, names: Sequence[str], *, operations: bool = False
) -> dict[str, TopicDescription]:
    """Return the topics by name, including missing and denied ones. Creates none. Raises KafkaError."""
    response = await send_request(admin, DescribeTopicsRequest(names, operations))
    return {topic["topic"]: _topic(topic) for topic in response.to_object()["topics"]}


def _topic(answer: Mapping[str, Any]) -> TopicDescription:
    parts = answer["partitions"]
    identity = answer["topic_id"]
    error = for_code(answer["error_code"])
    return TopicDescription(
        name=answer["topic"],
        error=None if error is NoError else error,
        partitions=len(parts),
        replicas=min((len(part["replicas"]) for part in parts), default=0),
        leaderless=sum(part["leader"] < 0 for part in parts),
        topic_id=None if identity == NO_ID else base64.urlsafe_b64encode(identity).decode().rstrip("="),
        operations=_names(answer["authorized_operations"]),
    )


async def topic_id(admin: AIOKafkaAdminClient, name: str) -> str:
    """Return a topic's id. Raises KafkaError, also if the topic is missing."""
    topic = (await describe_topics(admin, [name]))[name]
    if topic.topic_id is None:
        raise (topic.error or IncompatibleBrokerVersion)(f"topic {name}")
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


async def current_limit(client: Mapping[str, Any], name: str) -> int | None:
    """Return a topic's current max.message.bytes; None if the broker does not report it in 5 s: a transaction waits."""
    try:
        async with asyncio.timeout(5.0), admin_client(client) as admin:
            configs, _ = await topic_configs(admin, [name])
        return int(configs[name]["max.message.bytes"])
    except (KafkaError, TimeoutError, KeyError):
        return None


class _DescribeGroups(RequestStruct):  # type: ignore[misc]
    API_KEY, API_VERSION, RESPONSE_TYPE = 15, 3, DescribeGroupsResponse_v3
    SCHEMA = Schema(("groups", Array(String())), ("include_authorized_operations", Boolean))


class _DescribeGroupsRequest(InOneVersion, version=_DescribeGroups):
    """aiokafka's own reads the response as one without operations."""


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
    if bits == -(2**31):  # the broker does not report operations
        return None
    return frozenset(name for bit, name in OPERATIONS.items() if bits >> bit & 1)


SENT_ALWAYS: Final[tuple[type[Request[Any]], ...]] = (
    MetadataRequest, DescribeTopicsRequest, ProduceV1, FetchRequest, OffsetRequest, OffsetCommitRequest,
    OffsetFetchRequest, FetchOffsets, FindCoordinatorRequest, JoinGroupRequest, SyncGroupRequest, HeartbeatRequest,
    LeaveGroupRequest, DescribeConfigsRequest, InitProducerId,
)  # fmt: skip
"""Requests that the worker's clients always send."""

SENT_IN_TRANSACTIONS: Final[tuple[type[Request[Any]], ...]] = (
    AddPartitionsToTxnRequest, AddOffsetsToTxnRequest, EndTxnRequest, TxnOffsetCommitRequest,
)  # fmt: skip
"""Requests that they send only with KP_DELIVERY=exactly_once."""


class Apis(NamedTuple):
    """What a broker offers of the requests that the worker's clients send."""

    lacking: list[str]  # requests that have no version in common with the broker
    needed: int
    old: bool  # whether the broker is older than Kafka 3.9


async def apis_of(admin: AIOKafkaAdminClient, *, transactions: bool) -> Apis:
    """Return what one of the brokers offers."""
    needed = SENT_ALWAYS + (SENT_IN_TRANSACTIONS if transactions else ())
    answer = await send_request(admin, ApiVersionRequest())
    versions = {key: (least, most) for key, least, most in answer.api_versions}
    lacking = [request for request in needed if not has_version(request, *versions.get(request.API_KEY, (0, -1)))]
    names = [request.__name__.removesuffix("Request").removesuffix("V1") for request in lacking]
    # A broker does not name its release; the newest version of Fetch in Kafka 3.9 is 17.
    return Apis(names, len(needed), versions.get(FetchRequest.API_KEY, (0, -1))[1] < 17)

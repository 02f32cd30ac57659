"""What a broker reports about topics and groups: partitions, settings, ids, and the operations this login may do.

Lives here: all such requests of the worker and its commands. Must not live here: what topics must be (topic_plan.py,
topic_problems.py), which operations the worker needs (doctor_kafka.py).
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError, NoError, for_code
from aiokafka.protocol.admin import DescribeGroupsResponse_v3
from aiokafka.protocol.api import Request, RequestStruct
from aiokafka.protocol.types import Array, Boolean, Schema, String

from worker.kafka.aiokafka_private import send_request
from worker.kafka.connections import admin_client
from worker.kafka.metadata import NO_ID, DescribeTopicsRequest

OPERATIONS: Final[Mapping[int, str]] = {
    3: "Read", 4: "Write", 5: "Create", 6: "Delete", 7: "Alter", 8: "Describe", 9: "ClusterAction",
    10: "DescribeConfigs", 11: "AlterConfigs", 12: "IdempotentWrite",
}  # fmt: skip
"""Names of the bits that stand for operations (KIP-430)."""

NOT_TOLD: Final = -(2**31)
"""The value from a broker that does not report the operations."""

LIMIT_SECONDS: Final = 5.0
"""How long reading one topic's limit may take, during a transaction."""


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic as a broker describes it. `error`: why the description is missing or incomplete; None: it is complete.

    `replicas`: the least of any partition. `leaderless`: partitions without a leader. `topic_id`: as Kafka's tools
    write it (22 characters), None from a broker without topic ids. `operations`: what this login may do, None if that
    was not requested or not reported.
    """

    name: str
    error: type[KafkaError] | None
    partitions: Sequence[int]
    replicas: int
    leaderless: int
    topic_id: str | None
    operations: frozenset[str] | None


async def describe_topics(
    admin: AIOKafkaAdminClient, names: Sequence[str], *, operations: bool = False
) -> dict[str, TopicDescription]:
    """Return the topics by name, also those that are missing or denied. Creates none.

    Raises KafkaError; IncompatibleBrokerVersion for operations from a broker before Kafka 2.3.
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
        partitions=[part["partition"] for part in parts],
        replicas=min((len(part["replicas"]) for part in parts), default=0),
        leaderless=sum(part["leader"] < 0 for part in parts),
        topic_id=None if identity == NO_ID else base64.urlsafe_b64encode(identity).decode().rstrip("="),
        operations=_names(answer.get("authorized_operations", NOT_TOLD)),
    )


async def topic_id(admin: AIOKafkaAdminClient, name: str) -> str | None:
    """Return a topic's id, which is another one after the topic was deleted and created again.

    None from a broker without topic ids (before Kafka 2.8). Raises KafkaError, for example if the topic is missing.
    """
    topic = (await describe_topics(admin, [name]))[name]
    if topic.topic_id is None and topic.error is not None:
        raise topic.error(f"topic {name}")
    return topic.topic_id


async def topic_configs(
    admin: AIOKafkaAdminClient, names: Sequence[str]
) -> tuple[dict[str, Mapping[str, str]], dict[str, tuple[type[KafkaError], str]]]:
    """Return the settings by topic, and for topics without them the error and the broker's message.

    Raises KafkaError if the whole request fails.
    """
    configs: dict[str, Mapping[str, str]] = {}
    refused: dict[str, tuple[type[KafkaError], str]] = {}
    if not names:
        return configs, refused
    for response in await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name) for name in names]):
        for code, message, _, name, entries in response.resources:
            if code:
                refused[name] = for_code(code), message or for_code(code).__name__
            else:
                configs[name] = {entry[0]: entry[1] for entry in entries}
    return configs, refused


async def broker_configs(admin: AIOKafkaAdminClient) -> Mapping[str, str]:
    """Return the settings of one broker; none if this login may not read them. Raises KafkaError."""
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


class _DescribeGroups(RequestStruct):  # type: ignore[misc]  # aiokafka is untyped
    API_KEY = 15
    API_VERSION = 3
    RESPONSE_TYPE = DescribeGroupsResponse_v3  # aiokafka's own v3 request reads the answer as v2, without operations
    SCHEMA = Schema(("groups", Array(String())), ("include_authorized_operations", Boolean))


class _DescribeGroupsRequest(Request[_DescribeGroups]):  # type: ignore[misc]
    API_KEY = 15

    def __init__(self, group: str) -> None:
        self._group = group

    def build(self, request_struct_class: type[_DescribeGroups]) -> _DescribeGroups:
        return request_struct_class([self._group], True)


async def describe_group(admin: AIOKafkaAdminClient, group: str) -> tuple[dict[str, Any], frozenset[str] | None]:
    """Return the group as its coordinator describes it, and its operations (None: not reported). Raises KafkaError.

    If no group was ever used, looking up a coordinator makes the broker create __consumer_offsets.
    """
    coordinator = await admin.find_coordinator(group)
    answer = (await send_request(admin, _DescribeGroupsRequest(group), coordinator)).to_object()["groups"][0]
    if answer["error_code"]:
        raise for_code(answer["error_code"])(group)
    return answer, _names(answer["authorized_operations"])


def _names(bits: int) -> frozenset[str] | None:
    if bits == NOT_TOLD:
        return None
    return frozenset(name for bit, name in OPERATIONS.items() if bits >> bit & 1)

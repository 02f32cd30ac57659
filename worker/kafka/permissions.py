"""What this login may do, in the broker's own words: the operations that it lists beside topics and groups (KIP-430).

Lives here: the two requests, which aiokafka does not have in a version that tells, and their bits. Must not live here:
which operations the worker needs (doctor_kafka.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import for_code
from aiokafka.protocol.admin import DescribeGroupsResponse_v3
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Array, Boolean, Int16, Int32, Schema, String

OPERATIONS: Final[Mapping[int, str]] = {
    3: "Read", 4: "Write", 5: "Create", 6: "Delete", 7: "Alter", 8: "Describe", 9: "ClusterAction",
    10: "DescribeConfigs", 11: "AlterConfigs", 12: "IdempotentWrite",
}  # fmt: skip
"""Names of the bits."""

NOT_TOLD: Final = -(2**31)
"""What a broker sends that does not tell."""


class _MetadataResponse(Response):  # type: ignore[misc]
    API_KEY = 3
    API_VERSION = 8
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("brokers", Array(("node_id", Int32), ("host", String()), ("port", Int32), ("rack", String()))),
        ("cluster_id", String()),
        ("controller_id", Int32),
        (
            "topics",
            Array(
                ("error_code", Int16),
                ("topic", String()),
                ("is_internal", Boolean),
                (
                    "partitions",
                    Array(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", Array(Int32)),
                        ("isr", Array(Int32)),
                        ("offline_replicas", Array(Int32)),
                    ),
                ),
                ("authorized_operations", Int32),
            ),
        ),
        ("authorized_operations", Int32),
    )


class _Metadata(RequestStruct):  # type: ignore[misc]
    API_KEY = 3
    API_VERSION = 8
    RESPONSE_TYPE = _MetadataResponse
    SCHEMA = Schema(
        ("topics", Array(String())),
        ("allow_auto_topic_creation", Boolean),
        ("include_cluster_authorized_operations", Boolean),
        ("include_topic_authorized_operations", Boolean),
    )


class _MetadataRequest(Request[_Metadata]):  # type: ignore[misc]
    API_KEY = 3

    def __init__(self, topics: Sequence[str]) -> None:
        self._topics = list(topics)

    def build(self, request_struct_class: type[_Metadata]) -> _Metadata:
        return request_struct_class(self._topics, False, False, True)


class _DescribeGroups(RequestStruct):  # type: ignore[misc]
    API_KEY = 15
    API_VERSION = 3
    RESPONSE_TYPE = DescribeGroupsResponse_v3  # aiokafka's own v3 request reads the answer as v2, without the bits
    SCHEMA = Schema(("groups", Array(String())), ("include_authorized_operations", Boolean))


class _DescribeGroupsRequest(Request[_DescribeGroups]):  # type: ignore[misc]
    API_KEY = 15

    def __init__(self, group: str) -> None:
        self._group = group

    def build(self, request_struct_class: type[_DescribeGroups]) -> _DescribeGroups:
        return request_struct_class([self._group], True)


async def topic_operations(
    admin: AIOKafkaAdminClient, topics: Sequence[str]
) -> tuple[dict[str, frozenset[str] | None], dict[str, int]]:
    """Return the allowed operations of each topic that can be seen (None: not told), and the error codes of the others.

    Changes nothing. Raises KafkaError; NotImplementedError for a broker before 2.3.
    """
    answer = (await admin._send_request(_MetadataRequest(topics))).to_object()["topics"]
    found = {topic["topic"]: _names(topic["authorized_operations"]) for topic in answer if not topic["error_code"]}
    return found, {topic["topic"]: topic["error_code"] for topic in answer if topic["error_code"]}


async def describe_group(admin: AIOKafkaAdminClient, group: str) -> tuple[dict[str, Any], frozenset[str] | None]:
    """Return the group as its coordinator describes it, and its allowed operations (None: not told). Raises KafkaError.

    Asking for a coordinator makes a broker create __consumer_offsets where no group was ever used.
    """
    coordinator = await admin.find_coordinator(group)
    answer = (await admin._send_request(_DescribeGroupsRequest(group), coordinator)).to_object()["groups"][0]
    if answer["error_code"]:
        raise for_code(answer["error_code"])(group)
    return answer, _names(answer["authorized_operations"])


def _names(bits: int) -> frozenset[str] | None:
    if bits == NOT_TOLD:
        return None
    return frozenset(name for bit, name in OPERATIONS.items() if bits >> bit & 1)

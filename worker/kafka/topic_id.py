"""Kafka's id of a topic, by which a topic that was deleted and made anew under its name is told from the first one.

Lives here: one request that aiokafka does not know (its Metadata ends at version 5, ids came with 10), and its answer.
Must not live here: what follows from an id (passes.py, store.py).
"""

from __future__ import annotations

import base64
from io import BytesIO
from typing import Any, Final

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import for_code
from aiokafka.protocol.abstract import AbstractType
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import (
    Boolean,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Schema,
    TaggedFields,
)

NO_ID: Final = bytes(16)


class Uuid(AbstractType[bytes]):  # type: ignore[misc]  # aiokafka is untyped
    """16 bytes as they are."""

    @classmethod
    def encode(cls, value: bytes) -> bytes:
        """Write the 16 bytes."""
        return value

    @classmethod
    def decode(cls, data: BytesIO) -> bytes:
        """Read 16 bytes. Raises ValueError where fewer are left."""
        value = data.read(16)
        if len(value) != 16:
            raise ValueError("Buffer underrun decoding UUID")
        return value


_TAGS: Final = ("tags", TaggedFields)


class MetadataResponse_v10(Response):  # type: ignore[misc]  # noqa: N801  # named as aiokafka's are
    """Brokers, and the topics that were asked for."""

    API_KEY = 3
    API_VERSION = 10
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            CompactArray(
                ("node_id", Int32), ("host", CompactString()), ("port", Int32), ("rack", CompactString()), _TAGS
            ),
        ),
        ("cluster_id", CompactString()),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("name", CompactString()),
                ("topic_id", Uuid),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition_index", Int32),
                        ("leader_id", Int32),
                        ("leader_epoch", Int32),
                        ("replica_nodes", CompactArray(Int32)),
                        ("isr_nodes", CompactArray(Int32)),
                        ("offline_replicas", CompactArray(Int32)),
                        _TAGS,
                    ),
                ),
                ("topic_authorized_operations", Int32),
                _TAGS,
            ),
        ),
        ("cluster_authorized_operations", Int32),
        _TAGS,
    )


class MetadataRequest_v10(RequestStruct):  # type: ignore[misc]  # noqa: N801
    """Ask for topics by name; none is created by being asked for."""

    FLEXIBLE_VERSION = True
    API_KEY = 3
    API_VERSION = 10
    RESPONSE_TYPE = MetadataResponse_v10
    SCHEMA = Schema(
        ("topics", CompactArray(("topic_id", Uuid), ("name", CompactString()), _TAGS)),
        ("allow_auto_topic_creation", Boolean),
        ("include_cluster_authorized_operations", Boolean),
        ("include_topic_authorized_operations", Boolean),
        _TAGS,
    )


class TopicIdRequest(Request[MetadataRequest_v10]):  # type: ignore[misc]
    """The request for one topic's id, in the one version that we speak."""

    API_KEY = 3

    def __init__(self, topic: str) -> None:
        self._topic = topic

    def build(self, request_struct_class: type[MetadataRequest_v10]) -> Any:
        """Return the request as it goes over the wire."""
        return request_struct_class([(NO_ID, self._topic, {})], False, False, False, {})


async def topic_id(admin: AIOKafkaAdminClient, topic: str) -> str | None:
    """Return a topic's id as Kafka's tools write it (22 characters); None from a broker that knows no ids.

    Raises KafkaError, for example where the topic is not there.
    """
    try:
        response = await admin._send_request(TopicIdRequest(topic))
    except NotImplementedError:  # aiokafka's word for a broker without that version: Kafka before 2.8
        return None
    found = response.to_object()["topics"][0]
    if found["topic_id"] != NO_ID:
        return base64.urlsafe_b64encode(found["topic_id"]).decode().rstrip("=")
    if found["error_code"]:
        raise for_code(found["error_code"])(f"topic {topic}")
    return None

"""The Metadata request in two versions that aiokafka lacks: 8 reports permitted operations, 10 also topic ids.

Lives here: the format of both requests and responses. Must not live here: what a response means (describe.py).

aiokafka ends at version 5, which is used for brokers before Kafka 2.3; brokers before 2.8 get version 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any, Final

from aiokafka.errors import IncompatibleBrokerVersion
from aiokafka.protocol.abstract import AbstractType
from aiokafka.protocol.api import RequestStruct, Response
from aiokafka.protocol.metadata import MetadataRequest
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

from worker.kafka.aiokafka_private import with_versions

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
_FLAGS: Final = (
    ("allow_auto_topic_creation", Boolean),
    ("include_cluster_authorized_operations", Boolean),
    ("include_topic_authorized_operations", Boolean),
)


def _answer(*, with_ids: bool) -> Schema:
    """Return the format of the answer; the version with ids is a flexible one (compact types, tags)."""
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


class MetadataResponse_v8(Response):  # type: ignore[misc]  # noqa: N801  # named as aiokafka's are
    """Brokers, and the requested topics, with the operations that the login may do."""

    API_KEY = 3
    API_VERSION = 8
    SCHEMA = _answer(with_ids=False)


class MetadataResponse_v10(Response):  # type: ignore[misc]  # noqa: N801
    """The same, with the topics' ids."""

    API_KEY = 3
    API_VERSION = 10
    SCHEMA = _answer(with_ids=True)


class MetadataRequest_v8(RequestStruct):  # type: ignore[misc]  # noqa: N801
    """Ask for topics by name."""

    API_KEY = 3
    API_VERSION = 8
    RESPONSE_TYPE = MetadataResponse_v8
    SCHEMA = Schema(("topics", Array(String())), *_FLAGS)


class MetadataRequest_v10(RequestStruct):  # type: ignore[misc]  # noqa: N801
    """Ask for topics by name (they could be named by id, too)."""

    FLEXIBLE_VERSION = True
    API_KEY = 3
    API_VERSION = 10
    RESPONSE_TYPE = MetadataResponse_v10
    SCHEMA = Schema(("topics", CompactArray(("topic_id", Uuid), ("name", CompactString()), _TAGS)), *_FLAGS, _TAGS)


@with_versions(MetadataRequest_v8, MetadataRequest_v10)
class DescribeTopicsRequest(MetadataRequest):  # type: ignore[misc]
    """Request topics by name, in the highest version that the broker knows; creates none.

    `operations`: also what the login may do with them, from version 8 on.
    """

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

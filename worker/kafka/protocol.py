"""A producer's requests, in the versions that aiokafka has and in those that it lacks.

aiokafka sends transactional requests in version 0, and Produce up to 7. A producer needs InitProducerId v4 (KIP-360),
Produce v8 (which records are refused, KIP-467), and for transactions V2 (KIP-890) Produce v12, TxnOffsetCommit v5 and
EndTxn v5. The fields are those of Kafka's clients/src/main/resources/common/message.
"""

from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from typing import Any, Final, NamedTuple, TypeVar, cast

from aiokafka.errors import IncompatibleBrokerVersion, KafkaError, for_code
from aiokafka.protocol.api import Request, RequestStruct, Response, ResponseHeader_v0
from aiokafka.protocol.produce import ProduceRequest_v8
from aiokafka.protocol.transaction import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    TxnOffsetCommitRequest,
)
from aiokafka.protocol.types import (
    Boolean,
    CompactArray,
    CompactBytes,
    CompactString,
    Int16,
    Int32,
    Int64,
    Schema,
    TaggedFields,
    UnsignedVarInt32,
)
from aiokafka.structs import OffsetAndMetadata, TopicPartition

UNSTABLE_OFFSET_COMMIT: Final = 88


class UnstableOffsetError(KafkaError):  # type: ignore[misc]  # aiokafka is untyped
    """A transaction that has not ended has sent an offset that was asked for."""

    retriable = True


Offsets = Mapping[TopicPartition, OffsetAndMetadata]
Value = TypeVar("Value")

TEXT: Final = CompactString("utf-8")
METADATA_4_3: Final = 30
"""The newest metadata.version that Kafka 4.3.0 supports; 4.0.2 supports 25, 4.1.2 27, and 4.2.1 29."""


class ProducerEpoch(NamedTuple):
    """What a broker knows a producer by; each new epoch fences the earlier ones."""

    producer_id: int
    epoch: int


NO_PRODUCER: Final = ProducerEpoch(-1, -1)  # of a producer that has no id yet


def by_topic(values: Iterable[tuple[TopicPartition, Value]]) -> dict[str, list[tuple[int, Value]]]:
    """Return the values by topic, each with the number of its partition, as requests list them."""
    topics: dict[str, list[tuple[int, Value]]] = {}
    for (topic, partition), value in values:
        topics.setdefault(topic, []).append((partition, value))
    return topics


# -- formats of the versions that aiokafka lacks, named as aiokafka's are


class Fields(Schema):  # type: ignore[misc]  # aiokafka is untyped
    """A structure of a flexible version: tagged fields end it. None are sent, and those received are skipped."""

    def encode(self, item: Sequence[Any]) -> bytes:
        """Write the fields and an empty list of tags."""
        return bytes(super().encode(item)) + b"\0"

    def decode(self, data: BytesIO) -> tuple[Any, ...]:
        """Read the fields, skip the tags."""
        values = tuple(super().decode(data))
        TaggedFields.decode(data)
        return values


def fields_array(*fields: tuple[str, Any]) -> CompactArray:
    """Return the format of an array of structures."""
    return CompactArray(Fields(*fields))


def by_topic_fields(*fields: tuple[str, Any]) -> CompactArray:
    """Return the format of an array of topics, each with an array of partitions that have these fields."""
    return fields_array(("topic", TEXT), ("partitions", fields_array(("partition", Int32), *fields)))


_EPOCH: Final = (("producer_id", Int64), ("producer_epoch", Int16))


class ApiVersionsResponse_v3(Response):  # type: ignore[misc]
    API_KEY, API_VERSION = 18, 3
    SCHEMA = Schema(
        ("error_code", Int16),
        ("api_versions", fields_array(("api_key", Int16), ("least", Int16), ("most", Int16))),
        ("throttle_time_ms", Int32),
        ("tags", TaggedFields),
    )


class ApiVersionsRequest_v3(RequestStruct):  # type: ignore[misc]
    API_KEY, API_VERSION, RESPONSE_TYPE, FLEXIBLE_VERSION = 18, 3, ApiVersionsResponse_v3, True
    SCHEMA = Fields(("client", TEXT), ("client_version", TEXT))

    def parse_response_header(self, read_buffer: BytesIO | bytes) -> Any:
        """Read the header without tags: this response is the exception in Kafka's protocol."""
        return ResponseHeader_v0.decode(read_buffer)


class InitProducerIdResponse_v4(Response):  # type: ignore[misc]
    API_KEY, API_VERSION = 22, 4
    SCHEMA = Fields(("throttle_time_ms", Int32), ("error_code", Int16), *_EPOCH)


class InitProducerIdRequest_v4(RequestStruct):  # type: ignore[misc]
    API_KEY, API_VERSION, RESPONSE_TYPE, FLEXIBLE_VERSION = 22, 4, InitProducerIdResponse_v4, True
    SCHEMA = Fields(("transactional_id", TEXT), ("transaction_timeout_ms", Int32), *_EPOCH)


class ProduceResponse_v12(Response):  # type: ignore[misc]
    API_KEY, API_VERSION = 0, 12
    SCHEMA = Fields(
        (
            "topics",
            by_topic_fields(
                ("error_code", Int16),
                ("offset", Int64),
                ("timestamp", Int64),
                ("log_start_offset", Int64),
                ("record_errors", fields_array(("batch_index", Int32), ("message", TEXT))),
                ("error_message", TEXT),
            ),
        ),
        ("throttle_time_ms", Int32),
    )


class ProduceRequest_v12(RequestStruct):  # type: ignore[misc]
    API_KEY, API_VERSION, RESPONSE_TYPE, FLEXIBLE_VERSION = 0, 12, ProduceResponse_v12, True
    SCHEMA = Fields(
        ("transactional_id", TEXT),
        ("required_acks", Int16),
        ("timeout", Int32),
        ("topics", by_topic_fields(("messages", CompactBytes))),
    )


class TxnOffsetCommitResponse_v5(Response):  # type: ignore[misc]
    API_KEY, API_VERSION = 28, 5
    SCHEMA = Fields(("throttle_time_ms", Int32), ("errors", by_topic_fields(("error_code", Int16))))


class TxnOffsetCommitRequest_v5(RequestStruct):  # type: ignore[misc]
    API_KEY, API_VERSION, RESPONSE_TYPE, FLEXIBLE_VERSION = 28, 5, TxnOffsetCommitResponse_v5, True
    SCHEMA = Fields(
        ("transactional_id", TEXT),
        ("group", TEXT),
        *_EPOCH,
        ("generation", Int32),
        ("member", TEXT),
        ("instance", TEXT),
        ("topics", by_topic_fields(("offset", Int64), ("leader_epoch", Int32), ("metadata", TEXT))),
    )


class OffsetFetchResponse_v7(Response):  # type: ignore[misc]
    API_KEY, API_VERSION = 9, 7
    SCHEMA = Fields(
        ("throttle_time_ms", Int32),
        (
            "topics",
            by_topic_fields(("offset", Int64), ("leader_epoch", Int32), ("metadata", TEXT), ("error_code", Int16)),
        ),
        ("error_code", Int16),
    )


class OffsetFetchRequest_v7(RequestStruct):  # type: ignore[misc]
    API_KEY, API_VERSION, RESPONSE_TYPE, FLEXIBLE_VERSION = 9, 7, OffsetFetchResponse_v7, True
    SCHEMA = Fields(
        ("group", TEXT),
        ("topics", fields_array(("topic", TEXT), ("partitions", CompactArray(Int32)))),
        ("require_stable", Boolean),
    )


class EndTxnResponse_v5(Response):  # type: ignore[misc]
    API_KEY, API_VERSION = 26, 5
    SCHEMA = Fields(("throttle_time_ms", Int32), ("error_code", Int16), *_EPOCH)


class EndTxnRequest_v5(RequestStruct):  # type: ignore[misc]
    API_KEY, API_VERSION, RESPONSE_TYPE, FLEXIBLE_VERSION = 26, 5, EndTxnResponse_v5, True
    SCHEMA = Fields(("transactional_id", TEXT), *_EPOCH, ("commit", Boolean))


# -- requests


Version = TypeVar("Version", bound=RequestStruct)


class InOneVersion(Request[Version]):  # type: ignore[misc]
    """A request that exists here in one version only."""

    API_KEY = -1

    def __init__(self, *values: Any) -> None:
        self.values = values

    def build(self, request_struct_class: type[Version]) -> Version:
        """Return the request."""
        return cast("Version", request_struct_class(*self.values))

    def prepare(self, versions: dict[int, tuple[int, int]]) -> Version:
        """Return the request for a broker with these versions. Raises IncompatibleBrokerVersion."""
        try:
            return cast("Version", super().prepare(versions))
        except NotImplementedError as error:
            raise IncompatibleBrokerVersion(
                f"the broker does not understand {type(self).__name__}: kp-worker needs Kafka 3.9 or later"
            ) from error


class FeaturesRequest(InOneVersion[ApiVersionsRequest_v3]):
    """Ask for the cluster's finalised features."""

    API_KEY = 18

    def __init__(self) -> None:
        super().__init__("kp-worker", "0")


def transaction_protocol(response: ApiVersionsResponse_v3) -> int:
    """Return 2 if the response to FeaturesRequest says that transaction.version 2 is finalised, otherwise 1."""
    return 2 if finalised_features(response).get("transaction.version", 0) >= 2 else 1


def has_late_offsets(response: ApiVersionsResponse_v3) -> bool:
    """Return whether a late TxnOffsetCommit can take away another transaction's offset: Kafka before 4.0.

    Its coordinator puts the late offset in the place of the pending one before it looks at the epoch, and drops both
    when the log refuses it (GroupMetadata.failPendingTxnOffsetCommit). Kafka 4.0 is the first with TxnOffsetCommit v5.
    """
    return not any(key == CommitOffsetsV2.API_KEY and most >= 5 for key, _, most in response.api_versions)


def may_hang_at_last_epoch(response: ApiVersionsResponse_v3) -> bool:
    """Return whether transactions V2 of this broker can hang at a producer's last epoch: Kafka 4.0 to 4.2.

    A transaction that times out in epoch 32,766 stays open (KAFKA-20090, fixed in 4.3.0); in 4.0.0 the next start of
    its producer fails, too (KAFKA-19367). One whose coordinator moves meanwhile loses the producer id that follows
    (KAFKA-20310, fixed in 4.3.0). A broker does not tell its release, but its newest metadata.version.
    """
    _, newest = _features(response, tag=0).get("metadata.version", (0, METADATA_4_3))
    return transaction_protocol(response) == 2 and newest < METADATA_4_3


def finalised_features(response: ApiVersionsResponse_v3) -> dict[str, int]:
    """Return the level of each feature in the response to FeaturesRequest."""
    return {name: first for name, (first, _) in _features(response, tag=2).items()}


def _features(response: ApiVersionsResponse_v3, tag: int) -> dict[str, tuple[int, int]]:
    """Return the two levels of each supported (tag 0) or finalised feature (2); the highest of these comes first."""
    data = BytesIO(response.tags.get(tag, b"\1"))
    features = {}
    for _ in range(UnsignedVarInt32.decode(data) - 1):
        name, first, last = TEXT.decode(data), Int16.decode(data), Int16.decode(data)
        TaggedFields.decode(data)
        features[name] = (first, last)
    return features


class InitProducerId(InOneVersion[InitProducerIdRequest_v4]):
    """Ask for a producer id, which fences whoever has the transactional id; or with one, for its next epoch.

    With one, the broker answers PRODUCER_FENCED if another producer has initialised the transactional id since, and has
    no open transaction. One with an open transaction is fenced in its turn.
    """

    API_KEY = 22

    def __init__(self, transactional_id: str | None, timeout_ms: int, producer: ProducerEpoch = NO_PRODUCER) -> None:
        super().__init__(transactional_id, timeout_ms, *producer)


class _Produce(InOneVersion[Version]):
    """Append batches; all replicas in sync must acknowledge them."""

    API_KEY = 0

    def __init__(self, transactional_id: str | None, timeout_ms: int, batches: Mapping[TopicPartition, bytes]) -> None:
        super().__init__(transactional_id, -1, timeout_ms, list(by_topic(batches.items()).items()))


class ProduceV1(_Produce[ProduceRequest_v8]):
    """Append batches; in a transaction, to partitions that are part of it."""


class ProduceV2(_Produce[ProduceRequest_v12]):
    """Append batches; their partitions become part of the transaction."""


def add_partitions(transactional_id: str, producer: ProducerEpoch, partitions: Iterable[TopicPartition]) -> Any:
    """Make partitions part of the transaction (V1)."""
    topics = by_topic((partition, None) for partition in partitions)
    return AddPartitionsToTxnRequest(
        transactional_id, *producer, [(topic, [number for number, _ in numbers]) for topic, numbers in topics.items()]
    )


def add_offsets(transactional_id: str, producer: ProducerEpoch, group: str) -> Any:
    """Make a group's offsets part of the transaction (V1)."""
    return AddOffsetsToTxnRequest(transactional_id, *producer, group)


def commit_offsets_v1(transactional_id: str, producer: ProducerEpoch, group: str, offsets: Offsets) -> Any:
    """Commit offsets with the transaction, whose part the group's offsets are."""
    topics = [
        (topic, [(number, each.offset, each.metadata) for number, each in numbers])
        for topic, numbers in by_topic(offsets.items()).items()
    ]
    return TxnOffsetCommitRequest(transactional_id, group, *producer, topics)


class CommitOffsetsV2(InOneVersion[TxnOffsetCommitRequest_v5]):
    """Commit offsets with the transaction, whose part they become. No member is named: the id fences."""

    API_KEY = 28

    def __init__(self, transactional_id: str, producer: ProducerEpoch, group: str, offsets: Offsets) -> None:
        topics = [
            (topic, [(number, each.offset, -1, each.metadata) for number, each in numbers])
            for topic, numbers in by_topic(offsets.items()).items()
        ]
        super().__init__(transactional_id, group, *producer, -1, "", None, topics)


class FetchOffsets(InOneVersion[OffsetFetchRequest_v7]):
    """Ask for a group's committed offsets.

    `stable`: the broker answers UNSTABLE_OFFSET_COMMIT for an offset that a transaction which has not ended has sent.
    """

    API_KEY = 9

    def __init__(self, group: str, partitions: Iterable[TopicPartition], *, stable: bool) -> None:
        topics = by_topic((partition, None) for partition in partitions)
        numbers = [(topic, [number for number, _ in each]) for topic, each in topics.items()]
        super().__init__(group, numbers, stable)


def fetched_offsets(response: Any) -> dict[TopicPartition, OffsetAndMetadata]:
    """Return the offsets in the response to FetchOffsets; partitions without one are left out. Raises KafkaError."""
    rows = [(topic, row) for topic, rows in response.topics for row in rows]
    if response.error_code:
        raise for_code(response.error_code)
    for topic, (number, *_, code) in rows:
        if code == UNSTABLE_OFFSET_COMMIT:
            raise UnstableOffsetError(
                f"a transaction that has not ended has sent an offset of {topic}/{number}; if it does not end, "
                "kafka-transactions.sh find-hanging --topic __consumer_offsets finds it"
            )
        if code:
            raise for_code(code)
    return {
        TopicPartition(topic, number): OffsetAndMetadata(offset, metadata or "")
        for topic, (number, offset, *_, metadata, _) in rows
        if offset >= 0
    }


def end_v1(transactional_id: str, producer: ProducerEpoch, commit: bool) -> Any:
    """Commit or abort the transaction."""
    return EndTxnRequest(transactional_id, *producer, commit)


class EndV2(InOneVersion[EndTxnRequest_v5]):
    """Commit or abort the transaction, and end its epoch; the response has the next one."""

    API_KEY = 26

    def __init__(self, transactional_id: str, producer: ProducerEpoch, commit: bool) -> None:
        super().__init__(transactional_id, *producer, commit)

"""A producer's requests, in the versions that aiokafka has and in those that it lacks.

aiokafka sends transactional requests in version 0, and Produce up to 7. A producer needs InitProducerId v4 (KIP-360),
Produce v8 (which records are refused, KIP-467), and for transactions V2 (KIP-890) Produce v12, TxnOffsetCommit v5 and
EndTxn v5. The fields are those of Kafka's clients/src/main/resources/common/message.
"""

from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from typing import Any, Final, NamedTuple

from aiokafka.errors import KafkaError, for_code
from aiokafka.protocol.api import RequestStruct, Response, ResponseHeader_v0
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

from worker.kafka.aiokafka_private import InOneVersion

Offsets = Mapping[TopicPartition, OffsetAndMetadata]

METADATA_4_3: Final = 30
"""The newest metadata.version that Kafka 4.3.0 supports; 4.0.2 supports 25, 4.1.2 27, and 4.2.1 29."""


class UnstableOffsetError(KafkaError):  # type: ignore[misc]  # aiokafka is untyped
    """A transaction that has not ended has sent an offset that was asked for."""

    retriable = True


class ProducerEpoch(NamedTuple):
    """What a broker knows a producer by; each new epoch fences the earlier ones."""

    producer_id: int
    epoch: int


NO_PRODUCER: Final = ProducerEpoch(-1, -1)  # of a producer that has no id yet


# -- formats of the versions that aiokafka lacks

TEXT: Final = CompactString("utf-8")


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


def flexible(name: str, key: int, version: int, request: Schema, response: Schema) -> Any:
    """Return a request's format, named as aiokafka's are; its RESPONSE_TYPE is the response's."""
    api = {"API_KEY": key, "API_VERSION": version, "FLEXIBLE_VERSION": True}
    answer = type(f"{name}Response_v{version}", (Response,), {**api, "SCHEMA": response})
    return type(f"{name}Request_v{version}", (RequestStruct,), {**api, "SCHEMA": request, "RESPONSE_TYPE": answer})


def _topics(*fields: tuple[str, Any]) -> CompactArray:
    """Return the format of an array of topics, each with an array of partitions that have these fields."""
    return fields_array(("topic", TEXT), ("partitions", fields_array(("partition", Int32), *fields)))


_ID: Final = ("transactional_id", TEXT)
_EPOCH: Final = (("producer_id", Int64), ("producer_epoch", Int16))
_THROTTLE: Final = ("throttle_time_ms", Int32)
_ERROR: Final = ("error_code", Int16)

API_VERSIONS: Final = flexible(
    "ApiVersions", 18, 3,
    Fields(("client", TEXT), ("client_version", TEXT)),
    Schema(
        _ERROR,
        ("api_versions", fields_array(("api_key", Int16), ("least", Int16), ("most", Int16))),
        _THROTTLE,
        ("tags", TaggedFields),
    ),
)  # fmt: skip
# This response is the exception in Kafka's protocol: its header has no tags.
API_VERSIONS.parse_response_header = lambda _, data: ResponseHeader_v0.decode(data)

INIT_PRODUCER_ID: Final = flexible(
    "InitProducerId", 22, 4,
    Fields(_ID, ("transaction_timeout_ms", Int32), *_EPOCH),
    Fields(_THROTTLE, _ERROR, *_EPOCH),
)  # fmt: skip

PRODUCE: Final = flexible(
    "Produce", 0, 12,
    Fields(_ID, ("required_acks", Int16), ("timeout", Int32), ("topics", _topics(("messages", CompactBytes)))),
    Fields(
        (
            "topics",
            _topics(
                _ERROR,
                ("offset", Int64),
                ("timestamp", Int64),
                ("log_start_offset", Int64),
                ("record_errors", fields_array(("batch_index", Int32), ("message", TEXT))),
                ("error_message", TEXT),
            ),
        ),
        _THROTTLE,
    ),
)  # fmt: skip

TXN_OFFSET_COMMIT: Final = flexible(
    "TxnOffsetCommit", 28, 5,
    Fields(
        _ID,
        ("group", TEXT),
        *_EPOCH,
        ("generation", Int32),
        ("member", TEXT),
        ("instance", TEXT),
        ("topics", _topics(("offset", Int64), ("leader_epoch", Int32), ("metadata", TEXT))),
    ),
    Fields(_THROTTLE, ("errors", _topics(_ERROR))),
)  # fmt: skip

OFFSET_FETCH: Final = flexible(
    "OffsetFetch", 9, 7,
    Fields(
        ("group", TEXT),
        ("topics", fields_array(("topic", TEXT), ("partitions", CompactArray(Int32)))),
        ("require_stable", Boolean),
    ),
    Fields(
        _THROTTLE,
        ("topics", _topics(("offset", Int64), ("leader_epoch", Int32), ("metadata", TEXT), _ERROR)),
        _ERROR,
    ),
)  # fmt: skip

END_TXN: Final = flexible(
    "EndTxn", 26, 5, Fields(_ID, *_EPOCH, ("commit", Boolean)), Fields(_THROTTLE, _ERROR, *_EPOCH)
)


# -- requests


def _by_topic(rows: Iterable[tuple[TopicPartition, Any]]) -> list[tuple[str, list[Any]]]:
    """Return the rows of partitions by topic, as requests list them."""
    topics: dict[str, list[Any]] = {}
    for tp, row in rows:
        topics.setdefault(tp.topic, []).append(row)
    return list(topics.items())


class FeaturesRequest(InOneVersion, version=API_VERSIONS):
    """Ask for the cluster's finalised features."""

    def __init__(self) -> None:
        super().__init__("kp-worker", "0")


def transaction_protocol(response: Any) -> int:
    """Return 2 if the response to FeaturesRequest says that transaction.version 2 is finalised, otherwise 1."""
    return 2 if finalised_features(response).get("transaction.version", 0) >= 2 else 1


def has_late_offsets(response: Any) -> bool:
    """Return whether a late TxnOffsetCommit can take away another transaction's offset: Kafka before 4.0.

    Its coordinator puts the late offset in the place of the pending one before it looks at the epoch, and drops both
    when the log refuses it (GroupMetadata.failPendingTxnOffsetCommit). Kafka 4.0 is the first with TxnOffsetCommit v5.
    """
    return not any(key == TXN_OFFSET_COMMIT.API_KEY and most >= 5 for key, _, most in response.api_versions)


def may_hang_at_last_epoch(response: Any) -> bool:
    """Return whether transactions V2 of this broker can hang at a producer's last epoch: Kafka 4.0 to 4.2.

    A transaction that times out in epoch 32,766 stays open (KAFKA-20090, fixed in 4.3.0); in 4.0.0 the next start of
    its producer fails, too (KAFKA-19367). One whose coordinator moves meanwhile loses the producer id that follows
    (KAFKA-20310, fixed in 4.3.0). A broker does not tell its release, but its newest metadata.version.
    """
    _, newest = _features(response, tag=0).get("metadata.version", (0, METADATA_4_3))
    return transaction_protocol(response) == 2 and newest < METADATA_4_3


def finalised_features(response: Any) -> dict[str, int]:
    """Return the level of each feature in the response to FeaturesRequest."""
    return {name: first for name, (first, _) in _features(response, tag=2).items()}


def _features(response: Any, tag: int) -> dict[str, tuple[int, int]]:
    """Return the two levels of each supported (tag 0) or finalised feature (2); the highest of these comes first."""
    data = BytesIO(response.tags.get(tag, b"\1"))
    features = {}
    for _ in range(UnsignedVarInt32.decode(data) - 1):
        name, first, last = TEXT.decode(data), Int16.decode(data), Int16.decode(data)
        TaggedFields.decode(data)
        features[name] = (first, last)
    return features


class InitProducerId(InOneVersion, version=INIT_PRODUCER_ID):
    """Ask for a producer id, which fences whoever has the transactional id; or with one, for its next epoch.

    With one, the broker answers PRODUCER_FENCED if another producer has initialised the transactional id since, and has
    no open transaction. One with an open transaction is fenced in its turn.
    """

    def __init__(self, transactional_id: str | None, timeout_ms: int, producer: ProducerEpoch = NO_PRODUCER) -> None:
        super().__init__(transactional_id, timeout_ms, *producer)


class ProduceV1(InOneVersion, version=ProduceRequest_v8):
    """Append batches, which all replicas in sync must acknowledge; a transaction's partitions were added before."""

    def __init__(self, transactional_id: str | None, timeout_ms: int, batches: Mapping[TopicPartition, bytes]) -> None:
        topics = _by_topic((tp, (tp.partition, batch)) for tp, batch in batches.items())
        super().__init__(transactional_id, -1, timeout_ms, topics)


class ProduceV2(ProduceV1, version=PRODUCE):
    """The same, but the partitions become part of the transaction."""


def add_partitions(transactional_id: str, producer: ProducerEpoch, partitions: Iterable[TopicPartition]) -> Any:
    """Make partitions part of the transaction (V1)."""
    return AddPartitionsToTxnRequest(transactional_id, *producer, _by_topic((tp, tp.partition) for tp in partitions))


def add_offsets(transactional_id: str, producer: ProducerEpoch, group: str) -> Any:
    """Make a group's offsets part of the transaction (V1)."""
    return AddOffsetsToTxnRequest(transactional_id, *producer, group)


def commit_offsets_v1(transactional_id: str, producer: ProducerEpoch, group: str, offsets: Offsets) -> Any:
    """Commit offsets with the transaction, whose part the group's offsets are."""
    topics = _by_topic((tp, (tp.partition, offset, metadata)) for tp, (offset, metadata) in offsets.items())
    return TxnOffsetCommitRequest(transactional_id, group, *producer, topics)


class CommitOffsetsV2(InOneVersion, version=TXN_OFFSET_COMMIT):
    """Commit offsets with the transaction, whose part they become. No member is named: the id fences."""

    def __init__(self, transactional_id: str, producer: ProducerEpoch, group: str, offsets: Offsets) -> None:
        topics = _by_topic((tp, (tp.partition, offset, -1, metadata)) for tp, (offset, metadata) in offsets.items())
        super().__init__(transactional_id, group, *producer, -1, "", None, topics)


class FetchOffsets(InOneVersion, version=OFFSET_FETCH):
    """Ask for a group's committed offsets.

    `stable`: the broker answers UNSTABLE_OFFSET_COMMIT for an offset that a transaction which has not ended has sent.
    """

    def __init__(self, group: str, partitions: Iterable[TopicPartition], *, stable: bool) -> None:
        super().__init__(group, _by_topic((tp, tp.partition) for tp in partitions), stable)


def fetched_offsets(response: Any) -> dict[TopicPartition, OffsetAndMetadata]:
    """Return the offsets in the response to FetchOffsets; partitions without one are left out. Raises KafkaError."""
    rows = [(topic, row) for topic, rows in response.topics for row in rows]
    if response.error_code:
        raise for_code(response.error_code)
    for topic, (number, *_, code) in rows:
        if code == 88:  # UNSTABLE_OFFSET_COMMIT
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


class EndV2(InOneVersion, version=END_TXN):
    """Commit or abort the transaction, and end its epoch; the response has the next one."""

    def __init__(self, transactional_id: str, producer: ProducerEpoch, commit: bool) -> None:
        super().__init__(transactional_id, *producer, commit)

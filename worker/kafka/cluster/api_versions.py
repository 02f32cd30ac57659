"""Which requests of the worker's clients a broker supports in a version that they can send."""

from __future__ import annotations

from typing import Any, Final

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.admin import ApiVersionRequest, DescribeConfigsRequest
from aiokafka.protocol.api import Request
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

from worker.kafka.aiokafka_private import has_version, send_request
from worker.kafka.writing.protocol import FeaturesRequest, InitProducerId, ProduceV1, transaction_protocol

ALWAYS: Final[tuple[type[Request[Any]], ...]] = (
    MetadataRequest, ProduceV1, FetchRequest, OffsetRequest, OffsetCommitRequest, OffsetFetchRequest,
    FindCoordinatorRequest, JoinGroupRequest, SyncGroupRequest, HeartbeatRequest, LeaveGroupRequest,
    DescribeConfigsRequest, InitProducerId,
)  # fmt: skip
"""Requests that the worker's clients send in any case."""

TRANSACTIONS: Final[tuple[type[Request[Any]], ...]] = (
    AddPartitionsToTxnRequest, AddOffsetsToTxnRequest, EndTxnRequest, TxnOffsetCommitRequest,
)  # fmt: skip
"""Requests that they send with KP_DELIVERY=exactly_once only."""


async def lacking_apis(admin: AIOKafkaAdminClient, *, transactions: bool) -> tuple[list[str], int]:
    """Return the names of the requests without a version in common with the broker, and how many are needed."""
    needed = ALWAYS + (TRANSACTIONS if transactions else ())
    answer = await send_request(admin, ApiVersionRequest())
    versions = {key: (least, most) for key, least, most in answer.api_versions}
    lacking = [request for request in needed if not has_version(request, *versions.get(request.API_KEY, (0, -1)))]
    return [request.__name__.removesuffix("Request").removesuffix("V1") for request in lacking], len(needed)


async def transactions_of(admin: AIOKafkaAdminClient) -> int:
    """Return the version of the transaction protocol that the worker's producers use on this cluster, 1 or 2."""
    try:
        return transaction_protocol(await send_request(admin, FeaturesRequest()))
    except NotImplementedError:  # before Kafka 2.4
        return 1

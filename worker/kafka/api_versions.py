"""Which requests of the worker's clients a broker supports in a version that aiokafka can send.

Lives here: the list of these requests. Must not live here: what follows from a missing one (doctor_kafka.py).
"""

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
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.transaction import (
    AddOffsetsToTxnRequest,
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    TxnOffsetCommitRequest,
)

from worker.kafka.aiokafka_private import has_version, send_request

ALWAYS: Final[tuple[type[Request[Any]], ...]] = (
    MetadataRequest, ProduceRequest, FetchRequest, OffsetRequest, OffsetCommitRequest, OffsetFetchRequest,
    FindCoordinatorRequest, JoinGroupRequest, SyncGroupRequest, HeartbeatRequest, LeaveGroupRequest,
    DescribeConfigsRequest, InitProducerIdRequest,
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
    return [request.__name__.removesuffix("Request") for request in lacking], len(needed)

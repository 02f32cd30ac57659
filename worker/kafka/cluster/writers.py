"""Find other groups that write to our topics by their transactional producers (listed since Kafka 3.0, KIP-664).

Two groups on the same output topics duplicate every trace there, and neither fails.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError, for_code
from aiokafka.protocol.api import RequestStruct, Response
from aiokafka.protocol.types import CompactArray, CompactString, Int16, Int32, Int64

from worker.config import Settings
from worker.core.documents import rfc3339
from worker.kafka.aiokafka_private import send_request
from worker.kafka.cluster.describe import DescribeTopicsRequest
from worker.kafka.writing.protocol import TEXT, Fields, InOneVersion, by_topic_fields, fields_array

LOOK_SECONDS: Final = 5.0  # for all brokers' answers

_WORKERS_ID: Final = re.compile(r"(.+)-[0-9]+")
"""The transactional id of a worker's producer: its group, and the source partition."""


class _ListTransactionsResponse(Response):  # type: ignore[misc]  # aiokafka is untyped
    API_KEY, API_VERSION = 66, 0
    SCHEMA = Fields(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("unknown_states", CompactArray(TEXT)),
        ("transactions", fields_array(("transactional_id", TEXT), ("producer_id", Int64), ("state", TEXT))),
    )


class _ListTransactions(RequestStruct):  # type: ignore[misc]
    API_KEY, API_VERSION, RESPONSE_TYPE, FLEXIBLE_VERSION = 66, 0, _ListTransactionsResponse, True
    SCHEMA = Fields(("states", CompactArray(TEXT)), ("producer_ids", CompactArray(Int64)))


class _ListTransactionsRequest(InOneVersion[_ListTransactions]):
    API_KEY = 66


class _DescribeProducersResponse(Response):  # type: ignore[misc]
    API_KEY, API_VERSION = 61, 0
    SCHEMA = Fields(
        ("throttle_time_ms", Int32),
        (
            "topics",
            by_topic_fields(
                ("error_code", Int16),
                ("error_message", CompactString("utf-8")),
                (
                    "producers",
                    fields_array(
                        ("producer_id", Int64),
                        ("producer_epoch", Int32),
                        ("last_sequence", Int32),
                        ("last_timestamp", Int64),
                        ("coordinator_epoch", Int32),
                        ("current_start_offset", Int64),
                    ),
                ),
            ),
        ),
    )


class _DescribeProducers(RequestStruct):  # type: ignore[misc]
    API_KEY, API_VERSION, RESPONSE_TYPE, FLEXIBLE_VERSION = 61, 0, _DescribeProducersResponse, True
    SCHEMA = Fields(("topics", fields_array(("topic", TEXT), ("partitions", CompactArray(Int32)))))


class _DescribeProducersRequest(InOneVersion[_DescribeProducers]):
    API_KEY = 61


class OtherGroup(NamedTuple):
    """A group that writes to one of our topics."""

    topic: str
    group: str
    last_ms: int  # its last write there, ms since 1970; -1: not known

    def __str__(self) -> str:
        last = f", last at {rfc3339(self.last_ms)}" if self.last_ms >= 0 else ""
        return f"group {self.group} also writes to {self.topic}{last}: each trace is written once by each group"


REMEDY: Final = "stop one of the groups, or give it its own output topics (KP_ACCEPTED_TOPIC and so on)"


async def other_groups(admin: AIOKafkaAdminClient, settings: Settings) -> list[OtherGroup]:
    """Return the other groups whose workers have written to the output topics, within a day by default.

    Kafka drops a producer after producer.id.expiration.ms, and hides groups whose transactional ids this login may not
    describe. Raises KafkaError (also without Read on a topic), NotImplementedError before Kafka 3.0, and TimeoutError.
    """
    names = [settings.accepted_topic, settings.rejected_topic, settings.dead_letter_topic]
    async with asyncio.timeout(LOOK_SECONDS):
        metadata = (await send_request(admin, DescribeTopicsRequest(names))).to_object()
        groups: dict[int, str] = {}
        for broker in metadata["brokers"]:
            answer = (await send_request(admin, _ListTransactionsRequest([], []), broker["node_id"])).to_object()
            if answer["error_code"]:
                raise for_code(answer["error_code"])("ListTransactions")
            groups |= dict(_groups(answer["transactions"], f"{settings.assemble_group}-"))
        last: dict[tuple[str, str], int] = {}
        for leader, topics in _by_leader(metadata["topics"]).items():
            answer = (await send_request(admin, _DescribeProducersRequest(list(topics.items())), leader)).to_object()
            for topic, producer in _producers(answer["topics"]):
                group = groups.get(producer["producer_id"], settings.group_id)
                if group != settings.group_id:
                    last[topic, group] = max(last.get((topic, group), -1), producer["last_timestamp"])
    return [OtherGroup(topic, group, when) for (topic, group), when in sorted(last.items())]


async def other_groups_if_known(admin: AIOKafkaAdminClient, settings: Settings) -> list[OtherGroup] | None:
    """Return the other groups (`other_groups`); None if the brokers do not list them."""
    try:
        return await other_groups(admin, settings)
    except (KafkaError, NotImplementedError, TimeoutError):
        return None


def _groups(transactions: Sequence[Mapping[str, Any]], own: str) -> Iterator[tuple[int, str]]:
    """Yield (producer id, group), except for our `assemble`, whose ids begin with `own`: it writes no output."""
    for each in transactions:
        found = _WORKERS_ID.fullmatch(each["transactional_id"])
        if found is not None and not each["transactional_id"].startswith(own):
            yield each["producer_id"], found[1]


def _by_leader(topics: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, list[int]]]:
    leaders: dict[int, dict[str, list[int]]] = {}
    for topic in topics:
        for part in topic["partitions"]:
            if part["leader"] >= 0:
                leaders.setdefault(part["leader"], {}).setdefault(topic["topic"], []).append(part["partition"])
    return leaders


def _producers(topics: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for topic in topics:
        for part in topic["partitions"]:
            if part["error_code"]:
                raise for_code(part["error_code"])(f"DescribeProducers of {topic['topic']}")
            for producer in part["producers"]:
                yield topic["topic"], producer

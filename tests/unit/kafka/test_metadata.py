"""The request that describes topics, in the version that aiokafka lacks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import IncompatibleBrokerVersion, UnknownTopicOrPartitionError

from worker.kafka.cluster.describe import (
    NO_ID,
    DescribeTopicsRequest,
    MetadataResponse_v10,
    apis_of,
    describe_topics,
    topic_id,
)

NO_BROKERS = SimpleNamespace(cluster=SimpleNamespace(brokers=tuple))  # aiokafka then chooses the one to ask


class Broker:
    """Answers with one topic, or that it is missing."""

    _client = NO_BROKERS

    def __init__(self, *, missing: bool = False) -> None:
        self.missing = missing

    async def _send_request(self, request: DescribeTopicsRequest, node: int | None) -> Any:
        prepared = request.prepare({3: (0, 13)})  # as aiokafka's connection does
        there = (0, "ab", bytes(range(16)), False, [(0, 0, -1, 5, [1, 2], [1], [])], 2**3 | 2**4)
        row = (3, "ab", NO_ID, False, [], 0) if self.missing else there
        return prepared.RESPONSE_TYPE.decode(MetadataResponse_v10(0, [], "c", 1, [row], 0).encode())


def test_the_bytes_of_the_request() -> None:
    """By Kafka's protocol guide: one topic by name, three flags that are off, no tags."""
    request = DescribeTopicsRequest(["ab"])
    assert request.prepare({3: (0, 13)}).encode() == b"\x02" + NO_ID + b"\x03ab\x00" + b"\x00\x00\x00" + b"\x00"
    with pytest.raises(IncompatibleBrokerVersion, match=r"DescribeTopicsRequest: kp-worker needs Kafka 3\.9 or later"):
        request.prepare({3: (0, 9)})


async def test_a_topic_is_described_with_its_id_and_the_permitted_operations() -> None:
    broker: Any = Broker()
    assert await topic_id(broker, "ab") == "AAECAwQFBgcICQoLDA0ODw"
    topic = (await describe_topics(broker, ["ab"], operations=True))["ab"]
    assert (topic.error, topic.partitions, topic.replicas, topic.leaderless) == (None, 1, 2, 1)
    assert topic.operations == {"Read", "Write"}


async def test_a_missing_topic_has_no_id() -> None:
    broker: Any = Broker(missing=True)
    topic = (await describe_topics(broker, ["ab"]))["ab"]
    assert (topic.error, topic.topic_id) == (UnknownTopicOrPartitionError, None)
    with pytest.raises(UnknownTopicOrPartitionError, match="topic ab"):
        await topic_id(broker, "ab")


@pytest.mark.parametrize(("fetch", "old"), [(17, False), (16, True)])
async def test_a_broker_before_3_9_is_old_and_one_before_2_8_lacks_a_request(fetch: int, old: bool) -> None:
    """17: Fetch in Kafka 3.9; 16: in 3.7 and 3.8, as those brokers answer."""
    versions = dict.fromkeys(range(70), (0, 20)) | {1: (0, fetch)}

    async def answer(request: Any, node: int | None) -> Any:
        return SimpleNamespace(api_versions=[(key, *each) for key, each in versions.items()])

    broker: Any = SimpleNamespace(_send_request=answer, _client=NO_BROKERS)
    apis = await apis_of(broker, transactions=True)
    assert (apis.lacking, apis.old) == ([], old)
    versions[3] = (0, 9)
    assert (await apis_of(broker, transactions=False)).lacking == ["DescribeTopics"]

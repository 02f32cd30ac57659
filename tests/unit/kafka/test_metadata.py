"""The request that describes topics, in the versions that aiokafka lacks."""

from __future__ import annotations

from typing import Any

import pytest
from aiokafka.errors import IncompatibleBrokerVersion

from worker.kafka.cluster.describe import (
    NO_ID,
    DescribeTopicsRequest,
    MetadataResponse_v8,
    MetadataResponse_v10,
    describe_topics,
    topic_id,
)


class Broker:
    """Answers in the highest version that it and the request have in common, with one topic."""

    def __init__(self, version: int) -> None:
        self.version = version

    async def _send_request(self, request: DescribeTopicsRequest, node: int | None) -> Any:
        prepared = request.prepare({3: (0, self.version)})  # as aiokafka's connection does
        partition = (0, 0, -1, [1, 2], [1])
        flags = (0, 2**3 | 2**4)
        if prepared.API_VERSION == 10:
            rows = [(0, "ab", bytes(range(16)), False, [(*partition[:3], 5, *partition[3:], [], {})], flags[1], {})]
            answer: Any = MetadataResponse_v10(0, [], "c", 1, rows, 0, {})
        elif prepared.API_VERSION == 8:
            rows8 = [(0, "ab", False, [(*partition[:3], 5, *partition[3:], [])], flags[1])]
            answer = MetadataResponse_v8(0, [], "c", 1, rows8, 0)
        else:
            answer = prepared.RESPONSE_TYPE(0, [], "c", 1, [(0, "ab", False, [(*partition, [])])])
        return prepared.RESPONSE_TYPE.decode(answer.encode())


def test_the_bytes_of_the_request() -> None:
    """By Kafka's protocol guide: one topic by name, three flags that are off, no tags."""
    request = DescribeTopicsRequest(["ab"])
    assert request.prepare({3: (0, 13)}).encode() == b"\x02" + NO_ID + b"\x03ab\x00" + b"\x00\x00\x00" + b"\x00"
    assert request.prepare({3: (0, 9)}).encode() == b"\x00\x00\x00\x01\x00\x02ab" + b"\x00\x00\x00"
    assert request.prepare({3: (0, 7)}).encode() == b"\x00\x00\x00\x01\x00\x02ab" + b"\x00"


@pytest.mark.parametrize(("version", "identity"), [(13, "AAECAwQFBgcICQoLDA0ODw"), (9, None), (5, None)])
async def test_a_topic_is_described_in_any_version(version: int, identity: str | None) -> None:
    broker: Any = Broker(version)
    assert await topic_id(broker, "ab") == identity
    topic = (await describe_topics(broker, ["ab"]))["ab"]
    assert (topic.error, topic.partitions, topic.replicas, topic.leaderless) == (None, 1, 2, 1)


async def test_operations_are_told_from_kafka_2_3_on() -> None:
    for version in (8, 10):
        broker: Any = Broker(version)
        topic = (await describe_topics(broker, ["ab"], operations=True))["ab"]
        assert topic.operations == {"Read", "Write"}
    old: Any = Broker(7)
    with pytest.raises(IncompatibleBrokerVersion, match=r"older than Kafka 2\.3"):
        await describe_topics(old, ["ab"], operations=True)

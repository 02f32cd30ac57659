"""The id of a topic: the one request that aiokafka does not know."""

from __future__ import annotations

from aiokafka.protocol.metadata import MetadataRequest

from worker.kafka.topic_id import TopicIdRequest, topic_id


def test_aiokafka_still_knows_no_version_with_ids() -> None:
    """When it does, this module can go."""
    assert max(version.API_VERSION for version in MetadataRequest._CLASSES) < 10


def test_the_request_s_bytes() -> None:
    """By Kafka's protocol guide: one topic by name, three flags that are off, no tags."""
    request = TopicIdRequest("ab").prepare({3: (0, 13)})
    assert request.encode() == b"\x02" + bytes(16) + b"\x03ab\x00" + b"\x00\x00\x00" + b"\x00"


async def test_a_broker_that_knows_no_ids_is_not_asked() -> None:
    class Old:
        async def _send_request(self, request: TopicIdRequest) -> object:
            return request.prepare({3: (0, 9)})  # as aiokafka's connection does

    assert await topic_id(Old(), "ab") is None  # type: ignore[arg-type]

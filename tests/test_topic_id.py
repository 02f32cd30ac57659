"""The id of a topic: the one request that aiokafka does not know."""

from __future__ import annotations

import re

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import UnknownTopicOrPartitionError
from aiokafka.protocol.metadata import MetadataRequest

from tests.kafka_fixtures import create_topics_async, unique
from worker.embedded_kafka import EmbeddedKafka
from worker.topic_id import TopicIdRequest, topic_id


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


@pytest.mark.kafka
async def test_a_topic_that_is_made_anew_has_another_id_and_none_is_created_by_asking(kafka: EmbeddedKafka) -> None:
    name = unique("id")
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap_servers)
    await admin.start()
    try:
        for _ in range(2):
            with pytest.raises(UnknownTopicOrPartitionError):
                await topic_id(admin, name)
        assert name not in await admin.list_topics()
        found = set()
        for _ in range(2):
            await create_topics_async(kafka.bootstrap_servers, {name: 3})
            identity = await topic_id(admin, name)
            assert identity == await topic_id(admin, name)
            assert identity is not None
            assert re.fullmatch(r"[A-Za-z0-9_-]{22}", identity)
            found.add(identity)
            await admin.delete_topics([name])
            while name in await admin.list_topics():
                pass
        assert len(found) == 2
    finally:
        await admin.close()

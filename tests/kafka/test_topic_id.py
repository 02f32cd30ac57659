"""The id of a topic on a real broker."""

from __future__ import annotations

import re

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import UnknownTopicOrPartitionError

from tests.support.kafka_fixtures import create_topics_async, unique
from worker.kafka.cluster.describe import topic_id
from worker.lab.broker.embedded_kafka import EmbeddedKafka


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

"""The publishers of a worker's partitions, by KP_DELIVERY, and the producer that they share with at_least_once.

Lives here: that choice alone; the publishers are in kafka/publisher.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from aiokafka import AIOKafkaProducer, TopicPartition

from worker.config import Settings
from worker.kafka.describe import current_limit
from worker.kafka.producer import idempotent_producer
from worker.kafka.publisher import AtLeastOncePublisher, ExactlyOncePublisher, Publisher
from worker.kafka.topics import Layout

CommitOffset = Callable[[TopicPartition, int, str], Awaitable[None]]
"""Commits a partition's offset with its metadata, as a member of the group."""


class Publishers:
    """Creates the publisher of each source partition. `client`: the arguments of every Kafka client."""

    def __init__(self, settings: Settings, client: Mapping[str, Any], commit_offset: CommitOffset) -> None:
        self._settings = settings
        self._client = client
        self._commit_offset = commit_offset
        self._shared: AIOKafkaProducer | None = None

    async def start(self) -> None:
        """Connect the shared producer, if there is one."""
        if self._settings.delivery == "at_least_once":
            self._shared = idempotent_producer(self._client, self._settings.transaction_timeout_seconds)
            await self._shared.start()

    async def stop(self) -> None:
        """Disconnect the shared producer; those of single partitions stop with their publishers."""
        if self._shared is not None:
            await self._shared.stop()

    def publisher(self, partition: int, layout: Layout) -> Publisher:
        """Return a new publisher for a source partition, to the topics of the layout."""
        settings = self._settings
        source = TopicPartition(settings.source_topic, partition)
        limit_of = partial(current_limit, self._client)
        if settings.delivery == "exactly_once":
            return ExactlyOncePublisher(
                self._client,
                settings.group_id,
                source,
                layout.outputs,
                layout.changelog,
                settings.transaction_timeout_seconds,
                limit_of,
            )
        if self._shared is None:
            raise RuntimeError("this is a bug: at_least_once without its producer")
        return AtLeastOncePublisher(
            self._shared,
            source,
            layout.outputs,
            layout.changelog,
            self._commit_offset,
            settings.transaction_timeout_seconds,
            limit_of,
        )

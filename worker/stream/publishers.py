"""The publisher of each source partition, by KP_DELIVERY."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from aiokafka import TopicPartition

from worker.config import Settings
from worker.kafka.cluster.describe import current_limit
from worker.kafka.cluster.topics import Layout
from worker.kafka.writing.producer import Producer
from worker.kafka.writing.publisher import AtLeastOncePublisher, ExactlyOncePublisher, Publisher

CommitOffset = Callable[[TopicPartition, int, str], Awaitable[None]]
"""Commits a partition's offset with its metadata, as a member of the group."""


class Publishers:
    """Creates the publisher of each source partition. `client`: the arguments of every Kafka client.

    `owns`: whether this member of the group has a partition, as far as it knows.
    """

    def __init__(
        self,
        settings: Settings,
        client: Mapping[str, Any],
        commit_offset: CommitOffset,
        owns: Callable[[int], bool],
    ) -> None:
        self._settings = settings
        self._client = client
        self._commit_offset = commit_offset
        self._owns = owns

    def publisher(self, partition: int, layout: Layout) -> Publisher:
        """Return a new publisher for a source partition, to the topics of the layout."""
        settings = self._settings
        timeout = settings.transaction_timeout_seconds
        source = TopicPartition(settings.source_topic, partition)
        limit_of = partial(current_limit, self._client)
        if settings.delivery == "exactly_once":
            transactional_id = f"{settings.group_id}-{partition}"
            producer = Producer(self._client, transactional_id, timeout, owns=partial(self._owns, partition))
            return ExactlyOncePublisher(producer, settings.group_id, source, layout.outputs, layout.changelog, limit_of)
        return AtLeastOncePublisher(
            Producer(self._client, None, timeout),
            source,
            layout.outputs,
            layout.changelog,
            self._commit_offset,
            timeout,
            limit_of,
        )

"""The worker's topics as they are.

Lives here: what the broker reports about them, and the limits in their settings. Must not live here: what they should
be (topic_plan.py), what is wrong with them (topic_problems.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError, TopicAuthorizationFailedError

from worker.config import ConfigError, Settings
from worker.kafka.describe import broker_configs, describe_topics, topic_configs

DEFAULT_MAX_BYTES: Final = 1_048_588
"""Kafka's default max.message.bytes, assumed if the worker may not read a topic's settings."""

AFTER: Final = "message.timestamp.after.max.ms"
"""Kafka 3.6 and later. Before, DIFFERENCE limits how far records may be dated ahead and back alike."""

DIFFERENCE: Final = "message.timestamp.difference.max.ms"
BEFORE: Final = "message.timestamp.before.max.ms"

NO_LIMIT: Final = 2**63 - 1
"""The value that Kafka shows for a topic without a limit."""


class MissingTopicsError(ConfigError):
    """A topic is missing."""


@dataclass(frozen=True, slots=True)
class TopicState:
    """A topic as it is.

    `replicas`: the least of any partition; `leaderless`: partitions without a leader; `topic_id`: None from a broker
    without topic ids.
    """

    partitions: int
    replicas: int
    leaderless: int
    topic_id: str | None = None


@dataclass(frozen=True, slots=True)
class Observed:
    """What the broker reports about the topics: those that exist, and those to which it denies access.

    `configs`: settings by topic. `unreadable`: the broker's message, for topics whose settings it does not show.
    `defaults`: settings of a broker, if no topic shows any.
    """

    topics: Mapping[str, TopicState]
    denied: Sequence[str]
    configs: Mapping[str, Mapping[str, str]]
    unreadable: Mapping[str, str]
    defaults: Mapping[str, str] = field(default_factory=dict)

    def config(self, topic: str, name: str, default: str) -> str:
        """Return a topic's setting; `default` if it is not known."""
        return self.configs.get(topic, {}).get(name, default)

    @property
    def has_after(self) -> bool:
        """Whether the broker has the setting AFTER, as far as the topics or its own settings show it."""
        if f"log.{DIFFERENCE}" in self.defaults and f"log.{AFTER}" not in self.defaults:
            return False
        return not any(DIFFERENCE in shown and AFTER not in shown for shown in self.configs.values())

    def max_bytes(self, topic: str) -> int:
        """Return the largest record that a topic accepts; Kafka's default if that is not known."""
        return int(self.config(topic, "max.message.bytes", str(DEFAULT_MAX_BYTES)))

    def milliseconds(self, topic: str, name: str) -> float | None:
        """Return a limit of a topic: infinity if it sets none, None if it is not known."""
        text = self.configs.get(topic, {}).get(name)
        if text is None:
            return None
        return math.inf if int(text) < 0 or int(text) == NO_LIMIT else int(text)

    def stamps(self, topic: str) -> bool:
        """Whether the broker sets the timestamps of the topic's records, in place of the producer's."""
        return self.config(topic, "message.timestamp.type", "CreateTime") == "LogAppendTime"


async def look(admin: AIOKafkaAdminClient, settings: Settings, settings_of: Sequence[str]) -> Observed:
    """Look at the topics, and at the settings of those in `settings_of` that exist. Changes nothing.

    Raises KafkaError, and MissingTopicsError for a topic so new that its settings are not known yet.
    """
    return await look_at(admin, list(settings.topics.values()), settings_of)


async def look_at(admin: AIOKafkaAdminClient, names: Sequence[str], settings_of: Sequence[str]) -> Observed:
    """Look at topics by their names, as `look` does."""
    described = await describe_topics(admin, names)
    denied = [name for name, topic in described.items() if topic.error is TopicAuthorizationFailedError]
    topics = {
        name: TopicState(len(topic.partitions), topic.replicas, topic.leaderless, topic.topic_id)
        for name in names
        if (topic := described.get(name)) is not None and topic.error is None
    }
    configs, unreadable = await _configs(admin, [name for name in settings_of if name in topics])
    return Observed(topics, denied, configs, unreadable, {} if configs else await _defaults(admin))


async def _defaults(admin: AIOKafkaAdminClient) -> Mapping[str, str]:
    try:
        return await broker_configs(admin)
    except KafkaError as error:
        if error.retriable:
            raise
        return {}


async def _configs(
    admin: AIOKafkaAdminClient, names: Sequence[str]
) -> tuple[Mapping[str, Mapping[str, str]], Mapping[str, str]]:
    """Return the topics' settings, and the broker's message for those that it does not show."""
    try:
        configs, refused = await topic_configs(admin, names)
    except KafkaError as error:
        if error.retriable:
            raise
        return {}, dict.fromkeys(names, str(error))
    for name, (error_type, _) in refused.items():
        if error_type.retriable:
            raise MissingTopicsError(f"topic {name}: its settings are not known yet ({error_type.__name__})")
    return configs, {name: words for name, (_, words) in refused.items()}

"""The topics of `contribute`: the accepted topic, receipts, and refused traces; created with KP_CREATE_TOPICS."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final

from aiokafka.admin import AIOKafkaAdminClient

from worker.config import ConfigError, Settings
from worker.contribute.unit import CONTRIBUTED
from worker.core.records import DEAD_LETTER
from worker.kafka.cluster.connections import prepare_patiently
from worker.kafka.cluster.topic_plan import DEAD_LETTER_OVERHEAD, MissingTopicsError, Observed, TopicPlan, look_at
from worker.kafka.cluster.topics import SETTLE_ATTEMPTS, create
from worker.kafka.writing.rows import OutputTopic

log = logging.getLogger(__name__)

RECEIPTS_CONFIG: Final[Mapping[str, str]] = {"cleanup.policy": "compact", "retention.ms": "-1"}


async def prepare_topics(settings: Settings, client: Mapping[str, Any]) -> dict[str, OutputTopic]:
    """Create the missing topics (KP_CREATE_TOPICS) and check all; return the topics to write to, by kind of record.

    Raises ConfigError that names topic and remedy.
    """

    async def prepare(admin: AIOKafkaAdminClient) -> dict[str, OutputTopic]:
        found = await look_at_contributed(admin, settings)
        if settings.create_topics and settings.accepted_topic in found.topics:
            found = await create_contributed(admin, settings)
        return _checked(settings, found)

    return await prepare_patiently(settings, client, prepare)


async def look_at_contributed(admin: AIOKafkaAdminClient, settings: Settings) -> Observed:
    """Describe the accepted topic and the two that `contribute` writes."""
    names = [settings.accepted_topic, settings.contributed, settings.refused]
    return await look_at(admin, names, names)


async def create_contributed(admin: AIOKafkaAdminClient, settings: Settings) -> Observed:
    """Create the missing ones of the two topics; return how the broker describes all three. Raises ConfigError."""
    for _ in range(SETTLE_ATTEMPTS):
        found = await look_at_contributed(admin, settings)
        lacking = [wanted for wanted in contribute_plan(settings, found) if wanted.name not in found.topics]
        if not lacking:
            break
        for wanted in lacking:
            await create(admin, settings, wanted)
        await asyncio.sleep(0.2)
    return found


def contribute_plan(settings: Settings, found: Observed) -> list[TopicPlan]:
    """Return the intended configuration of the two topics that `contribute` writes, given the accepted topic."""
    accepted = found.topics.get(settings.accepted_topic)
    partitions = settings.topic_partitions if accepted is None else accepted.partitions
    largest = str(found.max_bytes(settings.accepted_topic) + DEAD_LETTER_OVERHEAD)
    return [
        TopicPlan("KP_CONTRIBUTED_TOPIC", settings.contributed, partitions, RECEIPTS_CONFIG),
        TopicPlan("KP_REFUSED_TOPIC", settings.refused, partitions, {"max.message.bytes": largest}),
    ]


def _checked(settings: Settings, found: Observed) -> dict[str, OutputTopic]:
    if found.denied:
        raise ConfigError(f"the broker denies access to topic {found.denied[0]}: grant an ACL on it (docs/security.md)")
    if settings.accepted_topic not in found.topics:
        raise MissingTopicsError(
            f"missing on {settings.bootstrap_servers}: {settings.accepted_topic} (KP_ACCEPTED_TOPIC); the worker "
            "creates it (kp-worker topics --create), or correct the name"
        )
    missing = [plan.name for plan in contribute_plan(settings, found) if plan.name not in found.topics]
    if missing:
        raise MissingTopicsError(
            f"missing on {settings.bootstrap_servers}: {', '.join(missing)}; create them (kp-worker topics --create "
            "with KP_REGISTRY_URL set), or let contribute do it with KP_CREATE_TOPICS=true"
        )
    for name, compacted in ((settings.contributed, True), (settings.refused, False)):
        policy = found.config(name, "cleanup.policy", "compact" if compacted else "delete")
        if compacted != ("compact" in policy):
            wanted = "compact" if compacted else "delete"
            log.warning("topic %s has cleanup.policy=%s; set cleanup.policy=%s", name, policy, wanted)
    kinds = {CONTRIBUTED: settings.contributed, DEAD_LETTER: settings.refused}
    return {kind: found.output(name) for kind, name in kinds.items()}

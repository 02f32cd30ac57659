"""The five topics: created where asked for, otherwise checked, before the worker joins its group.

Lives here: which topics there must be, with how many partitions and which settings. Must not live here: data.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError, TopicAlreadyExistsError, TopicAuthorizationFailedError, for_code

from worker.config import ConfigError, Settings
from worker.connection import why_not
from worker.errors import explain, is_final
from worker.pipeline import ACCEPTED, DEAD_LETTER, REJECTED
from worker.publisher import OutputTopic

log = logging.getLogger(__name__)

Found = TypeVar("Found")

CONNECT_ATTEMPTS: Final = 30
"""How often the worker tries to reach a broker at start, once a second, before it exits."""

DEFAULT_MAX_BYTES: Final = 1_048_588
"""Kafka's default max.message.bytes, assumed where the worker may not read a topic's settings."""

OUTPUT_OVERHEAD: Final = 8192
"""Bytes that an output may be larger than its input: the `scoring` object (about 1 kB, with a long nearest id 3 kB),
headers, and the record's framing; KP_OUTPUT_EMBEDDING comes on top."""

DEAD_LETTER_OVERHEAD: Final = 65_536
"""The same for a created dead-letter topic; roomy, because nothing may be too large for it."""

CHANGELOG_CONFIG: Final[Mapping[str, str]] = {
    "cleanup.policy": "compact",
    # Only closed segments are compacted: with the default of 7 days and 1 GiB the topic would grow without bound.
    "segment.ms": "600000",
    "segment.bytes": "16777216",
    "min.cleanable.dirty.ratio": "0.1",
    "delete.retention.ms": "60000",
    # Entries must never age out while they are the latest of their slot.
    "retention.ms": "-1",
}

SETTLE_ATTEMPTS: Final = 50
"""How often, 0.2 s apart, a new topic is looked for on a broker that does not know it yet."""


class MissingTopicsError(ConfigError):
    """A topic is not there."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What the worker found: the source's partitions, the outputs by kind, the largest trace that fits (bytes)."""

    source_partitions: int
    outputs: Mapping[str, OutputTopic]
    max_message_bytes: int


async def prepare_topics(settings: Settings, client: Mapping[str, Any], extra_bytes: int = 0) -> Layout:
    """Create what is missing (KP_CREATE_TOPICS) and check the rest. Raises ConfigError naming topic and remedy.

    `extra_bytes`: what an output may be larger than its input beyond OUTPUT_OVERHEAD (the embedding in it).
    """
    overhead = OUTPUT_OVERHEAD + extra_bytes
    admin = await _connect(settings, client)
    try:
        if not settings.create_topics:
            return await _check(admin, settings, overhead)
        await _create_missing(admin, settings, overhead)
        return await _settled(lambda: _check(admin, settings, overhead))
    finally:
        await admin.close()


async def _connect(settings: Settings, client: Mapping[str, Any]) -> AIOKafkaAdminClient:
    """Connect, with patience: a worker that is restarted in a broker's outage should be there when it ends."""
    attempt = 0
    while True:
        admin = AIOKafkaAdminClient(**client)
        try:
            await admin.start()
            return admin
        except KafkaError as error:
            await admin.close()
            cause = await why_not(client) or error
            text = f"no Kafka broker answers at KP_BOOTSTRAP_SERVERS={settings.bootstrap_servers}: {explain(cause)}"
            attempt += 1
            if attempt > CONNECT_ATTEMPTS or is_final(cause):
                raise ConfigError(text) from error
            if attempt == 1:
                log.warning("%s; trying again for %d s", text, CONNECT_ATTEMPTS)
            await asyncio.sleep(1)


async def _create_missing(admin: AIOKafkaAdminClient, settings: Settings, overhead: int) -> None:
    found = await _partitions(admin, settings)
    source = found.get(settings.source_topic)
    if source is None:
        await _create(admin, settings, settings.source_topic, settings.topic_partitions, {})
        source = settings.topic_partitions
    limit = (await _settled(lambda: _max_bytes(admin, [settings.source_topic])))[settings.source_topic]
    output_config = {"max.message.bytes": str(max(DEFAULT_MAX_BYTES, settings.max_message_bytes + overhead))}
    dead_config = {"max.message.bytes": str(limit + DEAD_LETTER_OVERHEAD)}
    for name, config in (
        (settings.accepted_topic, output_config),
        (settings.rejected_topic, output_config),
        (settings.dead_letter_topic, dead_config),
        (settings.changelog, CHANGELOG_CONFIG),
    ):
        if name not in found:
            await _create(admin, settings, name, source, config)
    if found.get(settings.changelog, source) < source:  # the source topic has gained partitions
        try:
            await admin.create_partitions({settings.changelog: NewPartitions(source)})
        except KafkaError as error:
            raise ConfigError(
                f"topic {settings.changelog} must grow to {source} partitions, as many as the source, and cannot: "
                f"{error} (it takes the ACL Alter on it)"
            ) from error
        log.info("topic %s now has %d partitions, as many as the source", settings.changelog, source)
        for _ in range(100):
            if (await _partitions(admin, settings))[settings.changelog] >= source:
                break
            await asyncio.sleep(0.1)


async def _settled(look: Callable[[], Awaitable[Found]]) -> Found:
    """Look at new topics until they are known: brokers learn of them one after the other."""
    for _ in range(SETTLE_ATTEMPTS):
        try:
            return await look()
        except MissingTopicsError:
            await asyncio.sleep(0.2)
    return await look()


async def _create(
    admin: AIOKafkaAdminClient, settings: Settings, name: str, partitions: int, config: Mapping[str, str]
) -> None:
    topic = NewTopic(name, partitions, 1, topic_configs=dict(config))
    topic.replication_factor = settings.topic_replication  # aiokafka's constructor refuses -1, the broker's default
    try:
        response = await admin.create_topics([topic])
    except TopicAlreadyExistsError:
        return  # another worker was faster
    for error in response.topic_errors:
        code, message = error[1], error[2] if len(error) > 2 else ""
        if code and for_code(code) is not TopicAlreadyExistsError:
            advice = " (grant the ACL Create on it)" if for_code(code) is TopicAuthorizationFailedError else ""
            raise ConfigError(f"topic {name} could not be created: {for_code(code).__name__}: {message}{advice}")
    log.info("created topic %s with %d partitions", name, partitions)
    for _ in range(100):  # until the broker's metadata knows it
        if name in await _partitions(admin, settings):
            return
        await asyncio.sleep(0.1)
    raise ConfigError(f"topic {name} was created but the broker does not show it after 10 s")


async def _check(admin: AIOKafkaAdminClient, settings: Settings, overhead: int) -> Layout:
    found = await _partitions(admin, settings)
    missing = [f"{name} ({variable})" for variable, name in settings.topics.items() if name not in found]
    if missing:
        raise MissingTopicsError(
            f"missing on {settings.bootstrap_servers}: {', '.join(missing)}. Create them, or let the worker do it with "
            "KP_CREATE_TOPICS=true, or correct the names"
        )
    source = found[settings.source_topic]
    if found[settings.changelog] < source:
        raise ConfigError(
            f"topic {settings.changelog} has {found[settings.changelog]} partitions, the source "
            f"{settings.source_topic} has {source}: the changelog needs as many; add partitions to it "
            f"(kafka-topics --alter --partitions {source})"
        )
    await _check_changelog(admin, settings)
    outputs = [settings.accepted_topic, settings.rejected_topic, settings.dead_letter_topic]
    limits = await _max_bytes(admin, outputs)
    fits = min(limits[settings.accepted_topic], limits[settings.rejected_topic]) - overhead
    if fits < settings.max_message_bytes:
        log.warning(
            "the output topics take records of at most %d bytes: traces above %d bytes become dead letters. "
            "Raise max.message.bytes of %s and %s by %d to let all of KP_MAX_MESSAGE_BYTES through",
            fits + overhead, fits, settings.accepted_topic, settings.rejected_topic,
            settings.max_message_bytes - fits,
        )  # fmt: skip
    kinds = {ACCEPTED: outputs[0], REJECTED: outputs[1], DEAD_LETTER: outputs[2]}
    return Layout(
        source,
        {kind: OutputTopic(name, found[name], limits[name]) for kind, name in kinds.items()},
        min(settings.max_message_bytes, fits),
    )


async def _partitions(admin: AIOKafkaAdminClient, settings: Settings) -> dict[str, int]:
    result = {}
    for topic in await admin.describe_topics(list(settings.topics.values())):
        name = topic["topic"]
        if topic["error_code"] == 0:
            result[name] = len(topic["partitions"])
        elif for_code(topic["error_code"]) is TopicAuthorizationFailedError:
            raise ConfigError(
                f"the broker denies access to topic {name}: grant the ACL {_needed(settings, name)} on it "
                "(docs/security.md)"
            )
    return result


def _needed(settings: Settings, topic: str) -> str:
    if topic == settings.source_topic:
        return "Read"
    return "Read and Write" if topic == settings.changelog else "Write"


async def _configs(admin: AIOKafkaAdminClient, names: list[str]) -> dict[str, dict[str, str]]:
    resources = [ConfigResource(ConfigResourceType.TOPIC, name) for name in names]
    result: dict[str, dict[str, str]] = {}
    try:
        responses = await admin.describe_configs(resources)
    except KafkaError as error:
        log.warning("cannot read topic settings (ACL DescribeConfigs): %s; assuming Kafka's defaults", error)
        return result
    for response in responses:
        for code, message, _, name, entries in response.resources:
            if code and for_code(code).retriable:
                raise MissingTopicsError(f"topic {name}: its settings are not known yet ({for_code(code).__name__})")
            if code:
                log.warning("cannot read the settings of topic %s (ACL DescribeConfigs): %s", name, message)
            else:
                result[name] = {entry[0]: entry[1] for entry in entries}
    return result


async def _max_bytes(admin: AIOKafkaAdminClient, names: list[str]) -> dict[str, int]:
    configs = await _configs(admin, names)
    return {name: int(configs.get(name, {}).get("max.message.bytes", DEFAULT_MAX_BYTES)) for name in names}


async def _check_changelog(admin: AIOKafkaAdminClient, settings: Settings) -> None:
    policy = (await _configs(admin, [settings.changelog])).get(settings.changelog, {}).get("cleanup.policy", "compact")
    if "compact" not in policy or "delete" in policy:
        raise ConfigError(
            f"topic {settings.changelog} has cleanup.policy={policy}: cache entries would be deleted or never be "
            "cleaned up; set cleanup.policy=compact (README, topics)"
        )

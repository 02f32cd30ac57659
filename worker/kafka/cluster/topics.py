"""Prepare the topics before the worker joins its group: create them if KP_CREATE_TOPICS is set, then check them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic
from aiokafka.errors import (
    InvalidPartitionsError,
    KafkaError,
    TopicAlreadyExistsError,
    TopicAuthorizationFailedError,
    for_code,
)

from worker.config import ConfigError, Settings
from worker.core.records import ACCEPTED, DEAD_LETTER, JUDGED, REJECTED
from worker.core.terminal import number_of
from worker.kafka.cluster.connections import prepare_patiently
from worker.kafka.cluster.topic_plan import (
    MissingTopicsError,
    Observed,
    TopicPlan,
    codec_problems,
    look,
    plan,
    problems,
)
from worker.kafka.writing.rows import OutputTopic

log = logging.getLogger(__name__)

Found = TypeVar("Found")

SETTLE_ATTEMPTS: Final = 50  # how often, 0.2 s apart, a broker is asked for a topic that it does not know yet


@dataclass(frozen=True, slots=True)
class Layout:
    """The worker's topics as found."""

    source_partitions: int  # number of partitions
    outputs: Mapping[str, OutputTopic]  # by kind (records.ACCEPTED and so on)
    changelog: OutputTopic


async def prepare_topics(settings: Settings, client: Mapping[str, Any], extra_bytes: int = 0) -> Layout:
    """Create missing topics (KP_CREATE_TOPICS) and check all. Raises ConfigError that names topic and remedy.

    `extra_bytes`: see `topic_plan.problems`.
    """

    async def prepare(admin: AIOKafkaAdminClient) -> Layout:
        if settings.create_topics:
            await create_missing(admin, settings, extra_bytes)
            return await settled(lambda: _check(admin, settings, extra_bytes))
        return await _check(admin, settings, extra_bytes)

    return await prepare_patiently(settings, client, prepare)


async def _check(admin: AIOKafkaAdminClient, settings: Settings, extra_bytes: int) -> Layout:
    found = await look(admin, settings, list(settings.topics.values()))
    for problem in [*problems(settings, found, extra_bytes), *codec_problems()]:
        if problem.level == "fail":
            raise (MissingTopicsError if problem.missing else ConfigError)(str(problem))
        log.warning("%s", problem)
    kinds = {
        ACCEPTED: settings.accepted_topic,
        REJECTED: settings.rejected_topic,
        DEAD_LETTER: settings.dead_letter_topic,
    }
    if settings.verdict_key_file is not None:
        kinds[JUDGED] = settings.judged
    return Layout(
        found.topics[settings.source_topic].partitions,
        {kind: found.output(name) for kind, name in kinds.items()},
        found.output(settings.changelog),
    )


async def create_missing(admin: AIOKafkaAdminClient, settings: Settings, extra_bytes: int = 0) -> None:
    """Create the missing topics, and add partitions to the changelog if the source has more. Raises ConfigError."""
    found = await settled(lambda: _accessible(admin, settings))
    source = plan(settings, found)[0]
    if source.name not in found.topics:
        await create(admin, settings, source)
        found = await settled(lambda: _accessible(admin, settings, source.name))
    for topic in plan(settings, found, extra_bytes)[1:]:
        if topic.name not in found.topics:
            await create(admin, settings, topic)
    wanted = found.topics[source.name].partitions
    changelog = found.topics.get(settings.changelog)
    if changelog is not None and changelog.partitions < wanted:  # the source topic has gained partitions
        await _grow(admin, settings, wanted)
    await settled(lambda: _accessible(admin, settings, *settings.topics.values()))


async def _accessible(admin: AIOKafkaAdminClient, settings: Settings, *needed: str) -> Observed:
    """Observe the topics and the source's settings. Raises ConfigError if one is denied, or missing and needed."""
    found = await look(admin, settings, [settings.source_topic])
    if found.denied:
        raise ConfigError(str(problems(settings, found)[0]))
    for name in needed:
        if name not in found.topics:
            raise MissingTopicsError(f"topic {name} was created but the broker does not show it")
    return found


async def _grow(admin: AIOKafkaAdminClient, settings: Settings, partitions: int) -> None:
    name = settings.changelog
    failure: KafkaError | None = None
    try:
        await admin.create_partitions({name: NewPartitions(partitions)})
        log.info("topic %s now has %s, like the source", name, number_of(partitions, "partition"))
    except InvalidPartitionsError as error:
        failure = error  # it has enough already if another worker was faster
    except KafkaError as error:
        if error.retriable:
            raise
        raise ConfigError(
            f"topic {name} must grow to {partitions} partitions, like the source, but cannot: {error} "
            "(grant the ACL Alter on it)"
        ) from error
    for _ in range(SETTLE_ATTEMPTS):
        if (await look(admin, settings, [])).topics[name].partitions >= partitions:
            return
        await asyncio.sleep(0.2)
    raise ConfigError(f"topic {name} could not be extended to {partitions} partitions, like the source: {failure}")


async def settled(look: Callable[[], Awaitable[Found]]) -> Found:
    """Return what `look` returns once it finds the new topics: brokers learn of them at different times."""
    for _ in range(SETTLE_ATTEMPTS):
        try:
            return await look()
        except MissingTopicsError:
            await asyncio.sleep(0.2)
    return await look()


async def create(admin: AIOKafkaAdminClient, settings: Settings, wanted: TopicPlan) -> None:
    """Create a topic, unless another process was faster. Raises ConfigError with the broker's message."""
    topic = NewTopic(wanted.name, wanted.partitions, 1, topic_configs=dict(wanted.configs))
    topic.replication_factor = settings.topic_replication  # aiokafka's constructor refuses -1, the broker's default
    try:
        response = await admin.create_topics([topic])
    except TopicAlreadyExistsError:
        return  # another worker was faster
    for error in response.topic_errors:
        code, message = error[1], error[2] or "" if len(error) > 2 else ""
        if code and for_code(code) is not TopicAlreadyExistsError:
            advice = " (grant the ACL Create on it)" if for_code(code) is TopicAuthorizationFailedError else ""
            raise ConfigError(f"topic {wanted.name} could not be created: {for_code(code).__name__}: {message}{advice}")
    log.info("created topic %s with %s", wanted.name, number_of(wanted.partitions, "partition"))

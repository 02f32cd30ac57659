"""The topics of `assemble`: those with spans, those of its own, and the worker's source topic, to which it writes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from aiokafka.admin import AIOKafkaAdminClient

from worker.config import ConfigError, Settings
from worker.core.records import ASSEMBLED, DEAD_LETTER, SPANS
from worker.kafka.cluster.connections import CONNECT_SECONDS, prepare_patiently
from worker.kafka.cluster.topic_plan import (
    BEFORE,
    CHANGELOG_CONFIG,
    DEAD_LETTER_OVERHEAD,
    MissingTopicsError,
    Observed,
    TopicPlan,
    look_at,
)
from worker.kafka.cluster.topics import SETTLE_ATTEMPTS, create, create_missing
from worker.kafka.writing.rows import OutputTopic

SPANS_CONFIG: Final[Mapping[str, str]] = {
    "cleanup.policy": "delete",
    # Longer than a process may be away: what is written here is committed on the topics with spans.
    "retention.ms": "259200000",
    # The broker's time: retention must not go by the time of spans, which may be old.
    "message.timestamp.type": "LogAppendTime",
}

VARIABLE: Final = "KP_SPANS_TOPIC"


@dataclass(frozen=True, slots=True)
class AssembleTopics:
    """What `assemble` found. `sources`: partitions of each topic with spans. `outputs`: by the kind of record.

    `reads`: the topic that the second step reads. `kept_ms`: the worker's source topic takes and keeps records that are
    so old.
    """

    sources: Mapping[str, int]
    outputs: Mapping[str, OutputTopic]
    state: OutputTopic
    reads: str
    kept_ms: float


async def prepare_assemble_topics(settings: Settings, client: Mapping[str, Any]) -> AssembleTopics:
    """Create the missing topics (KP_CREATE_TOPICS) and check all. Raises ConfigError that names topic and remedy."""

    async def prepare(admin: AIOKafkaAdminClient) -> AssembleTopics:
        if settings.create_topics:
            await create_assemble_topics(admin, settings)
        for _ in range(SETTLE_ATTEMPTS if settings.create_topics else 0):
            try:
                return _checked(settings, await look_for_assemble(admin, settings))
            except MissingTopicsError:
                await asyncio.sleep(0.2)
        return _checked(settings, await look_for_assemble(admin, settings))

    return await prepare_patiently(settings, client, prepare, CONNECT_SECONDS)


async def create_assemble_topics(admin: AIOKafkaAdminClient, settings: Settings) -> None:
    """Create what is missing, the worker's topics among it. Raises ConfigError."""
    found = await look_for_assemble(admin, settings)
    if not {settings.source_topic, settings.dead_letter_topic} <= found.topics.keys():
        await create_missing(admin, settings)
    for name in settings.span_topics:
        if name not in found.topics:
            await create(admin, settings, TopicPlan(VARIABLE, name, settings.topic_partitions, {}))
    for _ in range(SETTLE_ATTEMPTS):
        found = await look_for_assemble(admin, settings)
        if all(name in found.topics for name in settings.span_topics):
            break
        await asyncio.sleep(0.2)
    for wanted in assemble_plan(settings, found):
        if wanted.name not in found.topics:
            await create(admin, settings, wanted)


async def look_for_assemble(admin: AIOKafkaAdminClient, settings: Settings) -> Observed:
    """Look at all topics of `assemble`. Changes nothing."""
    names = [*settings.span_topics, *_own(settings), settings.source_topic, settings.dead_letter_topic]
    return await look_at(admin, names, names)


def _own(settings: Settings) -> list[str]:
    return [settings.assemble_state] if settings.spans_keyed else [settings.assemble_spans, settings.assemble_state]


def assemble_plan(settings: Settings, found: Observed) -> list[TopicPlan]:
    """Return the topics with spans, and those of `assemble` itself, as they should be, given those that exist."""
    sources = [
        TopicPlan(
            VARIABLE, name, found.topics[name].partitions if name in found.topics else settings.topic_partitions, {}
        )
        for name in settings.span_topics
    ]
    between = found.topics.get(settings.assemble_spans)
    partitions = max(each.partitions for each in sources)
    if not settings.spans_keyed and between is not None:
        partitions = between.partitions
    largest = max(found.max_bytes(name) for name in settings.span_topics) + DEAD_LETTER_OVERHEAD
    size = {"max.message.bytes": str(largest)}
    configs = {settings.assemble_spans: {**SPANS_CONFIG, **size}, settings.assemble_state: {**CHANGELOG_CONFIG, **size}}
    return [*sources, *(TopicPlan("KP_GROUP_ID", name, partitions, configs[name]) for name in _own(settings))]


def assemble_problems(settings: Settings, found: Observed) -> list[str]:
    """Return what keeps `assemble` from starting with these topics, but for missing ones."""
    problems = [
        f"the broker denies access to topic {name}: grant an ACL on it (docs/security.md)" for name in found.denied
    ]
    plans = {plan.name: plan for plan in assemble_plan(settings, found)}
    state, between = settings.assemble_state, settings.assemble_spans
    if state in found.topics and (has := found.topics[state].partitions) != (needs := plans[state].partitions):
        reads = settings.spans_topic if settings.spans_keyed else between
        problems.append(
            f"topic {state} has {has} partitions, and {reads} has {needs}: they must have equally many, because each "
            "holds the state of one. Let kp-worker assemble finish all runs, stop it, and delete "
            + (state if settings.spans_keyed else f"both {state} and {between}")
            + "; they are created anew (docs/opentelemetry.md)"
        )
    policy = found.config(state, "cleanup.policy", "compact")
    if state in found.topics and policy != "compact":
        problems.append(f"topic {state} has cleanup.policy={policy}; set cleanup.policy=compact, or open runs are lost")
    policy = found.config(between, "cleanup.policy", "delete")
    if between in found.topics and policy != "delete":
        problems.append(f"topic {between} has cleanup.policy={policy}; set cleanup.policy=delete, or spans are lost")
    return problems


def missing_topics(settings: Settings, found: Observed) -> list[str]:
    """Return the topics that are missing, each with its variable."""
    variables = {settings.source_topic: "KP_SOURCE_TOPIC", settings.dead_letter_topic: "KP_DEAD_LETTER_TOPIC"}
    variables |= {plan.name: plan.variable for plan in assemble_plan(settings, found)}
    return [
        f"{name} ({variable})"
        for name, variable in variables.items()
        if name not in found.topics and name not in found.denied
    ]


def _checked(settings: Settings, found: Observed) -> AssembleTopics:
    for problem in assemble_problems(settings, found):
        raise ConfigError(problem)
    if missing := missing_topics(settings, found):
        raise MissingTopicsError(
            f"missing on {settings.bootstrap_servers}: {', '.join(missing)}; create them (kp-worker topics shows how), "
            "let assemble do it with KP_CREATE_TOPICS=true, or correct the names"
        )
    names = {ASSEMBLED: settings.source_topic, DEAD_LETTER: settings.dead_letter_topic}
    if not settings.spans_keyed:
        names[SPANS] = settings.assemble_spans
    return AssembleTopics(
        {name: found.topics[name].partitions for name in settings.span_topics},
        {kind: _written(found, name) for kind, name in names.items()},
        _written(found, settings.assemble_state),
        settings.spans_topic if settings.spans_keyed else settings.assemble_spans,
        _kept_ms(settings.source_topic, found),
    )


def _written(found: Observed, name: str) -> OutputTopic:
    return OutputTopic(name, found.topics[name].partitions, found.max_bytes(name))


def _kept_ms(name: str, found: Observed) -> float:
    """Return how old a record may be that the topic takes, and keeps for as long again."""
    limits = [found.milliseconds(name, setting) for setting in (BEFORE, "retention.ms")]
    return min((limit / 2 for limit in limits if limit is not None), default=math.inf)

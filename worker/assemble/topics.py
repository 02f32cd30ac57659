"""The topics of `assemble`: the span topics, its own two, and the worker's source topic, to which it writes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from aiokafka.admin import AIOKafkaAdminClient

from worker.config import ConfigError, Settings
from worker.core.records import ASSEMBLED, DEAD_LETTER, SPANS
from worker.kafka.connections import prepare_patiently
from worker.kafka.rows import OutputTopic
from worker.kafka.topics import (
    BEFORE,
    CHANGELOG_CONFIG,
    DEAD_LETTER_OVERHEAD,
    MissingTopicsError,
    Observed,
    TopicPlan,
    create_missing,
    create_planned,
    no_access,
    observe,
    settled,
)

SPANS_CONFIG: Final[Mapping[str, str]] = {
    "cleanup.policy": "delete",
    # Longer than a process may be down: records here are already committed on the span topics.
    "retention.ms": "259200000",
    # The broker's time: retention must not depend on the times of spans, which may be old.
    "message.timestamp.type": "LogAppendTime",
}

SPANS_MAX_BYTES: Final = 10_485_760
"""max.message.bytes of a created span topic: above the max_message_bytes of the Collector's exporter in
docs/opentelemetry.md. Each model call repeats the run so far, so a long run's last spans are large."""


@dataclass(frozen=True, slots=True)
class AssembleTopics:
    """The topics of `assemble`, as they are."""

    sources: Mapping[str, int]  # topics of spans, with their numbers of partitions
    outputs: Mapping[str, OutputTopic]  # by kind of record
    state: OutputTopic
    reads: str  # the topic that the second step reads
    kept_ms: float  # the source topic accepts records of this age, and keeps them for as long again


async def prepare_topics(settings: Settings, client: Mapping[str, Any]) -> AssembleTopics:
    """Create the missing topics (KP_CREATE_TOPICS) and check all. Raises ConfigError that names topic and remedy."""

    async def prepare(admin: AIOKafkaAdminClient) -> AssembleTopics:
        async def check() -> AssembleTopics:
            return _checked(settings, await look_for_assemble(admin, settings))

        if not settings.create_topics:
            return await check()
        await create_assemble_topics(admin, settings)
        return await settled(check)

    return await prepare_patiently(settings, client, prepare)


async def create_assemble_topics(admin: AIOKafkaAdminClient, settings: Settings) -> None:
    """Create missing topics, including the worker's. Raises ConfigError."""
    look = partial(look_for_assemble, admin, settings)
    if not {settings.source_topic, settings.dead_letter_topic} <= (await look()).topics.keys():
        await create_missing(admin, settings)
    await create_planned(admin, settings, look, partial(_source_plans, settings))
    await create_planned(admin, settings, look, partial(assemble_plan, settings))


async def look_for_assemble(admin: AIOKafkaAdminClient, settings: Settings) -> Observed:
    """Describe all topics of `assemble`. Changes nothing."""
    names = [*settings.span_topics, *_own(settings), settings.source_topic, settings.dead_letter_topic]
    return await observe(admin, names)


def _own(settings: Settings) -> list[str]:
    return [settings.assemble_state] if settings.spans_keyed else [settings.assemble_spans, settings.assemble_state]


def assemble_plan(settings: Settings, observed: Observed) -> list[TopicPlan]:
    """Return the intended configuration of the span topics and of `assemble`'s own, given the existing ones."""
    sources = _source_plans(settings, observed)
    between = observed.topics.get(settings.assemble_spans)
    partitions = max(source.partitions for source in sources)
    if not settings.spans_keyed and between is not None:
        partitions = between.partitions
    topics = settings.span_topics  # of the largest record that one of them takes, or will take once it is created
    largest = max(observed.max_bytes(name) if name in observed.topics else SPANS_MAX_BYTES for name in topics)
    size = {"max.message.bytes": str(largest + DEAD_LETTER_OVERHEAD)}
    configs = {settings.assemble_spans: {**SPANS_CONFIG, **size}, settings.assemble_state: {**CHANGELOG_CONFIG, **size}}
    return [*sources, *(TopicPlan("KP_GROUP_ID", name, partitions, configs[name]) for name in _own(settings))]


def _source_plans(settings: Settings, observed: Observed) -> list[TopicPlan]:
    config = {"max.message.bytes": str(SPANS_MAX_BYTES)}
    partitions = {name: topic.partitions for name, topic in observed.topics.items()}
    return [
        TopicPlan("KP_SPANS_TOPIC", name, partitions.get(name, settings.topic_partitions), config)
        for name in settings.span_topics
    ]


def small_topics(settings: Settings, observed: Observed) -> list[tuple[str, str]]:
    """Return the topics that are too small for spans of long runs, each with the remedy. They do not block a start."""
    sources = [name for name in settings.span_topics if name in observed.topics]
    needed = dict.fromkeys(sources, (SPANS_MAX_BYTES, "the Collector drops a larger record"))
    if largest := max((observed.max_bytes(name) for name in sources), default=0):
        words = f"a record of spans may have {largest}, and then becomes a dead letter (too_large)"
        needed |= {name: (largest, words) for name in _own(settings) if name in observed.topics}
    return [
        (
            f"topic {name} has max.message.bytes={limit}: {words}",
            f"set max.message.bytes={size if name in sources else size + DEAD_LETTER_OVERHEAD} on {name}",
        )
        for name, (size, words) in needed.items()
        if name in observed.configs and (limit := observed.max_bytes(name)) < size
    ]


def assemble_problems(settings: Settings, observed: Observed) -> list[str]:
    """Return the problems, except missing topics, that prevent `assemble` from starting."""
    problems = list(map(no_access, observed.denied))
    plans = {plan.name: plan for plan in assemble_plan(settings, observed)}
    state, between = settings.assemble_state, settings.assemble_spans
    if state in observed.topics and (has := observed.topics[state].partitions) != (needs := plans[state].partitions):
        reads = settings.spans_topic if settings.spans_keyed else between
        problems.append(
            f"topic {state} has {has} partitions, and {reads} has {needs}: they need the same number, because each "
            "holds the state of one. Let kp-worker assemble finish all runs, stop it, and delete "
            + (state if settings.spans_keyed else f"both {state} and {between}")
            + "; they are created anew (docs/opentelemetry.md)"
        )
    for name, wanted, lost in ((state, "compact", "open runs"), (between, "delete", "spans")):
        policy = observed.config(name, "cleanup.policy", wanted)
        if name in observed.topics and policy != wanted:
            problems.append(
                f"topic {name} has cleanup.policy={policy}; set cleanup.policy={wanted}, or {lost} are lost"
            )
    return problems


def missing_topics(settings: Settings, observed: Observed) -> list[str]:
    """Return the missing topics, each with its variable."""
    variables = {settings.source_topic: "KP_SOURCE_TOPIC", settings.dead_letter_topic: "KP_DEAD_LETTER_TOPIC"}
    variables |= {plan.name: plan.variable for plan in assemble_plan(settings, observed)}
    return [
        f"{name} ({variable})"
        for name, variable in variables.items()
        if name not in observed.topics and name not in observed.denied
    ]


def _checked(settings: Settings, observed: Observed) -> AssembleTopics:
    for problem in assemble_problems(settings, observed):
        raise ConfigError(problem)
    if missing := missing_topics(settings, observed):
        raise MissingTopicsError(
            f"missing on {settings.bootstrap_servers}: {', '.join(missing)}; create them (kp-worker topics shows how), "
            "let assemble do it with KP_CREATE_TOPICS=true, or correct the names"
        )
    limits = [observed.milliseconds(settings.source_topic, setting) for setting in (BEFORE, "retention.ms")]
    names = {ASSEMBLED: settings.source_topic, DEAD_LETTER: settings.dead_letter_topic}
    if not settings.spans_keyed:
        names[SPANS] = settings.assemble_spans
    return AssembleTopics(
        {name: observed.topics[name].partitions for name in settings.span_topics},
        {kind: observed.output(name) for kind, name in names.items()},
        observed.output(settings.assemble_state),
        settings.spans_topic if settings.spans_keyed else settings.assemble_spans,
        min((limit / 2 for limit in limits if limit is not None), default=math.inf),
    )

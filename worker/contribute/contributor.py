"""The work of `contribute` on its partitions, as a member of its group (kafka/member.py)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from worker.config import ConfigError, Settings
from worker.config.redaction_rules import redaction_rules
from worker.contribute.delivery import AFTER_429_SECONDS, Delivery, DeniedError, Gateway, LateWatch
from worker.contribute.partition import Partition, limited_from
from worker.contribute.registry import RegistryClient, registry_key
from worker.contribute.unit import CONTRIBUTED, Gate
from worker.core.records import DEAD_LETTER
from worker.core.terminal import number_of
from worker.kafka.assignment import Position
from worker.kafka.cluster.connections import prepare_clients, prepare_patiently
from worker.kafka.cluster.describe import current_limit
from worker.kafka.cluster.topic_watch import TopicWatch
from worker.kafka.cluster.topics import (
    DEAD_LETTER_OVERHEAD,
    MissingTopicsError,
    Observed,
    TopicPlan,
    create_planned,
    deleted_early,
    look_at,
)
from worker.kafka.member import Claim, Member
from worker.kafka.writing.publisher import ExactlyOncePublisher
from worker.kafka.writing.rows import OutputTopic
from worker.observe.http_server import Page
from worker.observe.metrics import ContributeMetrics, process_registry, set_or_drop
from worker.version import __version__

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
    return await create_planned(
        admin, settings, partial(look_at_contributed, admin, settings), partial(contribute_plan, settings)
    )


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
    for problem in deleted_early(found, settings.accepted_topic, "posted"):
        log.warning("%s", problem)
    kinds = {CONTRIBUTED: settings.contributed, DEAD_LETTER: settings.refused}
    return {kind: found.output(name) for kind, name in kinds.items()}


class Contributor:
    """One process's share of the accepted topic: all its partitions use one gateway to the registry."""

    def __init__(
        self, settings: Settings, client: Mapping[str, Any], outputs: Mapping[str, OutputTopic],
        registry: RegistryClient, metrics: ContributeMetrics,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._client = client
        self._outputs = outputs
        self._metrics = metrics
        self._rules = redaction_rules(settings, unset="strict")
        for kind in self._rules.types:
            metrics.redactions.labels(kind)
        if self._rules.name == "reference":
            log.warning(
                "KP_REDACT_RULES=reference: secrets that the SDK's cleaner misses are posted; unset it, or set "
                "strict (docs/redaction.md)"
            )
        self.gateway = Gateway(registry, metrics, settings.contribute_rate)
        self.late = LateWatch(self.gateway, metrics, 2 * settings.contribute_timeout_seconds)

    def member(self) -> Member[Partition]:
        """Return the group member that does this work."""
        settings = self._settings
        names = {
            "KP_ACCEPTED_TOPIC": settings.accepted_topic, "KP_CONTRIBUTED_TOPIC": settings.contributed,
            "KP_REFUSED_TOPIC": settings.refused,
        }  # fmt: skip
        return Member(
            settings, self._client, self, group=settings.contribute_group, topics=[settings.accepted_topic],
            drain_seconds=2 * settings.contribute_timeout_seconds + settings.transaction_timeout_seconds,
            watch=TopicWatch(settings, self._client, names, state={settings.accepted_topic}),
            set_ready=self._metrics.ready.set,
        )  # fmt: skip

    def transactional_id(self, tp: TopicPartition) -> str:
        """Return the transactional id of the partition's producer."""
        return f"{self._settings.contribute_group}-{tp.partition}"

    async def restore(self, positions: Mapping[TopicPartition, Position], consumer: AIOKafkaConsumer) -> None:
        """Wait after a 429 for as long as the former owner would have; its time is committed with the offsets."""
        for position in positions.values():
            self._metrics.skipped.labels("lost").inc(position.lost)
            limited_at = limited_from(position.metadata)
            if limited_at is not None and (left := limited_at + AFTER_429_SECONDS - time.time()) > 0:
                log.warning("the registry answered 429 before; nothing is sent for %.0f s", left)
                self.gateway.remember_429(limited_at, min(left, AFTER_429_SECONDS))

    def open(self, claim: Claim) -> Partition:
        """Return the work on a partition."""
        settings, group = self._settings, self._settings.contribute_group
        return Partition(
            claim=claim,
            publisher=ExactlyOncePublisher(
                claim.producer, group, claim.tp, self._outputs, None, partial(current_limit, self._client)
            ),
            delivery=Delivery(self.gateway, self._metrics, self.late, group), gateway=self.gateway,
            metrics=self._metrics,
            gate=Gate(
                frozenset(settings.contribute_visibility.split(",")),
                frozenset(settings.contribute_privacy.split(",")), self._rules,
                settings.contribute_screen == "hidden",
            ), limits=settings.limits,
        )  # fmt: skip

    def problem(self, works: Collection[Partition]) -> str | None:
        """Return why nothing reaches the registry, or None."""
        if (seconds := self.gateway.blocked_seconds()) > 0:
            return f"waiting for {seconds:.0f} s after the registry answered 429"
        trouble = self.gateway.trouble
        if held := sum(each.held for each in works):
            waiting = number_of(held, "trace waits", "traces wait")
            return f"{waiting} until the registry itself answers a POST{f': {trouble}' if trouble else ''}"
        return trouble

    def measure(self, tp: TopicPartition, work: Partition, lag: int | None) -> None:
        """Update the gauges of a partition."""
        self._metrics.held.labels(str(tp.partition)).set(work.held)
        set_or_drop(self._metrics.lag, lag, str(tp.partition))

    def closed(self, tps: Collection[TopicPartition]) -> None:
        """Drop the partitions' gauges, and the trouble with their traces, which another member may post."""
        self.gateway.trouble = None
        for tp in tps:
            self._metrics.forget_partition(tp.partition)


class ContributeProcess:
    """One process (commands/run/service.py): metrics from the start, the member once prepared."""

    name = "contribute"
    phase = "checking the topics"
    finished = "every trace in flight is finished and committed"
    unfinished = "a restart looks up the traces in flight"
    wrong: tuple[type[BaseException], ...] = (ConfigError, DeniedError)

    def __init__(self, settings: Settings) -> None:
        self.registry = process_registry()
        self.pages: Mapping[str, Page] = {}
        self._settings = settings
        self._metrics = ContributeMetrics(self.registry)
        self._metrics.build.info({"version": __version__, "group": settings.contribute_group})

    async def prepare(self, until_end: AsyncExitStack) -> Member[Partition]:
        """Check the settings and the topics. Raises ConfigError."""
        settings = self._settings
        if settings.registry_url is None:
            raise ConfigError("contribute needs the registry's address: set KP_REGISTRY_URL")
        key = registry_key(settings)
        client = prepare_clients(settings)
        outputs = await prepare_topics(settings, client)
        timeout, largest = settings.contribute_timeout_seconds, settings.max_message_bytes
        registry = RegistryClient(settings.registry_url, key, timeout, self._metrics, largest)
        await until_end.enter_async_context(registry)
        contributor = Contributor(settings, client, outputs, registry, self._metrics)
        watching = asyncio.create_task(contributor.late.run())
        until_end.callback(watching.cancel)
        return contributor.member()

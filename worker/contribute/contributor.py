"""The work of `contribute` on its partitions, as a member of its group (kafka/member.py)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition

from worker.config import ConfigError, Settings
from worker.config.redaction_rules import redaction_rules
from worker.contribute.delivery import Delivery, DeniedError, Gateway, LateWatch
from worker.contribute.pace import AFTER_429_SECONDS
from worker.contribute.partition import Partition, limited_from
from worker.contribute.registry_client import RegistryClient, registry_key
from worker.contribute.topics import prepare_topics
from worker.contribute.unit import Gate
from worker.core.terminal import number_of
from worker.kafka.cluster.client import prepare_clients
from worker.kafka.cluster.describe import current_limit
from worker.kafka.cluster.topic_watch import TopicWatch
from worker.kafka.member import Claim, Member
from worker.kafka.restore import Position
from worker.kafka.writing.publisher import ExactlyOncePublisher
from worker.kafka.writing.rows import OutputTopic
from worker.observe.contribute_metrics import ContributeMetrics
from worker.observe.http_server import Page
from worker.observe.metrics import process_registry
from worker.version import __version__

log = logging.getLogger(__name__)


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
        if lag is not None:
            self._metrics.lag.labels(str(tp.partition)).set(lag)

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

"""What `contribute` does with the partitions that it has as a member of its group (kafka/member.py)."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition

from worker.config import Settings
from worker.config.redaction_rules import redaction_rules
from worker.contribute.delivery import Delivery, Gateway, LateWatch
from worker.contribute.pace import AFTER_429_SECONDS
from worker.contribute.partition import ContributePartition, limited_from
from worker.contribute.receipts import ReceiptPublisher
from worker.contribute.registry_client import RegistryClient
from worker.contribute.topics import ContributeTopics
from worker.contribute.unit import Gate
from worker.kafka.cluster.topic_watch import TopicWatch
from worker.kafka.member import Claim, Member
from worker.kafka.state.restore import Position
from worker.observe.contribute_metrics import ContributeMetrics

log = logging.getLogger(__name__)


class Contributor:
    """One process's share of the accepted topic: its partitions have one gateway to the registry."""

    def __init__(
        self,
        settings: Settings,
        client: Mapping[str, Any],
        topics: ContributeTopics,
        registry: RegistryClient,
        metrics: ContributeMetrics,
    ) -> None:
        self._settings = settings
        self._client = client
        self._topics = topics
        self._metrics = metrics
        self._rules = redaction_rules(settings, unset="strict")
        for kind in self._rules.types:
            metrics.redactions.labels(kind)
        if self._rules.name == "reference":
            log.warning(
                "KP_REDACT_RULES=reference: secrets that the SDK's cleaner does not find are posted; unset it, or set "
                "strict (docs/redaction.md)"
            )
        self.gateway = Gateway(registry, metrics, settings.contribute_rate)
        self.late = LateWatch(self.gateway, metrics, 2 * settings.contribute_timeout_seconds)

    def member(self) -> Member[ContributePartition]:
        """Return the member of the group, which does this job."""
        settings = self._settings
        names = {
            "KP_ACCEPTED_TOPIC": self._topics.accepted, "KP_CONTRIBUTED_TOPIC": settings.contributed,
            "KP_REFUSED_TOPIC": settings.refused,
        }  # fmt: skip
        return Member(
            settings,
            self._client,
            self,
            group=settings.contribute_group,
            topics=[self._topics.accepted],
            drain_seconds=2 * settings.contribute_timeout_seconds + settings.transaction_timeout_seconds,
            watch=TopicWatch(settings, self._client, names, state={self._topics.accepted}),
            set_ready=self._metrics.ready.set,
        )

    def transactional_id(self, tp: TopicPartition) -> str:
        """Return the id of the partition's producer."""
        return f"{self._settings.contribute_group}-{tp.partition}"

    async def restore(self, positions: Mapping[TopicPartition, Position], consumer: AIOKafkaConsumer) -> None:
        """Wait as long after a 429 as the former owner would have; its time is committed with the offsets."""
        for position in positions.values():
            self._metrics.skipped.labels("lost").inc(position.lost)
            limited_at = limited_from(position.metadata)
            if limited_at is not None and (left := limited_at + AFTER_429_SECONDS - time.time()) > 0:
                log.warning("the registry answered 429 before; nothing is sent for %.0f s", left)
                self.gateway.remember_429(limited_at, min(left, AFTER_429_SECONDS))

    def open(self, claim: Claim) -> ContributePartition:
        """Return the work on a partition."""
        settings, group = self._settings, self._settings.contribute_group
        return ContributePartition(
            claim=claim,
            publisher=ReceiptPublisher(self._client, claim.producer, group, claim.tp, self._topics.outputs),
            delivery=Delivery(self.gateway, self._metrics, self.late, group),
            gateway=self.gateway,
            metrics=self._metrics,
            gate=Gate(
                frozenset(settings.contribute_visibility.split(",")),
                frozenset(settings.contribute_privacy.split(",")),
                self._rules,
                settings.refusing_rules,
            ),
            limits=settings.limits,
        )

    def problem(self, works: Collection[ContributePartition]) -> str | None:
        """Return why nothing gets to the registry, or None."""
        if (seconds := self.gateway.blocked_seconds()) > 0:
            return f"waiting for {seconds:.0f} s after the registry answered 429"
        trouble = self.gateway.trouble
        if held := sum(each.held for each in works):
            return f"{held} traces wait until the registry itself answers a POST{f': {trouble}' if trouble else ''}"
        return trouble

    def measure(self, tp: TopicPartition, work: ContributePartition, lag: int | None) -> None:
        """Update the gauges of a partition."""
        self._metrics.held.labels(str(tp.partition)).set(work.held)
        if lag is not None:
            self._metrics.lag.labels(str(tp.partition)).set(lag)

    def closed(self, tps: Collection[TopicPartition]) -> None:
        """Forget the partitions' gauges, and the trouble with their traces, which another member may post."""
        self.gateway.trouble = None
        for tp in tps:
            self._metrics.forget_partition(tp.partition)

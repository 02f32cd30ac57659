"""The member of the consumer group: which partitions it has, and the work on them.

When partitions are assigned:
 1. start each partition's producer: this fences the former owner and aborts its open transaction;
 2. read the committed offsets;
 3. only then read and post.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.abc import ConsumerRebalanceListener

from worker.config import Settings
from worker.config.redaction_rules import redaction_rules
from worker.contribute.delivery import Delivery, Gateway, LateWatch, Stop, StoppedError
from worker.contribute.pace import AFTER_429_SECONDS
from worker.contribute.partition import ContributePartition, limited_from
from worker.contribute.receipts import ReceiptPublisher
from worker.contribute.registry_client import RegistryClient
from worker.contribute.topics import ContributeTopics
from worker.contribute.unit import Gate
from worker.kafka.cluster.connections import connected
from worker.kafka.cluster.topic_watch import TopicLostError, TopicWatch
from worker.kafka.state.restore import Position, read_positions
from worker.observe.contribute_metrics import ContributeMetrics

log = logging.getLogger(__name__)

GAUGE_SECONDS: Final = 1.0

NO_POLL_LIMIT_MS: Final = 2**31 - 1
"""A pause after a 429 lasts longer than Kafka's limit between two polls; heartbeats show that the process lives."""


class Contributor(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka is untyped
    """One process's share of the accepted topic. `failed` is set with the first error, `failure`."""

    def __init__(
        self,
        settings: Settings,
        client: Mapping[str, Any],
        topics: ContributeTopics,
        registry: RegistryClient,
        metrics: ContributeMetrics,
    ) -> None:
        self.failure: BaseException | None = None
        self.failed = asyncio.Event()
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
        names = {
            "KP_ACCEPTED_TOPIC": topics.accepted, "KP_CONTRIBUTED_TOPIC": settings.contributed,
            "KP_REFUSED_TOPIC": settings.refused,
        }  # fmt: skip
        self._watch = TopicWatch(settings, client, names, state={topics.accepted})
        self._gateway = Gateway(registry, metrics, settings.contribute_rate)
        self._late = LateWatch(self._gateway, metrics, 2 * settings.contribute_timeout_seconds)
        self._stop = Stop()
        self._assigned = False
        self._partitions: dict[TopicPartition, ContributePartition] = {}
        self._tasks: dict[TopicPartition, asyncio.Task[None]] = {}
        self._consumer = AIOKafkaConsumer(
            **client,
            group_id=settings.contribute_group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            session_timeout_ms=round(settings.session_timeout_seconds * 1000),
            heartbeat_interval_ms=round(settings.session_timeout_seconds * 1000 / 5),
            rebalance_timeout_ms=round(self.drain_seconds * 1000),
            max_poll_interval_ms=NO_POLL_LIMIT_MS,
        )

    @property
    def drain_seconds(self) -> float:
        """Return how long finishing what is in flight may take: two requests and a transaction."""
        return 2 * self._settings.contribute_timeout_seconds + self._settings.transaction_timeout_seconds

    def not_ready(self) -> str | None:
        """Return why nothing is posted, or None: for readiness."""
        if self.failure is not None:
            lost = isinstance(self.failure, TopicLostError)  # other messages may quote a record
            return f"failed: {self.failure if lost else type(self.failure).__name__}"
        if self._watch.problem is not None:
            return self._watch.problem
        if not self._assigned:
            return "waiting for partitions to be assigned"
        if (seconds := self._gateway.blocked_seconds()) > 0:
            return f"waiting for {seconds:.0f} s after the registry answered 429"
        if held := sum(each.held for each in self._partitions.values()):
            trouble = self._gateway.trouble
            return f"{held} traces wait until the registry itself answers a POST{f': {trouble}' if trouble else ''}"
        return self._gateway.trouble

    async def run(self) -> None:
        """Work until `stop` is called or something fails."""
        async with connected(self._settings, self._client, self._consumer, tolerant=True):
            await self._watch.start(self._fail)
            self._consumer.subscribe([self._topics.accepted], listener=self)
            watching = asyncio.create_task(self._watch_late())
            try:
                while not self.failed.is_set():
                    self._update_gauges()
                    await self._stop.sleep(GAUGE_SECONDS)
            except StoppedError:
                pass
            finally:
                watching.cancel()
                await self._watch.stop()
                await self._end_partitions()

    def stop(self) -> None:
        """Finish what is in flight, then end."""
        self._stop.set()

    async def on_partitions_revoked(self, revoked: Sequence[TopicPartition]) -> None:
        """Finish what is in flight before another member gets the partitions."""
        self._assigned = False
        await self._end_partitions()
        self._gateway.trouble = None  # it was about their traces, which another member may post

    async def on_partitions_assigned(self, assigned: Sequence[TopicPartition]) -> None:
        """Begin to work on the partitions."""
        try:
            await self._begin_partitions(sorted(assigned))
        except Exception as error:  # aiokafka only logs it
            self._fail(error)

    async def _begin_partitions(self, assigned: Sequence[TopicPartition]) -> None:
        if self._stop.is_set():
            return
        for tp in assigned:
            self._partitions[tp] = self._partition(tp)
        await asyncio.gather(*(each.publisher.start() for each in self._partitions.values()))
        positions = await self._positions([tp.partition for tp in assigned])
        for tp, partition in self._partitions.items():
            position = positions[tp.partition]
            self._begin_at(partition, position)
            self._consumer.seek(tp, position.offset)
            task = asyncio.create_task(self._work(partition))
            self._tasks[tp] = task
        self._assigned = True
        log.info("assigned partitions %s of %s", [tp.partition for tp in assigned], self._topics.accepted)

    def _partition(self, tp: TopicPartition) -> ContributePartition:
        settings = self._settings
        group = settings.contribute_group
        return ContributePartition(
            tp=tp,
            consumer=self._consumer,
            publisher=ReceiptPublisher(
                self._client,
                group,
                tp,
                self._topics.outputs,
                settings.transaction_timeout_seconds,
                owns=lambda: tp in self._consumer.assignment(),
            ),
            delivery=Delivery(self._gateway, self._metrics, self._late, group),
            gateway=self._gateway,
            metrics=self._metrics,
            gate=Gate(
                frozenset(settings.contribute_visibility.split(",")),
                frozenset(settings.contribute_privacy.split(",")),
                self._rules,
                settings.refusing_rules,
            ),
            limits=settings.limits,
        )

    async def _positions(self, partitions: Sequence[int]) -> Mapping[int, Position]:
        if not partitions:
            return {}
        settings = self._settings
        return await read_positions(
            self._client, settings.contribute_group, self._topics.accepted, partitions,
            settings.transaction_timeout_seconds,
        )  # fmt: skip

    def _begin_at(self, partition: ContributePartition, position: Position) -> None:
        partition.next_offset = position.offset
        if position.lost:
            log.error(
                "partition %d: %d records were deleted by retention before they were posted",
                partition.tp.partition, position.lost,
            )  # fmt: skip
            self._metrics.skipped.labels("lost").inc(position.lost)
        limited_at = limited_from(position.metadata)
        if limited_at is not None and (left := limited_at + AFTER_429_SECONDS - time.time()) > 0:
            log.warning("the registry answered 429 before; nothing is sent for %.0f s", left)
            self._gateway.remember_429(limited_at, min(left, AFTER_429_SECONDS))

    async def _work(self, partition: ContributePartition) -> None:
        try:
            await partition.run()
        except StoppedError:
            pass
        except Exception as error:
            self._fail(error)

    async def _watch_late(self) -> None:
        with contextlib.suppress(StoppedError):
            await self._late.run(self._stop)

    async def _end_partitions(self) -> None:
        """Stop the work, let what is in flight end, and disconnect the producers."""
        partitions, tasks = self._partitions, list(self._tasks.values())
        self._partitions, self._tasks = {}, {}
        for partition in partitions.values():
            partition.stop.set()
        await asyncio.gather(*tasks)
        for tp, partition in partitions.items():
            with contextlib.suppress(Exception):  # fenced, or the broker is gone: the committed work is committed
                await partition.publisher.stop()
            self._metrics.forget_partition(tp.partition)

    def _update_gauges(self) -> None:
        for tp, partition in self._partitions.items():
            self._metrics.held.labels(str(tp.partition)).set(partition.held)
            end = self._consumer.last_stable_offset(tp)
            if end is not None:
                lag = 0 if partition.idle else max(0, end - partition.next_offset)
                self._metrics.lag.labels(str(tp.partition)).set(lag)
        self._metrics.ready.set(int(self.not_ready() is None))

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = self._watch.explain(error)
            self.failed.set()

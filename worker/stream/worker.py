"""The worker: a member of the consumer group, from its Faust app to its partitions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Final, cast

from aiokafka import TopicPartition

from worker.config import Settings
from worker.config.control_keys import judge_keys
from worker.config.redaction_rules import cleaning, output_rules, screening
from worker.core.scorer import EvaluationConfig
from worker.embed.embedder import Embedder, ServedEmbedder
from worker.embed.pool import EmbeddingPool
from worker.kafka.cluster.errors import error_text
from worker.kafka.cluster.topic_watch import TopicWatch
from worker.kafka.cluster.topics import Layout
from worker.kafka.reading.budget import Budget
from worker.observe.metrics import Metrics
from worker.observe.status import Status
from worker.observe.tracing import NO_TRACING, Tracing
from worker.stream.assignment import Assignment
from worker.stream.faust_consumer import Hooks, KpConsumer, connect, create_app
from worker.stream.fetch_buffer import FetchBuffer
from worker.stream.gauges import Gauges
from worker.stream.partition import Context, DeadLetterLimit, take_all

log = logging.getLogger(__name__)

LEAVE_SECONDS: Final = 5.0
"""After a failure, how long the worker may take to leave its group and close its connections before it exits."""

GAUGE_SECONDS: Final = 1.0  # how often the gauges of lag, cache size and stream time are updated


DRAIN_SECONDS: Final = 5.0
"""How long a drain waits for a model elsewhere: well below KP_SHUTDOWN_TIMEOUT_SECONDS, as the group waits for it."""


class Worker:
    """One member of the group, and its partitions. The first error sets `failure` and `failed`: it must then stop."""

    def __init__(
        self,
        settings: Settings,
        client: Mapping[str, Any],
        layout: Layout,
        embedder: Embedder | None,
        metrics: Metrics,
        tracing: Tracing = NO_TRACING,
        status: Status | None = None,
    ) -> None:
        self.failure: BaseException | None = None
        self.failed = asyncio.Event()
        self._settings = settings
        self._metrics = metrics
        self._status = status
        self._stopping = asyncio.Event()
        self._assigned = False
        self._pool: EmbeddingPool | None = None
        if embedder is not None:
            self._pool = EmbeddingPool(embedder, settings.embed_remembered, settings.most_in_flight)
        self._service = embedder if isinstance(embedder, ServedEmbedder) else None
        budget = Budget(settings.memory_budget_bytes)
        self._buffer = FetchBuffer(budget.records, metrics.turn_wait.observe)
        share = settings.dead_letter_breaker_share
        rules = output_rules(settings)
        for kind in () if rules is None else rules.types:
            metrics.redactions.labels(kind)
        context = Context(
            buffer=self._buffer,
            pool=self._pool,
            metrics=metrics,
            evaluation=EvaluationConfig(
                settings.limits,
                settings.event_time,
                settings.output_embedding,
                clean=cleaning(settings, rules),
                clean_rejected=settings.redact == "all",
                screen=screening(settings),
                judges=judge_keys(settings),
            ),
            latency_budget_seconds=settings.latency_budget_seconds,
            commit_interval_seconds=settings.commit_interval_seconds,
            dead_letter_limit=DeadLetterLimit(share, settings.dead_letter_breaker_window) if share else None,
            tracing=tracing,
            status=status,
            drain_seconds=None if self._service is None else DRAIN_SECONDS,
            probes=None if self._service is None else self._service.probes,
            fail=self._partition_failed,
        )
        self._assignment = Assignment(
            settings,
            client,
            layout,
            context,
            generation=lambda: self.app.consumer_generation_id,
            commit_offset=self._commit_offset,
        )
        changelog = None if embedder is None and settings.verdict_key_file is None else settings.changelog
        self._topics = TopicWatch(
            settings, client, settings.topics,
            state={settings.source_topic, *([changelog] if changelog else [])},
            cache=changelog,
        )  # fmt: skip
        self._gauges = Gauges(metrics, settings.source_topic, self._buffer, self._pool, self._service)
        take = partial(take_all, self._buffer, self._pool, self._assignment.partitions)
        hooks = Hooks(
            settings, client, self._buffer, budget, take, self._drain, self._assignment.next_offsets, self._fail
        )  # fmt: skip
        self.app = create_app(hooks)
        connect(self.app.on_rebalance_complete, self._on_assigned)
        connect(self.app.on_partitions_revoked, self._on_revoked)

    @property
    def _consumer(self) -> KpConsumer:
        return cast("KpConsumer", self.app.consumer)

    async def _commit_offset(self, source: TopicPartition, offset: int, metadata: str) -> None:
        await self._consumer.commit_offset(source, offset, metadata)

    # -- health

    def stuck(self) -> str | None:
        """Return what hangs, or None: for liveness."""
        busy = 0.0 if self._pool is None else self._pool.busy_seconds()
        if busy > self._settings.stuck_seconds:
            return f"one embedding has been running for {busy:.0f} s (KP_STUCK_SECONDS)"
        return None

    def not_ready(self) -> str | None:
        """Return why records do not flow yet, or None: for readiness."""
        if self.failure is not None:
            return f"failed: {self.failure!r}"
        if self._topics.problem is not None:
            return self._topics.problem
        if not self._assigned:
            return "waiting for partitions to be assigned and restored"
        if self._service is not None and (problem := self._service.problem()) is not None:
            return problem
        return None

    # -- rebalances

    async def _drain(self) -> None:
        """Wait until every partition has committed the records it took; called while no records flow."""
        self._lose_readiness()
        await self._assignment.drain()

    async def _on_revoked(self, sender: Any, revoked: Any, **kwargs: Any) -> None:
        self._lose_readiness()

    def _lose_readiness(self) -> None:
        self._assigned = False
        self._metrics.ready.set(0)

    async def _on_assigned(self, sender: Any, **kwargs: Any) -> None:
        """Faust awaits this before it seeks to the committed offsets and lets records flow."""
        try:
            await self._assign()
        except Exception as error:
            self._fail(error)
            raise

    async def _assign(self) -> None:
        started = time.perf_counter()
        await self._consumer.halt()
        if self._consumer.revoked():
            return  # the group is rebalancing again, and another worker may have these partitions already
        generation = self.app.consumer_generation_id
        topic = self._settings.source_topic
        mine = sorted(tp.partition for tp in self.app.consumer.assignment() if tp.topic == topic)
        new = await self._assignment.change(mine, generation)
        if generation != self.app.consumer_generation_id:
            return  # the group is rebalancing again; the next call finds partitions of an older generation
        self._assignment.confirm(generation)
        self._buffer.assign(mine)
        self._assigned = True
        self._metrics.ready.set(1)
        self._metrics.rebalances.inc()
        self._metrics.partitions.set(len(mine))
        log.info(
            "assigned partitions %s of %s (generation %s): %d restored, %d kept, in %.2f s",
            mine, topic, generation, new, len(mine) - new, time.perf_counter() - started,
        )  # fmt: skip

    def _partition_failed(self, partition: int, error: BaseException) -> None:
        log.error("partition %d: %s", partition, error_text(error))
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = self._topics.explain(error)
            self.failed.set()

    # -- start and stop

    async def run(self) -> None:
        """Work until `stop` is called or something fails; leave the group, without a failure after the last commit."""
        working = asyncio.create_task(self._work())
        ends = [asyncio.create_task(event.wait()) for event in (self.failed, self._stopping)]
        await asyncio.wait({working, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if working.done() and (error := working.exception()) is not None:
            self._fail(error)
        for task in (working, *ends):
            task.cancel()
        if self.failure is None:
            await self._leave()
        else:
            with contextlib.suppress(TimeoutError):  # the process exits anyway
                async with asyncio.timeout(LEAVE_SECONDS):
                    await self._leave()

    def stop(self) -> None:
        """End `run`."""
        self._stopping.set()

    async def _work(self) -> None:
        """Join the group, and update the gauges until cancelled, or until Faust crashes."""
        await self._topics.start(self._fail)
        self.app.finalize()
        self.app.topics.add(self.app.topic(self._settings.source_topic))
        await self.app.start()
        while not self.app.crashed:
            self._gauges.update(self._assignment.partitions, self._consumer)
            self._metrics.ready.set(self.not_ready() is None)
            if self._status is not None:
                self._status.tick(time.monotonic())
            await asyncio.sleep(GAUGE_SECONDS)
        self._fail(self.app.crash_reason or RuntimeError("Faust stopped without a reason"))

    async def _leave(self) -> None:
        await self._topics.stop()
        if self.failure is not None:
            await self._assignment.close()
        await self.app.stop()
        await self._assignment.close()
        if self._pool is not None:
            self._pool.close()

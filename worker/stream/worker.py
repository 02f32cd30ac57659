"""The worker: a member of the consumer group, made of its parts by `build_worker`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from aiokafka import TopicPartition

from worker.config import Settings
from worker.embed.embedder import Embedder, ServedEmbedder
from worker.embed.pool import EmbeddingPool
from worker.kafka.assignment import Assignment
from worker.kafka.cluster.topic_watch import Failure, TopicWatch
from worker.kafka.cluster.topics import Layout
from worker.kafka.reading.budget import Budget
from worker.kafka.writing.publisher import Publisher
from worker.observe.metrics import Metrics
from worker.observe.status import Status
from worker.observe.tracing import Tracing
from worker.stream.faust_consumer import Membership
from worker.stream.fetch_buffer import FetchBuffer
from worker.stream.gauges import Gauges
from worker.stream.partition import Partition, take_all
from worker.stream.partition_factory import PartitionFactory

log = logging.getLogger(__name__)

LEAVE_SECONDS: Final = 5.0
"""After a failure, how long the worker may take to leave its group and close its connections before it exits."""

GAUGE_SECONDS: Final = 1.0  # how often the gauges of lag, cache size and stream time are updated


def build_worker(
    settings: Settings,
    client: Mapping[str, Any],
    layout: Layout,
    embedder: Embedder | None,
    metrics: Metrics,
    tracing: Tracing,
    status: Status | None,
) -> Worker:
    """Build the parts of a worker, and the worker."""
    changelog = None if embedder is None and settings.verdict_key_file is None else settings.changelog
    topics = TopicWatch(
        settings, client, settings.topics,
        state={settings.source_topic, *([changelog] if changelog else [])},
        cache=changelog,
    )  # fmt: skip
    failure = Failure(topics)
    pool = None
    if embedder is not None:
        pool = EmbeddingPool(embedder, settings.embed_remembered, settings.most_in_flight)
    service = embedder if isinstance(embedder, ServedEmbedder) else None
    budget = Budget(settings.memory_budget_bytes)
    buffer = FetchBuffer(budget.records, metrics.turn_wait.observe)
    membership = Membership(settings, client, buffer, budget, failure)
    factory = PartitionFactory(
        settings, client, layout, membership, failure, buffer, pool, service, metrics, tracing, status
    )
    assignment = Assignment(settings, client, settings.group_id, factory)
    gauges = Gauges(metrics, settings.source_topic, membership, buffer, pool, service)
    return Worker(settings, topics, failure, membership, assignment, buffer, pool, service, gauges, metrics, status)


class Worker:
    """One member of the group, and its partitions. The first error sets `failure` and `failed`: it must then stop."""

    def __init__(
        self,
        settings: Settings,
        topics: TopicWatch,
        failure: Failure,
        membership: Membership,
        assignment: Assignment[Publisher, Partition],
        buffer: FetchBuffer,
        pool: EmbeddingPool | None,
        service: ServedEmbedder | None,
        gauges: Gauges,
        metrics: Metrics,
        status: Status | None,
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._failure = failure
        self.failed = failure.event
        self._membership = membership
        self._assignment = assignment
        self._buffer = buffer
        self._pool = pool
        self._service = service
        self._gauges = gauges
        self._metrics = metrics
        self._status = status
        self._stopping = asyncio.Event()
        self._assigned = False

    @property
    def failure(self) -> BaseException | None:
        """The first error."""
        return self._failure.error

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

    # -- records and rebalances, as the membership calls for them

    async def take_all(self) -> None:
        """Let the partitions take records until the buffer is empty."""
        await take_all(self._buffer, self._pool, self._assignment.owned)

    def next_offsets(self) -> Mapping[TopicPartition, int]:
        """Return the next offset to read of each partition."""
        return {tp: partition.committed for tp, partition in self._assignment.owned.items()}

    async def drain(self) -> None:
        """Wait until every partition has committed the records it took; called while no records flow."""
        self._lose_readiness()
        await self._assignment.drain()

    def on_revoked(self) -> None:
        """Note that a rebalance has begun."""
        self._lose_readiness()

    def _lose_readiness(self) -> None:
        self._assigned = False
        self._metrics.ready.set(0)

    async def on_assigned(self) -> None:
        """Take over the assigned partitions, before records flow."""
        try:
            await self._assign()
        except Exception as error:
            self._failure.set(error)
            raise

    async def _assign(self) -> None:
        started = time.perf_counter()
        membership = self._membership
        await membership.consumer.halt()
        if membership.consumer.revoked():
            return  # the group is rebalancing again, and another worker may have these partitions already
        generation = membership.generation
        mine = membership.assigned()
        kept = self._kept(mine, generation)
        for tp in self._assignment.owned.keys() - set(mine):
            self._metrics.forget_partition(tp.partition)
        if not await self._assignment.change(mine, lambda: generation == membership.generation, kept):
            return  # the group is rebalancing again; the next call finds partitions of an older generation
        membership.confirm(mine, generation)
        numbers = [tp.partition for tp in mine]
        self._buffer.assign(numbers)
        self._assigned = True
        self._metrics.ready.set(1)
        self._metrics.rebalances.inc()
        self._metrics.partitions.set(len(mine))
        log.info(
            "assigned partitions %s of %s (generation %s): %d restored, %d kept, in %.2f s",
            numbers, self._settings.source_topic, generation, len(mine) - len(kept), len(kept),
            time.perf_counter() - started,
        )  # fmt: skip

    def _kept(self, mine: Sequence[TopicPartition], generation: int) -> set[TopicPartition]:
        """Return the partitions that need no restore: no other worker had them meanwhile.

        They were in the previous generation, and have no uncommitted records: their state equals the changelog.
        """
        if self._membership.confirmed != generation - 1:
            return set()
        owned = self._assignment.owned
        return {tp for tp in mine if tp in owned and not owned[tp].failed and not len(owned[tp])}

    # -- start and stop

    async def run(self) -> None:
        """Work until `stop` is called or something fails; leave the group, without a failure after the last commit."""
        working = asyncio.create_task(self._work())
        ends = [asyncio.create_task(event.wait()) for event in (self.failed, self._stopping)]
        await asyncio.wait({working, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if working.done() and (error := working.exception()) is not None:
            self._failure.set(error)
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
        await self._topics.start(self._failure.set)
        await self._membership.join(self)
        while (crash := self._membership.crash()) is None:
            self._gauges.update(self._assignment.owned.values())
            self._metrics.ready.set(self.not_ready() is None)
            if self._status is not None:
                self._status.tick(time.monotonic())
            await asyncio.sleep(GAUGE_SECONDS)
        self._failure.set(crash)

    async def _leave(self) -> None:
        await self._topics.stop()
        if self.failure is not None:
            await self._close()
        await self._membership.leave()
        await self._close()
        if self._pool is not None:
            self._pool.close()

    async def _close(self) -> None:
        """Close every partition. They stay owned: records that still come are dropped."""
        await asyncio.gather(*(partition.close() for partition in self._assignment.owned.values()))

"""The worker: a member of the consumer group, made of its parts."""

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

from aiokafka import TopicPartition

from worker.config import ConfigError, Settings
from worker.config.keys import judge_keys
from worker.config.redaction_rules import output_rules
from worker.core.records import EmbedderIdentity
from worker.embed.embedder import Embedder, ModelError, ServiceUnavailableError
from worker.embed.http_embedder import HttpEmbedder
from worker.embed.load import load_for_worker, slow_runtime
from worker.embed.pool import EmbeddingPool
from worker.kafka.assignment import Assignment
from worker.kafka.budget import Budget
from worker.kafka.connections import prepare_clients
from worker.kafka.topic_watch import Failure, TopicWatch
from worker.kafka.topics import Layout
from worker.observe.http_server import Page
from worker.observe.metrics import Metrics, process_registry
from worker.observe.status import Status
from worker.observe.tracing import Tracing, start_tracing
from worker.stream.faust_consumer import Membership
from worker.stream.fetch_buffer import FetchBuffer
from worker.stream.gauges import Gauges
from worker.stream.partition import Partition
from worker.stream.partition_factory import PartitionFactory, prepare_layout
from worker.version import __version__

log = logging.getLogger(__name__)

YIELD_SECONDS: Final = 0.002  # how long records are taken before other tasks run (heartbeats, HTTP, commits)


class Worker:
    """One member of the group, and its partitions. The first error sets `failure` and `failed`: it must then stop."""

    def __init__(
        self,
        settings: Settings,
        client: Mapping[str, Any],
        layout: Layout,
        embedder: Embedder | None,
        metrics: Metrics,
        tracing: Tracing,
        status: Status | None,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._status = status
        changelog = None if embedder is None and settings.verdict_key_file is None else settings.changelog
        self._topics = TopicWatch(
            settings, client, settings.topics,
            state={settings.source_topic, *([changelog] if changelog else [])},
            cache=changelog,
        )  # fmt: skip
        self._failure = Failure(self._topics)
        self.failed = self._failure.event
        self._pool = None if embedder is None else EmbeddingPool(embedder, settings.embed_remembered)
        self._service = embedder if isinstance(embedder, HttpEmbedder) else None
        budget = Budget(settings.memory_budget_bytes)
        self._buffer = FetchBuffer(budget.records, metrics.turn_wait.observe)
        self._membership = Membership(settings, client, self._buffer, budget, self._failure)
        factory = PartitionFactory(
            settings, client, layout, self._membership, self._failure, self._buffer, self._pool, self._service, metrics,
            tracing, status,
        )  # fmt: skip
        self._assignment = Assignment(settings, client, settings.group_id, factory)
        self._gauges = Gauges(
            metrics, settings.source_topic, self._topics, self._membership, self._buffer, self._pool, self._service
        )
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
        """Let the partitions take their records until none waits; the buffer says whose turn it is."""
        buffer, partitions = self._buffer, self._assignment.owned
        yields = time.perf_counter() + YIELD_SECONDS
        tps: dict[int, TopicPartition] = {}  # to make one for each record would cost a microsecond
        last: Partition | None = None
        while buffer:
            if self._pool is not None:
                await self._pool.admission()
            record = buffer.next()
            turn = None
            if record is not None:
                tp = tps.get(record.partition)
                if tp is None:
                    tp = tps[record.partition] = TopicPartition(record.topic, record.partition)
                turn = partitions[tp]  # looked up each time: a rebalance may have replaced it
            if last is not None and last is not turn:
                last.turn_ended()
            last = turn
            if record is None or turn is None:
                if buffer:  # all partitions with waiting records are full: one must commit first
                    await buffer.released()
                continue
            turn.take(record)
            if time.perf_counter() > yields:
                await asyncio.sleep(0)
                yields = time.perf_counter() + YIELD_SECONDS
        for partition in partitions.values():
            partition.turn_ended()

    def next_offsets(self) -> Mapping[TopicPartition, int]:
        """Return the next offset to read of each partition."""
        return {tp: partition.committed for tp, partition in self._assignment.owned.items()}

    async def drain(self) -> None:
        """Wait until every partition has committed the records it took; called while no records flow."""
        self.on_revoked()
        await self._assignment.drain()

    def on_revoked(self) -> None:
        """Note that a rebalance has begun."""
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
                async with asyncio.timeout(5.0):  # to leave the group and close connections
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
            await asyncio.sleep(1.0)
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


SERVICE_SECONDS: Final = 5.0  # pause before an embedding service that does not answer at the start is asked again

START_CHECKS: Final[Mapping[str, Callable[[Settings], object]]] = {
    "judging": judge_keys,
    "redaction": output_rules,
}
"""What is read at the start beside the settings themselves; the names are the doctor's. Each raises ConfigError."""


class WorkerProcess:
    """The parts of one process (commands/run.py): first metrics and status page, then the worker."""

    name = ""
    finished = "every record taken is committed"
    unfinished = "uncommitted records will be read again"
    wrong: tuple[type[BaseException], ...] = ()

    def __init__(self, settings: Settings, load: Callable[[Settings], Embedder | None] = load_for_worker) -> None:
        self.phase = "loading the model"
        self._settings = settings
        self._load = load
        self._metrics = Metrics(process_registry(), settings.scoring_profiles())
        self.registry = self._metrics.registry
        slow = slow_runtime(settings.embedder, settings.model)
        self._status = Status(settings, self._metrics, self._not_ready, slow) if settings.status_page else None
        self.pages: Mapping[str, Page] = {} if self._status is None else self._status.pages()
        self._worker: Worker | None = None

    def _not_ready(self) -> str | None:
        return self.phase if self._worker is None else self._worker.not_ready()

    async def prepare(self, until_end: AsyncExitStack) -> Worker:
        """Load the model and check the topics. Raises ConfigError."""
        settings = self._settings
        for check in START_CHECKS.values():
            check(settings)  # errors are reported before the model is loaded
        tracing = start_tracing(settings)
        until_end.push_async_callback(asyncio.to_thread, tracing.stop)
        client = prepare_clients(settings)
        if settings.embedder != "none":
            log.info("loading the model")
        try:
            embedder = await self._loaded()
        except ModelError as error:
            raise ConfigError(str(error)) from error
        identity = None if embedder is None else embedder.identity
        self._describe(identity)
        self.phase = "checking the topics"
        layout = await prepare_layout(settings, client, identity)
        self._worker = Worker(settings, client, layout, embedder, self._metrics, tracing, self._status)
        # What the start has made (90,000 objects) lives to the end. A full collection that looks through it stops the
        # process for 55 ms.
        gc.collect()
        gc.freeze()
        return self._worker

    async def _loaded(self) -> Embedder | None:
        """Load the model; wait for a service that does not answer. Raises ModelError."""
        while True:
            try:
                return await asyncio.to_thread(self._load, self._settings)
            except ServiceUnavailableError as error:
                self._metrics.service_down.set(1)
                self.phase = f"waiting for the embedding service at {error}"
                log.warning("%s; trying again in %g s", self.phase, SERVICE_SECONDS)
                await asyncio.sleep(SERVICE_SECONDS)

    def _describe(self, identity: EmbedderIdentity | None) -> None:
        key = "none" if identity is None else identity.key()
        self._metrics.build.info({"version": __version__, "group": self._settings.group_id, "embedder": key})
        log.info("embedder: %s", "none (novelty 0.5)" if identity is None else f"{identity.runtime} {key}")

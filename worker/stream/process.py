"""The worker process: Faust app, agent, assignment and revocation, health, start and stop.

Lives here: which lanes exist and when they start, drain and close; what makes the process end, and with what code. Must
not live here: how a record is scored (lane.py, pipeline.py), fetched (faust_io.py), published (publisher.py).

Exit code 0: asked to stop (SIGTERM, SIGINT), everything that was taken is committed. 1: something failed; nothing that
was not committed counts, the supervisor's restart goes on from there. 2: the settings or the topics are wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, NoReturn, cast

import faust
from aiokafka import AIOKafkaProducer, TopicPartition

from worker.config import ConfigError, Settings
from worker.core.changelog import Restored
from worker.core.passes import without_embedder
from worker.core.pipeline import embedding_bytes
from worker.embed.embedder import Embedder, EmbeddingPool, ModelError
from worker.embed.load import load_configured, new_scorer
from worker.kafka.budget import Budget
from worker.kafka.client import client_arguments
from worker.kafka.describe import current_limit
from worker.kafka.errors import error_text
from worker.kafka.producer import idempotent_producer
from worker.kafka.publisher import AtLeastOncePublisher, ExactlyOncePublisher, Publisher
from worker.kafka.restore import Position, read_positions, restore
from worker.kafka.topics import Layout, prepare_topics
from worker.observe import logs
from worker.observe.http_server import HttpServer
from worker.observe.metrics import Metrics, lag_seconds, process_registry
from worker.observe.status_page import Status
from worker.observe.tracing import Tracing, start_tracing
from worker.stream.dead_letter_limit import Breaker
from worker.stream.faust_consumer import Hooks, KpConsumer, connect, create_app
from worker.stream.fetch_buffer import Intake
from worker.stream.partition_task import Lane, Rules
from worker.version import __version__

log = logging.getLogger(__name__)

YIELD_SECONDS: Final = 0.002
"""Longest stretch of admitting records before other tasks (heartbeats, HTTP, commits) get their turn."""

LEAVE_SECONDS: Final = 5.0
"""After a failure, how long the worker tries to leave its group and close its connections before it just exits."""

GAUGE_SECONDS: Final = 1.0
"""How often lag, cache size and stream time are brought up to date."""

EmbedderLoader = Callable[[Settings], Embedder | None]


class Worker:
    """One worker: member of the group, with a lane for each assigned partition."""

    def __init__(
        self,
        settings: Settings,
        client: Mapping[str, Any],
        layout: Layout,
        embedder: Embedder | None,
        metrics: Metrics,
        tracing: Tracing | None = None,
        status: Status | None = None,
    ) -> None:
        self._settings = settings
        self._client = client
        self._extra_bytes = extra_output_bytes(settings, embedder)
        self._layout = layout
        self._metrics = metrics
        self._status = status
        self._pool = None if embedder is None else EmbeddingPool(embedder, settings.embed_remembered)
        self._slots = asyncio.Semaphore(settings.embed_in_flight)
        self._freed = asyncio.Event()
        self._budget = Budget(settings.memory_budget_bytes)
        self._intake = Intake(self._budget.records)
        self._lanes: dict[int, Lane] = {}
        self._room = asyncio.Event()
        self._shared_producer: AIOKafkaProducer | None = None
        self._assigned = False
        self.failure: BaseException | None = None
        self.failed = asyncio.Event()
        self._rules = Rules(
            replace(settings.limits, max_bytes=layout.max_message_bytes),
            settings.event_time,
            settings.latency_budget_seconds,
            settings.commit_interval_seconds,
            Breaker(settings.dead_letter_breaker_share, settings.dead_letter_breaker_window)
            if settings.dead_letter_breaker_share
            else None,
            tracing,
            settings.output_embedding,
        )
        hooks = Hooks(settings, client, self._intake, self._budget, self._drain, self._next_offsets, self._fail)
        self.app = create_app(hooks)
        topic = self.app.topic(settings.source_topic, key_serializer="raw", value_serializer="raw")
        self.app.agent(topic, name="score")(self._agent)
        connect(self.app.on_rebalance_complete, self._on_assigned)
        connect(self.app.on_partitions_revoked, self._on_revoked)

    @property
    def _consumer(self) -> KpConsumer:
        return cast("KpConsumer", self.app.consumer)

    # -- health

    def stuck(self) -> str | None:
        """Say what hangs, or None: for liveness."""
        busy = 0.0 if self._pool is None else self._pool.busy_seconds()
        if busy > self._settings.stuck_seconds:
            return f"one embedding has been running for {busy:.0f} s (KP_STUCK_SECONDS)"
        return None

    def not_ready(self) -> str | None:
        """Say what is missing before records flow, or None: for readiness."""
        if self.failure is not None:
            return f"failed: {self.failure!r}"
        return None if self._assigned else "waiting for an assignment and its restore"

    # -- the agent

    async def _agent(self, stream: faust.StreamT[Any]) -> None:
        async for _ in cast("faust.Stream[Any]", stream).noack().events():
            await self._admit_waiting()

    async def _admit_waiting(self) -> None:
        """Admit records, one partition after the other, until none waits.

        A partition keeps its turn while its records need no embedding to be waited for: its cache, which every trace is
        compared with, then stays in the CPU's (25 us a trace instead of 50, measured with four partitions).
        """
        turn_ends = time.perf_counter() + YIELD_SECONDS
        stay = False
        while self._intake:
            if self._pool is not None:
                await self._slots.acquire()
                await self._until_needed(self._pool)
            record = self._intake.next(self._accepts, stay=stay)
            if record is None:
                self._release_slot()
                if self._intake:  # all lanes with waiting records are full: one must commit first
                    self._room.clear()
                    await self._room.wait()
                continue
            embedding = self._lanes[record.partition].take(record)
            stay = embedding is None
            if embedding is None:
                self._release_slot()
            else:
                embedding.add_done_callback(lambda _: self._release_slot())
            if time.perf_counter() > turn_ends:
                await asyncio.sleep(0)
                stay = False
                turn_ends = time.perf_counter() + YIELD_SECONDS
        for lane in self._lanes.values():
            lane.hurry()

    async def _until_needed(self, pool: EmbeddingPool) -> None:
        """Leave the next record in the queue until the embedder is nearly done with what it has.

        A trace's evaluation begins when it is taken; taken earlier, it would only wait.
        """
        pause = pool.pause()
        if pause > 0:
            self._freed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._freed.wait()

    def _accepts(self, partition: int) -> bool:
        lane = self._lanes.get(partition)
        return lane is not None and lane.has_room()

    def _release_slot(self) -> None:
        if self._pool is not None:
            self._slots.release()
            self._freed.set()

    # -- assignment and revocation

    def _next_offsets(self) -> dict[TopicPartition, int]:
        topic = self._settings.source_topic
        return {TopicPartition(topic, partition): lane.committed for partition, lane in self._lanes.items()}

    async def _drain(self) -> None:
        """Wait until every lane has committed what it took; called with the flow stopped."""
        self._assigned = False
        self._metrics.ready.set(0)
        self._room.set()
        await asyncio.gather(*(lane.drain() for lane in self._lanes.values()))

    async def _on_revoked(self, sender: Any, revoked: Any, **kwargs: Any) -> None:
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
        """Close the lanes that are gone, restore those that are new.

        A lane is kept when it took part in the generation just before this one and has nothing on its way: its state
        is then what the changelog holds. Any other is rebuilt, because someone else may have worked on the partition.

        For the new ones, this order carries the guarantee:
         1. start the producer (exactly once: fences the former owner and ends its open transaction);
         2. take the committed offset;
         3. read the changelog to its end, entries below that offset are the cache;
         4. only then may the first record flow.
        """
        started = time.perf_counter()
        await self._consumer.halt()
        generation = self.app.consumer_generation_id
        topic = self._settings.source_topic
        mine = sorted(tp.partition for tp in self.app.consumer.assignment() if tp.topic == topic)
        kept = {
            partition
            for partition, lane in self._lanes.items()
            if partition in mine and not lane.failed and not len(lane) and lane.generation == generation - 1
        }
        gone = [partition for partition in self._lanes if partition not in kept]
        await asyncio.gather(*(self._lanes.pop(partition).close() for partition in gone))
        for partition in set(gone) - set(mine):
            self._metrics.forget_partition(partition)

        new = [partition for partition in mine if partition not in kept]
        if mine and mine[-1] >= self._layout.source_partitions:  # the source topic has gained partitions
            self._layout = await prepare_topics(self._settings, self._client, self._extra_bytes)
        publishers = {partition: self._publisher(partition) for partition in new}
        try:
            await asyncio.gather(*(publisher.start() for publisher in publishers.values()))  # 1
            positions = await self._positions(new)  # 2
            restored = await self._restore(positions)  # 3
        except BaseException:
            await asyncio.gather(*(publisher.stop() for publisher in publishers.values()), return_exceptions=True)
            raise
        for partition in new:
            self._lanes[partition] = self._lane(
                partition, publishers[partition], positions[partition], restored[partition]
            )
            self._lanes[partition].start()
        if generation != self.app.consumer_generation_id:
            return  # the group is rebalancing again; the next call finds lanes of an older generation and rebuilds
        for lane in self._lanes.values():
            lane.generation = generation
        self._intake.assign(mine)
        self._assigned = True
        self._metrics.ready.set(1)
        self._metrics.rebalances.inc()
        self._metrics.partitions.set(len(mine))
        log.info(
            "assigned partitions %s of %s (generation %s): %d restored, %d kept, in %.2f s",
            mine, topic, generation, len(new), len(kept), time.perf_counter() - started,
        )  # fmt: skip

    async def _positions(self, partitions: list[int]) -> dict[int, Position]:
        if not partitions:
            return {}
        settings = self._settings
        positions = await read_positions(
            self._client, settings.group_id, settings.source_topic, partitions, settings.transaction_timeout_seconds
        )
        for partition, position in positions.items():
            if position.lost:
                self._metrics.lost.inc(position.lost)
                log.error(
                    "partition %d: %d records that were not scored yet are gone from %s (retention, or deleted); "
                    "going on at offset %d",
                    partition,
                    position.lost,
                    settings.source_topic,
                    position.offset,
                )
        return positions

    async def _restore(self, positions: dict[int, Position]) -> dict[int, Restored]:
        if self._pool is None:  # without an embedder there are no entries, and an embedder's must not be touched
            return {
                partition: Restored(current=without_embedder(position.found()))
                for partition, position in positions.items()
            }
        if not positions:
            return {}
        started = time.perf_counter()
        identity = self._pool.identity
        restored = await restore(
            self._client,
            self._settings.changelog,
            positions,
            identity.key(),
            identity.dimensions,
            self._settings.cache_max_elements,
        )
        for result in restored.values():
            self._metrics.restored_entries.inc(len(result.entries))
            for cause in ("corrupt", "other_model"):
                self._metrics.skipped_entries.labels(cause).inc(result.skipped[cause])
        self._metrics.restore.observe(time.perf_counter() - started)
        return restored

    def _publisher(self, partition: int) -> Publisher:
        source = TopicPartition(self._settings.source_topic, partition)
        changelog = self._layout.changelog
        if self._settings.delivery == "exactly_once":
            return ExactlyOncePublisher(
                self._client,
                self._settings.group_id,
                source,
                self._layout.outputs,
                changelog,
                self._settings.transaction_timeout_seconds,
                partial(current_limit, self._client),
            )
        if self._shared_producer is None:
            raise RuntimeError("this is a bug: at_least_once without its producer")
        return AtLeastOncePublisher(
            self._shared_producer,
            source,
            self._layout.outputs,
            changelog,
            self._consumer.commit_offset,
            self._settings.transaction_timeout_seconds,
            partial(current_limit, self._client),
        )

    def _lane(self, partition: int, publisher: Publisher, position: Position, restored: Restored) -> Lane:
        scorer = new_scorer(self._settings, None if self._pool is None else self._pool.identity)
        scorer.restore(restored.cache(), position.stream_time_ms)
        return Lane(
            partition,
            scorer,
            publisher,
            self._pool,
            self._rules,
            self._metrics,
            replay=restored.replay,
            next_offset=position.offset,
            waiting=self._intake.__len__,
            on_room=self._room.set,
            on_failure=partial(self._lane_failed, partition),
            on_committed=None if self._status is None else self._status.committed,
            source_pass=restored.current,
            housekeeping=restored.housekeeping,
            give_back=self._budget.records.give_back,
        )

    def _lane_failed(self, partition: int, error: BaseException) -> None:
        log.error("partition %d: %s", partition, error_text(error))
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
            self.failed.set()

    # -- start and stop

    async def start(self) -> None:
        """Join the group; returns when the first assignment is restored."""
        if self._settings.delivery == "at_least_once":
            self._shared_producer = idempotent_producer(self._client, self._settings.transaction_timeout_seconds)
            await self._shared_producer.start()
        self.app.finalize()
        await self.app.start()

    async def watch(self) -> None:
        """Keep the gauges up to date, until cancelled or Faust crashes."""
        while not self.app.crashed:
            for partition, lane in self._lanes.items():
                label = str(partition)
                cache = lane.scorer.cache
                self._metrics.cache_entries.labels(label).set(len(cache))
                if lane.scorer.stream_time_ms is not None:
                    self._metrics.stream_time.labels(label).set(lane.scorer.stream_time_ms / 1000)
                oldest = lane.oldest() or self._intake.oldest(partition)
                source = TopicPartition(self._settings.source_topic, partition)
                lag = self._consumer.lag(source, lane.committed, idle=oldest is None)
                if lag is not None:
                    self._metrics.lag.labels(label).set(lag)
                    age = lag_seconds(lag, None if oldest is None else oldest.timestamp_ms, time.time())
                    if age is not None:
                        self._metrics.lag_seconds.labels(label).set(age)
                self._metrics.committed_offset.labels(label).set(lane.committed)
                self._metrics.cache_evictions.labels("expired").inc(cache.expired)
                self._metrics.cache_evictions.labels("capacity").inc(cache.displaced)
                cache.expired = cache.displaced = 0
            if self._pool is not None:
                self._metrics.remembered.inc(self._pool.hits)
                self._pool.hits = 0
            if self._status is not None:
                self._status.tick(time.monotonic())
            await asyncio.sleep(GAUGE_SECONDS)
        self._fail(self.app.crash_reason or RuntimeError("Faust stopped for no stated reason"))

    async def stop(self) -> None:
        """Leave the group. Without a failure everything that was taken is committed first."""
        if self.failure is not None:
            await asyncio.gather(*(lane.close() for lane in self._lanes.values()))
        await self.app.stop()
        await asyncio.gather(*(lane.close() for lane in self._lanes.values()))
        if self._shared_producer is not None:
            await self._shared_producer.stop()
        if self._pool is not None:
            self._pool.close()


def extra_output_bytes(settings: Settings, embedder: Embedder | None) -> int:
    """Return the bytes that KP_OUTPUT_EMBEDDING adds to each output."""
    return embedding_bytes(embedder.identity.dimensions) if settings.output_embedding and embedder else 0


def main(settings: Settings, load: EmbedderLoader = load_configured) -> NoReturn:
    """Be the worker's process: log, run, exit with its code."""
    logs.configure(settings.log_level, settings.log_format)
    code = asyncio.run(run(settings, load))
    logging.shutdown()
    # Not sys.exit: a model that hangs in its thread would keep the interpreter from ending.
    os._exit(code)


async def run(settings: Settings, load: EmbedderLoader = load_configured) -> int:
    """Run a worker until SIGTERM, SIGINT or a failure; return the exit code."""
    asked_to_stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked_to_stop.set)
    metrics = Metrics(process_registry(), settings.scoring_profiles())
    worker: Worker | None = None
    tracing: Tracing | None = None
    phase = "loading the model"

    def not_ready() -> str | None:
        return phase if worker is None else worker.not_ready()

    status = Status(settings, metrics, not_ready) if settings.status_page else None
    http = HttpServer(
        settings.http_host,
        settings.http_port,
        metrics.registry,
        healthy=lambda: None if worker is None else worker.stuck(),
        ready=not_ready,
        pages=None if status is None else status.pages(),
    )
    try:
        port = await http.start()
    except OSError as error:
        log.error("cannot listen on KP_HTTP_HOST=%s KP_HTTP_PORT=%d: %s", settings.http_host, settings.http_port, error)
        return 2
    log.info("kp-worker %s: metrics and health on http://%s:%d/metrics", __version__, settings.http_host, port)

    async def prepare() -> Worker:
        nonlocal phase, tracing
        tracing = start_tracing(settings)
        client = client_arguments(settings)
        embedder = await asyncio.to_thread(load, settings)
        identity = None if embedder is None else embedder.identity
        metrics.build.info(
            {
                "version": __version__,
                "group": settings.group_id,
                "embedder": "none" if identity is None else identity.key(),
            }
        )
        log.info("embedder: %s", "none (novelty 0.5)" if identity is None else f"{identity.runtime} {identity.key()}")
        phase = "checking the topics"
        layout = await prepare_topics(settings, client, extra_output_bytes(settings, embedder))
        return Worker(settings, client, layout, embedder, metrics, tracing, status)

    stop = asyncio.create_task(asked_to_stop.wait())
    try:
        preparing = asyncio.create_task(prepare())
        await asyncio.wait({preparing, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not preparing.done():
            preparing.cancel()
            return 0
        worker = preparing.result()
        return await _serve(worker, settings, stop)
    except (ConfigError, ModelError) as error:
        log.error("%s", error)
        return 2
    finally:
        stop.cancel()
        await http.stop()
        if tracing is not None:
            await asyncio.to_thread(tracing.stop)


async def _serve(worker: Worker, settings: Settings, stop: asyncio.Task[Any]) -> int:
    starting = asyncio.create_task(worker.start())
    failed = asyncio.create_task(worker.failed.wait())
    await asyncio.wait({starting, failed, stop}, return_when=asyncio.FIRST_COMPLETED)
    watching = asyncio.create_task(worker.watch())
    if not (starting.done() and starting.exception()):
        await asyncio.wait({watching, failed, stop}, return_when=asyncio.FIRST_COMPLETED)
    error = worker.failure
    for task in (starting, watching):
        if error is None and task.done() and not task.cancelled():
            error = task.exception()
        task.cancel()
    failed.cancel()
    if error is not None:
        log.error("stopping: %s; what was not committed will be read again", error_text(error))
    else:
        log.info("stopping: finishing what was taken")
    try:
        await asyncio.wait_for(worker.stop(), settings.shutdown_timeout_seconds if error is None else LEAVE_SECONDS)
    except TimeoutError:
        if error is None:
            log.error(
                "the drain took longer than KP_SHUTDOWN_TIMEOUT_SECONDS; what was not committed will be read again"
            )
        return 1
    if error is None and worker.failure is None:
        log.info("stopped: everything that was taken is committed")
        return 0
    return 1

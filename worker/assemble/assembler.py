"""The member of the consumer group: which partitions it has, of both steps, and the work on them.

When partitions are assigned:
 1. start each partition's producer: this fences the former owner and aborts its open transaction;
 2. read the committed offsets;
 3. restore the open runs from the topic of the state;
 4. only then read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.abc import ConsumerRebalanceListener

from worker.assemble.open_runs import HeldBytes, OpenRuns
from worker.assemble.partition import AssemblePartition
from worker.assemble.rows import STREAM, Place
from worker.assemble.spread import Spread
from worker.assemble.steps import Assembling, Shown, Spreading
from worker.assemble.topics import AssembleTopics, prepare_assemble_topics
from worker.assemble.traces import TraceWriter, has_root
from worker.config import Settings
from worker.core.passes import Pass
from worker.core.records import ASSEMBLED, SPANS
from worker.kafka.aiokafka_private import count_partitions
from worker.kafka.cluster.connections import connected
from worker.kafka.cluster.describe import current_limit
from worker.kafka.cluster.topic_watch import TopicLostError, TopicWatch
from worker.kafka.state.restore import Position, read_logs, read_positions
from worker.kafka.writing.producer import Producer
from worker.kafka.writing.publisher import ExactlyOncePublisher
from worker.observe.assemble_metrics import AssembleMetrics
from worker.runs.otlp.rules import Rules

log = logging.getLogger(__name__)

GAUGE_SECONDS: Final = 1.0

FETCH_BYTES: Final = 1 << 20
"""Bytes of one fetch of a partition; a larger record comes alone."""

NO_POLL_LIMIT_MS: Final = 2**31 - 1
"""Closing many runs at once may take long; heartbeats show that the process lives."""


class Assembler(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka is untyped
    """One process's share of both steps. `failed` is set with the first error, `failure`."""

    def __init__(
        self,
        settings: Settings,
        client: Mapping[str, Any],
        topics: AssembleTopics,
        rules: Rules,
        metrics: AssembleMetrics,
    ) -> None:
        self.failure: BaseException | None = None
        self.failed = asyncio.Event()
        self._settings = settings
        self._client = client
        self._topics = topics
        self._rules = rules
        self._metrics = metrics
        self._held = HeldBytes()
        self._told: set[str] = set()
        self._turn = asyncio.Lock()
        self._stop = asyncio.Event()
        self._opening: asyncio.Task[None] | None = None
        self._opened = False
        self._leaving = False
        self._partitions: dict[TopicPartition, AssemblePartition] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._publishers: list[ExactlyOncePublisher] = []
        names = {f"KP_SPANS_TOPIC {number}".removesuffix(" 1"): name for number, name in enumerate(topics.sources, 1)}
        names |= {"KP_SOURCE_TOPIC": settings.source_topic, "KP_DEAD_LETTER_TOPIC": settings.dead_letter_topic}
        names |= {"state": topics.state.name} | ({} if settings.spans_keyed else {"between": topics.reads})
        self._watch = TopicWatch(settings, client, names, state={*topics.sources, topics.reads, topics.state.name})
        self._consumer = AIOKafkaConsumer(
            **client,
            group_id=settings.assemble_group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            session_timeout_ms=round(settings.session_timeout_seconds * 1000),
            heartbeat_interval_ms=round(settings.session_timeout_seconds * 1000 / 5),
            rebalance_timeout_ms=round(self.drain_seconds * 1000),
            max_poll_interval_ms=NO_POLL_LIMIT_MS,
            max_partition_fetch_bytes=FETCH_BYTES,
        )

    @property
    def drain_seconds(self) -> float:
        """Return how long finishing what is in flight may take: a batch, and a transaction."""
        return self._settings.transaction_timeout_seconds + self._settings.session_timeout_seconds

    def not_ready(self) -> str | None:
        """Return why nothing is assembled, or None: for readiness."""
        if self.failure is not None:
            lost = isinstance(self.failure, TopicLostError)  # other messages may quote a record
            return f"failed: {self.failure if lost else type(self.failure).__name__}"
        if self._watch.problem is not None:
            return self._watch.problem
        return None if self._opened else "waiting for partitions to be assigned and restored"

    async def run(self) -> None:
        """Work until `stop` is called or something fails."""
        async with connected(self._settings, self._client, self._consumer, tolerant=True):
            await self._watch.start(self._fail)
            self._consumer.subscribe(sorted({*self._topics.sources, self._topics.reads}), listener=self)
            stopping = asyncio.create_task(self._stop.wait())
            failing = asyncio.create_task(self.failed.wait())
            try:
                while not (stopping.done() or failing.done()):
                    self._update_gauges()
                    await asyncio.wait({stopping, failing}, timeout=GAUGE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopping.cancel()
                failing.cancel()
                await self._watch.stop()
                await self._close()

    def stop(self) -> None:
        """Commit what is in flight, then end."""
        self._stop.set()

    async def on_partitions_revoked(self, revoked: Sequence[TopicPartition]) -> None:
        """Commit what is in flight before another member gets the partitions."""
        await self._close()

    async def on_partitions_assigned(self, assigned: Sequence[TopicPartition]) -> None:
        """Begin to work on the partitions, in a task: meanwhile this member's heartbeats must go out."""
        await self._close()
        if not self._stop.is_set():
            self._leaving = False
            self._opening = asyncio.create_task(self._open_or_fail(sorted(assigned)))

    async def _open_or_fail(self, assigned: Sequence[TopicPartition]) -> None:
        try:
            await self._open(assigned)
        except Exception as error:
            self._fail(error)

    async def _open(self, assigned: Sequence[TopicPartition]) -> None:
        """Take over partitions. `_close` waits for it: a producer that starts late would fence the next owner."""
        settings = self._settings
        topics = await prepare_assemble_topics(settings, self._client)  # there may be new partitions
        now = await count_partitions(self._consumer, topics.sources) or {}
        sources = {name: max(count, now.get(name, 0)) for name, count in topics.sources.items()}
        self._topics = replace(topics, sources=sources)
        publishers = {tp: self._publisher(tp) for tp in assigned}
        self._publishers = list(publishers.values())
        await asyncio.gather(*(publisher.start() for publisher in self._publishers))  # 1
        positions = await self._positions(assigned)  # 2
        runs = await self._restored([tp.partition for tp in assigned if tp.topic == self._topics.reads])  # 3
        if self._leaving:
            return
        for tp in assigned:
            position = positions[tp]
            self._consumer.seek(tp, position.offset)
            work = AssemblePartition(
                tp=tp,
                consumer=self._consumer,
                publisher=publishers[tp],
                step=self._step(tp, position, runs.get(tp.partition)),
                metrics=self._metrics,
                turn=self._turn,
                source_pass=Pass(position.topic_id),
                next_offset=position.offset,
                interval_seconds=settings.commit_interval_seconds,
                told=self._told,
                mark_seconds=self._mark_seconds,
                complete=self._complete if self._leads(tp) else None,
            )
            self._partitions[tp] = work
            self._tasks.append(asyncio.create_task(self._work(work)))  # 4
        self._opened = True
        log.info("assigned %s", ", ".join(f"{tp.topic}/{tp.partition}" for tp in assigned) or "no partition")

    @property
    def _mark_seconds(self) -> float:
        return min(5.0, max(0.5, self._settings.assemble_grace_seconds / 10))

    def _leads(self, tp: TopicPartition) -> bool:
        """Whether the partition reads the marks of all partitions with spans, and tells the others the time."""
        return not self._settings.spans_keyed and tp == TopicPartition(self._topics.reads, 0)

    async def _complete(self) -> bool:
        """Return whether there are no further partitions with spans than those that count.

        Asked after marks were read: what had been written before these is on partitions that the answer knows.
        """
        while not self._leaving:
            found = await count_partitions(self._consumer, self._topics.sources)
            if found is not None:
                new = {name: found[name] for name, count in self._topics.sources.items() if found[name] > count}
                for name, count in new.items():
                    log.info("%s has %d partitions now: no run closes until they are assigned and read", name, count)
                return not new
            await asyncio.sleep(1)
        return False

    def _publisher(self, tp: TopicPartition) -> ExactlyOncePublisher:
        settings = self._settings
        producer = Producer(
            self._client,
            f"{settings.assemble_group}-{tp.topic}-{tp.partition}",
            settings.transaction_timeout_seconds,
            owns=lambda: tp in self._consumer.assignment(),
        )
        return ExactlyOncePublisher(
            producer, settings.assemble_group, tp, self._topics.outputs, self._topics.state,
            partial(current_limit, self._client),
        )  # fmt: skip

    def _step(self, tp: TopicPartition, position: Position, runs: OpenRuns | None) -> Spreading | Assembling:
        settings, topics = self._settings, self._topics
        spread = Spread(tp.topic, tp.partition, position.stream_time_ms) if tp.topic in topics.sources else None
        if tp.topic != topics.reads or runs is None:
            if spread is None:
                raise RuntimeError(f"this is a bug: {tp.topic} is not read")
            return Spreading(spread, topics.outputs[SPANS].partitions)
        writer = TraceWriter(
            self._rules,
            settings.assemble_key == "agent",
            topics.outputs[ASSEMBLED].partitions,
            topics.kept_ms,
            (tp.topic, tp.partition),
        )
        return Assembling(
            runs,
            writer,
            settings.memory_budget_bytes,
            topics.state.max_bytes,
            spread,
            others=range(1, topics.outputs[SPANS].partitions) if self._leads(tp) else (),
            tell_ms=self._mark_seconds * 1000,
        )

    async def _positions(self, assigned: Sequence[TopicPartition]) -> dict[TopicPartition, Position]:
        settings = self._settings
        found: dict[TopicPartition, Position] = {}
        for topic in sorted({tp.topic for tp in assigned}):
            numbers = [tp.partition for tp in assigned if tp.topic == topic]
            positions = await read_positions(
                self._client, settings.assemble_group, topic, numbers, settings.transaction_timeout_seconds
            )
            for number, position in positions.items():
                found[TopicPartition(topic, number)] = position
                if position.lost:
                    log.error(
                        "%s/%d: %d records were deleted by retention before they were read",
                        topic,
                        number,
                        position.lost,
                    )
                    self._metrics.lost.inc(position.lost)
        return found

    async def _restored(self, partitions: Sequence[int]) -> dict[int, OpenRuns]:
        if not partitions:
            return {}
        settings, topics = self._settings, self._topics
        state = topics.state.name
        logs = await read_logs(self._client, state, partitions, settings.transaction_timeout_seconds)
        result = {}
        for number in partitions:
            read = logs.pop(number)
            tp = TopicPartition(topics.reads, number)
            sources: list[Place] = [(tp.topic, number)] if settings.spans_keyed else [STREAM]
            if self._leads(tp):
                sources = [(topic, each) for topic, count in topics.sources.items() for each in range(count)]
            runs = OpenRuns(
                sources=sources,
                has_root=has_root,
                grace_ms=round(settings.assemble_grace_seconds * 1000),
                gap_ms=round(settings.assemble_gap_seconds * 1000),
                memory_ms=round(settings.assemble_memory_seconds * 1000),
                held=self._held,
            )
            problems = [*read.faults(), *await asyncio.to_thread(runs.restore, read.live())]
            if problems:
                log.warning("%s/%d: %d records are skipped; the first: %s", state, number, len(problems), problems[0])
            if runs.remembered or len(runs):
                log.info(
                    "%s/%d: %d open runs restored, %d closed ones remembered",
                    state,
                    number,
                    len(runs),
                    len(runs.remembered),
                )
            result[number] = runs
        return result

    async def _work(self, partition: AssemblePartition) -> None:
        try:
            await partition.run()
        except Exception as error:
            self._fail(error)

    async def _close(self) -> None:
        """Stop the work, let what is in flight end, and disconnect the producers."""
        self._leaving, self._opened = True, False
        opening, self._opening = self._opening, None
        if opening is not None:
            await opening
        partitions, tasks, publishers = self._partitions, self._tasks, self._publishers
        self._partitions, self._tasks, self._publishers = {}, [], []
        for partition in partitions.values():
            partition.stopping.set()
        await asyncio.gather(*tasks)
        for publisher in publishers:
            with contextlib.suppress(Exception):  # fenced, or the broker is gone: the committed work is committed
                await publisher.stop()
        self._held.total = 0
        for tp in partitions:
            self._metrics.forget_partition(tp.topic, tp.partition)

    def _update_gauges(self) -> None:
        for tp, partition in self._partitions.items():
            end = self._consumer.last_stable_offset(tp)
            if end is not None:
                behind = max(0, end - partition.next_offset)
                # Each partition that writes there may have left the end of a transaction behind the last record.
                markers = sum(self._topics.sources.values()) + 1 if tp.topic == self._topics.reads else 1
                lag = 0 if partition.idle or behind <= markers else behind
                self._metrics.lag.labels(tp.topic, str(tp.partition)).set(lag)
            if isinstance(partition.step, Assembling):
                self._show(str(tp.partition), partition.step.shown)
        self._metrics.ready.set(int(self.not_ready() is None))

    def _show(self, partition: str, shown: Shown) -> None:
        metrics = self._metrics
        for gauge, value in (
            (metrics.open_runs, shown.open_runs),
            (metrics.open_bytes, shown.held_bytes),
            (metrics.oldest, shown.oldest_ms / 1000),
            (metrics.remembered, shown.remembered),
            (metrics.stream_time, shown.time_ms / 1000),
        ):
            gauge.labels(partition).set(value)

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = self._watch.explain(error)
            self.failed.set()

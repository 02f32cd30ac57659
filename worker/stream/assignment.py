"""The assignment: which partitions a worker has, from what state they start, and when they are closed."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from aiokafka import TopicPartition

from worker.config import Settings
from worker.config.control_keys import judge_keys
from worker.config.redaction_rules import cleaning, output_rules, screening
from worker.core.changelog import Restored
from worker.core.documents import embedding_bytes
from worker.core.passes import without_embedder
from worker.core.records import EmbedderIdentity
from worker.core.scorer import EvaluationConfig
from worker.core.terminal import number_of
from worker.core.track_record import TrackRecord
from worker.embed.embedder import ServedEmbedder
from worker.embed.load import new_scorer
from worker.embed.pool import EmbeddingPool
from worker.kafka.cluster.describe import current_limit
from worker.kafka.cluster.topic_watch import Failure
from worker.kafka.cluster.topics import Layout, prepare_topics
from worker.kafka.state.restore import Position, read_logs, read_positions, restore
from worker.kafka.writing.producer import Producer
from worker.kafka.writing.publisher import AtLeastOncePublisher, ExactlyOncePublisher, Publisher
from worker.observe.metrics import Metrics
from worker.observe.status import Status
from worker.observe.tracing import Tracing
from worker.stream.evaluator import Evaluator
from worker.stream.faust_consumer import Membership
from worker.stream.fetch_buffer import FetchBuffer
from worker.stream.partition import DeadLetterLimit, Partition
from worker.stream.state import PartitionState

log = logging.getLogger(__name__)

DRAIN_SECONDS: Final = 5.0
"""How long a drain waits for a model elsewhere: well below KP_SHUTDOWN_TIMEOUT_SECONDS, as the group waits for it."""


async def prepare_layout(settings: Settings, client: Mapping[str, Any], identity: EmbedderIdentity | None) -> Layout:
    """Create or check the topics; outputs may grow by what KP_OUTPUT_EMBEDDING adds. Raises ConfigError."""
    extra_bytes = embedding_bytes(identity.dimensions) if settings.output_embedding and identity else 0
    return await prepare_topics(settings, client, extra_bytes)


class Assignment:
    """The partitions of one worker, by number.

    A partition is kept if it was in the previous generation and has no uncommitted records: its state then equals the
    changelog. Any other is restored, because another worker may have processed it meanwhile.

    The steps are those of kafka/member.py, and the guarantee depends on their order. For a new partition:
     1. fence: start the producer (exactly once: this fences the former owner and ends its open transaction);
     2. read the committed offset;
     3. restore: read the changelog to its end; entries below that offset form the cache;
     4. open: only then is the first record fetched;
     5. run (partition.py).
    For each partition, before a rebalance and at the end:
     6. drain: commit the records taken. This waits for producers that are starting: they would fence the next owner;
     7. close, unless it is kept: stop the producer.
    """

    def __init__(
        self,
        settings: Settings,
        client: Mapping[str, Any],
        layout: Layout,
        membership: Membership,
        failure: Failure,
        buffer: FetchBuffer,
        pool: EmbeddingPool | None,  # none: traces are not embedded
        service: ServedEmbedder | None,  # the model, if it is elsewhere
        metrics: Metrics,
        tracing: Tracing,
        status: Status | None,
    ) -> None:
        self.partitions: dict[int, Partition] = {}
        self._settings = settings
        self._client = client
        self._layout = layout
        self._membership = membership
        self._failure = failure
        self._buffer = buffer
        self._pool = pool
        self._service = service
        self._metrics = metrics
        self._tracing = tracing
        self._status = status
        rules = output_rules(settings)
        for kind in () if rules is None else rules.types:
            metrics.redactions.labels(kind)
        self._evaluation = EvaluationConfig(
            settings.limits,
            settings.event_time,
            settings.output_embedding,
            clean=cleaning(settings, rules),
            clean_rejected=settings.redact == "all",
            screen=screening(settings),
            judges=judge_keys(settings),
        )
        share = settings.dead_letter_breaker_share
        self._dead_letter_limit = DeadLetterLimit(share, settings.dead_letter_breaker_window) if share else None
        self._fencing = asyncio.Lock()

    def next_offsets(self) -> dict[TopicPartition, int]:
        """Return the next offset to read of each partition."""
        topic = self._settings.source_topic
        return {TopicPartition(topic, each.number): each.committed for each in self.partitions.values()}

    async def change(self, mine: Sequence[int], generation: int) -> int:
        """Close former partitions and open those of a new generation (1 to 3); return how many are new.

        Step 4 is the caller's: unless the group rebalances again, it calls `confirm` and fetches. Never call this
        during a rebalance.
        """
        async with self._fencing:
            new, publishers = await self._fence(mine, generation)
        await self._open(new, publishers)
        if new:
            await asyncio.to_thread(_return_memory)
        return len(new)

    async def _fence(self, mine: Sequence[int], generation: int) -> tuple[list[int], dict[int, Publisher]]:
        """Close former partitions, and start the producers of new ones (step 1)."""
        kept = {
            number
            for number, partition in self.partitions.items()
            if number in mine and not partition.failed and not len(partition) and partition.generation == generation - 1
        }
        gone = [number for number in self.partitions if number not in kept]
        await asyncio.gather(*(self.partitions.pop(number).close() for number in gone))
        for partition in set(gone) - set(mine):
            self._metrics.forget_partition(partition)
        if mine and mine[-1] >= self._layout.source_partitions:  # the source topic has gained partitions
            identity = None if self._pool is None else self._pool.identity
            self._layout = await prepare_layout(self._settings, self._client, identity)
        new = [partition for partition in mine if partition not in kept]
        publishers = {partition: self._publisher(partition) for partition in new}
        try:
            await asyncio.gather(*(publisher.start() for publisher in publishers.values()))  # 1
        except BaseException:
            await _stop(publishers.values())
            raise
        for publisher in list(publishers.values())[:1]:
            log.info("delivery: %s", publisher.delivery())
        return new, publishers

    def confirm(self, generation: int) -> None:
        """Record that all partitions took part in this generation; otherwise the next `change` restores them again."""
        for partition in self.partitions.values():
            partition.generation = generation

    async def drain(self) -> None:
        """Wait until no producer is starting, and every partition has committed the records it took."""
        async with self._fencing:
            pass
        await asyncio.gather(*(partition.drain() for partition in self.partitions.values()))

    async def close(self) -> None:
        """Close every partition."""
        await asyncio.gather(*(partition.close() for partition in self.partitions.values()))

    async def _open(self, partitions: Sequence[int], publishers: Mapping[int, Publisher]) -> None:
        try:
            positions = await self._read_offsets(partitions)  # 2
            restored = await self._restore(positions)  # 3
            states = {
                partition: await self._state(positions[partition], restored[partition]) for partition in partitions
            }
        except BaseException:
            await _stop(publishers.values())
            raise
        for number in partitions:
            partition = self.partitions[number] = self._partition(number, states[number], publishers[number])
            partition.start()  # 5; the caller lets records flow (4)

    def _partition(self, number: int, state: PartitionState, publisher: Publisher) -> Partition:
        settings, metrics = self._settings, self._metrics
        evaluator = Evaluator(
            state, self._pool, self._evaluation, settings.latency_budget_seconds, metrics, self._tracing
        )
        return Partition(
            number,
            state,
            publisher,
            evaluator,
            self._buffer,
            metrics,
            fail=self._failure.set,
            commit_interval_seconds=settings.commit_interval_seconds,
            drain_seconds=None if self._service is None else DRAIN_SECONDS,
            dead_letter_limit=self._dead_letter_limit,
            status=self._status,
        )

    def _publisher(self, partition: int) -> Publisher:
        settings, layout = self._settings, self._layout
        timeout = settings.transaction_timeout_seconds
        source = TopicPartition(settings.source_topic, partition)
        limit_of = partial(current_limit, self._client)
        if settings.delivery == "exactly_once":
            transactional_id = f"{settings.group_id}-{partition}"
            producer = Producer(self._client, transactional_id, timeout, owns=partial(self._owns, partition))
            return ExactlyOncePublisher(producer, settings.group_id, source, layout.outputs, layout.changelog, limit_of)
        producer = Producer(self._client, None, timeout)
        return AtLeastOncePublisher(
            producer, source, layout.outputs, layout.changelog, self._membership.commit_offset, timeout, limit_of
        )

    def _owns(self, number: int) -> bool:
        """Whether this member has a partition, as far as it knows: its group has not given it away meanwhile."""
        partition = self.partitions.get(number)
        return partition is not None and partition.generation == self._membership.generation

    async def _read_offsets(self, partitions: Sequence[int]) -> dict[int, Position]:
        if not partitions:
            return {}
        settings = self._settings
        positions = await read_positions(
            self._client, settings.group_id, settings.source_topic, partitions, settings.transaction_timeout_seconds
        )
        lost = {partition: position for partition, position in positions.items() if position.lost}
        if lost:
            records = sum(position.lost for position in lost.values())
            self._metrics.lost.inc(records)
            places = ", ".join(f"partition {n} at offset {each.offset} ({each.lost} lost)" for n, each in lost.items())
            log.error(
                "%s deleted from %s before scoring (by retention, or by hand); continuing with %s",
                number_of(records, "record"), settings.source_topic, places,
            )  # fmt: skip
        return positions

    async def _restore(self, positions: dict[int, Position]) -> dict[int, Restored]:
        if not positions:
            return {}
        if self._pool is None:  # the entries of an embedder must not change
            return await self._restore_records(positions)
        started = time.perf_counter()
        identity = self._pool.identity
        restored = await restore(
            self._client,
            self._settings.changelog,
            positions,
            identity.key(),
            identity.dimensions,
            self._settings.cache_max_elements,
            self._settings.transaction_timeout_seconds,
            None if self._service is None else self._service.probes,
        )
        for result in restored.values():
            self._metrics.restored_entries.inc(len(result.entries))
            for cause in ("corrupt", "other_model"):
                self._metrics.skipped_entries.labels(cause).inc(result.skipped[cause])
        self._metrics.restore.observe(time.perf_counter() - started)
        return restored

    async def _restore_records(self, positions: dict[int, Position]) -> dict[int, Restored]:
        settings = self._settings
        result = {
            partition: Restored(current=without_embedder(position.found())) for partition, position in positions.items()
        }
        if settings.verdict_key_file is not None:
            seconds = settings.transaction_timeout_seconds
            logs = await read_logs(self._client, settings.changelog, list(positions), seconds)
            for partition, restored in result.items():
                read = logs.pop(partition)
                await asyncio.to_thread(read.restore_records, restored)
                if restored.problem:
                    log.warning("changelog %s/%d: %s is skipped", settings.changelog, partition, restored.problem)
                self._metrics.skipped_entries.labels("corrupt").inc(restored.skipped["corrupt"])
        return result

    async def _state(self, position: Position, restored: Restored) -> PartitionState:
        identity = None if self._pool is None else self._pool.identity
        scorer = new_scorer(self._settings, identity)
        scorer.record = TrackRecord(position.topic_id or "")
        # In a thread: a large cache takes a while, and meanwhile this member's heartbeats must go out.
        rows = await asyncio.to_thread(scorer.record.restore, restored.records, position.offset)
        restored.housekeeping.first(rows)
        await asyncio.to_thread(lambda: scorer.restore(restored.cache(), position.stream_time_ms))
        restored.entries.clear()  # the cache has copies; with many large partitions they need much memory
        return PartitionState(scorer, position.offset, restored.replay, restored.current, restored.housekeeping)


def _return_memory() -> None:
    """Give memory of restores and closed partitions back to the system (glibc): otherwise rebalances add up."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


async def _stop(publishers: Iterable[Publisher]) -> None:
    await asyncio.gather(*(publisher.stop() for publisher in publishers), return_exceptions=True)

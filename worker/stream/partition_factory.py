"""The partitions of a worker: by whom each publishes, and from what state it starts."""

import asyncio
import ctypes
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiokafka import TopicPartition

from worker.config import Settings
from worker.config.keys import judge_keys
from worker.config.redaction_rules import evaluation_config, output_rules
from worker.core.documents import embedding_bytes
from worker.core.records import EmbedderIdentity
from worker.core.restore import Log, ModelCache, Report, restore
from worker.core.terminal import number_of
from worker.embed.http_embedder import HttpEmbedder
from worker.embed.load import new_scorer
from worker.embed.pool import EmbeddingPool
from worker.kafka.assignment import Position, check_offsets, read_logs, report_epochs, report_skipped
from worker.kafka.describe import current_limit
from worker.kafka.producer import Producer
from worker.kafka.publisher import TRANSACTIONS, Publisher
from worker.kafka.topic_watch import Failure
from worker.kafka.topics import Layout, prepare_topics
from worker.observe.metrics import Metrics
from worker.observe.status import Status
from worker.observe.tracing import Tracing
from worker.stream.evaluator import Evaluator, PartitionState
from worker.stream.faust_consumer import Membership
from worker.stream.fetch_buffer import FetchBuffer
from worker.stream.partition import DeadLetterLimit, Partition

log = logging.getLogger(__name__)


async def prepare_layout(settings: Settings, client: Mapping[str, Any], identity: EmbedderIdentity | None) -> Layout:
    """Create or check the topics; outputs may grow by what KP_OUTPUT_EMBEDDING adds. Raises ConfigError."""
    extra_bytes = embedding_bytes(identity.dimensions) if settings.output_embedding and identity else 0
    return await prepare_topics(settings, client, extra_bytes)


@dataclass(eq=False, repr=False)
class PartitionFactory:
    """Makes the partitions of a worker (kafka/assignment.py): their publishers, restored states and evaluators."""

    settings: Settings
    client: Mapping[str, Any]
    layout: Layout
    membership: Membership
    failure: Failure
    buffer: FetchBuffer
    pool: EmbeddingPool | None  # none: traces are not embedded
    service: HttpEmbedder | None  # the model, if it is elsewhere
    metrics: Metrics
    tracing: Tracing
    status: Status | None

    def __post_init__(self) -> None:
        settings = self.settings
        rules = output_rules(settings)
        for kind in () if rules is None else rules.types:
            self.metrics.redactions.labels(kind)
        self._evaluation = evaluation_config(settings, rules, judge_keys(settings))
        share = settings.dead_letter_breaker_share
        self._dead_letter_limit = DeadLetterLimit(share, settings.dead_letter_breaker_window) if share else None

    async def senders(self, tps: Sequence[TopicPartition]) -> dict[TopicPartition, Publisher]:
        """Return the publishers of new partitions; first look for what they need, if the source has gained some."""
        if tps and max(tps).partition >= self.layout.source_partitions:
            identity = None if self.pool is None else self.pool.identity
            self.layout = await prepare_layout(self.settings, self.client, identity)
        return {tp: self._publisher(tp) for tp in tps}

    async def restore(
        self, positions: Mapping[TopicPartition, Position], senders: Mapping[TopicPartition, Publisher]
    ) -> dict[TopicPartition, Partition]:
        """Restore the caches from the changelog, and return the partitions."""
        if not positions:
            return {}
        producer = next(iter(senders.values())).producer
        transactions = producer.transactional_id is not None
        protocol = TRANSACTIONS[producer.transactions] if transactions else "without transactions"
        log.info("delivery: %s, %s", self.settings.delivery, protocol)
        self._report_lost(positions)
        states = await self._states({tp.partition: position for tp, position in positions.items()})
        await asyncio.to_thread(_return_memory)
        return {tp: self._partition(tp.partition, states[tp.partition], senders[tp]) for tp in positions}

    def _partition(self, number: int, state: PartitionState, publisher: Publisher) -> Partition:
        settings, metrics = self.settings, self.metrics
        evaluator = Evaluator(
            state, self.pool, self._evaluation, settings.latency_budget_seconds, metrics, self.tracing
        )
        return Partition(
            number,
            state,
            publisher,
            evaluator,
            self.buffer,
            metrics,
            fail=self.failure.set,
            commit_interval_seconds=settings.commit_interval_seconds,
            # For a model elsewhere: well below KP_SHUTDOWN_TIMEOUT_SECONDS, as the group waits for it.
            drain_seconds=None if self.service is None else 5.0,
            dead_letter_limit=self._dead_letter_limit,
            status=self.status,
        )

    def _publisher(self, source: TopicPartition) -> Publisher:
        settings, layout = self.settings, self.layout
        exactly_once = settings.delivery == "exactly_once"
        producer = Producer(
            self.client,
            f"{settings.group_id}-{source.partition}" if exactly_once else None,
            settings.transaction_timeout_seconds,
            owns=partial(self.membership.owns, source),
        )
        return Publisher(
            producer,
            settings.group_id,
            source,
            layout.outputs,
            layout.changelog,
            partial(current_limit, self.client),
            None if exactly_once else self.membership.consumer.commit_offset,
        )

    def _report_lost(self, positions: Mapping[TopicPartition, Position]) -> None:
        lost = {tp.partition: position for tp, position in positions.items() if position.lost}
        if lost:
            records = sum(position.lost for position in lost.values())
            self.metrics.lost.inc(records)
            places = ", ".join(f"partition {n} at offset {each.offset} ({each.lost} lost)" for n, each in lost.items())
            log.error(
                "%s deleted from %s before scoring (by retention, or by hand); continuing with %s",
                number_of(records, "record"), self.settings.source_topic, places,
            )  # fmt: skip

    async def _states(self, positions: Mapping[int, Position]) -> dict[int, PartitionState]:
        settings, cache, started = self.settings, self._cache(), time.perf_counter()
        use = partial(self._restored, positions, cache)
        if cache is None and settings.verdict_key_file is None:  # nothing on the changelog matters
            restored = {number: use(number, Log()) for number in positions}
        else:
            restored = await read_logs(
                self.client, settings.changelog, list(positions), settings.transaction_timeout_seconds,
                settings.max_batch_bytes, use,
            )  # fmt: skip
            self.metrics.restore.observe(time.perf_counter() - started)
        reports = {number: each for number, (_, each) in restored.items()}
        if settings.delivery == "exactly_once":
            check_offsets(settings.group_id, settings.source_topic, positions, reports)
        report_skipped(settings.changelog, reports, "" if cache is None else cache.model)
        report_epochs(reports)
        for each in reports.values():
            self.metrics.restored_entries.inc(each.entries)
            for cause in ("corrupt", "other_model"):
                self.metrics.skipped_entries.labels(cause).inc(each.skipped[cause])
        return {number: state for number, (state, _) in restored.items()}

    def _cache(self) -> ModelCache | None:
        if self.pool is None:
            return None
        identity, probes = self.pool.identity, None if self.service is None else self.service.probes
        return ModelCache(identity.key(), identity.dimensions, self.settings.cache_max_elements, probes)

    def _restored(
        self, positions: Mapping[int, Position], cache: ModelCache | None, number: int, log: Log
    ) -> tuple[PartitionState, Report]:
        """Restore one partition. Called in a thread: 100,000 entries take a second, and heartbeats must go out."""
        position = positions[number]
        restored = restore(log, position, cache)
        log.clear()
        scorer = new_scorer(self.settings, None if self.pool is None else self.pool.identity)
        scorer.record = restored.track_record
        scorer.restore(restored.cache(), position.stream_time_ms)
        current, housekeeping = restored.report.current, restored.housekeeping
        return PartitionState(scorer, position.offset, restored.replay, current, housekeeping), restored.report


def _return_memory() -> None:
    """Give memory of restores and closed partitions back to the system (glibc): otherwise rebalances add up."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

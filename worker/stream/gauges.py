"""The gauges of a worker's partitions: lag, cache, stream time; and counters that follow totals kept elsewhere."""

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

from aiokafka import TopicPartition

from worker.core.novelty import VectorCache, advice, is_short
from worker.core.terminal import number_of
from worker.embed.http_embedder import HttpEmbedder
from worker.embed.pool import EmbeddingPool
from worker.kafka.topic_watch import TopicWatch
from worker.observe.metrics import Metrics, lag_seconds, set_or_drop
from worker.stream.faust_consumer import Membership
from worker.stream.fetch_buffer import FetchBuffer
from worker.stream.partition import Partition

log = logging.getLogger(__name__)

WARNING_SECONDS: Final = 3600.0  # pause between two warnings of one worker


class CacheReach:
    """Updates `kp_cache_reach_seconds`, and warns of the partition whose entries leave earliest."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._warned: float | None = None

    def update(self, caches: Mapping[int, VectorCache]) -> None:
        """Look at the caches of all partitions."""
        short = []
        for partition, cache in caches.items():
            reach_ms = cache.reach_ms
            self._metrics.cache_ttl.set((cache.ttl_ms or 0) / 1000)
            seconds = None if reach_ms is None else reach_ms / 1000
            set_or_drop(self._metrics.cache_reach, seconds, str(partition))
            if reach_ms is not None and is_short(reach_ms, cache.ttl_ms):
                short.append((reach_ms, partition))
        if short and (self._warned is None or time.monotonic() - self._warned >= WARNING_SECONDS):
            self._warned = time.monotonic()
            _warn(*min(short), caches[min(short)[1]], len(short) - 1)


def _warn(reach_ms: int, partition: int, cache: VectorCache, others: int) -> None:
    ttl_ms = cache.ttl_ms or 0
    rate = 1000 * cache.max_elements / reach_ms if reach_ms else None
    log.warning(
        "partition %d: entries leave the full cache (KP_CACHE_MAX_ELEMENTS=%d) after %g s, the TTL is %g s: %s%s",
        partition, cache.max_elements, round(reach_ms / 1000, 2), ttl_ms / 1000,
        advice(rate, reach_ms, ttl_ms, cache.dimensions),
        f"; {number_of(others, 'more partition evicts', 'more partitions evict')} before half of the TTL"
        if others else "",
    )  # fmt: skip


class _Growth:
    """The growth of totals since the last look, by owner and name."""

    def __init__(self) -> None:
        self._seen: WeakKeyDictionary[Any, dict[str, float]] = WeakKeyDictionary()

    def of(self, owner: object, name: str, total: float) -> float:
        """Return by how much the owner's total has grown."""
        seen = self._seen.setdefault(owner, {})
        grown = total - seen.get(name, 0)
        seen[name] = total
        return grown


@dataclass(eq=False, repr=False)
class Gauges:
    """Updates the metrics of one worker."""

    metrics: Metrics
    source_topic: str
    topics: TopicWatch
    membership: Membership
    buffer: FetchBuffer
    pool: EmbeddingPool | None
    service: HttpEmbedder | None

    def __post_init__(self) -> None:
        self._growth = _Growth()
        self._reach = CacheReach(self.metrics)

    def update(self, partitions: Collection[Partition]) -> None:
        """Look at every partition, the embedding pool and the embedding service."""
        for partition in partitions:
            self._update_cache(partition)
            self._update_lag(partition)
        self._reach.update({partition.number: partition.state.scorer.cache for partition in partitions})
        if self.pool is not None:
            self.metrics.remembered.inc(self._growth.of(self.pool, "hits", self.pool.hits))
            self.metrics.embed_in_flight.set(self.pool.at_once)
        if self.service is not None:
            self._update_service(self.service)

    def _update_service(self, service: HttpEmbedder) -> None:
        metrics = self.metrics
        metrics.service_down.set(service.problem() is not None)
        counters = {
            "requests": metrics.service_requests.labels("answered"),
            "failures": metrics.service_requests.labels("failed"),
            "texts": metrics.service_texts,
            "seconds": metrics.service_seconds,
        }
        for name, total in service.service.counts.items():
            counters[name].inc(self._growth.of(service, name, total))

    def _update_cache(self, partition: Partition) -> None:
        metrics, label, scorer = self.metrics, str(partition.number), partition.state.scorer
        metrics.cache_entries.labels(label).set(len(scorer.cache))
        metrics.track_records.labels(label).set(len(scorer.record))
        if scorer.stream_time_ms is not None:
            metrics.stream_time.labels(label).set(scorer.stream_time_ms / 1000)
        for cause, total in (("expired", scorer.cache.expired), ("capacity", scorer.cache.displaced)):
            metrics.cache_evictions.labels(cause).inc(self._growth.of(scorer, cause, total))

    def _update_lag(self, partition: Partition) -> None:
        metrics, label = self.metrics, str(partition.number)
        oldest = partition.oldest() or self.buffer.oldest(partition.number)
        source = TopicPartition(self.source_topic, partition.number)
        consumer = self.membership.consumer
        end = None if self.topics.unreachable else consumer.end_of(source)
        waiting, seconds = self.topics.open_transaction(source, end) or (None, None)
        set_or_drop(metrics.open_transaction_offsets, waiting, label)
        set_or_drop(metrics.open_transaction_seconds, seconds, label)
        lag = age = None
        if end is not None:
            # If no fetched record waits, what was read past the committed offset is markers or aborted records, no lag.
            read_to = consumer.read_to(source) if oldest is None else 0
            lag = max(0, end.stable - max(partition.committed, read_to))
            age = lag_seconds(lag, None if oldest is None else oldest.timestamp_ms, time.time())
        set_or_drop(metrics.lag, lag, label)
        if age is not None or lag is None:
            set_or_drop(metrics.lag_seconds, age, label)
        metrics.committed_offset.labels(label).set(partition.committed)

"""The gauges of a worker's partitions: lag, cache, stream time; and counters that follow totals kept elsewhere."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from aiokafka import TopicPartition

from worker.embed.pool import EmbeddingPool
from worker.observe.metrics import Metrics, lag_seconds
from worker.stream.cache_reach import CacheReach
from worker.stream.faust_consumer import KpConsumer
from worker.stream.fetch_buffer import FetchBuffer
from worker.stream.partition_task import PartitionTask


class _Growth:
    """The growth of totals since the last look, by owner and name."""

    def __init__(self) -> None:
        self._seen: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()

    def of(self, owner: Hashable, name: str, total: int) -> int:
        """Return by how much the owner's total has grown."""
        seen = self._seen.setdefault(owner, {})
        grown = total - seen.get(name, 0)
        seen[name] = total
        return grown


class Gauges:
    """Updates the metrics of one worker."""

    def __init__(self, metrics: Metrics, source_topic: str, buffer: FetchBuffer, pool: EmbeddingPool | None) -> None:
        self._metrics = metrics
        self._source_topic = source_topic
        self._buffer = buffer
        self._pool = pool
        self._growth = _Growth()
        self._reach = CacheReach(metrics)

    def update(self, tasks: Mapping[int, PartitionTask], consumer: KpConsumer) -> None:
        """Look at every partition task and the embedding pool."""
        for partition, task in tasks.items():
            self._update_cache(partition, task)
            self._update_lag(partition, task, consumer)
        self._reach.update({partition: task.state.scorer.cache for partition, task in tasks.items()})
        if self._pool is not None:
            self._metrics.remembered.inc(self._growth.of(self._pool, "hits", self._pool.hits))

    def _update_cache(self, partition: int, task: PartitionTask) -> None:
        metrics, label, scorer = self._metrics, str(partition), task.state.scorer
        metrics.cache_entries.labels(label).set(len(scorer.cache))
        if scorer.stream_time_ms is not None:
            metrics.stream_time.labels(label).set(scorer.stream_time_ms / 1000)
        for cause, total in (("expired", scorer.cache.expired), ("capacity", scorer.cache.displaced)):
            metrics.cache_evictions.labels(cause).inc(self._growth.of(scorer, cause, total))

    def _update_lag(self, partition: int, task: PartitionTask, consumer: KpConsumer) -> None:
        metrics, label = self._metrics, str(partition)
        oldest = task.oldest() or self._buffer.oldest(partition)
        source = TopicPartition(self._source_topic, partition)
        lag = consumer.lag(source, task.committed, idle=oldest is None)
        if lag is not None:
            metrics.lag.labels(label).set(lag)
            age = lag_seconds(lag, None if oldest is None else oldest.timestamp_ms, time.time())
            if age is not None:
                metrics.lag_seconds.labels(label).set(age)
        metrics.committed_offset.labels(label).set(task.committed)

"""How far back full caches reach: their gauge, and a warning if that is long before the TTL."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Final

from worker.core.capacity import advice, is_short
from worker.core.novelty import VectorCache
from worker.observe.metrics import Metrics

log = logging.getLogger(__name__)

WARNING_SECONDS: Final = 3600.0
"""Pause between two warnings of one worker."""


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
            if reach_ms is None:
                with contextlib.suppress(KeyError):  # not set
                    self._metrics.cache_reach.remove(str(partition))
                continue
            self._metrics.cache_reach.labels(str(partition)).set(reach_ms / 1000)
            if is_short(reach_ms, cache.ttl_ms):
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
        f"; {others} more partitions evict before half of the TTL" if others else "",
    )  # fmt: skip

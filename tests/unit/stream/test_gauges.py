"""The gauge of how far back full caches reach, and its warning."""

import logging

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from worker import VectorCache
from worker.observe.metrics import Metrics
from worker.stream import gauges
from worker.stream.gauges import CacheReach


def cache(capacity: int, count: int, ttl_ms: int | None = 3_600_000, step_ms: int = 1000) -> VectorCache:
    made = VectorCache(capacity, 2, ttl_ms)
    for number in range(count):
        made.add(np.array([1.0, number]), 1_000_000 + step_ms * number)
    return made


def reach(metrics: Metrics, partition: int) -> float | None:
    return metrics.registry.get_sample_value("kp_cache_reach_seconds", {"partition": str(partition)})


def test_only_full_caches_reach_anywhere(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics(CollectorRegistry())
    gauge = CacheReach(metrics)
    gauge.update({0: cache(10, 25, step_ms=300_000), 1: cache(10, 9), 2: cache(10, 100, None)})
    assert reach(metrics, 0) == 9 * 300  # 45 minutes of the hour: enough
    assert reach(metrics, 1) is None
    assert reach(metrics, 2) == 9.0
    assert caplog.records == []
    expiring = cache(10, 10)
    gauge.update({0: expiring})
    assert reach(metrics, 0) == 9.0
    expiring.advance(10_000_000)
    gauge.update({0: expiring})
    assert reach(metrics, 0) is None
    metrics.forget_partition(2)
    assert reach(metrics, 2) is None
    assert metrics.registry.get_sample_value("kp_cache_ttl_seconds") == 3600
    gauge.update({2: cache(10, 1, None)})
    assert metrics.registry.get_sample_value("kp_cache_ttl_seconds") == 0


def test_one_warning_an_hour_names_the_partition_that_reaches_least(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gauge = CacheReach(Metrics(CollectorRegistry()))
    caches = {0: cache(10, 25), 3: cache(20, 60, step_ms=50), 4: cache(10, 9)}
    for _ in range(3):
        gauge.update(caches)
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    text = warning.getMessage()
    assert "partition 3: " in text
    assert "(KP_CACHE_MAX_ELEMENTS=20) after 0.95 s, the TTL is 3600 s" in text
    assert "set KP_CACHE_MAX_ELEMENTS to about 76000 (rate x TTL" in text, "20 entries in 0.95 s"
    assert "1 more partition evicts" in text
    monkeypatch.setattr(gauges, "WARNING_SECONDS", 0.0)
    gauge.update(caches)
    assert len(caplog.records) == 2

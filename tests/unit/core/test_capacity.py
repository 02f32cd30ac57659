"""Capacity = rate x TTL, against the cache itself."""

from __future__ import annotations

import random

import numpy as np
import pytest

from worker import VectorCache
from worker.config import Settings
from worker.core.novelty import MOST_ELEMENTS, advice, capacity_for, is_short, megabytes, per_second

UNIT = np.array([1.0, 0.0], dtype=np.float32)


def fed(capacity: int, ttl_ms: int, times: list[int]) -> VectorCache:
    cache = VectorCache(capacity, 2, ttl_ms)
    for time in times:
        cache.add(UNIT, time)
    return cache


def test_the_capacity_for_a_rate_holds_the_ttl_and_half_of_it_does_not(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        rate, ttl_ms = rng.uniform(0.5, 40), rng.randint(1_000, 20_000)
        times = [round(1000 * number / rate) for number in range(round(3 * rate * ttl_ms / 1000) + 20)]
        wanted = capacity_for(rate, ttl_ms)
        assert wanted <= rate * ttl_ms / 1000 * 1.1 + 10
        enough = fed(wanted + 1, ttl_ms, times)
        assert enough.displaced == 0
        if wanted >= 8:
            short = fed(wanted // 3, ttl_ms, times)
            assert short.displaced > 0
            assert is_short(short.reach_ms or 0, ttl_ms)
        measured = per_second(times)
        assert measured == pytest.approx(rate, rel=0.05)


def test_the_reach_of_a_cache_is_the_age_at_which_its_oldest_entry_is_evicted(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        capacity = rng.randint(1, 12)
        cache = VectorCache(capacity, 2, rng.choice([None, 50]))
        live: list[int] = []
        now = 0
        for _ in range(rng.randint(1, 60)):
            now += rng.choice([0, 1, 5, 30])
            cache.add(UNIT, now)
            live = [time for time in [*live, now] if cache.ttl_ms is None or now - time < cache.ttl_ms][-capacity:]
            assert cache.reach_ms == (now - live[0] if len(live) == capacity else None)
            assert len(live) == len(cache)


def test_a_rate_needs_two_times() -> None:
    assert per_second([]) is None
    assert per_second([5]) is None
    assert per_second([5, 5, 5]) is None
    assert per_second([0, 500, 1000]) == 2.0


def test_no_ttl_is_never_too_long() -> None:
    assert not is_short(0, None)
    assert is_short(49, 100)
    assert not is_short(50, 100)


def test_the_advice_names_both_ways_out() -> None:
    told = advice(20.0, 50_000, 3_600_000, 384)
    assert "KP_CACHE_MAX_ELEMENTS to about 72000" in told
    assert "155 MB" in told
    assert "KP_CACHE_TTL_SECONDS to about 50" in told
    assert "KP_CACHE_TTL_SECONDS to about 1" in advice(None, 0, 3_600_000, 384)
    beyond = advice(1000.0, 1_000, 3_600_000, 384)
    assert "KP_CACHE_MAX_ELEMENTS" not in beyond
    assert capacity_for(1000.0, 3_600_000) > MOST_ELEMENTS
    assert "more partitions" in beyond


def test_megabytes_are_short() -> None:
    assert [megabytes(size) for size in (0, 123_456, 9_940_000, 9_960_000, 1_680_000_000)] == [
        "0.0 MB", "0.1 MB", "9.9 MB", "10 MB", "1,680 MB",
    ]  # fmt: skip


def test_the_setting_allows_what_the_advice_may_name() -> None:
    assert any(
        getattr(limit, "le", None) == MOST_ELEMENTS for limit in Settings.model_fields["cache_max_elements"].metadata
    )

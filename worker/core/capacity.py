"""How large a cache must be: capacity = rate x TTL."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

MOST_ELEMENTS: Final = 1_000_000  # greatest capacity of a partition's cache


def entry_bytes(dimensions: int) -> int:
    """Return the most bytes that one cache entry uses."""
    with_codes = round(4 * dimensions * 1.3)  # scan.py has int8 codes of large caches
    return with_codes + 150  # of id, time and their Python objects: measured with ids of 45 characters


def per_second(times_ms: Sequence[int]) -> float | None:
    """Return the rate of entries with these stream times (rising, ms); None if they span no time."""
    span = times_ms[-1] - times_ms[0] if times_ms else 0
    return None if span <= 0 else 1000 * (len(times_ms) - 1) / span


def is_short(reach_ms: float, ttl_ms: int | None) -> bool:
    """Return whether entries leave by capacity, at an age of `reach_ms`, long before the TTL (None: no expiry).

    If a full cache reaches back less than half of the TTL, the TTL hardly decides how long entries live.
    """
    return ttl_ms is not None and reach_ms < 0.5 * ttl_ms


def capacity_for(rate: float, ttl_ms: int) -> int:
    """Return the capacity that holds the TTL at a rate (entries per second), rounded up to two digits."""
    exact = max(1, math.ceil(rate * ttl_ms / 1000))
    step: int = 10 ** max(0, len(str(exact)) - 2)
    return -(-exact // step) * step


def advice(rate: float | None, reach_ms: float, ttl_ms: int, dimensions: int) -> str:
    """Return which setting to change if entries leave by capacity long before the TTL, and the memory that it costs."""
    seconds = max(1, round(reach_ms / 1000))
    lower = f"lower KP_CACHE_TTL_SECONDS to about {seconds}"
    wanted = None if rate is None else capacity_for(rate, ttl_ms)
    if wanted is None:
        return f"raise KP_CACHE_MAX_ELEMENTS, or {lower}"
    if wanted > MOST_ELEMENTS:
        return f"{lower}, or spread the traces over more partitions: rate x TTL is {wanted}, beyond any capacity"
    memory = megabytes(wanted * entry_bytes(dimensions))
    return f"set KP_CACHE_MAX_ELEMENTS to about {wanted} (rate x TTL; at most {memory} for each partition), or {lower}"


def megabytes(size: int) -> str:
    """Return a number of bytes as MB, with one decimal below 10."""
    value = size / 1e6
    return f"{value:.1f} MB" if value < 9.95 else f"{value:,.0f} MB"

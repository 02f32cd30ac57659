"""Which cores embed a text: all of them, or one of several equal shares.

Lives here: that choice. Must not live here: the model's runtime (openvino_embedder.py), threads (pool.py).

Two texts at once with one core each need less CPU than one after the other with two cores: the threads of one text wait
for each other between layers, and spin meanwhile (short texts: 33 ms of CPU against 38, and 45 where they arrive one by
one). But a text alone is done in 20 ms with two cores, and in 33 with one.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from typing import Final

QUIET_SHARE: Final = 0.5
"""Share of the time with a text in the embedder below which a lone text gets all cores. At 20 % of the full rate it is
0.25 to 0.4, at half of it about 0.65."""

MEMORY_SECONDS: Final = 2.0
"""Time constant of that share's running mean."""


def available_cores() -> int:
    """Return on how many cores this process may run: its affinity, where the system has such a thing."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class CoreShares:
    """Gives each text all cores, or a free share of them. At most `shares` texts may hold some at a time."""

    def __init__(self, shares: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._free = list(range(shares))
        self._clock = clock
        self._lock = threading.Lock()
        self._texts = 0
        self._busy_share = 0.0
        self._changed = clock()

    def take(self) -> int | None:
        """Return a share's number, or None for all cores: for a text that comes alone while little is to do."""
        with self._lock:
            alone = self._texts == 0
            if alone:
                self._note(0.0)
            self._texts += 1
            return None if alone and self._busy_share < QUIET_SHARE else self._free.pop()

    def give_back(self, share: int | None) -> None:
        """Note that a text is done."""
        with self._lock:
            self._texts -= 1
            if share is not None:
                self._free.append(share)
            if not self._texts:
                self._note(1.0)

    def _note(self, busy: float) -> None:
        now = self._clock()
        self._busy_share = busy + (self._busy_share - busy) * math.exp((self._changed - now) / MEMORY_SECONDS)
        self._changed = now

"""Which cores embed a text: all of them, or one of several equal shares.

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

QUIET_USE: Final = 0.5
"""Use of the cores by the embedder below which a text gets all of them. At 20 % of the full rate it is about 0.3,
at half of it 0.5 to 0.7."""

MEMORY_SECONDS: Final = 2.0
"""Time constant of the running mean of that use."""


def available_cores() -> int:
    """Return on how many cores this process may run: its affinity, where the system has such a thing."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class CoreShares:
    """Gives each text all cores, or a free share of them. At most `shares` texts may hold some at a time."""

    def __init__(self, shares: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._shares = shares
        self._free = list(range(shares))
        self._clock = clock
        self._done = threading.Condition()
        self._all_taken = False
        self._use = 0.0
        self._changed = clock()

    def take(self) -> int | None:
        """Return a share's number, or None for all cores.

        While little is to do, each text gets all cores, and waits for one that has them: two texts of different widths
        would slow each other down.
        """
        with self._done:
            self._note_use()
            while self._all_taken and self._use < QUIET_USE:
                self._done.wait()
                self._note_use()
            if self._use < QUIET_USE and len(self._free) == self._shares:
                self._all_taken = True
                return None
            return self._free.pop()

    def give_back(self, share: int | None) -> None:
        """Note that a text is done."""
        with self._done:
            self._note_use()
            if share is None:
                self._all_taken = False
            else:
                self._free.append(share)
            self._done.notify_all()

    def _note_use(self) -> None:
        """Move the running mean towards what was in use since the last change: 0 to 1."""
        now = self._clock()
        used = 1.0 if self._all_taken else 1 - len(self._free) / self._shares
        self._use = used + (self._use - used) * math.exp((self._changed - now) / MEMORY_SECONDS)
        self._changed = now

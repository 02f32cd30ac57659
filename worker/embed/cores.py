"""Which cores embed a text: all of them, or one of several equal shares; and whether the budget permits shares.

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


ALLOWED_SHARE: Final = 0.02
"""Share of the evaluations that may exceed the budget. With half of it, pauses of a shared machine, which one by one
does not mend, ended the time side by side: a seventh less throughput, and as many evaluations beyond the budget."""

DEBT: Final = 3.9
"""This many evaluations beyond the allowed share end the time side by side. A short pause of the machine has fewer."""

WARM_UP: Final = 100
"""The first evaluations run one by one: the runtime prepares kernels for lengths that it has not met yet."""

FIRST_TRIAL: Final = 1000
LAST_TRIAL: Final = 16_000
"""After so many evaluations one by one, texts run side by side again: a trial. Each trial that fails doubles the
number. A trial of texts that are all too long costs four to six evaluations, so .6 % of all at most."""


SLOWDOWN: Final = 1.35
"""How much longer an evaluation takes side by side, at least (1.36 to 1.4 measured at the median of short and of long
texts). There is no trial while too many would exceed the budget even so."""

LOOK_AGAIN: Final = 300
"""Then so many evaluations are looked at again. This costs nothing, as none of them runs side by side."""


class BudgetedWidth:
    """Whether texts run side by side: only while evaluations stay inside the budget (KP_LATENCY_BUDGET_SECONDS).

    Side by side, two texts need less CPU, but each takes nearly twice as long as alone on all cores. Whether that is
    too long depends on the machine, on its neighbours and on the texts, so it is observed.
    """

    def __init__(self, budget_seconds: float) -> None:
        self._budget_seconds = budget_seconds
        self._debt = 0.0
        self._patience = FIRST_TRIAL
        self.side_by_side = False
        self._hopeless = 0  # evaluations one by one that would exceed the budget side by side
        self._left = self._waited = WARM_UP  # evaluations until the next trial, or until one has succeeded

    def observe(self, seconds: float) -> None:
        """Note how long an evaluation took."""
        self._left -= 1
        if not self.side_by_side:
            self._hopeless += SLOWDOWN * seconds > self._budget_seconds
            if self._left == 0:
                self._end_of_wait()
            return
        self._debt = max(0.0, self._debt + (seconds > self._budget_seconds) - ALLOWED_SHARE)
        if self._debt >= DEBT:
            self._wait(self._patience)
            self._patience = min(2 * self._patience, LAST_TRIAL)
        elif self._left == 0:
            self._patience = FIRST_TRIAL

    def _end_of_wait(self) -> None:
        if self._hopeless > ALLOWED_SHARE * self._waited:
            self._wait(LOOK_AGAIN)
        else:
            self.side_by_side, self._debt, self._left = True, 0.0, LAST_TRIAL

    def _wait(self, evaluations: int) -> None:
        self.side_by_side, self._hopeless = False, 0
        self._left = self._waited = evaluations


class CoreShares:
    """Gives each text all cores, or a free share of them. At most `shares` texts may ask at a time."""

    def __init__(self, shares: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._shares = shares
        self._free = list(range(shares))
        self._clock = clock
        self._done = threading.Condition()
        self._all_taken = False
        self._use = 0.0
        self._changed = clock()
        self.sharing = shares > 1
        """Whether texts may share the cores; otherwise each waits for all of them."""

    def take(self) -> int | None:
        """Return a share's number, or None for all cores.

        While little is to do, each text gets all cores, and waits for one that has them: two texts of different widths
        would slow each other down.
        """
        with self._done:
            self._note_use()
            while self._must_wait():
                self._done.wait()
                self._note_use()
            if self._all_free() and not (self.sharing and self._use >= QUIET_USE):
                self._all_taken = True
                return None
            return self._free.pop()

    def _must_wait(self) -> bool:
        if self.sharing:
            return self._all_taken and self._use < QUIET_USE
        return not self._all_free()

    def _all_free(self) -> bool:
        return not self._all_taken and len(self._free) == self._shares

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

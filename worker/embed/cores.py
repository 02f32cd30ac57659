"""Core allocation: a text gets all cores, or one of several equal shares.

With two texts at once on a core each, a text costs 33 ms of CPU; with one after the other on two cores, 38 to 45 ms,
because the threads of one text spin while they wait for each other. But a text alone takes 20 ms on two cores and 33 ms
on one. So texts share the cores under load, except those that would take too long for the budget.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

QUIET_USE: Final = 0.5
"""A text gets all cores while the embedder's use of them is below this: it is 0.3 at 20 % of the full rate, 0.5 to 0.7
at half."""

MEMORY_SECONDS: Final = 2.0  # time constant of the running mean of that use


def available_cores() -> int:
    """Return the number of cores that this process may use: its affinity, if the system has one."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


LONGEST: Final = 0.75
"""A text that would take longer than this part of the budget on a share gets all cores."""

FORGET: Final = 0.95
"""Weight of the earlier texts in the estimated time of a token, at each new text: about 20 texts count."""

OUTLIER: Final = 2.0  # a text counts as at most this many times its expected time: the machine may have paused

LAST_PART: Final = 0.15
LEAD_SECONDS: Final = 0.002
"""How long before the expected end of the text that has all cores the next one is admitted: a part of its expected
time, plus parsing and the switch to the thread. A part of 0.35 gave no higher throughput."""


@dataclass(frozen=True, slots=True)
class _Running:
    tokens: int
    started: float


class CoreShares:
    """Gives each text all cores, or a free share of them. At most `shares` texts may ask at a time.

    A text that would take more than LONGEST of `budget_seconds` on a share gets all cores, unless waiting for the
    others would make it finish later than on a share. The time of a token is measured: it depends on machine and load.
    """

    def __init__(
        self, shares: int, budget_seconds: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._shares = shares
        self._limit = LONGEST * budget_seconds
        self._clock = clock
        self._running: dict[int | None, _Running] = {}  # by share; None: all cores
        self._done = threading.Condition()
        self._waiting: list[int] = []  # tokens of the long texts that wait for all cores
        self._present = 0  # texts that have cores or wait for some
        self._seconds = self._tokens = 0.0  # totals of the latest texts, on a share
        self._use = 0.0
        self._changed = clock()
        self.permitted = float(shares)
        """How many texts may run at once: a mean of about the latest 20, in which a long text counts as 1."""

    def take(self, tokens: int) -> int | None:
        """Return the number of a share, or None for all cores, for a text of this many tokens.

        When load is low, each text gets all cores, after waiting for the one that has them: together they would slow
        each other down.
        """
        with self._done:
            long = self._expected(tokens) > self._limit
            self.permitted += (1 - FORGET) * ((1 if long else self._shares) - self.permitted)
            if long:
                self._waiting.append(tokens)
            self._present += 1
            self._note_use()
            while not self._may_start(tokens, long):
                self._done.wait()
                self._note_use()
            if long:
                self._waiting.remove(tokens)
            alone = not self._running and (long or self._shares == 1 or self._use < QUIET_USE)
            share = None if alone else min(set(range(self._shares)) - self._running.keys())
            self._running[share] = _Running(tokens, self._clock())
            return share

    def _may_start(self, tokens: int, long: bool) -> bool:
        if self._waiting and not long:
            return False
        if not self._running:
            return True
        if None in self._running or len(self._running) == self._shares:
            return False
        done_alone = max(map(self._remaining, self._running)) + self._expected(tokens, alone=True)
        return not long or done_alone >= self._expected(tokens)

    def give_back(self, share: int | None) -> None:
        """Free the cores of a finished text, and learn from its time."""
        with self._done:
            self._note_use()
            text = self._running.pop(share)
            self._present -= 1
            self._learn(text.tokens, (self._clock() - text.started) * (self._shares if share is None else 1))
            self._done.notify_all()

    def pause(self, texts: int) -> float:
        """Return how long the next text should stay outside, s: in here it would wait for one that has all cores.

        `texts`: the texts in the embedder. Some may not have asked for cores yet, so their length is unknown.
        """
        with self._done:
            if self._present < texts or (texts and not self._tokens):
                return LEAD_SECONDS
            if None in self._running:
                expected, remaining = self._expected(self._running[None].tokens, alone=True), self._remaining(None)
            elif self._waiting:
                expected = remaining = self._expected(self._waiting[0], alone=True)
            else:
                return 0.0
            return max(0.0, remaining - LAST_PART * expected - LEAD_SECONDS)

    def _expected(self, tokens: int, *, alone: bool = False) -> float:
        """Return how long a text takes on a share, or `alone` on all cores, s; 0.0 while nothing is known.

        A text that had all cores counts as longer than on a share, so that texts near the limit do not flip between
        the two.
        """
        on_share = tokens * self._seconds / self._tokens if self._tokens else 0.0
        return on_share / self._shares if alone else on_share

    def _remaining(self, share: int | None) -> float:
        text = self._running[share]
        return max(0.0, text.started + self._expected(text.tokens, alone=share is None) - self._clock())

    def _learn(self, tokens: int, seconds: float) -> None:
        if self._tokens:
            seconds = min(seconds, OUTLIER * self._expected(tokens))
        self._seconds = FORGET * self._seconds + seconds
        self._tokens = FORGET * self._tokens + tokens

    def _note_use(self) -> None:
        """Move the running mean of use (0 to 1) towards the use since the last change."""
        now = self._clock()
        used = 1.0 if None in self._running else len(self._running) / self._shares
        self._use = used + (self._use - used) * math.exp((self._changed - now) / MEMORY_SECONDS)
        self._changed = now

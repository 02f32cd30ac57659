"""Which cores embed a text: all of them, or one of several equal shares.

Two texts side by side with a core each take 33 ms of CPU a text, one after the other with two cores 38 to 45: threads
of one text spin while they wait for each other. But a text alone is done in 20 ms with two cores, in 33 with one. So
texts share the cores under load, except those that would take too long for the budget.
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
"""Use of the cores by the embedder below which a text gets all of them: 0.3 at 20 % of the full rate, 0.5 to 0.7 at
half."""

MEMORY_SECONDS: Final = 2.0  # time constant of the running mean of that use


def available_cores() -> int:
    """Return on how many cores this process may run: its affinity, where the system has such a thing."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


LONGEST: Final = 0.75
"""A text that would take longer on a share than this part of the budget gets all cores."""

FORGET: Final = 0.95
"""Weight of the earlier texts in the estimate of a token's time, at each further text: about 20 texts count."""

OUTLIER: Final = 2.0  # a text counts at most this many times what was expected: the machine may have paused

LAST_PART: Final = 0.15
LEAD_SECONDS: Final = 0.002
"""How much earlier the next text is admitted than the one with all cores is expected to end: a part of the expected
time, plus parsing and the switch to the thread. A part of 0.35 gave no more texts a second."""


@dataclass(frozen=True, slots=True)
class _Running:
    tokens: int
    started: float


class CoreShares:
    """Gives each text all cores, or a free share of them. At most `shares` texts may ask at a time.

    A text that would take more than LONGEST of `budget_seconds` on a share gets all cores, unless it is done earlier on
    a share than after its wait for the others. The time of a token is observed: it depends on machine and neighbours.
    """

    def __init__(
        self, shares: int, budget_seconds: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._shares = shares
        self._limit = LONGEST * budget_seconds
        self._clock = clock
        self._running: dict[int | None, _Running] = {}  # by share; None: with all cores
        self._done = threading.Condition()
        self._waiting: list[int] = []  # tokens of too long texts that wait for all cores
        self._present = 0  # texts that have cores, or wait for some
        self._seconds = self._tokens = 0.0  # of the latest texts, on a share
        self._use = 0.0
        self._changed = clock()
        self.permitted = float(shares)
        """How many texts may run side by side: a mean of about the latest 20, where one that is too long counts 1."""

    def take(self, tokens: int) -> int | None:
        """Return a share's number, or None for all cores, for a text of this many tokens.

        While little is to do, each text gets all cores, and waits for one that has them: they would slow each other
        down.
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
        """Note that a text is done."""
        with self._done:
            self._note_use()
            text = self._running.pop(share)
            self._present -= 1
            self._learn(text.tokens, (self._clock() - text.started) * (self._shares if share is None else 1))
            self._done.notify_all()

    def pause(self, texts: int) -> float:
        """Return how long the next text should wait elsewhere, s: here, it would wait for one that has all cores.

        `texts`: how many are in the embedder; the length of those that have not come here yet is not known.
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
        """Return how long a text takes on a share, or `alone` with all cores, s; 0.0 while nothing is known.

        A text that had all cores counts as longer than on a share, so those near the limit do not move to and fro.
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
        """Move the running mean towards what was in use since the last change: 0 to 1."""
        now = self._clock()
        used = 1.0 if None in self._running else len(self._running) / self._shares
        self._use = used + (self._use - used) * math.exp((self._changed - now) / MEMORY_SECONDS)
        self._changed = now

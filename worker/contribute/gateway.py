"""The way to the registry that all partitions of a process share: whose turn it is, and the verdicts.

Lives here: the two paces, the pause after a 429, why nothing gets through. Must not live here: what follows from a
verdict (delivery.py), HTTP (registry_client.py), the arithmetic (pace.py).
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Final

from worker.contribute.answers import Doubtful, HttpAnswer, Verdict, judge_look_up, judge_post, stated_rate
from worker.contribute.pace import RequestPace, pause_after_429
from worker.contribute.registry_client import NoAnswerError, RegistryClient
from worker.contribute.unit import Unit
from worker.contribute.waiting import Stop
from worker.observe.contribute_metrics import ContributeMetrics

STEP_SECONDS: Final = 0.5
"""How long to sleep at once while waiting for a turn: the answers to other partitions change the pace."""


class Gateway:
    """Gives turns: each is one look-up and one POST that the registry's limits allow.

    `trouble`: why nothing gets through at the moment, None: it does. `limited_at`: the time of the last 429, seconds
    since 1970.
    """

    def __init__(self, client: RegistryClient, metrics: ContributeMetrics, most: float | None) -> None:
        now = time.monotonic()
        self.trouble: str | None = None
        self.limited_at: float | None = None
        self._client = client
        self._metrics = metrics
        self._posts = RequestPace(now, most, most)
        self._look_ups = RequestPace(now, None, most)
        self._blocked_until = now

    @asynccontextmanager
    async def turn(self, stop: Stop) -> AsyncIterator[Turn]:
        """Wait for a turn, and take back what it does not use. Raises StoppedError."""
        while (seconds := self._wait_seconds()) > 0:
            await stop.sleep(min(seconds, STEP_SECONDS))
        stop.check()
        turn = Turn(self._client, self._look_ups, self._posts)
        try:
            yield turn
        finally:
            turn.end()
            if self._look_ups.fallback is None:  # where only the answers to POSTs state a limit
                self._look_ups.fallback = self._posts.limit
            if (left := self._posts.seen_left()) is not None:
                self._metrics.rate_left.set(left)

    def limited(self) -> None:
        """Note a 429, and give no turn for a long time."""
        self.remember_429(time.time(), pause_after_429(random.SystemRandom().random()))

    def remember_429(self, limited_at: float, seconds: float) -> None:
        """Give no turn for some time after a 429 at `limited_at`, seconds since 1970."""
        self.limited_at = max(limited_at, self.limited_at or 0.0)
        self._blocked_until = max(self._blocked_until, time.monotonic() + seconds)

    def blocked_seconds(self) -> float:
        """Return how long no turn is given because of a 429."""
        return max(0.0, self._blocked_until - time.monotonic())

    def _wait_seconds(self) -> float:
        now = time.monotonic()
        return max(self._blocked_until - now, self._posts.wait_seconds(now), self._look_ups.wait_seconds(now))


class Turn:
    """One look-up and one POST, reserved when the turn begins."""

    def __init__(self, client: RegistryClient, look_ups: RequestPace, posts: RequestPace) -> None:
        self._client = client
        self._paces = {"look_up": look_ups, "post": posts}
        self.began = time.monotonic()
        for pace in self._paces.values():
            pace.spend(self.began)

    async def look_up(self, trace_id: str) -> Verdict:
        """Ask for the unit with this id."""
        answer = await self._asked("look_up", self._client.look_up(trace_id))
        return answer if isinstance(answer, Doubtful) else judge_look_up(answer, trace_id)

    async def post(self, unit: Unit, key: str) -> Verdict:
        """Post the unit."""
        answer = await self._asked("post", self._client.post(unit.body, key))
        return answer if isinstance(answer, Doubtful) else judge_post(answer, unit.trace_id)

    def end(self) -> None:
        """Give back what was not used."""
        for pace in self._paces.values():
            pace.give_back(time.monotonic())
        self._paces.clear()

    async def _asked(self, kind: str, request: Awaitable[HttpAnswer]) -> HttpAnswer | Doubtful:
        pace = self._paces.pop(kind)
        try:
            answer = await request
        except NoAnswerError as error:
            return Doubtful(error.cause, str(error), unsent=error.unsent)
        finally:
            pace.finished()
        rate = stated_rate(answer)
        if rate is None:
            pace.learn_nothing()
        elif rate.limit > 0:
            pace.learn(rate.limit, rate.remaining, time.monotonic())
        return answer

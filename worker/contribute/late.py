"""Requests that landed after the look-up had found nothing: what of that can be seen afterwards.

Lives here: which units are looked at again, and when. Must not live here: the rest of the delivery (delivery.py).

A POST without an answer may still be on its way when the look-up finds nothing and a second POST is made. If it lands
last, the unit then shows another time than the second answer did.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from worker.contribute.answers import Present
from worker.contribute.gateway import Gateway
from worker.contribute.waiting import Stop
from worker.observe.contribute_metrics import ContributeMetrics


class _Watched(NamedTuple):
    trace_id: str
    time: str
    due: float


class LateWatch:
    """Looks up a unit once more, some time after its second POST, and counts a request that landed last."""

    def __init__(self, gateway: Gateway, metrics: ContributeMetrics, delay_seconds: float) -> None:
        self._gateway = gateway
        self._metrics = metrics
        self._delay = delay_seconds
        self._watched: deque[_Watched] = deque(maxlen=1000)

    def watch(self, trace_id: str, registry_time: str) -> None:
        """Look at the unit later. `registry_time`: what the answer to the second POST stated."""
        if registry_time:
            self._watched.append(_Watched(trace_id, registry_time, time.monotonic() + self._delay))

    async def run(self, stop: Stop) -> None:
        """Look at what is due, until stopped. Raises StoppedError."""
        while True:
            await stop.sleep(1.0)
            while self._watched and self._watched[0].due <= time.monotonic():
                await self._check(self._watched.popleft(), stop)

    async def _check(self, watched: _Watched, stop: Stop) -> None:
        async with self._gateway.turn(stop) as turn:
            verdict = await turn.look_up(watched.trace_id)
        if isinstance(verdict, Present) and verdict.time not in ("", watched.time):
            self._metrics.late.inc()

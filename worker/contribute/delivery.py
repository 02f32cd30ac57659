"""Delivery of one unit to the registry: at most one unit for its id, and never lost.

Lives here: the order of look-ups and POSTs, and what follows from each verdict. Must not live here: the verdicts
(answers.py), whose turn it is (gateway.py), Kafka (partition.py).

For each unit:
 1. wait for a turn: a look-up and a POST that the limits allow;
 2. look the id up. With our content: done, without a POST. With other content: refused, because a POST would replace
    it;
 3. absent: POST at once. 201: done. A verdict on the unit: refused.
 4. no answer, or none of the registry's own: pause, and begin at 1. What was sent may have landed, and 2 finds it.
So no request is sent again blindly, not even after a crash: only the unit at the committed offset can have been in
flight, and it begins at 1.

The registry may keep any answer below 500 for a day by its Idempotency-Key, also after the cause was mended. What is
replayed (Idempotency-Replayed) is therefore looked up (a 201) or asked for again with a new key.
"""

from __future__ import annotations

import hashlib
import logging
import random
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from worker.contribute.answers import Absent, Created, Denied, Doubtful, Limited, Present, Rejected, Verdict
from worker.contribute.gateway import Gateway
from worker.contribute.late import LateWatch
from worker.contribute.pace import Pauses
from worker.contribute.unit import Refusal, Unit, same_unit
from worker.contribute.waiting import Stop
from worker.observe.contribute_metrics import ContributeMetrics

log = logging.getLogger(__name__)

FRESH_SECONDS: Final = 5.0
"""A look-up that began longer ago, because the process was frozen or slow, is made again before the POST."""


class DeniedError(Exception):
    """The registry does not accept the key; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """The registry holds the unit. `status`: 201 it was posted, 200 it was there. `time`: the registry's."""

    status: int
    time: str


@dataclass(slots=True)
class _Attempts:
    """What the attempts for one unit have shown so far.

    `doubted`: a POST has had no answer. `replayed`: a 201 was one of an earlier request.
    """

    key: str
    doubted: bool = False
    replayed: bool = False


class Delivery:
    """Delivers units to the registry."""

    def __init__(self, gateway: Gateway, metrics: ContributeMetrics, late: LateWatch, group: str) -> None:
        self._gateway = gateway
        self._metrics = metrics
        self._late = late
        self._group = group

    async def deliver(self, unit: Unit, stop: Stop, on_limited: Callable[[], Awaitable[None]]) -> Delivered | Refusal:
        """Return when the registry holds the unit or refuses it. Raises DeniedError, and StoppedError between requests.

        Waits for as long as it takes: a registry that is down, slow or lying loses nothing. `on_limited` is called
        after a 429, to remember it.
        """
        attempts = _Attempts(self._first_key(unit))
        pauses = Pauses()
        while True:
            verdict = await self._attempt(unit, attempts, stop)
            result = self._result(unit, attempts, verdict)
            if result is not None:
                self._gateway.trouble = None
                return result
            if isinstance(verdict, Limited):
                self._gateway.limited()
                await on_limited()
            if not isinstance(verdict, Absent):
                await self._pause(verdict, attempts, pauses, stop)

    def _first_key(self, unit: Unit) -> str:
        """Return the same key for the same content, also after a restart."""
        return hashlib.sha256(f"{self._group}\n{unit.trace_id}\n{unit.sha256}".encode()).hexdigest()

    async def _attempt(self, unit: Unit, attempts: _Attempts, stop: Stop) -> Verdict:
        """Look the unit up, and post it if it is absent."""
        async with self._gateway.turn(stop) as turn:
            found = await turn.look_up(unit.trace_id)
            if not isinstance(found, Absent):
                return found
            if attempts.replayed:  # it was deleted since the answer that is replayed
                attempts.key, attempts.replayed = uuid.uuid4().hex, False
            stop.check()
            if time.monotonic() - turn.began > FRESH_SECONDS:
                return found
            verdict = await turn.post(unit, attempts.key)
            attempts.doubted |= isinstance(verdict, Doubtful) and not verdict.unsent
            return verdict

    def _result(self, unit: Unit, attempts: _Attempts, verdict: Verdict) -> Delivered | Refusal | None:
        """Return what ends the delivery. Raises DeniedError."""
        match verdict:
            case Present():
                if not same_unit(unit.document, verdict.unit):
                    return Refusal("conflict", "the registry has a unit with this id and other content", "id", 200)
                if attempts.replayed:
                    self._metrics.late.inc()
                return Delivered(200, verdict.time)
            case Created(replayed=False):
                if attempts.doubted:
                    self._late.watch(unit.trace_id, verdict.time)
                return Delivered(201, verdict.time)
            case Rejected(replayed=False):
                message = f"the registry refuses the unit ({verdict.status}); kp-error-issues says why"
                return Refusal(verdict.reason, message, "", verdict.status, verdict.issues)
            case Denied(replayed=False):
                raise DeniedError(denied_words(verdict))
        return None

    async def _pause(self, verdict: Verdict, attempts: _Attempts, pauses: Pauses, stop: Stop) -> None:
        """Prepare the next attempt, and wait before it."""
        match verdict:
            case Limited():
                cause, words = "rate_limit", "the registry answered 429: too many requests with this agent's keys"
                log.error("%s; nothing is sent for %.0f s", words, self._gateway.blocked_seconds())
            case Doubtful():
                cause, words = verdict.cause, verdict.words
            case Created():
                attempts.replayed = True
                cause, words = "stored_answer", "the registry replayed an earlier answer; it is checked"
            case _:
                attempts.key = uuid.uuid4().hex
                cause, words = "stored_answer", "the registry replayed an earlier refusal; it is asked again"
        self._metrics.retries.labels(cause).inc()
        asked_for = verdict.retry_after_seconds if isinstance(verdict, Doubtful) else 0.0
        seconds = pauses.next_seconds(random.SystemRandom().random(), asked_for)
        self._gateway.trouble = words
        log.warning("%s; the next attempt follows in %.1f s", words, seconds, extra={"reason": cause})
        await stop.sleep(seconds)


def denied_words(denied: Denied) -> str:
    """Return what a registry that does not accept the key said, and what to do."""
    said = f"{denied.status}{f' {denied.words!r}' if denied.words else ''}"
    if denied.status == 403:
        return (
            f"the registry denies contributing: {said}. The key needs the scope write, and a new agent needs a "
            "reputation of at least 0.1 (docs/contribute.md)"
        )
    return f"the registry does not accept the key: {said}. It is missing, wrong or revoked (docs/contribute.md)"

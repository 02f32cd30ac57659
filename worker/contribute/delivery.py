"""Delivery of one unit to the registry: no unit is lost or stored twice, even if an answer is late.

For each unit:
 1. Wait for a turn: a look-up and a POST that the limits allow.
 2. Look the id up. With our content: done, without a POST. With other content: refused, because a POST would replace
    it.
 3. Absent: POST at once. 201: done. A verdict on the unit: refused.
 4. No answer, or none of the registry's own: pause and return to 1. The request may have succeeded; then 2 finds the
    unit. After a number of definite answers that are not the registry's, the caller decides what to do with the unit.
So no request is repeated blindly, not even after a crash: a unit that may have been in flight is not committed, and
starts at 1.

The registry may keep any answer below 500 for a day by its Idempotency-Key, even after the cause was fixed. A replayed
answer (Idempotency-Replayed) is therefore looked up (if it is a 201) or requested again with a new key.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct

from worker.contribute.registry import (
    Absent,
    Created,
    Denied,
    Doubtful,
    HttpAnswer,
    Limited,
    Present,
    RegistryClient,
    Rejected,
    Verdict,
    judge_look_up,
    judge_post,
    stated_rate,
)
from worker.contribute.unit import Refusal, Unit, same_unit
from worker.kafka.member import Stop
from worker.observe.metrics import ContributeMetrics

log = logging.getLogger(__name__)

_random = random.SystemRandom()

UNKNOWN_LIMIT: Final = 30.0
"""Requests a minute until an answer states the limit: the lowest tier's."""


@dataclass(slots=True)
class RequestPace:
    """The pace of one kind of request, chosen so that the registry never answers 429; times of any monotonic clock, s.

    The registry counts requests in a bucket, which holds `limit` tokens when full and gains `limit` a minute. All
    processes with keys of one agent share it, and each answer says how many tokens are left. So each process refills
    its own small bucket at the same rate, and slows down while fewer than half of the registry's tokens are left. A
    single process keeps the registry's bucket nearly full, and so gets the whole rate. With several, the tokens settle
    at the level where all of them together use it; none needs to know how many there are.
    """

    now: float
    most: float = math.inf  # requests a minute that a setting allows
    fallback: float | None = None  # counts if an answer states no limit
    limit: float | None = None
    unstated: bool = False  # an answer came that states no limit
    tokens: float = 1.0
    left: float = 0.0
    in_flight: int = 0

    def wait_seconds(self, now: float) -> float:
        """Return the least wait before the next request, s; 0: it may go now."""
        self._advance(now)
        if self.tokens >= 1.0:
            return 0.0
        rate = self._rate()
        return (1.0 - self.tokens) / rate if rate > 0 else 60.0 / self._limit()

    def spend(self, now: float) -> None:
        """Note that a request goes out now."""
        self._advance(now)
        self.tokens -= 1.0
        self.left -= 1.0
        self.in_flight += 1

    def give_back(self, now: float) -> None:
        """Take back a `spend` whose request is not made."""
        self._advance(now)
        self.tokens = min(self._capacity(), self.tokens + 1.0)
        self.left += 1.0
        self.in_flight -= 1

    def finished(self) -> None:
        """Note that a request has ended, with or without an answer."""
        self.in_flight -= 1

    def learn(self, limit: float, remaining: float, now: float) -> None:
        """Note the limit that an answer states; call it after `finished`. It may not count others in flight."""
        self._advance(now)
        self.limit = max(1.0, limit)
        self.left = remaining - self.in_flight
        self.tokens = min(self.tokens, self._capacity())

    def _advance(self, now: float) -> None:
        passed = max(0.0, now - self.now)
        self.now = now
        self.tokens = min(self._capacity(), self.tokens + passed * self._rate())
        self.left = min(self._limit(), self.left + passed * self._limit() / 60)

    def _rate(self) -> float:
        """Return our current refill, tokens a second."""
        limit = self._limit()
        full = min(limit, self.most) / 60
        if self.limit is None:
            return full if self.unstated or not self.in_flight else 0.0
        reserve = min(max(3.0, 0.1 * limit), limit / 2)  # with fewer tokens at the registry nothing is sent
        easy = max(0.5 * limit, reserve + 1)  # from here on the whole rate is used
        return full * min(1.0, max(0.0, (self.left - reserve) / (easy - reserve)))

    def _capacity(self) -> float:
        """Return the size of our bucket, tokens: two seconds of its refill, so that a pause saves up no more."""
        return max(1.0, 2.0 * min(self._limit(), self.most) / 60)

    def _limit(self) -> float:
        return self.limit or (self.unstated and self.fallback) or UNKNOWN_LIMIT


@dataclass(slots=True)
class Pauses:
    """Pauses that grow from failure to failure."""

    failures: int = 0

    def next_seconds(self, at_least: float = 0.0) -> float:
        """Return the next pause, s: twice the one before up to LONGEST_PAUSE, reduced at random by up to a half.

        `at_least`: the registry's request (Retry-After), up to LONGEST_PAUSE.
        """
        whole = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0**self.failures)
        self.failures = min(self.failures + 1, 32)
        return max(min(at_least, LONGEST_PAUSE), whole * _random.uniform(0.5, 1.0))


FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 60.0

AFTER_429_SECONDS: Final = 1900.0
"""No request for 32 minutes after a 429. Three within an hour revoke the key; so one process causes at most two."""


STEP_SECONDS: Final = 0.5
"""Maximum single sleep while waiting for a turn: answers to other partitions change the pace."""


class Gateway:
    """Gives turns: each is one look-up and one POST that the registry's limits allow."""

    def __init__(self, client: RegistryClient, metrics: ContributeMetrics, most: float | None) -> None:
        now = time.monotonic()
        self.client = client
        self.posts = RequestPace(now, most or math.inf, most)
        self.look_ups = RequestPace(now, fallback=most)
        self.trouble: str | None = None
        """Why nothing gets through at the moment; None: it does."""
        self.limited_at: float | None = None
        """The time of the last 429, s since 1970."""
        self.answered_at = -math.inf
        """When the registry itself last answered a POST, of any partition, s of time.monotonic."""
        self._metrics = metrics
        self._blocked_until = now

    @asynccontextmanager
    async def turn(self, stop: Stop) -> AsyncIterator[Turn]:
        """Wait for a turn, and give back its unused parts. Raises StoppedError."""
        while (seconds := self._wait_seconds()) > 0:
            await stop.sleep(min(seconds, STEP_SECONDS))
        stop.check()
        turn = Turn(self, stop)
        try:
            yield turn
        finally:
            for pace in turn.unused.values():
                pace.give_back(time.monotonic())
            if self.look_ups.fallback is None:  # in case only the answers to POSTs state a limit
                self.look_ups.fallback = self.posts.limit
            if self.posts.limit is not None:
                self._metrics.rate_left.set(max(0.0, self.posts.left))

    def remember_429(self, limited_at: float, seconds: float) -> None:
        """Give no turn for some time after a 429 at `limited_at`, s since 1970.

        A time in the future, from a wrong clock, counts as now: otherwise each restart until then would wait.
        """
        self.limited_at = max(min(limited_at, time.time()), self.limited_at or 0.0)
        self._blocked_until = max(self._blocked_until, time.monotonic() + seconds)

    def blocked_seconds(self) -> float:
        """Return for how long no turn is given because of a 429, s."""
        return max(0.0, self._blocked_until - time.monotonic())

    def _wait_seconds(self) -> float:
        now = time.monotonic()
        return max(self._blocked_until - now, self.posts.wait_seconds(now), self.look_ups.wait_seconds(now))


class Turn:
    """One look-up and one POST, reserved when the turn begins."""

    def __init__(self, gateway: Gateway, stop: Stop) -> None:
        self._gateway, self._stop = gateway, stop
        self.unused = {"look_up": gateway.look_ups, "post": gateway.posts}
        self._looked_up: HttpAnswer | None = None
        self.began = time.monotonic()
        for pace in self.unused.values():
            pace.spend(self.began)

    async def look_up(self, trace_id: str) -> Verdict:
        """Look up the unit with this id. Raises StoppedError: a look-up without its answer costs nothing."""
        answer = await self._asked("look_up", self._stop.unless_set(self._gateway.client.look_up(trace_id)))
        if isinstance(answer, Doubtful):
            return answer
        self._looked_up = answer
        verdict = await asyncio.to_thread(judge_look_up, answer, trace_id)
        if isinstance(verdict, Denied) and verdict.status == 429:  # the registry allows look-ups even without a key
            return Limited(own=False)
        return verdict

    async def post(self, unit: Unit, key: str) -> Verdict:
        """Post the unit."""
        answer = await self._asked("post", self._gateway.client.post(unit.body, key))
        if isinstance(answer, Doubtful):
            return answer
        verdict = await asyncio.to_thread(judge_post, answer, unit.trace_id)
        if isinstance(verdict, Denied) and verdict.status == 429 and not await self._key_is_unknown(unit.trace_id):
            return Limited(own=False)
        if isinstance(verdict, Created | Rejected):
            self._gateway.answered_at = time.monotonic()
        return verdict

    async def _key_is_unknown(self, trace_id: str) -> bool:
        """Return whether the registry itself gives our key the same limit on look-ups as no key.

        A 429 does not name the schema, so a gateway may have sent it.
        """
        nobodys = await self._gateway.client.look_up(trace_id, as_nobody=True)
        if self._looked_up is None or isinstance(nobodys, Doubtful):
            return False
        ours, others = stated_rate(self._looked_up), stated_rate(nobodys)
        own = judge_look_up(nobodys, trace_id) == Absent()
        return own and ours is not None and others is not None and ours.limit == others.limit

    async def _asked(self, kind: str, request: Awaitable[HttpAnswer | Doubtful]) -> HttpAnswer | Doubtful:
        pace = self.unused.pop(kind)
        try:
            answer = await request
        finally:
            pace.finished()
        if not isinstance(answer, Doubtful):
            rate = stated_rate(answer)
            if rate is None:
                pace.unstated = True
            elif rate.limit > 0:
                pace.learn(rate.limit, rate.remaining, time.monotonic())
        return answer


class DeniedError(Exception):
    """The registry does not accept the key; the message says why and what to do."""


class Delivered(Struct, frozen=True):
    """The registry holds the unit."""

    status: int  # 201: it was posted, 200: it was there
    time: str  # the registry's


class Unanswered(Struct, frozen=True):
    """Something else answers in the registry's place."""

    words: str  # what it says, for people


@dataclass(frozen=True, slots=True)
class Delivery:
    """Delivers units to the registry."""

    gateway: Gateway
    metrics: ContributeMetrics
    late_seconds: float  # from the answer to a second POST to the look whether the first one landed after it
    group: str
    _looks: set[asyncio.Task[None]] = field(default_factory=set)

    async def deliver(
        self, unit: Unit, stop: Stop, on_limited: Callable[[], Awaitable[None]], answers: float,
        place: Mapping[str, object],
    ) -> Delivered | Refusal | Unanswered:  # fmt: skip
        """Return when the registry holds the unit or refuses it. Raises DeniedError, and StoppedError between requests.

        Waits for as long as it takes: nothing is lost if the registry is down, slow or wrong. After `answers` definite
        answers that are not the registry's own, returns Unanswered: their sender may never stop. `on_limited` is called
        after a 429, to save its time. `place`: of the record, for the log.
        """
        pauses, gateway = Pauses(), self.gateway
        # The Idempotency-Key is the same after a restart.
        key = hashlib.sha256(f"{self.group}\n{unit.trace_id}\n{unit.sha256}".encode()).hexdigest()
        doubted = False  # a POST had no answer
        replayed = False  # a 201 was the answer to an earlier request
        while True:
            async with gateway.turn(stop) as turn:
                verdict = await turn.look_up(unit.trace_id)
                if isinstance(verdict, Absent):
                    if replayed:  # it was deleted after the replayed answer
                        key, replayed = uuid.uuid4().hex, False
                    stop.check()
                    if time.monotonic() - turn.began > 5.0:
                        continue  # the process was frozen or slow: look again before the POST
                    verdict = await turn.post(unit, key)
                    doubted |= isinstance(verdict, Doubtful) and not verdict.unsent
            cause, definite, asked_for = "stored_answer", False, 0.0
            result: Delivered | Refusal | None = None
            match verdict:
                case Present():
                    if await asyncio.to_thread(same_unit, unit.document, verdict.unit, unit.rules):
                        self.metrics.late.inc(replayed)
                        result = Delivered(200, verdict.time)
                    else:
                        message = "the registry has a unit with this id and other content"
                        result = Refusal("conflict", message, "id", 200)
                case Created(replayed=False):
                    if doubted and verdict.time:
                        look = asyncio.create_task(self._count_if_late(unit.trace_id, verdict.time))
                        self._looks.add(look)
                        look.add_done_callback(self._looks.discard)
                    result = Delivered(201, verdict.time)
                case Rejected(replayed=False):
                    message = f"the registry refuses the unit ({verdict.status}); kp-error-issues says why"
                    result = Refusal(verdict.reason, message, "", verdict.status, verdict.issues)
                case Denied(replayed=False):
                    raise DeniedError(denied_words(verdict))
                case Limited():  # no turn for a long time: longer by up to a fifth, so that processes differ
                    gateway.remember_429(time.time(), AFTER_429_SECONDS * _random.uniform(1.0, 1.2))
                    await on_limited()
                    cause, words = "rate_limit", "the registry answered 429: too many requests with this agent's keys"
                    log.error("%s; nothing is sent for %.0f s", words, gateway.blocked_seconds())
                    definite = not verdict.own
                case Doubtful():
                    cause, words, asked_for = verdict.cause, verdict.words, verdict.retry_after_seconds
                    definite = verdict.status is not None
                case Created():
                    replayed, words = True, "the registry replayed an earlier answer; it is checked"
                case _:
                    key, words = uuid.uuid4().hex, "the registry replayed an earlier refusal; it is asked again"
            if result is not None:
                gateway.trouble = None
                return result
            self.metrics.retries.labels(cause).inc()
            gateway.trouble = words
            answers -= definite
            if answers <= 0:
                return Unanswered(words)
            seconds = pauses.next_seconds(asked_for)
            log.warning("%s; the next attempt follows in %.1f s", words, seconds, extra={**place, "reason": cause})
            await stop.sleep(seconds)

    async def _count_if_late(self, trace_id: str, registry_time: str) -> None:
        """Look the unit up again later, and count it if the first POST landed after the second one, at this time."""
        await asyncio.sleep(self.late_seconds)
        async with self.gateway.turn(Stop()) as turn:
            verdict = await turn.look_up(trace_id)
        if isinstance(verdict, Present) and verdict.time not in ("", registry_time):
            self.metrics.late.inc()


def denied_words(denied: Denied) -> str:
    """Return the registry's words when it does not accept the key, and what to do."""
    answer = f"{denied.status}{f' {denied.words!r}' if denied.words else ''}"
    if denied.status == 403:
        return (
            f"the registry denies contributing: {answer}. The key needs the scope write, and a new agent needs a "
            "reputation of at least 0.1 (docs/contribute.md)"
        )
    return f"the registry does not accept the key: {answer}. It is missing, wrong or revoked (docs/contribute.md)"

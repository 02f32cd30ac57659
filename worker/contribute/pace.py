"""The pace of requests, chosen so that the registry never answers 429.

The registry counts requests in a bucket, which holds `limit` tokens when full and gains `limit` a minute. All processes
with keys of one agent share it, and each answer says how many tokens are left. So each process refills its own small
bucket at the same rate, and slows down while fewer than half of the registry's tokens are left. A single process keeps
the registry's bucket nearly full, and so gets the whole rate. With several, the tokens settle at the level where all of
them together use it; none needs to know how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

UNKNOWN_LIMIT: Final = 30.0
"""Requests a minute until an answer states the limit: the lowest tier's."""

BURST_SECONDS: Final = 2.0
"""Capacity of our bucket, in seconds of its refill: a pause saves up no more."""

RESERVE_SHARE: Final = 0.1
LEAST_RESERVE: Final = 3.0
"""Below this share of the registry's tokens, or this number of them, nothing is sent."""

EASY_SHARE: Final = 0.5
"""From this share of the registry's tokens on, the whole rate is used."""


@dataclass(slots=True)
class RequestPace:
    """The tokens of one kind of request. Times are in seconds, of any monotonic clock."""

    now: float
    most: float | None = None  # requests a minute that a setting allows; None: no limit
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

    def learn_nothing(self) -> None:
        """Note that an answer states no limit."""
        self.unstated = True

    def seen_left(self) -> float | None:
        """Return the tokens left at the registry, as far as known."""
        return None if self.limit is None else max(0.0, self.left)

    def _advance(self, now: float) -> None:
        passed = max(0.0, now - self.now)
        self.now = now
        self.tokens = min(self._capacity(), self.tokens + passed * self._rate())
        self.left = min(self._limit(), self.left + passed * self._limit() / 60)

    def _rate(self) -> float:
        """Return our current refill, tokens a second."""
        limit = self._limit()
        full = (limit if self.most is None else min(limit, self.most)) / 60
        if self.limit is None:
            return full if self.unstated or not self.in_flight else 0.0
        reserve = min(max(LEAST_RESERVE, RESERVE_SHARE * limit), limit / 2)
        easy = max(EASY_SHARE * limit, reserve + 1)
        return full * min(1.0, max(0.0, (self.left - reserve) / (easy - reserve)))

    def _capacity(self) -> float:
        limit = self._limit()
        return max(1.0, BURST_SECONDS * (limit if self.most is None else min(limit, self.most)) / 60)

    def _limit(self) -> float:
        if self.limit is not None:
            return self.limit
        return self.fallback if self.unstated and self.fallback is not None else UNKNOWN_LIMIT


@dataclass(slots=True)
class Pauses:
    """Pauses that grow from failure to failure."""

    failures: int = 0

    def next_seconds(self, chance: float, at_least: float = 0.0) -> float:
        """Return the next pause, s: twice the one before up to LONGEST_PAUSE, reduced at random by up to a half.

        `chance`: the random number, 0 to 1. `at_least`: the registry's request (Retry-After), up to LONGEST_PAUSE.
        """
        whole = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0**self.failures)
        self.failures = min(self.failures + 1, 32)
        return max(min(at_least, LONGEST_PAUSE), whole * (1.0 - chance / 2))


FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 60.0

AFTER_429_SECONDS: Final = 1900.0
"""No request for 32 minutes after a 429. Three within an hour revoke the key; so one process causes at most two."""


def pause_after_429(chance: float) -> float:
    """Return how long to send nothing after a 429, s: longer by up to a fifth, so that processes differ."""
    return AFTER_429_SECONDS * (1.0 + chance / 5)

"""The registry's rate limits: tiers, and one token bucket for each agent and kind of request.

Lives here: how many tokens a bucket has, and the answer's headers. Must not live here: HTTP, keys, the count of 429s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Tier:
    """Requests a minute: POSTs are writes, all others reads."""

    writes: int
    reads: int


TIERS: Final = {
    "anonymous": Tier(writes=0, reads=60),  # no key, or one that is not known or revoked
    "free": Tier(writes=30, reads=300),
    "pro": Tier(writes=200, reads=1000),
    "enterprise": Tier(writes=2000, reads=10_000),
}

WINDOW_SECONDS: Final = 60


@dataclass(frozen=True)
class Allowance:
    """The verdict on one request; `reset` in s since 1970, `retry_after` in s and None where it is allowed."""

    limit: int
    remaining: int
    reset: int
    retry_after: int | None = None

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the answer."""
        named = {"X-RateLimit-Limit": self.limit, "X-RateLimit-Remaining": self.remaining,
                 "X-RateLimit-Reset": self.reset, "Retry-After": self.retry_after}  # fmt: skip
        return {name: str(value) for name, value in named.items() if value is not None}


class TokenBuckets:
    """A bucket of `limit` tokens for each name, refilled at limit/60 a second."""

    def __init__(self) -> None:
        self._filled: dict[str, tuple[float, float]] = {}

    def take(self, name: str, limit: int, now: float) -> Allowance:
        """Take a token at `now` (s since 1970), if there is one. A limit of 0 allows nothing, ever."""
        if limit == 0:
            return Allowance(0, 0, int(now) + WINDOW_SECONDS, WINDOW_SECONDS)
        rate = limit / WINDOW_SECONDS
        tokens, before = self._filled.get(name, (float(limit), now))
        tokens = min(float(limit), tokens + max(0.0, now - before) * rate)
        if tokens < 1:
            self._filled[name] = (tokens, now)
            wait = math.ceil((1 - tokens) / rate)
            return Allowance(limit, 0, int(now) + wait, wait)
        self._filled[name] = (tokens - 1, now)
        # As the registry has it: the reset says nothing about the bucket.
        return Allowance(limit, int(tokens - 1), int(now) + WINDOW_SECONDS)

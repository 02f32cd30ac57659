"""The dead-letter limit: stops the worker early when, for example, a deployment has broken all producers."""

from __future__ import annotations

from collections import deque


class DeadLetterLimitError(Exception):
    """Too many of the last records were dead letters; the worker stops so that the cause is examined."""


class DeadLetterLimit:
    """Raises an error when more than `share` (0..1) of the last `window` records were dead letters.

    It needs a full window: the first `window` records after each start are not limited.
    """

    def __init__(self, share: float, window: int) -> None:
        self._share = share
        self._last: deque[bool] = deque(maxlen=window)
        self._dead = 0

    def record(self, dead: bool) -> None:
        """Count one record. Raises DeadLetterLimitError."""
        if len(self._last) == self._last.maxlen and self._last[0]:
            self._dead -= 1
        self._last.append(dead)
        self._dead += dead
        if dead and len(self._last) == self._last.maxlen and self._dead > self._share * len(self._last):
            raise DeadLetterLimitError(
                f"{self._dead} of the last {len(self._last)} records were dead letters, more than "
                f"KP_DEAD_LETTER_BREAKER_SHARE={self._share:g}: check kp-error-reason on the dead-letter topic, fix "
                "the producers and restart (or raise the share)"
            )

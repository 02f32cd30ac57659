"""Waiting that a stop ends.

Lives here: sleeping, and pauses between failures. Must not live here: how long a pause is (pace.py).
"""

from __future__ import annotations

import asyncio


class StoppedError(Exception):
    """The wait was ended, because the partition is to be given up or the process is to stop."""


class Stop:
    """Says when to stop, and ends all waits then."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """Stop."""
        self._event.set()

    def is_set(self) -> bool:
        """Whether to stop."""
        return self._event.is_set()

    def check(self) -> None:
        """Raise StoppedError after `set`."""
        if self._event.is_set():
            raise StoppedError

    async def sleep(self, seconds: float) -> None:
        """Sleep. Raises StoppedError at once after `set`."""
        self.check()
        try:
            await asyncio.wait_for(self._event.wait(), seconds)
        except TimeoutError:
            return
        raise StoppedError

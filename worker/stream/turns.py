"""Turns: from which partition the next record is taken.

Behind a backlog a partition keeps its turn for a while, so that its next transaction carries many records: a
transaction costs a third of an embedding's CPU, whether it carries one record or hundreds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

TURN_SECONDS: Final = 0.25
"""How long a turn lasts at least while another partition waits.

A partition with a backlog waits for at most two turns of each other waiting partition. One that has just received
records goes before those: it waits for at most two turns of each partition that has just received some too."""

TURN_RECORDS: Final = 16
LONGEST_TURN_SECONDS: Final = 2.0
"""A turn that has fewer records lasts longer, up to this time. A transaction costs up to 20 ms of CPU: 4 % of the
embedding of 16 traces."""


class Turns:
    """The partitions with waiting records.

    Partitions that had no waiting record before come in one queue, partitions with records left after their turn in
    another. The queues alternate, so neither can be starved by the other.
    """

    def __init__(self) -> None:
        self._new: deque[int] = deque()
        self._left: deque[int] = deque()
        self._since: dict[int, float] = {}
        self._from_new = False
        self._began = 0.0
        self._records = 0
        self.current: int | None = None
        """The partition that has the turn."""

    def __bool__(self) -> bool:
        """Whether any partition has waiting records."""
        return self.current is not None or bool(self._new) or bool(self._left)

    def join(self, partition: int, now: float) -> None:
        """Note that a partition without waiting records has received some."""
        self._new.append(partition)
        self._since[partition] = now

    def leave(self) -> None:
        """Note that the partition that has the turn has no waiting record left."""
        self.current = None

    def choose(self, accepts: Callable[[int], bool], now: float) -> float | None:
        """Set `current` to the partition from which the next record is taken, or None if no partition is accepted.

        Return how long it has waited for its turn, s; None if it has had the turn already, or if there is none.
        """
        former = self.current
        if former is not None and self._lasts(now) and accepts(former):
            self._records += 1
            return None
        following = self._following(accepts)
        if following is None and former is not None and accepts(former):
            return None  # no other partition can use the turn
        if former is not None:
            self._left.append(former)
            self._since[former] = now
        self.current = following
        if following is None:
            return None
        self._began, self._records = now, 1
        return now - self._since.pop(following)

    def _lasts(self, now: float) -> bool:
        lasted = now - self._began
        return lasted < TURN_SECONDS or (self._records < TURN_RECORDS and lasted < LONGEST_TURN_SECONDS)

    def _following(self, accepts: Callable[[int], bool]) -> int | None:
        for queue in (self._left, self._new) if self._from_new else (self._new, self._left):
            for _ in range(len(queue)):
                partition = queue.popleft()
                if accepts(partition):
                    self._from_new = queue is self._new
                    return partition
                queue.append(partition)
        return None

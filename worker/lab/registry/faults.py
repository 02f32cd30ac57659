"""Faults on request: which answers go wrong, how, and whether the request took effect first."""

from __future__ import annotations

import enum
import random
from collections.abc import Mapping
from dataclasses import dataclass, field


class FaultKind(enum.StrEnum):
    """What a client sees."""

    ERROR = "error"  # 500, 502 or 503
    SLOW = "slow"  # the right answer, after slow_seconds
    RESET = "reset"  # the connection is reset
    HTML = "html"  # 200 with a page, like a captive portal or a proxy
    TRUNCATED = "truncated"  # the right status, half of the JSON
    REDIRECT = "redirect"  # 307 to another path


@dataclass
class Faults:
    """The share of faulty requests, by kind."""

    shares: Mapping[FaultKind, float] = field(default_factory=dict)  # in total at most 1
    after: float = 0.5  # share of the faults that come after the request took effect
    slow_seconds: float = 30.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= sum(self.shares.values()) <= 1 or any(share < 0 for share in self.shares.values()):
            raise ValueError(f"the shares of faults must be from 0 to 1 together, not {sum(self.shares.values()):g}")
        self._random = random.Random(self.seed)  # noqa: S311 no secrets

    def choose(self) -> tuple[FaultKind | None, bool]:
        """Return the next request's fault, or None, and whether the request takes effect before the fault."""
        drawn = self._random.random()
        for kind, share in self.shares.items():
            drawn -= share
            if drawn < 0:
                return kind, self._random.random() < self.after
        return None, False

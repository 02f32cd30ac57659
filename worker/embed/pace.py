"""The estimate of how long a text takes to embed, from the texts before it. No clock, no threads."""

from __future__ import annotations

import math
from typing import Final

WEIGHT: Final = 0.1
"""Weight of the newest text in the running mean: the estimate follows a change of speed within about 20 texts."""


class Pace:
    """Estimates the time in proportion to a text's length, up to the time for texts truncated at the token limit.

    A forward pass is nearly linear up to a few hundred tokens (21 MFLOP per token, and attention 9 kFLOP more for each
    token of length), and texts have about the same number of tokens per character.
    """

    def __init__(self) -> None:
        self._a_character = 0.0
        self._cut = math.inf

    def learn(self, characters: int, truncated: bool, seconds: float) -> None:
        """Update the estimate with the time that a text took."""
        if truncated:
            self._cut = seconds if math.isinf(self._cut) else _moved(self._cut, seconds)
        else:
            each = seconds / max(1, characters)
            self._a_character = _moved(self._a_character, each) if self._a_character else each

    def expect(self, characters: int) -> float:
        """Return how long a text of this length will take, s; 0.0 while nothing is known."""
        if not self._a_character:
            return 0.0 if math.isinf(self._cut) else self._cut
        return min(characters * self._a_character, self._cut)


def _moved(mean: float, value: float) -> float:
    return mean + WEIGHT * (value - mean)

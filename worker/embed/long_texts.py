"""Texts with more tokens than the model reads: how much is tokenised, and the mean of their windows.

Lives here: the handling of long texts that both runtimes share. Must not live here: tokenizers, models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np

from worker.core.novelty import Vector, unit

CHARS_A_TOKEN: Final = 8
"""Characters to tokenise first per needed token: nearly twice as many as English has."""

SPARE_TOKENS: Final = 128
"""Tokens that must follow the needed ones, so that the rest of the text cannot change them: a tokenizer looks at one
word at a time, and WordPiece splits words of at most 100 characters."""

MAX_CHARS: Final = 65_536
"""Most characters to tokenise, for texts that have hardly any tokens (blanks, encoded files)."""

Tokens = TypeVar("Tokens")


def read_beginning(
    text: str, wanted: int, read: Callable[[str], Tokens], count: Callable[[Tokens], int]
) -> tuple[Tokens, bool]:
    """Tokenise as much of a text as its first `wanted` tokens need; return the tokens, and whether text was left over.

    Tokenising 1 MiB takes seconds. The tokens equal those of the whole text, unless they need MAX_CHARS or more.
    """
    size = CHARS_A_TOKEN * (wanted + SPARE_TOKENS)
    most = max(MAX_CHARS, size)
    while len(text) > size:
        tokens = read(text[:size])
        if size == most or count(tokens) >= wanted + SPARE_TOKENS:
            return tokens, True
        size = min(4 * size, most)
    return read(text), False


def mean_of_windows(vectors: Sequence[Vector], tokens: Sequence[int]) -> Vector:
    """Return the unit vector of the windows' mean, weighted by their tokens (without special ones).

    Raises ValueError if it has no direction, or a window's values are not finite.
    """
    mean = np.asarray(tokens, np.float64) @ np.asarray(vectors, np.float64)
    if not np.abs(mean).max() > 0.0:
        raise ValueError("the windows of this text cancel each other out")
    return unit(mean, len(mean))


def long_texts(windows: int) -> str:
    """Return the value of `EmbedderIdentity.long_texts`."""
    return "cut" if windows == 1 else f"windows{windows}"

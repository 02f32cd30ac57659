"""Texts beyond the token limit: cut or read in windows, never tokenised whole."""

from __future__ import annotations

import numpy as np
import pytest

from worker import config
from worker.embed.embedder import (
    CHARS_A_TOKEN,
    MAX_CHARS,
    SPARE_TOKENS,
    mean_of_windows,
    read_beginning,
)

LIMIT = 64
"""Token limit of these tests: windows are cheap, and most traces are longer."""

FIRST_READ = CHARS_A_TOKEN * (LIMIT + SPARE_TOKENS)


# -- how much of a text is tokenised


class Reader:
    """A tokenizer that takes a word for a token and notes what it was given."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, text: str) -> list[str]:
        self.sizes.append(len(text))
        return text.split()

    def read(self, text: str, wanted: int = LIMIT) -> tuple[list[str], bool]:
        return read_beginning(text, wanted, self, len)


def test_a_short_text_is_read_whole_and_once() -> None:
    reader = Reader()
    text = "a " * (FIRST_READ // 2)
    assert reader.read(text) == (text.split(), False)
    assert reader.sizes == [FIRST_READ]


def test_of_a_long_text_only_the_beginning_is_read() -> None:
    reader = Reader()
    words, left_over = reader.read("word " * 200_000)
    assert left_over
    assert len(words) >= LIMIT + SPARE_TOKENS
    assert reader.sizes == [FIRST_READ]


def test_more_is_read_while_tokens_are_missing() -> None:
    reader = Reader()
    text = " " * 20_000 + "word " * 200_000
    words, left_over = reader.read(text)
    assert left_over
    assert words[:LIMIT] == ["word"] * LIMIT
    assert reader.sizes == [FIRST_READ, 4 * FIRST_READ, 16 * FIRST_READ]


def test_reading_ends_at_a_bound_whatever_the_text() -> None:
    reader = Reader()
    assert reader.read(" " * (1 << 20)) == ([], True)
    assert max(reader.sizes) == MAX_CHARS
    assert sum(reader.sizes) < 2 * MAX_CHARS
    assert reader.read("x" * MAX_CHARS) == (["x" * MAX_CHARS], False)


# -- the mean of windows


def test_windows_count_by_their_tokens() -> None:
    east, north = np.array([1, 0], np.float32), np.array([0, 1], np.float32)
    mean = mean_of_windows([east, north], [3, 4])
    assert mean.dtype == np.float32
    np.testing.assert_allclose(mean, [0.6, 0.8], rtol=1e-7)


def test_windows_that_cancel_each_other_out_have_no_mean() -> None:
    east = np.array([1, 0], np.float32)
    with pytest.raises(ValueError, match="cancel"):
        mean_of_windows([east, -east], [5, 5])
    with pytest.raises(ValueError, match="cancel"):
        mean_of_windows([east, np.array([np.nan, 0], np.float32)], [5, 5])


# -- the embedders


def test_the_settings_name_the_windows() -> None:
    assert config.load().windows == 1
    assert config.load(max_windows=8).windows == 1
    assert config.load(long_texts="windows").windows == 2
    assert config.load(long_texts="windows", max_windows=8).windows == 8


# -- other models

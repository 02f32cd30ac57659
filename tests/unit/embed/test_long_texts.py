"""Texts beyond the token limit: cut, never tokenised whole."""

from __future__ import annotations

from worker.embed.embedder import CHARS_A_TOKEN, MAX_CHARS, SPARE_TOKENS, read_beginning

LIMIT = 64
FIRST_READ = CHARS_A_TOKEN * (LIMIT + SPARE_TOKENS)


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

"""Answers of an embedding service: what is read, and what is refused."""

from __future__ import annotations

import base64
import random

import msgspec
import numpy as np
import pytest

from tests.support.embedding_service import answer, vector
from worker.embed.http_embedder import MAX_DIMENSIONS, embeddings_url, read_answer


def items(*pairs: tuple[object, object]) -> bytes:
    return msgspec.json.encode({"data": [{"index": index, "embedding": it} for index, it in pairs]})


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("http://host:7997", "http://host:7997/v1/embeddings"),
        ("https://host/v1", "https://host/v1/embeddings"),
        ("https://host/openai/v2", "https://host/openai/v2/embeddings"),
        ("https://host/llm", "https://host/llm/v1/embeddings"),
        ("http://host:7997/embeddings", "http://host:7997/embeddings"),
    ],
)
def test_the_address_with_and_without_v1(given: str, address: str) -> None:
    assert embeddings_url(given) == address


def test_vectors_come_in_the_order_of_their_indexes(seed: int) -> None:
    rng = random.Random(seed)
    texts = [f"text {number}" for number in range(rng.randint(1, 40))]
    pairs = [(number, vector(text)) for number, text in enumerate(texts)]
    rng.shuffle(pairs)
    found = read_answer(items(*pairs), len(texts))
    assert [it.tolist() for it in found] == [vector(text) for text in texts]


def test_without_indexes_the_order_of_the_answer_counts() -> None:
    body = msgspec.json.encode({"data": [{"embedding": [0.0, 1.0]}, {"embedding": [1.0, 0.0]}], "model": "m"})
    found = read_answer(body, 2)
    assert [it.tolist() for it in found] == [[0.0, 1.0], [1.0, 0.0]]


def test_base64_gives_the_same_bits_as_a_list() -> None:
    numbers = vector("a text")
    coded = base64.b64encode(np.array(numbers, "<f4").tobytes()).decode()
    found = read_answer(answer([numbers, coded]), 2, len(numbers))
    assert found[0].tobytes() == found[1].tobytes()
    assert found[0].dtype == np.float32


@pytest.mark.parametrize("scale", [1e-3, 0.5, 17.0, 1e30])
def test_a_vector_gets_the_length_1(scale: float) -> None:
    found = read_answer(answer([[scale * it for it in vector("a text")]]), 1)[0]
    assert np.linalg.norm(found.astype(np.float64)) == pytest.approx(1, abs=2e-7)
    assert found == pytest.approx(vector("a text"), abs=1e-6)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"<html>Bad Gateway</html>", "not a list of embeddings"),
        (b'{"data": "none"}', "not a list of embeddings"),
        (b"[" * 100_000, "not a list of embeddings"),
        (b'{"data":[{"embedding":[1,NaN]},{"embedding":[1,0]}]}', "not a list of embeddings"),
        (b'{"data":[{"embedding":[1,null]},{"embedding":[1,0]}]}', "not a list of embeddings"),
        (b'{"data":[{"embedding":[1,1e39]},{"embedding":[1,0]}]}', "not finite"),
        (items((0, "AADAfwAAgD8="), (1, [1.0, 0.0])), "not finite"),
        (items((0, "AADAfwAAgD8"), (1, [1.0, 0.0])), "padding"),
        (items((0, "AAA="), (1, [1.0, 0.0])), "buffer size"),
        (items((0, [1.0, 0.0])), "1 embeddings for 2 texts"),
        (items((0, [1.0]), (1, [1.0]), (2, [1.0])), "3 embeddings for 2 texts"),
        (items((0, [1.0, 0.0]), (0, [1.0, 0.0])), "indexes"),
        (items((1, [1.0, 0.0]), (2, [1.0, 0.0])), "indexes"),
        (items((0, [1.0, 0.0]), (None, [1.0, 0.0])), "indexes"),
        (items((0, [1.0, 0.0]), (1, [1.0])), "1 dimensions, not 2"),
        (items((0, [1.0, 0.0]), (1, [])), "0 dimensions, not 2"),
        (items((0, []), (1, [])), "0 dimensions"),
        (items((0, [0.0, 0.0]), (1, [1.0, 0.0])), "only zeros"),
    ],
)
def test_an_answer_that_cannot_be_used(body: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_answer(body, 2)


def test_an_answer_of_other_dimensions() -> None:
    with pytest.raises(ValueError, match="2 dimensions, not 3"):
        read_answer(items((0, [1.0, 0.0])), 1, 3)
    with pytest.raises(ValueError, match=f"{MAX_DIMENSIONS + 1} dimensions"):
        read_answer(items((0, [1.0] * (MAX_DIMENSIONS + 1))), 1)

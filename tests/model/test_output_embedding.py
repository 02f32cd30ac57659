"""KP_OUTPUT_EMBEDDING: the real model's vector, bit for bit."""

from __future__ import annotations

import pytest

from tests.support.output_embedding import decode, score_file
from tests.support.stage import LINES
from worker import embedding_text, parse_trace
from worker.embed.load import load_embedder


@pytest.mark.parametrize("kind", ["sentence-transformers", "auto"])
def test_the_real_model_s_vectors_come_out_bit_for_bit(kind: str) -> None:
    embedder = load_embedder(kind, None, 256, 1, "fp32")
    assert embedder is not None
    for line, document in zip(LINES[:20], score_file(LINES[:20], embedder, output_embedding=True), strict=True):
        assert decode(document).tobytes() == embedder.embed(embedding_text(parse_trace(line))).vector.tobytes()

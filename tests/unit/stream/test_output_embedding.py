"""KP_OUTPUT_EMBEDDING: the vector in the output, bit for bit."""

from __future__ import annotations

import pytest

from tests.support.builders import TextEmbedder, make_record, make_trace, text_vector, trace_bytes
from tests.support.output_embedding import decode, score_file
from tests.support.schemas import VALIDATORS
from worker import PartitionScorer, config, embedding_text, parse_trace
from worker.core.documents import embedding_bytes, scored_record


def test_a_file_s_documents_hold_the_vector_where_it_is_asked_for() -> None:
    lines = [trace_bytes(f"kp:trace:{n}", objective=f"task {n}") for n in range(5)]
    documents = score_file(lines, TextEmbedder(), output_embedding=True)
    for line, document in zip(lines, documents, strict=True):
        assert decode(document).tobytes() == text_vector(embedding_text(parse_trace(line)), 8).tobytes()
        VALIDATORS["scored-trace"].validate(document)
        del document["scoring"]["embedding"]
    assert documents == score_file(lines, TextEmbedder())


def test_without_an_embedder_it_is_refused() -> None:
    with pytest.raises(config.ConfigError, match="KP_OUTPUT_EMBEDDING=true needs an embedder"):
        config.load(embedder="none", output_embedding=True)


@pytest.mark.parametrize("field", ["dtype", "dimensions", "data"])
def test_the_schema_wants_all_of_it(field: str) -> None:
    (document,) = score_file([trace_bytes()], TextEmbedder(), output_embedding=True)
    del document["scoring"]["embedding"][field]
    assert not VALIDATORS["scored-trace"].is_valid(document)


@pytest.mark.parametrize("dimensions", [1, 2, 3, 384, 4096])
def test_the_size_that_is_reckoned_with_is_the_true_one(dimensions: int) -> None:
    identity = TextEmbedder(dimensions).identity
    scored = PartitionScorer(dimensions=dimensions).score(make_trace(), text_vector("t", dimensions), 0)
    sizes = [
        len(scored_record(make_record(trace_bytes()), scored, identity, embedding=on).value or b"")
        for on in (False, True)
    ]
    assert sizes[1] - sizes[0] == embedding_bytes(dimensions)

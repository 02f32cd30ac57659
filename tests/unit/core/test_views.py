"""What of a trace is embedded, and how the vectors of its parts become one."""

import json
import random
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.builders import make_trace, trace_document
from worker.core.novelty import unit_mean
from worker.core.records import EmbedderIdentity
from worker.core.trace import embedded_texts, embedding_text, is_objective, joined, parse_trace


def test_the_whole_text_is_one_text() -> None:
    trace = make_trace(objective="find it", steps=["thought", "tool_call"])
    assert embedded_texts(trace) == embedded_texts(trace, "whole") == (embedding_text(trace),)


def test_the_objective_is_a_text_of_its_own_beside_the_whole_text() -> None:
    document = trace_document(objective="find it", steps=["thought", "observation"])
    document["steps"][1]["content"] = "it is there"
    trace = parse_trace(json.dumps(document))
    assert embedded_texts(trace, "objective") == ("find it", "find it  it is there")


def test_a_trace_whose_steps_have_no_content_is_its_objective() -> None:
    trace = make_trace(objective="find it", steps=["tool_call", "thought"])
    assert embedded_texts(trace, "objective") == ("find it",)


def test_the_mean_is_that_of_long_arithmetic(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(200):
        parts = rng.normal(size=(rng.integers(2, 5), 16))
        parts /= np.linalg.norm(parts, axis=1, keepdims=True)
        vectors = [part.astype(np.float32) for part in parts]
        exact = [sum(float(vector[i]) for vector in vectors) for i in range(16)]
        length = sum(value * value for value in exact) ** 0.5
        mean = unit_mean(vectors)
        assert mean.dtype == np.float32
        np.testing.assert_allclose(mean, [value / length for value in exact], atol=1e-7)
        shuffled = random.Random(seed).sample(vectors, 2)
        assert unit_mean(shuffled).tobytes() == unit_mean(shuffled[::-1]).tobytes()


def test_a_bare_objective_takes_the_novelty_that_docs_security_says() -> None:
    """Compared with its own objective, a trace of novelty n (whole) has 1 - sqrt(1 - n/2) as objective and whole."""
    for whole in (0.05, 0.22, 0.33, 1.0):
        objective = np.array([1.0, 0.0], np.float32)
        text = np.array([1 - whole, (1 - (1 - whole) ** 2) ** 0.5], np.float32)
        assert 1 - float(objective @ text) == pytest.approx(whole, abs=1e-6)
        both = 1 - float(objective @ unit_mean([objective, text]))
        assert both == pytest.approx(1 - (1 - whole / 2) ** 0.5, abs=1e-6)
        if whole == 0.22:
            assert round(both, 2) == 0.06


def test_one_vector_is_its_own_mean_to_the_bit() -> None:
    vector = np.array([0.6, 0.8], np.float32)
    assert unit_mean([vector]) is vector


def test_vectors_that_cancel_each_other_out_have_no_mean() -> None:
    vector = np.array([0.6, 0.8], np.float32)
    with pytest.raises(ValueError, match="cancel each other out"):
        unit_mean([vector, -vector])


def test_the_text_that_is_hashed_differs_where_a_part_does() -> None:
    assert joined(("a b",)) == "a b"
    assert len({joined(parts) for parts in (("a", "b"), ("ab", ""), ("", "ab"), ("a", "bc"), ("ab", "c"))}) == 5


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({}, "m:0:2:128:fp32"),
        ({"runtime": "onnx"}, "m:0:2:128:fp32"),  # runtimes agree
        ({"name": "n"}, "n:0:2:128:fp32"),
        ({"weights_sha256": "1"}, "m:1:2:128:fp32"),
        ({"dimensions": 3}, "m:0:3:128:fp32"),
        ({"max_tokens": 512}, "m:0:2:512:fp32"),
        ({"precision": "bf16"}, "m:0:2:128:bf16"),
        ({"embed_text": "objective"}, "m:0:2:128:fp32:objective"),  # objectives that 0.2.0 truncated
        ({"embed_text": "objective", "objective_tokens": 512}, "m:0:2:128:fp32:objective512"),
    ],
)
def test_vectors_of_equal_keys_are_comparable(changes: dict[str, Any], key: str) -> None:
    identity = msgspec.structs.replace(EmbedderIdentity("m", "0", 2, 128, "r", "fp32"), **changes)
    assert identity.key() == key
    written = msgspec.json.decode(msgspec.json.encode(identity))
    assert {name: written[name] for name in changes} == changes
    always = {"name", "weights_sha256", "dimensions", "max_tokens", "runtime", "precision"}
    assert written.keys() == always | changes.keys()


def test_only_an_objective_that_is_embedded_apart_is_read_whole() -> None:
    assert [is_objective(index, "objective") for index in (0, 1)] == [True, False]
    assert not is_objective(0, "whole")

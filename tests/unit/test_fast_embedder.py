"""The OpenVINO embedder and the export: same vectors as sentence-transformers, same bits every time, clear errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from worker.embedder import OFFICIAL_NAME, OFFICIAL_SHA256, ModelError, SentenceTransformersEmbedder
from worker.model_dir import (
    FORMAT,
    MANIFEST,
    CheckedFile,
    ExportedPrecision,
    Manifest,
    default_directory,
    file_sha256,
    find_exported,
    read_manifest,
)
from worker.openvino_embedder import OpenVinoEmbedder, runs_here

TEXTS = [
    "",
    "Check the invoice total against the order.",
    "请先核对发票金额。 Compruebe el importe, überprüfen Sie die Größe.",
    "The planner ignores the index because the column is cast to text. " * 8,
    "word " * 600,
]


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from worker.export_model import export_model

    target = tmp_path_factory.mktemp("models") / "minilm"
    report = export_model(None, target, ("fp32", "bf16", "int8"))
    assert report.directory == target
    assert "fp32: cosine to sentence-transformers min 0.9999999" in str(report) or "min 1.0" in str(report)
    assert [path.name for path in target.parent.iterdir()] == ["minilm"]  # no temporary directory is left
    return target


@pytest.fixture(scope="session")
def fp32(exported: Path) -> OpenVinoEmbedder:
    return OpenVinoEmbedder(exported, 256, 0)


@pytest.fixture(scope="session")
def reference() -> SentenceTransformersEmbedder:
    return SentenceTransformersEmbedder(None, 256, 0)


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Return a directory like an exported one, whose graph is nothing that a runtime could read."""
    (tmp_path / "fp32.xml").write_text("graph")
    (tmp_path / "tokenizer.json").write_text("{}")
    write_manifest(tmp_path)
    return tmp_path


def write_manifest(directory: Path, **changes: object) -> None:
    files = {name: CheckedFile(name, file_sha256(directory / name)) for name in ("fp32.xml", "tokenizer.json")}
    precisions = {"fp32": ExportedPrecision([files["fp32.xml"]], None)}
    manifest = Manifest(FORMAT, "m", "0" * 64, 384, 512, "openvino", files["tokenizer.json"], precisions, {})
    (directory / MANIFEST).write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, **changes)))


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_same_vector_and_flag_as_sentence_transformers(
    fp32: OpenVinoEmbedder, reference: SentenceTransformersEmbedder, text: str
) -> None:
    expected, found = reference.embed(text), fp32.embed(text)
    assert found.vector.dtype == np.float32
    assert found.vector.shape == (384,)
    assert abs(float(np.linalg.norm(found.vector.astype(np.float64))) - 1.0) < 1e-6
    assert float(expected.vector.astype(np.float64) @ found.vector.astype(np.float64)) > 1.0 - 1e-6
    assert found.truncated == expected.truncated


@pytest.mark.model
@pytest.mark.parametrize("words", [253, 254, 255, 300])
def test_truncated_from_the_first_token_over_the_limit(fp32: OpenVinoEmbedder, words: int) -> None:
    assert fp32.embed("word " * words).truncated == (words + 2 > 256)


@pytest.mark.model
def test_only_what_is_under_the_limit_counts(fp32: OpenVinoEmbedder) -> None:
    assert np.array_equal(fp32.embed("word " * 254).vector, fp32.embed("word " * 254 + "other end").vector)


@pytest.mark.model
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
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


@pytest.mark.model
def test_identity_is_that_of_the_original_weights(
    fp32: OpenVinoEmbedder, reference: SentenceTransformersEmbedder
) -> None:
    assert fp32.identity.weights_sha256 == OFFICIAL_SHA256
    assert fp32.identity.key() == reference.identity.key()
    assert (fp32.identity.runtime, fp32.identity.precision) == ("openvino", "fp32")


@pytest.mark.model
@pytest.mark.parametrize("name", ["fp32.bin", "tokenizer.json"])
def test_a_changed_file_is_found(exported: Path, tmp_path: Path, name: str) -> None:
    for path in exported.iterdir():
        (tmp_path / path.name).symlink_to(path)
    raw = bytearray((exported / name).read_bytes())
    raw[len(raw) // 2] ^= 1
    (tmp_path / name).unlink()
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(ModelError, match=rf"{name} has sha256 .* export the model again: kp-worker export-model"):
        OpenVinoEmbedder(tmp_path, 256, 0)


@pytest.mark.model
def test_a_limit_above_the_model_s_is_refused(exported: Path) -> None:
    with pytest.raises(ModelError, match="KP_MAX_TOKENS=513 is more than the 512 tokens"):
        OpenVinoEmbedder(exported, 513, 0)


@pytest.mark.model
def test_loading_brings_no_torch_and_no_telemetry(exported: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from worker.openvino_embedder import OpenVinoEmbedder\n"
        "OpenVinoEmbedder(Path(sys.argv[1]), 256, 0).embed('text')\n"
        "bad = {'torch', 'transformers', 'openvino_telemetry.main', 'faust'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    environment = {**os.environ, "HOME": str(tmp_path), "CI": ""}  # in CI the telemetry holds its tongue anyway
    subprocess.run([sys.executable, "-c", code, str(exported)], check=True, env=environment, cwd=Path.cwd())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.model
def test_export_replaces_an_exported_directory_and_nothing_else(exported: Path, tmp_path: Path) -> None:
    from worker.export_model import export_model

    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(ModelError, match="is no exported model: it is not overwritten"):
        export_model(None, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    before = {path.name: file_sha256(path) for path in exported.iterdir()}
    export_model(None, exported, ("fp32", "int8"))
    after = {path.name: file_sha256(path) for path in exported.iterdir()}
    # The runtime numbers the nodes of .xml through the whole process; weights and tokenizer are always the same bytes.
    assert {name for name in before if before[name] == after[name]} == {"fp32.bin", "int8.bin", "tokenizer.json"}
    assert set(read_manifest(exported).precisions) == {"fp32", "int8"}


@pytest.mark.model
def test_a_graph_that_differs_from_the_model_is_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from worker import export_model

    monkeypatch.setitem(export_model.LEAST_COSINE, "fp32", 1.1)
    with pytest.raises(ModelError, match="texts have a cosine below"):
        export_model.export_model(None, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_precision_is_refused_before_any_work(tmp_path: Path) -> None:
    from worker.export_model import export_model

    with pytest.raises(ModelError, match="unknown precision fp8: choose from fp32, bf16, int8"):
        export_model(None, tmp_path / "out", ("fp8",))


def test_a_foreign_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is no exported model"):
        OpenVinoEmbedder(tmp_path, 256, 0)


def test_a_damaged_manifest_is_refused(damaged: Path) -> None:
    (damaged / MANIFEST).write_text('{"format": 1')
    with pytest.raises(ModelError, match="is damaged"):
        OpenVinoEmbedder(damaged, 256, 0)


def test_another_format_is_refused(damaged: Path) -> None:
    write_manifest(damaged, format=99)
    with pytest.raises(ModelError, match="has format 99"):
        OpenVinoEmbedder(damaged, 256, 0)


def test_another_runtime_is_refused(damaged: Path) -> None:
    write_manifest(damaged, runtime="abacus")
    with pytest.raises(ModelError, match="exported for abacus"):
        OpenVinoEmbedder(damaged, 256, 0)


def test_a_precision_that_was_not_exported_is_refused(damaged: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no int8 graph, only fp32; .* export-model --precision int8"):
        OpenVinoEmbedder(damaged, 256, 0, "int8")


def test_a_missing_graph_is_refused(damaged: Path) -> None:
    (damaged / "fp32.xml").unlink()
    with pytest.raises(ModelError, match=r"fp32\.xml cannot be read"):
        OpenVinoEmbedder(damaged, 256, 0)


def test_a_graph_outside_the_directory_is_refused(damaged: Path) -> None:
    files = [CheckedFile("../fp32.xml", "0" * 64)]
    write_manifest(damaged, precisions={"fp32": ExportedPrecision(files, None)})
    with pytest.raises(ModelError, match="outside of it"):
        OpenVinoEmbedder(damaged, 256, 0)


def test_a_precision_is_refused_where_the_cpu_lacks_it(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = read_manifest(damaged).precisions["fp32"]
    write_manifest(damaged, precisions={"fp32": files, "bf16": files})
    monkeypatch.setattr("worker.openvino_embedder.cpu_flags", lambda: frozenset({"avx2"}))
    with pytest.raises(ModelError, match=r"avx512_bf16.*KP_PRECISION=fp32"):
        OpenVinoEmbedder(damaged, 256, 0, "bf16")


def test_find_exported(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = damaged / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert find_exported(None) is None
    assert find_exported("sentence-transformers/all-MiniLM-L6-v2") is None
    assert find_exported(str(damaged)) == damaged
    target = cache / "kp-worker" / "models" / "all-MiniLM-L6-v2-53aa51172d14"
    assert default_directory(OFFICIAL_NAME, OFFICIAL_SHA256) == target
    target.parent.mkdir(parents=True)
    target.symlink_to(damaged)
    assert find_exported(None) == target
    assert find_exported("sentence-transformers/all-MiniLM-L6-v2") == target
    assert find_exported("sentence-transformers/all-MiniLM") is None
    target.with_name("all-MiniLM-L6-v2-0123456789ab").symlink_to(damaged)
    assert find_exported("sentence-transformers/all-MiniLM-L6-v2") is None  # two of them: the hub must say which
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the specification has it ignored
    assert default_directory("m", "0" * 64) == Path.home() / ".cache" / "kp-worker" / "models" / "m-000000000000"

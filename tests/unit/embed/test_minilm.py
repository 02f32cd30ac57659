"""Reading safetensors files, and what is said of a directory that holds no such model."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from worker.embed.embedder import ModelError
from worker.embed.export import open_minilm, read_safetensors
from worker.embed.reference_texts import TEXTS, recorded_vectors


def written(path: Path, header: dict[str, Any], data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


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
    found = read_safetensors(written(tmp_path / "m.safetensors", header, data))
    assert found.keys() == {"matrix", "numbers"}
    assert np.array_equal(found["matrix"], matrix)
    assert np.array_equal(found["numbers"], numbers)


@pytest.mark.parametrize(
    "raw",
    [b"", b"1234567", struct.pack("<Q", 2**60) + b"{}", struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 1) + b"{"],
    ids=["empty", "short", "header beyond the end", "header that is not an object", "header that is not JSON"],
)
def test_another_file_is_refused_with_its_name(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=r"m\.safetensors is not a readable safetensors file"):
        read_safetensors(path)


@pytest.mark.parametrize(
    "tensor",
    [
        {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 80]},
        {"dtype": "F32", "shape": [2]},
    ],
    ids=["type", "shape", "offsets", "no offsets"],
)
def test_a_tensor_that_does_not_fit_its_header_is_refused(tmp_path: Path, tensor: dict[str, Any]) -> None:
    path = written(tmp_path / "m.safetensors", {"t": tensor}, b"\0" * 8)
    with pytest.raises(ModelError, match="not a readable safetensors file"):
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

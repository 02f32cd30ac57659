"""Scored documents with their vectors, as a consumer reads them."""

import base64
import io
import json
from typing import Any

import numpy as np

from worker import config
from worker.commands.score.lines import score_lines
from worker.core.novelty import Vector
from worker.embed.embedder import Embedder


def decode(document: dict[str, Any]) -> Vector:
    """Read the vector as a consumer does."""
    embedding = document["scoring"]["embedding"]
    assert embedding.keys() == {"dtype", "dimensions", "data"}
    vector = np.frombuffer(base64.b64decode(embedding["data"], validate=True), dtype="<f4")
    assert (embedding["dtype"], embedding["dimensions"]) == ("float32", len(vector))
    return vector


def score_file(lines: list[bytes], embedder: Embedder | None, **settings: Any) -> list[dict[str, Any]]:
    output = io.BytesIO()
    score_lines([io.BytesIO(b"\n".join(lines))], output, None, config.load(**settings), embedder)
    return [json.loads(line) for line in output.getvalue().splitlines()]

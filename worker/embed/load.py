"""The embedder that the settings select, and its scorer."""

import logging
import math
from importlib.util import find_spec
from pathlib import Path

from worker.config import Settings
from worker.core.records import EmbedderIdentity
from worker.core.scorer import PartitionScorer
from worker.embed.embedder import (
    MULTILINGUAL,
    OFFICIAL_NAME,
    OFFICIAL_SHA256,
    Embedder,
    ModelError,
    fetch_first,
    is_default,
)
from worker.embed.openvino_embedder import OpenVinoEmbedder, default_directory, find_exported
from worker.embed.torch_embedder import SentenceTransformersEmbedder

log = logging.getLogger(__name__)


def new_scorer(settings: Settings, identity: EmbedderIdentity | None) -> PartitionScorer:
    """Return the empty state of one partition (of a topic or a file)."""
    return PartitionScorer(
        settings.cache_max_elements,
        settings.cache_ttl_ms,
        1 if identity is None else identity.dimensions,
        settings.threshold,
        settings.scoring_profiles(),
        settings.stream_time_max_step_ms,
        settings.confidence,
    )


def load_for_worker(settings: Settings) -> Embedder | None:
    """Load the embedder of these settings for KP_EMBED_IN_FLIGHT texts at a time; see `load_embedder`."""
    budget = settings.latency_budget_seconds if settings.embed_in_flight == "auto" else math.inf
    return load_embedder(settings, settings.most_in_flight, budget)


def slow_runtime(kind: str, model: str | None) -> str | None:
    """Return why KP_EMBEDDER=auto picks the slow runtime, and the remedy; None if it does not. Loads nothing."""
    if kind != "auto" or not is_default(model) or not find_spec("sentence_transformers"):
        return None
    if not find_spec("openvino"):
        why, remedy = "OpenVINO is not installed", "pip install '.[fast]' from a checkout, then kp-worker fetch-model"
    elif find_exported(model) is None:
        why, remedy = f"{OFFICIAL_NAME} is not exported for OpenVINO on this machine", "kp-worker fetch-model"
    else:
        return None
    return (
        f"{why}, so sentence-transformers embeds, with torch: on a CPU at about half the speed, with about three times "
        f"the memory. To change that: {remedy}. To keep it without this warning: KP_EMBEDDER=sentence-transformers"
    )


def load_embedder(settings: Settings, at_once: int = 1, budget_seconds: float = math.inf) -> Embedder | None:
    """Load the embedder that KP_EMBEDDER names; None for `none`. Blocks for seconds. Raises ModelError.

    `auto` uses the exported model if there is one for KP_MODEL and OpenVINO is installed, otherwise
    sentence-transformers. `at_once`: texts that the exported model embeds at once, as far as `budget_seconds` allows.
    `http`: see HttpEmbedder.
    """
    kind, model, precision = settings.embedder, settings.model, settings.precision
    max_tokens, threads, view = settings.max_tokens, settings.embed_threads, settings.embed_text
    if kind == "none":
        return None
    if kind == "http":
        from worker.embed.http_embedder import HttpEmbedder

        return HttpEmbedder(settings)
    if kind in ("auto", "openvino"):
        directory = find_exported(model) if kind == "openvino" or find_spec("openvino") else None
        if directory is None and model == MULTILINGUAL:
            raise ModelError(fetch_first(model))
        if directory is None and kind == "openvino":
            directory = Path(model) if model else default_directory(OFFICIAL_NAME, OFFICIAL_SHA256)
        if directory is not None:
            return OpenVinoEmbedder(directory, max_tokens, threads, precision, view, at_once, budget_seconds)
        if model is None and not find_spec("sentence_transformers"):
            raise ModelError(f"{fetch_first(model)}, or set KP_EMBEDDER=none to run without embeddings (novelty 0.5)")
    if model == MULTILINGUAL:
        raise ModelError(f"KP_MODEL={MULTILINGUAL} runs with OpenVINO alone: set KP_EMBEDDER=auto")
    if warning := slow_runtime(kind, model):
        log.warning("%s", warning)
    if precision != "fp32":
        raise ModelError(
            f"KP_PRECISION={precision} needs an exported model: run kp-worker fetch-model, or set KP_PRECISION=fp32"
        )
    return SentenceTransformersEmbedder(model, max_tokens, threads, view)

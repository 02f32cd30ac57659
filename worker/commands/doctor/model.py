"""The doctor's checks of the model: whether it loads, and how fast it embeds. Changes nothing."""

import asyncio
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final, cast

from worker.commands.doctor.finding import Exam, Finding, fail, ok, warn
from worker.config import Settings
from worker.core.records import EmbedderIdentity
from worker.core.terminal import number_of
from worker.core.trace import ReasoningTrace, embedded_texts
from worker.embed.embedder import (
    MULTILINGUAL,
    Embedder,
    ModelError,
    ServiceUnavailableError,
    fetch_first,
    find_model,
    is_default,
)
from worker.embed.load import load_embedder, slow_runtime
from worker.embed.openvino_embedder import PRECISIONS, find_exported, runs_here

MODEL_SECONDS: Final = 120.0
"""Time limit for loading the model and embedding with it."""


async def check_model(exam: Exam) -> None:
    """Load the model in a daemon thread, and embed with it."""
    settings = exam.settings
    if (slow := slow_runtime(settings.embedder, settings.model)) is not None:  # explains the wait that follows
        exam.warn("runtime", *slow.split(". ", 1))
    findings: list[Finding] = []
    checks = _check(settings, exam.models, exam.documents or [])
    thread = threading.Thread(target=findings.extend, args=(checks,), daemon=True)
    thread.start()
    for _ in range(round(50 * MODEL_SECONDS)):
        if not thread.is_alive():
            break
        await asyncio.sleep(0.02)
    else:
        findings = [fail("model", f"not ready after {MODEL_SECONDS:.0f} s", "check the CPU load and the model's files")]
    exam.add(*findings)


def _check(settings: Settings, models: Mapping[str, int], documents: Sequence[ReasoningTrace]) -> Iterator[Finding]:
    if settings.embedder == "none":
        yield warn("model", "KP_EMBEDDER=none: novelty is 0.5 for every trace", "set KP_EMBEDDER=auto to compare texts")
        return
    try:
        if settings.embedder != "http" and (missing := _missing_model(settings)) is not None:
            yield missing
            return
        started = time.perf_counter()
        embedder = cast("Embedder", load_embedder(settings))
        load_seconds = time.perf_counter() - started
        embed_seconds = _median_seconds(embedder, settings.max_tokens)
        yield from _findings(settings, embedder.identity, load_seconds, embed_seconds)
        yield from other_entries(embedder.identity, models)
        yield from long_texts(settings, embedder, documents)
    except ServiceUnavailableError as error:
        yield fail("model", str(error), "the worker waits until it answers; check KP_EMBEDDER_URL and the service")
    except ModelError as error:  # says what to do
        yield fail("model", str(error))
    except Exception as error:
        yield fail("model", f"fails with {type(error).__name__}: {error}", "fetch it again, or use another KP_MODEL")


def _missing_model(settings: Settings) -> Finding | None:
    """Return the problem with a model that is not on this machine; None: it can be loaded."""
    if find_exported(settings.model) is not None:
        return None
    try:
        hub_name = find_model(settings.model)
    except ModelError as error:
        return fail("model", str(error), "" if settings.model == MULTILINGUAL else "check the path for typos")
    if settings.embedder == "openvino" or Path(hub_name).is_dir():
        return None
    if settings.model is None and find_spec("sentence_transformers") is None:
        return fail("model", fetch_first(settings.model))
    return warn(
        "model",
        f"{hub_name} is not a directory here: the worker would download it from the hub (not checked, because that "
        "would store the model)",
        "set KP_MODEL to a directory",
    )


def _median_seconds(embedder: Embedder, tokens: int) -> float:
    """Return the median time of embedding the longest text five times, s; the first run is a warm-up."""
    seconds = []
    for _ in range(6):
        started = time.perf_counter()
        embedder.embed("word " * tokens)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def _findings(
    settings: Settings, identity: EmbedderIdentity, load_seconds: float, embed_seconds: float
) -> Iterator[Finding]:
    """Yield the model, local or remote, and its speed."""
    loaded = f"checked in {load_seconds:.1f} s"
    if settings.embedder == "http":
        words, remedy = "words", "a faster or nearer service"
        yield ok("model", f"{identity.name} at {settings.embedder_url}: {identity.dimensions} dimensions, {loaded}")
    else:
        fetch = "kp-worker fetch-model, " if identity.runtime != "openvino" and is_default(settings.model) else ""
        words, remedy = "tokens", f"more or faster CPU, {fetch}a lower KP_MAX_TOKENS or KP_PRECISION=bf16"
        runtime, weights = f"{identity.runtime}, {identity.precision}", identity.weights_sha256[:12]
        yield ok("model", f"{identity.name} ({runtime}), sha256 {weights}..., loaded and {loaded}")
        offered = ", ".join(name for name in PRECISIONS if runs_here(name))
        yield ok("precision", f"this CPU supports {offered}; KP_PRECISION={settings.precision}")
    budget, slowest = settings.latency_budget_seconds, f"a text of {settings.max_tokens} {words} takes"
    message = f"{slowest} {embed_seconds * 1000:.0f} ms, the budget is {budget * 1000:g} ms"
    yield ok("embedding", message) if embed_seconds < budget else warn("embedding", message, remedy)


def other_entries(identity: EmbedderIdentity, models: Mapping[str, int]) -> Iterator[Finding]:
    """Yield a warning if the last cache entries are of another embedder. `models`: number of partitions by its key."""
    own = identity.key()
    for model, partitions in models.items():
        if model != own:
            yield warn(
                "cache entries",
                f"the last cache entries of {number_of(partitions, 'partition')} were made by another embedder "
                f"({model}); with these settings ({own}) the worker starts there with an empty cache, once",
                "repeats count as new until the cache has filled; if you do not want that, set KP_MODEL and the other "
                "settings of the embedder as before",
            )


def long_texts(settings: Settings, embedder: Embedder, documents: Sequence[ReasoningTrace]) -> Iterator[Finding]:
    """Yield how many of the last texts are cut, if most are and the objective is not embedded separately.

    A service says nothing about it: only the service has the tokenizer.
    """
    if settings.embed_text != "whole":
        return
    texts = [text for document in documents[-100:] for text in embedded_texts(document)]  # a millisecond each
    cut = sum(embedder.read(text).truncated for text in texts)
    if 2 * cut > len(texts):
        yield ok(
            "long texts",
            f"{cut} of the last {number_of(len(texts), 'text')} are longer than KP_MAX_TOKENS={settings.max_tokens}: "
            "novelty compares their beginnings. A higher limit usually tells repeats from new tasks worse, "
            "KP_EMBED_TEXT=objective better (docs/models.md)",
        )

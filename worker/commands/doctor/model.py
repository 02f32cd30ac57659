"""The doctor's checks of the model: whether it loads, and how fast it embeds. Changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from worker.commands.doctor.finding import Finding, fail, ok, warn
from worker.config import Settings
from worker.core.records import EmbedderIdentity
from worker.core.terminal import number_of
from worker.core.trace import InvalidTrace, embedded_texts, parse_trace
from worker.embed.embedder import (
    MULTILINGUAL,
    Embedder,
    ModelError,
    ServiceUnavailableError,
    fetch_first,
    find_model,
    is_default,
)
from worker.embed.load import load_configured, slow_runtime
from worker.embed.openvino_embedder import PRECISIONS, find_exported, runs_here

MODEL_SECONDS: Final = 120.0
"""Time limit for loading the model and embedding with it."""

TIMED_TEXTS: Final = 5

MOST_TEXTS: Final = 100  # of the last documents, to see how many are cut; a millisecond each


def check_runtime(settings: Settings) -> list[Finding]:
    """Return a warning if the slow runtime embeds; shown before the model loads, to explain the wait."""
    slow = slow_runtime(settings.embedder, settings.model)
    return [] if slow is None else [warn("runtime", *slow.split(". ", 1))]


async def check_model(settings: Settings, models: Mapping[str, int], documents: Sequence[bytes] = ()) -> list[Finding]:
    """Check the model in a daemon thread. `models`: of the cache's entries; `documents`: scored last (traces.py)."""
    result: list[Finding] = []
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    def check() -> None:
        result.extend(_check(settings, models, documents))
        with contextlib.suppress(RuntimeError):  # the command has ended
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=check, daemon=True).start()
    try:
        await asyncio.wait_for(done.wait(), MODEL_SECONDS)
    except TimeoutError:
        return [fail("model", f"not ready after {MODEL_SECONDS:.0f} s", "check the CPU load and the model's files")]
    return result


def _check(settings: Settings, models: Mapping[str, int], documents: Sequence[bytes]) -> Iterator[Finding]:
    if settings.embedder == "none":
        yield warn("model", "KP_EMBEDDER=none: novelty is 0.5 for every trace", "set KP_EMBEDDER=auto to compare texts")
        return
    if settings.embedder != "http" and (missing := _missing_model(settings)) is not None:
        yield missing
        return
    started = time.perf_counter()
    try:
        embedder = load_configured(settings)
        if embedder is None:
            raise AssertionError("this is a bug: no embedder although one is set")
        loaded = time.perf_counter() - started
        slowest = _median_seconds(embedder, settings.max_tokens)
    except ServiceUnavailableError as error:
        yield fail("model", str(error), "the worker waits until it answers; check KP_EMBEDDER_URL and the service")
    except ModelError as error:  # says what to do
        yield fail("model", str(error))
    except Exception as error:
        yield fail("model", f"fails with {type(error).__name__}: {error}", "fetch it again, or use another KP_MODEL")
    else:
        yield from _findings(settings, embedder.identity, loaded, slowest)
        yield from other_entries(embedder.identity, models)
        yield from long_texts(settings, embedder, documents)


def long_texts(settings: Settings, embedder: Embedder, documents: Sequence[bytes]) -> Iterator[Finding]:
    """Yield how many of the last texts are cut, if most are and the objective is not embedded separately.

    A service says nothing about it: only the service has the tokenizer.
    """
    if settings.embed_text != "whole":
        return
    texts: list[str] = []
    for document in documents[-MOST_TEXTS:]:
        with contextlib.suppress(InvalidTrace):  # not the worker's
            texts.extend(embedded_texts(parse_trace(document)))
    cut = sum(embedder.read(text).truncated for text in texts)
    if 2 * cut > len(texts):
        yield ok(
            "long texts",
            f"{cut} of the last {number_of(len(texts), 'text')} are longer than KP_MAX_TOKENS={settings.max_tokens}: "
            "novelty compares their beginnings. A higher limit usually tells repeats from new tasks worse, "
            "KP_EMBED_TEXT=objective better (docs/models.md)",
        )


def _missing_model(settings: Settings) -> Finding | None:
    """Return the problem with a model that is not on this machine; None: it can be loaded."""
    exported = find_exported(settings.model) is not None
    try:
        hub_name = "" if exported else find_model(settings.model)
    except ModelError as error:
        return fail("model", str(error), "" if settings.model == MULTILINGUAL else "check the path for typos")
    if not exported and settings.embedder != "openvino" and not Path(hub_name).is_dir():
        if settings.model is None and find_spec("sentence_transformers") is None:
            return fail("model", fetch_first(settings.model))
        return warn(
            "model",
            f"{hub_name} is not a directory here: the worker would download it from the hub (not checked, because that "
            "would store the model)",
            "set KP_MODEL to a directory",
        )
    return None


def _findings(settings: Settings, identity: EmbedderIdentity, loaded: float, slowest: float) -> Iterator[Finding]:
    """Yield the model, local or remote, and its speed: seconds to load, seconds for the longest text."""
    service = settings.embedder == "http"
    if service:
        message = (
            f"{identity.name} at {settings.embedder_url}: {identity.dimensions} dimensions, checked in {loaded:.1f} s"
        )
        yield ok("model", message)
    else:
        yield ok(
            "model",
            f"{identity.name} ({identity.runtime}, {identity.precision}), sha256 {identity.weights_sha256[:12]}..., "
            f"loaded and checked in {loaded:.1f} s",
        )
        offered = [name for name in PRECISIONS if runs_here(name)]
        yield ok("precision", f"this CPU supports {', '.join(offered)}; KP_PRECISION={settings.precision}")
    budget = settings.latency_budget_seconds
    parts = "words" if service else "tokens"
    message = (
        f"a text of {settings.max_tokens} {parts} takes {slowest * 1000:.0f} ms, the budget is {budget * 1000:g} ms"
    )
    if slowest < budget:
        yield ok("embedding", message)
    else:
        fetch = "kp-worker fetch-model, " if identity.runtime != "openvino" and is_default(settings.model) else ""
        here = f"more or faster CPU, {fetch}a lower KP_MAX_TOKENS or KP_PRECISION=bf16"
        yield warn("embedding", message, "a faster or nearer service" if service else here)


def other_entries(identity: EmbedderIdentity, models: Mapping[str, int]) -> Iterator[Finding]:
    """Yield a warning if the last cache entries are of another embedder. `models`: number of partitions by its key."""
    own = identity.key()
    for model, partitions in models.items():
        if model == own:
            continue
        message = (
            f"the last cache entries of {number_of(partitions, 'partition')} were made by another embedder ({model}); "
            f"with these settings ({own}) the worker starts there with an empty cache, once"
        )
        remedy = (
            "repeats count as new until the cache has filled; if you do not want that, set KP_MODEL and the other "
            "settings of the embedder as before"
        )
        yield warn("cache entries", message, remedy)


def _median_seconds(embedder: Embedder, tokens: int) -> float:
    """Return the median time of embedding the longest text, s; the first run is a warm-up."""
    text = "word " * tokens
    seconds = []
    for _ in range(TIMED_TEXTS + 1):
        started = time.perf_counter()
        embedder.embed(text)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])

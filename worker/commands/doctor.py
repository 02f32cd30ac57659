"""`kp-worker doctor`: what would keep a worker from running well here, each with its remedy. Changes nothing.

Lives here: the checks of this machine (settings, model, disk, port), and their order. Must not live here: questions to
the broker (doctor_kafka.py), output.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import shutil
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

from worker import config
from worker.commands.doctor_kafka import check_kafka
from worker.commands.finding import Finding, fail, ok, warn
from worker.config import ConfigError, Settings
from worker.embed.embedder import OFFICIAL_NAME, OFFICIAL_SHA256, Embedder, ModelError, find_model
from worker.embed.load import load_configured
from worker.embed.model_dir import default_directory, find_exported
from worker.embed.openvino_embedder import PRECISIONS, runs_here
from worker.kafka.topic_problems import CODECS, codec_problems

KAFKA_SECONDS: Final = 45.0
"""Longest time for all questions to the broker together."""

MODEL_SECONDS: Final = 120.0
"""Longest time to load the model and embed with it."""

TIMED_TEXTS: Final = 5
LEAST_FREE_BYTES: Final = 500 << 20
"""Less is worth a warning: an exported model takes 90 to 180 MB, and logs and temporary files some more."""


async def examine() -> AsyncIterator[Finding]:
    """Yield the findings, each as soon as it is there. Bounded: some 3 minutes where nothing answers at all."""
    try:
        settings = config.load()
    except ConfigError as error:
        for line in str(error).splitlines():
            yield fail("settings", line, "correct it; kp-worker run --help lists all; nothing else was checked")
        return
    for finding in _settings():
        yield finding
    yield _codecs()
    try:
        async with asyncio.timeout(KAFKA_SECONDS):
            async for finding in check_kafka(settings):
                yield finding
    except TimeoutError:
        yield fail(
            "broker", f"the checks took longer than {KAFKA_SECONDS:.0f} s", "look at the brokers and the network"
        )
    for finding in await _in_time(settings):
        yield finding
    yield _disk("model cache", default_directory(OFFICIAL_NAME, OFFICIAL_SHA256))
    yield _disk("temporary files", Path(tempfile.gettempdir()))
    yield await asyncio.to_thread(_port, settings)


def _settings() -> Iterator[Finding]:
    unknown = config.unknown_variables()
    for text in unknown:
        yield warn("settings", text, "correct or remove it: it has no effect")
    given = config.given_variables()
    yield ok("settings", f"{len(given)} set: {', '.join(given)}" if given else "none set, all defaults")


def _codecs() -> Finding:
    for problem in codec_problems():
        return warn("codecs", problem.message, problem.remedy)
    return ok("codecs", f"records compressed with {', '.join(CODECS)} can be read")


async def _in_time(settings: Settings) -> list[Finding]:
    """Check the model in a thread that cannot keep the process alive."""
    result: list[Finding] = []
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    def check() -> None:
        result.extend(_model(settings))
        loop.call_soon_threadsafe(done.set)

    threading.Thread(target=check, daemon=True).start()
    try:
        await asyncio.wait_for(done.wait(), MODEL_SECONDS)
    except TimeoutError:
        return [fail("model", f"not ready after {MODEL_SECONDS:.0f} s", "look at the CPU's load and the model's files")]
    return result


def _model(settings: Settings) -> Iterator[Finding]:
    if settings.embedder == "none":
        yield warn("model", "KP_EMBEDDER=none: novelty is 0.5 for every trace", "set KP_EMBEDDER=auto to compare texts")
        return
    hub_name = find_model(settings.model)
    if find_exported(settings.model) is None and settings.embedder != "openvino" and not Path(hub_name).is_dir():
        yield warn(
            "model",
            f"{hub_name} is no directory here: the worker would take it from the hub (not tried, it would be stored)",
            "export it beforehand (kp-worker export-model), or set KP_MODEL to a directory",
        )
        return
    started = time.perf_counter()
    try:
        embedder = load_configured(settings)
        if embedder is None:
            raise AssertionError("this is a bug: no embedder although one is set")
        loaded = time.perf_counter() - started
        slowest = _time(embedder, settings.max_tokens)
    except ModelError as error:  # says what to do
        yield fail("model", str(error))
        return
    except Exception as error:
        yield fail("model", f"fails with {type(error).__name__}: {error}", "export it again, or take another KP_MODEL")
        return
    identity = embedder.identity
    yield ok(
        "model",
        f"{identity.name} ({identity.runtime}, {identity.precision}), sha256 {identity.weights_sha256[:12]}..., "
        f"loaded and checked in {loaded:.1f} s",
    )
    offered = [name for name in PRECISIONS if runs_here(name)]
    yield ok("precision", f"this CPU is offered {', '.join(offered)}; KP_PRECISION={settings.precision}")
    budget = settings.latency_budget_seconds
    told = f"a text of {settings.max_tokens} tokens takes {slowest * 1000:.0f} ms, the budget is {budget * 1000:g} ms"
    if slowest < budget:
        yield ok("embedding", told)
    else:
        yield warn(
            "embedding", told, "more or faster CPU, kp-worker export-model, a lower KP_MAX_TOKENS or KP_PRECISION"
        )


def _time(embedder: Embedder, tokens: int) -> float:
    """Return the median of some embeddings of the longest text, s; the first one warms up."""
    text = "word " * tokens
    seconds = []
    for _ in range(TIMED_TEXTS + 1):
        started = time.perf_counter()
        embedder.embed(text)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def _disk(check: str, path: Path) -> Finding:
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    try:
        free = shutil.disk_usage(there).free
    except OSError as error:
        return warn(check, f"{there}: {error.strerror}", "look at the mount")
    told = f"{free / 2**30:.1f} GiB free at {path}"
    if free < LEAST_FREE_BYTES:
        return warn(check, told, f"make room: {LEAST_FREE_BYTES >> 20} MiB at least")
    return ok(check, told)


def _port(settings: Settings) -> Finding:
    host, port = settings.http_host, settings.http_port
    where = f"{host}:{port}"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the worker's own server
        try:
            probe.bind((host, port))
        except OSError as error:
            if _is_worker(host, port):
                return ok("port", f"a kp-worker listens on {where} already")
            return fail("port", f"cannot listen on {where}: {error.strerror}", "set KP_HTTP_PORT and KP_HTTP_HOST")
    return ok("port", f"{where} is free" if port else "KP_HTTP_PORT=0: the system chooses a free one")


def _is_worker(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1" if host == "0.0.0.0" else host, port, timeout=2)  # noqa: S104
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/healthz")
        return connection.getresponse().getheader("Server") == "kp-worker"
    return False

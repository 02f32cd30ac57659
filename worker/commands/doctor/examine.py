"""The checks of `kp-worker doctor`, in order; this module checks settings, codecs, disks and the port."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

from worker.commands.doctor.caches import check_caches
from worker.commands.doctor.finding import Finding, fail, ok, warn
from worker.commands.doctor.kafka import check_kafka
from worker.commands.doctor.model import check_model, check_runtime
from worker.commands.doctor.processes import check_assemble, check_registry
from worker.commands.doctor.traces import check_cache, check_domains, check_threshold, check_verdicts, last_outputs
from worker.commands.shared.options import load_settings
from worker.config import ConfigError, Loaded, Settings
from worker.embed.embedder import OFFICIAL_NAME, OFFICIAL_SHA256
from worker.embed.openvino_embedder import default_directory
from worker.kafka.cluster.topics import CODECS, codec_problems
from worker.observe.tracing import start_tracing
from worker.stream.worker import START_CHECKS

KAFKA_SECONDS: Final = 45.0
"""Time limit for all checks of the broker together."""

PORT_REMEDY: Final = "set KP_HTTP_PORT to a free port (0: any), or KP_HTTP_HOST to another address of this machine"

LEAST_FREE_BYTES: Final = 500 << 20
"""Less free space is a warning: an exported model takes 90 to 180 MB, logs and temporary files some more."""


async def examine() -> AsyncIterator[Finding]:
    """Yield the findings as they become known. Takes at most some 3 minutes, if nothing answers at all."""
    try:
        loaded = load_settings()
    except ConfigError as error:
        for line in str(error).splitlines():
            yield fail(
                "settings", line, "correct it (kp-worker run --help lists all settings); nothing else was checked"
            )
        return
    settings = loaded.settings
    for finding in _settings(loaded):
        yield finding
    yield _codecs()
    for finding in _start(settings):
        yield finding
    reachable = True
    try:
        async with asyncio.timeout(KAFKA_SECONDS):
            async for finding in check_kafka(settings):
                reachable &= finding.level != "fail" or finding.check != "broker"
                yield finding
    except TimeoutError:
        reachable = False
        yield fail("broker", f"the checks took longer than {KAFKA_SECONDS:.0f} s", "check the brokers and the network")
    models: Counter[str] = Counter()
    documents: list[bytes] = []
    if reachable:
        findings, models = await check_cache(settings)
        findings += await check_caches(settings)
        outputs = await last_outputs(settings)
        if isinstance(outputs, Finding):
            findings.append(outputs)
        else:
            documents = outputs.values
            findings += [*check_domains(settings, outputs), *check_threshold(settings, outputs)]
            findings += await check_verdicts(settings, outputs)
        for finding in findings:
            yield finding
    for finding in check_runtime(settings):
        yield finding
    for finding in await check_model(settings, models, documents):
        yield finding
    async for finding in check_registry(settings):
        yield finding
    if reachable:
        async for finding in check_assemble(settings):
            yield finding
    yield _disk("model cache", default_directory(OFFICIAL_NAME, OFFICIAL_SHA256))
    yield _disk("temporary files", Path(tempfile.gettempdir()))
    yield await asyncio.to_thread(_port, settings)


def _settings(loaded: Loaded) -> Iterator[Finding]:
    for text in loaded.warnings:
        yield warn("settings", text, "correct or remove it: it has no effect")
    given = [name if origin in loaded.files else origin for name, origin in loaded.given().items()]
    read = f" ({', '.join(loaded.files)} was read)" if loaded.files else ""
    yield ok("settings", f"{len(given)} set: {', '.join(given)}{read}" if given else f"none set, all defaults{read}")


def _start(settings: Settings) -> Iterator[Finding]:
    """Yield the other problems that would make a worker exit with code 2 at startup: the same checks."""

    def check_tracing(settings: Settings) -> None:
        start_tracing(settings).stop()

    for name, check in {**START_CHECKS, "tracing": check_tracing}.items():
        try:
            check(settings)
        except ConfigError as error:
            yield fail(name, str(error), "kp-worker run exits with code 2 until this is corrected")


def _codecs() -> Finding:
    for problem in codec_problems():
        return warn("codecs", problem.message, problem.remedy)
    return ok("codecs", f"records compressed with {', '.join(CODECS)} can be read")


def _disk(check: str, path: Path) -> Finding:
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    try:
        free = shutil.disk_usage(there).free
    except OSError as error:
        return warn(check, f"{there}: {error.strerror}", "check the mount")
    message = f"{free / 2**30:.1f} GiB free at {path}"
    if free < LEAST_FREE_BYTES:
        return warn(check, message, f"free at least {LEAST_FREE_BYTES >> 20} MiB")
    return ok(check, message)


def _port(settings: Settings) -> Finding:
    host, port = settings.http_host, settings.http_port
    where = f"{host}:{port}"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # like the worker's HTTP server
        try:
            probe.bind((host, port))
        except OSError as error:
            if _is_worker(host, port):
                return ok("port", f"a kp-worker already listens on {where}; a second one needs another KP_HTTP_PORT")
            return fail("port", f"cannot listen on {where}: {error.strerror}", PORT_REMEDY)
    return ok("port", f"{where} is free" if port else "KP_HTTP_PORT=0: the system chooses a free one")


def _is_worker(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1" if host == "0.0.0.0" else host, port, timeout=2)  # noqa: S104
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/healthz")
        return connection.getresponse().getheader("Server") == "kp-worker"
    return False

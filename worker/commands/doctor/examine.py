"""The checks of `kp-worker doctor`, in order; this module checks settings, codecs, disks and the port."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from worker.commands.doctor.finding import Check, Examination, Finding, fail, ok, reading, warn
from worker.commands.doctor.kafka import check_kafka
from worker.commands.doctor.model import check_model
from worker.commands.doctor.processes import check_assemble, check_registry
from worker.commands.doctor.traces import check_cache, check_memory, check_outputs, check_verdicts
from worker.commands.shared.options import load_settings
from worker.config import ConfigError
from worker.embed.embedder import OFFICIAL_NAME, OFFICIAL_SHA256
from worker.embed.openvino_embedder import default_directory
from worker.kafka.cluster.topics import CODECS, codec_problems
from worker.observe.tracing import start_tracing
from worker.stream.worker import START_CHECKS


async def examine() -> AsyncIterator[Finding]:
    """Yield the findings as they become known. Takes at most some 3 minutes, if nothing answers at all."""
    try:
        examination = Examination(load_settings())
    except ConfigError as error:
        remedy = "correct it (kp-worker run --help lists all settings); nothing else was checked"
        for line in str(error).splitlines():
            yield fail("settings", line, remedy)
        return
    for check in CHECKS:
        async for finding in check(examination):
            yield finding


async def check_settings(examination: Examination) -> AsyncIterator[Finding]:
    """Check the settings, and what else would make a worker exit with code 2 at startup."""
    loaded = examination.loaded
    for text in loaded.warnings:
        yield warn("settings", text, "correct or remove it: it has no effect")
    given = [name if origin in loaded.files else origin for name, origin in loaded.given().items()]
    read = f" ({', '.join(loaded.files)} was read)" if loaded.files else ""
    yield ok("settings", f"{len(given)} set: {', '.join(given)}{read}" if given else f"none set, all defaults{read}")
    for problem in codec_problems():
        yield warn("codecs", problem.message, problem.remedy)
        break
    else:
        yield ok("codecs", f"records compressed with {', '.join(CODECS)} can be read")
    for name, check in {**START_CHECKS, "tracing": start_tracing}.items():
        try:
            check(loaded.settings)
        except ConfigError as error:
            yield fail(name, str(error), "kp-worker run exits with code 2 until this is corrected")


async def check_disks(_: Examination) -> AsyncIterator[Finding]:
    """Check the free space: an exported model takes 90 to 180 MB, logs and temporary files some more."""
    cache = default_directory(OFFICIAL_NAME, OFFICIAL_SHA256)
    for name, path in (("model cache", cache), ("temporary files", Path(tempfile.gettempdir()))):
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        try:
            free = shutil.disk_usage(there).free
        except OSError as error:
            yield warn(name, f"{there}: {error.strerror}", "check the mount")
            continue
        message = f"{free / 2**30:.1f} GiB free at {path}"
        yield warn(name, message, "free at least 500 MiB") if free < 500 << 20 else ok(name, message)


async def check_port(examination: Examination) -> AsyncIterator[Finding]:
    """Check that a worker can listen."""
    yield await asyncio.to_thread(_port, examination.settings.http_host, examination.settings.http_port)


def _port(host: str, port: int) -> Finding:
    where = f"{host}:{port}"
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # like the worker's HTTP server
        try:
            probe.bind((host, port))
        except OSError as error:
            if _is_worker(host, port):
                return ok("port", f"a kp-worker already listens on {where}; a second one needs another KP_HTTP_PORT")
            remedy = "set KP_HTTP_PORT to a free port (0: any), or KP_HTTP_HOST to another address of this machine"
            return fail("port", f"cannot listen on {where}: {error.strerror}", remedy)
    return ok("port", f"{where} is free" if port else "KP_HTTP_PORT=0: the system chooses a free one")


def _is_worker(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1" if host == "0.0.0.0" else host, port, timeout=2)  # noqa: S104
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/healthz")
        return connection.getresponse().getheader("Server") == "kp-worker"
    return False


CHECKS: Final[tuple[Check, ...]] = (
    check_settings,
    check_kafka,
    reading(check_cache, "cache", "the last entries", 10.0),
    reading(
        check_memory, "caches", "the changelog", 20.0,
        "look at kp_cache_entries, and at scoring.confidence of the agents' traces",
    ),
    reading(check_outputs, "domains", "the last scored traces", 10.0),
    reading(check_verdicts, "verdicts", "the verdicts", 20.0),
    check_model,
    check_registry,
    check_assemble,
    check_disks,
    check_port,
)  # fmt: skip

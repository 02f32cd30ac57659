"""The worker's process: HTTP port, preparation, signals, and the exit code.

Exit codes: 0 after SIGTERM or SIGINT, when every record taken is committed. 1 after a failure: uncommitted work is
discarded, and the restarted worker continues at the committed offsets. 2: the settings or the topics are wrong.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

from worker.config import ConfigError, Settings
from worker.config.control_keys import forget_keys, judge_keys
from worker.config.redaction_rules import output_rules
from worker.core.records import EmbedderIdentity
from worker.embed.embedder import Embedder, ModelError, ServiceUnavailableError
from worker.embed.load import load_for_worker, slow_runtime
from worker.kafka.cluster.client import client_arguments, patch_aiokafka
from worker.kafka.cluster.errors import error_text
from worker.observe import logs
from worker.observe.http_server import HttpServer
from worker.observe.metrics import Metrics, process_registry
from worker.observe.status import Status
from worker.observe.tracing import NO_TRACING, NoTracing, Tracing, start_tracing
from worker.stream.assignment import prepare_layout
from worker.stream.worker import Worker
from worker.version import __version__

log = logging.getLogger(__name__)

LEAVE_SECONDS: Final = 5.0
"""After a failure, how long the worker may take to leave its group and close its connections before it exits."""

SERVICE_SECONDS: Final = 5.0
"""Pause before an embedding service that does not answer at the start is asked again."""

START_CHECKS: Final[Mapping[str, Callable[[Settings], object]]] = {
    "forget": lambda settings: forget_keys(settings) if settings.forget else None,
    "judging": judge_keys,
    "redaction": output_rules,
}
"""What is read at the start beside the settings themselves; the names are the doctor's. Each raises ConfigError."""

EmbedderLoader = Callable[[Settings], Embedder | None]


def main(settings: Settings, load: EmbedderLoader = load_for_worker) -> NoReturn:
    """Configure logging, run the worker, and exit with its exit code."""
    logs.configure(settings.log_level, settings.log_format)
    code = asyncio.run(run(settings, load))
    logging.shutdown()
    # Not sys.exit: a model that hangs in its thread would prevent the interpreter from exiting.
    os._exit(code)


async def run(settings: Settings, load: EmbedderLoader = load_for_worker) -> int:
    """Run a worker until SIGTERM, SIGINT or a failure; return the exit code."""
    asked_to_stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked_to_stop.set)
    process = _Process(settings, load)
    http = process.http_server()
    try:
        port = await http.start()
    except OSError as error:
        log.error("%s", http.cannot_listen(error))
        return 2
    log.info("kp-worker %s: metrics and health on http://%s:%d/metrics", __version__, settings.http_host, port)
    stop = asyncio.create_task(asked_to_stop.wait())
    try:
        return await process.live(stop)
    except (ConfigError, ModelError) as error:
        log.error("%s", error)
        return 2
    finally:
        stop.cancel()
        await http.stop()
        await asyncio.to_thread(process.tracing.stop)


class _Process:
    """The parts of one process: metrics and status page from the start, the worker as soon as it is prepared."""

    def __init__(self, settings: Settings, load: EmbedderLoader) -> None:
        self.tracing: Tracing | NoTracing = NO_TRACING
        self._settings = settings
        self._load = load
        self._metrics = Metrics(process_registry(), settings.scoring_profiles())
        self._status = (
            Status(settings, self._metrics, self._not_ready, slow_runtime(settings.embedder, settings.model))
            if settings.status_page
            else None
        )
        self._worker: Worker | None = None
        self._phase = "loading the model"

    def http_server(self) -> HttpServer:
        """Return the server of metrics, health and the status page."""
        return HttpServer(
            self._settings.http_host,
            self._settings.http_port,
            self._metrics.registry,
            healthy=lambda: None if self._worker is None else self._worker.stuck(),
            ready=self._not_ready,
            pages=None if self._status is None else self._status.pages(),
        )

    def _not_ready(self) -> str | None:
        return self._phase if self._worker is None else self._worker.not_ready()

    async def live(self, stop: asyncio.Task[Any]) -> int:
        """Prepare the worker and run it until `stop` is done or it fails; return the exit code."""
        preparing = asyncio.create_task(self._prepare())
        await asyncio.wait({preparing, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not preparing.done():
            preparing.cancel()
            return 0
        self._worker = preparing.result()
        # What the start has made (90,000 objects) lives to the end. A full collection that looks through it stops the
        # process for 55 ms.
        gc.collect()
        gc.freeze()
        return await _serve(self._worker, self._settings, stop)

    async def _prepare(self) -> Worker:
        """Load the model and check the topics. Raises ModelError and ConfigError."""
        settings = self._settings
        for check in START_CHECKS.values():
            check(settings)  # what is wrong is told before the model is loaded
        self.tracing = start_tracing(settings)
        patch_aiokafka(settings)
        client = client_arguments(settings)
        if settings.embedder != "none":
            log.info("loading the model")
        embedder = await self._loaded()
        identity = None if embedder is None else embedder.identity
        self._describe(identity)
        self._phase = "checking the topics"
        layout = await prepare_layout(settings, client, identity)
        return Worker(settings, client, layout, embedder, self._metrics, self.tracing, self._status)

    async def _loaded(self) -> Embedder | None:
        """Load the model; wait for a service that does not answer. Raises ModelError."""
        while True:
            try:
                return await asyncio.to_thread(self._load, self._settings)
            except ServiceUnavailableError as error:
                self._metrics.service_down.set(1)
                self._phase = f"waiting for the embedding service at {error}"
                log.warning("%s; trying again in %g s", self._phase, SERVICE_SECONDS)
                await asyncio.sleep(SERVICE_SECONDS)

    def _describe(self, identity: EmbedderIdentity | None) -> None:
        key = "none" if identity is None else identity.key()
        self._metrics.build.info({"version": __version__, "group": self._settings.group_id, "embedder": key})
        log.info("embedder: %s", "none (novelty 0.5)" if identity is None else f"{identity.runtime} {key}")


async def _serve(worker: Worker, settings: Settings, stop: asyncio.Task[Any]) -> int:
    starting = asyncio.create_task(worker.start())
    failed = asyncio.create_task(worker.failed.wait())
    await asyncio.wait({starting, failed, stop}, return_when=asyncio.FIRST_COMPLETED)
    watching = asyncio.create_task(worker.watch())
    if not (starting.done() and starting.exception()):
        await asyncio.wait({watching, failed, stop}, return_when=asyncio.FIRST_COMPLETED)
    error = worker.failure
    for task in (starting, watching):
        if error is None and task.done() and not task.cancelled():
            error = task.exception()
        task.cancel()
    failed.cancel()
    if error is not None:
        log.error("stopping: %s; uncommitted records will be read again", error_text(error))
    else:
        log.info("stopping: finishing the records taken")
    try:
        await asyncio.wait_for(worker.stop(), settings.shutdown_timeout_seconds if error is None else LEAVE_SECONDS)
    except TimeoutError:
        if error is None:
            log.error("the drain took longer than KP_SHUTDOWN_TIMEOUT_SECONDS; uncommitted records will be read again")
        return 1
    if error is None and worker.failure is None:
        log.info("stopped: every record taken is committed")
        return 0
    return 1

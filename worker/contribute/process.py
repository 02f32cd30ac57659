"""The process of `kp-worker contribute`: HTTP port, preparation, signals, and the exit code.

Exit codes: 0 after SIGTERM or SIGINT, when what was in flight is finished and committed. 1 after a failure: a restart
continues at the committed offsets. 2: the settings or the topics are wrong, or the registry does not accept the key.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from typing import Any, Final, NoReturn

from worker.config import ConfigError, Settings
from worker.contribute.contributor import Contributor
from worker.contribute.delivery import DeniedError
from worker.contribute.registry_client import RegistryClient, RegistryKey
from worker.contribute.topics import prepare_contribute_topics
from worker.kafka.cluster.client import client_arguments, patch_aiokafka
from worker.kafka.cluster.errors import error_text
from worker.observe import logs
from worker.observe.contribute_metrics import ContributeMetrics
from worker.observe.http_server import HttpServer
from worker.observe.metrics import process_registry
from worker.version import __version__

log = logging.getLogger(__name__)


def main(settings: Settings) -> NoReturn:
    """Configure logging, contribute, and exit with the exit code."""
    logs.configure(settings.log_level, settings.log_format)
    _exit(asyncio.run(run_process(settings)))


def _exit(code: int) -> NoReturn:
    """End the process at once, whatever its threads and connections wait for."""
    logging.shutdown()
    os._exit(code)


LEAVE_SECONDS: Final = 1.0
"""How long leaving the group may take after KP_SHUTDOWN_TIMEOUT_SECONDS: then others get the partitions at once."""


async def run_process(settings: Settings) -> int:
    """Contribute until SIGTERM, SIGINT or a failure; return the exit code."""
    asked_to_stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked_to_stop.set)
    process = _ContributeProcess(settings)
    http = process.http_server()
    try:
        port = await http.start()
    except OSError as error:
        log.error("%s", http.cannot_listen(error))
        return 2
    log.info(
        "kp-worker %s contribute: metrics and health on http://%s:%d/metrics", __version__, settings.http_host, port
    )
    stop = asyncio.create_task(asked_to_stop.wait())
    try:
        return await process.live(stop)
    except ConfigError as error:
        log.error("%s", error)
        return 2
    finally:
        stop.cancel()
        await http.stop()


class _ContributeProcess:
    """The parts of one process: metrics from the start, the contributor as soon as it is prepared."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._metrics = ContributeMetrics(process_registry())
        self._metrics.build.info({"version": __version__, "group": settings.contribute_group})
        self._contributor: Contributor | None = None

    def http_server(self) -> HttpServer:
        """Return the server of metrics and health. The process is alive as long as it answers."""
        return HttpServer(
            self._settings.http_host,
            self._settings.http_port,
            self._metrics.registry,
            healthy=lambda: None,
            ready=lambda: "checking the topics" if self._contributor is None else self._contributor.not_ready(),
        )

    async def live(self, stop: asyncio.Task[Any]) -> int:
        """Prepare, and contribute until `stop` is done or something fails. Raises ConfigError."""
        settings = self._settings
        if settings.registry_url is None:
            raise ConfigError("contribute needs the registry's address: set KP_REGISTRY_URL")
        key = RegistryKey(settings)
        patch_aiokafka(settings)
        client = client_arguments(settings)
        preparing = asyncio.create_task(prepare_contribute_topics(settings, client))
        await asyncio.wait({preparing, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not preparing.done():
            preparing.cancel()
            return 0
        topics = preparing.result()
        timeout = settings.contribute_timeout_seconds
        largest = settings.max_message_bytes
        async with RegistryClient(settings.registry_url, key, timeout, self._metrics, largest) as registry:
            self._contributor = Contributor(settings, client, topics, registry, self._metrics)
            return await self._serve(self._contributor, stop)

    async def _serve(self, contributor: Contributor, stop: asyncio.Task[Any]) -> int:
        running = asyncio.create_task(contributor.run())
        await asyncio.wait({running, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            log.info("stopping: finishing what is in flight")
            contributor.stop()
        done, _ = await asyncio.wait({running}, timeout=self._settings.shutdown_timeout_seconds)
        if not done:
            log.error("stopping took longer than KP_SHUTDOWN_TIMEOUT_SECONDS; the restart looks up what was in flight")
            running.cancel()
            await asyncio.wait({running}, timeout=LEAVE_SECONDS)
            _exit(1)
        error = contributor.failure or running.exception()
        if isinstance(error, DeniedError):
            log.error("stopping: %s", error)
            return 2
        if isinstance(error, ConfigError):
            raise error
        if error is not None:
            log.error("stopping: %s; what is not committed is read again", error_text(error))
            return 1
        log.info("stopped: what was in flight is finished and committed")
        return 0

"""The process of `kp-worker contribute`: preparation, and the exit code.

Exit codes: 0 after SIGTERM or SIGINT, when what was in flight is finished and committed. 1 after a failure: a restart
continues at the committed offsets. 2: the settings or the topics are wrong, or the registry does not accept the key.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, NoReturn

from worker.config import ConfigError, Settings
from worker.contribute.contributor import Contributor
from worker.contribute.delivery import DeniedError
from worker.contribute.registry_client import RegistryClient, registry_key
from worker.contribute.topics import prepare_contribute_topics
from worker.kafka.cluster.client import client_arguments, patch_aiokafka
from worker.kafka.cluster.errors import error_text
from worker.observe.contribute_metrics import ContributeMetrics
from worker.observe.metrics import process_registry
from worker.observe.service import run_service, run_until_stopped
from worker.version import __version__

log = logging.getLogger(__name__)


def main(settings: Settings) -> NoReturn:
    """Contribute until SIGTERM, SIGINT or a failure, and exit with the exit code."""
    run_service("contribute", settings, _ContributeProcess(settings))


class _ContributeProcess:
    """The parts of one process: metrics from the start, the contributor as soon as it is prepared."""

    def __init__(self, settings: Settings) -> None:
        self.registry = process_registry()
        self._settings = settings
        self._metrics = ContributeMetrics(self.registry)
        self._metrics.build.info({"version": __version__, "group": settings.contribute_group})
        self._contributor: Contributor | None = None

    def not_ready(self) -> str | None:
        """Return why nothing is posted, or None: for readiness."""
        return "checking the topics" if self._contributor is None else self._contributor.not_ready()

    async def live(self, stop: asyncio.Task[Any]) -> int:
        """Prepare, and contribute until `stop` is done or something fails. Raises ConfigError."""
        settings = self._settings
        if settings.registry_url is None:
            raise ConfigError("contribute needs the registry's address: set KP_REGISTRY_URL")
        key = registry_key(settings)
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
        unfinished = "the restart looks up what was in flight"
        error = await run_until_stopped(contributor, stop, self._settings.shutdown_timeout_seconds, unfinished)
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

"""The process of `kp-worker contribute`: what it prepares, and which errors end it with which code.

Exit codes: 0 after SIGTERM or SIGINT, when what was in flight is finished and committed. 1 after a failure: a restart
continues at the committed offsets. 2: the settings or the topics are wrong, or the registry does not accept the key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack

from worker.config import ConfigError, Settings
from worker.contribute.contributor import Contributor
from worker.contribute.delivery import DeniedError
from worker.contribute.partition import ContributePartition
from worker.contribute.registry_client import RegistryClient, registry_key
from worker.contribute.topics import prepare_contribute_topics
from worker.kafka.cluster.client import client_arguments, patch_aiokafka
from worker.kafka.member import Member
from worker.observe.contribute_metrics import ContributeMetrics
from worker.observe.http_server import Page
from worker.observe.metrics import process_registry
from worker.version import __version__


class ContributeProcess:
    """The parts of one process (commands/shared/service.py): metrics from the start, the member once prepared."""

    name = "contribute"
    phase = "checking the topics"
    finished = "what was in flight is finished and committed"
    unfinished = "the restart looks up what was in flight"
    wrong: tuple[type[BaseException], ...] = (ConfigError, DeniedError)

    def __init__(self, settings: Settings) -> None:
        self.registry = process_registry()
        self.pages: Mapping[str, Page] = {}
        self._settings = settings
        self._metrics = ContributeMetrics(self.registry)
        self._metrics.build.info({"version": __version__, "group": settings.contribute_group})

    async def prepare(self, until_end: AsyncExitStack) -> Member[ContributePartition]:
        """Check the settings and the topics. Raises ConfigError."""
        settings = self._settings
        if settings.registry_url is None:
            raise ConfigError("contribute needs the registry's address: set KP_REGISTRY_URL")
        key = registry_key(settings)
        patch_aiokafka(settings)
        client = client_arguments(settings)
        topics = await prepare_contribute_topics(settings, client)
        timeout, largest = settings.contribute_timeout_seconds, settings.max_message_bytes
        registry = RegistryClient(settings.registry_url, key, timeout, self._metrics, largest)
        await until_end.enter_async_context(registry)
        contributor = Contributor(settings, client, topics, registry, self._metrics)
        watching = asyncio.create_task(contributor.late.run())
        until_end.callback(watching.cancel)
        return contributor.member()

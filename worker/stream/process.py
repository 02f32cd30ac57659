"""The process of `kp-worker run`: what it prepares and reports.

Exit codes: 0 after SIGTERM or SIGINT, with every record taken committed; 1 after a failure: uncommitted work is
discarded, and the next start continues at the committed offsets; 2: the settings or the topics are wrong.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Final

from worker.config import ConfigError, Settings
from worker.config.keys import judge_keys
from worker.config.redaction_rules import output_rules
from worker.core.records import EmbedderIdentity
from worker.embed.embedder import Embedder, ModelError, ServiceUnavailableError
from worker.embed.load import load_for_worker, slow_runtime
from worker.kafka.cluster.client import prepare_clients
from worker.observe.http_server import Page
from worker.observe.metrics import Metrics, process_registry
from worker.observe.status import Status
from worker.observe.tracing import start_tracing
from worker.stream.partition_factory import prepare_layout
from worker.stream.worker import Worker, build_worker
from worker.version import __version__

log = logging.getLogger(__name__)

SERVICE_SECONDS: Final = 5.0  # pause before an embedding service that does not answer at the start is asked again

START_CHECKS: Final[Mapping[str, Callable[[Settings], object]]] = {
    "judging": judge_keys,
    "redaction": output_rules,
}
"""What is read at the start beside the settings themselves; the names are the doctor's. Each raises ConfigError."""


class WorkerProcess:
    """The parts of one process (commands/run/service.py): first metrics and status page, then the worker."""

    name = ""
    finished = "every record taken is committed"
    unfinished = "uncommitted records will be read again"
    wrong: tuple[type[BaseException], ...] = ()

    def __init__(self, settings: Settings, load: Callable[[Settings], Embedder | None] = load_for_worker) -> None:
        self.phase = "loading the model"
        self._settings = settings
        self._load = load
        self._metrics = Metrics(process_registry(), settings.scoring_profiles())
        self.registry = self._metrics.registry
        slow = slow_runtime(settings.embedder, settings.model)
        self._status = Status(settings, self._metrics, self._not_ready, slow) if settings.status_page else None
        self.pages: Mapping[str, Page] = {} if self._status is None else self._status.pages()
        self._worker: Worker | None = None

    def _not_ready(self) -> str | None:
        return self.phase if self._worker is None else self._worker.not_ready()

    async def prepare(self, until_end: AsyncExitStack) -> Worker:
        """Load the model and check the topics. Raises ConfigError."""
        settings = self._settings
        for check in START_CHECKS.values():
            check(settings)  # errors are reported before the model is loaded
        tracing = start_tracing(settings)
        until_end.push_async_callback(asyncio.to_thread, tracing.stop)
        client = prepare_clients(settings)
        if settings.embedder != "none":
            log.info("loading the model")
        try:
            embedder = await self._loaded()
        except ModelError as error:
            raise ConfigError(str(error)) from error
        identity = None if embedder is None else embedder.identity
        self._describe(identity)
        self.phase = "checking the topics"
        layout = await prepare_layout(settings, client, identity)
        self._worker = build_worker(settings, client, layout, embedder, self._metrics, tracing, self._status)
        # What the start has made (90,000 objects) lives to the end. A full collection that looks through it stops the
        # process for 55 ms.
        gc.collect()
        gc.freeze()
        return self._worker

    async def _loaded(self) -> Embedder | None:
        """Load the model; wait for a service that does not answer. Raises ModelError."""
        while True:
            try:
                return await asyncio.to_thread(self._load, self._settings)
            except ServiceUnavailableError as error:
                self._metrics.service_down.set(1)
                self.phase = f"waiting for the embedding service at {error}"
                log.warning("%s; trying again in %g s", self.phase, SERVICE_SECONDS)
                await asyncio.sleep(SERVICE_SECONDS)

    def _describe(self, identity: EmbedderIdentity | None) -> None:
        key = "none" if identity is None else identity.key()
        self._metrics.build.info({"version": __version__, "group": self._settings.group_id, "embedder": key})
        log.info("embedder: %s", "none (novelty 0.5)" if identity is None else f"{identity.runtime} {key}")

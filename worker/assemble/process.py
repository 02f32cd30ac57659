"""The process of `kp-worker assemble`: what it prepares, and which errors end it with which code.

Exit codes: 0 after SIGTERM or SIGINT, when what was in flight is committed. 1 after a failure: a restart continues at
the committed offsets. 2: the settings or the topics are wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import get_args

from worker.assemble.assembler import Assembler
from worker.assemble.partition import AssemblePartition
from worker.assemble.topics import prepare_assemble_topics
from worker.assemble.traces import rules_from
from worker.config import ConfigError, Settings
from worker.kafka.cluster.client import client_arguments, patch_aiokafka
from worker.kafka.member import Member
from worker.observe.assemble_metrics import AssembleMetrics
from worker.observe.http_server import Page
from worker.observe.metrics import process_registry
from worker.runs.otlp.content import CONVENTIONS
from worker.runs.otlp.mapping import Missing
from worker.version import __version__


class AssembleProcess:
    """The parts of one process (commands/shared/service.py): metrics from the start, the member once prepared."""

    name = "assemble"
    phase = "checking the topics"
    finished = "what was in flight is committed"
    unfinished = "what is not committed is read again"
    wrong: tuple[type[BaseException], ...] = (ConfigError,)

    def __init__(self, settings: Settings) -> None:
        self.registry = process_registry()
        self.pages: Mapping[str, Page] = {}
        self._settings = settings
        self._metrics = AssembleMetrics(self.registry, get_args(Missing), CONVENTIONS)
        self._metrics.build.info({"version": __version__, "group": settings.assemble_group})

    async def prepare(self, until_end: AsyncExitStack) -> Member[AssemblePartition]:
        """Check the settings and the topics. Raises ConfigError."""
        settings = self._settings
        rules = rules_from(settings)
        patch_aiokafka(settings)
        client = client_arguments(settings)
        topics = await prepare_assemble_topics(settings, client)
        return Assembler(settings, client, topics, rules, self._metrics).member()

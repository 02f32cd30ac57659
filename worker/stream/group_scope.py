"""The novelty scope `group`: the worker's group view, and whether traces may be decided while it lags."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from worker.config import Settings
from worker.core.changelog import Probes
from worker.core.group_view import GroupView
from worker.core.records import EmbedderIdentity
from worker.core.terminal import number_of
from worker.embed.embedder import Embedder, ServedEmbedder
from worker.kafka.cluster.topics import Layout
from worker.kafka.state.changelog_follower import ChangelogFollower
from worker.observe.metrics import Metrics

log = logging.getLogger(__name__)


class GroupScope:
    """The group view of all partitions, kept up to date by a task."""

    def __init__(
        self,
        settings: Settings,
        client: Mapping[str, Any],
        partitions: int,
        identity: EmbedderIdentity,
        metrics: Metrics,
        probes: Probes | None = None,
    ) -> None:
        self.view = GroupView(
            identity.key(),
            identity.dimensions,
            settings.cache_max_elements,
            settings.cache_ttl_ms,
            settings.group_max_elements,
            probes,
        )
        self._follower = ChangelogFollower(settings, client, identity, self.view, self._progress)
        self._most_seconds = settings.group_max_lag_seconds
        self._waits = settings.group_lag_action == "wait"
        self._partitions = partitions
        self._metrics = metrics
        self._advance: Callable[[], None] = lambda: None
        self._task: asyncio.Task[None] | None = None
        self._behind = False
        self._counted = 0  # of the view's corrupt records

    async def start(self, advance: Callable[[], None], fail: Callable[[BaseException], None]) -> None:
        """Load the view and follow the changelog. Raises what `ChangelogFollower.load` raises.

        `advance` lets waiting traces be decided; `fail` stops the worker.
        """
        started = time.perf_counter()
        await self._follower.load(range(self._partitions))
        self.update_metrics()
        log.info(
            "group view: %s of %s in %.2f s",
            number_of(len(self.view), "entry", "entries"), number_of(self._partitions, "partition"),
            time.perf_counter() - started,
        )  # fmt: skip
        self._advance = advance
        self._task = asyncio.create_task(self._follow(fail), name="group-view")

    async def stop(self) -> None:
        """Stop following."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def may_decide(self) -> bool:
        """Whether traces may be decided now."""
        if not self._waits:
            return True
        behind = self._follower.lag_seconds() > self._most_seconds
        if behind and not self._behind:
            log.warning(
                "the view of other partitions is more than %g s behind (KP_GROUP_MAX_LAG_SECONDS): traces wait",
                self._most_seconds,
            )
        self._behind = behind
        return not behind

    def not_ready(self) -> str | None:
        """Return why traces wait for the view, or None: for readiness."""
        if self.may_decide():
            return None
        return (
            f"the view of other partitions is {self._follower.lag_seconds():.0f} s behind "
            f"(KP_GROUP_MAX_LAG_SECONDS={self._most_seconds:g}): traces wait"
        )

    def update_metrics(self) -> None:
        """Update the metrics of the view."""
        self._metrics.group_lag.set(self._follower.lag_seconds())
        self._metrics.group_entries.set(len(self.view))
        self._metrics.group_bytes.set(self.view.memory_bytes)
        self._metrics.skipped_entries.labels("corrupt").inc(self.view.corrupt - self._counted)
        self._counted = self.view.corrupt

    def _progress(self) -> None:
        if self._behind and self.may_decide():
            log.info("the view of other partitions has caught up: traces are scored again")
            self._advance()

    async def _follow(self, fail: Callable[[BaseException], None]) -> None:
        try:
            await self._follower.follow()
        except Exception as error:
            fail(error)


def group_scope(
    settings: Settings, client: Mapping[str, Any], layout: Layout, embedder: Embedder | None, metrics: Metrics
) -> GroupScope | None:
    """Return the scope `group` if it is configured; without an embedder there is nothing to compare."""
    if settings.novelty_scope != "group" or embedder is None:
        return None
    probes = embedder.probes if isinstance(embedder, ServedEmbedder) else None
    return GroupScope(settings, client, layout.source_partitions, embedder.identity, metrics, probes)

"""Follows the changelog: reads all its partitions, committed records only, into the group view.

A partition's changelog is read to the end before its committed offset. So the offset is never older than what was read,
and the passes that it decides on (passes.resolve) are the ones that count: a later one writes its marker behind that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError
from aiokafka.structs import ConsumerRecord

from worker.config import Settings
from worker.core.changelog import SLACK
from worker.core.group_view import GroupView
from worker.core.records import EmbedderIdentity
from worker.core.terminal import number_of
from worker.kafka.cluster.connections import committed_reader, running
from worker.kafka.state.restore import RETRY_SECONDS, fault_of, read_logs, read_positions

log = logging.getLogger(__name__)

LOADED_ENTRIES: Final = 32_768
"""About the most entries that are read before they are applied (1.7 kB each): 16 partitions of the default capacity."""

POLL_MS: Final = 200  # how long to wait for records before the lag is measured
POLL_RECORDS: Final = 128  # most records that are applied before other tasks run
FETCH_BYTES: Final = 1 << 20  # bytes of one fetch of a partition: 600 entries


class ChangelogFollower:
    """Keeps a group view up to date with the changelog. `on_progress` is called when the lag may have changed."""

    def __init__(
        self,
        settings: Settings,
        client: Mapping[str, Any],
        identity: EmbedderIdentity,
        view: GroupView,
        on_progress: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._client = client
        self._identity = identity
        self._view = view
        self._on_progress = on_progress
        self._next: dict[int, int] = {}  # the offset on the changelog of the next record to apply
        self._answered: dict[
            int, tuple[int, float]
        ] = {}  # the consumer's time of the last response, and ours before it
        self._asked: dict[int, float] = {}  # when that response had not been asked for, s of the monotonic clock
        self._complete: dict[int, float] = {}  # when the view was last known to be complete, s of the monotonic clock

    def lag_seconds(self) -> float:
        """Return how long ago the view of all partitions was last known to be complete up to their stable ends."""
        return time.monotonic() - min(self._complete.values(), default=time.monotonic())

    async def load(self, partitions: Collection[int]) -> None:
        """Read partitions to their ends at the time of the call.

        Raises KafkaError, OffsetsError, TimeoutError, and OtherModelError where other probes are kept than the view's.
        """
        settings, capacity = self._settings, self._settings.cache_max_elements
        todo = sorted(partitions)
        seconds = settings.transaction_timeout_seconds
        at_once = max(1, LOADED_ENTRIES // (capacity + SLACK))
        for some in (todo[i : i + at_once] for i in range(0, len(todo), at_once)):
            begun = time.monotonic()
            logs = await read_logs(self._client, settings.changelog, some, seconds)
            positions = await read_positions(self._client, settings.group_id, settings.source_topic, some, seconds)
            for partition in some:
                read, found = logs.pop(partition), positions[partition].found()
                key, dimensions = self._identity.key(), self._identity.dimensions
                restored = await asyncio.to_thread(read.restore, found, key, dimensions, capacity, self._view.probes)
                if restored.problem:
                    log.warning(
                        "group view: changelog %s/%d %s; the view leaves it out (%d damaged in all)",
                        settings.changelog, partition, restored.problem, restored.skipped["corrupt"],
                    )  # fmt: skip
                self._view.load(partition, restored, found)
                self._next[partition] = read.end
                self._complete[partition] = begun

    async def follow(self) -> None:
        """Apply what is committed, until cancelled; errors that may pass are tried again. Raises the others."""
        while True:
            reader = committed_reader(
                self._client, max_partition_fetch_bytes=FETCH_BYTES, fetch_max_bytes=16 * FETCH_BYTES
            )
            try:
                async with running(reader, tolerant=True) as consumer:
                    await self._follow(consumer)
            except KafkaError as error:
                if not error.retriable:
                    raise
                log.warning("cannot follow %s; trying again: %r", self._settings.changelog, error)
                await asyncio.sleep(RETRY_SECONDS)

    async def _follow(self, consumer: AIOKafkaConsumer) -> None:
        self._assign(consumer)
        while True:
            begun = time.monotonic()
            fetched = await consumer.getmany(timeout_ms=POLL_MS, max_records=POLL_RECORDS)
            again = {tp.partition for tp, records in fetched.items() if not self._apply(tp.partition, records)}
            if again:
                log.info("the passes of partitions %s have changed: reading their entries again", sorted(again))
            new = set(consumer.partitions_for_topic(self._settings.changelog) or ()) - self._next.keys()
            if again or new:
                await self.load(again | new)
                self._assign(consumer)
            await self._measure(consumer, begun)
            self._on_progress()

    def _assign(self, consumer: AIOKafkaConsumer) -> None:
        tps = {partition: self._tp(partition) for partition in self._next}
        consumer.assign(list(tps.values()))
        for partition, tp in tps.items():
            consumer.seek(tp, self._next[partition])

    def _tp(self, partition: int) -> TopicPartition:
        return TopicPartition(self._settings.changelog, partition)

    def _apply(self, partition: int, records: Sequence[ConsumerRecord]) -> bool:
        """Apply the next records of a partition; return False if it must be loaded again."""
        before = self._view.corrupt
        again = False
        for record in records:
            self._next[partition] = record.offset + 1
            fault = fault_of(record)
            if fault is not None:
                self._view.corrupt += 1
            elif not self._view.apply(partition, record.key, record.value, record.offset):
                again = True
                break
        if self._view.corrupt > before:
            log.warning(
                "group view: changelog %s/%d: left out %s up to offset %d",
                self._settings.changelog, partition,
                number_of(self._view.corrupt - before, "damaged record"), self._next[partition] - 1,
            )  # fmt: skip
        return not again

    async def _measure(self, consumer: AIOKafkaConsumer, begun: float) -> None:
        """Note which partitions are complete. `begun`: before the records of this round were waited for.

        A response may have waited in a buffer while this process was frozen. But a fetch is sent after the one before
        was answered, so its end of the partition is at least as new as that.
        """
        for partition in self._next:
            tp = self._tp(partition)
            polled = consumer.last_poll_timestamp(tp)
            last = self._answered.get(partition)
            if polled is not None and (last is None or polled != last[0]):
                self._answered[partition] = polled, begun
                if last is not None:
                    self._asked[partition] = last[1]
            stable, asked = consumer.last_stable_offset(tp), self._asked.get(partition)
            if asked is not None and stable is not None and 0 <= stable <= await consumer.position(tp):
                self._complete[partition] = max(self._complete[partition], asked)

"""The work on one partition: poll, process, publish, again; a batch is one transaction with the offset behind it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.structs import ConsumerRecord

from worker.assemble.steps import Assembling, Outcome, Reading, Spreading
from worker.core.passes import Pass
from worker.core.records import ASSEMBLED, Fault, SourceRecord
from worker.kafka.writing.publisher import Batch, ExactlyOncePublisher
from worker.observe.assemble_metrics import AssembleMetrics

log = logging.getLogger(__name__)

POLL_MS: Final = 500

MAX_RECORDS: Final = 500
"""Most records of a batch."""

NOTE_SECONDS: Final = 30.0
"""How long a batch that only moves the time on may wait for another one: a restart reads it again."""


@dataclass(eq=False)
class AssemblePartition:
    """The work on one assigned partition; `next_offset`: behind the last record that was processed.

    `turn`: one batch of the process is computed at a time, in a thread, so that heartbeats go out meanwhile.
    `mark_seconds`: how often an idle partition says so. `interval_seconds`: the least time from commit to commit,
    unless records wait. `told`: what the log has said about spans that lack something. `complete`: waits for an answer
    whether all partitions with spans are known whose marks decide on the stream time; false: there are new ones.
    """

    tp: TopicPartition
    consumer: AIOKafkaConsumer
    publisher: ExactlyOncePublisher
    step: Spreading | Assembling
    metrics: AssembleMetrics
    turn: asyncio.Lock
    source_pass: Pass
    next_offset: int
    interval_seconds: float
    mark_seconds: float
    told: set[str]
    complete: Callable[[], Awaitable[bool]] | None = None
    idle: bool = False
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._opened_ms = self.consumer.last_poll_timestamp(self.tp)
        self._committed_at = self._marked_at = -NOTE_SECONDS
        self._record_at = time.monotonic()

    async def run(self) -> None:
        """Work until `stopping` is set."""
        while not self.stopping.is_set():
            polled_ms = self.consumer.last_poll_timestamp(self.tp)
            records = await self._poll()
            if self.stopping.is_set():
                return
            now = time.monotonic()
            if records and self.complete is not None and not await self.complete():
                # Until a rebalance gives them to somebody: their spans may be of runs that would be closed here.
                await self.stopping.wait()
                return
            if records:
                self.idle, self._record_at = False, now
                await self._process(records, None)
                if len(records) < MAX_RECORDS:
                    await self._pause(self._committed_at + self.interval_seconds - time.monotonic())
            # An answer to a fetch at this position: all that was there at the time has been taken.
            elif polled_ms not in (None, self._opened_ms):
                self.idle = True
                if now - self._marked_at >= self.mark_seconds:
                    self._marked_at = now
                    await self._process([], int(polled_ms))

    async def _poll(self) -> list[SourceRecord]:
        """Return the next records; none where none come for a while, or the work ends.

        During a rebalance getmany waits for its end, which waits for the work to end.
        """
        polling = asyncio.create_task(
            self.consumer.getmany(self.tp, timeout_ms=POLL_MS, max_records=MAX_RECORDS), name=f"poll {self.tp}"
        )
        ending = asyncio.create_task(self.stopping.wait())
        try:
            await asyncio.wait({polling, ending}, return_when=asyncio.FIRST_COMPLETED)
            found = polling.result() if polling.done() else {}
        finally:
            polling.cancel()
            ending.cancel()
        return [_source(record) for record in found.get(self.tp, ())]

    async def _pause(self, seconds: float) -> None:
        if seconds > 0:
            try:
                await asyncio.wait_for(self.stopping.wait(), seconds)
            except TimeoutError:
                return

    async def _process(self, records: list[SourceRecord], read_ms: int | None) -> None:
        """Process records, and publish what follows; a batch that would be too large is several."""
        waited_ms = 0 if records else round((time.monotonic() - self._record_at) * 1000)
        if isinstance(self.step, Assembling) and self.step.may_not_fit(records):
            await self.publisher.look_again(self.publisher.changelog)
            self.step.largest_row = self.publisher.changelog.max_bytes
        while True:
            async with self.turn:
                reading = Reading(records, _now_ms(), read_ms, waited_ms)
                outcome = await asyncio.to_thread(self.step.process, reading)
            if outcome.done:
                self.next_offset = records[outcome.done - 1].offset + 1
                records = records[outcome.done :]
            if outcome.urgent or time.monotonic() - self._committed_at > NOTE_SECONDS:
                await self._publish(outcome)
            if not outcome.more:
                return

    async def _publish(self, outcome: Outcome) -> None:
        batch = Batch(
            outputs=outcome.outputs,
            entries=list(outcome.rows.items()),
            next_offset=self.next_offset,
            stream_time_ms=outcome.time_ms,
            records=outcome.sources,
            source_pass=self.source_pass,
        )
        replaced = await self.publisher.publish(batch)
        self._committed_at = time.monotonic()
        tally = outcome.tally
        for position, error in replaced.items():
            tally.add("dead_letters", str(error.reason))
            if outcome.outputs[position].kind == ASSEMBLED:
                tally.add("traces", "", -1)
        for hint in sorted(tally.hints - self.told):
            self.told.add(hint)
            log.warning("some spans hold less than they could: %s (docs/opentelemetry.md)", hint)
        for reason, words in sorted(tally.refusals.items()):
            if reason not in self.told:
                self.told.add(reason)
                log.warning(
                    "some spans are dead letters, reason %s; the first: %s (docs/opentelemetry.md)", reason, words
                )
        self.metrics.count(tally.counts, tally.ends, time.time())


_STARTED_NS: Final = time.time_ns() - time.monotonic_ns()


def _now_ms() -> int:
    """Return the clock as it was when the process began, and what has passed since: it is never set back."""
    return (_STARTED_NS + time.monotonic_ns()) // 1_000_000


def _source(record: ConsumerRecord) -> SourceRecord:
    timestamp = record.timestamp if record.timestamp is not None and record.timestamp >= 0 else None
    fault = record.checksum if isinstance(record.checksum, Fault) else None
    return SourceRecord(
        record.topic, record.partition, record.offset, timestamp, record.key, record.value, record.headers, 0, fault
    )

"""The work on one partition: poll, process, publish, repeat; a batch is one transaction, with its next offset."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from worker.assemble.steps import Assembling, Outcome, Reading, Spreading
from worker.assemble.traces import UnreadContent
from worker.core.passes import Pass
from worker.core.records import ASSEMBLED, SourceRecord
from worker.kafka.member import Claim
from worker.kafka.writing.publisher import Commit, ExactlyOncePublisher
from worker.observe.assemble_metrics import AssembleMetrics

log = logging.getLogger(__name__)

MAX_RECORDS: Final = 500
"""Maximum records per batch."""

SHORTENED: Final = (
    "the longest texts of some traces are cut, so that these fit KP_MAX_MESSAGE_BYTES and the source topic's "
    "max.message.bytes"
)

MAX_TOLD: Final = 100
"""Maximum number of hints and reasons logged, each once: a hint names a scope, and anyone may send any scope."""

NOTE_SECONDS: Final = 30.0
"""How long a batch that only advances time may stay uncommitted: a restart reads it again."""


@dataclass(frozen=True, slots=True)
class Shared:
    """The state that the partitions of a process share."""

    metrics: AssembleMetrics
    interval_seconds: float
    """Minimum time between commits, unless records are waiting."""
    unread: UnreadContent
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One batch of the process is computed at a time, in a thread, so that heartbeats continue meanwhile."""
    told: set[str] = field(default_factory=set)
    """Hints and reasons already logged."""


@dataclass(eq=False)
class Partition:
    """The work on one partition."""

    claim: Claim
    publisher: ExactlyOncePublisher
    step: Spreading | Assembling
    shared: Shared
    mark_seconds: float
    """How often an idle partition writes a mark."""
    complete: Callable[[], Awaitable[bool]] | None = None
    """Returns whether all span partitions are known; set only for the partition whose marks decide on stream time."""

    def __post_init__(self) -> None:
        self.next_offset = self.claim.position.offset
        self.idle = False
        self._opened_ms = self.claim.consumer.last_poll_timestamp(self.claim.tp)
        self._committed_at = self._marked_at = -NOTE_SECONDS
        self._record_at = time.monotonic()

    async def run(self) -> None:
        """Work until stopped; then no batch is in flight. Raises StoppedError."""
        claim = self.claim
        while True:
            polled_ms = claim.consumer.last_poll_timestamp(claim.tp)
            records = await claim.poll(MAX_RECORDS)
            claim.stop.check()
            now = time.monotonic()
            if records and self.complete is not None and not await self.complete():
                # Wait for a rebalance to assign the new ones: their spans may belong to runs that would close here.
                await claim.stop.wait()
            if records:
                self.idle, self._record_at = False, now
                await self._process(records, None)
                if len(records) < MAX_RECORDS:
                    await claim.stop.sleep(self._committed_at + self.shared.interval_seconds - time.monotonic())
            # A fetch at this position has been answered: everything there at the time has been taken.
            elif polled_ms not in (None, self._opened_ms):
                self.idle = True
                if now - self._marked_at >= self.mark_seconds:
                    self._marked_at = now
                    await self._process([], int(polled_ms))

    async def _process(self, records: list[SourceRecord], read_ms: int | None) -> None:
        """Process records and publish the result; a batch that would be too large is split."""
        waited_ms = 0 if records else round((time.monotonic() - self._record_at) * 1000)
        state = self.publisher.changelog
        if isinstance(self.step, Assembling) and state is not None and self.step.may_not_fit(records):
            await self.publisher.look_again(state)
            self.step.largest_row = state.max_bytes
        while True:
            async with self.shared.turn:
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
        batch = Commit(
            outputs=outcome.outputs, entries=list(outcome.rows.items()), next_offset=self.next_offset,
            metadata=Pass(self.claim.position.topic_id).metadata(outcome.time_ms), records=outcome.sources,
        )  # fmt: skip
        replaced = await self.publisher.publish(batch)
        self._committed_at = time.monotonic()
        tally, told = outcome.tally, self.shared.told
        for position, error in replaced.items():
            tally.refuse(error)
            if outcome.outputs[position].kind == ASSEMBLED:
                tally.add("traces", "", -1)
        for hint in sorted(tally.hints - told)[: max(0, MAX_TOLD - len(told))]:
            told.add(hint)
            log.warning("some spans hold less than they could: %s (docs/opentelemetry.md)", hint)
        for run in tally.unread:
            for scope in self.shared.unread.add(run):
                names = ", ".join(self.shared.unread.scopes[scope])
                log.warning(
                    "spans of %s seem to have content in attributes that nothing reads: %s; their runs have no trace, "
                    "or one without it (docs/opentelemetry.md)", scope or "no scope", names,
                )  # fmt: skip
        for reason, words in sorted(tally.refusals.items()):
            if reason not in told:
                told.add(reason)
                log.warning(
                    "some spans are dead letters, reason %s; the first: %s (docs/opentelemetry.md)", reason, words
                )
        if tally.shortened and SHORTENED not in told:
            told.add(SHORTENED)
            log.warning("%s; the first: %s (docs/opentelemetry.md)", SHORTENED, tally.shortened)
        self.shared.metrics.count(tally.counts, tally.ends, time.time())


_STARTED_NS: Final = time.time_ns() - time.monotonic_ns()


def _now_ms() -> int:
    """Return the clock at process start plus the time since then: it never goes back."""
    return (_STARTED_NS + time.monotonic_ns()) // 1_000_000

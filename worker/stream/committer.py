"""The committer of one source partition: decided records become batches, one transaction at a time.

A transaction costs a third of an embedding's CPU, whether it carries one record or hundreds. So decided records linger
while further ones wait (partition_task.py says for how long), and are committed at once otherwise. Scoring continues
meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from worker.core.records import SourceRecord
from worker.core.trace import InvalidTrace, Reason
from worker.kafka.writing.publisher import Publisher
from worker.observe.metrics import Metrics
from worker.stream.partition_state import Decided, PartitionState

MAX_COMMIT_RECORDS: Final = 512
"""Most records of one transaction. A commit costs the same for 1 or 500; more would only cost memory and latency."""

MAX_COMMIT_BYTES: Final = 8 << 20
"""Most bytes of one transaction (SourceRecord.size and output values), so that large documents do not accumulate."""


class Committer:
    """Gathers the decided records of a partition, in offset order, and commits them.

    `linger` returns how long a batch waits for further records, s, counted from its first record and from the start of
    the last transaction; the caller under whom it falls calls `flush`.
    `is_full` returns whether the partition must commit before it takes more. `refuse` returns the dead letter of a
    scored record that its topic refused. `on_commit` is called with each committed batch. `confirm` is awaited before a
    batch with a control record is published; what it raises ends the committer.
    """

    def __init__(
        self,
        publisher: Publisher,
        state: PartitionState,
        metrics: Metrics,
        interval_seconds: float,
        *,
        linger: Callable[[], float],
        is_full: Callable[[], bool],
        refuse: Callable[[Decided, InvalidTrace], Decided],
        on_commit: Callable[[Sequence[Decided]], None],
        confirm: Callable[[], Awaitable[None]],
    ) -> None:
        self.committed = state.next_offset
        self._publisher = publisher
        self._state = state
        self._metrics = metrics
        self._interval_seconds = interval_seconds
        self._linger_seconds = linger
        self._is_full = is_full
        self._refuse = refuse
        self._on_commit = on_commit
        self._confirm = confirm
        self._decided: deque[Decided] = deque()
        self._oldest: SourceRecord | None = None  # of the batch that is being published
        self._began = 0.0  # start of the last transaction, s of the performance counter
        self._first = 0.0  # when the first decided record was added
        self._work = asyncio.Event()
        self._flush = asyncio.Event()
        self._lingers = True

    def oldest(self) -> SourceRecord | None:
        """Return the first record that is decided and not committed."""
        if self._oldest is None and self._decided:
            return self._decided[0].record
        return self._oldest

    def add(self, decided: Decided) -> None:
        """Add the partition's next record."""
        if not self._decided:
            self._first = time.perf_counter()
            self._work.set()
        self._decided.append(decided)

    def batch_is_full(self) -> bool:
        """Whether the next transaction has its most records."""
        return len(self._decided) >= MAX_COMMIT_RECORDS

    def flush(self) -> None:
        """Check again whether to linger."""
        self._flush.set()

    def stop_lingering(self) -> None:
        """From now on, commit decided records at once."""
        self._lingers = False
        self.flush()

    def linger_again(self) -> None:
        """Let batches linger again while there is a backlog."""
        self._lingers = True

    async def run(self) -> None:
        """Commit batch after batch. Ends with the first error: the partition is then ahead of what is committed."""
        while True:
            await self._work.wait()
            await self._linger()
            await self._commit(self._next_batch())

    async def _linger(self) -> None:
        """Wait for more records while some wait, until the batch is full or the interval is over."""
        while self._lingers and not self._is_full() and not self.batch_is_full():
            linger = min(self._interval_seconds, self._linger_seconds())
            left = max(self._began, self._first) + linger - time.perf_counter()
            if left <= 0:
                return
            self._flush.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._flush.wait()

    def _next_batch(self) -> list[Decided]:
        batch: list[Decided] = []
        size = 0
        while self._decided and len(batch) < MAX_COMMIT_RECORDS and size < MAX_COMMIT_BYTES:
            decided = self._decided.popleft()
            size += decided.record.size + len(decided.output.value or b"")  # key and headers are the source record's
            batch.append(decided)
        if not self._decided:
            self._work.clear()
        return batch

    async def _commit(self, batch: list[Decided]) -> None:
        self._oldest = batch[0].record
        self._began = time.perf_counter()
        if any(map(_is_control, batch)):
            await self._confirm()  # not before: the id must be asked for after the records were fetched
        refused = await self._publisher.publish(self._state.batch(batch))
        for position, error in refused.items():
            batch[position] = self._refuse(batch[position], error)
        self._oldest = None
        self.committed = batch[-1].record.offset + 1
        self._count(batch, time.perf_counter() - self._began)
        self._on_commit(batch)

    def _count(self, batch: Sequence[Decided], seconds: float) -> None:
        metrics = self._metrics
        metrics.stages["publish"].observe(seconds)
        metrics.commit_traces.observe(len(batch))
        metrics.consumed.inc(len(batch))
        now = time.time()
        redactions: Counter[str] = Counter()
        decisions: Counter[tuple[str, str]] = Counter()  # finding a labelled counter costs more than counting
        ages: list[float] = []
        scores: list[float] = []
        for record, output, result, _, _, forgotten in batch:
            timestamp_ms = record.timestamp_ms
            if timestamp_ms is not None and timestamp_ms >= 0:
                ages.append(max(0.0, now - timestamp_ms / 1000))
            if forgotten is not None:
                metrics.control_records.labels("honoured").inc()
                metrics.forgotten_entries.inc(len(forgotten.removed))
            if isinstance(result, InvalidTrace):
                metrics.dead_letters.labels(str(result.reason)).inc()
                if result.reason is Reason.BAD_CONTROL:
                    metrics.control_records.labels("refused").inc()
            elif result is not None:
                decisions[output.kind, result.profile] += 1
                scores.append(result.score)
                if output.redactions:
                    redactions.update(output.redactions)
        metrics.end_to_end.observe_all(ages)
        metrics.score.observe_all(scores)
        for labels, count in decisions.items():
            metrics.traces.labels(*labels).inc(count)
        for kind, count in redactions.items():
            metrics.redactions.labels(kind).inc(count)


def _is_control(decided: Decided) -> bool:
    """Whether a record is a control record, honoured or not."""
    result = decided.result
    refused = isinstance(result, InvalidTrace) and result.reason is Reason.BAD_CONTROL
    return refused or decided.forgotten is not None

"""One assigned partition: the life of its records, in offset order, from top to bottom.

1. take: the fetched record is parsed, and its text goes to the embedder (evaluator.py);
2. evaluate: in offset order, it is compared, scored, and becomes an output and a changelog entry;
3. batch: decided records linger as long as others can join them;
4. commit: outputs, entries and the source offset, in one transaction (kafka/publisher.py);
5. settle: the committed records are counted, and their bytes given back.

Steps 1 and 2 of later records go on during a commit; one batch is committed at a time.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from worker.core.changelog import SLACK
from worker.core.records import SourceRecord
from worker.core.scorer import Decision
from worker.core.terminal import number_of
from worker.core.trace import InvalidTrace
from worker.kafka.errors import error_text
from worker.kafka.publisher import Publisher
from worker.observe.metrics import Metrics
from worker.observe.status import Status
from worker.stream.evaluator import Evaluator, PartitionState, Taken
from worker.stream.fetch_buffer import FetchBuffer

log = logging.getLogger(__name__)


# -- when decided records are committed, and how many at once. A transaction costs a third of an embedding's CPU, with
# one record or many, so they linger while others can still join them. Pure; time is an argument, in seconds.

MAX_COMMIT_RECORDS: Final = 512
"""Most records of one transaction. A commit costs the same for 1 or 500; more would only cost memory and latency."""

MAX_COMMIT_BYTES: Final = 8 << 20
"""Most bytes of one transaction (SourceRecord.size and output values), so that large documents do not accumulate."""

BUSY_LINGER_SECONDS: Final = 0.1
"""Least linger while records of any partition wait: 44 traces/s of 4 partitions then make 20 transactions/s, not 44."""


class Upstream(NamedTuple):
    """What can still join a partition's batch."""

    busy: bool  # records of any partition wait to be taken
    waiting: bool  # some of this one do
    ahead: bool  # some that waited when the batch began are not decided yet
    has_turn: bool  # the partition's records are taken next
    undecided: bool  # some are taken, and not decided yet


def linger_seconds(upstream: Upstream, interval_seconds: float) -> float:
    """Return how long a batch waits for further records: at most `interval_seconds`.

    It waits for the partition's backlog at its start, not for records that come later. A time for each record instead
    would give a slower machine more transactions.
    """
    if not upstream.busy:
        return 0.0
    if upstream.waiting and upstream.has_turn:
        return interval_seconds if upstream.ahead else min(interval_seconds, BUSY_LINGER_SECONDS)
    if upstream.undecided:  # they leave the embedder soon
        return interval_seconds
    # After its turn, nothing else can join the batch.
    return 0.0 if upstream.waiting else min(interval_seconds, BUSY_LINGER_SECONDS)


def seconds_left(
    now: float, first: float, last_commit: float, records: int, upstream: Upstream, interval_seconds: float
) -> float:
    """Return the time until a batch is committed; 0 or less: now.

    `first`: when its first record was decided; `last_commit`: when the last transaction began.
    """
    if records >= MAX_COMMIT_RECORDS:
        return 0.0
    return max(last_commit, first) + linger_seconds(upstream, interval_seconds) - now


class DeadLetterLimitError(Exception):
    """Too many of the last records were dead letters; the worker stops so that the cause is examined."""


class DeadLetterLimit:
    """Raises when more than `share` (0..1) of the last `window` records were dead letters; it needs a full window."""

    def __init__(self, share: float, window: int) -> None:
        self._share = share
        self._last: deque[bool] = deque(maxlen=window)
        self._dead = 0

    def record(self, dead: bool) -> None:
        """Count one record. Raises DeadLetterLimitError."""
        if len(self._last) == self._last.maxlen and self._last[0]:
            self._dead -= 1
        self._last.append(dead)
        self._dead += dead
        if dead and len(self._last) == self._last.maxlen and self._dead > self._share * len(self._last):
            raise DeadLetterLimitError(
                f"{self._dead} of the last {len(self._last)} records were dead letters, more than "
                f"KP_DEAD_LETTER_BREAKER_SHARE={self._share:g}: check kp-error-reason on the dead-letter topic, fix "
                "the producers and restart (or raise the share)"
            )


class Partition:
    """One assigned partition. After a failure its state is ahead of the committed offset, and must not be used."""

    def __init__(
        self,
        number: int,
        state: PartitionState,
        publisher: Publisher,
        evaluator: Evaluator,
        buffer: FetchBuffer,
        metrics: Metrics,
        *,
        fail: Callable[[BaseException], None],  # called once, with the error that ended the partition
        commit_interval_seconds: float = 1.0,
        drain_seconds: float | None = None,
        dead_letter_limit: DeadLetterLimit | None = None,
        status: Status | None = None,
    ) -> None:
        self.number = number
        self.state = state
        self.failed = False
        self.committed = state.next_offset
        """The committed offset: that of the next record of the source to read after a restart."""
        self._publisher = publisher
        self._evaluator = evaluator
        self._buffer = buffer
        self._metrics = metrics
        self._on_failure = fail
        self._commit_interval_seconds = commit_interval_seconds
        self._drain_seconds = drain_seconds
        """How long a drain waits for undecided records before it drops them; None: as long as the embedder takes."""
        self._dead_letter_limit = dead_letter_limit
        self._status = status
        self._taken_to = state.next_offset - 1
        self._taken: deque[Taken] = deque()
        self._decided: deque[Decision] = deque()
        self._publishing: list[Decision] = []
        self._records = self._bytes = 0  # past the committed offset
        self._ahead_to = -1  # offset of the last record that waited when the oldest decided one was decided
        self._first_decided = 0.0  # when the oldest decided record was decided, s of the performance counter
        self._last_commit = 0.0  # when the last transaction began
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._work = asyncio.Event()
        self._changed = asyncio.Event()  # look again whether to linger
        self._committing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start committing."""
        self._committing = asyncio.create_task(self._commit_forever(), name=f"commit-{self.number}")

    def __len__(self) -> int:
        """Return the number of records past the committed offset."""
        return self._records

    def oldest(self) -> SourceRecord | None:
        """Return the first record taken that is past the committed offset."""
        for decided in (self._publishing, self._decided):
            if decided:
                return decided[0].record
        return self._taken[0].record if self._taken else None

    def has_room(self) -> bool:
        """Whether another record may be taken. The bound is the changelog's slack: see changelog.py."""
        return self._records < SLACK and not self.failed

    # -- 1. take

    def take(self, record: SourceRecord) -> None:
        """Admit the partition's next record."""
        if record.offset <= self._taken_to or self.failed:
            self._buffer.give_back(record.size)
            return  # fetched twice around a rebalance
        self._taken_to = record.offset
        if not self._records:
            self._idle.clear()
        self._records += 1
        self._bytes += record.size
        if not self.has_room():
            self._buffer.hold(self.number)
        taken = self._evaluator.take(record)
        self._taken.append(taken)
        if isinstance(taken.embedding, asyncio.Future):
            taken.embedding.add_done_callback(lambda _: self.advance())
        else:
            self.advance()

    # -- 2. evaluate

    def advance(self) -> None:
        """Decide all embedded records, in offset order."""
        if self.failed or not self._taken:
            return
        limit = self._dead_letter_limit
        was_ahead = self._ahead()
        try:
            while self._taken and self._taken[0].ready():
                decision = self._evaluator.decide(self._taken.popleft())
                if limit is not None:
                    limit.record(isinstance(decision.result, InvalidTrace))
                if not self._decided:
                    self._first_decided = time.perf_counter()
                    self._ahead_to = self._taken_to + self._buffer.waiting(self.number)
                    self._work.set()
                self._decided.append(decision)
            ended = not self._taken and not self._buffer.has_turn(self.number)
            if (
                ended
                or (was_ahead and not self._ahead())
                or len(self._decided) >= MAX_COMMIT_RECORDS
                or not self.has_room()
            ):
                self.turn_ended()
        except Exception as error:
            self._fail(error)

    # -- 3. batch

    async def _commit_forever(self) -> None:
        try:
            while True:
                await self._work.wait()
                await self._linger()
                await self._commit(self._next_batch())
        except Exception as error:
            self._fail(error)

    async def _linger(self) -> None:
        while self.has_room() and not self._draining:
            left = seconds_left(
                time.perf_counter(), self._first_decided, self._last_commit, len(self._decided), self._upstream(),
                self._commit_interval_seconds,
            )  # fmt: skip
            if left <= 0:
                return
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()

    def _upstream(self) -> Upstream:
        buffer = self._buffer
        waiting, has_turn = bool(buffer.waiting(self.number)), buffer.has_turn(self.number)
        return Upstream(bool(buffer), waiting, self._ahead(), has_turn, bool(self._taken))

    def _ahead(self) -> bool:
        """Whether records that waited when the batch began are not decided yet; less often where offsets have gaps."""
        return bool(self._decided) and self._decided[-1].record.offset < self._ahead_to

    def turn_ended(self) -> None:
        """Note that the partition's turn has ended, or that no more records wait to be taken."""
        self._changed.set()

    def _next_batch(self) -> list[Decision]:
        batch: list[Decision] = []
        size = 0
        while self._decided and len(batch) < MAX_COMMIT_RECORDS and size < MAX_COMMIT_BYTES:
            batch.append(self._decided.popleft())
            size += batch[-1].size()
        if not self._decided:
            self._work.clear()
        return batch

    # -- 4. commit

    async def _commit(self, batch: list[Decision]) -> None:
        self._publishing = batch
        self._last_commit = time.perf_counter()
        commit = self.state.commit(batch)
        for position, error in (await self._publisher.publish(commit)).items():
            batch[position] = self._evaluator.refuse(batch[position], error)
        self._publishing = []
        self.committed = commit.next_offset
        self._settle(batch, time.perf_counter() - self._last_commit)

    # -- 5. settle

    def _settle(self, batch: Sequence[Decision], seconds: float) -> None:
        self._metrics.committed(batch, seconds, time.time())
        if self._status is not None:
            self._status.committed(batch)
        self._evaluator.committed(batch)
        self._release(len(batch), sum([each.record.size for each in batch]))

    def _release(self, records: int, size: int) -> None:
        self._records -= records
        self._bytes -= size
        self._buffer.give_back(size)
        if self.has_room():
            self._buffer.release(self.number)
        if not self._records:
            self._idle.set()

    # -- the end

    async def drain(self) -> None:
        """Wait until every record taken is committed, or the partition has failed.

        Records that wait too long for an embedding are dropped and will be read again.
        """
        self._draining = True
        self.turn_ended()
        try:
            async with asyncio.timeout(self._drain_seconds):
                await self._idle.wait()
        except TimeoutError:
            if self._taken:
                self._drop_undecided()
            await self._idle.wait()
        self._draining = False

    def _drop_undecided(self) -> None:
        log.info("partition %d: %s undecided, to be read again", self.number, number_of(len(self._taken), "record"))
        self._abandon_embeddings()
        self._taken_to = self._taken[0].record.offset - 1
        self._release(len(self._taken), sum([each.record.size for each in self._taken]))
        self._taken.clear()

    async def close(self) -> None:
        """Close the partition: uncommitted records are dropped, an open transaction is aborted."""
        self._end()
        self._abandon_embeddings()
        if self._committing is not None:
            self._committing.cancel()
            await asyncio.gather(self._committing, return_exceptions=True)
        self._buffer.give_back(self._bytes)
        self._records = self._bytes = 0
        try:
            await self._publisher.stop()
        except Exception as error:  # the partition is lost anyway; its next owner fences this producer
            log.warning("partition %d: producer did not stop cleanly: %r", self.number, error)

    def _abandon_embeddings(self) -> None:
        """Mark the exceptions of embeddings that nobody waits for any more as retrieved."""
        for each in self._taken:
            if isinstance(each.embedding, asyncio.Future):
                each.embedding.add_done_callback(lambda future: future.cancelled() or future.exception())

    def _fail(self, error: BaseException) -> None:
        if not self.failed:
            self._end()
            log.error("partition %d: %s", self.number, error_text(error))
            self._on_failure(error)

    def _end(self) -> None:
        self.failed = True
        self._buffer.hold(self.number)
        self._idle.set()

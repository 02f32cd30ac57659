"""One partition of the accepted topic: its records in order, each posted, refused or skipped before the next.

A firewall in front of the registry may block one trace every time because of its content, a proxy because of its
length. Such a trace must not stop the others, and an innocent one must not be refused because a gateway blocks all:

 1. A trace that got ANSWERS definite answers, none of them the registry's own, is held, and the next one is tried.
 2. While nothing shows that POSTs reach the registry, each trace that gets such an answer is held too. All wait. After
    growing pauses the first one is tried again, and right after it another one: so the order is kept if a gateway
    blocks all for some time. Successful look-ups show nothing.
 3. Once the registry itself answers a POST, each held trace is tried ANSWERS times again, in order, while that answer
    is at most PROOF_SECONDS old. Only a trace that still gets no verdict is refused (`unanswerable`).

Receipts, refused records and offsets are committed in the order of the records. So nothing after a held trace is
committed before it: after a crash the look-up finds the posted ones.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from worker.contribute.delivery import STEP_SECONDS, Delivered, Delivery, DeniedError, Gateway, Pauses, Unanswered
from worker.contribute.unit import Gate, Refusal, Skip, Unit, clean_words, receipt, refused_record, unit_from
from worker.core.records import OutputRecord, SourceRecord
from worker.core.trace import Limits
from worker.kafka.member import Claim, StoppedError
from worker.kafka.writing.publisher import Commit, Publisher
from worker.observe.metrics import ContributeMetrics

MAX_DUE: Final = 50
"""Maximum number of a partition's traces that are posted but not committed."""


class _Due(NamedTuple):
    """The result of a record, ready to commit."""

    output: OutputRecord | None
    next_offset: int  # after the record
    on_committed: Callable[[], None]


class ReceiptQueue:
    """Commits the results of one partition, in order, one transaction after the other.

    A transaction takes longer than a request, so the next traces are posted meanwhile, and their receipts share the
    next one. After a crash all of them are looked up. `metadata` returns the metadata to commit with an offset.
    """

    def __init__(self, publisher: Publisher, metadata: Callable[[], str]) -> None:
        self._publisher = publisher
        self._metadata = metadata
        self._due: list[_Due] = []
        self._commits: asyncio.Task[None] | None = None

    async def add(self, output: OutputRecord | None, next_offset: int, on_committed: Callable[[], None]) -> None:
        """Commit a record and its offset soon. Raises the error of an earlier commit.

        Waits while too many are due: every trace that is posted but not committed is looked up after a crash.
        """
        self._due.append(_Due(output, next_offset, on_committed))
        if len(self._due) >= MAX_DUE:
            await self.flush()
        elif self._commits is None or self._commits.done():
            self._begin()

    async def flush(self) -> None:
        """Return when everything is committed. Raises the error of a commit."""
        if self._due or (self._commits is not None and self._commits.done()):
            self._begin()
        if self._commits is not None:
            await self._commits

    def _begin(self) -> None:
        if self._commits is not None and self._commits.done():
            self._commits.result()
        if self._commits is None or self._commits.done():
            self._commits = asyncio.create_task(self._commit_all())

    async def _commit_all(self) -> None:
        while self._due:
            batch, self._due = self._due, []
            outputs = [each.output for each in batch if each.output is not None]
            await self._publisher.publish(Commit(outputs, (), batch[-1].next_offset, self._metadata()))
            for each in batch:
                each.on_committed()


log = logging.getLogger(__name__)

MAX_RECORDS: Final = 50
"""Records taken at once: few, as each needs a request."""

ANSWERS: Final = 3
"""Definite answers without a verdict before a trace is held, and again before it is refused. If one of two gateways
blocks everything, an innocent trace meets it six times in a row once in 64 times; it can be redriven."""

PROOF_SECONDS: Final = 60.0
"""How long an answer of the registry shows that POSTs reach it. It is short, so that few innocent traces are refused if
a gateway then begins to block everything."""

MAX_WAITING: Final = 500
"""Maximum number of held traces; beyond that no further one is tried."""

MAX_WAITING_BYTES: Final = 32 << 20
"""Bytes of the held traces, and of the receipts and refused traces after them; beyond that no further one is tried."""


@dataclass(slots=True)
class _Pending:
    """A record on its way to its commit."""

    record: SourceRecord
    began_at: float = 0.0  # when it was first tried, s of time.monotonic
    asked_at: float = 0.0  # when it was last tried
    held: bool = False  # it has been held
    due: tuple[OutputRecord | None, Callable[[], None]] | None = None
    """The record to commit, and the callback afterwards; None: not known yet."""
    skipped: Counter[str] = field(default_factory=Counter)
    """How many of the records right after it are skipped, by reason."""
    next_offset: int = field(init=False)  # after the record and the skipped ones

    def __post_init__(self) -> None:
        self.next_offset = self.record.offset + 1

    @property
    def size(self) -> int:
        """Return the size of the trace or, once known, of the record to commit for it, bytes."""
        value = self.record.value if self.due is None else self.due[0] and self.due[0].value
        return len(value or b"")


@dataclass(eq=False)
class Partition:
    """The work on one partition."""

    claim: Claim
    publisher: Publisher
    delivery: Delivery
    gateway: Gateway
    metrics: ContributeMetrics
    gate: Gate
    limits: Limits

    def __post_init__(self) -> None:
        self.next_offset = self.claim.position.offset
        self.idle = False
        self._stop = self.claim.stop
        self._receipts = ReceiptQueue(self.publisher, lambda: limited_metadata(self.gateway.limited_at))
        self._taken: deque[SourceRecord] = deque()
        self._waiting: deque[_Pending] = deque()
        self._pauses = Pauses()
        self._just_held = False
        self._try_next_at = self._ask_again_at = 0.0

    @property
    def held(self) -> int:
        """Return the number of held traces."""
        return sum(each.due is None for each in self._waiting)

    async def run(self) -> None:
        """Work until stopped. Raises StoppedError once everything done is committed."""
        try:
            while True:
                self._stop.check()
                if self._waiting:
                    await self._work_while_held()
                elif record := await self._next():
                    await self._handle(_Pending(record), self._work(record), ANSWERS)
                else:
                    await self._receipts.flush()
                    self.idle = True
        except (StoppedError, DeniedError):
            await self._receipts.flush()
            raise

    async def _next(self) -> SourceRecord | None:
        """Return the next record; None if none comes for a while."""
        if not self._taken:
            self._taken.extend(await self.claim.poll(MAX_RECORDS))
        if not self._taken:
            return None
        self.idle = False
        return self._taken.popleft()

    async def _work_while_held(self) -> None:
        """Do one step: try a held trace again, or try the next record, or wait."""
        held = [each for each in self._waiting if each.due is None]
        first, now, proven_at = held[0], time.monotonic(), self.gateway.answered_at
        if now - proven_at < PROOF_SECONDS:
            for each in held:
                if each.began_at < proven_at:
                    await self._handle(each, self._work(each.record), ANSWERS, proven=True)
                    return
        record = await self._next() if self._has_room() and now >= self._try_next_at else None
        if record is None and (left := self._ask_again_at - time.monotonic()) > 0:
            await self._stop.sleep(min(left, STEP_SECONDS))
            self._just_held = False
            return
        another = _Pending(record) if record else min(held[1:], key=lambda each: each.asked_at, default=first)
        work = self._work(another.record)
        if isinstance(work, Skip):
            last = self._waiting[-1]  # it joins that one, as there may be any number of them after a held trace
            last.skipped[work.reason] += 1
            last.next_offset = another.record.offset + 1
            return
        if isinstance(work, Unit) and another is not first and not self._just_held:
            await self._handle(first, self._work(first.record), 1)
            if first.due:
                self._taken.extendleft([record] if record else [])
                return
        await self._handle(another, work, 1)
        self._just_held = False
        if another.due is None:
            self._ask_again_at = time.monotonic() + self._pauses.next_seconds(random.SystemRandom().random())
            self._try_next_at = self._ask_again_at if record else 0.0

    def _has_room(self) -> bool:
        return self.held < MAX_WAITING and sum(each.size for each in self._waiting) < MAX_WAITING_BYTES

    def _work(self, record: SourceRecord) -> Unit | Skip | Refusal:
        """Decide what to do with a record."""
        if record.fault:
            return Refusal("unreadable", clean_words(record.fault.message))
        return unit_from(record.value, self.gate, self.limits)

    async def _handle(self, each: _Pending, work: Unit | Skip | Refusal, answers: int, *, proven: bool = False) -> None:
        """Skip, refuse, deliver or hold a record. `proven`: refuse it if it gets no verdict, since others do."""
        if isinstance(work, Skip):
            each.skipped[work.reason] += 1
            await self._done(each, None, lambda: None)
        elif isinstance(work, Refusal):
            await self._refuse(each, work)
        else:
            uncommitted = (self._waiting[0] if self._waiting else each).record.offset
            remember_429 = partial(self._remember_429, uncommitted)
            each.asked_at = time.monotonic()
            each.began_at = each.began_at or each.asked_at
            result = await self.delivery.deliver(work, self._stop, remember_429, answers, _place(each.record))
            if isinstance(result, Delivered):
                output = receipt(each.record, work, result.status, result.time)
                await self._done(each, output, partial(self._count, work, result))
            elif isinstance(result, Refusal):
                await self._refuse(each, result)
            elif proven:
                self.gateway.trouble = None  # the registry is reachable; perhaps no other trace follows to show it
                message = (
                    f"{result.words}, again and again, while the registry answers other traces; find what refuses this "
                    "one in front of the registry, fix that, and redrive the trace"
                )
                await self._refuse(each, Refusal("unanswerable", message))
            else:
                self._hold(each, result)

    def _hold(self, each: _Pending, result: Unanswered) -> None:
        """Hold a record until the registry answers a POST."""
        if not self._waiting:
            self._pauses, self._just_held, self._try_next_at = Pauses(), True, 0.0
            self._ask_again_at = time.monotonic() + self._pauses.next_seconds(random.SystemRandom().random())
        if not each.held:
            self._waiting.append(each)
        each.held = True
        log.warning(
            "%s; the trace waits until the registry itself answers a POST", result.words,
            extra=_place(each.record),
        )  # fmt: skip

    async def _refuse(self, each: _Pending, refusal: Refusal) -> None:
        output = refused_record(each.record, refusal, self.gate.rules)
        await self._done(each, output, self.metrics.refused.labels(refusal.reason).inc)
        log.warning(
            "refused for good: %s%s", refusal.message, f" {refusal.issues}" if refusal.issues else "",
            extra=_place(each.record) | {"reason": refusal.reason, "path": refusal.path},
        )  # fmt: skip

    async def _done(self, each: _Pending, output: OutputRecord | None, count: Callable[[], None]) -> None:
        """Let a record's result be committed, once nothing before it is held."""
        each.due = (output, count)
        each.record = each.record._replace(key=None, value=None, headers=())  # it may be kept for long
        if not each.held:
            self._waiting.append(each)
        while self._waiting and (due := self._waiting[0].due):
            first = self._waiting.popleft()
            await self._receipts.add(due[0], first.next_offset, partial(self._committed, first, due[1]))

    def _committed(self, done: _Pending, count: Callable[[], None]) -> None:
        self.next_offset = done.next_offset
        count()
        for reason, number in done.skipped.items():
            self.metrics.skipped.labels(reason).inc(number)

    async def _remember_429(self, offset: int) -> None:
        """Commit the time of the 429: a process that takes over must wait too."""
        await self._receipts.add(None, offset, lambda: None)
        await self._receipts.flush()

    def _count(self, unit: Unit, result: Delivered) -> None:
        (self.metrics.posted if result.status == 201 else self.metrics.found).inc()
        for kind, number in unit.redactions.items():
            self.metrics.redactions.labels(kind).inc(number)


def _place(record: SourceRecord) -> dict[str, object]:
    """Return the log fields for a record (logs.py)."""
    return {"topic": record.topic, "partition": record.partition, "offset": record.offset}


LIMITED = "kp429:"


def limited_metadata(limited_at: float | None) -> str:
    """Return the metadata to commit with an offset: the time of the last 429, s since 1970."""
    return "" if limited_at is None else f"{LIMITED}{round(limited_at)}"


def limited_from(metadata: str) -> float | None:
    """Read the time of the last 429 from committed metadata; None if there is none."""
    number = metadata.removeprefix(LIMITED)
    return float(number) if metadata.startswith(LIMITED) and number.isdigit() and len(number) < 16 else None

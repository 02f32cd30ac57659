"""A plain member of a consumer group, to whom aiokafka's listener names the partitions.

Steps 1 to 4 (assignment.py) run in a task, because heartbeats must go out meanwhile. Step 6 waits for them.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.abc import ConsumerRebalanceListener

from worker.config import Settings
from worker.core.records import SourceRecord
from worker.core.terminal import number_of
from worker.kafka.assignment import Assignment, Position
from worker.kafka.connections import connected
from worker.kafka.fetches import Consumer, Reading
from worker.kafka.producer import Producer
from worker.kafka.publisher import fence
from worker.kafka.topic_watch import Failure, TopicLostError, TopicWatch

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class StoppedError(Exception):
    """The work must end: the partition is being revoked, or the process is stopping."""


class Stop(asyncio.Event):
    """A signal to stop, which ends all waits."""

    def check(self) -> None:
        """Raise StoppedError after `set`."""
        if self.is_set():
            raise StoppedError

    async def wait(self) -> NoReturn:
        """Wait for `set`. Raises StoppedError."""
        await super().wait()
        raise StoppedError

    async def sleep(self, seconds: float) -> None:
        """Sleep. Raises StoppedError at once after `set`."""
        self.check()
        if seconds > 0:
            await self.unless_set(asyncio.sleep(seconds))

    async def unless_set(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of some work. After `set`, cancels it and raises StoppedError at once."""
        working, stopping = asyncio.create_task(work), asyncio.create_task(super().wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise StoppedError
            return working.result()
        finally:
            working.cancel()
            stopping.cancel()


@dataclass(frozen=True, slots=True)
class Claim:
    """A partition that this member owns, as its work receives it (step 4)."""

    tp: TopicPartition
    consumer: AIOKafkaConsumer
    producer: Producer  # started, so the former owner is fenced
    position: Position  # where the work begins
    stop: Stop = field(default_factory=Stop)  # set when the partition is revoked, and when the process ends

    async def poll(self, most: int) -> list[SourceRecord]:
        """Return the next records, at most so many; none if none arrive for a while. Raises StoppedError."""
        # During a rebalance getmany waits for its end, which waits for the work to end: so a stop gives it up.
        polled = await self.stop.unless_set(self.consumer.getmany(self.tp, timeout_ms=500, max_records=most))
        return [_unsized(record) for record in polled.get(self.tp, ())]


def _unsized(record: SourceRecord) -> SourceRecord:
    """Return a record without its size, as outputs have other keys and headers here; and without a negative time."""
    time_ms = record.timestamp_ms
    return record._replace(size=0, timestamp_ms=None if time_ms is None or time_ms < 0 else time_ms)


class Work(Protocol):
    """The work on one partition."""

    next_offset: int  # after the last record that is done
    idle: bool  # whether no record is left: only transaction markers lie between `next_offset` and the end

    async def run(self) -> None:
        """Do step 5 until the claim's `stop` is set; then do step 6, and raise StoppedError."""
        ...


AnyWork = TypeVar("AnyWork", bound=Work)


class Job(Protocol[AnyWork]):
    """The work of a member on its partitions."""

    def transactional_id(self, tp: TopicPartition) -> str:
        """Return the transactional id of a partition's producer."""
        ...

    async def restore(self, positions: Mapping[TopicPartition, Position], consumer: AIOKafkaConsumer) -> None:
        """Do step 3 for the partitions of an assignment."""
        ...

    def open(self, claim: Claim) -> AnyWork:
        """Return the work on a partition, not started."""
        ...

    def problem(self, works: Collection[AnyWork]) -> str | None:
        """Return why nothing gets done although partitions are open, for readiness; None if it does."""
        ...

    def measure(self, tp: TopicPartition, work: AnyWork, lag: int | None) -> None:
        """Update a partition's gauges. `lag`: records to its end; None: not known."""
        ...

    def closed(self, tps: Collection[TopicPartition]) -> None:
        """Drop the state of closed partitions."""
        ...


@dataclass(frozen=True, slots=True)
class _Sender:
    """A partition's producer, whose owner commits by itself."""

    producer: Producer
    tp: TopicPartition

    async def start(self) -> None:
        await fence(self.producer, f"{self.tp.topic}/{self.tp.partition}")

    async def stop(self) -> None:
        with contextlib.suppress(Exception):  # fenced, or the broker is gone: committed work stays committed
            await self.producer.stop()


class _Owned(Generic[AnyWork]):
    """A partition of a plain member, and the work on it."""

    def __init__(self, claim: Claim, work: AnyWork, sender: _Sender, fail: Callable[[BaseException], None]) -> None:
        self.work = work
        self._claim = claim
        self._sender = sender
        self._fail = fail
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._claim.consumer.seek(self._claim.tp, self._claim.position.offset)
        self._running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            await self.work.run()
        except StoppedError:
            pass
        except Exception as error:
            self._fail(error)

    async def drain(self) -> None:
        self._claim.stop.set()
        if self._running is not None:
            await self._running

    async def close(self) -> None:
        await self._sender.stop()


class Member(ConsumerRebalanceListener, Generic[AnyWork]):  # type: ignore[misc]  # aiokafka is untyped
    """One process's share of the topics. The first error sets `failure` and `failed`."""

    def __init__(
        self,
        settings: Settings,
        client: Mapping[str, Any],
        job: Job[AnyWork],
        *,
        group: str,
        topics: Collection[str],
        drain_seconds: float,  # how long the group waits for step 6
        watch: TopicWatch,  # of the topics that the work needs
        set_ready: Callable[[float], None],  # takes 1 or 0
    ) -> None:
        self._failure = Failure(watch)
        self.failed = self._failure.event
        self._settings = settings
        self._client = client
        self._job = job
        self._topics = sorted(topics)
        self._watch = watch
        self._set_ready = set_ready
        self._stop = Stop()
        self._opening: asyncio.Task[None] | None = None
        self._closing = self._opened = False
        self._consumer = Consumer(
            **client,
            reading=Reading(settings.max_batch_bytes, tolerant=True),
            group_id=group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            session_timeout_ms=round(settings.session_timeout_seconds * 1000),
            heartbeat_interval_ms=round(settings.session_timeout_seconds * 1000 / 5),
            rebalance_timeout_ms=round(drain_seconds * 1000),
            max_poll_interval_ms=2**31 - 1,  # none: work on a batch may take long; heartbeats show that it is alive
        )
        self._assignment: Assignment[_Sender, _Owned[AnyWork]] = Assignment(settings, client, group, self)

    @property
    def failure(self) -> BaseException | None:
        """The first error."""
        return self._failure.error

    # -- health

    def stuck(self) -> str | None:
        """Return None: the process is alive as long as it answers."""
        return None

    def not_ready(self) -> str | None:
        """Return why nothing gets done, for readiness; None if it does."""
        if self.failure is not None:
            lost = isinstance(self.failure, TopicLostError)  # other messages may quote a record
            return f"failed: {self.failure if lost else type(self.failure).__name__}"
        if self._watch.problem is not None:
            return self._watch.problem
        if not self._opened:
            return "waiting for partitions to be assigned and restored"
        return self._job.problem([each.work for each in self._assignment.owned.values()])

    # -- start and stop

    async def run(self) -> None:
        """Work until `stop` is called or something fails; then drain and close the partitions, and leave the group."""
        async with connected(self._settings, self._client, self._consumer):
            try:
                await self._watch.start(self._fail)
                self._consumer.subscribe(self._topics, listener=self)
                while True:
                    self._update_gauges()
                    await self._stop.sleep(1.0)
            except StoppedError:
                pass
            finally:
                await self._watch.stop()
                await self._close()

    def stop(self) -> None:
        """End `run`."""
        self._stop.set()

    def _fail(self, error: BaseException) -> None:
        self._failure.set(error)
        self._stop.set()

    def _update_gauges(self) -> None:
        for tp, each in self._assignment.owned.items() if self._opened else ():
            work, end = each.work, None if self._watch.unreachable else self._consumer.end_of(tp)
            lag = None if end is None else 0 if work.idle else max(0, end.stable - work.next_offset)
            self._watch.open_transaction(tp, end)
            self._job.measure(tp, work, lag)
        self._set_ready(self.not_ready() is None)

    # -- rebalances

    async def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        """Take over the partitions of a new assignment (steps 1 to 5)."""
        await self._close()
        if not self._stop.is_set():
            self._closing = False
            self._opening = asyncio.create_task(self._open_or_fail(sorted(assigned)))

    async def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        """Give up all partitions (steps 6 and 7) before another member gets them."""
        await self._close()

    async def _open_or_fail(self, assigned: Sequence[TopicPartition]) -> None:
        try:
            if await self._assignment.change(assigned, stands=lambda: not self._closing):
                self._opened = True
                log.info("assigned %s", ", ".join(f"{tp.topic}/{tp.partition}" for tp in assigned) or "no partition")
        except Exception as error:
            self._fail(error)

    async def _close(self) -> None:
        self._closing, self._opened = True, False
        opening, self._opening = self._opening, None
        if opening is not None:
            await opening
        await self._assignment.drain()
        closed = list(self._assignment.owned)
        await self._assignment.close(closed)
        self._job.closed(closed)

    # -- the partitions

    async def senders(self, tps: Sequence[TopicPartition]) -> dict[TopicPartition, _Sender]:
        """Return the producers of new partitions, not started."""
        return {tp: _Sender(self._producer(tp), tp) for tp in tps}

    def _producer(self, tp: TopicPartition) -> Producer:
        return Producer(
            self._client,
            self._job.transactional_id(tp),
            self._settings.transaction_timeout_seconds,
            owns=lambda: tp in self._consumer.assignment(),
        )

    async def restore(
        self, positions: Mapping[TopicPartition, Position], senders: Mapping[TopicPartition, _Sender]
    ) -> dict[TopicPartition, _Owned[AnyWork]]:
        """Let the job do step 3, and return the partitions, not started."""
        for tp, position in positions.items():
            if position.lost:
                lost = number_of(position.lost, "record")
                log.error("%s/%d: retention deleted %s before it was read", tp.topic, tp.partition, lost)
        await self._job.restore(positions, self._consumer)
        opened = {}
        for tp, position in positions.items():
            claim = Claim(tp, self._consumer, senders[tp].producer, position)
            opened[tp] = _Owned(claim, self._job.open(claim), senders[tp], self._fail)
        return opened

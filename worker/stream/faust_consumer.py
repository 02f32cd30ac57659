"""The worker's membership in its group: Faust's consumer as this worker needs it, and the Faust app around it.

The only module that imports Faust, and uses private names of it.

What is changed, and why (faust-streaming 0.15.3):
- whole fetches go to the fetch buffer, past Faust's topics. Those create four tasks for each message, and sleep for a
  second whenever back-pressure has paused every partition. The agent's channel asks the buffer instead;
- only committed records are read. Faust does this only with its own `exactly_once`, which does not work;
- the worker joins its group at once. Faust waits for a second at each start;
- Faust commits nothing: offsets are part of the transaction, and a later plain commit could move them back. Where Faust
  waits for open messages (`wait_empty`), this consumer waits for the partitions;
- with static membership, every member looks for partitions that no member owns. aiokafka leaves that to the group's
  leader, but a leader that restarts as a static member does not learn that it is the leader.

Private names used: Consumer._drain_messages, ._new_consumer_thread, AIOKafkaConsumerThread._create_worker_consumer,
._ensure_consumer, ._consumer, Fetcher._stopped, App._create_directories, App.rebalancing_count,
TableManager._update_channels. tests/unit/stream/test_faust_consumer.py fails when one changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, cast

import faust
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.errors import IllegalStateError, KafkaError
from aiokafka.structs import OffsetAndMetadata
from faust.exceptions import ConsumerNotStarted
from faust.tables.manager import TableManager
from faust.transport.drivers import aiokafka as driver
from faust.types.tuples import TP
from mode import CrashingSupervisor, Service

from worker.config import Settings
from worker.core.records import SourceRecord
from worker.kafka.aiokafka_private import group_assignment, raise_group_error, rejoin_group
from worker.kafka.budget import Budget, Lease, NoRoom
from worker.kafka.fetches import Consumer, End, Reading
from worker.kafka.topic_watch import Failure
from worker.stream.fetch_buffer import FetchBuffer

faust_log = logging.getLogger("faust")
"""Faust names a service's logger after the module of its class, but these messages are Faust's, not ours."""

FETCH_RECORDS: Final = 512
"""Most records of one fetch of one partition. A larger number gains nothing and delays the other partitions."""

FETCH_BYTES: Final = 1 << 20
"""About the most bytes of one fetch of one partition: 512 records of 100 kB in a compressed record batch are 50 MB."""

FETCH_WAIT_MS: Final = 500
"""How long a fetch waits for the first record; an idle worker fetches each partition twice per second."""

UNHELD_SECONDS: Final = 10.0
"""How often a static member looks for partitions that no member owns, with one small request to the coordinator."""


class Served(Protocol):
    """Whom a membership serves: the worker. Faust awaits the methods."""

    async def take_all(self) -> None:
        """Let the partitions take records until the buffer is empty."""

    async def drain(self) -> None:
        """Wait until every record taken is committed."""

    def next_offsets(self) -> Mapping[TopicPartition, int]:
        """Return the next offset to read of each partition."""

    async def on_assigned(self) -> None:
        """Take over the assigned partitions; then Faust seeks to `next_offsets` and lets records flow."""

    def on_revoked(self) -> None:
        """Note that a rebalance has begun."""


@dataclass(slots=True)
class _Portion:
    """The records of one fetch; the lease holds their bytes until the fetch buffer counts them.

    Not a future's result: futures between threads form cycles, which would keep the records in memory.
    """

    records: list[SourceRecord] = field(default_factory=list)
    lease: Lease | None = None


class _ConsumerThread(driver.AIOKafkaConsumerThread):
    logger = faust_log

    def __init__(self, consumer: KpConsumer, **arguments: Any) -> None:
        super().__init__(consumer, **arguments)
        self.membership = consumer.membership
        # Where the last empty fetch ended: behind the markers and aborted records of transactions.
        self.read_to: dict[TopicPartition, int] = {}

    def _create_worker_consumer(self, transport: driver.Transport) -> AIOKafkaConsumer:
        settings = self.membership.settings
        session_ms = round(settings.session_timeout_seconds * 1000)
        self.reading = Reading(settings.max_batch_bytes, True, FETCH_BYTES, self.membership.budget)
        return Consumer(
            **self.membership.client,
            reading=self.reading,
            group_id=settings.group_id,
            group_instance_id=settings.group_instance_id,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            partition_assignment_strategy=[StickyPartitionAssignor],
            session_timeout_ms=session_ms,
            # The answers announce a rebalance. The group waits for its last member, so with aiokafka's 3 s partitions
            # stand still for that long. 300 ms cost a worker about 1 ms of CPU a second.
            heartbeat_interval_ms=min(300, session_ms // 5),
            rebalance_timeout_ms=max(session_ms, round(settings.transaction_timeout_seconds * 1000)),
            max_poll_interval_ms=600_000,  # without a fetch: longer than any restore or drain
            fetch_max_wait_ms=FETCH_WAIT_MS,
            max_poll_records=FETCH_RECORDS,
            fetch_max_bytes=16 << 20,  # of one response, for all partitions of a broker; the default is 50 MiB
        )

    async def fetch(self, tp: TopicPartition, portion: _Portion) -> None:
        """Fetch the next records of one partition, in the consumer's thread. Raises NoRoom."""
        consumer = self._ensure_consumer()
        fetched = await consumer.getmany(tp, timeout_ms=FETCH_WAIT_MS, max_records=FETCH_RECORDS)
        if not fetched:
            with contextlib.suppress(IllegalStateError):  # revoked meanwhile
                self.read_to[tp] = await consumer.position(tp)
            return
        portion.records = fetched[tp]
        portion.lease = Lease(self.membership.budget.records, sum([record.size for record in portion.records]))

    async def seek_all(self, positions: Mapping[TopicPartition, int]) -> None:
        """Set the next offset of each partition that is still assigned, and drop earlier fetches."""
        consumer = self._ensure_consumer()
        self.reading.forget()
        for tp in consumer.assignment() & positions.keys():
            consumer.seek(tp, positions[tp])

    async def commit_offset(self, tp: TopicPartition, offset: int, metadata: str) -> None:
        """Commit one offset as a member of the group; refused after a rebalance."""
        await self._ensure_consumer().commit({tp: OffsetAndMetadata(offset, metadata)})

    async def check_group(self) -> None:
        """Raise the error with which the group's coordinator refused this member (a missing ACL, for example)."""
        if self._consumer is not None:
            raise_group_error(self._consumer)

    async def rejoin_for_unheld_partitions(self) -> set[int]:
        """Rejoin if a stable group does not own all partitions of the source; return those that no member owns.

        Only a join of the group's leader starts a rebalance, and it may not know that it leads: so every member checks.
        Raises KafkaError while the coordinator is not available.
        """
        settings = self.membership.settings
        consumer = self._ensure_consumer()
        state, held = await group_assignment(consumer, settings.group_id)
        if state != "Stable":
            return set()
        topic = settings.source_topic
        unheld = {p for p in consumer.partitions_for_topic(topic) or () if TopicPartition(topic, p) not in held}
        if unheld:
            rejoin_group(consumer)
        return unheld

    def end_of(self, tp: TopicPartition) -> End | None:
        """Return where a partition ended by the last answer to a fetch; None: not known."""
        end: End | None = self._ensure_consumer().end_of(tp)
        return end


class KpConsumer(driver.Consumer):
    """Faust's consumer, with fetching replaced."""

    logger = faust_log
    _thread: _ConsumerThread

    def __init__(self, transport: Any, *, membership: Membership, served: Served, **arguments: Any) -> None:
        self.membership = membership  # first: the thread needs it
        self.served = served
        self._fetches: set[asyncio.Task[None]] = set()
        self._rebalance = 0
        super().__init__(transport, **arguments)

    def _new_consumer_thread(self) -> _ConsumerThread:
        return _ConsumerThread(self, loop=self.loop, beacon=self.beacon)

    @Service.task
    async def _watch_group(self) -> None:
        """Stop the worker if the coordinator does not let it join its group.

        aiokafka raises that error only from a fetch, and a member without partitions never fetches.
        """
        while not self.should_stop:
            await self.sleep(1.0)
            try:
                await self._thread.call_thread(self._thread.check_group)
            except KafkaError as error:
                self.membership.failure.set(error)
                return

    async def _drain_messages(self, fetcher: Any) -> None:
        """Run one fetch loop per assigned partition while records may flow (Faust's fetcher runs this)."""
        try:
            while not (self.should_stop or fetcher.should_stop):
                if self.flow_active:
                    await self._fetch_while_flowing()
                else:
                    await self.wait_first(self.can_resume_flow.wait(), fetcher._stopped.wait())
        except asyncio.CancelledError:
            if not (self.should_stop or fetcher.should_stop):
                raise  # otherwise this is the normal end, and Faust would log a crash

    async def _fetch_while_flowing(self) -> None:
        generation = self.app.consumer_generation_id
        self._fetches = {
            asyncio.create_task(self._fetch_forever(tp, generation), name=f"fetch-{tp.partition}")
            for tp in self.assignment()
        }
        try:
            stop = asyncio.create_task(self.suspend_flow.wait())
            done, _ = await asyncio.wait({*self._fetches, stop}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stop}:
                if not task.cancelled():  # cancelled by wait_empty
                    task.result()  # a fetch loop ends only with an error, and Faust then crashes the app
        finally:
            stop.cancel()
            await self._stop_fetches()

    async def _fetch_forever(self, tp: TP, generation: int) -> None:
        source = TopicPartition(tp.topic, tp.partition)
        while True:
            await self.membership.buffer.room(tp.partition)
            portion = _Portion()
            fetch = self._thread.fetch(source, portion)
            try:
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(fetch, self._thread.thread_loop))
            except NoRoom as error:
                await error.share.turn(error.key)
                continue
            records = portion.records
            if records and self.flow_active and self.app.consumer_generation_id == generation:
                self.membership.buffer.add(tp.partition, records)
            if portion.lease is not None:
                portion.lease.end()
            del records, portion, fetch  # free them while the next fetch waits

    async def _stop_fetches(self) -> None:
        fetches, self._fetches = self._fetches, set()
        for task in fetches:
            task.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)

    @Service.task
    async def _look_for_unheld_partitions(self) -> None:
        while self.membership.settings.group_instance_id and not self.should_stop:
            await self.sleep(UNHELD_SECONDS)
            try:
                unheld = await self._thread.call_thread(self._thread.rejoin_for_unheld_partitions)
            except (KafkaError, ConsumerNotStarted) as error:
                faust_log.info("cannot read the group's assignment; retrying in %.0f s: %r", UNHELD_SECONDS, error)
                continue
            if unheld:
                faust_log.info("rejoining the group: no member owns partitions %s", sorted(unheld))

    async def on_partitions_assigned(self, assigned: set[TP], generation_id: int = 0) -> None:
        """Record which rebalance this assignment ends."""
        self._rebalance = self.app.rebalancing_count
        await super().on_partitions_assigned(assigned, generation_id)

    def revoked(self) -> bool:
        """Whether the next rebalance has started: Faust may complete an assignment that it has already revoked."""
        return bool(self._rebalance != self.app.rebalancing_count)

    def resume_flow(self) -> None:
        """Let records flow, unless the next rebalance has started, during a long restore for example."""
        if not self.revoked():
            super().resume_flow()

    async def wait_empty(self) -> None:
        """Stop fetching, then wait until the partitions have committed the records they took.

        In this order: a running fetch could move the position after Faust's seek to the committed offset.
        """
        await self.halt()
        await self.served.drain()

    async def halt(self) -> None:
        """Stop fetching and drop waiting records, until Faust resumes the flow after its seek."""
        self.stop_flow()
        await self._stop_fetches()
        self.membership.buffer.clear()
        self.membership.budget.forget_waiting()

    async def perform_seek(self) -> None:
        """Continue at the partitions' offsets: aiokafka returns none while the coordinator moves or loads."""
        await self._thread.call_thread(self._thread.seek_all, self.served.next_offsets())

    async def commit(self, topics: Any = None, start_new_transaction: bool = True) -> bool:
        """Do nothing: the partitions commit."""
        return False

    def verify_event_path(self, now: float, tp: TP) -> None:
        """Do nothing: Faust's books do not know our fetches and commits, and report live partitions as stuck."""

    async def commit_offset(self, tp: TopicPartition, offset: int, metadata: str) -> None:
        """Commit one offset (at least once). Raises what aiokafka raises, for example after a rebalance."""
        await self._thread.call_thread(self._thread.commit_offset, tp, offset, metadata)

    def end_of(self, tp: TopicPartition) -> End | None:
        """Return where a partition ended by the last answer to a fetch; None: not known."""
        return self._thread.end_of(tp)

    def read_to(self, tp: TopicPartition) -> int:
        """Return where the last empty fetch of a partition ended."""
        return self._thread.read_to.get(tp, 0)


class _App(faust.App):
    logger = faust_log

    def _create_directories(self) -> None:
        """Do nothing: the directories are for tables. The worker has none, and may run on a read-only file system."""


class _Tables(TableManager):
    logger = faust_log

    async def on_start(self) -> None:
        """Start at once. Faust waits for a second, for tables that are defined late; the worker has none."""
        await self._update_channels()
        await self.recovery.start()


def create_app(membership: Membership, served: Served) -> faust.App:
    """Build the Faust app: the agent, group membership and rebalances. It neither produces nor commits."""
    settings = membership.settings
    app = _App(
        settings.group_id,
        broker=f"kafka://{settings.bootstrap_servers.split(',')[0]}",
        agent_supervisor=CrashingSupervisor,
        stream_wait_empty=True,
        stream_recovery_delay=0.0,
        topic_allow_declare=False,
        topic_disable_leader=True,
        table_standby_replicas=0,
        TableManager=_Tables,
        web_enabled=False,
        autodiscover=False,
        broker_session_timeout=settings.session_timeout_seconds,
        broker_request_timeout=max(90.0, settings.session_timeout_seconds),
    )
    app.boot_strategy.enable_kafka_producer = False

    class Arrivals(faust.Channel[int]):
        """The agent's channel: it has an item whenever records wait.

        Nothing is put into it, because Faust may empty the queues of its channels at any time during a rebalance.
        """

        async def __anext__(self) -> Any:
            await membership.buffer.filled()
            return len(membership.buffer)

    @app.agent(Arrivals(app), name="score")
    async def score(stream: faust.StreamT[int]) -> None:
        async for _ in stream:
            await served.take_all()

    class Transport(driver.Transport):
        def create_consumer(self, callback: Any, **arguments: Any) -> KpConsumer:
            return KpConsumer(
                self, membership=membership, served=served, callback=callback, loop=self.loop, **arguments
            )

    app.transport = Transport([app.conf.broker[0]], app)

    async def on_assigned(*_: Any, **__: Any) -> None:
        await served.on_assigned()

    async def on_revoked(*_: Any, **__: Any) -> None:
        served.on_revoked()

    app.on_rebalance_complete.connect(on_assigned)
    app.on_partitions_revoked.connect(on_revoked)
    return app


@dataclass(eq=False, repr=False)
class Membership:
    """The worker's membership in its consumer group; Faust and its consumer begin with `join`."""

    settings: Settings
    client: Mapping[str, Any]
    buffer: FetchBuffer
    budget: Budget
    failure: Failure
    confirmed: int = field(default=-1, init=False)  # the generation of the last assignment that was taken over
    _app: faust.App | None = field(default=None, init=False)
    _owned: frozenset[TopicPartition] = field(default=frozenset(), init=False)

    async def join(self, served: Served) -> None:
        """Join the group; from now on Faust calls `served`."""
        app = self._app = create_app(self, served)
        app.finalize()
        app.topics.add(app.topic(self.settings.source_topic))
        await app.start()

    async def leave(self) -> None:
        """Let the records that were taken be committed, and leave the group."""
        if self._app is not None:
            await self._app.stop()

    def crash(self) -> BaseException | None:
        """Return why Faust has crashed; None while it runs."""
        if not self._joined.crashed:
            return None
        return self._joined.crash_reason or RuntimeError("Faust stopped without a reason")

    @property
    def _joined(self) -> faust.App:
        if self._app is None:
            raise RuntimeError("this is a bug: the worker has not joined its group")
        return self._app

    @property
    def consumer(self) -> KpConsumer:
        """Faust's consumer."""
        return cast("KpConsumer", self._joined.consumer)

    @property
    def generation(self) -> int:
        """The group's generation, as far as this member knows."""
        return int(self._joined.consumer_generation_id)

    def assigned(self) -> list[TopicPartition]:
        """Return the assigned partitions of the source."""
        topic = self.settings.source_topic
        return sorted(TopicPartition(*tp) for tp in self.consumer.assignment() if tp.topic == topic)

    def confirm(self, tps: Collection[TopicPartition], generation: int) -> None:
        """Note that these partitions of a generation are taken over."""
        self._owned, self.confirmed = frozenset(tps), generation

    def owns(self, tp: TopicPartition) -> bool:
        """Whether this member has a partition, as far as it knows: its group has not given it away meanwhile."""
        return self.confirmed == self.generation and tp in self._owned

"""h) Hand-over: how long partitions stand still when a worker is killed, stopped or restarted, or joins.

All rows run without a model, under a steady load of 200 records/s over all partitions. A partition's stall is the
longest wait of its records: from its sending until a reader of committed records has its output.
"""

import asyncio
import contextlib
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, Self

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from tests.runs.benchmarks.bench import Bench, wait_until
from tests.runs.benchmarks.results import installed
from tests.runs.benchmarks.workload import BenchmarkError, Topics, traces
from tests.support.kafka_fixtures import WorkerProcess

SETTLE_SECONDS: Final = 3.0
"""Load before and after what is measured, and between two restarts of a roll-out."""

SESSIONS: Final = (6.0, 15.0)
"""Session timeouts of the rows with SIGKILL, s: a short one, and the default."""

ROLLED: Final = "rolling restart of 4 workers, 32 partitions"
QUIX: Final = f"quix-streams: {ROLLED}"


def run(bench: Bench) -> None:
    quix = installed("quixstreams")
    for _ in bench.each_round():
        for session in SESSIONS:
            kill(bench, session)
        stop(bench)
        roll(bench, ROLLED, worker())
        static = worker(KP_SESSION_TIMEOUT_SECONDS="60", static=True)  # longer than a restart
        roll(bench, f"{ROLLED}, static members", static)
        if quix:
            roll(bench, QUIX, peer)
        grow(bench)
    if not quix:
        bench.results.note("h", "quix-streams is not installed: pip install -e '.[bench]'")
    _goals(bench)


def _goals(bench: Bench) -> None:
    r = bench.results
    rows = r.values["h"]
    for session in SESSIONS:
        late = rows[_killed(session)]["slowest_first_output_s"]
        r.goal("h", f"SIGKILL, slowest first output, session timeout {session:.0f} s", late, session + 1, "max")
    r.goal("h", "SIGTERM, 16 partitions, longest stall, s", rows[STOPPED]["longest_stall_s"], 1.0, "max")
    if QUIX in rows:
        r.goal("h", "rolling restart / quix-streams, longest stall", r.ratio("h", "longest_stall_s", ROLLED, QUIX),
            1.0, "max")  # fmt: skip


# -- the load


PATIENCE_SECONDS: Final = 90.0


class Load:
    """Sends and reads while it is entered; `sent` and `arrived` are by the number of the record, which is its key."""

    def __init__(self, bootstrap: str, topics: Topics) -> None:
        self.sent: list[tuple[int, float]] = []
        """Partition and time, s since 1970."""
        self.arrived: dict[int, float] = {}
        self._bootstrap = bootstrap
        self._topics = topics
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        self._running = self._pool.submit(asyncio.run, self._send_and_read())
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._pool.shutdown()

    def finish(self) -> None:
        """Send no more, and wait for all outputs. Raises BenchmarkError if one is missing, or there twice."""
        self._ended.set()
        self._running.result()

    def stalls(self, since: float, until: float = float("inf")) -> dict[int, float]:
        """Return the longest wait (s) of each partition's records that were sent between two times; after `finish`."""
        longest = dict.fromkeys(range(self._topics.partitions), 0.0)
        for number, (partition, at) in enumerate(self.sent):
            if since <= at < until:
                longest[partition] = max(longest[partition], self.arrived[number] - at)
        return longest

    def first_outputs(self, since: float) -> dict[int, float]:
        """Return for each partition when (s after `since`) the first record that was sent later has its output."""
        first: dict[int, float] = {}
        for number, (partition, at) in enumerate(self.sent):
            if at >= since:
                first[partition] = min(first.get(partition, float("inf")), self.arrived[number] - since)
        return first

    def all_flow(self, since: float) -> bool:
        """Whether each partition has the output of a record that was sent after a time."""
        sent = enumerate(self.sent)
        flowing = {partition for number, (partition, at) in sent if at >= since and number in self.arrived}
        return len(flowing) == self._topics.partitions

    async def _send_and_read(self) -> None:
        async with (
            AIOKafkaConsumer(
                bootstrap_servers=self._bootstrap,
                isolation_level="read_committed",
                auto_offset_reset="earliest",
                fetch_min_bytes=1 << 20,  # wait and answer 40 times a second, not after each transaction
                fetch_max_wait_ms=25,
            ) as consumer,
            AIOKafkaProducer(bootstrap_servers=self._bootstrap, acks="all") as producer,
        ):
            names = self._topics.outputs.values()
            consumer.assign([TopicPartition(name, p) for name in names for p in range(self._topics.partitions)])
            reading = asyncio.create_task(self._read(consumer))
            await self._send(producer)
            done, _ = await asyncio.wait({reading}, timeout=PATIENCE_SECONDS)
            if not done:
                reading.cancel()
                raise BenchmarkError(f"{len(self.sent) - len(self.arrived)} of {len(self.sent)} outputs did not come")
            reading.result()

    async def _send(self, producer: AIOKafkaProducer) -> None:
        """Send 100 times a second, to one partition after the other: each of 16 gets records every 0.16 s, each of 64
        every 0.64 s. A stall is measured from the first record that waits, so it may be longer by that.
        """
        values = traces()
        began, sends = time.time(), 0
        while not self._ended.is_set():
            partition = sends % self._topics.partitions
            for _ in range(2):
                number = len(self.sent)
                self.sent.append((partition, time.time()))
                await producer.send(self._topics.source, values[number % len(values)], b"%d" % number, partition)
            sends += 1
            await asyncio.sleep(max(0.0, began + sends / 100 - time.time()))
        await producer.flush()

    async def _read(self, consumer: AIOKafkaConsumer) -> None:
        while not self._ended.is_set() or len(self.arrived) < len(self.sent):
            for records in (await consumer.getmany(timeout_ms=100)).values():
                now = time.time()
                for record in records:
                    if self.arrived.setdefault(int(record.key), now) != now:
                        raise BenchmarkError(f"record {int(record.key)} has two outputs")


# -- the group


Start = Callable[["Group", int], Any]
"""Starts a member, by its number: a context of its process."""


class Group:
    """The members of one consumer group, with topics of their own."""

    def __init__(self, bench: Bench, partitions: int, start: Start) -> None:
        self.bench = bench
        self.topics = bench.topics(partitions=partitions)
        self.members: list[Any] = []
        self._start = start
        self._stack = contextlib.ExitStack()

    def start(self, number: int) -> Any:
        return self._stack.enter_context(self._start(self, number))

    @contextmanager
    def load(self, members: int) -> Iterator[Load]:
        """Start members, all at once, and keep the load up; at the end all outputs must be there."""
        with self._stack, Load(self.bench.bootstrap, self.topics) as load:
            self.members = [self.start(number) for number in range(members)]
            yield load
            load.finish()
        self.bench.outputs(self.topics)  # deletes the topics

    def stop(self, number: int) -> None:
        self.members[number].terminate()
        self.members[number].wait(PATIENCE_SECONDS)

    def restart(self, number: int) -> None:
        self.members[number] = self.start(number)
        if isinstance(self.members[number], WorkerProcess):
            self.members[number].wait_ready(PATIENCE_SECONDS)

    def settle(self, load: Load) -> None:
        """Wait until records of all partitions come through, and then for SETTLE_SECONDS."""
        now = time.time()
        try:
            wait_until(lambda: load.all_flow(now), PATIENCE_SECONDS, "outputs of every partition", 0.05)
        except BenchmarkError as error:
            raise BenchmarkError(f"{error}\n" + "\n".join(each.log()[-1000:] for each in self.members)) from None
        time.sleep(SETTLE_SECONDS)


def worker(*, static: bool = False, **settings: str) -> Start:
    """Return how a worker without a model is started."""

    def start(group: Group, number: int) -> Any:
        name = {"KP_GROUP_INSTANCE_ID": f"member-{number}"} if static else {}
        return group.bench.worker(group.topics, {"KP_EMBEDDER": "none", **settings, **name})

    return start


def peer(group: Group, number: int) -> Any:
    """Start quix-streams, exactly once. Its default commit interval of 5 s would be most of what is measured."""
    options = ("--exactly-once", "--vectors=none", "--commit-interval=0.1")
    return group.bench.peer("quix", group.topics, *options)


def owned(member: WorkerProcess) -> set[int]:
    """Return the partitions of a worker, from its log."""
    partitions = re.findall(r"assigned partitions \[([\d, ]*)\]", member.log())[-1]
    return {int(number) for number in partitions.split(",") if number.strip()}


# -- the rows


def _killed(session: float) -> str:
    return f"SIGKILL of 1 of 3 workers, 16 partitions, session timeout {session:.0f} s"


STOPPED: Final = "SIGTERM to 1 of 3 workers, 16 partitions"


def kill(bench: Bench, session: float) -> None:
    group = Group(bench, 16, worker(KP_SESSION_TIMEOUT_SECONDS=str(session)))
    with group.load(3) as load:
        group.settle(load)
        moved = owned(group.members[0])
        at = time.time()
        group.members[0].kill()
        time.sleep(session)
        group.settle(load)
    first, stalls = load.first_outputs(at), load.stalls(at - 1)
    slowest = max(first.values())
    bench.results.add(
        "h",
        _killed(session),
        slowest_first_output_s=slowest,
        after_the_session_timeout_s=slowest - session,
        longest_stall_of_a_kept_partition_s=max(stalls[p] for p in stalls.keys() - moved),
    )


def stop(bench: Bench) -> None:
    group = Group(bench, 16, worker())
    with group.load(3) as load:
        group.settle(load)
        moved = owned(group.members[0])
        at = time.time()
        group.stop(0)
        ended = time.time()
        group.settle(load)
    stalls = load.stalls(at - 1)
    bench.results.add(
        "h",
        STOPPED,
        longest_stall_s=max(stalls.values()),
        longest_stall_of_a_kept_partition_s=max(stalls[p] for p in stalls.keys() - moved),
        stop_to_exit_s=ended - at,
    )


def roll(bench: Bench, row: str, start: Start) -> None:
    """Restart four members one after the other: stop, start, and go on when records of all partitions come through."""
    group = Group(bench, 32, start)
    with group.load(4) as load:
        group.settle(load)
        time.sleep(SETTLE_SECONDS)
        at = time.time()
        for number in range(4):
            group.stop(number)
            group.restart(number)
            group.settle(load)
            time.sleep(SETTLE_SECONDS)
    stalls, before = load.stalls(at), load.stalls(at - SETTLE_SECONDS, at - 1)
    bench.results.add(
        "h",
        row,
        longest_stall_s=max(stalls.values()),
        median_stall_of_a_partition_s=statistics.median(stalls.values()),
        longest_wait_before_it_s=max(before.values()),
    )


def grow(bench: Bench) -> None:
    """Eight workers over 64 partitions: they start at once, one leaves, one joins."""
    group = Group(bench, 64, worker())
    with group.load(8) as load:
        started = wait_until(lambda: load.all_flow(0), PATIENCE_SECONDS, "outputs of every partition", 0.05)
        group.settle(load)
        left = time.time()
        group.stop(0)
        group.settle(load)
        joined = time.time()
        group.restart(0)
        group.settle(load)
    bench.results.add(
        "h",
        "8 workers, 64 partitions",
        start_to_all_partitions_s=started,
        longest_stall_as_one_leaves_s=max(load.stalls(left, joined).values()),
        longest_stall_as_one_joins_s=max(load.stalls(joined).values()),
    )

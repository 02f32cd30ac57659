"""The producer against a model of the broker, over a network that delays, loses and reorders requests."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import ProducerFenced
from aiokafka.protocol.types import Int16, TaggedFields, UnsignedVarInt32
from aiokafka.structs import OffsetAndMetadata

from tests.support.broker_model import REFUSED, BrokerModel, ModelCluster, Network, Odds
from worker.kafka import producer as producer_module
from worker.kafka import protocol as requests
from worker.kafka.producer import AbortableError, Producer, PublishError
from worker.kafka.rows import OutputTopic, PartitionRows, Row

GROUP = "group"
SOURCE = TopicPartition("source", 0)
OUT = OutputTopic("out", 1, 1 << 20)
CACHE = OutputTopic("cache", 1, 1 << 20)
OUTPUTS = [TopicPartition("out", 0), TopicPartition("cache", 0)]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_module, "BUSY_SECONDS", 0)
    monkeypatch.setattr(producer_module, "FIRST_PAUSE_SECONDS", 0)
    monkeypatch.setattr(producer_module, "FIRST_READ_SECONDS", 0.001)
    monkeypatch.setattr(producer_module, "LONGEST_PAUSE_SECONDS", 0.001)


def rows(offsets: Sequence[int], refused: bool = False) -> list[Row]:
    found: list[Row] = [(b"%d" % offset, b"value", None, []) for offset in offsets]
    return [*found, (b"refused", REFUSED, None, [])] if refused else found


@dataclass
class Run:
    """Workers that copy source records to two partitions, each exactly once, if the producer does its job."""

    broker: BrokerModel
    network: Network
    records: int
    random: random.Random
    crashes: float
    refusals: float
    owns: float = 1.0
    starts: int = 0
    idle: bool = False
    done: bool = False
    unrepaired: bool = False
    """Before Kafka 4.0: late requests took an offset away, and fenced the producer before it committed it again."""
    torn: list[str] = field(default_factory=list)

    def committed(self) -> int:
        return self.broker.offsets.get((GROUP, SOURCE), 0)

    def check(self) -> None:
        """Outputs and offset are visible together, or not at all.

        Before Kafka 4.0 a late offset may take another one away, and the producer commits that again.
        """
        if not self.unrepaired and self.broker.is_settled() and (self.idle or self.broker.release >= (4, 0)):
            expected = [b"%d" % offset for offset in range(self.committed())]
            for partition in OUTPUTS:
                log = self.broker.logs.get(partition)
                found = [] if log is None else [key for key, *_ in log.visible()]
                if found != expected:
                    self.torn.append(f"{partition.topic}: {len(found)} records visible, offset {self.committed()}")

    def visible(self) -> int:
        return max((len(log.visible()) for log in self.broker.logs.values()), default=0)

    async def work(self) -> None:
        """Be one worker after the other, until all records are copied: each starts where the last one committed."""
        while not (self.done or self.unrepaired):
            self.starts += 1
            assert self.starts < 3000, "the run does not end"
            producer = Producer(
                {},
                f"{GROUP}-0",
                60.0,
                cluster=ModelCluster(self.network),
                owns=lambda: self.random.random() < self.owns,
            )
            try:
                await producer.start()
                offset = self.committed()
                while offset < self.records:
                    offset = await self.copy(producer, offset)
                self.done = True
            except (PublishError, CrashError):
                continue
            except ProducerFenced:  # the other one works for a while
                if self.broker.release < (4, 0) and self.visible() > self.committed():
                    self.unrepaired = self.done = True
                    return
                for _ in range(self.random.randint(0, 500)):
                    await asyncio.sleep(0)

    async def copy(self, producer: Producer, offset: int) -> int:
        end = min(self.records, offset + self.random.randint(1, 5))
        refused = self.random.random() < self.refusals
        while True:
            try:
                async with producer.transaction():
                    self.crash()
                    batch = range(offset, end)
                    found = await producer.send(
                        [PartitionRows(CACHE, 0, rows(batch)), PartitionRows(OUT, 0, rows(batch, refused))]
                    )
                    if found:
                        refused = False
                        raise AbortableError("refused")
                    self.crash()
                    await producer.send_offsets(GROUP, {SOURCE: OffsetAndMetadata(end, "")})
                    self.crash()
            except AbortableError:
                continue
            self.idle = True
            self.check()
            self.idle = False
            return end

    def crash(self) -> None:
        """Crash now and then: what is on its way stays there, and nothing is aborted."""
        if self.random.random() < self.crashes:
            raise CrashError


class CrashError(BaseException):
    """The worker is gone."""


BROKERS = {
    "V2": {"transactions": 2},
    "V1": {"transactions": 0},
    "V1 before 4.0": {"transactions": 0, "release": (3, 9)},
    "V1 and V2 by turns": {"transactions": 0},
    "V1, few epochs": {"transactions": 0, "last_epoch": 7},
    "V2, few epochs": {"transactions": 2, "last_epoch": 7},
}


def run(kind: str, seed: int, *, competing: int = 1, records: int = 60, repeats: bool = False) -> Run:
    """Run once. Everything follows from the seed. `repeats`: only what was answered is late, and arrives once more."""
    chance = random.Random(seed)
    broker = BrokerModel(**BROKERS[kind])  # type: ignore[arg-type]
    # Before 4.0, a worker that ends between a commit and the repair of its offset leaves duplicates.
    fragile = broker.release < (4, 0)
    odds = Odds(
        held=chance.choice([0.02, 0.1, 0.3]),
        unanswered=chance.choice([0, 0.05, 0.2]),
        unsent=chance.choice([0, 0.05]),
        late=chance.choice([0.02, 0.1, 0.4]),
        slow_markers=chance.choice([0, 0.5, 0.9]),
        time_out=0 if fragile else chance.choice([0, 0, 0.01]),
        forgets=0 if fragile else chance.choice([0, 0.02]),
        fences=not fragile,
        changes=0.02 if "by turns" in kind else 0,
    )
    if repeats:
        odds = Odds(repeated=0.3, late=odds.late)  # a request that is not answered has the epoch renewed anyway
    network = Network(broker, odds, seed)
    found = Run(
        broker,
        network,
        records,
        random.Random(seed + 1),
        crashes=0 if fragile else chance.choice([0, 0.02]),
        refusals=chance.choice([0, 0.3]),
        owns=1.0 if fragile else chance.choice([1.0, 0.5]),
    )
    network.check = found.check

    async def all_workers() -> None:
        async with asyncio.timeout(20):
            await asyncio.gather(*(found.work() for _ in range(competing)))
            await found.work()
            network.deliver_all()
            found.idle = True
            found.check()
            found.done = False  # a restart adds nothing
            await found.work()
            broker.complete()
            found.check()

    asyncio.run(all_workers())
    return found


def judge(found: Run) -> list[str]:
    """Return what is wrong after a run."""
    wrong = list(found.torn)
    if found.unrepaired:
        return wrong
    if found.committed() != found.records:
        wrong.append(f"the offset is {found.committed()} of {found.records}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "competing"),
    [(kind, n) for kind, broker in BROKERS.items() for n in ((1, 2) if "release" not in broker else (1,))],
)
def test_what_is_late_lost_or_repeated_each_record_comes_once(kind: str, competing: int, seed: int, long: bool) -> None:
    late, rounds, unrepaired = 0, 40 if long else 12, 0
    for number in range(seed, seed + rounds):
        found = run(kind, number, competing=competing, repeats=number % 3 == 0)
        assert not judge(found), f"seed {number}: {judge(found)[:3]}"
        late += found.network.late
        unrepaired += found.unrepaired
    assert late > 3 * rounds, "the network must deliver late requests"
    assert unrepaired <= 3, "it takes two late requests in the same moment"


async def _no_new_epoch(producer: Producer) -> None:
    producer._late = False


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["V1", "V1 before 4.0"])
def test_the_model_finds_what_happens_without_a_new_epoch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torn, lost and doubled records: as with aiokafka's producer, which goes on in the same epoch."""
    monkeypatch.setattr(Producer, "_renew", _no_new_epoch)
    found = [judge(run(kind, number)) for number in range(30)]
    assert sum(map(bool, found)) >= 5


@pytest.mark.parametrize(
    ("newest", "level", "may_hang"), [(25, 2, True), (29, 2, True), (30, 2, False), (None, 2, False), (29, 0, False)]
)
def test_brokers_whose_transactions_may_hang(newest: int | None, level: int, may_hang: bool) -> None:
    """25: Kafka 4.0, 29: 4.2, 30: 4.3, as those brokers answer; None: a broker that is not Kafka."""

    def features(*levels: tuple[str, int, int]) -> bytes:
        rows = (
            requests.TEXT.encode(name) + Int16.encode(one) + Int16.encode(two) + TaggedFields.encode({})
            for name, one, two in levels
        )
        return UnsignedVarInt32.encode(len(levels) + 1) + b"".join(rows)

    supported = features() if newest is None else features(("group.version", 0, 1), ("metadata.version", 7, newest))
    finalised = features(("transaction.version", level, level))
    response = requests.API_VERSIONS.RESPONSE_TYPE(0, [], 0, {0: supported, 2: finalised})
    assert requests.may_hang_at_last_epoch(response) == may_hang

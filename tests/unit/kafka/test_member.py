"""The life of an assignment, without a broker: of no partitions, so only the job's steps are taken."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiokafka import AIOKafkaConsumer, TopicPartition

from tests.support.clock import until
from worker.config import load
from worker.kafka.assignment import Position
from worker.kafka.member import Claim, Member, StoppedError, Work
from worker.kafka.topic_watch import TopicWatch


@dataclass
class Job:
    """Restores when it may, and notes its steps."""

    may_restore: asyncio.Event = field(default_factory=asyncio.Event)
    failure: Exception | None = None
    steps: list[str] = field(default_factory=list)

    def transactional_id(self, tp: TopicPartition) -> str:
        raise NotImplementedError

    async def restore(self, positions: Mapping[TopicPartition, Position], consumer: AIOKafkaConsumer) -> None:
        self.steps.append("restoring")
        await self.may_restore.wait()
        if self.failure is not None:
            raise self.failure
        self.steps.append("restored")

    def open(self, claim: Claim) -> Work:
        raise NotImplementedError

    def problem(self, works: Collection[Work]) -> str | None:
        return None

    def measure(self, tp: TopicPartition, work: Work, lag: int | None) -> None:
        raise NotImplementedError

    def closed(self, tps: Collection[TopicPartition]) -> None:
        self.steps.append("closed")


@asynccontextmanager
async def member_of(job: Job) -> AsyncIterator[Member[Work]]:
    settings = load()
    member = Member(
        settings, {}, job, group="group", topics=["topic"], drain_seconds=1.0,
        watch=TopicWatch(settings, {}, {}, state=()), set_ready=lambda _: None,
    )  # fmt: skip
    try:
        yield member
    finally:
        await member._consumer.stop()


async def test_a_revocation_waits_for_the_assignment_before() -> None:
    """A producer that starts late would fence the next owner."""
    job = Job()
    async with member_of(job) as member:
        await member.on_partitions_assigned([])
        await until(lambda: "restoring" in job.steps)
        revoking = asyncio.create_task(member.on_partitions_revoked([]))
        await asyncio.sleep(0.05)
        assert not revoking.done()
        job.may_restore.set()
        await revoking
        assert job.steps == ["closed", "restoring", "restored", "closed"]
        assert member.not_ready() == "waiting for partitions to be assigned and restored", "it was revoked meanwhile"
        await member.on_partitions_assigned([])
        await until(lambda: member.not_ready() is None)


async def test_a_failed_restore_ends_the_member() -> None:
    job = Job(failure=ValueError("of a record"))
    job.may_restore.set()
    async with member_of(job) as member:
        await member.on_partitions_assigned([])
        await asyncio.wait_for(member.failed.wait(), 30)
        assert member.failure is job.failure
        assert member.not_ready() == "failed: ValueError", "the message may quote a record"
        await member.on_partitions_assigned([])
        assert job.steps.count("restoring") == 1, "it takes nothing over any more"


async def test_a_stop_ends_a_wait() -> None:
    claim = Claim(TopicPartition("topic", 0), None, None, Position(0))  # type: ignore[arg-type]
    waiting = asyncio.create_task(claim.stop.unless_set(asyncio.sleep(600)))
    sleeping = asyncio.create_task(claim.stop.sleep(600))
    await asyncio.sleep(0)
    claim.stop.set()
    for each in (waiting, sleeping):
        try:
            await asyncio.wait_for(each, 30)
        except StoppedError:
            continue
        raise AssertionError(each)

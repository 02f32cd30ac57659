"""The partitions that a member of a consumer group owns: the life of each, from assignment to revocation.

The guarantee depends on the order of these steps. For each new partition:
 1. fence: start its producer. This fences the former owner, and ends its open transaction;
 2. read the committed offset;
 3. restore the state that is kept on topics;
 4. open: only now is the first record read, at the committed offset;
 5. run: work and commit, until the partition is revoked, something fails, or the process stops.
For each partition, before a rebalance and at the end:
 6. drain: commit what is in flight. This waits for producers that are starting: they would fence the next owner;
 7. close, unless it is kept: stop the producer.

Members differ in who names the partitions: Faust for the worker (stream/worker.py), aiokafka for others (member.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Generic, Protocol, TypeVar

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from aiokafka.structs import OffsetAndMetadata

from worker.config import Settings
from worker.core.changelog import committed_from
from worker.core.records import Fault, SourceRecord
from worker.core.restore import Log, Report, SourcePosition
from worker.core.terminal import number_of
from worker.core.trace import Reason
from worker.kafka.aiokafka_private import send_request
from worker.kafka.connections import admin_client, committed_reader, running
from worker.kafka.describe import topic_id
from worker.kafka.fetches import Reading
from worker.kafka.protocol import FetchOffsets, fetched_offsets

log = logging.getLogger(__name__)


class Sender(Protocol):
    """What sends and commits the records of a partition."""

    async def start(self) -> None:
        """Connect; with transactions, this fences the partition's former owner."""
        ...

    async def stop(self) -> None:
        """Disconnect; an open transaction is aborted."""
        ...


class Owned(Protocol):
    """A partition, with its state restored."""

    def start(self) -> None:
        """Open it and let it run."""
        ...

    async def drain(self) -> None:
        """Commit what is in flight."""
        ...

    async def close(self) -> None:
        """Drop what is not committed, and stop the sender."""
        ...


AnySender = TypeVar("AnySender", bound=Sender)
AnyOwned = TypeVar("AnyOwned", bound=Owned)
AnyOwned_co = TypeVar("AnyOwned_co", bound=Owned, covariant=True)


class Factory(Protocol[AnySender, AnyOwned_co]):
    """Makes the partitions of a member."""

    async def senders(self, tps: Sequence[TopicPartition]) -> Mapping[TopicPartition, AnySender]:
        """Return the senders of new partitions, not started."""
        ...

    async def restore(
        self, positions: Mapping[TopicPartition, Position], senders: Mapping[TopicPartition, AnySender]
    ) -> Mapping[TopicPartition, AnyOwned_co]:
        """Do step 3, and return the new partitions, not started."""
        ...


class Assignment(Generic[AnySender, AnyOwned]):
    """The partitions of one member."""

    def __init__(
        self, settings: Settings, client: Mapping[str, Any], group: str, factory: Factory[AnySender, AnyOwned]
    ) -> None:
        self.owned: dict[TopicPartition, AnyOwned] = {}
        self._client = client
        self._group = group
        self._timeout_seconds = settings.transaction_timeout_seconds
        self._factory = factory
        self._fencing = asyncio.Lock()

    async def change(
        self, mine: Sequence[TopicPartition], stands: Callable[[], bool], kept: Collection[TopicPartition] = ()
    ) -> bool:
        """Close the former partitions that are not kept, and take steps 1 to 5 for new ones.

        Return False, and open none, if the assignment does not stand any more after step 3. Never call this during a
        rebalance.
        """
        new = [tp for tp in mine if tp not in kept]
        async with self._fencing:
            await self.close([tp for tp in self.owned if tp not in kept])
            senders = await self._factory.senders(new)
            try:
                await asyncio.gather(*(each.start() for each in senders.values()))  # 1
            except BaseException:
                await _stop(senders.values())
                raise
        try:
            positions = await self._read_offsets(new)  # 2
            opened = await self._factory.restore(positions, senders)  # 3
        except BaseException as error:
            await _stop(senders.values())
            if isinstance(error, OffsetsError) and not stands():
                return False  # another member has the partition by now: the changelog may hold what it has committed
            raise
        if not stands():
            await _stop(senders.values())
            return False
        self.owned.update(opened)
        for each in opened.values():
            each.start()  # 4 and 5
        return True

    async def drain(self) -> None:
        """Take step 6 for every partition."""
        async with self._fencing:
            pass
        await asyncio.gather(*(each.drain() for each in self.owned.values()))

    async def close(self, tps: Iterable[TopicPartition]) -> None:
        """Take step 7 for some partitions: they are not owned any more."""
        await asyncio.gather(*(self.owned.pop(tp).close() for tp in tps))

    async def _read_offsets(self, tps: Sequence[TopicPartition]) -> dict[TopicPartition, Position]:
        positions: dict[TopicPartition, Position] = {}
        for topic in sorted({tp.topic for tp in tps}):
            numbers = [tp.partition for tp in tps if tp.topic == topic]
            those = await read_positions(self._client, self._group, topic, numbers, self._timeout_seconds, stable=True)
            positions |= {TopicPartition(topic, number): position for number, position in those.items()}
        return positions


async def _stop(senders: Iterable[Sender]) -> None:
    await asyncio.gather(*(each.stop() for each in senders), return_exceptions=True)


# -- what steps 2 and 3 read: committed offsets, and logs on a compacted topic

AT_ONCE: Final = 4  # partitions that are read at once
FETCH_BYTES: Final = 4 << 20  # bytes of one fetch of a partition: a cache of 1000 entries (1.7 MB) arrives in one
RETRY_SECONDS: Final = 0.05  # pause before the group's coordinator is asked again

Result = TypeVar("Result")


class OffsetsError(Exception):
    """The committed offset does not fit the source topic or the changelog; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Position(SourcePosition):
    """Where a partition continues."""

    lost: int = 0  # records between the committed offset and the oldest one on the topic
    metadata: str = ""  # as it was committed, whoever wrote it


async def read_positions(
    client: Mapping[str, Any],
    group: str,
    topic: str,
    partitions: Sequence[int],
    timeout_seconds: float,
    *,
    stable: bool = False,
) -> dict[int, Position]:
    """Return where each partition continues. Raises OffsetsError, KafkaError, TimeoutError.

    That is the committed offset. It is the oldest record if none is committed, if retention has deleted records since
    (`lost`), or if the offset was committed for another topic of this name: none of the new one's records was scored.

    `stable`: wait for the end of each transaction that has sent an offset, because the offset before it is that of
    records which may be published already. Only for an owner: other members may always have some open.
    """
    tps = [TopicPartition(topic, partition) for partition in partitions]
    trouble: KafkaError | None = None
    committed = None
    try:
        async with asyncio.timeout(timeout_seconds):
            async with admin_client(client) as admin:
                while committed is None:
                    try:  # the id last: a topic's deletion deletes its offsets
                        answer = await _read_committed(admin, group, tps, stable=stable)
                        now, committed = await topic_id(admin, topic), answer
                    except KafkaError as error:
                        if not error.retriable:
                            raise
                        if repr(error) != repr(trouble):
                            log.info("the offsets of group %s are not available yet: %s", group, error)
                        trouble = error
                        await asyncio.sleep(RETRY_SECONDS)
            oldest, ends = await topic_offsets(client, tps)
    except TimeoutError:
        why = "" if trouble is None else f": {trouble}"
        raise TimeoutError(
            f"the offsets of group {group} on {topic} were not answered in {timeout_seconds:g} s{why}"
        ) from None
    positions = {}
    for tp in tps:
        stored = committed.get(tp)
        if stored is not None and stored.offset > ends[tp] and not _recreated(stored, now):
            raise OffsetsError(
                f"{topic}/{tp.partition}: the group {group} has committed offset {stored.offset}, the topic ends at "
                f"{ends[tp]}: it was recreated or truncated. Choose where to continue: kafka-consumer-groups "
                f"--group {group} --topic {topic} --reset-offsets --to-earliest --execute"
            )
        positions[tp.partition] = _position(stored, oldest[tp], now)
    moved = [partition for partition, position in positions.items() if position.recreated]
    if moved:
        log.warning(
            "%s was recreated (topic id %s) after group %s committed partitions %s: these start at the oldest record "
            "with empty caches. If a mirror copied the offsets from another cluster, stop all workers, and commit them "
            "anew: kafka-consumer-groups --group %s --topic %s --reset-offsets --to-current --execute",
            topic, now, group, moved, group, topic,
        )  # fmt: skip
    return positions


async def _read_committed(
    admin: AIOKafkaAdminClient, group: str, tps: Sequence[TopicPartition], *, stable: bool
) -> dict[TopicPartition, OffsetAndMetadata]:
    """Ask the group's coordinator. Raises KafkaError.

    aiokafka's own methods ignore an error of the whole response and report that nothing is committed; a worker would
    then start at the oldest record.
    """
    coordinator = await admin.find_coordinator(group)
    return fetched_offsets(await send_request(admin, FetchOffsets(group, tps, stable=stable), coordinator))


def _recreated(stored: OffsetAndMetadata, now: str) -> bool:
    """Return whether an offset was committed for another topic of the same name; `now`: the topic's current id."""
    committed = committed_from(stored.metadata)
    before = None if committed is None else committed.topic_id
    return before is not None and before != now


def _position(stored: OffsetAndMetadata | None, oldest: int, now: str) -> Position:
    if stored is None:
        return Position(oldest, has_offset=False, topic_id=now)
    if _recreated(stored, now):
        return Position(oldest, topic_id=now, recreated=True)
    lost = max(0, oldest - stored.offset)
    return Position(
        stored.offset + lost,
        committed=committed_from(stored.metadata),
        topic_id=now,
        lost=lost,
        metadata=stored.metadata,
    )


async def topic_offsets(
    client: Mapping[str, Any], tps: Sequence[TopicPartition]
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    """Return the oldest offset and the end of each partition. Raises KafkaError."""
    # aiokafka's first look-up of a topic's offsets always fails, as it knows no leaders yet: so the pause is short.
    consumer = AIOKafkaConsumer(**client, enable_auto_commit=False, retry_backoff_ms=20)
    async with running(consumer):
        return await consumer.beginning_offsets(tps), await consumer.end_offsets(tps)


async def read_logs(
    client: Mapping[str, Any],
    topic: str,
    partitions: Sequence[int],
    timeout_seconds: float,
    max_batch_bytes: int,
    use: Callable[[int, Log], Result],
) -> dict[int, Result]:
    """Read partitions of a compacted topic to their ends at the time of the call; return what `use` makes of each log.

    `use` is called in a thread, for one partition after the other, and must not keep the log: so memory does not grow
    with the number of partitions. Raises what it raises, KafkaError, and TimeoutError if nothing arrives for
    `timeout_seconds`: aiokafka may wait without end.
    """
    if not partitions:
        return {}
    logs = {TopicPartition(topic, partition): Log() for partition in sorted(partitions)}
    results: dict[int, Result] = {}
    reading = Reading(max_batch_bytes, tolerant=True)
    fetch_max_bytes = AT_ONCE * FETCH_BYTES
    reader = committed_reader(client, reading, max_partition_fetch_bytes=FETCH_BYTES, fetch_max_bytes=fetch_max_bytes)
    clock = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(timeout_seconds) as limit, running(reader) as consumer:
            consumer.assign([*logs])
            consumer.pause(*logs)
            await consumer.seek_to_beginning(*logs)
            ends = await consumer.end_offsets([*logs])
            reached: dict[TopicPartition, int] = {}
            reported = time.monotonic()
            while logs:
                former, reached = reached, {tp: await consumer.position(tp) for tp in islice(logs, AT_ONCE)}
                if reached != former:
                    limit.reschedule(clock() + timeout_seconds)
                if time.monotonic() - reported > 2.0:
                    offsets = sum([ends[tp] - await consumer.position(tp) for tp in logs])
                    log.info(
                        "restoring from %s: %d of %d partitions left, %d offsets",
                        topic, len(logs), len(partitions), offsets,
                    )  # fmt: skip
                    reported = time.monotonic()
                complete = {tp: logs.pop(tp) for tp, at in reached.items() if at >= ends[tp]}
                consumer.pause(*complete)
                consumer.resume(*islice(logs, AT_ONCE))  # the next ones are fetched while the complete ones are used
                if complete:
                    limit.reschedule(None)
                    for tp in list(complete):
                        results[tp.partition] = await asyncio.to_thread(use, tp.partition, complete.pop(tp))
                    limit.reschedule(clock() + timeout_seconds)
                    continue
                for tp, records in (await consumer.getmany(*reached, timeout_ms=500)).items():
                    for record in records:
                        fault = fault_of(record)
                        if fault is None:
                            logs[tp].apply(record.key, record.value, record.offset)
                        else:
                            logs[tp].skip(fault, record.offset)
    except TimeoutError:
        raise TimeoutError(f"nothing arrived from {topic} for {timeout_seconds:g} s") from None
    return results


def fault_of(record: SourceRecord) -> Fault | None:
    """Return why a record of the changelog, or a batch, has no key and value; its headers do not matter."""
    fault = record.fault
    return fault if fault is not None and fault.reason in (Reason.UNREADABLE, Reason.BATCH_TOO_LARGE) else None


def check_offsets(group: str, topic: str, positions: Mapping[int, Position], reports: Mapping[int, Report]) -> None:
    """Compare committed offsets with the changelog, whose entries are committed with them. Raises OffsetsError."""
    for partition, each in reports.items():
        if each.ahead is not None:
            raise OffsetsError(
                f"{topic}/{partition}: the group {group} has committed offset {positions[partition].offset}, but the "
                f"changelog has committed entries of records up to {each.ahead}: they would be published twice. After "
                "a crash with KP_DELIVERY=at_least_once, let a worker with it continue first. Otherwise stop all "
                "workers, and continue after the last output (docs/operations.md, Restore offsets from the outputs), "
                f"at least here: kafka-consumer-groups --group {group} --topic {topic}:{partition} --reset-offsets "
                f"--to-offset {each.ahead + 1} --execute"
            )


def report_skipped(changelog: str, reports: Mapping[int, Report], model: str) -> None:
    """Log which entries were skipped: the first damaged one of each partition, and those of another model at once."""
    for partition, each in reports.items():
        if each.problem:
            log.warning(
                "changelog %s/%d %s; the entry is skipped (%d damaged in all)",
                changelog, partition, each.problem, each.skipped["corrupt"],
            )  # fmt: skip
    older = {partition: each for partition, each in reports.items() if each.skipped["older"]}
    if older:
        skipped_records = sum(each.skipped["older"] for each in older.values())
        log.warning(
            "%s: skipped %s of an earlier version, which the next commit deletes",
            _named(sorted(older)), number_of(skipped_records, "changelog record"),
        )  # fmt: skip
    foreign = {partition: each for partition, each in reports.items() if each.skipped["other_model"]}
    if foreign:
        skipped = sum((each.skipped for each in foreign.values()), Counter())
        others = sorted(name.removeprefix("model ") for name in skipped if name.startswith("model "))
        if len(others) > 3:  # whoever may write to the changelog chooses their names
            others[3:] = [f"{len(others) - 3} more"]
        log.warning(
            "%s: skipped %s of another model (%s), because this worker runs %s; the first traces are compared with "
            "fewer entries",
            _named(sorted(foreign)), number_of(skipped["other_model"], "changelog entry", "changelog entries"),
            ", ".join(others), model,
        )  # fmt: skip


def _named(partitions: Sequence[int]) -> str:
    return f"partition {partitions[0]}" if len(partitions) == 1 else f"{len(partitions)} partitions {partitions}"


def report_epochs(reports: Mapping[int, Report]) -> None:
    """Log in which partitions a new epoch begins, and why: one line for those with the same epoch and reason."""
    alike: dict[tuple[int | None, str], list[int]] = {}
    for partition, each in reports.items():
        if each.begins is not None:
            alike.setdefault((each.current.number, each.begins), []).append(partition)
    for (number, why), partitions in alike.items():
        those = [reports[partition] for partition in partitions]
        starts = sorted({each.current.start for each in those})
        where = f"offset {starts[0]}" if len(starts) == 1 else f"offsets from {starts[0]} to {starts[-1]}"
        log.info(
            "%s: epoch %d of the source begins at %s (%s), with %s; %s of other epochs skipped",
            _named(partitions), number, where, why,
            number_of(sum(each.entries for each in those), "earlier cache entry", "earlier cache entries"),
            number_of(sum(each.overridden for each in those), "entry", "entries"),
        )  # fmt: skip

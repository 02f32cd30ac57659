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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from aiokafka import TopicPartition

from worker.config import Settings
from worker.kafka.restore import Position, read_positions


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
        except BaseException:
            await _stop(senders.values())
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
            those = await read_positions(self._client, self._group, topic, numbers, self._timeout_seconds)
            positions |= {TopicPartition(topic, number): position for number, position in those.items()}
        return positions


async def _stop(senders: Iterable[Sender]) -> None:
    await asyncio.gather(*(each.stop() for each in senders), return_exceptions=True)

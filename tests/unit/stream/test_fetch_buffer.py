"""The queues before the partition tasks: taken in turn, bounded, and dropped when the partition goes."""

import asyncio
from collections.abc import Callable
from itertools import groupby, pairwise

import pytest

from tests.support.builders import make_record
from tests.support.clock import HandClock
from worker.core.records import SourceRecord
from worker.kafka.budget import Share
from worker.stream.fetch_buffer import (
    LONGEST_TURN_SECONDS,
    LOW_WATER_BYTES,
    LOW_WATER_RECORDS,
    TURN_RECORDS,
    TURN_SECONDS,
    FetchBuffer,
)


def records(partition: int, count: int, size: int = 1, first: int = 0) -> list[SourceRecord]:
    return [make_record(b"x" * size, first + n, partition=partition) for n in range(count)]


def intake_of(
    clock: Callable[[], float] = float, on_turn: Callable[[float], None] = lambda _: None, **counts: int
) -> FetchBuffer:
    """Return a buffer with so many records waiting: intake_of(p0=3, p1=1). Its time stands still."""
    buffer = FetchBuffer(Share(1 << 40), on_turn, clock)
    buffer.assign([int(name[1:]) for name in counts])
    for name, count in counts.items():
        buffer.add(int(name[1:]), records(int(name[1:]), count))
    return buffer


def take_all(buffer: FetchBuffer) -> list[tuple[int, int]]:
    taken = []
    while (record := buffer.next()) is not None:
        taken.append((record.partition, record.offset))
    return taken


async def has_room(buffer: FetchBuffer, partition: int) -> bool:
    try:
        await asyncio.wait_for(buffer.room(partition), 0.01)
    except TimeoutError:
        return False
    return True


async def test_a_partition_keeps_its_turn_and_its_order() -> None:
    buffer = intake_of(p0=2, p1=3, p2=1, p3=0)
    buffer.add(3, [])  # an empty fetch gives no turn
    assert len(buffer) == 6
    assert take_all(buffer) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert len(buffer) == 0
    assert buffer.next() is None


def turns(buffer: FetchBuffer, clock: HandClock, count: int, seconds_each: float) -> list[int]:
    """Take so many records, one after the other; return their partitions."""
    partitions = []
    for _ in range(count):
        partitions.append(buffer.next().partition)
        clock.now += seconds_each
    return partitions


def lengths(partitions: list[int]) -> list[tuple[int, int]]:
    """Return (partition, records) of each turn."""
    return [(partition, len(list(group))) for partition, group in groupby(partitions)]


async def test_a_turn_ends_with_its_time_while_others_wait() -> None:
    clock = HandClock()
    waits: list[float] = []
    buffer = intake_of(clock, waits.append, p0=50, p1=50, p2=0)
    each = TURN_SECONDS / 25
    assert lengths(turns(buffer, clock, 100, each)) == [(0, 25), (1, 25), (0, 25), (1, 25)]
    assert max(waits) == pytest.approx(TURN_SECONDS)
    buffer.add(2, records(2, 100))
    assert lengths(turns(buffer, clock, 100, each)) == [(2, 100)]  # alone, it keeps its turn


async def test_a_slow_embedder_lengthens_a_turn_within_a_limit() -> None:
    clock = HandClock()
    buffer = intake_of(clock, p0=50, p1=50)
    assert lengths(turns(buffer, clock, 40, TURN_SECONDS / 4))[:2] == [(0, TURN_RECORDS), (1, TURN_RECORDS)]
    buffer = intake_of(clock, p0=50, p1=50)
    assert lengths(turns(buffer, clock, 10, LONGEST_TURN_SECONDS / 2))[:2] == [(0, 2), (1, 2)]


async def test_a_partition_that_comes_late_has_the_next_turn_and_cannot_starve_the_others() -> None:
    clock = HandClock()
    buffer = intake_of(clock, p0=100, p1=100, p2=0, p3=0)
    taken = []
    for number in range(40):
        if number >= 3:  # two partitions with a few records at a time, again and again
            for late in (2, 3):
                if not buffer.waiting(late):
                    buffer.add(late, records(late, 1, first=number))
        taken.append(buffer.next().partition)
        clock.now += LONGEST_TURN_SECONDS
    assert taken[:5] == [0, 1, 0, 2, 1]
    for partition in range(4):
        gaps = [after - before for before, after in pairwise([i for i, turn in enumerate(taken) if turn == partition])]
        assert max(gaps) <= 4, (partition, taken)


async def test_a_partition_that_is_held_in_its_turn_gives_it_up() -> None:
    buffer = intake_of(p0=3, p1=3)
    assert buffer.next().partition == 0
    buffer.hold(0)
    assert lengths(turns(buffer, HandClock(), 2, 0)) == [(1, 2)]
    buffer.release(0)
    assert take_all(buffer) == [(1, 2), (0, 1), (0, 2)]


async def test_where_all_are_held_the_taker_waits_for_one() -> None:
    buffer = intake_of(p0=3, p1=3, p2=3)
    for partition in range(3):
        buffer.hold(partition)
    assert buffer.next() is None
    assert buffer
    waiting = asyncio.create_task(buffer.released())
    await asyncio.sleep(0)
    assert not waiting.done()
    buffer.release(1)
    await asyncio.wait_for(waiting, 1)
    assert take_all(buffer) == [(1, 0), (1, 1), (1, 2)]
    for partition in (0, 2):
        buffer.release(partition)
    buffer.add(0, records(0, 3, first=3))  # not a second turn for a partition that waits already
    buffer.add(1, [])
    assert len(take_all(buffer)) == 9


@pytest.mark.parametrize("change", [FetchBuffer.clear, lambda buffer: buffer.assign([0])], ids=["clear", "assign"])
async def test_nobody_waits_after_the_partitions_changed(
    change: Callable[[FetchBuffer], None],
) -> None:
    buffer = intake_of(p0=3)
    buffer.hold(0)
    waiting = asyncio.create_task(buffer.released())
    await asyncio.sleep(0)
    change(buffer)
    await asyncio.wait_for(waiting, 1)
    buffer.add(0, records(0, 1, first=7))
    assert take_all(buffer) == [(0, 7)]


async def test_room_ends_with_too_many_records_and_comes_back() -> None:
    buffer = intake_of(p0=LOW_WATER_RECORDS - 1, p1=0)
    assert await has_room(buffer, 0)
    buffer.add(0, records(0, 1, first=LOW_WATER_RECORDS))
    assert await has_room(buffer, 1)
    waiting = asyncio.create_task(buffer.room(0))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    assert buffer.next() is not None
    await asyncio.wait_for(waiting, 1)


async def test_room_ends_with_too_many_bytes_and_comes_back() -> None:
    buffer = intake_of(p0=0)
    buffer.add(0, records(0, 1, size=LOW_WATER_BYTES - 100))
    assert await has_room(buffer, 0)
    buffer.add(0, [make_record(None, 1), make_record(b"x", 2)])
    assert not await has_room(buffer, 0)
    for _ in range(2):
        buffer.next()
        assert await has_room(buffer, 0)
    assert take_all(buffer) == [(0, 2)]


async def test_clear_drops_the_records_and_keeps_the_partitions() -> None:
    buffer = intake_of(p0=LOW_WATER_RECORDS, p1=3)
    buffer.clear()
    assert len(buffer) == 0
    assert buffer.next() is None
    assert await has_room(buffer, 0)
    buffer.add(0, records(0, 2, first=10))
    buffer.add(1, records(1, 1, first=20))
    assert take_all(buffer) == [(0, 10), (0, 11), (1, 20)]


async def test_assign_starts_anew() -> None:
    buffer = intake_of(p0=3, p1=3)
    buffer.assign([1, 2])
    assert len(buffer) == 0
    buffer.add(0, records(0, 1))  # not assigned any more: they are dropped, and it has no room
    buffer.add(2, records(2, 1))
    assert not await has_room(buffer, 0)
    assert take_all(buffer) == [(2, 0)]

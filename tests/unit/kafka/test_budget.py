"""The memory budget: bytes are counted, who finds no room waits in turn, and one alone is always let through."""

import asyncio
import gc
import threading

import pytest

from worker.kafka.budget import Budget, Lease, NoRoom, Share


def test_room_is_what_is_left_and_one_alone_may_take_anything() -> None:
    share = Share(100)
    assert share.room("a", 1000) is None
    share.take(60)
    assert share.room("b", 40) == 40
    with pytest.raises(NoRoom):
        share.room("b", 41)
    share.give_back(60)
    assert share.room("b", 1000) is None


def test_nobody_overtakes_who_waits() -> None:
    share = Share(100)
    share.take(90)
    for key in ("a", "b"):
        with pytest.raises(NoRoom):
            share.room(key, 20)
    with pytest.raises(NoRoom):
        share.room("c", 1)
    share.give_back(90)
    for key in ("b", "c"):
        with pytest.raises(NoRoom):
            share.room(key, 1)
    assert [share.room(key) for key in ("a", "b", "c", "d")] == [None] * 4


async def test_the_first_who_waits_is_woken_from_another_thread_and_then_the_next() -> None:
    share = Share(100)
    share.take(100)
    order: list[str] = []

    async def wait(key: str, need: int) -> None:
        while True:
            try:
                share.room(key, need)
            except NoRoom as error:
                await error.share.turn(error.key)
            else:
                share.take(need)
                order.append(key)
                return

    tasks = [asyncio.create_task(wait(key, need)) for key, need in (("large", 80), ("small", 1), ("small2", 1))]
    await asyncio.sleep(0.01)
    for _ in range(7):
        thread = threading.Thread(target=share.give_back, args=(10,))
        thread.start()
        thread.join()
        await asyncio.sleep(0.01)
        assert not order
    share.give_back(10)
    await asyncio.sleep(0.01)
    assert order == ["large"]
    share.give_back(10)
    await asyncio.wait_for(asyncio.gather(*tasks), 5)
    assert order == ["large", "small", "small2"]
    assert share.held == 92
    assert not len(share)


async def test_who_is_refused_keeps_its_place() -> None:
    share = Share(100)
    share.take(50)
    assert share.room("a", 10) == 50
    error = share.no_room("a", 90)
    with pytest.raises(NoRoom):
        share.room("b", 1)
    waiting = asyncio.create_task(error.share.turn(error.key))
    await asyncio.sleep(0)
    share.give_back(50)
    await asyncio.wait_for(waiting, 5)
    assert share.room("a", 90) is None


async def test_forgetting_wakes_everybody() -> None:
    budget = Budget(200)
    budget.records.take(100)
    with pytest.raises(NoRoom):
        budget.records.room("a")
    waiting = asyncio.create_task(budget.records.turn("a"))
    await asyncio.sleep(0)
    assert not waiting.done()
    budget.forget_waiting()
    await asyncio.wait_for(waiting, 5)


def test_a_lease_ends_once_and_with_its_holder() -> None:
    share = Share(100)
    lease = Lease(share, 30)
    assert share.held == 30
    lease.end()
    lease.end()
    assert share.held == 0
    lease = Lease(share, 30)
    del lease
    gc.collect()
    assert share.held == 0

"""The embedding pool: order, memory, pace and admission."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import ClassVar

import msgspec
import pytest

from tests.support.builders import TextEmbedder
from tests.support.clock import HandClock
from worker.core.novelty import unit_mean
from worker.embed.cores import LEAD_SECONDS
from worker.embed.embedder import Embedding
from worker.embed.pool import LEAD_SHARE, EmbeddingPool


class SlowEmbedder(TextEmbedder):
    """Waits in `embed` until the test lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def embed(self, text: str, objective: bool = False) -> Embedding:
        self.entered.set()
        assert self.go_on.wait(10)
        return super().embed(text, objective)


async def embedded(pool: EmbeddingPool, *texts: str) -> Embedding:
    """Return the embedding of texts that are not all remembered."""
    found = pool.embed(*texts)
    assert isinstance(found, asyncio.Future)
    return await found


@pytest.fixture
def slow() -> Iterator[tuple[SlowEmbedder, EmbeddingPool, HandClock]]:
    embedder, clock = SlowEmbedder(), HandClock(50.0)
    pool = EmbeddingPool(embedder, clock=clock)
    yield embedder, pool, clock
    embedder.go_on.set()
    pool.close()


Slow = tuple[SlowEmbedder, EmbeddingPool, HandClock]


def test_texts_are_embedded_one_after_the_other_in_order() -> None:
    embedder = TextEmbedder()
    pool = EmbeddingPool(embedder)
    texts = [f"text {n}" for n in range(50)]
    futures = [pool.submit(text) for text in texts]
    results = [future.result(10) for future in futures]
    assert embedder.texts == texts
    assert [r.vector.tolist() for r in results] == [TextEmbedder().embed(text).vector.tolist() for text in texts]
    assert pool.identity is embedder.identity


def test_busy_seconds_tells_how_long_the_running_embedding_takes(slow: Slow) -> None:
    embedder, pool, clock = slow
    assert pool.busy_seconds() == 0.0
    first, second = pool.submit("one"), pool.submit("two")
    assert embedder.entered.wait(10)
    clock.now += 61
    assert pool.busy_seconds() == 61.0
    embedder.go_on.set()
    first.result(10)
    second.result(10)
    deadline = time.monotonic() + 10
    while pool.busy_seconds() and time.monotonic() < deadline:  # the future is done a moment before the thread
        time.sleep(0.001)
    assert pool.busy_seconds() == 0.0


class Pausing(TextEmbedder):
    """Takes two texts at a time, but wants none for as long as the test says."""

    side_by_side = 2
    permitted = 1.5

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def pause(self, texts: int) -> float:
        return self.seconds


class SlowPair(Pausing):
    """Waits for each text until the test lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = {"objective": threading.Event(), "steps": threading.Event()}

    def embed(self, text: str, objective: bool = False) -> Embedding:
        assert self.go_on[text].wait(10)
        return super().embed(text, objective)


async def test_no_text_is_admitted_while_one_has_all_cores() -> None:
    embedder = Pausing()
    pool = EmbeddingPool(embedder)
    assert pool.permitted == 1.5
    await asyncio.wait_for(pool.admission(), 5)
    embedder.seconds = 60.0
    admission = asyncio.create_task(pool.admission())
    await asyncio.sleep(0.02)
    assert not admission.done()
    await embedded(pool, "text")
    await asyncio.sleep(0.02)
    assert not admission.done()  # another one has them now
    embedder.seconds = 0.0
    await embedded(pool, "another text")
    await asyncio.wait_for(admission, 5)


async def test_a_trace_of_two_texts_takes_the_place_of_two() -> None:
    embedder = SlowPair()
    pool = EmbeddingPool(embedder)
    await asyncio.wait_for(pool.admission(), 5)
    pair = pool.embed("objective", "steps")
    assert isinstance(pair, asyncio.Future)
    admission = asyncio.create_task(pool.admission())
    await asyncio.sleep(0.02)
    assert not admission.done()
    embedder.go_on["objective"].set()
    await asyncio.wait_for(admission, 5)
    assert not pair.done()
    embedder.go_on["steps"].set()
    await asyncio.wait_for(pair, 5)


def test_busy_seconds_ends_with_a_failure_too() -> None:
    pool = EmbeddingPool(TextEmbedder(), clock=HandClock(50.0))
    assert pool.submit("poison").exception(10) is not None
    assert pool.submit("good").exception(10) is None
    pool.close()
    assert pool.busy_seconds() == 0.0


def test_the_next_text_may_wait_until_the_embedder_is_nearly_done(slow: Slow) -> None:
    embedder, pool, clock = slow
    assert pool.pause() == 0.0
    first = pool.submit("x" * 100)
    assert embedder.entered.wait(10)
    assert pool.pause() == 0.0  # nothing is known yet
    clock.now += 10
    embedder.go_on.set()
    first.result(10)  # 0.1 s a character
    embedder.go_on.clear()
    embedder.entered.clear()
    second = pool.submit("y" * 50)
    assert embedder.entered.wait(10)
    assert pool.pause() == pytest.approx(5 * (1 - LEAD_SHARE) - LEAD_SECONDS)
    clock.now += 2
    assert pool.pause() == pytest.approx(5 * (1 - LEAD_SHARE) - LEAD_SECONDS - 2)
    waiting = pool.submit("z" * 10)
    assert pool.pause() == pytest.approx(6 * (1 - LEAD_SHARE) - LEAD_SECONDS - 2)
    waiting.cancel()
    assert pool.pause() == pytest.approx(5 * (1 - LEAD_SHARE) - LEAD_SECONDS - 2)
    clock.now += 60  # longer than expected
    assert pool.pause() == 0.0
    clock.now = 0.0  # a running text would now have all its time before it
    embedder.go_on.set()
    second.result(10)
    deadline = time.monotonic() + 10
    while pool.pause() and time.monotonic() < deadline:  # the future is done a moment before it is counted off
        time.sleep(0.001)
    assert pool.pause() == 0.0


def test_close_drops_what_waits_and_does_not_wait_itself(slow: Slow) -> None:
    embedder, pool, _ = slow
    running, waiting = pool.submit("one"), pool.submit("two")
    assert embedder.entered.wait(10)
    pool.close()
    with pytest.raises(CancelledError):
        waiting.result(10)
    assert not running.done()
    embedder.go_on.set()
    assert running.result(10).truncated is False
    assert embedder.texts == ["one"]


async def test_as_many_texts_are_admitted_as_may_be_in_flight(slow: Slow) -> None:
    embedder, pool, _ = slow
    futures = []
    for text in ("one", "two"):
        await asyncio.wait_for(pool.admission(), 5)
        futures.append(pool.embed(text))
    third = asyncio.create_task(pool.admission())
    await asyncio.sleep(0.02)
    assert not third.done()
    embedder.go_on.set()
    await asyncio.wait_for(third, 5)
    for found in futures:
        assert isinstance(found, asyncio.Future)
        await found


class Concurrent(SlowEmbedder):
    """An embedder that takes three texts at a time."""

    side_by_side = permitted = 3

    def __init__(self) -> None:
        super().__init__()
        self.at_once = threading.Barrier(3)

    def embed(self, text: str, objective: bool = False) -> Embedding:
        self.at_once.wait(10)
        return super().embed(text, objective)

    def pause(self, texts: int) -> float:
        return 0.0


async def test_a_concurrent_embedder_gets_as_many_texts_at_a_time_as_it_takes() -> None:
    embedder, clock = Concurrent(), HandClock(50.0)
    pool = EmbeddingPool(embedder, in_flight=50, clock=clock)
    futures = []
    for number in range(3):
        await asyncio.wait_for(pool.admission(), 5)
        futures.append(pool.embed(f"text {number}"))
        clock.now += 1
    assert await asyncio.to_thread(embedder.entered.wait, 10)
    assert 1 <= pool.busy_seconds() <= 3
    fourth = asyncio.create_task(pool.admission())
    await asyncio.sleep(0.02)
    assert not fourth.done()
    embedder.go_on.set()
    await asyncio.wait_for(fourth, 5)
    for number, found in enumerate(futures):
        assert isinstance(found, asyncio.Future)
        assert (await found).vector.tolist() == TextEmbedder().embed(f"text {number}").vector.tolist()


async def test_a_failed_text_frees_its_place_and_a_remembered_one_takes_none() -> None:
    pool = EmbeddingPool(TextEmbedder(), remembered=2, in_flight=1)
    with pytest.raises(RuntimeError, match="this text"):
        await embedded(pool, "poison")
    await asyncio.wait_for(pool.admission(), 5)
    await embedded(pool, "good")
    for _ in range(3):
        await asyncio.wait_for(pool.admission(), 5)
        assert isinstance(pool.embed("good"), Embedding)


async def test_a_text_is_admitted_before_the_pause_is_over_when_the_embedder_is_done(slow: Slow) -> None:
    embedder, pool, clock = slow
    learnt = pool.embed("x" * 100)
    assert isinstance(learnt, asyncio.Future)
    assert await asyncio.to_thread(embedder.entered.wait, 10)
    clock.now += 100_000  # so a text of 100 characters takes a day
    embedder.go_on.set()
    await learnt
    embedder.go_on.clear()
    pool.embed("y" * 100)
    assert pool.pause() > 1000
    admitted = asyncio.create_task(pool.admission())
    await asyncio.sleep(0.02)
    assert not admitted.done()
    embedder.go_on.set()
    await asyncio.wait_for(admitted, 5)


def test_equal_texts_are_embedded_once_and_a_failure_is_not_remembered() -> None:
    class Counting(TextEmbedder):
        calls: ClassVar[list[str]] = []

        def embed(self, text: str, objective: bool = False) -> Embedding:
            self.calls.append(text)
            if text == "bad" and self.calls.count("bad") == 1:
                raise ValueError("once")
            return super().embed(text, objective)

    pool = EmbeddingPool(Counting(), remembered=2)

    def embedded(text: str) -> Embedding:
        found = pool.submit(text)
        return found if isinstance(found, Embedding) else found.result(5)

    assert embedded("a").vector is embedded("a").vector
    assert pool.hits == 1
    with pytest.raises(ValueError, match="once"):
        embedded("bad")
    assert embedded("bad").vector.shape == (8,)
    embedded("c")  # the oldest of three is forgotten
    embedded("a")
    assert pool.hits == 1
    assert [text for text in Counting.calls if text == "a"] == ["a", "a"]


async def test_a_trace_of_several_texts_is_their_mean_and_each_text_is_remembered() -> None:
    embedder = TextEmbedder()
    pool = EmbeddingPool(embedder, remembered=8, in_flight=1)
    vector, truncated, _ = await embedded(pool, "objective", "long text")
    parts = [TextEmbedder().embed(text).vector for text in ("objective", "long text")]
    assert vector.tobytes() == unit_mean(parts).tobytes()
    assert truncated
    await asyncio.wait_for(pool.admission(), 5)
    assert not (await embedded(pool, "objective", "other text")).truncated
    again = pool.embed("objective", "long text")
    assert isinstance(again, Embedding)
    assert again.vector.tobytes() == vector.tobytes()
    assert embedder.texts == ["objective", "long text", "other text"]


async def test_an_objective_is_told_apart_from_an_equal_text_and_its_cut_is_counted_apart() -> None:
    embedder = TextEmbedder()
    embedder.identity = msgspec.structs.replace(embedder.identity, embed_text="objective", objective_tokens=512)
    pool = EmbeddingPool(embedder, remembered=8)
    cuts = []
    for texts in (("long", "short"), ("short", "long"), ("long", "long"), ("long",), ("short",)):
        found = pool.embed(*texts)
        embedding = found if isinstance(found, Embedding) else await found
        cuts.append((embedding.objective_truncated, embedding.truncated))
    assert cuts == [(True, False), (False, True), (True, True), (True, False), (False, False)]
    assert embedder.texts == ["long", "short", "short", "long"], "each once as an objective, and once as a text"


async def test_a_trace_fails_with_any_of_its_texts_and_frees_its_place() -> None:
    pool = EmbeddingPool(TextEmbedder(), remembered=8, in_flight=1)
    for texts in (("good", "poison"), ("poison", "good"), ("poison 1", "poison 2")):
        with pytest.raises(RuntimeError, match="this text"):
            await embedded(pool, *texts)
        await asyncio.wait_for(pool.admission(), 5)

"""The embedding pool: order, memory and admission."""

import asyncio
import threading
from collections.abc import AsyncIterator

import msgspec
import pytest

from tests.support.builders import TextEmbedder
from tests.support.clock import HandClock, until
from worker.core.novelty import unit_mean
from worker.embed.embedder import Embedding, Reading
from worker.embed.pool import EmbeddingPool


class SlowEmbedder(TextEmbedder):
    """Waits in `infer` until the test lets it go on."""

    def __init__(self, at_once: int = 1) -> None:
        super().__init__()
        self.at_once = at_once
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def infer(self, reading: Reading) -> Embedding:
        self.entered.set()
        assert self.go_on.wait(10)
        return super().infer(reading)


def submitted(pool: EmbeddingPool, *texts: str) -> asyncio.Future[Embedding]:
    """Submit a trace whose texts are not all remembered."""
    future = pool.embed(*texts)
    assert isinstance(future, asyncio.Future)
    return future


async def full(pool: EmbeddingPool) -> asyncio.Task[None]:
    """Return the admission of the next text, which has to wait."""
    admission = asyncio.create_task(pool.admission())
    await asyncio.sleep(0.02)
    assert not admission.done()
    return admission


@pytest.fixture
async def slow() -> AsyncIterator[tuple[SlowEmbedder, EmbeddingPool, HandClock]]:
    embedder, clock = SlowEmbedder(), HandClock(50.0)
    pool = EmbeddingPool(embedder, clock=clock)
    yield embedder, pool, clock
    embedder.go_on.set()
    pool.close()


Slow = tuple[SlowEmbedder, EmbeddingPool, HandClock]


async def test_texts_are_embedded_one_after_the_other_in_order() -> None:
    embedder = TextEmbedder()
    pool = EmbeddingPool(embedder)
    texts = [f"text {n}" for n in range(50)]
    results = await asyncio.gather(*[submitted(pool, text) for text in texts])
    assert embedder.texts == texts
    assert [r.vector.tolist() for r in results] == [TextEmbedder().embed(text).vector.tolist() for text in texts]
    assert pool.identity is embedder.identity


async def test_busy_seconds_tells_how_long_the_running_embedding_takes(slow: Slow) -> None:
    embedder, pool, clock = slow
    assert pool.busy_seconds() == 0.0
    futures = [submitted(pool, "one"), submitted(pool, "two")]
    assert await asyncio.to_thread(embedder.entered.wait, 10)
    clock.now += 61
    assert pool.busy_seconds() == 61.0
    embedder.go_on.set()
    await asyncio.gather(*futures)
    await until(lambda: not pool.busy_seconds())


async def test_busy_seconds_ends_with_a_failure_too() -> None:
    pool = EmbeddingPool(TextEmbedder(), clock=HandClock(50.0))
    with pytest.raises(RuntimeError, match="this text"):
        await submitted(pool, "poison")
    await submitted(pool, "good")
    pool.close()
    await until(lambda: not pool.busy_seconds())


async def test_close_drops_what_waits_and_does_not_wait_itself(slow: Slow) -> None:
    embedder, pool, _ = slow
    running, waiting = submitted(pool, "one"), submitted(pool, "two")
    assert await asyncio.to_thread(embedder.entered.wait, 10)
    pool.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not running.done()
    embedder.go_on.set()
    assert (await running).truncated is False
    assert embedder.texts == ["one"]


@pytest.mark.parametrize("at_once", [1, 3])
async def test_as_many_texts_are_admitted_as_are_embedded_at_once(at_once: int) -> None:
    embedder, clock = SlowEmbedder(at_once), HandClock(50.0)
    pool = EmbeddingPool(embedder, clock=clock)
    futures = []
    for number in range(at_once):
        await asyncio.wait_for(pool.admission(), 5)
        futures.append(submitted(pool, f"text {number}"))
    await until(lambda: len(pool._started) == at_once)  # all of them run
    clock.now += 1
    assert pool.busy_seconds() == 1
    admission = await full(pool)
    embedder.go_on.set()
    await asyncio.wait_for(admission, 5)
    for number, future in enumerate(futures):
        assert (await future).vector.tolist() == TextEmbedder().embed(f"text {number}").vector.tolist()
    pool.close()


class SlowPair(TextEmbedder):
    """Embeds two texts at once, and waits for each until the test lets it go on."""

    at_once = 2

    def __init__(self) -> None:
        super().__init__()
        self.go_on = {"objective": threading.Event(), "steps": threading.Event()}

    def infer(self, reading: Reading) -> Embedding:
        assert self.go_on[reading.content].wait(10)
        return super().infer(reading)


async def test_a_trace_of_two_texts_takes_the_place_of_two() -> None:
    embedder = SlowPair()
    pool = EmbeddingPool(embedder)
    await asyncio.wait_for(pool.admission(), 5)
    pair = submitted(pool, "objective", "steps")
    admission = await full(pool)
    embedder.go_on["objective"].set()
    await asyncio.wait_for(admission, 5)
    assert not pair.done()
    embedder.go_on["steps"].set()
    await asyncio.wait_for(pair, 5)


async def test_a_failed_text_frees_its_place_and_a_remembered_one_takes_none() -> None:
    pool = EmbeddingPool(TextEmbedder(), remembered=2)
    with pytest.raises(RuntimeError, match="this text"):
        await submitted(pool, "poison")
    await asyncio.wait_for(pool.admission(), 5)
    await submitted(pool, "good")
    for _ in range(3):
        await asyncio.wait_for(pool.admission(), 5)
        assert isinstance(pool.embed("good"), Embedding)


async def test_equal_texts_are_embedded_once_and_a_failure_is_not_remembered() -> None:
    embedder = TextEmbedder()
    pool = EmbeddingPool(embedder, remembered=2)

    async def embedded(text: str) -> Embedding:
        embedding = pool.embed(text)
        return embedding if isinstance(embedding, Embedding) else await embedding

    assert (await embedded("a")).vector is (await embedded("a")).vector
    for _ in range(2):
        with pytest.raises(RuntimeError, match="this text"):
            await embedded("poison")
    for text in ("b", "c", "a"):  # the oldest of three is forgotten
        await embedded(text)
    assert pool.hits == 1
    assert [embedder.texts.count(text) for text in ("poison", "a")] == [2, 2]


class ReadsFour(SlowEmbedder):
    """Reads four characters of a text, and fails to read "!"."""

    def read(self, text: str, objective: bool = False) -> Reading:
        if text == "!":
            raise ValueError("unreadable")
        return super().read(text[:4], objective)


async def test_texts_that_the_model_reads_alike_are_embedded_once() -> None:
    embedder = ReadsFour()
    pool = EmbeddingPool(embedder, remembered=8)
    first = submitted(pool, "task: one end")
    assert pool.embed("task of others") is first  # while it is still being embedded
    embedder.go_on.set()
    vector = (await first).vector
    again = pool.embed("task")
    assert isinstance(again, Embedding)
    assert again.vector is vector
    assert (embedder.texts, pool.hits) == (["task"], 2)


async def test_a_text_that_cannot_be_read_fails_alone() -> None:
    embedder = ReadsFour()
    embedder.go_on.set()
    pool = EmbeddingPool(embedder, remembered=8)
    for _ in range(2):
        with pytest.raises(ValueError, match="unreadable"):
            await submitted(pool, "!")
        await asyncio.wait_for(pool.admission(), 5)
    assert pool.hits == 0


async def test_a_trace_of_several_texts_is_their_mean_and_each_text_is_remembered() -> None:
    embedder = TextEmbedder()
    pool = EmbeddingPool(embedder, remembered=8)
    vector, truncated, _ = await submitted(pool, "objective", "long text")
    parts = [TextEmbedder().embed(text).vector for text in ("objective", "long text")]
    assert vector.tobytes() == unit_mean(parts).tobytes()
    assert truncated
    await asyncio.wait_for(pool.admission(), 5)
    assert not (await submitted(pool, "objective", "other text")).truncated
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
        part = pool.embed(*texts)
        embedding = part if isinstance(part, Embedding) else await part
        cuts.append((embedding.objective_truncated, embedding.truncated))
    assert cuts == [(True, False), (False, True), (True, True), (True, False), (False, False)]
    assert embedder.texts == ["long", "short", "short", "long"], "each once as an objective, and once as a text"


async def test_a_trace_fails_with_any_of_its_texts_and_frees_its_place() -> None:
    pool = EmbeddingPool(TextEmbedder(), remembered=8)
    for texts in (("good", "poison"), ("poison", "good"), ("poison 1", "poison 2")):
        with pytest.raises(RuntimeError, match="this text"):
            await submitted(pool, *texts)
        await asyncio.wait_for(pool.admission(), 5)

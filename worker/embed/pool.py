"""The embedding pool: the model's threads, and admission to them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from worker.core.novelty import unit_mean
from worker.core.records import EmbedderIdentity
from worker.core.trace import is_objective
from worker.embed.cores import LEAD_SECONDS
from worker.embed.embedder import ConcurrentEmbedder, Embedder, Embedding, ServedEmbedder, embed_or_diagnose

WEIGHT: Final = 0.1
"""Weight of the newest text in the running mean: the estimate follows a change of speed within about 20 texts."""


class Pace:
    """Estimates time as proportional to a text's length, up to the time of texts truncated at the token limit.

    A forward pass is nearly linear up to a few hundred tokens (21 MFLOP per token, and attention 9 kFLOP more for each
    token of length), and texts have about the same number of tokens per character.
    """

    def __init__(self) -> None:
        self._a_character = 0.0
        self._cut = math.inf

    def learn(self, characters: int, truncated: bool, seconds: float) -> None:
        """Update the estimate with the time of one text."""
        if truncated:
            self._cut = seconds if math.isinf(self._cut) else _moved(self._cut, seconds)
        else:
            each = seconds / max(1, characters)
            self._a_character = _moved(self._a_character, each) if self._a_character else each

    def expect(self, characters: int) -> float:
        """Return how long a text of this length will take, s; 0.0 while nothing is known."""
        if not self._a_character:
            return 0.0 if math.isinf(self._cut) else self._cut
        return min(characters * self._a_character, self._cut)


def _moved(mean: float, value: float) -> float:
    return mean + WEIGHT * (value - mean)


LEAD_SHARE: Final = 0.35
"""With a single thread, the next text is admitted LEAD_SECONDS plus this part of the expected time before the thread
should be done. With less, the embedder idles more often than with two texts submitted at a time."""

_OBJECTIVE: Final = b"objective"
"""Separates the hash of an objective from the hash of an equal text, which may be truncated earlier."""


class EmbeddingPool:
    """Embeds off the event loop, in the order of submission; equal texts once.

    It has a thread for each text that the embedder takes at once; a ServedEmbedder needs none. Fleets resend and retry,
    so the last `remembered` texts are found by their hash, with the same bits. With one thread, `in_flight` is the
    number of traces that may be admitted but not embedded; with several, it is one for each thread.
    """

    def __init__(
        self,
        embedder: Embedder,
        remembered: int = 0,
        in_flight: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._embedder = embedder
        self._remembered = remembered
        self._served = embedder if isinstance(embedder, ServedEmbedder) else None
        self._concurrent = embedder if isinstance(embedder, ConcurrentEmbedder) and embedder.side_by_side > 1 else None
        self._most = in_flight
        if self._served is not None:
            self._most = self._served.admitted
        elif self._concurrent is not None:
            self._most = self._concurrent.side_by_side
        self._known: OrderedDict[bytes, Future[Embedding]] = OrderedDict()
        self._clock = clock
        self._executor = ThreadPoolExecutor(1 if self._concurrent is None else self._most, thread_name_prefix="embed")
        self._started: list[float] = []  # start times of the running embeddings
        self._pace = Pace()
        self._lock = threading.Lock()
        self._texts = 0  # submitted and not done
        self._expected = 0.0  # their expected time, s
        self._in_flight = 0
        self._freed = asyncio.Event()
        self.hits = 0  # remembered texts, since the start

    @property
    def permitted(self) -> float:
        """How many texts may run at once under load: a mean of the latest texts."""
        if self._served is not None:
            return self._most
        return 1 if self._concurrent is None else self._concurrent.permitted

    @property
    def identity(self) -> EmbedderIdentity:
        """Identity of the embedder behind the pool."""
        return self._embedder.identity

    async def admission(self) -> None:
        """Wait until the next text should be submitted. One task at a time may wait.

        A trace's evaluation starts when it leaves the queue. So the next one leaves when a share of the cores is free,
        or when the text that has all of them is nearly done.
        """
        while (full := self._full()) or (pause := self.pause()) > 0:
            self._freed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if full else pause):
                    await self._freed.wait()

    def _full(self) -> bool:
        return self._in_flight >= self._most or (self._concurrent is not None and self._texts >= self._most)

    def embed(self, *texts: str) -> asyncio.Future[Embedding] | Embedding:
        """Return the embedding of a trace: the unit mean of its `embedded_texts`. Call this on the event loop.

        If all texts are remembered, it returns the embedding; otherwise a future, which fails as `submit`'s, and the
        trace is in flight until it is done.
        """
        view = self.identity.embed_text
        found = [self.submit(text, is_objective(index, view)) for index, text in enumerate(texts)]
        embedded = [part for part in found if isinstance(part, Embedding)]
        if len(embedded) == len(found):
            return mean_of_parts(embedded)
        self._in_flight += 1
        parts = [asyncio.wrap_future(part) if isinstance(part, Future) else part for part in found]
        for part in parts:
            if isinstance(part, asyncio.Future):
                part.add_done_callback(lambda _: self._freed.set())
        future = parts[0] if isinstance(parts[0], asyncio.Future) and len(parts) == 1 else _together(parts)
        future.add_done_callback(lambda _: self._release())
        return future

    def submit(self, text: str, objective: bool = False) -> Future[Embedding] | Embedding:
        """Return a text's embedding if it is remembered, otherwise queue the text. Call this from one thread.

        The future fails with the embedder's exception, or ModelError if the model is broken. Equal texts may share it.
        """
        if not self._remembered:
            return self._queue(text, objective)
        key = hashlib.blake2b(text.encode(), digest_size=16, person=_OBJECTIVE if objective else b"").digest()
        future = self._known.get(key)
        if future is not None and not future.cancelled() and not (future.done() and future.exception() is not None):
            self._known.move_to_end(key)
            self.hits += 1
            return future.result() if future.done() else future
        future = self._known[key] = self._queue(text, objective)
        if len(self._known) > self._remembered:
            self._known.popitem(last=False)
        return future

    def busy_seconds(self) -> float:
        """Return the age of the oldest running embedding, s; 0.0 when the embedder is idle."""
        with self._lock:
            return self._clock() - min(self._started) if self._started else 0.0

    def pause(self) -> float:
        """Return how long the next text may stay outside while the one before it is embedded, s."""
        if self._served is not None:
            return 0.0
        if self._concurrent is not None:
            return self._concurrent.pause(self._texts)
        with self._lock:
            expected = self._expected
        return max(0.0, expected - self.busy_seconds() - LEAD_SHARE * expected - LEAD_SECONDS)

    def close(self) -> None:
        """Drop queued texts and let the threads end."""
        if self._served is not None:
            self._served.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _release(self) -> None:
        self._in_flight -= 1
        self._freed.set()

    def _queue(self, text: str, objective: bool) -> Future[Embedding]:
        if self._served is not None:
            return self._served.submit(text, objective)
        expected = self._pace.expect(len(text))
        self._count(1, expected)
        future = self._executor.submit(self._embed, text, objective)
        future.add_done_callback(lambda _: self._count(-1, -expected))
        return future

    def _count(self, texts: int, seconds: float) -> None:
        with self._lock:  # futures complete in the embedder's threads
            self._texts += texts
            self._expected += seconds

    def _embed(self, text: str, objective: bool) -> Embedding:
        started = self._clock()
        with self._lock:
            self._started.append(started)
        try:
            embedding = embed_or_diagnose(self._embedder, text, objective)
            if not embedding.objective_truncated:  # its length and limit say nothing about other texts
                self._pace.learn(len(text), embedding.truncated, self._clock() - started)
            return embedding
        finally:
            with self._lock:
                self._started.remove(started)


def mean_of_parts(parts: Sequence[Embedding]) -> Embedding:
    """Return the embedding of a trace from its parts. Raises ValueError if they cancel each other out."""
    if len(parts) == 1:
        return parts[0]
    return Embedding(
        unit_mean([part.vector for part in parts]),
        any(part.truncated for part in parts),
        any(part.objective_truncated for part in parts),
    )


def embed_trace(embedder: Embedder, texts: Sequence[str], view: str) -> Embedding:
    """Embed a trace from its `embedded_texts` in this view, as the worker does; fails as `embed_or_diagnose` does."""
    return mean_of_parts(
        [embed_or_diagnose(embedder, text, is_objective(index, view)) for index, text in enumerate(texts)]
    )


def _together(parts: Sequence[asyncio.Future[Embedding] | Embedding]) -> asyncio.Task[Embedding]:
    async def wait() -> Embedding:
        await asyncio.gather(*[part for part in parts if isinstance(part, asyncio.Future)])
        return mean_of_parts([part.result() if isinstance(part, asyncio.Future) else part for part in parts])

    return asyncio.get_running_loop().create_task(wait())

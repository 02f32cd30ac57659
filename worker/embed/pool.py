"""The embedding pool: the model's threads, and admission to them."""

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from worker.core.records import EmbedderIdentity
from worker.core.trace import is_objective
from worker.embed.embedder import Embedder, Embedding, Reading, embed_or_diagnose, mean_of_parts
from worker.embed.http_embedder import HttpEmbedder


class EmbeddingPool:
    """Embeds off the event loop, in the order of submission; equal inputs of the model once.

    A model on this machine has a thread for each text that it embeds at once; a service needs none. As many
    texts are admitted. Fleets retry, and repeat tasks whose traces begin alike: so the embeddings of the last
    `remembered` readings are kept.
    """

    def __init__(self, embedder: Embedder, remembered: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._embedder = embedder
        self._remembered = remembered
        self._service = embedder if isinstance(embedder, HttpEmbedder) else None
        self.at_once = embedder.at_once
        self._known: OrderedDict[bytes, asyncio.Future[Embedding]] = OrderedDict()
        self._clock = clock
        self._executor = ThreadPoolExecutor(self.at_once, thread_name_prefix="embed")  # its threads start with the work
        self._started: dict[int, float] = {}  # start times of the running embeddings, by thread
        self._texts = 0  # submitted and not done
        self._freed = asyncio.Event()
        self.hits = 0  # remembered readings, since the start

    @property
    def identity(self) -> EmbedderIdentity:
        """Identity of the embedder behind the pool."""
        return self._embedder.identity

    async def admission(self) -> None:
        """Wait until the next text can be embedded at once. One task at a time may wait.

        A trace's evaluation starts when it leaves the queue, so it waits there and not here.
        """
        while self._texts >= self.at_once:
            self._freed.clear()
            await self._freed.wait()

    def embed(self, *texts: str) -> asyncio.Future[Embedding] | Embedding:
        """Return the embedding of a trace: the unit mean of its `embedded_texts`. Call this on the event loop.

        If all inputs are remembered, it returns the embedding; otherwise a future, which fails with the embedder's
        exception, or with ModelError if the model is broken.
        """
        view = self.identity.embed_text
        parts = [self._find_or_submit(text, is_objective(index, view)) for index, text in enumerate(texts)]
        if len(parts) == 1:
            return parts[0]
        embedded = [part for part in parts if isinstance(part, Embedding)]
        return mean_of_parts(embedded) if len(embedded) == len(parts) else _together(parts)

    def _find_or_submit(self, text: str, objective: bool) -> asyncio.Future[Embedding] | Embedding:
        try:
            reading = self._embedder.read(text, objective)
        except Exception:
            return self._submit(text, objective, None)  # it fails again there, and the cause is found
        future = self._known.get(reading.key)
        if future is not None and not future.cancelled() and not (future.done() and future.exception() is not None):
            self._known.move_to_end(reading.key)
            self.hits += 1
            return future.result() if future.done() else future
        future = self._submit(text, objective, reading)
        if self._remembered:
            self._known[reading.key] = future
            if len(self._known) > self._remembered:
                self._known.popitem(last=False)
        return future

    def _submit(self, text: str, objective: bool, reading: Reading | None) -> asyncio.Future[Embedding]:
        self._texts += 1
        if self._service is not None and reading is not None:
            future = asyncio.wrap_future(self._service.submit(reading))
        else:
            future = asyncio.get_running_loop().run_in_executor(self._executor, self._embed, text, objective, reading)
        future.add_done_callback(self._release)
        return future

    def _release(self, _: asyncio.Future[Embedding]) -> None:
        self._texts -= 1
        self._freed.set()

    def _embed(self, text: str, objective: bool, reading: Reading | None) -> Embedding:
        thread = threading.get_ident()
        self._started[thread] = self._clock()
        try:
            return embed_or_diagnose(self._embedder, text, objective, reading)
        finally:
            del self._started[thread]

    def busy_seconds(self) -> float:
        """Return the age of the oldest running embedding, s; 0.0 when the embedder is idle."""
        oldest = min(list(self._started.values()), default=None)
        return 0.0 if oldest is None else self._clock() - oldest

    def close(self) -> None:
        """Drop queued texts and let the threads end."""
        if self._service is not None:
            self._service.close()
        self._executor.shutdown(wait=False, cancel_futures=True)


def _together(parts: Sequence[asyncio.Future[Embedding] | Embedding]) -> asyncio.Task[Embedding]:
    async def wait() -> Embedding:
        await asyncio.gather(*[part for part in parts if isinstance(part, asyncio.Future)])
        return mean_of_parts([part.result() if isinstance(part, asyncio.Future) else part for part in parts])

    return asyncio.get_running_loop().create_task(wait())

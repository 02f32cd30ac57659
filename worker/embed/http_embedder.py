"""KP_EMBEDDER=http: a model behind a service with OpenAI's POST /v1/embeddings.

Texts that arrive while all request slots are in use share the next request. After a failure, nothing is sent until the
service embeds the probes, a few fixed texts, to the same vectors as before. So an outage only delays texts, and a text
fails alone only if the service works otherwise.

A gateway may answer the probes from its cache and reject everything else. So before a text fails alone, the service
must embed a text that is new to it, and of many texts that fail in a row only the first few fail alone. The others are
held and retried from time to time, until the service embeds one of the callers' texts.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import math
import random
import threading
import time
import uuid
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import numpy as np

from worker.config.settings import Settings, is_loopback
from worker.config.token import Token, TokenError
from worker.core.changelog import PROBE_DISTANCE, Probes, probe_distance
from worker.core.novelty import Vector
from worker.core.records import EmbedderIdentity
from worker.core.terminal import number_of
from worker.embed.embedder import MAX_CHARS, OFFICIAL_NAME, Embedding, ModelError, ServiceUnavailableError
from worker.embed.embedding_service import EmbeddingService, ServiceError
from worker.embed.reference_texts import CHECK_TOKENS, TEXTS, recorded_vectors

log = logging.getLogger(__name__)

Result = TypeVar("Result")

MOST_TEXTS: Final = 32
"""Maximum texts per request: the default limit of TEI (--max-client-batch-size), and Infinity's batch."""

TRIES: Final = 5  # failures in a row after which a single text is to blame, if the service embeds the probes after each

REFUSED_TRIES: Final = 2
"""The same for a text that the service rejects (400, 413, 422): one retry, as a gateway may reject it by mistake."""

MOST_BLAMED: Final = 3
"""Texts that may fail alone in a row while the service embeds no other. Further ones are held."""

FIRST_PAUSE_SECONDS: Final = 0.5
LONGEST_PAUSE_SECONDS: Final = 10.0
"""Pauses between attempts: doubled each time, less up to half at random."""

LONGEST_ASKED_SECONDS: Final = 60.0
"""A service that asks for a longer pause (Retry-After) is tried again after this time."""

START_SECONDS: Final = 15.0  # longest time of the checks at startup

RECHECK_SECONDS: Final = 300.0
"""How often the probes are compared while texts are embedded: a load balancer may switch to another model unnoticed."""

SLOW_SECONDS: Final = 10.0  # a request unanswered for this long makes the worker not ready

PROBES: Final = tuple(TEXTS[place] for place in (0, 3, 11, 12))
"""Fixed texts of 11, 60 and 200 tokens, and a Spanish one: they differ in length and in how they are tokenised."""

REFERENCE_DISTANCE: Final = 4e-3
"""Maximum distance of a vector of all-MiniLM-L6-v2 from the recorded one, for scores within 1e-3 of the demo's: fp16
has .0022 at most, with scores .0002 off; bf16 .019 and .002 (docs/models.md)."""

LONG_TEXT: Final = TEXTS[-1]  # over 512 tokens: shows whether the service truncates, and for all-MiniLM-L6-v2 where


@dataclass(slots=True, eq=False)
class _Text:
    text: str
    may_wait: bool  # its caller continues with other texts meanwhile
    future: Future[Embedding] = field(default_factory=Future)
    failed_at: float = math.inf  # when it was first held, s of the monotonic clock


class HttpEmbedder:
    """Embeds through a service, with several requests at a time, in an event loop in its own thread.

    The constructor checks the service for at most START_SECONDS. It raises ServiceUnavailableError, or ModelError if
    waiting does not help: the settings are wrong, or the model is not the one that they name.
    """

    def __init__(self, settings: Settings) -> None:
        if settings.embedder_url is None or settings.model is None:
            raise AssertionError("this is a bug: the settings were not checked")
        url, self._requests = settings.embedder_url, settings.embed_requests
        self.admitted = (self._requests + 1) * MOST_TEXTS
        """Traces to admit at a time: enough for all requests, and to fill the next one."""
        self._model = settings.model
        self._waiting: deque[_Text] = deque()
        self._held: deque[_Text] = deque()
        self._refusal = ""  # how the last held text failed; "": none is held
        self._asking_again: asyncio.Task[None] | None = None
        self._embedded_at = -math.inf  # when the service last embedded a caller's text
        self._blamed = 0  # texts that have failed alone since then
        self._woken = False  # the loop is about to look at the waiting texts
        self._tasks: set[asyncio.Task[None]] = set()
        self._sent: set[float] = set()  # when the open requests were sent, s of the monotonic clock
        self._most_texts = MOST_TEXTS
        self._recovering = asyncio.Lock()
        self._problem: str | None = None
        self._broken: ModelError | None = None
        self._failed_probes = 0
        self._proved = 0.0  # when the latest probes that agreed were sent
        token = _token(settings.embedder_token_file, url)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="embedding-service", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        timeout = settings.stuck_seconds
        self.service = self._call(_service(url, self._model, token, timeout, self._requests))
        """The connections, with counters."""
        try:
            self._vectors = self._call(self._check(settings.max_tokens))
        except BaseException:
            self.close()
            raise
        dimensions, view = len(self._vectors[0]), settings.embed_text
        self.identity = EmbedderIdentity(
            self._model, "", dimensions, settings.max_tokens, "http", "unknown", embed_text=view
        )
        self.probes = Probes(self._model, self.identity.key(), tuple(self._vectors))

    # -- for callers in other threads

    def embed(self, text: str, objective: bool = False) -> Embedding:
        """Embed one text once the service can. Raises ServiceError if this text alone fails, or ModelError."""
        return self._add(_Text(text, may_wait=False)).result()

    def submit(self, text: str, objective: bool = False) -> Future[Embedding]:
        """Return the future embedding of a text; it fails as `embed` does. The service truncates objectives like texts.

        A text that fails is held while the cause may lie elsewhere.
        """
        return self._add(_Text(text, may_wait=True))

    def _add(self, text: _Text) -> Future[Embedding]:
        self._waiting.append(text)
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._send_waiting)
        return text.future

    def problem(self) -> str | None:
        """Return why texts are waiting for the service, or None."""
        if self._problem is not None:
            return f"the embedding service at {self.service.url}: {self._problem}"
        if self._refusal:
            return (
                f"the embedding service at {self.service.url} embeds fixed texts, but fails on one text after another; "
                f"something in front of it refuses them: find it. Waiting texts: {len(self._held)}. The last failure: "
                f"{self._refusal}"
            )
        oldest = min(tuple(self._sent), default=None)
        if oldest is None or (seconds := time.monotonic() - oldest) < SLOW_SECONDS:
            return None
        return f"the embedding service at {self.service.url} has not answered for {seconds:.0f} s"

    def counts(self) -> Mapping[str, float]:
        """Return totals since the start: successful requests, failures, texts of the former, and seconds of all."""
        service = self.service
        return {
            "requests": service.requests, "failures": service.failures, "texts": service.texts,
            "seconds": service.seconds,
        }  # fmt: skip

    def close(self) -> None:
        """Drop the waiting texts and close the connections."""
        atexit.unregister(self.close)
        if self._thread.is_alive():
            self._call(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _call(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # -- in the thread of this object

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _close(self) -> None:
        self._waiting.clear()  # otherwise a request that ends would start the next one
        self._held.clear()
        tasks = [*self._tasks, *([] if self._asking_again is None else [self._asking_again])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.service.close()

    async def _check(self, max_tokens: int) -> list[Vector]:
        """Return the vectors of the probes. Raises ServiceUnavailableError, ModelError."""
        try:
            async with asyncio.timeout(START_SECONDS):
                vectors, reported = await self.service.embed(PROBES, None)
                self._proved = time.monotonic()
                self._reported = {reported}
                if reported != self._model:
                    log.warning("%s answers for the model %r, KP_MODEL is %s", self.service.url, reported, self._model)
                self._dimensions = len(vectors[0])
                long_text = await self._long_text()
        except TimeoutError:
            raise ServiceUnavailableError(f"{self.service.url}: no answer in {START_SECONDS:g} s") from None
        except ServiceError as error:
            kind = ModelError if error.configured else ServiceUnavailableError
            raise kind(f"{self.service.url}: {error.about_probes()}") from None
        if self._model.rsplit("/", 1)[-1] == OFFICIAL_NAME:
            self._check_official(vectors, long_text, max_tokens)
        return vectors

    def _check_official(self, vectors: Sequence[Vector], long_text: Vector | None, max_tokens: int) -> None:
        """Compare with the vectors that all-MiniLM-L6-v2 has. Raises ModelError."""
        recorded = dict(zip(TEXTS, recorded_vectors(), strict=True))
        for text, vector in zip(PROBES, vectors, strict=True):
            distance = probe_distance(recorded[text].vector, vector)
            if distance > REFERENCE_DISTANCE and 2 * len(text.split()) <= max_tokens:  # else it may be truncated
                raise ModelError(
                    f"{self.service.url} is asked for {self._model}, but its vector of {text[:40]!r}... differs from "
                    f"that of {OFFICIAL_NAME} by {_words(distance)} (at most {REFERENCE_DISTANCE:g}): it runs another "
                    "model, another pooling or a coarser precision. Correct it, or give the model another name "
                    "(KP_MODEL)"
                )
        if long_text is not None and max_tokens == CHECK_TOKENS:
            distance = probe_distance(recorded[LONG_TEXT].vector, long_text)
            if distance > REFERENCE_DISTANCE:
                raise ModelError(
                    f"{self.service.url} does not cut texts at KP_MAX_TOKENS={max_tokens}: the vector of a long one "
                    f"differs by {_words(distance)}. Set KP_MAX_TOKENS to what the service reads "
                    "(docs/models.md)"
                )

    async def _long_text(self) -> Vector | None:
        """Return the vector of a long text; None, with a warning, if the service rejects it."""
        try:
            return (await self.service.embed([LONG_TEXT], self._dimensions)).vectors[0]
        except ServiceError as error:
            if not error.refused:
                raise
            log.warning(
                "%s does not embed a long text (%s): such traces become dead letters. Let the service cut them "
                "(docs/models.md)", self.service.url, error.about_probes(),
            )  # fmt: skip
            return None

    def _send_waiting(self) -> None:
        self._woken = False
        while self._waiting and len(self._tasks) < self._requests:
            count = min(self._most_texts, len(self._waiting))
            task = self._loop.create_task(self._embed_all([self._waiting.popleft() for _ in range(count)]))
            self._tasks.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._send_waiting()

    async def _embed_all(self, waiting: Sequence[_Text]) -> None:
        results = await self._results(waiting)
        if any(not isinstance(result, Exception) for result in results):
            self._release()
        for each, result in zip(waiting, results, strict=True):
            if self._is_doubtful(result, each):
                self._hold(each, str(result))
            else:
                _deliver(each, result)

    async def _results(self, waiting: Sequence[_Text]) -> Sequence[Vector | Exception]:
        """Return the vectors of the texts, with an error in place of each that failed."""
        try:
            if time.monotonic() - self._proved > RECHECK_SECONDS:
                await self._recover(None)
            return await self._embed([each.text[:MAX_CHARS] for each in waiting])
        except ModelError as error:
            return [error] * len(waiting)
        except Exception as error:  # probably not the fault of the texts: they must not become dead letters
            return [ModelError(f"this is a bug: {error!r}")] * len(waiting)

    def _is_doubtful(self, result: Vector | Exception, each: _Text) -> bool:
        """Return whether to hold a failed text, because something in front of the service may be to blame."""
        if not isinstance(result, ServiceError) or not each.may_wait:
            return False
        if result.unrelated or (self._blamed >= MOST_BLAMED and each.failed_at > self._embedded_at):
            return True
        self._blamed += 1
        return False

    def _hold(self, each: _Text, refusal: str) -> None:
        """Hold a text until the service embeds another one."""
        each.failed_at = min(each.failed_at, time.monotonic())
        self._held.append(each)
        self._refusal = refusal
        if self._asking_again is None:
            log.warning("%s", self.problem())
            self._asking_again = self._loop.create_task(self._ask_again())

    async def _ask_again(self) -> None:
        """Retry a held text from time to time, while there are any."""
        pauses = 0
        while self._held:
            await asyncio.sleep(_pause(pauses))
            pauses += 1
            while self._held and self._held[0].future.cancelled():
                self._held.popleft()
            if not self._held:
                break
            each = self._held[0]
            [result] = await self._results([each])
            doubtful = self._is_doubtful(result, each)
            if each not in self._held:  # another text has been embedded meanwhile, and this one is being retried
                continue
            self._held.remove(each)
            if doubtful:
                self._hold(each, str(result))
                log.warning("%s", self.problem())
            else:
                _deliver(each, result)
            if not isinstance(result, Exception):
                self._release()
        self._asking_again = None
        if not self._held:
            self._refusal = ""

    def _release(self) -> None:
        """Note that the service has embedded a text, and retry the held ones."""
        self._embedded_at, self._blamed = time.monotonic(), 0
        if self._held:
            log.info("the embedding service embeds texts again; %s waited", number_of(len(self._held), "text"))
            self._waiting.extend(self._held)
            self._held.clear()
            self._refusal = ""
            self._send_waiting()

    async def _embed(self, texts: Sequence[str]) -> Sequence[Vector | Exception]:
        """Return the vectors, with an error in place of each text that fails alone. Raises ModelError."""
        tries, works = 0, False
        while True:
            failed_probes = self._failed_probes
            try:
                return await self._send(texts)
            except ServiceError as error:
                failure = error
            if len(texts) == 1 or not failure.refused:
                await self._recover(failure)
            if self._failed_probes != failed_probes or (failure.unrelated and not failure.configured):
                tries = 0  # the service did not work, which says nothing about the texts
            elif failure.unrelated:  # something in front of it rejects the texts, but not the probes
                tries += 1
                if tries >= TRIES:
                    return [failure] * len(texts)
            elif len(texts) > 1:
                return await self._halves(texts, failure)
            else:
                tries += 1
                most = REFUSED_TRIES if failure.refused else TRIES
                if tries == most - 1:
                    works = await self._embeds_a_new_text()
                elif tries >= most:
                    failure.unrelated = not works
                    if works:
                        log.warning("the service embeds other texts, but fails on one: %s", failure)
                    return [failure]
                if not failure.refused:
                    await asyncio.sleep(_pause(tries))

    async def _embeds_a_new_text(self) -> bool:
        """Return whether the service embeds a text that nobody can have sent before."""
        try:
            await self.service.embed([f"{PROBES[0]} {uuid.uuid4().hex}"], self._dimensions)
        except ServiceError:
            return False
        return True

    async def _halves(self, texts: Sequence[str], failure: ServiceError) -> Sequence[Vector | Exception]:
        half = (len(texts) + 1) // 2
        results = [*await self._embed(texts[:half]), *await self._embed(texts[half:])]
        if failure.refused and half < self._most_texts and not any(isinstance(it, Exception) for it in results):
            self._most_texts = half
            log.info(
                "the service refuses %d texts at once (%s): from now on it gets at most %d", len(texts), failure, half
            )
        return results

    async def _send(self, texts: Sequence[str]) -> list[Vector]:
        if self._broken is not None:
            raise self._broken
        started = time.monotonic()
        self._sent.add(started)
        try:
            answer = await self.service.embed(texts, self._dimensions)
        finally:
            self._sent.discard(started)
        if answer.model not in self._reported:
            log.info("the service answers for the model %r, too", answer.model)
            self._reported.add(answer.model)
            await self._recover(None)
        return answer.vectors

    async def _recover(self, failure: ServiceError | None) -> None:
        """Wait until the service embeds the probes as at startup. Raises ModelError if the vectors differ."""
        begun = time.monotonic()
        async with self._recovering:  # one task asks, the others wait
            if self._proved > begun:
                return
            if failure is not None and failure.unrelated:
                self._problem = str(failure)
                await asyncio.sleep(_pause(0, failure.pause_seconds))
            pauses = 0
            while True:
                asked = time.monotonic()
                try:
                    await self._compare()
                except ServiceError as error:
                    self._failed_probes += 1
                    self._problem = error.about_probes()
                    log.warning("texts wait for %s", self.problem())
                    await asyncio.sleep(_pause(pauses, error.pause_seconds))
                    pauses += 1
                else:
                    break
            if self._problem is not None:
                log.info("the embedding service works again, after %.0f s", time.monotonic() - begun)
            self._problem = None
            self._proved = asked

    async def _compare(self) -> None:
        """Embed the probes again. Raises ServiceError, or ModelError if their vectors differ."""
        answer = await self.service.embed(PROBES, None)
        distance = max(map(probe_distance, self._vectors, answer.vectors))
        if distance > PROBE_DISTANCE:
            self._broken = ModelError(
                f"{self.service.url} runs another model than before: a fixed text's vector has moved by "
                f"{_words(distance)} (at most {PROBE_DISTANCE:g})"
            )
            raise self._broken


def _deliver(each: _Text, result: Vector | Exception) -> None:
    if not each.future.set_running_or_notify_cancel():
        return
    if isinstance(result, Exception):
        each.future.set_exception(result)
    else:
        each.future.set_result(Embedding(result, len(each.text) > MAX_CHARS))


async def _service(
    url: str, model: str, token: Token | None, timeout_seconds: float, connections: int
) -> EmbeddingService:
    return EmbeddingService(url, model, token, timeout_seconds, connections)


def _token(path: Path | None, url: str) -> Token | None:
    if path is None:
        return None
    parts = urlsplit(url)
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        log.warning("KP_EMBEDDER_URL is plain http: the token and the texts go there unencrypted; use https")
    try:
        return Token("KP_EMBEDDER_TOKEN_FILE", path)
    except TokenError as error:
        raise ModelError(str(error)) from None


def _pause(number: int, asked_seconds: float = 0.0) -> float:
    whole = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(number, 16))
    return max(min(asked_seconds, LONGEST_ASKED_SECONDS), whole * (1.0 - random.random() / 2))  # noqa: S311


def _words(distance: float) -> str:
    return f"{distance:.3g}" if np.isfinite(distance) else "another number of dimensions"

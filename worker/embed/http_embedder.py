"""KP_EMBEDDER=http: a model behind a service with OpenAI's POST /v1/embeddings.

Texts that arrive while all request slots are in use share the next request. Texts that fail together are sent again in
halves. After a failure the service is checked: it must embed the probes, a few fixed texts, to the same vectors as
before, and a text that is new to it, because a gateway may know the probes. While it does not, all texts wait.

A text that fails alone while the check passes is refused, and becomes a dead letter. Where one text after another is
refused, something else is to blame: after the first few, the others are held until the service embeds a caller's text.
"""

import asyncio
import atexit
import base64
import itertools
import logging
import random
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
import numpy as np
from yarl import URL

from worker.config.checks import is_loopback
from worker.config.keys import Token, TokenError
from worker.config.settings import Settings
from worker.core.changelog import MAX_DIMENSIONS, PROBE_DISTANCE, Probes, probe_distance
from worker.core.novelty import Vector, unit
from worker.core.records import EmbedderIdentity
from worker.core.terminal import clean, number_of
from worker.embed.embedder import (
    MAX_CHARS,
    OFFICIAL_NAME,
    Embedder,
    Embedding,
    ModelError,
    Reading,
    ServiceUnavailableError,
)
from worker.embed.reference_texts import CHECK_TOKENS, TEXTS, recorded_vectors
from worker.version import __version__

log = logging.getLogger(__name__)

# -- one request, and its answer

CONNECT_SECONDS: Final = 5.0  # longest time for a connection, TLS included
FRAME_BYTES: Final = 1 << 16  # maximum size of an answer apart from its vectors

REFUSALS: Final = frozenset({400, 403, 413, 422})
"""The service, or a filter in front of it, rejects the request: a text, their number, or their size."""


@dataclass(eq=False, repr=False)
class ServiceError(Exception):
    """A request returned no vectors. The message quotes neither the texts, the answer nor the token."""

    message: str
    _: KW_ONLY
    refused: bool = False  # the service rejects the request
    unrelated: bool = False  # the failure says nothing about the texts
    configured: bool = False  # the settings are probably to blame
    pause_seconds: float = 0.0  # the pause that the service asks for (Retry-After)
    answer: str = ""  # the beginning of the answer, which may quote the texts

    def with_answer(self) -> str:
        """Return the message with the answer, for requests whose texts are not secret."""
        return f"{self.message}: {self.answer}" if self.answer else self.message


class _Item(msgspec.Struct):
    embedding: list[float] | str
    index: int | None = None


class _Answer(msgspec.Struct):
    data: list[_Item]


_decoder = msgspec.json.Decoder(_Answer)


def read_answer(body: bytes, texts: int, dimensions: int | None = None) -> list[Vector]:
    """Return the unit vectors of an answer, in the order of the texts. Raises ValueError that says what is wrong.

    The answer has lists or base64 of <f4, of any length; with an `index` they may be in any order. `dimensions` None:
    any number.
    """
    try:
        answer = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is not a list of embeddings: {error}") from None
    if len(answer.data) != texts:
        raise ValueError(f"it has {len(answer.data)} embeddings for {texts} texts")
    indexes = [item.index for item in answer.data]
    if indexes == [None] * texts:
        items = answer.data
    elif sorted(-1 if index is None else index for index in indexes) == list(range(texts)):
        items = sorted(answer.data, key=lambda item: item.index or 0)
    else:
        raise ValueError("the indexes of its embeddings are not those of the texts")
    vectors = []
    for item in items:
        vector = _vector(item.embedding)
        dimensions = dimensions or len(vector)
        if not 0 < dimensions <= MAX_DIMENSIONS or len(vector) != dimensions:
            raise ValueError(f"an embedding has {len(vector)} dimensions, not {dimensions or f'1 to {MAX_DIMENSIONS}'}")
        vector = unit(vector, dimensions)
        if not vector.any():
            raise ValueError("an embedding has only zeros")
        vectors.append(vector)
    return vectors


def _vector(embedding: list[float] | str) -> Vector:
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding, validate=True), dtype="<f4").astype(np.float32)
    with np.errstate(over="ignore"):  # `unit` rejects infinity
        return np.array(embedding, dtype=np.float32)


def embeddings_url(url: str) -> str:
    """Return the address for requests, given a base URL with or without /v1, or that address itself."""
    path = urlsplit(url).path
    if path.endswith("/embeddings"):
        return url
    return f"{url}/embeddings" if re.search(r"/v[0-9]+$", path) else f"{url}/v1/embeddings"


class EmbeddingService:
    """Sends requests for embeddings. Use and close it in one event loop. `token` None: send none."""

    def __init__(self, url: str, model: str, token: Token | None, timeout_seconds: float, connections: int) -> None:
        self.url = embeddings_url(url)
        self._model = model
        self._token = token
        self._timeout = timeout_seconds
        self.counts = {"requests": 0, "failures": 0, "texts": 0, "seconds": 0.0}
        """Since the start: successful requests, failed ones, texts of the former, and seconds of all."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=connections),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=CONNECT_SECONDS),
            headers={
                "User-Agent": f"kp-worker/{__version__}",
                "Accept": "application/json",
                "Accept-Encoding": "identity",  # without this header any encoding is allowed (RFC 9110, 12.5.3)
                "Content-Type": "application/json",
            },
            auto_decompress=False,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def embed(self, texts: Sequence[str], dimensions: int | None) -> list[Vector]:
        """Return the vectors of the texts, from one request. Raises ServiceError."""
        started = time.monotonic()
        try:
            vectors = await self._embed(texts, dimensions)
        except ServiceError:
            self.counts["failures"] += 1
            raise
        finally:
            self.counts["seconds"] += time.monotonic() - started
        self.counts["requests"] += 1
        self.counts["texts"] += len(texts)
        return vectors

    async def _embed(self, texts: Sequence[str], dimensions: int | None) -> list[Vector]:
        try:
            token = "" if self._token is None else self._token.read()
        except TokenError as error:
            raise ServiceError(str(error), unrelated=True) from None
        body = msgspec.json.encode({"model": self._model, "input": texts, "encoding_format": "float"})
        # 32 bytes for each number with its comma: a float64 takes up to 25.
        most = FRAME_BYTES + 32 * len(texts) * (dimensions or MAX_DIMENSIONS)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            async with self._session.post(
                URL(self.url, encoded=True), data=body, headers=headers, allow_redirects=False
            ) as response:
                status, pause = response.status, response.headers.get("Retry-After", "")
                read = await _read(response, most if status == 200 else FRAME_BYTES)
        except aiohttp.ConnectionTimeoutError:
            raise ServiceError(f"no connection in {CONNECT_SECONDS:g} s", unrelated=True) from None
        except TimeoutError:
            raise ServiceError(f"no answer in {self._timeout:g} s") from None
        except aiohttp.ClientConnectorError as error:
            words = error.strerror or type(error.os_error).__name__
            raise ServiceError(f"no connection: {words}", unrelated=True) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:  # its text may quote the answer
            raise ServiceError(f"the connection broke: {type(error).__name__}") from None
        if status != 200:
            raise _refusal(status, pause, _quoted(read or b"", token))
        if read is None:
            raise ServiceError(f"the answer is longer than {most} bytes")
        try:
            return read_answer(read, len(texts), dimensions)
        except ValueError as error:
            raise ServiceError(f"the answer cannot be used: {error}") from None


async def _read(response: aiohttp.ClientResponse, most: int) -> bytes | None:
    """Return the body; None if it is longer than `most` bytes."""
    try:
        await response.content.readexactly(most + 1)
    except asyncio.IncompleteReadError as error:
        return error.partial
    response.close()
    return None


def _refusal(status: int, retry_after: str, answer: str) -> ServiceError:
    redirect = 300 <= status < 400
    words = {
        401: "the service denies the token (401); check KP_EMBEDDER_TOKEN_FILE",
        403: "the service denies access (403); check KP_EMBEDDER_TOKEN_FILE, and filters in front of it",
        404: "the service has no such address or model (404); check KP_EMBEDDER_URL and KP_MODEL",
        429: "the service asks for fewer requests (429)",
    }.get(status, f"the service answers {status}")
    if redirect:
        words += ", a redirect; set KP_EMBEDDER_URL to its target"
    return ServiceError(
        words,
        refused=status in REFUSALS,
        # They say nothing about the texts: they concern the token, the address or the load.
        unrelated=redirect or status in (401, 404, 405, 410, 429, 503),
        configured=redirect or (400 <= status < 500 and status not in (408, 429)),
        pause_seconds=float(retry_after) if re.fullmatch(r"[0-9]{1,5}", retry_after.strip()) else 0.0,
        answer=answer,
    )


def _quoted(body: bytes, token: str) -> str:
    """Return the beginning of an error response, without the token."""
    text = body.decode("utf-8", "replace")
    return clean((text.replace(token, "(token)") if token else text)[:200].strip())


# -- the embedder

Result = TypeVar("Result")

MOST_TEXTS: Final = 32
"""Maximum texts per request: the default limit of TEI (--max-client-batch-size), and Infinity's batch."""

TRIES: Final = 5  # failures in a row after which a single text is refused, if the check passes after each

REFUSED_TRIES: Final = 2
"""The same where the service rejects the text itself (400, 403, 413, 422): one retry, as a gateway may be mistaken."""

MOST_REFUSED: Final = 3  # texts that may be refused in a row; further ones are held

FIRST_PAUSE_SECONDS: Final = 0.5  # between attempts; then doubled each time, less up to half at random

START_SECONDS: Final = 15.0  # longest time of the checks at startup

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
    at_fault: bool = False  # other texts were embedded since it was refused


class HttpEmbedder(Embedder):
    """Embeds through a service, with several requests at a time, in an event loop in its own thread.

    The constructor checks the service for at most START_SECONDS. It raises ServiceUnavailableError, or ModelError if
    waiting does not help: the settings are wrong, or the model is not the one that they name.
    """

    def __init__(self, settings: Settings) -> None:
        if settings.embedder_url is None or settings.model is None:
            raise AssertionError("this is a bug: the settings were not checked")
        url, self._requests = settings.embedder_url, settings.embed_requests
        self.at_once = (self._requests + 1) * MOST_TEXTS  # enough for all requests, and to fill the next one
        self._model = settings.model
        self._waiting: deque[_Text] = deque()
        self._woken = False  # the loop is about to look at the waiting texts
        self._tasks: set[asyncio.Task[None]] = set()
        self._sent: set[float] = set()  # when the open requests were sent, s of the monotonic clock
        self._refused = 0  # texts that were refused since callers' texts were embedded last
        self._held: deque[_Text] = deque()
        self._refusal = ""  # how the last held text failed
        self._retrying: asyncio.Task[None] | None = None
        self._checking = asyncio.Lock()
        self._checked = 0.0  # when the latest check that passed was sent
        self._failed_checks = 0
        self._problem: str | None = None
        self._broken: ModelError | None = None
        token = _token(settings.embedder_token_file, url)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="embedding-service", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        try:
            self._vectors = self._call(self._start(url, token, settings.stuck_seconds, settings.max_tokens))
        except BaseException:
            self.close()
            raise
        dimensions, view = len(self._vectors[0]), settings.embed_text
        self.identity = EmbedderIdentity(
            self._model, "", dimensions, settings.max_tokens, "http", "unknown", embed_text=view
        )
        self.probes = Probes(self._model, self.identity.key(), tuple(self._vectors))

    # -- for callers in other threads

    def infer(self, reading: Reading) -> Embedding:
        """Embed one text once the service can. Raises ServiceError if it refuses the text, or ModelError."""
        return self.submit(reading, may_wait=False).result()

    def submit(self, reading: Reading, may_wait: bool = True) -> Future[Embedding]:
        """Return the future embedding of a text; it fails as `infer` does. The service truncates objectives like texts.

        `may_wait`: it is held where one text after another is refused.
        """
        text = _Text(reading.content, may_wait)
        self._waiting.append(text)
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._send_waiting)
        return text.future

    def problem(self) -> str | None:
        """Return why texts are waiting for the service, or None."""
        if self._problem is not None:
            return f"the embedding service at {self.service.url}: {self._problem}"
        if held := len(self._held):
            return (
                f"the embedding service at {self.service.url} works, but one text after another is refused: find out "
                f"what refuses them. Waiting texts: {held}. The last failure: {self._refusal}"
            )
        oldest = min(tuple(self._sent), default=None)
        if oldest is None or (seconds := time.monotonic() - oldest) < 10.0:  # an older one is slow
            return None
        return f"the embedding service at {self.service.url} has not answered for {seconds:.0f} s"

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
        tasks = [*self._tasks, *([] if self._retrying is None else [self._retrying])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.service.close()

    async def _start(self, url: str, token: Token | None, timeout_seconds: float, max_tokens: int) -> list[Vector]:
        """Return the vectors of the probes. Raises ServiceUnavailableError, ModelError."""
        self.service = EmbeddingService(url, self._model, token, timeout_seconds, self._requests)
        try:
            async with asyncio.timeout(START_SECONDS):
                vectors = await self.service.embed(PROBES, None)
                self._dimensions = len(vectors[0])
                long_text = await self._long_text()
        except TimeoutError:
            raise ServiceUnavailableError(f"{self.service.url}: no answer in {START_SECONDS:g} s") from None
        except ServiceError as error:
            kind = ModelError if error.configured else ServiceUnavailableError
            raise kind(f"{self.service.url}: {error.with_answer()}") from None
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
            return (await self.service.embed([LONG_TEXT], self._dimensions))[0]
        except ServiceError as error:
            if not error.refused:
                raise
            log.warning(
                "%s does not embed a long text (%s): such traces become dead letters. Let the service cut them "
                "(docs/models.md)", self.service.url, error.with_answer(),
            )  # fmt: skip
            return None

    def _send_waiting(self) -> None:
        self._woken = False
        while self._waiting and len(self._tasks) < self._requests:
            count = min(MOST_TEXTS, len(self._waiting))
            task = self._loop.create_task(self._embed([self._waiting.popleft() for _ in range(count)]))
            self._tasks.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._send_waiting()

    async def _embed(self, texts: Sequence[_Text]) -> None:
        """Embed callers' texts: at the end, each is embedded, refused or held, or the model is broken."""
        texts = [each for each in texts if not each.future.done()]  # cancelled, or embedded while it was held
        try:
            if texts:
                await self._embed_or_halve(texts)
        except ModelError as error:
            _fail(texts, error)
        except Exception as error:  # probably not the fault of the texts: they must not become dead letters
            _fail(texts, ModelError(f"this is a bug: {error!r}"))

    async def _embed_or_halve(self, texts: Sequence[_Text]) -> None:
        tries = 0
        while True:
            failed_checks = self._failed_checks
            try:
                vectors = await self._send([each.text[:MAX_CHARS] for each in texts])
            except ServiceError as error:
                failure = error
            else:
                self._deliver(texts, vectors)
                return
            if not failure.refused or (len(texts) == 1 and texts[0].may_wait):
                await self._wait_until_it_works(failure)
            if failure.unrelated or self._failed_checks != failed_checks:
                tries = 0  # the service did not work, which says nothing about the texts
            elif len(texts) > 1:
                half = (len(texts) + 1) // 2
                await self._embed_or_halve(texts[:half])
                await self._embed_or_halve(texts[half:])
                return
            else:
                tries += 1
                if tries >= (REFUSED_TRIES if failure.refused else TRIES):
                    self._refuse(texts[0], failure)
                    return
                if not failure.refused:
                    await asyncio.sleep(_pause(tries))

    async def _send(self, texts: Sequence[str]) -> list[Vector]:
        if self._broken is not None:
            raise self._broken
        started = time.monotonic()
        self._sent.add(started)
        try:
            return await self.service.embed(texts, self._dimensions)
        finally:
            self._sent.discard(started)

    async def _wait_until_it_works(self, failure: ServiceError) -> None:
        """Check the service until it works. Raises ModelError if it runs another model."""
        failed = time.monotonic()
        async with self._checking:  # one task asks, the others wait
            if self._checked > failed:
                return
            if failure.unrelated:
                self._problem = str(failure)
                await asyncio.sleep(_pause(0, failure.pause_seconds))
            for number in itertools.count():
                asked = time.monotonic()
                try:
                    await self._check()
                    break
                except ServiceError as error:
                    self._failed_checks += 1
                    self._problem = error.with_answer()
                    log.warning("texts wait for %s", self.problem())
                    await asyncio.sleep(_pause(number, error.pause_seconds))
            if self._problem is not None:
                log.info("the embedding service works again, after %.0f s", time.monotonic() - failed)
            self._problem, self._checked = None, asked

    async def _check(self) -> None:
        """Embed the probes, and a text that nobody can have sent before. Raises ServiceError, ModelError."""
        *vectors, _ = await self.service.embed([*PROBES, f"{PROBES[0]} {uuid.uuid4().hex}"], None)
        distance = max(map(probe_distance, self._vectors, vectors))
        if distance > PROBE_DISTANCE:
            self._broken = ModelError(
                f"{self.service.url} runs another model than before: a fixed text's vector has moved by "
                f"{_words(distance)} (at most {PROBE_DISTANCE:g})"
            )
            raise self._broken

    def _deliver(self, texts: Sequence[_Text], vectors: Sequence[Vector]) -> None:
        """Complete the texts of a request, and send the held ones again."""
        for each, vector in zip(texts, vectors, strict=True):
            if _wanted(each):
                each.future.set_result(Embedding(vector, len(each.text) > MAX_CHARS))
        self._refused = 0
        if self._held:
            log.info("the embedding service embeds texts again; %s waited", number_of(len(self._held), "text"))
            for each in self._held:
                each.at_fault = True  # if it is refused again
            self._waiting.extend(self._held)
            self._held.clear()
            self._send_waiting()

    def _refuse(self, each: _Text, failure: ServiceError) -> None:
        """Fail a text. Hold it if others were refused before it, and none has been embedded since."""
        if not each.may_wait or self._refused < MOST_REFUSED or each.at_fault:
            self._refused += 1
            log.warning("the embedding service works, but refuses a text: %s", failure)
            _fail([each], failure)
            return
        self._refusal = str(failure)
        if each not in self._held:
            self._held.append(each)
        if self._retrying is None:
            log.warning("%s", self.problem())
            self._retrying = self._loop.create_task(self._retry_held())

    async def _retry_held(self) -> None:
        """Send one of the held texts again from time to time, while there are any."""
        for number in itertools.count():
            await asyncio.sleep(_pause(number))
            self._held = deque(each for each in self._held if not each.future.done())  # others were cancelled
            if not self._held:
                break
            await self._embed([self._held[0]])
            self._held.rotate(-1)
        self._retrying = None


def _fail(texts: Sequence[_Text], failure: Exception) -> None:
    for each in texts:
        if _wanted(each):
            each.future.set_exception(failure)


def _wanted(each: _Text) -> bool:
    """Return whether a text has no result yet and was not cancelled; from here on it cannot be cancelled."""
    return not each.future.done() and each.future.set_running_or_notify_cancel()


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
    whole = min(10.0, FIRST_PAUSE_SECONDS * 2.0 ** min(number, 16))
    # A service that asks for a longer pause (Retry-After) is tried again after a minute.
    return max(min(asked_seconds, 60.0), whole * (1.0 - random.random() / 2))  # noqa: S311


def _words(distance: float) -> str:
    return f"{distance:.3g}" if np.isfinite(distance) else "another number of dimensions"

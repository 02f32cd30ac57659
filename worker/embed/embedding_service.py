"""Requests to an embedding service with OpenAI's POST /v1/embeddings: the address, one request, and its answer."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import msgspec
import numpy as np
from yarl import URL

from worker.config.keys import Token, TokenError
from worker.core.changelog import MAX_DIMENSIONS
from worker.core.novelty import Vector, unit
from worker.core.terminal import clean
from worker.version import __version__

CONNECT_SECONDS: Final = 5.0  # longest time for a connection, TLS included
NUMBER_BYTES: Final = 32  # maximum size of one number in an answer, with its comma; a float64 takes up to 25
FRAME_BYTES: Final = 1 << 16  # maximum size of an answer apart from its vectors
TOLD: Final = 200  # characters of an error response that a message repeats

REFUSALS: Final = frozenset({400, 403, 413, 422})
"""The service, or a filter in front of it, rejects the request: a text, their number, or their size."""

UNRELATED: Final = frozenset({401, 404, 405, 410, 429, 503})
"""Statuses that say nothing about the texts: they concern the token, the address or the load."""


class ServiceError(Exception):
    """A request returned no vectors. The message quotes neither the texts, the answer nor the token."""

    def __init__(
        self,
        message: str,
        *,
        refused: bool = False,  # the service rejects the request
        unrelated: bool = False,  # the failure says nothing about the texts
        configured: bool = False,  # the settings are probably to blame
        pause_seconds: float = 0.0,  # the pause that the service asks for (Retry-After)
        answer: str = "",  # the beginning of the answer, which may quote the texts
    ) -> None:
        super().__init__(message)
        self.refused = refused
        self.unrelated = unrelated
        self.configured = configured
        self.pause_seconds = pause_seconds
        self.answer = answer

    def with_answer(self) -> str:
        """Return the message with the answer, for requests whose texts are not secret."""
        return f"{self}: {self.answer}" if self.answer else str(self)


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
        found = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is not a list of embeddings: {error}") from None
    if len(found.data) != texts:
        raise ValueError(f"it has {len(found.data)} embeddings for {texts} texts")
    indexes = [item.index for item in found.data]
    if indexes == [None] * texts:
        items = found.data
    elif sorted(-1 if index is None else index for index in indexes) == list(range(texts)):
        items = sorted(found.data, key=lambda item: item.index or 0)
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
        self.requests = 0  # successful requests
        self.failures = 0  # failed requests
        self.texts = 0  # texts of the successful requests
        self.seconds = 0.0  # total time of all requests
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
            self.failures += 1
            raise
        else:
            self.requests += 1
            self.texts += len(texts)
            return vectors
        finally:
            self.seconds += time.monotonic() - started

    async def _embed(self, texts: Sequence[str], dimensions: int | None) -> list[Vector]:
        try:
            token = "" if self._token is None else self._token.read()
        except TokenError as error:
            raise ServiceError(str(error), unrelated=True) from None
        body = msgspec.json.encode({"model": self._model, "input": texts, "encoding_format": "float"})
        most = FRAME_BYTES + NUMBER_BYTES * len(texts) * (dimensions or MAX_DIMENSIONS)
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
            raise _refusal(status, pause, _told(read or b"", token))
        if read is None:
            raise ServiceError(f"the answer is longer than {most} bytes")
        try:
            return read_answer(read, len(texts), dimensions)
        except ValueError as error:
            raise ServiceError(f"the answer cannot be used: {error}") from None


async def _read(response: aiohttp.ClientResponse, most: int) -> bytes | None:
    """Return the body; None if it is longer than `most` bytes."""
    parts, size = [], 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > most:
            response.close()
            return None
        parts.append(part)
    return b"".join(parts)


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
        unrelated=redirect or status in UNRELATED,
        configured=redirect or (400 <= status < 500 and status not in (408, 429)),
        pause_seconds=float(retry_after) if re.fullmatch(r"[0-9]{1,5}", retry_after.strip()) else 0.0,
        answer=answer,
    )


def _told(body: bytes, token: str) -> str:
    text = body.decode("utf-8", "replace")
    return clean((text.replace(token, "(token)") if token else text)[:TOLD].strip())

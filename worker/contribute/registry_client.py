"""Requests to the registry with its key: one at a time for each caller, each with a time limit and a bounded answer.

The key is sent in one header of the request, and nowhere else; an answer carries it so that its words can be cleaned.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Self
from urllib.parse import quote

import aiohttp
from yarl import URL

from worker.config import ConfigError, Settings
from worker.config.keys import Token, TokenError
from worker.contribute.answers import HttpAnswer
from worker.observe.contribute_metrics import ContributeMetrics
from worker.version import __version__


def registry_key(settings: Settings) -> Token:
    """Return the key from the settings. Raises ConfigError if there is none."""
    try:
        if settings.registry_key_file is not None:
            return Token("KP_REGISTRY_KEY_FILE", settings.registry_key_file)
        if settings.registry_key is not None:
            return Token("KP_REGISTRY_KEY", settings.registry_key.get_secret_value())
    except TokenError as error:
        raise ConfigError(str(error)) from None
    raise ConfigError("contribute needs the registry's key: set KP_REGISTRY_KEY_FILE or KP_REGISTRY_KEY")


ANSWER_GROWTH: Final = 5
"""An answer repeats the unit in JavaScript's spelling, in which 1e20 and a comma take 22 characters instead of 5."""

ANSWER_FRAME: Final = 1 << 16
"""Maximum size of an answer apart from the unit, bytes."""


class NoAnswerError(Exception):
    """A request without an answer. `cause`: the metric's label. It may have had an effect, unless `unsent`."""

    def __init__(self, cause: str, words: str, *, unsent: bool = False) -> None:
        super().__init__(words)
        self.cause = cause
        self.unsent = unsent


class RegistryClient:
    """Sends requests to the registry at `url`; `key` None: without a key. `max_bytes`: the largest unit's."""

    def __init__(
        self, url: str, key: Token | None, timeout_seconds: float, metrics: ContributeMetrics,
        max_bytes: int = 1 << 20,
    ) -> None:  # fmt: skip
        self._url = url
        self._key = key
        self._metrics = metrics
        self._timeout = timeout_seconds
        self._max_answer = ANSWER_GROWTH * max_bytes + ANSWER_FRAME
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=self._timeout),
            headers={
                "User-Agent": f"kp-worker/{__version__}",
                "Accept": "application/json",
                "Accept-Encoding": "identity",  # without this header any encoding is allowed (RFC 9110, 12.5.3)
            },
            auto_decompress=False,
            requote_redirect_url=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def look_up(self, trace_id: str, *, as_nobody: bool = False) -> HttpAnswer:
        """GET /v1/knowledge/ID, without the key if `as_nobody`. Raises NoAnswerError."""
        path = f"/v1/knowledge/{quote(trace_id, safe='')}"
        return await self._send("GET", path, None if as_nobody else self._key)

    async def post(self, body: bytes, idempotency_key: str) -> HttpAnswer:
        """POST /v1/knowledge. Raises NoAnswerError."""
        headers = {"Content-Type": "application/json", "Idempotency-Key": idempotency_key}
        return await self._send("POST", "/v1/knowledge", self._key, headers, body)

    async def _send(
        self, method: str, path: str, with_key: Token | None, headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> HttpAnswer:  # fmt: skip
        try:
            key = "" if with_key is None else await asyncio.to_thread(with_key.read)
        except TokenError as error:
            raise NoAnswerError("key_file", str(error), unsent=True) from None
        if self._session is None:
            raise RuntimeError("this is a bug: the client is not started")
        sent = {**({"Authorization": f"Bearer {key}"} if key else {}), **(headers or {})}
        started = time.monotonic()
        begun: HttpAnswer | None = None  # status and headers: an answer, even if the rest never arrives
        try:
            async with self._session.request(
                method,
                URL(self._url + path, encoded=True),
                data=None if body is None else io.BytesIO(body),  # written in pieces
                headers=sent,
                allow_redirects=False,
            ) as response:
                read = {name.lower(): value for name, value in response.headers.items()}
                begun = HttpAnswer(response.status, read, b"", key)
                return replace(begun, body=await self._body(response))
        except TimeoutError:
            if begun is not None:
                return begun
            raise NoAnswerError("timeout", f"the registry does not answer in {self._timeout:g} s") from None
        except aiohttp.ClientResponseError:
            return HttpAnswer(0, {}, b"", key)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if begun is not None:
                return begun
            # The error's text may quote the answer; its type says enough.
            unsent = isinstance(error, aiohttp.ClientConnectorError)
            raise NoAnswerError("connection", f"no answer: {type(error).__name__}", unsent=unsent) from None
        finally:
            self._metrics.duration.observe(time.monotonic() - started)

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        """Return the body; b"" if it is longer than any of the registry's."""
        if (response.content_length or 0) > self._max_answer:
            return b""
        parts, size = [], 0
        async for part in response.content.iter_any():
            size += len(part)
            if size > self._max_answer:
                return b""
            parts.append(part)
        return b"".join(parts)

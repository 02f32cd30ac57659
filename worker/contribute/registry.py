"""Requests to the registry with its key: one at a time for each caller, each with a time limit and a bounded answer.

The key is sent in one header of the request, and nowhere else; an answer carries it so that its words can be cleaned.

Only answers of the registry itself are judged. Its errors have one form, a JSON object with the string `error`, and a
header names its schema. A gateway's answer, a proxy's page, a truncated document or a redirect is no verdict on a
trace: the request is in doubt, and the trace is looked up before it is sent again.
"""

from __future__ import annotations

import asyncio
import io
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self
from urllib.parse import quote

import aiohttp
from msgspec import Struct
from yarl import URL

from worker.config import ConfigError, Settings
from worker.config.keys import Token, TokenError
from worker.contribute.unit import clean_issues, clean_words, json_object
from worker.observe.metrics import ContributeMetrics
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
        # An answer repeats the unit in JavaScript's spelling, in which "1e20," takes 22 characters instead of 5.
        self._max_answer = 5 * max_bytes + (1 << 16)
        self._session = aiohttp.ClientSession(
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=timeout_seconds),
            headers={
                "User-Agent": f"kp-worker/{__version__}",
                "Accept": "application/json",
                "Accept-Encoding": "identity",  # without this header any encoding is allowed (RFC 9110, 12.5.3)
            },
            auto_decompress=False,
            requote_redirect_url=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def look_up(self, trace_id: str, *, as_nobody: bool = False) -> HttpAnswer | Doubtful:
        """GET /v1/knowledge/ID, without the key if `as_nobody`."""
        return await self._send("GET", f"/v1/knowledge/{quote(trace_id, safe='')}", None if as_nobody else self._key)

    async def post(self, body: bytes, idempotency_key: str) -> HttpAnswer | Doubtful:
        """POST /v1/knowledge."""
        headers = {"Content-Type": "application/json", "Idempotency-Key": idempotency_key}
        data = io.BytesIO(body)  # written in pieces
        return await self._send("POST", "/v1/knowledge", self._key, headers=headers, data=data)

    async def _send(
        self, method: str, path: str, with_key: Token | None, *, headers: Mapping[str, str] = MappingProxyType({}),
        data: io.BytesIO | None = None,
    ) -> HttpAnswer | Doubtful:  # fmt: skip
        """Return the answer; Doubtful if there is none."""
        try:
            key = "" if with_key is None else await asyncio.to_thread(with_key.read)
        except TokenError as error:
            return Doubtful("key_file", str(error), unsent=True)
        sent = {**({"Authorization": f"Bearer {key}"} if key else {}), **headers}
        url, started = URL(self._url + path, encoded=True), time.monotonic()
        begun: HttpAnswer | None = None  # status and headers: an answer, even if the rest never arrives
        try:
            async with self._session.request(method, url, data=data, headers=sent, allow_redirects=False) as response:
                begun = HttpAnswer(response.status, response.headers, b"", key)
                return replace(begun, body=await self._body(response))
        except aiohttp.ClientResponseError:
            return HttpAnswer(0, {}, b"", key)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if begun is not None:
                return begun
            if isinstance(error, TimeoutError):
                return Doubtful("timeout", f"the registry does not answer in {self._timeout:g} s")
            # The error's text may quote the answer; its type says enough.
            unsent = isinstance(error, aiohttp.ClientConnectorError)
            return Doubtful("connection", f"no answer: {type(error).__name__}", unsent=unsent)
        finally:
            self._metrics.duration.observe(time.monotonic() - started)

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        """Return the body; b"" if it is longer than any of the registry's."""
        body = bytearray()
        async for part in response.content.iter_any():
            body += part
            if len(body) > self._max_answer:
                return b""
        return bytes(body)


REFUSED: Final = {400: "invalid_unit", 413: "too_large", 422: "invalid_unit"}
"""Statuses that are verdicts on the unit, with the reason for the refused record."""

SCHEMA_HEADER: Final = "kp-schema-version"
"""The registry sends this header with every answer, except a 429 and the rejection of a JWT."""

TIME: Final = re.compile(r"[0-9T:.Z+ -]{10,40}", re.ASCII)
"""The form of the registry's times; anything else stays out of a receipt."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """An answer of the registry."""

    status: int  # 0 if there is none that can be read
    headers: Mapping[str, str]  # by lower-case name, or in any case
    body: bytes = field(repr=False)  # empty if it was too long or broke off
    key: str = field(default="", repr=False)  # of the request's Authorization, which an answer may repeat

    def without_key(self, text: str) -> str:
        """Return words of the answer without the key."""
        return text.replace(self.key, "[key]") if self.key else text


class Present(Struct, frozen=True):
    """The registry has a unit with this id."""

    unit: Any
    time: str  # the registry's; "": it states none


class Created(Struct, frozen=True):
    """The registry has stored the unit."""

    time: str
    replayed: bool  # the answer is the one to an earlier request with the same Idempotency-Key


class Absent(Struct, frozen=True):
    """The registry has no unit with this id."""


class Rejected(Struct, frozen=True):
    """The registry rejects the unit."""

    reason: str
    status: int
    issues: str
    replayed: bool


class Denied(Struct, frozen=True):
    """The registry does not accept the key."""

    status: int
    words: str
    replayed: bool


class Limited(Struct, frozen=True):
    """Too many requests (429)."""

    own: bool  # whether the answer may be the registry's; then it says nothing about the unit


class Doubtful(Struct, frozen=True):
    """No verdict."""

    cause: str  # the metric's label
    words: str  # for people
    retry_after_seconds: float = 0.0
    unsent: bool = False  # the request cannot have had an effect
    status: int | None = None  # of an answer that repeats for the same request; None for 5xx or no answer, which pass


Verdict = Present | Created | Absent | Rejected | Denied | Limited | Doubtful


class Rate(NamedTuple):
    """The rate limit, as stated by an answer."""

    limit: int  # requests a minute
    remaining: int  # left now


def stated_rate(answer: HttpAnswer) -> Rate | None:
    """Return the limit that the answer states; None if it states none."""
    limit, remaining = (_whole(answer.headers.get(name, "")) for name in ("x-ratelimit-limit", "x-ratelimit-remaining"))
    return None if limit is None or remaining is None else Rate(limit, remaining)


def judge_post(answer: HttpAnswer, trace_id: str) -> Verdict:
    """Return the verdict of POST /v1/knowledge."""
    status, replayed = answer.status, answer.headers.get("idempotency-replayed", "").lower() == "true"
    if status == 201 or (status == 200 and replayed):
        data = _entry(answer, trace_id)
        return _not_its_own(answer) if data is None else Created(_time(data), replayed)
    if status in REFUSED and (document := _own_error(answer)) is not None:
        issues = document["error"] if document.get("issues") is None else document["issues"]
        return Rejected(REFUSED[status], status, answer.without_key(clean_issues(issues)), replayed)
    return _common(answer, replayed=replayed)


def judge_look_up(answer: HttpAnswer, trace_id: str) -> Verdict:
    """Return the verdict of GET /v1/knowledge/ID."""
    if answer.status == 200:
        data = _entry(answer, trace_id)
        return _not_its_own(answer) if data is None else Present(data.get("unit", data), _time(data))
    if answer.status == 404 and _own_error(answer) is not None:
        return Absent()
    return _common(answer, replayed=False)


def _common(answer: HttpAnswer, *, replayed: bool) -> Verdict:
    status = answer.status
    pause = float(_whole(answer.headers.get("retry-after", "")) or 0)
    if status == 429:
        rate = stated_rate(answer)
        if rate is not None and rate.limit == 0:
            return Denied(status, "the registry allows this key no request at all (X-RateLimit-Limit: 0)", replayed)
        return Limited(own=rate is not None)
    if status in (401, 403) and (document := _own_error(answer)) is not None:
        return Denied(status, clean_words(answer.without_key(document["error"]))[:200], replayed)
    if 500 <= status < 600:
        return Doubtful("server_error", f"the registry answers {status}", pause)
    if 300 <= status < 400:
        words = f"the registry redirects ({status}); KP_REGISTRY_URL must be its final address"
        return Doubtful("redirect", words, pause, status=status)
    return _not_its_own(answer, pause)


def _not_its_own(answer: HttpAnswer, pause: float = 0.0) -> Doubtful:
    what = f"status {answer.status}" if answer.status else "not HTTP, or its headers are too long"
    if answer.status >= 400 and not answer.headers.get(SCHEMA_HEADER):
        what += ", without KP-Schema-Version"
    return Doubtful("unexpected_answer", f"an answer that is not the registry's ({what})", pause, status=answer.status)


def _entry(answer: HttpAnswer, trace_id: str) -> Mapping[str, Any] | None:
    """Return the stored entry with this id; None if the answer is anything else."""
    data = (json_object(answer.body) or {}).get("data")
    return data if isinstance(data, dict) and data.get("id") == trace_id else None


def _time(data: Mapping[str, Any]) -> str:
    time = data.get("created_at")
    return time if isinstance(time, str) and TIME.fullmatch(time) else ""


def _own_error(answer: HttpAnswer) -> dict[str, Any] | None:
    """Return an error in the registry's form and with its header; None for an answer that may come from elsewhere."""
    document = json_object(answer.body) if answer.headers.get(SCHEMA_HEADER) else None
    return document if document is not None and isinstance(document.get("error"), str) else None


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None

"""The stand-in's HTTP API: the registry's answers on `/v1`, faults on request, and the stand-in's state.

It copies the registry's unexpected behaviour:

- A POST without a valid key is answered with 429 and `X-RateLimit-Limit: 0`; a GET without one is allowed.
- Tokens and 429s are counted over all keys of an agent. A replay costs a token.
- `GET /v1/knowledge/ID` returns an entry: the unit is at `data.unit`, without unknown fields, and with JavaScript's
  numbers.
- The idempotency store looks only at the key, and keeps every answer below 500.
- A body that is not JSON is answered with 500.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from aiohttp import web

from worker.core.trace import InvalidTrace
from worker.lab.registry.faults import FaultKind, Faults
from worker.lab.registry.store import TIERS, Key, NotJson, RegistryStore, TokenBuckets, read_unit

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

PREFIX: Final = "/v1/"
MOST_BYTES: Final = 2**27
SCHEMA_VERSION: Final = "v1"


@dataclass
class RegistryOptions:
    """How the stand-in answers."""

    idempotency: bool = True  # whether Idempotency-Key is honoured
    latency_seconds: float = 0.0  # minimum for each answer
    faults: Faults = field(default_factory=Faults)
    clock: Callable[[], float] = time.time


KEY: Final = web.RequestKey("key", Key)


def registry_app(store: RegistryStore, options: RegistryOptions | None = None) -> web.Application:
    """Return the registry as an application; the caller closes the store."""
    registry = _Registry(store, options or RegistryOptions())
    app = web.Application(
        client_max_size=MOST_BYTES, middlewares=[registry.spoil, registry.limit, registry.label, registry.replay]
    )
    app.add_routes([
        web.post("/v1/auth/register", registry.register),
        web.post("/v1/knowledge", registry.contribute),
        web.get("/v1/knowledge/{id}", registry.look_up),
        web.delete("/v1/knowledge/{id}", registry.delete),
        web.get("/_stand-in/state", registry.state),
        web.get("/_stand-in/units", registry.units),
        web.route("*", "/_stand-in/elsewhere", registry.elsewhere),
    ])  # fmt: skip
    return app


class _Registry:
    def __init__(self, store: RegistryStore, options: RegistryOptions) -> None:
        self._store = store
        self._options = options
        self._buckets = TokenBuckets()
        self._counts: Counter[str] = Counter()

    # Middlewares, outermost first.

    @web.middleware
    async def spoil(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer with a fault if one is due, before or after the request has taken effect."""
        if not request.path.startswith(PREFIX):
            return await handler(request)
        try:
            await request.read()  # now, because a slow request must no longer depend on its client
        except ConnectionError:
            return _reset(request)
        kind, after = self._options.faults.choose()
        slow = kind is FaultKind.SLOW
        if kind is not None:
            self._counts[f"fault {kind}"] += 1
        if slow and not after:
            await asyncio.sleep(self._options.faults.slow_seconds)
        answer = None
        if kind is None or slow or after:
            answer = await handler(request)
            self._counts[f"{request.method} {answer.status}"] += 1
        if slow and after:
            await asyncio.sleep(self._options.faults.slow_seconds)
        return _faulty(kind, request, answer)

    @web.middleware
    async def limit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key, take a token, count 429s."""
        if not request.path.startswith(PREFIX) or request.path == "/v1/auth/register":
            return await handler(request)
        await asyncio.sleep(self._options.latency_seconds)
        bearer = request.headers.get("Authorization", "")
        key = self._store.verify(bearer.removeprefix("Bearer ")) if bearer.startswith("Bearer kp_") else None
        tier, agent = (key.tier, key.agent) if key is not None else (TIERS["anonymous"], "unknown")
        limit, bucket = (tier.writes, "write") if request.method == "POST" else (tier.reads, "read")
        allowance = self._buckets.take(f"{agent}:{bucket}", limit, self._options.clock())
        if allowance.retry_after is not None:
            self._store.add_limited(agent, key)
            body = {"error": "Rate limit exceeded", "retry_after": allowance.retry_after}
            return web.json_response(body, status=429, headers=allowance.headers)
        if key is not None:
            request[KEY] = key
        answer = await handler(request)
        answer.headers.update(allowance.headers)
        return answer

    @web.middleware
    async def label(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Name the schema version; an unknown path or method is not found."""
        try:
            answer = await handler(request)
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed):
            answer = web.Response(status=404, text="404 Not Found")
        if request.path.startswith(PREFIX):
            answer.headers["KP-Schema-Version"] = SCHEMA_VERSION
        return answer

    @web.middleware
    async def replay(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a repeated Idempotency-Key with the first answer; two concurrent requests both reach the store."""
        key = request.headers.get("Idempotency-Key")
        if not self._options.idempotency or not key or request.method not in ("POST", "PUT"):
            return await handler(request)
        known = self._store.answer(key)
        if known is not None:
            headers = {"Idempotency-Replayed": "true"}
            return web.Response(status=known[0], body=known[1], content_type="application/json", headers=headers)
        await asyncio.sleep(0)
        answer = await handler(request)
        if answer.status < 500 and isinstance(answer, web.Response) and isinstance(answer.body, bytes):
            self._store.keep_answer(key, answer.status, answer.body)
        return answer

    # Routes.

    async def register(self, request: web.Request) -> web.Response:
        """Give an agent a key."""
        asked = json.loads(await request.read())
        scopes, tier = asked.get("scopes", ["read"]), asked.get("tier", "free")
        key = self._store.register(asked["agent_id"], tier, scopes=scopes)
        data = {"api_key": key, "key_prefix": key[:11], "scopes": scopes, "tier": tier, "created_at": self._now()}
        return web.json_response({"data": data}, status=201)

    async def contribute(self, request: web.Request) -> web.Response:
        """Store a unit."""
        key = request[KEY]  # without a key the limit is 0, so no request gets here
        if not key.scopes & {"write", "admin"}:
            return _error(403, "Write scope required")
        if not self._store.may_contribute(key.agent):
            return _error(403, "Minimum KP-REP score of 0.1 required to contribute knowledge")
        try:
            unit = read_unit(await request.read())
        except NotJson:
            return web.Response(status=500, text="Internal Server Error")
        except InvalidTrace as error:
            return _error(400, "Invalid KnowledgeUnit", issues=[{"path": error.path, "message": error.message}])
        entry = self._store.put(unit, key.agent, self._now())
        return web.json_response({"data": entry, "quality_score": unit["metadata"]["quality_score"]}, status=201)

    async def look_up(self, request: web.Request) -> web.Response:
        """Return the entry of a unit."""
        entry = self._store.get(request.match_info["id"])
        return _error(404, "Knowledge unit not found") if entry is None else web.json_response({"data": entry})

    async def delete(self, request: web.Request) -> web.Response:
        """Delete a unit of the key's agent."""
        identity, key = request.match_info["id"], request.get(KEY)
        if key is None:
            return _error(401, "Authentication required")
        entry = self._store.get(identity)
        if entry is None:
            return _error(404, "Knowledge unit not found")
        if entry["unit"]["metadata"].get("agent_id") != key.agent and "admin" not in key.scopes:
            return _error(403, "Forbidden: can only delete your own contributions")
        self._store.delete(identity)
        done = {"deleted": True, "unit_id": identity, "deleted_at": self._now(), "deleted_by": key.agent}
        return web.json_response(done)

    # Not in the real registry.

    async def state(self, _: web.Request) -> web.Response:
        """Return the stored units and the counts of answers, for tests and the demo."""
        return web.json_response(self._store.state() | {"answers": dict(sorted(self._counts.items()))})

    async def units(self, _: web.Request) -> web.Response:
        """Return all stored units as JSON Lines."""
        lines = "".join(f"{json.dumps(unit)}\n" for unit in self._store.units())
        return web.Response(text=lines, content_type="application/x-ndjson")

    async def elsewhere(self, request: web.Request) -> web.Response:
        """Count a followed redirect, and whether it carried the key."""
        self._counts["redirect followed"] += 1
        self._counts["redirect followed with a key"] += "Authorization" in request.headers
        return web.json_response({"data": {"id": "elsewhere"}}, status=201)

    def _now(self) -> str:
        now = datetime.fromtimestamp(self._options.clock(), UTC)
        return now.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _error(status: int, text: str, **more: Any) -> web.Response:
    return web.json_response({"error": text, **more}, status=status)


def _faulty(kind: FaultKind | None, request: web.Request, answer: web.StreamResponse | None) -> web.StreamResponse:
    """Return the answer with the fault. `answer`: the right one; None: the request had no effect."""
    match kind:
        case FaultKind.ERROR:
            return web.Response(status=503, text="upstream connect error")
        case FaultKind.HTML:
            return web.Response(text="<!doctype html><title>Sign in</title><p>Sign in", content_type="text/html")
        case FaultKind.REDIRECT:
            return web.Response(status=307, headers={"Location": "/_stand-in/elsewhere"})
        case FaultKind.RESET:
            return _reset(request)
        case FaultKind.TRUNCATED:
            known = answer.body if isinstance(answer, web.Response) else None
            body = known if isinstance(known, bytes) else b'{"data": {"id": "'
            status = 201 if answer is None else answer.status
            return web.Response(status=status, body=body[: len(body) // 2 + 1], content_type="application/json")
    assert answer is not None  # no fault, or a slow answer
    return answer


def _reset(request: web.Request) -> web.Response:
    """Close the connection with a RST, like a router or a killed process."""
    if request.transport is not None:
        connected = request.transport.get_extra_info("socket")
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.transport.abort()
    return web.Response()

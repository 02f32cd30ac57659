"""A stand-in for the KnowledgePulse registry: its answers on `/v1`, faults on request, and the stand-in's state.

It copies the registry's unexpected behaviour:

- A POST without a valid key is answered with 429 and `X-RateLimit-Limit: 0`; a GET without one is allowed.
- Tokens and 429s are counted over all keys of an agent. A replay costs a token.
- `GET /v1/knowledge/ID` returns an entry: the unit is at `data.unit`, without unknown fields, and with JavaScript's
  numbers.
- The idempotency store looks only at the key, and keeps every answer below 500.
- A body that is not JSON is answered with 500.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import enum
import functools
import hashlib
import json
import math
import random
import secrets
import socket
import sqlite3
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args, get_origin

import msgspec
from aiohttp import web
from msgspec import Struct

from worker.core.trace import InvalidTrace, Limits, Reason, ReasoningTrace, parse_trace

# -- faults


class FaultKind(enum.StrEnum):
    """What a client sees."""

    ERROR = "error"  # 500, 502 or 503
    SLOW = "slow"  # the right answer, after slow_seconds
    RESET = "reset"  # the connection is reset
    HTML = "html"  # 200 with a page, like a captive portal or a proxy
    TRUNCATED = "truncated"  # the right status, half of the JSON
    REDIRECT = "redirect"  # 307 to another path


@dataclass
class Faults:
    """The share of faulty requests, by kind."""

    shares: Mapping[FaultKind, float] = field(default_factory=dict)  # in total at most 1
    after: float = 0.5  # share of the faults that come after the request took effect
    slow_seconds: float = 30.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= sum(self.shares.values()) <= 1 or any(share < 0 for share in self.shares.values()):
            raise ValueError(f"the shares of faults must be from 0 to 1 together, not {sum(self.shares.values()):g}")
        self._random = random.Random(self.seed)

    def choose(self) -> tuple[FaultKind | None, bool]:
        """Return the next request's fault, or None, and whether the request takes effect before the fault."""
        drawn = self._random.random()
        for kind, share in self.shares.items():
            drawn -= share
            if drawn < 0:
                return kind, self._random.random() < self.after
        return None, False


# -- units, limits and the store


Document = dict[str, Any]

LIMITS: Final = Limits(max_bytes=2**27, max_steps=2**31, max_depth=500, strict_context=True)
"""The registry has none of the worker's limits, and does not know the former @context."""


class NotJson(ValueError):
    """The body is not JSON: the registry answers with 500, as if it were its own fault."""


def read_unit(body: bytes) -> Document:
    """Return the unit that the registry stores for a body. Raises NotJson, or InvalidTrace for other JSON."""
    try:
        parse_trace(body, LIMITS)
    except InvalidTrace as error:
        if error.reason in (Reason.EMPTY_VALUE, Reason.NOT_UTF8, Reason.NOT_JSON):
            raise NotJson(str(error)) from error
        raise
    document = json.loads(body)  # reads 1e400, as JavaScript does
    return {name: _as_javascript(value) for name, value in _known(document, ReasoningTrace).items()}


def _known(value: Any, kind: Any) -> Any:
    """Return a value of a struct type without unknown fields, at any depth."""
    types = get_args(kind) if get_origin(kind) is not None else ()
    if isinstance(value, dict):
        struct = next((each for each in (kind, *types) if isinstance(each, type) and issubclass(each, Struct)), None)
        if struct is None:  # free contents: all members except this one, which is special in JavaScript
            return {name: part for name, part in value.items() if name != "__proto__"}
        fields = _types_of(struct)
        return {name: _known(part, fields[name]) for name, part in value.items() if name in fields}
    if isinstance(value, list):
        listed = next((each for each in (kind, *types) if get_origin(each) is list), None)
        return value if listed is None else [_known(part, get_args(listed)[0]) for part in value]
    return value


@functools.cache
def _types_of(struct: type[Struct]) -> dict[str, Any]:
    """Return the types of a struct's fields by JSON name."""
    return {field.encode_name: field.type for field in msgspec.structs.fields(struct)}


def _as_javascript(value: Any) -> Any:
    """Return a JSON value after JSON.stringify(JSON.parse(...)): every number is a double."""
    if isinstance(value, dict):
        return {name: _as_javascript(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_as_javascript(part) for part in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        return None
    # JavaScript writes integers below 1e21 with all digits, of which at most seventeen are significant.
    return int(Decimal(repr(number))) if number.is_integer() and abs(number) < 1e21 else number


class Tier(NamedTuple):
    """Requests a minute."""

    writes: int  # POSTs
    reads: int  # all others


ANONYMOUS: Final = Tier(0, 60)
"""Of a request without a key, or with an unknown or revoked one."""

FREE: Final = Tier(30, 300)

WINDOW_SECONDS: Final = 60


class Allowance(NamedTuple):
    """The verdict of the rate limit on one request."""

    limit: int
    remaining: int
    reset: int  # s since 1970
    retry_after: int | None = None  # s; None: allowed

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the answer."""
        named = {"X-RateLimit-Limit": self.limit, "X-RateLimit-Remaining": self.remaining,
                 "X-RateLimit-Reset": self.reset, "Retry-After": self.retry_after}  # fmt: skip
        return {name: str(value) for name, value in named.items() if value is not None}


class TokenBuckets:
    """A bucket of `limit` tokens for each name, refilled at limit/60 a second."""

    def __init__(self) -> None:
        self._filled: dict[str, tuple[float, float]] = {}

    def take(self, name: str, limit: int, now: float) -> Allowance:
        """Take a token at `now` (s since 1970), if there is one. A limit of 0 never allows anything."""
        if limit == 0:
            return Allowance(0, 0, int(now) + WINDOW_SECONDS, WINDOW_SECONDS)
        rate = limit / WINDOW_SECONDS
        tokens, before = self._filled.get(name, (float(limit), now))
        tokens = min(float(limit), tokens + max(0.0, now - before) * rate)
        if tokens < 1:
            self._filled[name] = (tokens, now)
            wait = math.ceil((1 - tokens) / rate)
            return Allowance(limit, 0, int(now) + wait, wait)
        self._filled[name] = (tokens - 1, now)
        # Like the registry: the reset says nothing about the bucket.
        return Allowance(limit, int(tokens - 1), int(now) + WINDOW_SECONDS)


REVOKING, HOUR, DAY = 3, 3600, 86_400
LEAST_REPUTATION = 0.1
"""Which every agent has, unless a test gives it less."""

PREFIX_LENGTH: Final = 11

_TABLES: Final = """
CREATE TABLE IF NOT EXISTS keys (hash TEXT PRIMARY KEY, prefix TEXT, agent TEXT, writes INT, reads INT,
  revoked INT DEFAULT 0);
CREATE TABLE IF NOT EXISTS units (id TEXT PRIMARY KEY, unit TEXT, created TEXT, updated TEXT);
CREATE TABLE IF NOT EXISTS posts (id TEXT, agent TEXT, posts INT, PRIMARY KEY (id, agent));
CREATE TABLE IF NOT EXISTS agents (agent TEXT PRIMARY KEY, reputation REAL, contributions INT DEFAULT 0);
CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, status INT, body BLOB, at REAL);
CREATE TABLE IF NOT EXISTS limited (agent TEXT, at REAL);
CREATE INDEX IF NOT EXISTS limited_at ON limited (agent, at);
"""


class Key(NamedTuple):
    """A known key that is not revoked."""

    prefix: str
    agent: str
    tier: Tier


class RegistryStore:
    """The store in `path`, or in memory; `clock` returns s since 1970."""

    def __init__(self, path: Path | None, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sql = sqlite3.connect(":memory:" if path is None else path, isolation_level=None)
        self._sql.execute("PRAGMA journal_mode=WAL")
        self._sql.execute("PRAGMA synchronous=NORMAL")  # a SIGKILL loses nothing; a power failure may
        self._sql.executescript(_TABLES)
        self.close = self._sql.close

    def register(
        self, agent: str, tier: Tier = FREE, *, key: str | None = None, reputation: float = LEAST_REPUTATION
    ) -> str:
        """Add a key for an agent and return it. A given key that is known keeps its state, revoked or not."""
        key = key or f"kp_{secrets.token_hex(32)}"
        with self._sql:
            self._sql.execute(
                "INSERT INTO keys (hash, prefix, agent, writes, reads) VALUES (?, ?, ?, ?, ?)"
                " ON CONFLICT DO UPDATE SET writes = excluded.writes, reads = excluded.reads",
                (_hashed(key), key[:PREFIX_LENGTH], agent, tier.writes, tier.reads),
            )
            self._sql.execute("INSERT OR IGNORE INTO agents VALUES (?, ?, 0)", (agent, reputation))
        return key

    def verify(self, key: str) -> Key | None:
        """Return the key's record; None for an unknown or revoked key."""
        found = self._sql.execute(
            "SELECT prefix, agent, writes, reads FROM keys WHERE hash = ? AND NOT revoked", (_hashed(key),)
        ).fetchone()
        if found is None:
            return None
        prefix, agent, writes, reads = found
        return Key(prefix, agent, Tier(writes, reads))

    def add_limited(self, agent: str, key: Key | None) -> None:
        """Count a 429, and revoke the key at the third one within an hour."""
        now = self._clock()
        self._sql.execute("INSERT INTO limited VALUES (?, ?)", (agent, now))
        count = self._sql.execute("SELECT count(*) FROM limited WHERE agent = ? AND at > ?", (agent, now - HOUR))
        if key is not None and count.fetchone()[0] >= REVOKING:
            self._sql.execute("UPDATE keys SET revoked = 1 WHERE prefix = ?", (key.prefix,))

    def may_contribute(self, agent: str) -> bool:
        """Return whether the agent's reputation is high enough."""
        found = self._sql.execute("SELECT reputation FROM agents WHERE agent = ?", (agent,)).fetchone()
        return found is not None and bool(found[0] >= LEAST_REPUTATION)

    def put(self, unit: Document, agent: str, now: str) -> Document:
        """Store a unit, replacing any with its id; return the entry."""
        with self._sql:
            self._sql.execute("BEGIN")
            self._sql.execute(
                "INSERT INTO units VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET unit = excluded.unit,"
                " created = excluded.created, updated = excluded.updated",
                (unit["id"], json.dumps(unit), now, now),
            )
            self._sql.execute(
                "INSERT INTO posts VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET posts = posts + 1", (unit["id"], agent)
            )
            self._sql.execute(
                "UPDATE agents SET contributions = contributions + 1 WHERE agent = ?",
                (agent,),
            )
        return _entry(unit, now, now)

    def get(self, identity: str) -> Document | None:
        """Return the entry of a unit."""
        found = self._sql.execute("SELECT unit, created, updated FROM units WHERE id = ?", (identity,)).fetchone()
        return None if found is None else _entry(json.loads(found[0]), found[1], found[2])

    def delete(self, identity: str) -> None:
        """Delete the unit."""
        self._sql.execute("DELETE FROM units WHERE id = ?", (identity,))

    def answer(self, key: str) -> tuple[int, bytes] | None:
        """Return status and body of the answer to an idempotency key in the last 24 hours."""
        found = self._sql.execute(
            "SELECT status, body FROM answers WHERE key = ? AND at > ?", (key, self._clock() - DAY)
        ).fetchone()
        return None if found is None else (found[0], found[1])

    def keep_answer(self, key: str, status: int, body: bytes) -> None:
        """Keep an answer for 24 hours."""
        self._sql.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", (key, status, body, self._clock()))

    def state(self) -> dict[str, Any]:
        """Return units with their posts, agents with their contributions, 429s, revoked keys."""
        rows = self._sql.execute
        return {
            "units": dict(rows("SELECT id, sum(posts) FROM posts JOIN units USING (id) GROUP BY id")),
            "overwritten": [row[0] for row in rows("SELECT id FROM posts GROUP BY id HAVING count(*) > 1")],
            "contributions": dict(rows("SELECT agent, contributions FROM agents")),
            "429s": dict(rows("SELECT agent, count(*) FROM limited GROUP BY agent")),
            "revoked": [row[0] for row in rows("SELECT prefix FROM keys WHERE revoked")],
        }

    def units(self) -> list[Document]:
        """Return all stored units."""
        return [json.loads(row[0]) for row in self._sql.execute("SELECT unit FROM units ORDER BY rowid")]


def _hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _entry(unit: Document, created: str, updated: str) -> Document:
    visibility = unit["metadata"]["visibility"]
    return {"id": unit["id"], "unit": unit, "visibility": visibility, "created_at": created, "updated_at": updated}


# -- the application


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
        tier, agent = (key.tier, key.agent) if key is not None else (ANONYMOUS, "unknown")
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
        key = self._store.register(asked["agent_id"])
        data = {"api_key": key, "key_prefix": key[:11], "scopes": asked["scopes"], "created_at": self._now()}
        return web.json_response({"data": data}, status=201)

    async def contribute(self, request: web.Request) -> web.Response:
        """Store a unit."""
        key = request[KEY]  # without a key the limit is 0, so no request gets here
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
        if entry["unit"]["metadata"].get("agent_id") != key.agent:
            return _error(403, "Forbidden: can only delete your own contributions")
        self._store.delete(identity)
        done = {"deleted": True, "unit_id": identity, "deleted_at": self._now(), "deleted_by": key.agent}
        return web.json_response(done)

    # Not in the real registry.

    async def state(self, _: web.Request) -> web.Response:
        """Return the store's state and the counts of answers."""
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


# -- the process


async def _serve(store: RegistryStore, options: RegistryOptions, port: int, key: str) -> None:
    runner = web.AppRunner(registry_app(store, options), access_log=None, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    print(f"registry at http://127.0.0.1:{runner.addresses[0][1]} with key {key}", flush=True)
    await asyncio.Event().wait()  # until it is killed


def main() -> None:
    """Serve on loopback. `--data` keeps everything over a SIGKILL."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--key")
    parser.add_argument("--limit", type=int, default=2000, help="POSTs a minute; five times as many GETs")
    parser.add_argument("--no-idempotency", action="store_true")
    parser.add_argument("--latency", type=float, default=0.0)
    parser.add_argument("--fault", action="append", default=[], metavar="KIND=SHARE")
    parser.add_argument("--slow-seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int)
    given = parser.parse_args()
    shares = {FaultKind(kind): float(share) for kind, share in (each.split("=") for each in given.fault)}
    faults = Faults(shares, slow_seconds=given.slow_seconds, seed=given.seed)
    options = RegistryOptions(not given.no_idempotency, given.latency, faults)
    with contextlib.closing(RegistryStore(given.data, options.clock)) as store:
        key = store.register("kp:agent:stand-in", Tier(given.limit, 5 * given.limit), key=given.key)
        asyncio.run(_serve(store, options, given.port, key))


if __name__ == "__main__":
    main()

"""A stand-in for the KnowledgePulse registry: its answers on `/v1`, faults on request, and the stand-in's state.

It copies the registry's unexpected behaviour:

- A POST without a valid key is answered with 429 and `X-RateLimit-Limit: 0`; a GET without one is allowed.
- Tokens and 429s are counted over all keys of an agent. A replay costs a token.
- `GET /v1/knowledge/ID` returns an entry: the unit is at `data.unit`, without unknown fields, and with JavaScript's
  numbers.
- The idempotency store looks only at the key, and keeps every answer below 500.
- A body that is not JSON is answered with 500.
"""

import asyncio
import contextlib
import enum
import functools
import json
import math
import random
import secrets
import socket
import struct
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final, NamedTuple, get_args, get_origin

import aiohttp
import msgspec
from aiohttp import web
from msgspec import Struct

from tests.support.servers import Handler, ServerThread, served
from worker.core.trace import InvalidTrace, Limits, Reason, ReasoningTrace, parse_trace

# -- faults


class FaultKind(enum.StrEnum):
    """What a client sees."""

    ERROR = "error"  # 503
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


class Key(NamedTuple):
    """A key that an agent was given."""

    text: str
    agent: str
    tier: Tier

    @property
    def prefix(self) -> str:
        return self.text[:11]


class RegistryStore:
    """What the registry keeps; `clock` returns s since 1970. `counts`: of answers and faults."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.keys: dict[str, Key] = {}  # those that are not revoked
        self.reputation: dict[str, float] = {}
        self.entries: dict[str, Document] = {}
        self.counts: Counter[str] = Counter()
        self._revoked: list[str] = []  # prefixes
        self._posts: dict[str, Counter[str]] = defaultdict(Counter)  # of each unit, by agent
        self._answers: dict[str, tuple[float, int, bytes]] = {}
        self._limited: dict[str, list[float]] = defaultdict(list)  # times of 429s, by agent

    def register(self, agent: str, tier: Tier = FREE, *, reputation: float = LEAST_REPUTATION) -> str:
        """Add a key for an agent and return it."""
        key = Key(f"kp_{secrets.token_hex(32)}", agent, tier)
        self.keys[key.text] = key
        self.reputation.setdefault(agent, reputation)
        return key.text

    def revoke(self, key: Key) -> None:
        self._revoked.append(self.keys.pop(key.text).prefix)

    def add_limited(self, agent: str, key: Key | None) -> None:
        """Count a 429, and revoke the key at the third one within an hour."""
        times = self._limited[agent]
        times.append(self._clock())
        if key is not None and sum(at > times[-1] - HOUR for at in times) >= REVOKING:
            self.revoke(key)

    def put(self, unit: Document, agent: str, now: str) -> Document:
        """Store a unit, replacing any with its id; return the entry."""
        self._posts[unit["id"]][agent] += 1
        visibility = unit["metadata"]["visibility"]
        entry = {"id": unit["id"], "unit": unit, "visibility": visibility, "created_at": now, "updated_at": now}
        self.entries[unit["id"]] = entry
        return entry

    def answer(self, key: str) -> tuple[int, bytes] | None:
        """Return status and body of the answer to an idempotency key in the last 24 hours."""
        at, status, body = self._answers.get(key, (-math.inf, 0, b""))
        return (status, body) if at > self._clock() - DAY else None

    def keep_answer(self, key: str, status: int, body: bytes) -> None:
        self._answers[key] = self._clock(), status, body

    def state(self) -> dict[str, Any]:
        """Return units with their posts, agents with their contributions, 429s, revoked keys, counts of answers."""
        # The server's thread may be adding to both, to the posts first.
        entries, posts = list(self.entries), dict(self._posts)
        return {
            "units": {identity: posts[identity].total() for identity in entries},
            "overwritten": [identity for identity, agents in posts.items() if len(agents) > 1],
            "contributions": dict(sum(posts.values(), Counter())),
            "429s": {agent: len(times) for agent, times in dict(self._limited).items()},
            "revoked": [*self._revoked],
            "answers": dict(sorted(self.counts.items())),
        }

    def units(self) -> list[Document]:
        """Return all stored units, in the order in which their ids came."""
        return [entry["unit"] for entry in list(self.entries.values())]


# -- the application

PREFIX: Final = "/v1/"


@dataclass
class RegistryOptions:
    """How the stand-in answers."""

    idempotency: bool = True  # whether Idempotency-Key is honoured
    latency_seconds: float = 0.0  # minimum for each answer
    faults: Faults = field(default_factory=Faults)
    clock: Callable[[], float] = time.time


KEY: Final = web.RequestKey("key", Key)


def registry_app(store: RegistryStore, options: RegistryOptions) -> web.Application:
    """Return the registry as an application."""
    registry = _Registry(store, options)
    app = web.Application(
        client_max_size=2**27, middlewares=[registry.spoil, registry.limit, registry.label, registry.replay]
    )
    app.add_routes([
        web.post("/v1/auth/register", registry.register),
        web.post("/v1/knowledge", registry.contribute),
        web.get("/v1/knowledge/{id}", registry.look_up),
        web.delete("/v1/knowledge/{id}", registry.delete),
        web.route("*", "/elsewhere", registry.elsewhere),
    ])  # fmt: skip
    return app


class _Registry:
    def __init__(self, store: RegistryStore, options: RegistryOptions) -> None:
        self._store = store
        self._options = options
        self._buckets = TokenBuckets()

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
            self._store.counts[f"fault {kind}"] += 1
        if slow and not after:
            await asyncio.sleep(self._options.faults.slow_seconds)
        answer = None
        if kind is None or slow or after:
            answer = await handler(request)
            self._store.counts[f"{request.method} {answer.status}"] += 1
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
        key = self._store.keys.get(bearer.removeprefix("Bearer ")) if bearer.startswith("Bearer ") else None
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
            answer.headers["KP-Schema-Version"] = "v1"
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
        await asyncio.sleep(0)  # another one may come between the two
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
        if self._store.reputation[key.agent] < LEAST_REPUTATION:
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
        entry = self._store.entries.get(request.match_info["id"])
        return _error(404, "Knowledge unit not found") if entry is None else web.json_response({"data": entry})

    async def delete(self, request: web.Request) -> web.Response:
        """Delete a unit of the key's agent."""
        identity, key = request.match_info["id"], request.get(KEY)
        if key is None:
            return _error(401, "Authentication required")
        entry = self._store.entries.get(identity)
        if entry is None:
            return _error(404, "Knowledge unit not found")
        if entry["unit"]["metadata"].get("agent_id") != key.agent:
            return _error(403, "Forbidden: can only delete your own contributions")
        del self._store.entries[identity]
        done = {"deleted": True, "unit_id": identity, "deleted_at": self._now(), "deleted_by": key.agent}
        return web.json_response(done)

    # Not in the real registry.

    async def elsewhere(self, request: web.Request) -> web.Response:
        """Count a followed redirect, and whether it carried the key."""
        self._store.counts["redirect followed"] += 1
        self._store.counts["redirect followed with a key"] += "Authorization" in request.headers
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
            return web.Response(status=307, headers={"Location": "/elsewhere"})
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


# -- in a test's own loop, and in a thread

AGENT = "kp:agent:test"
FAST = Tier(60_000, 300_000)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class LocalRegistry:
    """A stand-in on a free port, with the key of one agent."""

    url: str
    key: str
    store: RegistryStore
    session: aiohttp.ClientSession

    async def request(self, method: str, path: str, body: Any = None, key: str | None = None, **headers: str) -> Answer:
        """Send a request with a key ("" sends none); a body of bytes as it is, any other as JSON."""
        key = self.key if key is None else key
        sent = {**({"Authorization": f"Bearer {key}"} if key else {}), **headers}
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        async with self.session.request(method, self.url + path, data=data, headers=sent, allow_redirects=False) as got:
            return Answer(got.status, dict(got.headers), await got.read())

    async def post(self, document: Any, key: str | None = None, **headers: str) -> Answer:
        return await self.request("POST", "/v1/knowledge", document, key, **headers)

    async def get(self, identity: str, key: str | None = None) -> Answer:
        return await self.request("GET", f"/v1/knowledge/{identity}", key=key)


@contextlib.asynccontextmanager
async def local_registry(options: RegistryOptions | None = None, *, tier: Tier = FAST) -> AsyncIterator[LocalRegistry]:
    """Run a stand-in in this event loop."""
    options = options or RegistryOptions()
    store = RegistryStore(options.clock)
    async with served(registry_app(store, options)) as url, aiohttp.ClientSession() as session:
        yield LocalRegistry(url, store.register(AGENT, tier), store, session)


class RegistryThread(ServerThread):
    """The stand-in for processes, with the key of one agent. Its port, key and data outlive `stop` and `start`.

    `limit`: POSTs a minute; five times as many GETs.
    """

    def __init__(self, options: RegistryOptions | None = None, *, limit: int = 60_000) -> None:
        options = options or RegistryOptions()
        self.store = RegistryStore(options.clock)
        self.key = self.store.register(AGENT, Tier(limit, 5 * limit))
        super().__init__(lambda port: served(registry_app(self.store, options), port))

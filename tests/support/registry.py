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
from decimal import Decimal
from typing import Any, Final, NamedTuple, get_args, get_origin

import aiohttp
import msgspec
from aiohttp import web
from msgspec import Struct

from tests.support.builders import rfc3339
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
class RegistryOptions:
    """How the stand-in answers."""

    idempotency: bool = True  # whether Idempotency-Key is honoured
    latency_seconds: float = 0.0  # minimum for each answer
    faults: Mapping[FaultKind, float] = field(default_factory=dict)  # shares of the requests, in total at most 1
    after: float = 0.5  # share of the faults that come after the request took effect
    slow_seconds: float = 30.0
    seed: int | None = None  # of the faults
    clock: Callable[[], float] = time.time


# -- units and limits


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
    return {name: as_javascript(value) for name, value in _known(document, ReasoningTrace).items()}


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


def as_javascript(value: Any) -> Any:
    """Return a JSON value after JSON.stringify(JSON.parse(...)): every number is a double."""
    if isinstance(value, dict):
        return {name: as_javascript(part) for name, part in value.items()}
    if isinstance(value, list):
        return [as_javascript(part) for part in value]
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
LEAST_REPUTATION = 0.1
"""Which every agent has, unless a test gives it less."""


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


class Key(NamedTuple):
    """A key that an agent was given."""

    text: str
    agent: str
    tier: Tier

    @property
    def prefix(self) -> str:
        return self.text[:11]


# -- the application

PREFIX: Final = "/v1/"
KEY: Final = web.RequestKey("key", Key)


class RegistryStore:
    """What the registry keeps, and the handlers that answer from it."""

    def __init__(self, options: RegistryOptions) -> None:
        self._options = options
        self._clock = options.clock
        self._random = random.Random(options.seed)
        self._buckets = TokenBuckets()
        self.keys: dict[str, Key] = {}  # those that are not revoked
        self.reputation: dict[str, float] = {}
        self.entries: dict[str, Document] = {}
        self._counts: Counter[str] = Counter()  # of answers and faults
        self._revoked: list[str] = []  # prefixes
        self._posts: dict[str, Counter[str]] = defaultdict(Counter)  # of each unit, by agent
        self._answers: dict[str, tuple[float, int, bytes]] = {}  # by idempotency key: time, status, body
        self._limited: dict[str, list[float]] = defaultdict(list)  # times of 429s, by agent

    def register(self, agent: str, tier: Tier = FREE, *, reputation: float = LEAST_REPUTATION) -> str:
        """Add a key for an agent and return it."""
        key = Key(f"kp_{secrets.token_hex(32)}", agent, tier)
        self.keys[key.text] = key
        self.reputation.setdefault(agent, reputation)
        return key.text

    def revoke(self, key: Key) -> None:
        self._revoked.append(self.keys.pop(key.text).prefix)

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
            "answers": dict(sorted(self._counts.items())),
        }

    def units(self) -> list[Document]:
        """Return all stored units, in the order in which their ids came."""
        return [entry["unit"] for entry in list(self.entries.values())]

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**27, middlewares=[self._spoil, self._limit, self._label, self._replay])
        app.add_routes([
            web.post("/v1/auth/register", self._register),
            web.post("/v1/knowledge", self._contribute),
            web.get("/v1/knowledge/{id}", self._look_up),
            web.delete("/v1/knowledge/{id}", self._delete),
            web.route("*", "/elsewhere", self._elsewhere),
        ])  # fmt: skip
        return app

    # Middlewares, outermost first.

    @web.middleware
    async def _spoil(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer with a fault if one is due, before or after the request has taken effect."""
        if not request.path.startswith(PREFIX):
            return await handler(request)
        try:
            await request.read()  # now, because a slow request must no longer depend on its client
        except ConnectionError:
            return _reset(request)
        shares = self._options.faults
        (kind,) = self._random.choices([*shares, None], [*shares.values(), 1 - sum(shares.values())])
        after = self._random.random() < self._options.after
        slow = kind is FaultKind.SLOW
        if kind is not None:
            self._counts[f"fault {kind}"] += 1
        if slow and not after:
            await asyncio.sleep(self._options.slow_seconds)
        answer = None
        if kind is None or slow or after:
            answer = await handler(request)
            self._counts[f"{request.method} {answer.status}"] += 1
        if slow and after:
            await asyncio.sleep(self._options.slow_seconds)
        return _faulty(kind, request, answer)

    @web.middleware
    async def _limit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key, take a token, count 429s: the third one within an hour revokes the key."""
        if not request.path.startswith(PREFIX) or request.path == "/v1/auth/register":
            return await handler(request)
        await asyncio.sleep(self._options.latency_seconds)
        bearer = request.headers.get("Authorization", "")
        key = self.keys.get(bearer.removeprefix("Bearer ")) if bearer.startswith("Bearer ") else None
        tier, agent = (key.tier, key.agent) if key is not None else (ANONYMOUS, "unknown")
        limit, bucket = (tier.writes, "write") if request.method == "POST" else (tier.reads, "read")
        now = self._clock()
        allowance = self._buckets.take(f"{agent}:{bucket}", limit, now)
        if allowance.retry_after is not None:
            times = self._limited[agent]
            times.append(now)
            if key is not None and sum(at > now - 3600 for at in times) >= 3:
                self.revoke(key)
            body = {"error": "Rate limit exceeded", "retry_after": allowance.retry_after}
            return web.json_response(body, status=429, headers=allowance.headers)
        if key is not None:
            request[KEY] = key
        answer = await handler(request)
        answer.headers.update(allowance.headers)
        return answer

    @web.middleware
    async def _label(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Name the schema version; an unknown path or method is not found."""
        try:
            answer = await handler(request)
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed):
            answer = web.Response(status=404, text="404 Not Found")
        if request.path.startswith(PREFIX):
            answer.headers["KP-Schema-Version"] = "v1"
        return answer

    @web.middleware
    async def _replay(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer an Idempotency-Key that is repeated within a day with the first answer.

        Two concurrent requests both reach the store.
        """
        key = request.headers.get("Idempotency-Key")
        if not self._options.idempotency or not key or request.method not in ("POST", "PUT"):
            return await handler(request)
        at, status, body = self._answers.get(key, (-math.inf, 0, b""))
        if at > self._clock() - 86_400:
            headers = {"Idempotency-Replayed": "true"}
            return web.Response(status=status, body=body, content_type="application/json", headers=headers)
        await asyncio.sleep(0)
        answer = await handler(request)
        await asyncio.sleep(0)  # another one may come between the two
        if answer.status < 500 and isinstance(answer, web.Response) and isinstance(answer.body, bytes):
            self._answers[key] = self._clock(), answer.status, answer.body
        return answer

    # Routes.

    async def _register(self, request: web.Request) -> web.Response:
        """Give an agent a key."""
        asked = json.loads(await request.read())
        key = self.register(asked["agent_id"])
        data = {"api_key": key, "key_prefix": key[:11], "scopes": asked["scopes"], "created_at": self._now()}
        return web.json_response({"data": data}, status=201)

    async def _contribute(self, request: web.Request) -> web.Response:
        """Store a unit, replacing any with its id."""
        key = request[KEY]  # without a key the limit is 0, so no request gets here
        if self.reputation[key.agent] < LEAST_REPUTATION:
            return _error(403, "Minimum KP-REP score of 0.1 required to contribute knowledge")
        try:
            unit = read_unit(await request.read())
        except NotJson:
            return web.Response(status=500, text="Internal Server Error")
        except InvalidTrace as error:
            return _error(400, "Invalid KnowledgeUnit", issues=[{"path": error.path, "message": error.message}])
        self._posts[unit["id"]][key.agent] += 1
        visibility, now = unit["metadata"]["visibility"], self._now()
        entry = {"id": unit["id"], "unit": unit, "visibility": visibility, "created_at": now, "updated_at": now}
        self.entries[unit["id"]] = entry
        return web.json_response({"data": entry, "quality_score": unit["metadata"]["quality_score"]}, status=201)

    async def _look_up(self, request: web.Request) -> web.Response:
        """Return the entry of a unit."""
        entry = self.entries.get(request.match_info["id"])
        return _error(404, "Knowledge unit not found") if entry is None else web.json_response({"data": entry})

    async def _delete(self, request: web.Request) -> web.Response:
        """Delete a unit of the key's agent."""
        identity, key = request.match_info["id"], request.get(KEY)
        if key is None:
            return _error(401, "Authentication required")
        entry = self.entries.get(identity)
        if entry is None:
            return _error(404, "Knowledge unit not found")
        if entry["unit"]["metadata"].get("agent_id") != key.agent:
            return _error(403, "Forbidden: can only delete your own contributions")
        del self.entries[identity]
        done = {"deleted": True, "unit_id": identity, "deleted_at": self._now(), "deleted_by": key.agent}
        return web.json_response(done)

    async def _elsewhere(self, request: web.Request) -> web.Response:
        """Count a followed redirect, and whether it carried the key. Not in the real registry."""
        self._counts["redirect followed"] += 1
        self._counts["redirect followed with a key"] += "Authorization" in request.headers
        return web.json_response({"data": {"id": "elsewhere"}}, status=201)

    def _now(self) -> str:
        return rfc3339(int(self._clock() * 1000))


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
    store = RegistryStore(options or RegistryOptions())
    async with served(store.app()) as url, aiohttp.ClientSession() as session:
        yield LocalRegistry(url, store.register(AGENT, tier), store, session)


class RegistryThread(ServerThread):
    """The stand-in for processes, with the key of one agent. Its port, key and data outlive `stop` and `start`.

    `limit`: POSTs a minute; five times as many GETs.
    """

    def __init__(self, options: RegistryOptions | None = None, *, limit: int = 60_000) -> None:
        self.store = RegistryStore(options or RegistryOptions())
        self.key = self.store.register(AGENT, Tier(limit, 5 * limit))
        super().__init__(lambda port: served(self.store.app(), port))

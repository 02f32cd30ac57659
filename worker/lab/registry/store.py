"""The registry's data: agents, keys, units, rate limits, reputation, answers by idempotency key, 429s."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import secrets
import sqlite3
from collections.abc import Callable, Collection
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args, get_origin

import msgspec
from msgspec import Struct

from worker.core.trace import InvalidTrace, Limits, Reason, ReasoningTrace, parse_trace

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


TIERS: Final = {
    "anonymous": Tier(0, 60),  # no key, or an unknown or revoked one
    "free": Tier(30, 300),
    "pro": Tier(200, 1000),
    "enterprise": Tier(2000, 10_000),
}

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
REGISTRATION, CONTRIBUTION, LEAST_REPUTATION = 0.1, 0.2, 0.1
PREFIX_LENGTH: Final = 11

_TABLES: Final = """
CREATE TABLE IF NOT EXISTS keys (hash TEXT PRIMARY KEY, prefix TEXT, agent TEXT, scopes TEXT, writes INT, reads INT,
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
    scopes: frozenset[str]
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
        self,
        agent: str,
        tier: str | Tier = "free",
        *,
        key: str | None = None,
        scopes: Collection[str] = ("read", "write"),
        reputation: float = REGISTRATION,
    ) -> str:
        """Add a key for an agent and return it. A given key that is known keeps its state, revoked or not."""
        limits = TIERS[tier] if isinstance(tier, str) else tier
        key = key or f"kp_{secrets.token_hex(32)}"
        with self._sql:
            self._sql.execute(
                "INSERT INTO keys (hash, prefix, agent, scopes, writes, reads) VALUES (?, ?, ?, ?, ?, ?)"
                " ON CONFLICT DO UPDATE SET writes = excluded.writes, reads = excluded.reads",
                (_hashed(key), key[:PREFIX_LENGTH], agent, " ".join(scopes), limits.writes, limits.reads),
            )
            self._sql.execute("INSERT OR IGNORE INTO agents VALUES (?, ?, 0)", (agent, reputation))
        return key

    def verify(self, key: str) -> Key | None:
        """Return the key's record; None for an unknown or revoked key."""
        found = self._sql.execute(
            "SELECT prefix, agent, scopes, writes, reads FROM keys WHERE hash = ? AND NOT revoked", (_hashed(key),)
        ).fetchone()
        if found is None:
            return None
        prefix, agent, scopes, writes, reads = found
        return Key(prefix, agent, frozenset(scopes.split()), Tier(writes, reads))

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
        """Store a unit, replacing any with its id, and award the agent; return the entry."""
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
                "UPDATE agents SET reputation = reputation + ?, contributions = contributions + 1 WHERE agent = ?",
                (CONTRIBUTION, agent),
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
        """Return the state for tests and the demo: units with their posts, agents, 429s, revoked keys."""
        rows = self._sql.execute
        return {
            "units": dict(rows("SELECT id, sum(posts) FROM posts JOIN units USING (id) GROUP BY id")),
            "overwritten": [row[0] for row in rows("SELECT id FROM posts GROUP BY id HAVING count(*) > 1")],
            "reputation": dict(rows("SELECT agent, round(reputation, 6) FROM agents")),
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

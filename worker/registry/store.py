"""What the registry keeps: agents and keys, units, reputation, answers by idempotency key, 429s.

Lives here: the SQLite file (or memory) and every statement on it. A change is committed when the method returns, so it
survives a SIGKILL. Must not live here: HTTP, limits.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from worker.registry.documents import Document
from worker.registry.limits import TIERS, Tier

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


@dataclass(frozen=True)
class Key:
    """A key that is known and not revoked."""

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

    def close(self) -> None:
        """Close the file."""
        self._sql.close()

    def register(
        self,
        agent: str,
        tier: str | Tier = "free",
        *,
        key: str | None = None,
        scopes: Collection[str] = ("read", "write"),
        reputation: float = REGISTRATION,
    ) -> str:
        """Add a key of an agent and return it; a given one that is known stays as it is, revoked or not."""
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
        """Return the key's record; None for a key that is not known or revoked."""
        found = self._sql.execute(
            "SELECT prefix, agent, scopes, writes, reads FROM keys WHERE hash = ? AND NOT revoked", (_hashed(key),)
        ).fetchone()
        if found is None:
            return None
        prefix, agent, scopes, writes, reads = found
        return Key(prefix, agent, frozenset(scopes.split()), Tier(writes, reads))

    def add_limited(self, agent: str, key: Key | None) -> None:
        """Count a 429, and revoke the key with the third one of an hour."""
        now = self._clock()
        self._sql.execute("INSERT INTO limited VALUES (?, ?)", (agent, now))
        count = self._sql.execute("SELECT count(*) FROM limited WHERE agent = ? AND at > ?", (agent, now - HOUR))
        if key is not None and count.fetchone()[0] >= REVOKING:
            self._sql.execute("UPDATE keys SET revoked = 1 WHERE prefix = ?", (key.prefix,))

    def may_contribute(self, agent: str) -> bool:
        """Whether the agent's reputation is enough."""
        found = self._sql.execute("SELECT reputation FROM agents WHERE agent = ?", (agent,)).fetchone()
        return found is not None and bool(found[0] >= LEAST_REPUTATION)

    def put(self, unit: Document, agent: str, now: str) -> Document:
        """Store a unit, whoever's had its id before, and award the agent; return the entry."""
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
        """Delete a unit."""
        self._sql.execute("DELETE FROM units WHERE id = ?", (identity,))

    def answer(self, key: str) -> tuple[int, bytes] | None:
        """Return status and body of the answer to an idempotency key of the last 24 hours."""
        found = self._sql.execute(
            "SELECT status, body FROM answers WHERE key = ? AND at > ?", (key, self._clock() - DAY)
        ).fetchone()
        return None if found is None else (found[0], found[1])

    def keep_answer(self, key: str, status: int, body: bytes) -> None:
        """Keep an answer for 24 hours."""
        self._sql.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", (key, status, body, self._clock()))

    def state(self) -> dict[str, Any]:
        """Return what tests and the demo look at: units with their posts, agents, 429s, revoked keys."""
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
        """Return all units as they are stored."""
        return [json.loads(row[0]) for row in self._sql.execute("SELECT unit FROM units ORDER BY rowid")]


def _hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _entry(unit: Document, created: str, updated: str) -> Document:
    visibility = unit["metadata"]["visibility"]
    return {"id": unit["id"], "unit": unit, "visibility": visibility, "created_at": created, "updated_at": updated}

"""The registry's stand-in in a test's own process, or as a command."""

from __future__ import annotations

import contextlib
import json
import re
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
from aiohttp import web

from tests.support.kafka_fixtures import LoggedProcess, wait_until
from tests.support.registry_stand_in import RegistryOptions, RegistryStore, Tier, registry_app
from tests.support.surroundings import environment

AGENT = "kp:agent:test"
FAST = Tier(60_000, 300_000)


class Clock:
    """A clock that a test moves; s since 1970."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


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

    async def state(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.request("GET", "/_stand-in/state", key="")).json()
        return found


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@contextlib.asynccontextmanager
async def local_registry(options: RegistryOptions | None = None, *, tier: Tier = FAST) -> AsyncIterator[LocalRegistry]:
    """Run a stand-in in this event loop."""
    options = options or RegistryOptions()
    with contextlib.closing(RegistryStore(None, options.clock)) as store:
        runner = web.AppRunner(registry_app(store, options), access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            key = store.register(AGENT, tier)
            async with aiohttp.ClientSession() as session:
                yield LocalRegistry(f"http://127.0.0.1:{runner.addresses[0][1]}", key, store, session)
        finally:
            await runner.cleanup()


class RegistryProcess:
    """The stand-in as a process; `restart` gives it the same port, key and data."""

    def __init__(self, *options: str) -> None:
        self._options = list(options)
        self.url = self.key = ""
        self.process: LoggedProcess | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, and wait until it listens."""
        again = ["--port", self.url.rpartition(":")[2], "--key", self.key] if self.url else []
        process = self.process = LoggedProcess(
            "tests.support.registry_stand_in", [*self._options, *again], environment()
        )
        wait_until(lambda: "\n" in process.log() or process.returncode is not None, pause=0.02)
        printed = re.fullmatch(r"registry at (\S+) with key (\S+)\n", process.log())
        assert printed is not None, process.log()
        self.url, self.key = printed.groups()

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        if self.process is not None:
            self.process.close()

    def restart(self) -> None:
        """Kill it and start it again."""
        self.kill()
        self.start()

    def read(self, path: str) -> bytes:
        """GET a path without a key."""
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            found: bytes = answer.read()
            return found

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.read("/_stand-in/state"))
        return found

    def units(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.read("/_stand-in/units").split(b"\n") if line]

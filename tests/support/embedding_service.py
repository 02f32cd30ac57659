"""A stand-in for an embedding service, with faults that a test switches on and off while it runs.

`python -m tests.support.embedding_service PORT MILLISECONDS` is one as a process, whose vectors cost nothing: any
number of requests at a time, each of which takes that long.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, Self

import msgspec
import numpy as np
from aiohttp import web

from tests.support.crash_worker import hash_vector

MODEL: Final = "test-model"
DIMENSIONS: Final = 384

Answer = tuple[int, bytes, dict[str, str]]
"""Status, body and headers."""


def vector(text: str, dimensions: int = DIMENSIONS, salt: str = "") -> list[float]:
    """Return a unit vector that depends on every character of the text; the oracle's, unless there is a salt."""
    found = hash_vector(f"{salt}{text}")[:dimensions]
    return [float(it) for it in found / np.linalg.norm(found)] if dimensions < DIMENSIONS else found.tolist()


def answer(vectors: list[Any]) -> bytes:
    data = [{"object": "embedding", "index": index, "embedding": it} for index, it in enumerate(vectors)]
    return msgspec.json.encode({"object": "list", "data": data, "model": MODEL, "usage": {"prompt_tokens": 1}})


class EmbeddingService:
    """The stand-in, in a thread of its own, on `url` from `__enter__` on.

    `fault` is asked with the texts of each request; what it returns is the answer, None: a good one after `seconds`.
    `salt` is the model: another one gives other vectors. `asked`: the texts of each request; `most`: the most requests
    at a time; `tokens`: the Authorization headers.
    """

    def __init__(self, *, token: str | None = None) -> None:
        self.seconds = 0.0
        self.salt = ""
        self.dimensions = DIMENSIONS
        self.fault: Callable[[list[str]], Answer | None] = lambda texts: None
        self.asked: list[list[str]] = []
        self.most = 0
        self.tokens: list[str | None] = []
        self._now = 0
        self._token = token
        self._port = 0
        self._runner: web.AppRunner | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def texts(self) -> list[str]:
        return [text for texts in self.asked for text in texts]

    def start(self) -> None:
        """Listen, on the same port as before."""
        self._call(self._listen())

    def stop(self) -> None:
        """Close the connections, and refuse new ones."""
        self._call(self._close())

    def __enter__(self) -> Self:
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _call(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> None:
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/v1/embeddings", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True).start()
        self._port = self._runner.addresses[0][1]

    async def _close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, request: web.Request) -> web.Response:
        self.tokens.append(request.headers.get("Authorization"))
        if self._token is not None and self.tokens[-1] != f"Bearer {self._token}":
            return web.Response(status=401, text=f"wrong: {self.tokens[-1]}")
        asked = msgspec.json.decode(await request.read())
        texts = asked["input"]
        self.asked.append(texts)
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            await asyncio.sleep(self.seconds)
            faulty = self.fault(texts)
            if faulty is not None:
                status, body, headers = faulty
                if status == 0:
                    assert request.transport is not None
                    request.transport.close()
                    return web.Response()
                return web.Response(status=status, body=body, headers=headers)
            vectors = [vector(text, self.dimensions, self.salt) for text in texts]
            return web.Response(body=answer(vectors), content_type="application/json")
        finally:
            self._now -= 1


async def _serve(port: int, seconds: float) -> None:
    known = [msgspec.json.encode(vector(str(number))) for number in range(509)]
    tail = b'],"model":"' + MODEL.encode() + b'"}'

    async def handle(request: web.Request) -> web.Response:
        texts = msgspec.json.decode(await request.read())["input"]
        await asyncio.sleep(seconds)
        items = (
            b'{"index":%d,"embedding":%b}' % (index, known[int.from_bytes(_digest(text)) % len(known)])
            for index, text in enumerate(texts)
        )
        return web.Response(body=b'{"data":[' + b",".join(items) + tail, content_type="application/json")

    app = web.Application(client_max_size=2**28)
    app.router.add_post("/v1/embeddings", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), float(sys.argv[2]) / 1000))

"""A stand-in for an embedding service, with faults that a test switches on and off while it runs."""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np
from aiohttp import web

from tests.support.crash_worker import hash_vector
from tests.support.servers import ServerThread, served

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


class EmbeddingService(ServerThread):
    """The stand-in, in a thread of its own.

    `fault` is asked with the texts of each request; what it returns is the answer, None: a good one after `seconds`.
    `salt` is the model: another one gives other vectors. `asked`: the texts of each request; `most`: the most requests
    at a time; `tokens`: the Authorization headers.
    """

    def __init__(self, *, token: str | None = None) -> None:
        super().__init__(lambda port: served(self._handle, port))
        self.seconds = 0.0
        self.salt = ""
        self.dimensions = DIMENSIONS
        self.fault: Callable[[list[str]], Answer | None] = lambda texts: None
        self.asked: list[list[str]] = []
        self.most = 0
        self.tokens: list[str | None] = []
        self._now = 0
        self._token = token

    def texts(self) -> list[str]:
        return [text for texts in self.asked for text in texts]

    async def _handle(self, request: web.Request) -> web.Response:
        assert (request.method, request.path) == ("POST", "/v1/embeddings")
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

"""A proxy in front of one broker, which ends connections at chosen requests, as a broker that restarts does."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Literal

from tests.support.servers import ServerThread, accept_no_more
from worker.lab.broker.kafka_node import HOST

Cut = Literal["before", "after"]
"""Close the connection before the broker gets the request, or after it has answered, without passing the answer on."""


class Proxy(ServerThread):
    """Passes requests to a broker, and its own address to clients in place of the broker's.

    `cut`: takes the number of a request (from 0) and its API key, and returns what to do. `requests`: the API keys of
    all requests so far.
    """

    def __init__(self, broker: str, cut: Callable[[int, int], Cut | None]) -> None:
        self.requests: list[int] = []
        self._broker_port = int(broker.rpartition(":")[2])
        self._cut = cut
        super().__init__(lambda port: listening(self._serve, port))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ports = self._broker_port, int(self.url.rpartition(":")[2])
        brokers, mine = (HOST.encode() + struct.pack(">i", port) for port in ports)
        broker_reader, broker_writer = await asyncio.open_connection(HOST, self._broker_port)
        answers = frames(broker_reader)
        try:
            async for request in frames(reader):  # clients may send several before an answer: they wait here
                (key,) = struct.unpack_from(">h", request, 4)
                cut = self._cut(len(self.requests), key)
                self.requests.append(key)
                if cut == "before":
                    return
                broker_writer.write(request)
                answer = await anext(answers, None)
                if cut == "after" or answer is None:
                    return
                writer.write(answer.replace(brokers, mine))
        finally:
            broker_writer.transport.abort()


@contextlib.asynccontextmanager
async def listening(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]], port: int
) -> AsyncIterator[str]:
    """Listen on a port, and serve each connection in a task, whose end closes it; yields the address.

    At the end all of them end.
    """
    tasks: list[asyncio.Task[None]] = []  # asyncio itself forgets a task that waits for what nothing else knows
    ended = asyncio.Event()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if ended.is_set():  # the connection was accepted just before
            writer.transport.abort()
            return
        task = asyncio.create_task(serve(reader, writer))
        task.add_done_callback(lambda _: writer.transport.abort())
        tasks.append(task)

    listener = socket.create_server((HOST, port), backlog=100)
    server = await asyncio.start_server(accept, sock=listener)
    try:
        yield f"{HOST}:{port}"
    finally:
        await accept_no_more(listener)
        server.close()
        ended.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def frames(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield requests or answers, each with its length, until the connection ends."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readexactly(4)
            yield head + await reader.readexactly(struct.unpack(">i", head)[0])

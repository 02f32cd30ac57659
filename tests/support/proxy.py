"""A proxy in front of one broker, which ends connections at chosen requests, as a broker that restarts does."""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Literal, Self

HOST = "127.0.0.1"

Cut = Literal["before", "after"]
"""Close the connection before the broker gets the request, or after it has answered, without passing the answer on."""


class Proxy:
    """Passes requests to a broker, and its own address to clients in place of the broker's; `with` stops it.

    `cut`: takes the number of a request (from 0) and its API key, and returns what to do. `requests`: the API keys of
    all requests so far.
    """

    def __init__(self, broker: str, cut: Callable[[int, int], Cut | None]) -> None:
        self.requests: list[int] = []
        self._broker = HOST, int(broker.rpartition(":")[2])
        self._cut = cut
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._server = socket.create_server((HOST, 0))
        self._port: int = self._server.getsockname()[1]
        self.address = f"{HOST}:{self._port}"

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._server.shutdown(socket.SHUT_RDWR)  # ends accept
            self._server.close()
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join()

    def _start(self, work: Callable[..., None], *args: socket.socket) -> None:
        self._threads.append(threading.Thread(target=work, args=args))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        brokers, mine = (HOST.encode() + struct.pack(">i", port) for port in (self._broker[1], self._port))
        with client, socket.create_connection(self._broker) as broker, contextlib.suppress(EOFError, OSError):
            with self._lock:
                self._open |= {client, broker}
            while True:  # clients may send several requests before an answer: they wait here
                request = _frame(client)
                (key,) = struct.unpack_from(">h", request, 4)
                with self._lock:
                    cut = self._cut(len(self.requests), key)
                    self.requests.append(key)
                if cut == "before":
                    return
                broker.sendall(request)
                answer = _frame(broker)
                if cut == "after":
                    return
                client.sendall(answer.replace(brokers, mine))


def _frame(source: socket.socket) -> bytes:
    """Return one request or answer with its length. Raises EOFError."""
    head = _exactly(source, 4)
    return head + _exactly(source, struct.unpack(">i", head)[0])


def _exactly(source: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = source.recv(size - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)

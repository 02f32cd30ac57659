"""The HTTP port under clients that mean no good: a real worker goes on scoring and answers its probes."""

import contextlib
import os
import random
import socket
import time
from collections.abc import Iterator

from tests.support.stage import LINES, Stage, Workers
from worker.lab.broker.embedded_kafka import EmbeddedKafka
from worker.observe.http_server import CONNECTION_SECONDS, MAX_CONNECTIONS

HOSTILE = 500
OPENINGS = (
    b"",  # connects and says nothing
    b"GET /metrics HT",  # slow
    b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 4000,  # headers without end
    b"POST /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000000\r\n\r\n" + b"x" * 1000,  # body without end
    b"GET /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffff\r\n" + b"x" * 1000,
    b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 20,  # never reads the answers
)


@contextlib.contextmanager
def hostile(port: int) -> Iterator[list[socket.socket]]:
    """Hold HOSTILE connections open, each with one of the openings."""
    with contextlib.ExitStack() as stack:
        held = []
        for i in range(HOSTILE):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            with contextlib.suppress(ConnectionError):  # pushed out already
                connection.sendall(OPENINGS[i % len(OPENINGS)])
            held.append(connection)
        yield held


def exchange(port: int, request: bytes) -> bytes:
    """Send bytes, return all that comes until the worker closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=CONNECTION_SECONDS + 5) as connection:
        answer = b""
        with contextlib.suppress(ConnectionError):
            connection.sendall(request)
            while part := connection.recv(65536):
                answer += part
        return answer


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_scoring_and_probes_go_on_while_500_hostile_connections_hang(
    kafka: EmbeddedKafka, workers: Workers, seed: int
) -> None:
    stage = Stage(kafka, KP_HTTP_HOST="127.0.0.1")
    worker = workers(stage.env).wait_ready()
    before = open_files(worker.pid)
    with hostile(worker.http_port):
        stage.produce([(None, line, (), i % 4) for i, line in enumerate(LINES[:400])])
        for _ in range(20):
            began = time.monotonic()
            assert worker.get("/healthz") == (200, "ok\n")
            assert worker.get("/readyz") == (200, "ok\n")
            assert time.monotonic() - began < 2
        stage.wait_committed(400)
        worker.wait_metric("kp_records_consumed_total", 400)
        assert open_files(worker.pid) <= before + MAX_CONNECTIONS + 5
        rng = random.Random(seed)
        garbage = [
            (rng.randbytes(2000), b""),
            (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), b"400"),  # TLS
            (b"GET / HTTP/9.9\r\n\r\n", b"400"),
            (b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 100_000 + b"\r\n\r\n", b"400"),
            (b"GET /healthz HTTP/1.1\r\n" + b"A: b\r\n" * 10_000 + b"\r\n", b"400"),
            (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", b"400"),
            (b"POST /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc", b"405"),
            (b"DELETE /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"405"),
            (b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n", b"404"),
            (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 3, b"200"),
        ]
        for request, status in garbage:
            answer = exchange(worker.http_port, request)
            assert answer.split(b" ")[1:2] == ([status] if status else answer.split(b" ")[1:2])
            assert b"aiohttp" not in answer
            assert b"Python" not in answer.split(b"\r\n\r\n")[0]
            assert answer.count(b"HTTP/1.1 ") <= 1, "one answer a connection"
    worker.finish()
    assert "Traceback" not in worker.log()
    assert len(worker.log().splitlines()) < 30, "the log is not the attacker's to fill"

"""The HTTP port: metrics, liveness, readiness, and nothing else."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

import worker.observe.http_server
from worker.observe.http_server import HttpServer
from worker.observe.logs import LIMITED

ACCEPT_WORDS = (
    "application/openmetrics-text", "text/plain", "*/*", "version=", "version=1.0.0", "version=abc", "version=1.x",
    "version=-1", "version=.", "version=99999999999999999999.0", "version=1.0.0.0.a", "version=\u0661.0", "escaping=",
    "escaping=allow-utf-8", "escaping=dots", "escaping=values", "escaping=abc", "q=abc", "version", "=", "charset=x",
    "version=" + "1" * 900, "version=1.0.0\xe9", "version=2.0.0", "x" * 900, "",
)  # fmt: skip


def random_accept(rng: random.Random) -> str:
    """Return an Accept header of words that matter, joined in ways that may mean something."""
    words = [rng.choice(ACCEPT_WORDS) for _ in range(rng.randrange(1, 6))]
    return "".join(word + rng.choice([";", "; ", ",", ", ", "", "=", " "]) for word in words).strip()


class Site:
    """A server on a free port, and what its checks answer."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.problems: dict[str, str | None] = {"healthy": None, "ready": None}
        self.server = HttpServer(
            "127.0.0.1",
            0,
            self.registry,
            healthy=lambda: self.problems["healthy"],
            ready=lambda: self.problems["ready"],
            pages={"/page": lambda query: (b"ids", {"Content-Security-Policy": "default-src 'self'"})},
            names=[" kp.example.org", " ", "Other"],
        )
        self.port = 0

    async def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
        """Return status, content type and body."""
        url = f"http://127.0.0.1:{self.port}{path}"
        async with aiohttp.ClientSession() as session, session.request(method, url, headers=headers) as answer:
            return answer.status, answer.headers["Content-Type"], await answer.text()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = Site()
    site.port = await site.server.start()
    yield site
    await site.server.stop()


async def test_metrics_are_prometheus_text_and_openmetrics_for_whoever_asks(site: Site) -> None:
    Counter("kp_things_total", "Things.", registry=site.registry).inc(3)
    status, content_type, body = await site.get("/metrics")
    assert status == 200
    assert content_type.startswith("text/plain; version=")
    assert "charset=utf-8" in content_type
    samples = {s.name: s.value for family in text_string_to_metric_families(body) for s in family.samples}
    assert samples["kp_things_total"] == 3.0
    status, content_type, body = await site.get("/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert (status, content_type.partition(";")[0]) == (200, "application/openmetrics-text")
    assert body.endswith("# EOF\n")


ESCAPED = {"escaping=values": "U__kp__things__total", "escaping=dots": "kp__things__total"}


async def test_any_accept_header_gets_the_metrics(site: Site, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    Counter("kp_things_total", "Things.", registry=site.registry).inc(3)
    rng = random.Random(seed)
    headers = ["application/openmetrics-text; version=abc", "text/plain; version=abc", *ACCEPT_WORDS]
    for accept in headers + [random_accept(rng) for _ in range(300)]:
        request = f"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: {accept}\r\n\r\n".encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        writer.write(request)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 200"), accept
        assert b"\r\nContent-Type: text/plain" in head or b"\r\nContent-Type: application/openmetrics-text" in head
        assert head.isascii()
        names = ["kp_things_total", *(name for asked, name in ESCAPED.items() if asked in accept)]
        assert any(f"\n{name} 3.0\n".encode() in body for name in names), accept
    assert not caplog.records


async def test_a_failure_is_one_short_line_and_no_traceback(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> str | None:
        raise RuntimeError("word " * 1000)

    site.server._checks["/healthz"] = fail
    status, _, body = await site.get("/healthz")
    assert (status, body) == (500, "failed\n")
    (record,) = caplog.records
    assert record.exc_info is None
    assert "RuntimeError" in record.getMessage()
    assert " at fail:" in record.getMessage()
    assert len(record.getMessage()) < 300
    assert record.name.startswith(LIMITED)


@pytest.mark.parametrize(("path", "check"), [("/healthz", "healthy"), ("/readyz", "ready")])
async def test_a_check_is_200_or_503_with_one_sentence(site: Site, path: str, check: str) -> None:
    assert (await site.get(path))[::2] == (200, "ok\n")
    site.problems[check] = "waiting for an assignment"
    assert (await site.get(path))[::2] == (503, "waiting for an assignment\n")
    for other in {"/healthz", "/readyz", "/metrics"} - {path}:
        assert (await site.get(other))[0] == 200
    site.problems[check] = None
    assert (await site.get(path))[0] == 200
    assert (await site.get(path, method="POST"))[0] == 405


@pytest.mark.parametrize("path", ["/", "/metrics/x", "/debug", "/../etc/passwd"])
async def test_there_is_nothing_else(site: Site, path: str) -> None:
    assert (await site.get(path))[0] == 404


OURS = ["localhost", "LOCALHOST:9108", "localhost.", "127.0.0.1:9108", "10.1.2.3", "[::1]:9108", "kp.example.org:80"]
OTHERS = ["evil.org", "evil.org:9108", "127.0.0.1.evil.org", "x.localhost.org", "", "a b"]


@pytest.mark.parametrize("host", [*OURS, "other", *OTHERS])
async def test_a_page_has_only_our_names_and_probes_have_any(site: Site, host: str) -> None:
    assert (await site.get("/page", Host=host))[0] == (421 if host in OTHERS else 200)
    for path in ("/healthz", "/readyz", "/metrics"):
        assert (await site.get(path, Host=host))[0] == 200


async def test_a_page_takes_any_query_and_no_post_and_its_headers_go_over_ours(site: Site) -> None:
    url = f"http://127.0.0.1:{site.port}/page?domain=%FF%00&domain=x"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        assert (answer.status, await answer.read()) == (200, b"ids")
        assert answer.headers["Content-Security-Policy"] == "default-src 'self'"
        assert (answer.headers["X-Content-Type-Options"], answer.headers["Cache-Control"]) == ("nosniff", "no-store")
    assert (await site.get("/page", method="POST"))[0] == 405


async def test_a_slow_client_is_cut_off_whatever_it_sends(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.observe.http_server, "CONNECTION_SECONDS", 0.5)
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    began = time.monotonic()
    writer.write(b"GET /healthz HTTP/1.1\r\nX-Slow: ")
    with contextlib.suppress(ConnectionError):
        while not reader.at_eof() and time.monotonic() - began < 5:
            writer.write(b"a")
            await writer.drain()
            await asyncio.sleep(0.02)
    writer.close()
    assert 0.4 < time.monotonic() - began < 3


async def test_the_oldest_connection_makes_room_for_a_new_one(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.observe.http_server, "MAX_CONNECTIONS", 3)
    held = [await asyncio.open_connection("127.0.0.1", site.port) for _ in range(3)]
    assert (await site.get("/healthz"))[0] == 200
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(held[0][0].read(), 5) == b""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(held[1][0].read(), 0.2)
    for _, writer in held:
        writer.close()


async def test_headers_tell_no_version_and_allow_nothing(site: Site) -> None:
    async with aiohttp.ClientSession() as session, session.head(f"http://127.0.0.1:{site.port}/metrics") as answer:
        assert answer.status == 200
        assert answer.headers["Server"] == "kp-worker"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["Connection"] == "close"


async def test_a_port_that_is_taken_is_an_os_error(site: Site) -> None:
    other = HttpServer("127.0.0.1", site.port, CollectorRegistry(), lambda: None, lambda: None)
    with pytest.raises(OSError, match=str(site.port)):
        await other.start()
    await other.stop()


async def test_after_stop_nobody_listens() -> None:
    site = Site()
    await site.server.stop()  # before start: nothing to do
    site.port = await site.server.start()
    await site.server.stop()
    with pytest.raises(aiohttp.ClientConnectorError):
        await site.get("/healthz")

"""The HTTP port: /metrics, /healthz, /readyz, and the pages it is given. No client can block the others.

Anyone who reaches the port may use it. So each connection gets one answer and lasts a few seconds, and one connection
too many closes the oldest: a probe or a scrape takes milliseconds, so the oldest one hangs.
"""

import asyncio
import ipaddress
import logging
import re
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from prometheus_client.exposition import choose_encoder

from worker.core.terminal import clean

log = logging.getLogger(__name__)

Check = Callable[[], str | None]  # returns None when all is well, otherwise one sentence that says what is wrong

MAX_CONNECTIONS: Final = 64
"""Most connections at a time: more than probes and scrapers need, and few of the process's file descriptors."""

CONNECTION_SECONDS: Final = 10.0  # longest time that a connection may last, whatever it does: a scrape takes some ms

Page = Callable[[Mapping[str, str]], tuple[bytes, dict[str, str]]]
"""Takes the query of a request, as anyone may send it, and returns the page's body and its headers."""

HEADERS: Final = {
    "Server": "kp-worker",  # without a version
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


class HttpServer:
    """Serves metrics and health. `pages`: by path, with headers that go over HEADERS.

    A page has only the names in `names`, and addresses: a foreign page in a browser could otherwise let its own name
    point here, and read the answer. Probes and scrapes have no such limit.
    """

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        healthy: Check,
        ready: Check,
        pages: Mapping[str, Page] | None = None,
        names: Iterable[str] = (),
    ) -> None:
        self._host = host
        self._port = port
        self._registry = registry
        self._checks = {"/healthz": healthy, "/readyz": ready}
        self._pages = pages or {}
        self._names = {"localhost", host.lower(), *(name.strip().lower() for name in names)} - {""}
        self._runner: web.ServerRunner | None = None

    async def start(self) -> int:
        """Listen; return the port. Raises OSError when it is taken."""
        self._runner = web.ServerRunner(_Server(self._answer))
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()
        return int(self._runner.addresses[0][1])

    def cannot_listen(self, error: OSError) -> str:
        """Return the message for a `start` that has failed."""
        return (
            f"cannot listen on KP_HTTP_HOST={self._host} KP_HTTP_PORT={self._port}: {error.strerror or error}; "
            "set KP_HTTP_PORT to a free port (0: any)"
        )

    async def stop(self) -> None:
        """Close the port."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        if request.path != "/metrics" and request.path not in self._checks and request.path not in self._pages:
            return _response(404, "not found")
        if request.method not in ("GET", "HEAD"):
            return _response(405, "only GET and HEAD", Allow="GET, HEAD")
        if request.path == "/metrics":
            body, content_type = _metrics(self._registry, request.headers.get("Accept", ""))
            return _response(200, body, **{"Content-Type": content_type})
        if request.path in self._pages:
            if not self._is_ours(request.headers.get("Host", "")):
                return _response(421, "not by this name: add it to KP_STATUS_HOSTS")
            body, headers = self._pages[request.path](request.query)
            return _response(200, body, **headers)
        problem = self._checks[request.path]()
        return _response(200 if problem is None else 503, problem or "ok")

    def _is_ours(self, host: str) -> bool:
        """Return whether a Host header is one of the names, or an address."""
        name = re.sub(r":\d*$", "", host).removesuffix(".").lower()
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True


def _metrics(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return the metrics and their content type; text where the library fails on the Accept header."""
    try:
        encode, content_type = choose_encoder(accept)
        if re.fullmatch(r"[\w/.;= -]{1,200}", content_type, re.ASCII):  # it has parts of the Accept header
            return encode(registry), content_type
    except (TypeError, ValueError):
        pass
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


def _response(status: int, content: str | bytes, **headers: str) -> web.Response:
    body = content if isinstance(content, bytes) else f"{clean(content)}\n".encode()
    response = web.Response(
        status=status, body=body, headers={"Content-Type": "text/plain; charset=utf-8", **HEADERS, **headers}
    )
    response.force_close()
    return response


class _Server(web.Server):
    """Bounds the connections in number and time."""

    def __init__(self, answer: Callable[[web.BaseRequest], Any]) -> None:
        super().__init__(answer)
        self._open: dict[web.RequestHandler, tuple[asyncio.Transport, asyncio.TimerHandle]] = {}

    def __call__(self) -> web.RequestHandler:
        """Return the handler of one connection."""
        loop = asyncio.get_running_loop()
        return _Connection(self, loop=loop, access_log=None, lingering_time=0)  # type: ignore[arg-type] # None: no log

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Note a new connection; close the oldest where there are too many."""
        super().connection_made(handler, transport)
        timer = asyncio.get_running_loop().call_later(CONNECTION_SECONDS, transport.abort)
        self._open[handler] = (transport, timer)
        if len(self._open) > MAX_CONNECTIONS:
            oldest, timer = self._open.pop(next(iter(self._open)))
            timer.cancel()
            oldest.abort()

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        """Forget a connection."""
        super().connection_lost(handler, exc)
        if handler in self._open:
            self._open.pop(handler)[1].cancel()


class _Connection(web.RequestHandler):
    """Answers requests that are not HTTP without details, and logs none of them."""

    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Return the answer to a request that cannot be read, or that failed."""
        if status == 500:
            self.log_exception("a request failed", exc_info=exc)
        return _response(status, "failed" if status == 500 else "bad request")

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log a failure as one short line: nobody may fill the log through the port (logs.py limits the rate)."""
        error = kw.get("exc_info")
        failure = f"{args[0] % args[1:]}: {error!r}"[:200]  # it may quote the request
        place = traceback.extract_tb(error.__traceback__)[-1:] if isinstance(error, BaseException) else []
        where = f" at {place[0].name}:{place[0].lineno}" if place else ""
        log.error("HTTP port: %s%s", failure, where)

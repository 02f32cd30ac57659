"""HTTP servers of tests: one in a thread of its own, a gateway in front of another server, a collector of spans."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from yarl import URL

from worker.lab.broker.kafka_node import free_ports

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
HOP_BY_HOP = {"connection", "content-length", "date", "host", "server", "transfer-encoding"}


@asynccontextmanager
async def served(app: web.Application | Handler, port: int = 0, **runner_options: Any) -> AsyncIterator[str]:
    """Serve an application, or answer every request by the handler, on a free port by default; yields the address.

    At the end requests that are not answered by then are cancelled.
    """
    if not isinstance(app, web.Application):
        handler, app = app, web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01, **runner_options)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", port), backlog=128)
    try:
        await web.SockSite(runner, listener).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        await accept_no_more(listener)
        await runner.cleanup()


async def accept_no_more(listener: socket.socket) -> None:
    """Before its server is closed: asyncio forgets a connection accepted just then (python/cpython#109564)."""
    asyncio.get_running_loop().remove_reader(listener)
    await asyncio.sleep(0)


class ServerThread:
    """A server in a thread of its own while it is entered; `make` returns what serves it at an address, given the port.

    `url`: its address, the same again after `stop` and `start`.
    """

    def __init__(self, make: Callable[[int], AbstractAsyncContextManager[str]]) -> None:
        self.url = ""
        self._make = make
        self._serving: AbstractAsyncContextManager[str] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> None:
        # While it is stopped, no connection may get its port, as one of those that the system chooses from.
        self._serving = self._make(int(self.url.rpartition(":")[2] or free_ports(1)[0]))
        self.url = self.call(self._serving.__aenter__())

    def stop(self) -> None:
        """Close all connections, and refuse new ones."""
        if self._serving is not None:
            self.call(self._serving.__aexit__(None, None, None))
            self._serving = None

    def call(self, work: Any) -> Any:
        """Run a coroutine in the server's loop; return what it returns."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def __enter__(self) -> Self:
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.call(self._cancel_all())
        self.call(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


# -- a gateway


@dataclass(frozen=True)
class Asked:
    """A request as the gateway sees it; `path` as it was sent, `length` of the body that it announces."""

    method: str
    path: str
    body: bytes
    length: int


@dataclass(frozen=True)
class Reply:
    """What the gateway answers itself: `body`, written `times` times with `seconds` in between.

    `raw`: `body` is all that is written, and the connection is closed. `early`: the same before the request's body is
    read; then the rule is asked without it.
    """

    status: int = 403
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    raw: bool = False
    early: bool = False
    times: int = 1
    seconds: float = 0.0


Rule = Callable[[Asked], Reply | None]


class Gateway:
    """Passes what `rule` answers with None. `refused`: how many requests it has answered itself, by method."""

    def __init__(self, upstream: str, rule: Rule) -> None:
        self.upstream = upstream
        self.rule = rule
        self.refused = {"GET": 0, "POST": 0}

    @asynccontextmanager
    async def serve(self, port: int = 0) -> AsyncIterator[str]:
        """Listen on a free port by default; yields the address."""
        async with aiohttp.ClientSession(auto_decompress=False) as session:

            async def handle(request: web.Request) -> web.StreamResponse:
                return await self._handle(request, session)

            async with served(handle, port, max_line_size=2**20) as url:
                yield url

    async def _handle(self, request: web.Request, session: aiohttp.ClientSession) -> web.StreamResponse:
        length = request.content_length or 0
        early = self.rule(Asked(request.method, request.raw_path, b"", length))
        if early is not None and early.early:
            return await self._refuse(request, early)
        asked = Asked(request.method, request.raw_path, await request.read(), length)
        reply = self.rule(asked)
        if reply is not None:
            return await self._refuse(request, reply)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        url = URL(self.upstream + request.raw_path, encoded=True)
        async with session.request(
            asked.method, url, data=asked.body or None, headers=headers, allow_redirects=False
        ) as got:
            kept = {name: value for name, value in got.headers.items() if name.lower() not in HOP_BY_HOP}
            return web.Response(status=got.status, body=await got.read(), headers=kept)

    async def _refuse(self, request: web.Request, reply: Reply) -> web.StreamResponse:
        self.refused[request.method] += 1
        if reply.raw or reply.early:
            assert request.transport is not None
            request.transport.write(reply.body)
            with contextlib.suppress(ConnectionError):
                await request.read()  # a close with unread data would reset the connection
            request.transport.close()
            return web.Response()
        answer = web.StreamResponse(status=reply.status, headers=reply.headers)
        await answer.prepare(request)
        with contextlib.suppress(ConnectionError):
            for _ in range(reply.times):
                await answer.write(reply.body)
                await asyncio.sleep(reply.seconds)
        return answer


class GatewayThread(ServerThread):
    """A gateway for processes."""

    def __init__(self, upstream: str, rule: Rule) -> None:
        self.gateway = Gateway(upstream, rule)
        super().__init__(self.gateway.serve)


# -- a collector


class Collector(ServerThread):
    """A collector of OpenTelemetry spans: it takes them by OTLP over HTTP, and keeps them."""

    def __init__(self) -> None:
        super().__init__(lambda port: served(self._take, port))
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []

    @property
    def settings(self) -> dict[str, str]:
        """Those of a worker that sends its spans here."""
        return {"KP_TRACING": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": self.url}

    async def _take(self, request: web.Request) -> web.Response:
        for resource in ExportTraceServiceRequest.FromString(await request.read()).resource_spans:
            self.resources.append({it.key: it.value.string_value for it in resource.resource.attributes})
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return web.Response()

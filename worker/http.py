"""The HTTP port: /metrics, /healthz, /readyz. It gives nothing else away."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

Check = Callable[[], str | None]
"""Returns None when all is well, else one sentence that says what is not."""


class HttpServer:
    """Serves metrics and health. `healthy` is for liveness, `ready` for readiness."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry, healthy: Check, ready: Check) -> None:
        self._host = host
        self._port = port
        self._registry = registry
        self._checks = {"/healthz": healthy, "/readyz": ready}
        self._runner: web.AppRunner | None = None

    async def start(self) -> int:
        """Listen; return the port. Raises OSError when it is taken."""
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        for path in self._checks:
            app.router.add_get(path, self._check)
        self._runner = web.AppRunner(app, access_log=None, keepalive_timeout=15)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Close the port."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._registry), headers={"Content-Type": content_type})

    async def _check(self, request: web.Request) -> web.Response:
        problem = self._checks[request.path]()
        return web.Response(text=(problem or "ok") + "\n", status=200 if problem is None else 503)

"""The affinity proxy in the test's process, in front of small servers on free ports."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from engine.wire.config import EngineConfig
from server import proxy
from server.api.http.connection import make_server, url_of
from server.proxy import Proxy
from tests.eventually import HANG_GUARD_S, eventually_async

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Replica:
    def __init__(self, name: str, handler: Handler | None = None):
        self.name = name
        self.healthy = True
        self.runs = asyncio.Event()  # while it is not set, connections are accepted and nothing is answered
        self.runs.set()
        self.num_requests = 0
        self.port = 0
        self.handler = handler or self._say_name

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", self._health)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def kill(self) -> None:
        for site in list(self._runner.sites):
            await site.stop()
        assert self._runner.server is not None
        for connection in list(self._runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        await self.runs.wait()
        return web.Response(status=200 if self.healthy else 503)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.num_requests += 1
        return await self.handler(request)

    async def _say_name(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        return web.Response(text=self.name)


class Routed:
    def __init__(self, proxy: Proxy, replicas: list[Replica], url: str, client: aiohttp.ClientSession):
        self.proxy, self.replicas, self.url, self.client = proxy, replicas, url, client

    async def ask(self, session: str | None = None, body: bytes = b"{}") -> str:
        headers = {"x-session-id": session} if session is not None else {}
        async with self.client.post(f"{self.url}/v1/chat/completions", data=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.text()

    async def until(self, num_healthy: int) -> None:
        backends = self.proxy.balancer.backends
        await eventually_async(lambda: sum(backend.healthy for backend in backends) == num_healthy, f"{num_healthy} healthy replicas")

    def of(self, url: str) -> Replica:
        return next(replica for replica in self.replicas if replica.url == url)


@asynccontextmanager
async def routed(*replicas: Replica) -> AsyncIterator[Routed]:
    for replica in replicas:
        await replica.start()
    proxy, config = Proxy([replica.url for replica in replicas]), EngineConfig()
    server = make_server(proxy, config.max_connections, config, grace=1, is_proxy=True)
    listener = socket.create_server(("127.0.0.1", 0))
    async with proxy.running():
        serving = asyncio.create_task(server.listen(listener))
        async with aiohttp.ClientSession() as client:
            yield Routed(proxy, list(replicas), url_of(listener), client)
        server.should_exit = True
        await serving
    for replica in replicas:
        await replica.kill()


@pytest.fixture
def patient_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "POLL_SECONDS", 0.05)
    for name in ("HEALTH_SECONDS", "CONNECT_SECONDS"):
        monkeypatch.setattr(proxy, name, HANG_GUARD_S)

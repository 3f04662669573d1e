"""HTTP servers of the api and the proxy: uvicorn's, with the limits for which it has no option: size and time of a head, number of
connections, refused bodies.

The protocol's parser (httptools) reads heads and chunks. Limits per client and of slow transfers belong to a reverse proxy.
"""

import asyncio
import contextlib
import functools
import logging
import re
import resource
import socket
import weakref
from collections.abc import Iterator
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from engine.wire.config import EngineConfig
from engine.wire.messages import ErrorInfo
from server.errors import error_body

MAX_HEAD_BYTES = 1 << 16  # also of a chunk's extension and of trailers; checked after each read
HEAD_SECONDS = 20.0
BODY_SECONDS = 30.0  # after the head, or twice that after a piece of the body, without a further piece
LINGER_S = 1.0  # before a connection with unread bytes is closed, so that its client can read the error
BACKLOG = 2048
NUM_OTHER_FILES = 256  # file descriptors of the api other than connections
EXTENSION = "connection"
# httptools drops the body of a request that offers an upgrade, as Java's client does.
UPGRADE = re.compile(rb"\A((?:[^\r\n]++\r\n)+?)upgrade:", re.IGNORECASE)


def connection_limit(config: EngineConfig, num_other_files: int = NUM_OTHER_FILES, files_per_client: int = 1) -> int:
    """Return the maximum number of connections, which the limit on open files also bounds."""
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(config.max_connections, (num_files - num_other_files) // files_per_client))


class LimitedProtocol(HttpToolsProtocol):
    """Protocol of one connection. Connections beyond `max_connections` are closed."""

    def __init__(self, max_connections: int, **of_uvicorn: Any):
        super().__init__(**of_uvicorn)
        self._max_connections = max_connections
        self._is_refused = False  # further bytes are not read
        self._awaits_head = True
        self._num_silent = 0  # bytes since the last complete head or piece of a body
        self._running: RequestResponseCycle | None = None  # the request that is answered; `cycle` may be the next one
        self._timer: asyncio.TimerHandle | None = None  # of a head, of a body, or of the close after a refusal
        self._is_stalled = False  # no piece of the body has arrived since the timer started

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            transport.abort()
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._running is not None:
            self._end(self._running)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        is_new = self._awaits_head and not self._num_silent
        self._num_silent += len(data)
        super().data_received(UPGRADE.sub(rb"\1x-offer:", data, 1) if is_new else data)
        if self._num_silent > MAX_HEAD_BYTES:
            self._refuse(431, "The request's headers are too large.")
        elif self._awaits_head and self._num_silent:
            self._start_timer()

    def on_headers_complete(self) -> None:
        """Refuse what httptools accepts and another server on the way may understand differently."""
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        has_hosts = sum(name == b"host" for name, _ in self.headers) > 1
        if codings not in ([], [b"chunked"]) or has_hosts or self.parser.should_upgrade():
            raise httptools.HttpParserError
        self._awaits_head, self._num_silent = False, 0
        self._stop_timer()
        self.scope["extensions"] = {EXTENSION: weakref.proxy(self)}  # weak, as the protocol refers to the scope
        super().on_headers_complete()
        self.headers = []  # of the trailers, which must not become headers
        self._await_body()

    def on_body(self, body: bytes) -> None:
        self._num_silent, self._is_stalled = 0, False
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._awaits_head, self._num_silent = True, 0
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._running is not None and self._running.more_body:
            self._linger()
        else:
            super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def abort(self) -> None:
        assert self._running is not None
        self._end(self._running)
        self.transport.abort()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, functools.partial(self._answer, cycle, app))

    async def _answer(self, cycle: RequestResponseCycle, app: ASGI3Application, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            """Announce that the connection will be closed if the body is not complete. uvicorn would close it without `_linger`."""
            if message["type"] == "http.response.start":
                cycle.keep_alive &= not cycle.more_body
            elif cycle.more_body and not message.get("more_body"):
                cycle.keep_alive = True
            await send(message)

        await app(scope, receive, send_last)  # type: ignore[arg-type]

    def _refuse(self, status: int, message: str) -> None:
        """Stop reading, end the running request, and send an error unless its response has begun."""
        if self._is_refused:
            return
        running = self._running
        is_idle = running is None or running.response_complete
        if running is not None and not is_idle:
            self._end(running)
        if running is None or is_idle or not running.response_started:
            body = error_body(ErrorInfo(status, message))
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self._linger()

    def _linger(self) -> None:
        self._is_refused = True
        self._stop_timer()
        self._unset_keepalive_if_required()
        self.transport.pause_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_S, self.transport.abort)

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _await_body(self) -> None:
        self._is_stalled, self._timer = True, self.loop.call_later(BODY_SECONDS, self._on_silence)

    def _on_silence(self) -> None:
        if self._is_stalled and not self.flow.read_paused:
            self._refuse(408, "The request body arrived too slowly.")
        else:
            self._await_body()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @staticmethod
    def _end(request: RequestResponseCycle) -> None:
        request.disconnected = True
        request.message_event.set()


def connection_of(scope: Scope) -> LimitedProtocol:
    connection: LimitedProtocol = scope["extensions"][EXTENSION]
    return connection


class Server(uvicorn.Server):
    """uvicorn without its signal handling: the process decides when it stops."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def listen(self, listener: socket.socket) -> None:
        if listener.family != socket.AF_UNIX:  # its connections inherit it: the kernel closes one whose client reads nothing
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * self.config.timeout_keep_alive)
        await self.serve(sockets=[listener])


def make_server(app: ASGIApp, max_connections: int, config: EngineConfig, grace: int, is_proxy: bool = False) -> Server:
    """Return a listener's server. Running requests have `grace` seconds at shutdown. A proxy adds no headers to responses and trusts none
    of the request's."""
    http: Any = functools.partial(LimitedProtocol, max_connections)
    return Server(uvicorn.Config(
        app, loop="uvloop", http=http, ws="none", lifespan="off", access_log=False, log_config=None,
        log_level=logging.ERROR, server_header=False,  # any client can cause any number of warnings
        date_header=not is_proxy, proxy_headers=not is_proxy, timeout_keep_alive=config.idle_timeout, timeout_graceful_shutdown=grace,
        backlog=BACKLOG, root_path=config.root_path,
    ))  # fmt: skip


def url_of(listener: socket.socket) -> str:
    name = listener.getsockname()
    if isinstance(name, str):  # a Unix socket
        return f"unix:{name}"
    host, port, *_ = name
    return "http://" + (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")

"""Creation of all HTTP servers: the api's, the metrics server and the proxy's, with the same protocol and limits."""

import contextlib
import functools
import logging
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from engine.wire.config import EngineConfig
from server.api.http.connection import LimitedProtocol

BACKLOG = 2048


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
        backlog=BACKLOG, root_path=config.root_path, ssl_certfile=config.ssl_certfile, ssl_keyfile=config.ssl_keyfile,
    ))  # fmt: skip


def url_of(listener: socket.socket, is_tls: bool) -> str:
    name = listener.getsockname()
    if isinstance(name, str):  # a Unix socket
        return f"unix:{name}"
    host, port, *_ = name
    return f"http{'s' * is_tls}://" + (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")

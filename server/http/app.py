"""The api process: sockets, routes, authorisation, health. `python -m server.http.app RUNTIME.json`, started by the launcher.

main ──▶ serve: uvicorn on our own socket  +  pump: Events of the processor ──▶ Client
"""

import asyncio
import contextlib
import hmac
import select
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn
import uvloop
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.arena import Arena
from engine.config import VERSION
from engine.ipc import AsyncInbox, Child, Outbox
from engine.messages import API_ARENA, ErrorInfo, Events, ToProcessor
from server.api.chat import ChatEndpoint
from server.checkpoint import read_checkpoint
from server.errors import RequestError, error_type
from server.http.client import Client
from server.http.direct import DirectProtocol
from server.http.metrics import Metrics
from server.http.page import Page
from server.http.reply import error_response
from server.warm import warm_up

OPEN_PATHS = frozenset({"/", "/health", "/health/live"})
SHUTTING_DOWN = ErrorInfo(503, "The server is shutting down.", "server_error", code="shutting_down", retry_after=5)
GRACE_S = 3  # for writing the last errors out
KEEP_ALIVE_S = 75
BACKLOG = 2048


class ApiKeyGuard:
    """ASGI middleware: everything but OPEN_PATHS needs `Authorization: Bearer <key>`, decided on the path that will be routed."""

    def __init__(self, app: ASGIApp, api_key: str):
        self._app = app
        self._expected = b"bearer " + api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._is_authorised(scope):
            error = ErrorInfo(401, "A valid API key is required.", error_type(401), code="invalid_api_key")
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_authorised(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given[:7].lower() + given[7:], self._expected)


class Api:
    """The routes and what they share."""

    def __init__(self, child: Child):
        self._child = child
        self.arena = Arena(child.runtime.arena_fds[API_ARENA], child.arena_size(API_ARENA))
        outbox: Outbox[ToProcessor] = Outbox(child.run_dir, "processor")
        self.client = Client(outbox, self.arena)
        self._metrics = Metrics(self.client)
        defaults = read_checkpoint(Path(child.runtime.model_folder)).sampling
        self._name = child.runtime.model_name
        self._created = int(time.time())
        self._chat = ChatEndpoint(child.config, self._name, defaults, self.arena, self.client, self._metrics)

    def build(self) -> ASGIApp:
        """The ASGI application."""
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        app.router.routes.append(Route("/v1/chat/completions", self._chat, methods=["POST"]))
        app.add_route("/", Page().show, methods=["GET"])
        app.add_route("/v1/models", self._models, methods=["GET"])
        app.add_route("/health", self._health, methods=["GET"])
        app.add_route("/health/live", self._live, methods=["GET"])
        app.add_route("/metrics", self._show_metrics, methods=["GET"])
        app.add_route("/version", self._version, methods=["GET"])
        app.add_exception_handler(RequestError, self._on_request_error)
        app.add_exception_handler(ClientDisconnect, self._on_disconnect)
        app.add_exception_handler(HTTPException, _on_http_error)
        app.add_exception_handler(Exception, self._on_bug)
        return ApiKeyGuard(app, self._child.config.api_key) if self._child.config.api_key else app

    async def pump(self, inbox: AsyncInbox[Events], url: str) -> None:
        """Hands the processor's events out, for ever; the first heartbeat makes us ready. At idle the arena must be empty."""
        while True:
            message = await inbox.recv()
            was_started = self.client.started
            self.client.dispatch(message)
            if self.client.started and not was_started:
                self._child.ready(url)
            if message.stats is not None and not (self.client.num_bodies or self._chat.num_reading):
                assert self.arena.is_empty(), "a request body was lost in the arena"

    async def _models(self, request: Request) -> Response:
        card = {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "engine",
            "max_model_len": self.client.stats.max_model_len or self._child.runtime.max_model_len,  # 0 before the engine is ready
        }
        return JSONResponse({"object": "list", "data": [card]})

    async def _health(self, request: Request) -> Response:
        """200 only while the engine makes progress: a wedged engine and one that still starts are 503."""
        if self.client.healthy:
            return JSONResponse({"status": "ok"})
        status = "stalled" if self.client.started else "starting"
        return JSONResponse({"status": status}, 503, {"Retry-After": "5"})

    async def _live(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _on_request_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        self._metrics.note_response(error.info.status)
        return error_response(error.info)

    async def _on_disconnect(self, request: Request, error: Exception) -> Response:
        """The body was cut: nobody reads this."""
        return error_response(ErrorInfo(400, "The request body ended early."))

    async def _on_bug(self, request: Request, error: Exception) -> Response:
        """Starlette raises the error again afterwards, and uvicorn logs it."""
        self._metrics.note_response(500)
        return error_response(ErrorInfo(500, "The server failed to handle this request.", error_type(500)))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(ErrorInfo(error.status_code, str(error.detail), error_type(error.status_code)))


class Server(uvicorn.Server):
    """uvicorn without its signal handling: the process decides when it stops."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(child: Child) -> None:
    """Serves until a signal, the launcher's death or a broken invariant; then every waiting client gets an error."""
    inbox: AsyncInbox[Events] = AsyncInbox(child.run_dir, "api", Events)
    listener = socket.socket(fileno=child.runtime.listener_fd)
    listener.listen(BACKLOG)  # now: whoever reads the address in our ready message may connect
    api = Api(child)
    warm_up(api.arena)
    config = uvicorn.Config(
        api.build(), loop="uvloop", http=DirectProtocol, ws="none", lifespan="off", access_log=False, log_config=None, server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=GRACE_S, backlog=BACKLOG,
    )  # fmt: skip
    server = Server(config)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        api.client.refuse_all(SHUTTING_DOWN)
        server.should_exit = True

    def stop_from_thread() -> None:
        loop.call_soon_threadsafe(stop)

    loop.add_signal_handler(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides when to stop
    child.on_orphaned(stop_from_thread, grace=GRACE_S + 5)
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    pump = asyncio.create_task(api.pump(inbox, url))
    pump.add_done_callback(lambda task: stop())
    await server.serve(sockets=[listener])
    if pump.done():
        pump.result()
    pump.cancel()


def is_orphaned(child: Child) -> bool:
    """Whether the launcher is gone: its end of the lifeline is closed."""
    readable, _, _ = select.select([child.runtime.lifeline_fd], [], [], 0)
    return bool(readable)


def main() -> None:
    """Entry point. What the launcher would clean up is cleaned up here if the launcher has died."""
    child = Child.attach("api")
    try:
        uvloop.run(serve(child))
    except Exception as error:
        child.failed(f"{type(error).__name__}: {error}")
        raise
    finally:
        if is_orphaned(child):
            shutil.rmtree(child.run_dir, ignore_errors=True)


if __name__ == "__main__":
    main()

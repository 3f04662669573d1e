"""The api process: sockets and routes. `python -m server.api.main RUNTIME.json`, started by the launcher.

main ──▶ serve: uvicorn on our own socket  +  pump: Events of the processor ──▶ Client
"""

import asyncio
import functools
import logging
import random
import signal
import socket
from pathlib import Path

import msgspec
import uvloop
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from engine.wire.arena import Arena
from engine.wire.child import Child, keep_freed_blocks
from engine.wire.config import VERSION, read_api_keys
from engine.wire.ipc import AsyncInbox, Outbox
from engine.wire.messages import API_ARENA, ErrorInfo, Events, ToProcessor
from server.api.chat import completions as chat
from server.api.chat.adapters import adapter_routes
from server.api.chat.endpoint import Endpoint, Service
from server.api.chat.routes import BodyRoute, DescribedRoute, describe
from server.api.chat.status import StatusRoutes
from server.api.dialects import anthropic, generate, pooling, responses, tokens, updates
from server.api.http.connection import BACKLOG, connection_limit, make_server, url_of
from server.api.http.metrics import Metrics, traced
from server.api.http.middleware import ERROR_BODIES, Guard, RequestLog, check_key, check_type, error_response, record_of
from server.api.http.registry import RequestRegistry
from server.api.page import page_route
from server.checkpoint import read_checkpoint
from server.errors import INTERNAL_ERROR, RequestError

# Registration of the dialects: routes, and error bodies that differ from OpenAI's, by path prefix.
DIALECTS = chat, tokens, anthropic, responses, pooling, generate
ENDPOINTS: dict[str, type[Endpoint]] = {path: endpoint for dialect in DIALECTS for path, endpoint in dialect.ROUTES.items()}
ERROR_BODIES |= {anthropic.MESSAGES_PATH: anthropic.message_error_body}
SHUTTING_DOWN = ErrorInfo(503, "The server is shutting down.", code="shutting_down", retry_after=5)
TITLE = "A small serving engine for Qwen3-VL"
LICENCE = {"name": "Apache-2.0", "identifier": "Apache-2.0"}
DRAIN_POLL_S = 0.05
ALIVE_S = 1.0
GRACE_S = 3  # to send the last errors

logger = logging.getLogger(__name__)


class Api:
    def __init__(self, child: Child):
        self._child = child
        self.arena = Arena(child.runtime.arena_fds[API_ARENA], child.arena_size(API_ARENA))
        outbox: Outbox[ToProcessor] = Outbox(child.run_dir, "processor")
        self.registry = RequestRegistry(outbox, self.arena, child.config.max_queued_requests)
        runtime = child.runtime
        self._metrics = Metrics(self.registry, runtime.model_names[0], child.config.block_size)
        config = child.config
        checkpoint = read_checkpoint(Path(runtime.model_folder), config.chat_template, config.generation_config == "vllm")
        seeds = random.SystemRandom() if config.seed is None else random.Random(config.seed)
        self._service = Service(
            config=config, checkpoint=checkpoint, model_names=runtime.model_names, max_model_len=runtime.max_model_len, arena=self.arena,
            registry=self.registry, metrics=self._metrics, seeds=seeds, adapters={each.name: each for each in runtime.adapters},
        )  # fmt: skip
        self._status = StatusRoutes(self._service)

    def build(self) -> ASGIApp:
        config = self._child.config
        routes: list[BaseRoute] = [BodyRoute(path, endpoint(self._service)) for path, endpoint in ENDPOINTS.items()]
        routes += [*adapter_routes(self._service), *self._status.routes()]
        if config.enable_weight_updates:
            routes += updates.WeightUpdates(self._child.run_dir, self.registry).routes()
        routes.append(page_route())

        @functools.cache
        def document() -> bytes:
            return msgspec.json.encode(describe(routes, {"title": TITLE, "version": VERSION, "license": LICENCE}))

        async def description() -> Response:
            """This description."""
            return Response(await asyncio.to_thread(document), media_type="application/json")

        routes.append(DescribedRoute("/openapi.json", description))
        app = FastAPI(routes=routes, openapi_url=None, redirect_slashes=False, exception_handlers={
            RequestError: self._on_request_error, ClientDisconnect: self._on_disconnect, HTTPException: _on_http_error,
            Exception: self._on_bug,
        })  # fmt: skip
        guarded: ASGIApp = Guard(app, check_type)
        if keys := read_api_keys(config):
            guarded = Guard(guarded, functools.partial(check_key, [key.encode() for key in keys]))
        if config.allowed_hosts:
            guarded = TrustedHostMiddleware(guarded, _listed(config.allowed_hosts), www_redirect=False)
        if config.allowed_origins:  # outside the key check: a preflight request has no key
            origins = _listed(config.allowed_origins)
            guarded = CORSMiddleware(guarded, origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["x-request-id"])
        if config.otlp_traces_endpoint:
            guarded = traced(guarded, config.otlp_traces_endpoint)
        return RequestLog(guarded, is_silent=not config.access_log)

    async def pump(self, inbox: AsyncInbox[Events], url: str) -> None:
        """Pass the processor's events to the clients. The first heartbeat marks the server as ready."""
        while True:
            message = await inbox.recv()
            is_first = not self.registry.health.heartbeat
            self.registry.dispatch(message)
            if is_first and self.registry.health.heartbeat:
                self._child.ready(url)

    async def report_to_launcher(self) -> None:
        while True:
            if self.registry.health.state == "ok":
                self._child.report_well()
            await asyncio.sleep(ALIVE_S)

    async def _on_request_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        self._metrics.note_refusal(error.info)
        record_of(request.scope).reason = error.info.message
        return error_response(error.info, request.scope)

    async def _on_disconnect(self, request: Request, error: Exception) -> Response:
        return error_response(ErrorInfo(400, "The request body ended early."), request.scope)

    async def _on_bug(self, request: Request, error: Exception) -> Response:
        self._metrics.note_refusal(INTERNAL_ERROR)
        return error_response(INTERNAL_ERROR, request.scope)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = f"There is no route {request.url.path[:100]}." if error.status_code == 404 else str(error.detail)
    info = ErrorInfo(error.status_code, words)
    record_of(request.scope).reason = info.message
    response = error_response(info, request.scope)
    response.headers.update(error.headers or {})  # `Allow` of a 405
    return response


def _listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",")]


async def serve(child: Child) -> None:
    """Serve until a signal, the launcher's exit or a violated invariant; then every waiting client gets an error."""
    inbox: AsyncInbox[Events] = AsyncInbox(child.run_dir, "api", Events)
    listener = socket.socket(fileno=child.runtime.listener_fd)
    listener.listen(BACKLOG)  # at once: clients may connect when the address is printed
    api = Api(child)
    server = make_server(api.build(), connection_limit(child.config), child.config, GRACE_S)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        api.registry.refuse_all(SHUTTING_DOWN)
        server.should_exit = True

    async def drain() -> None:
        api.registry.refuse_new(SHUTTING_DOWN)
        while api.registry.num_streams or api.registry.replies:
            await asyncio.sleep(DRAIN_POLL_S)
        stop()

    loop.add_signal_handler(signal.SIGTERM, stop)
    draining: list[asyncio.Task[None]] = []  # the event loop keeps only weak references to tasks
    loop.add_signal_handler(signal.SIGUSR1, lambda: draining.append(asyncio.create_task(drain())))
    child.on_orphaned(lambda: loop.call_soon_threadsafe(stop), grace=GRACE_S + 5)
    pump = asyncio.create_task(api.pump(inbox, url_of(listener)))
    pump.add_done_callback(lambda task: stop())
    reports = asyncio.create_task(api.report_to_launcher())
    await server.listen(listener)
    reports.cancel()
    if pump.done():
        pump.result()
    pump.cancel()


def main() -> None:
    child = Child.attach("api")
    keep_freed_blocks()  # bodies arrive in pieces of 256 KiB
    try:
        uvloop.run(serve(child))
    except Exception as error:
        child.failed(f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main()

"""The HTTP server and the api inside the test's process: a client is a `Wire`, the processor is a script, and timeouts pass at once."""

import asyncio
import contextlib
import functools
import os
import selectors
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import httptools
import httpx
import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.wire.arena import create_memfd
from engine.wire.child import Child, Runtime
from engine.wire.config import EngineConfig
from engine.wire.messages import Abort, Event, Events, MediaRef, Payload, Submit, ToProcessor, VideoRef
from engine.wire.stats import EngineStats
from server.api.http.connection import LimitedProtocol, connection_limit, make_server
from server.api.main import Api
from tests.eventually import HANG_GUARD_S
from tests.unit.engine.arenas import check_arena

T = TypeVar("T")

MIB = 1 << 20
HIGH_WATER = 1 << 16  # unsent bytes beyond which asyncio pauses a writer


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop whose clock jumps to the next timer when nothing is ready and no thread works for it."""

    def __init__(self) -> None:
        super().__init__()
        self._now = time.monotonic()
        self._num_in_threads = 0
        selector = cast(selectors.BaseSelector, self._selector)
        self._select = selector.select
        selector.select = self._jump

    def time(self) -> float:
        return self._now

    def run_in_executor(self, executor: Any, func: Any, *arguments: Any) -> Any:
        future = super().run_in_executor(executor, func, *arguments)
        self._num_in_threads += 1
        future.add_done_callback(self._note_end_of_thread)
        return future

    def _note_end_of_thread(self, _: "Future[Any]") -> None:
        self._num_in_threads -= 1

    def _jump(self, timeout: float | None = None) -> Any:
        must_wait = timeout is None or (timeout > 0 and self._num_in_threads > 0)
        ready = self._select(HANG_GUARD_S if must_wait else 0)
        if not ready and must_wait:
            raise AssertionError("the test waits for something that never happens")
        if not ready and timeout:
            self._now += timeout
        return ready


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    failures: list[Exception] = []

    def note(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "handle" in context:
            failures.append(context["exception"])

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.get_loop().set_exception_handler(note)
        result = runner.run(work)
    if failures:
        raise failures[0]
    return result


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        run_virtually(test(*arguments, **fixtures))

    return run


async def settle() -> None:
    await asyncio.sleep(1e-3)


class Wire(asyncio.Transport):
    """Transport of one connection. The server calls the methods of `asyncio.Transport`, the test those of the client."""

    def __init__(self, protocol: asyncio.BaseProtocol):
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._protocol = protocol
        self._input: deque[bytes] = deque()
        self._unsent = bytearray()
        self._is_paused = self._is_lost = False
        self.received = bytearray()  # by the client
        self.reads = True  # whether the client reads
        self.is_closed = self.is_aborted = False  # by the server

    def send(self, *pieces: bytes) -> None:
        self._input.extend(piece for piece in pieces if piece)
        self._loop.call_soon(self._deliver)

    def end(self) -> None:
        if not cast(asyncio.Protocol, self._protocol).eof_received():
            self.close()

    def leave(self) -> None:
        self.is_closed = True
        self._loop.call_soon(self._lose, ConnectionResetError())

    def read(self, num_bytes: int) -> None:
        self.received += self._unsent[:num_bytes]
        del self._unsent[:num_bytes]
        if len(self._unsent) <= HIGH_WATER // 4:
            self._protocol.resume_writing()
        self._close_if_sent()

    @property
    def answers(self) -> list[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = []
        parts: list[bytes] = []

        def complete() -> None:
            found.append((parser.get_status_code(), b"".join(parts)))
            parts.clear()

        parser = httptools.HttpResponseParser(SimpleNamespace(on_body=parts.append, on_message_complete=complete))
        parser.feed_data(self.received)
        return found

    @property
    def statuses(self) -> list[int]:
        return [status for status, _ in self.answers]

    def write(self, data: Any) -> None:
        assert not self.is_closed
        if self.reads:
            self.received += data
        else:
            self._unsent += data
            if len(self._unsent) > HIGH_WATER:
                self._protocol.pause_writing()

    def close(self) -> None:
        self.is_closed = True
        self._close_if_sent()

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True
        self._unsent.clear()
        self._loop.call_soon(self._lose, None)

    def is_closing(self) -> bool:
        return self.is_closed

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Shutting down one direction, as the server does after an error."""

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        self._loop.call_soon(self._deliver)

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self if name == "socket" else default

    def getpeername(self) -> tuple[str, int]:
        return "10.0.0.1", 50_000

    def getsockname(self) -> tuple[str, int]:
        return "10.0.0.100", 8000

    def _deliver(self) -> None:
        while self._input and not self._is_paused and not self.is_closed and not self._is_lost:
            cast(asyncio.Protocol, self._protocol).data_received(self._input.popleft())

    def _close_if_sent(self) -> None:
        if self.is_closed and not self._unsent:
            self._loop.call_soon(self._lose, None)

    def _lose(self, error: Exception | None) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._protocol.connection_lost(error)
            del self._protocol  # as asyncio's own transports do


class HttpServer:
    """The limited HTTP server of an application. Make it inside a running loop."""

    def __init__(self, app: ASGIApp, config: EngineConfig | None = None):
        config = config or EngineConfig()
        self.max_connections = connection_limit(config)
        self._server = make_server(app, self.max_connections, config, grace=1)
        self._server.config.load()

    def connect(self) -> Wire:
        of_uvicorn: dict[str, Any] = {"config": self._server.config, "server_state": self._server.server_state, "app_state": {}}
        protocol = LimitedProtocol(self.max_connections, **of_uvicorn)
        wire = Wire(protocol)
        protocol.connection_made(wire)
        return wire

    async def ask(self, *pieces: bytes) -> Wire:
        wire = self.connect()
        wire.send(*pieces)
        await settle()
        return wire


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    num_bytes = 0
    while (message := await receive())["type"] == "http.request":
        num_bytes += len(message["body"])
        if not message["more_body"]:
            break
    answer = f"{scope['method']} {scope['path']} {num_bytes}".encode("utf-8", "replace")
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(answer)).encode())]})
    await send({"type": "http.response.body", "body": answer})


def client_of(app: ASGIApp) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


Script = Callable[["ServedApi", Submit], None]


def say(*texts: str) -> Script:
    def script(api: "ServedApi", submit: Submit) -> None:
        for index in range(submit.n):
            for number, text in enumerate(texts, 1):
                reason: Any = "stop" if number == len(texts) else None
                api.dispatch(Event(submit.rid, text, number, finish_reason=reason, num_prompt_tokens=3, index=index))

    return script


def hold(api: "ServedApi", submit: Submit) -> None:
    """Script that never answers."""


class ServedApi(HttpServer):
    """The api's routes behind the HTTP server, with `script` in place of the processor. Bodies are released when they are submitted."""

    def __init__(self, model_folder: Path, **settings: object):
        sizes = {"api_arena_bytes": 16 * MIB, "processor_arena_bytes": MIB}
        config = EngineConfig(**{**sizes, **settings})
        self.run_dir = tempfile.mkdtemp()
        self._fds = create_memfd("api", config.api_arena_bytes or 0), create_memfd("processor", MIB)
        runtime = Runtime(config, "torch", "cpu", self.run_dir, self._fds, -1, -1, str(model_folder), ("test-model", "other-name"), 4096)
        self._child = Child("api", runtime)
        self.api = Api(self._child)
        self.registry = self.api.registry
        self._outbox, self.registry._outbox = self.registry._outbox, cast(Any, self)
        self.registry.dispatch(Events([], [], EngineStats(), float("inf")))  # alive for ever
        self.script: Script = say("hel", "lo")
        self.submits: list[Submit] = []
        self.media: list[list[bytes]] = []  # of each submit: payloads as the client wrote them, in base64
        self.announced: list[Payload] = []
        self.aborted: list[int] = []
        self.app = self.api.build()
        self.http = client_of(self.app)
        super().__init__(self.app, config)

    def send_bytes(self, data: bytes) -> None:
        self.send(msgspec.msgpack.decode(data, type=Submit))

    def send(self, message: ToProcessor) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(message, Submit):
            self.submits.append(message)
            self.media.append([self._bytes_of(ref) for ref in message.media])
            loop.call_soon(self._answer, message)
        elif isinstance(message, Payload):
            self.announced.append(message)
        elif isinstance(message, Abort):
            self.aborted.append(message.rid)
            if message.body is not None:
                loop.call_soon(self.registry.dispatch, Events([], [message.body]))

    def _bytes_of(self, ref: MediaRef | VideoRef) -> bytes:
        payload = ref.payload if isinstance(ref, MediaRef) else None
        return b"" if payload is None else bytes(self.api.arena.view(payload.offset, payload.length))

    def dispatch(self, *events: Event) -> None:
        self.registry.dispatch(Events(list(events), []))

    def _answer(self, submit: Submit) -> None:
        self.script(self, submit)
        if submit.body is not None:
            self.registry.dispatch(Events([], [submit.body]))

    def close(self) -> None:
        """Check that no memory of a body is left."""
        check_arena(self.api.arena)
        assert self.api.arena.is_empty()
        self._outbox.close()
        self._child._status.close()
        for fd in self._fds:
            os.close(fd)
        shutil.rmtree(self.run_dir)


@contextlib.contextmanager
def serving(model_folder: Path, **settings: object) -> Iterator[ServedApi]:
    api = ServedApi(model_folder, **settings)
    yield api
    api.close()

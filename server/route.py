"""A proxy that sends requests of one conversation, or of one first image, to the replica that has them cached. Bodies and answers pass as
they arrive; payloads are hashed, never decoded.
"""

import argparse
import asyncio
import contextlib
import errno
import hashlib
import logging
import re
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict

import aiohttp
import msgspec
import uvloop
from multidict import CIMultiDict
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from yarl import URL

from engine.config import EngineConfig, read_api_keys
from engine.ipc import raise_file_limit
from server.balance import BOUND, Backend, Balancer, ImageKey
from server.errors import RequestError, error_body, overloaded
from server.http.connection import FULL, ConnectionLimiter
from server.http.direct import direct_reader
from server.http.guards import address_of, error_response, is_authorised
from server.http.listen import BACKLOG, make_server, url_of
from server.http.shares import Claim, Shares

logger = logging.getLogger(__name__)

SESSION_HEADER = b"x-session-id"
SCANNED_BYTES = 256 << 10  # until the first image
HELD_BYTES = 64 << 20  # of all bodies until their keys are known
KEY_SECONDS = 10
POLL_SECONDS = 0.5
HEALTH_SECONDS = 5
CONNECT_SECONDS = 1
IDLE_SECONDS = 3  # less than a replica's --idle-timeout: it closes none while a request is being written
DRAIN_SECONDS = 30
NUM_OTHER_FILES = 64
FILES_PER_CLIENT = 2  # its connection, and one to a replica
HOP_BY_HOP = set(
    b"connection expect keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding upgrade".split()
)
ADDED_BY_CLIENT = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
DIED = RequestError(502, "The replica that had this request is gone.", code="replica_gone").info
NONE_LEFT = overloaded("No replica can be reached right now.").info
NO_FILES = (errno.EMFILE, errno.ENFILE)
OF_THE_ENGINE = ("max_connections", "header_timeout", "idle_timeout", "write_timeout", "api_key_file", "ssl_certfile", "ssl_keyfile")


class Body:
    """A request's body. `held` was read and not passed on."""

    def __init__(self, receive: Receive, claim: Claim):
        self.held, self.claim = bytearray(), claim
        self._receive = receive
        self._is_gone = False
        self._is_whole = asyncio.Event()

    async def read(self) -> bytes:
        """The next bytes, b"" at the end. Never returns if the client is gone: `until_gone` does."""
        while not self._is_whole.is_set():
            message = await self._receive()
            self._is_gone = message["type"] == "http.disconnect"
            if not message.get("more_body"):
                self._is_whole.set()
            if self._is_gone:
                await asyncio.get_running_loop().create_future()
            if chunk := message.get("body"):
                return bytes(chunk)
        return b""

    async def all(self) -> AsyncIterator[bytes]:
        if self.held:
            yield bytes(self.held)
            self.held.clear()
            self.claim.release()
        while chunk := await self.read():
            yield chunk

    async def until_gone(self) -> None:
        await self._is_whole.wait()
        while not self._is_gone:
            self._is_gone = (await self._receive())["type"] == "http.disconnect"


async def find_key(headers: list[tuple[bytes, bytes]], body: Body) -> bytes | None:
    """The key of a request; `body` holds what was read for it. One that is too slow or too large, or finds no room, has none."""
    if session := dict(headers).get(SESSION_HEADER):
        return hashlib.sha256(b"session:" + session).digest()
    image = ImageKey(body.held)
    with contextlib.suppress(TimeoutError, RequestError):
        async with asyncio.timeout(KEY_SECONDS):
            while len(image.held) < SCANNED_BYTES or image.begins_at is not None:
                chunk = await body.read()
                if not chunk or (key := image.feed(chunk)) is not None:
                    return key if chunk else None
                body.claim.grow_to(len(image.held))
    return None


def passed(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    lower = [(name.lower(), value) for name, value in headers]
    named = {word.strip().lower() for name, value in lower if name == b"connection" for word in value.split(b",")}
    return [(name, value) for name, value in lower if name not in HOP_BY_HOP | named]


def forwarded(scope: Scope) -> CIMultiDict[str]:
    """Headers for a replica, which believes this proxy: who sent the request here stands last."""
    headers = CIMultiDict((name.decode(), value.decode("utf-8", "surrogateescape")) for name, value in passed(scope["headers"]))
    headers["X-Forwarded-For"] = ", ".join([*headers.getall("X-Forwarded-For", ()), address_of(scope)])
    headers.setdefault("X-Forwarded-Proto", scope["scheme"])
    return headers


class Proxy:
    """An ASGI application."""

    def __init__(self, urls: Sequence[str], bound: float = BOUND, api_keys: Sequence[str] = ()):
        self.balancer = Balancer(urls, bound=bound)
        self._api_keys = [key.encode() for key in api_keys]
        self._shares = Shares(HELD_BYTES, small_bytes=0)
        self._session: aiohttp.ClientSession

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """From when every replica was asked for its health once."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS), auto_decompress=False,
            timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_SECONDS), cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=ADDED_BY_CLIENT,
        )  # fmt: skip
        async with self._session:
            await asyncio.gather(*map(self._poll, self.balancer.backends))
            watchers = [asyncio.create_task(self._watch(backend)) for backend in self.balancer.backends]
            yield
            for watcher in watchers:
                watcher.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A client that goes ends its request on the replica."""
        if scope["path"] == "/health":
            healthy = any(backend.healthy for backend in self.balancer.backends)
            states = {"status": "ok" if healthy else "unavailable", "backends": list(map(asdict, self.balancer.backends))}
            await JSONResponse(states, 200 if healthy else 503)(scope, receive, send)
            return
        with self._shares.claim(address_of(scope)) as claim:
            body = Body(receive, claim)
            tasks = asyncio.create_task(self._handle(scope, body, send)), asyncio.create_task(body.until_gone())
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            if not tasks[0].cancelled():
                await tasks[0]

    async def _watch(self, backend: Backend) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self._poll(backend)

    async def _poll(self, backend: Backend) -> None:
        was_healthy = backend.healthy
        try:
            async with self._session.get(f"{backend.url}/health", timeout=aiohttp.ClientTimeout(total=HEALTH_SECONDS)) as answer:
                backend.healthy = answer.status == 200
        except (aiohttp.ClientError, TimeoutError) as error:
            if not _is_full(error):
                backend.healthy = False
        if backend.healthy != was_healthy:
            logger.warning("%s %s", backend.url, "takes requests" if backend.healthy else "takes no requests")

    async def _handle(self, scope: Scope, body: Body, send: Send) -> None:
        """A body without an API key is not read: a replica refuses its head, in its own words."""
        is_known, error = not self._api_keys or is_authorised(scope, self._api_keys), NONE_LEFT
        has_body = is_known and any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
        key = await find_key(scope["headers"], body) if is_known else None
        for _ in self.balancer.backends:
            backend = self.balancer.take(key)
            if backend is None:
                break
            try:
                async with self._forward(scope, body if has_body else None, backend) as upstream:
                    await _answer(scope, upstream, send)
                return
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as problem:  # nothing was sent
                if _is_full(problem):
                    error = FULL
                    break
                backend.healthy = False
            except aiohttp.ClientError as problem:
                logger.warning("%s: %s", backend.url, type(problem).__name__)
                error = DIED
                break
            finally:
                self.balancer.release(backend)
        await error_response(error, scope)(scope, body.read, send)  # type: ignore[arg-type]

    def _forward(self, scope: Scope, body: Body | None, backend: Backend) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        url = URL(backend.url + (scope["raw_path"] + query).decode("utf-8", "replace"), encoded=True)
        headers, data = forwarded(scope), body and body.all()
        if data is None:
            headers.popall("Content-Length", None)
        return self._session.request(scope["method"], url, headers=headers, data=data, allow_redirects=False)


async def _answer(scope: Scope, upstream: aiohttp.ClientResponse, send: Send) -> None:
    await send({"type": "http.response.start", "status": upstream.status, "headers": passed(upstream.raw_headers)})
    try:
        async for chunk, _ in upstream.content.iter_chunks():  # as the replica cut them
            if chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
    except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError) as error:
        logger.warning("%s: %s", upstream.url.origin(), type(error).__name__)
        if upstream.content_type == "text/event-stream":
            await send({"type": "http.response.body", "body": b"data: " + error_body(DIED) + b"\n\n", "more_body": True})
        elif (reader := direct_reader(scope)) is not None:
            reader.abort()  # an end would look like the whole answer
            return
    await send({"type": "http.response.body"})


def _is_full(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in NO_FILES


async def serve(args: argparse.Namespace) -> None:
    """Until SIGINT or SIGTERM."""
    config = EngineConfig(**{name: getattr(args, name) for name in OF_THE_ENGINE})
    proxy = Proxy(list(dict.fromkeys(args.backends)), args.bound, read_api_keys(config))
    server = make_server(proxy, ConnectionLimiter(config, NUM_OTHER_FILES, FILES_PER_CLIENT), config, DRAIN_SECONDS, is_proxy=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, setattr, server, "should_exit", True)
    listener = socket.socket(fileno=args.fd) if args.fd is not None else socket.create_server((args.host, args.port))
    async with proxy.running():
        listener.listen(BACKLOG)
        print(f"routing on {url_of(listener, bool(config.ssl_certfile))} to {len(proxy.balancer.backends)} backends", flush=True)
        await server.listen(listener)


def backend_url(text: str) -> str:
    if not re.fullmatch(r"https?://[^/?#\s]+[^?#\s]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a URL such as http://host:8001")
    return text.rstrip("/")


def bound(text: str) -> float:
    """Above the mean, or no replica might have room."""
    if not (value := float(text)) > 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 1")
    return value


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("server.route", description="Sends requests that share images or a session to one of several servers.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on")
    parser.add_argument("--backends", type=backend_url, nargs="+", required=True, metavar="URL", help="the servers")
    parser.add_argument("--bound", type=bound, default=BOUND, help="most requests of a replica: this times the mean, and always 4")
    parser.add_argument("--fd", type=int, help="listen on this bound socket, which is inherited, instead of --host and --port")
    defaults = msgspec.structs.asdict(EngineConfig())
    for name in OF_THE_ENGINE:
        kind = str if defaults[name] is None else int
        parser.add_argument("--" + name.replace("_", "-"), type=kind, default=defaults[name], help="as engine.serve has it")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    raise_file_limit()
    uvloop.run(serve(args))


if __name__ == "__main__":
    main()

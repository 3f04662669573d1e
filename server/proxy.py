"""Proxy that forwards requests of one conversation, or with the same first image, to the replica that has them cached, while the bytes
arrive."""

import argparse
import asyncio
import contextlib
import functools
import hashlib
import logging
import re
import signal
import socket
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass

import aiohttp
import uvloop
from anyio import CancelScope, create_task_group, sleep_forever
from cachetools import LRUCache
from multidict import CIMultiDict
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from yarl import URL

from engine.launch.flags import add_flags, variable_words
from engine.wire.child import raise_file_limit
from engine.wire.config import EngineConfig
from server.api.http.connection import BACKLOG, connection_limit, connection_of, make_server, url_of
from server.api.http.middleware import address_of, error_response
from server.errors import RequestError, error_body, overloaded

logger = logging.getLogger(__name__)

MAX_KEYS = 1 << 18
MIN_BOUND = 4  # requests that a replica always accepts
BOUND = 1.25  # maximum load as a multiple of the mean
SESSION_HEADER = "x-session-id"
IMAGE = re.compile(rb'"data:[^",]{0,256};base64,([^"]{8192}|[^"]*")')
IMAGE_BYTES = 270 + 8192  # maximum length of a match
SCANNED_BYTES = 256 << 10  # bytes that are searched for the first image
POLL_SECONDS = 0.5
HEALTH_SECONDS = 5
MAX_SILENT_POLLS = 4  # then the requests of a replica end, which is stopped or cut off: 22 s
CONNECT_SECONDS = 1
IDLE_SECONDS = 3  # less than a replica's --idle-timeout
DRAIN_SECONDS = 30
NUM_OTHER_FILES = 64
FILES_PER_CLIENT = 2  # file descriptors: its connection, and one to a replica
HOP_BY_HOP = set(b"connection expect keep-alive proxy-authorization proxy-connection te trailer transfer-encoding upgrade".split())
DIED = RequestError(502, "The replica that had this request is gone.", code="replica_gone").info
NONE_LEFT = overloaded("No replica can be reached right now.").info
FLAGS = ("host", "port", "max_connections", "idle_timeout")


@dataclass(slots=True, eq=False)
class Backend:
    """A replica. `num_in_flight`: from `take` to the end of the answer."""

    url: str
    healthy: bool = False
    num_in_flight: int = 0
    num_taken: int = 0


class Balancer:
    """Assigns keys to replicas. A key stays with its replica until that leaves, has BOUND times the mean number of requests, or MAX_KEYS
    other keys were seen. Otherwise, and without a key, the replica with the fewest requests is chosen."""

    def __init__(self, urls: Sequence[str]):
        self.backends = [Backend((url if "://" in url else f"http://{url}").rstrip("/")) for url in urls]
        self._homes: LRUCache[bytes, Backend] = LRUCache(MAX_KEYS)

    def take(self, key: bytes) -> Backend | None:
        """Return a replica with one more request, None if none is healthy. b"" is no key."""
        healthy = [one for one in self.backends if one.healthy]
        if not healthy:
            return None
        most = max(MIN_BOUND, BOUND * (sum(one.num_in_flight for one in healthy) + 1) / len(healthy))
        digest = hashlib.sha256(key).digest()
        chosen = self._homes.get(digest)
        if chosen not in healthy or chosen.num_in_flight >= most:
            chosen = min(healthy, key=lambda one: (one.num_in_flight, one.num_taken))
        if key:
            self._homes[digest] = chosen
        chosen.num_in_flight += 1
        chosen.num_taken += 1
        return chosen


class Body:
    """A request's body. `held`: bytes that were read and not yet forwarded."""

    def __init__(self, receive: Receive, scope: Scope):
        self.held = bytearray()
        self.exists = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
        self._receive, self._is_whole = receive, asyncio.Event()
        if not self.exists:
            self._is_whole.set()

    async def read(self) -> bytes:
        """Return the next bytes, b"" at the end. If the client has disconnected, it never returns."""
        while not self._is_whole.is_set():
            message = await self._receive()
            if not message.get("more_body"):
                self._is_whole.set()
            if message["type"] == "http.disconnect":
                await sleep_forever()
            if chunk := message.get("body"):
                return chunk
        return b""

    async def all(self) -> AsyncIterator[bytes]:
        if self.held:
            yield bytes(self.held)
            self.held.clear()
        while chunk := await self.read():
            yield chunk

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Context that is cancelled when the client disconnects."""
        async with create_task_group() as group:
            group.start_soon(self._end_when_gone, group.cancel_scope)
            yield
            group.cancel_scope.cancel()

    async def _end_when_gone(self, scope: CancelScope) -> None:
        await self._is_whole.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    async def find_image(self) -> bytes:
        """Return the beginning of the first image, however the body is split; b"" if SCANNED_BYTES have none."""
        searched = 0
        while len(self.held) < SCANNED_BYTES and (chunk := await self.read()):
            self.held += chunk
            if image := IMAGE.search(self.held, max(0, searched - IMAGE_BYTES), SCANNED_BYTES):
                return bytes(image[1])
            searched = len(self.held)
        return b""


def passed(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    lower = [(name.lower(), value) for name, value in headers]
    named = {word.strip().lower() for name, value in lower if name == b"connection" for word in value.split(b",")}
    return [(name, value) for name, value in lower if name not in HOP_BY_HOP | named]


def make_session(connector: aiohttp.BaseConnector) -> aiohttp.ClientSession:
    """Return a session that changes neither requests nor answers."""
    return aiohttp.ClientSession(
        connector=connector, auto_decompress=False, timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(), skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
    )  # fmt: skip


def request_at(
    session: aiohttp.ClientSession, url: str, scope: Scope, body: Body, **forwarding: str
) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
    """Return the context of a server's answer to the client's request."""
    target = (scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")).decode("utf-8", "replace")
    headers = CIMultiDict((name.decode(), value.decode("utf-8", "surrogateescape")) for name, value in passed(scope["headers"]))
    headers.update(forwarding)
    data = body.all() if body.exists else None
    return session.request(scope["method"], URL(url + target, encoded=True), headers=headers, data=data, allow_redirects=False)


async def answer(upstream: aiohttp.ClientResponse, send: Send) -> None:
    await send({"type": "http.response.start", "status": upstream.status, "headers": passed(upstream.raw_headers)})
    async for chunk, _ in upstream.content.iter_chunks():  # the chunks of the replica
        if chunk:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body"})


class Forwarder:
    """ASGI application that forwards requests to the server on the Unix socket `path`. If the client disconnects, its request ends."""

    def __init__(self, path: str):
        self._path = path

    @functools.cached_property
    def session(self) -> aiohttp.ClientSession:
        return make_session(aiohttp.UnixConnector(self._path, limit=0))  # in the event loop of the requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = Body(receive, scope)
        async with body.watched():
            try:
                async with request_at(self.session, "http://engine", scope, body) as upstream:
                    await answer(upstream, send)
            except aiohttp.ClientConnectorError:
                await error_response(NONE_LEFT, scope)(scope, receive, send)


class Proxy:
    def __init__(self, urls: Sequence[str]):
        self.balancer = Balancer(urls)
        self._session: aiohttp.ClientSession
        self._num_silent: dict[Backend, int] = defaultdict(int)  # polls in a row
        self._waits: dict[Backend, set[CancelScope]] = defaultdict(set)  # of the requests of a replica

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Context that starts when the health of every replica has been requested."""
        self._session = make_session(aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS))
        async with self._session, create_task_group() as group:
            await asyncio.gather(*map(self._poll, self.balancer.backends))
            for backend in self.balancer.backends:
                group.start_soon(self._watch, backend)
            yield
            group.cancel_scope.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/health":
            healthy = any(backend.healthy for backend in self.balancer.backends)
            states = [{name: value for name, value in asdict(backend).items() if name != "url"} for backend in self.balancer.backends]
            shown = {"status": "ok" if healthy else "unavailable", "backends": states}
            return await JSONResponse(shown, 200 if healthy else 503)(scope, receive, send)
        body = Body(receive, scope)
        async with body.watched():
            await self._handle(scope, body, send)

    async def _watch(self, backend: Backend) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self._poll(backend)

    async def _poll(self, backend: Backend) -> None:
        was_healthy = backend.healthy
        try:
            async with self._session.get(f"{backend.url}/health", timeout=aiohttp.ClientTimeout(total=HEALTH_SECONDS)) as answer:
                backend.healthy = answer.status == 200
            self._num_silent[backend] = 0
        except (aiohttp.ClientError, TimeoutError):
            backend.healthy = False
            self._num_silent[backend] += 1
            for wait in list(self._waits[backend]) if self._num_silent[backend] >= MAX_SILENT_POLLS else ():
                wait.cancel()
        if backend.healthy != was_healthy:
            logger.warning("%s is %s", backend.url, "healthy" if backend.healthy else "not healthy: it gets no requests")

    async def _handle(self, scope: Scope, body: Body, send: Send) -> None:
        received, error = CIMultiDict((name.decode(), value) for name, value in scope["headers"]), NONE_LEFT
        key = received.get(SESSION_HEADER) or await body.find_image()
        addresses = [value.decode("utf-8", "surrogateescape") for value in received.getall("x-forwarded-for", ())]
        forwarding = {"X-Forwarded-For": ", ".join([*addresses, address_of(scope)])}  # a replica trusts this proxy
        forwarding["X-Forwarded-Proto"] = received.get("x-forwarded-proto", b"").decode("latin-1") or scope["scheme"]
        upstream: aiohttp.ClientResponse | None = None
        for _ in self.balancer.backends:
            if (backend := self.balancer.take(key)) is None:
                break
            try:
                with CancelScope() as wait:
                    self._waits[backend].add(wait)
                    async with request_at(self._session, backend.url, scope, body, **forwarding) as upstream:
                        return await answer(upstream, send)
                error = DIED
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):  # nothing has been sent
                backend.healthy = False
                continue
            except aiohttp.ClientError as problem:
                logger.warning("%s: %s", backend.url, type(problem).__name__)
                error = DIED
            finally:
                self._waits[backend].discard(wait)
                backend.num_in_flight -= 1
            break
        if upstream is None:
            await error_response(error, scope)(scope, body.read, send)  # type: ignore[arg-type]
        elif upstream.content_type == "text/event-stream":
            await send({"type": "http.response.body", "body": b"data: " + error_body(error) + b"\n\n"})
        else:
            connection_of(scope).abort()  # a regular end would make the answer look complete


async def serve(args: argparse.Namespace) -> None:
    config = EngineConfig(**{name: getattr(args, name) for name in FLAGS})
    proxy = Proxy(args.backends)
    server = make_server(proxy, connection_limit(config, NUM_OTHER_FILES, FILES_PER_CLIENT), config, DRAIN_SECONDS, is_proxy=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, setattr, server, "should_exit", True)
    listener = socket.socket(fileno=args.fd) if args.fd else socket.create_server((config.host, config.port))
    async with proxy.running():
        listener.listen(BACKLOG)
        print(f"routing on {url_of(listener)} to {len(proxy.balancer.backends)} backends", flush=True)
        await server.listen(listener)


def main() -> None:
    parser = argparse.ArgumentParser("server.proxy", description=__doc__)
    parser.add_argument("--backends", nargs="+", required=True, metavar="URL", help="servers")
    parser.add_argument("--fd", type=int, help="an inherited socket to listen on")
    add_flags(parser, FLAGS)
    args = parser.parse_args([*variable_words(FLAGS)[0], *sys.argv[1:]])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    raise_file_limit()
    uvloop.run(serve(args))


if __name__ == "__main__":
    main()

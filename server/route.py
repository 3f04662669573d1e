"""A proxy before several replicas that sends requests of one conversation, or of one first image, to one replica: it has them cached.

    python -m server.route --backends http://a:8001 http://b:8002

It needs no part of the engine. Bodies and answers pass as they arrive; a payload is hashed and never decoded.
"""

import argparse
import asyncio
import contextlib
import errno
import hashlib
import logging
import math
import re
import signal
import socket
import ssl
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import aiohttp
import uvloop
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from engine.ipc import raise_file_limit
from server.errors import RequestError, error_body, overloaded
from server.route_door import FULL, HEALTH, Connection, Door, error_response, through_door

logger = logging.getLogger(__name__)

SESSION_HEADER = "x-session-id"
HEADER = re.compile(rb'"data:[^",]{0,256};base64,')
HEADER_BYTES = 6 + 256 + 8  # the longest match
HASHED_BYTES = 64 << 10  # of a payload
SCANNED_BYTES = 4 << 20  # a body whose first image comes later has no key
MAX_KEYS = 1 << 18
MIN_BOUND = 4  # requests that any replica takes, however few there are
BOUND = 1.25  # times the mean
KEY_SECONDS = 10
POLL_SECONDS = 0.5
HEALTH_SECONDS = 5
CONNECT_SECONDS = 1
IDLE_SECONDS = 3  # less than a replica keeps idle connections (--idle-timeout): none is closed while a request is being written to it
CLIENT_IDLE_SECONDS = 75
DRAIN_SECONDS = 30
BACKLOG = 2048
HOP_BY_HOP = {
    "connection", "expect", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade",
}
ADDED_BY_CLIENT = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
DIED = RequestError(502, "The replica that had this request is gone.", code="replica_gone").info
NONE_LEFT = overloaded("No replica can be reached right now.").info
NO_FILES = (errno.EMFILE, errno.ENFILE)  # open ones here: a replica can do nothing about it


@dataclass(slots=True, eq=False)
class Backend:
    """A replica and what the proxy knows of it. `num_in_flight` counts from the choice to the end of the answer."""

    url: str
    healthy: bool = False
    num_in_flight: int = 0
    num_keys: int = 0
    num_taken: int = 0


class Balancer:
    """Chooses replicas: rendezvous hashing with bounded load. Pure: no sockets, no clock.

    A key's order is the healthy replicas by their hash with it. A new key's home is the less loaded of the first two of its order, until
    that replica leaves or is full, or `max_keys` others were seen since. A replica is full with `bound` times the mean of requests.
    """

    def __init__(self, urls: Sequence[str], max_keys: int = MAX_KEYS, bound: float = BOUND):
        self.backends = [Backend(url) for url in urls]
        self._max_keys, self._bound = max_keys, bound
        self._homes: OrderedDict[bytes, Backend] = OrderedDict()

    def take(self, key: bytes | None) -> Backend | None:
        """Takes a place on a replica; give it back with `release`. None: no replica is healthy."""
        healthy = [backend for backend in self.backends if backend.healthy]
        if not healthy:
            return None
        if key is None:
            chosen = min(healthy, key=lambda backend: (backend.num_in_flight, backend.num_taken))
        else:
            chosen = self._for_key(key, healthy)
        chosen.num_in_flight += 1
        chosen.num_taken += 1
        return chosen

    def release(self, backend: Backend) -> None:
        """The request ended, however it did."""
        backend.num_in_flight -= 1

    def _for_key(self, key: bytes, healthy: list[Backend]) -> Backend:
        """The key's home, or the next of its order that has room: the bound is above the mean, so one has. The key stays there: all
        that its home has cached was needed now, and is there as well from now on."""
        home = self._home(key, healthy)
        mean = (sum(backend.num_in_flight for backend in healthy) + 1) / len(healthy)
        bound = max(MIN_BOUND, math.ceil(self._bound * mean))
        if home.num_in_flight >= bound:
            home = next(backend for backend in _order(key, healthy) if backend.num_in_flight < bound)
            self._settle(key, home)
        return home

    def _home(self, key: bytes, healthy: list[Backend]) -> Backend:
        home = self._homes.get(key)
        if home is None or not home.healthy:
            home = min(_order(key, healthy)[:2], key=lambda backend: (backend.num_in_flight, backend.num_keys))
        self._settle(key, home)
        return home

    def _settle(self, key: bytes, home: Backend) -> None:
        """Makes `key` the newest, with this home."""
        if key in self._homes:
            self._forget(key)
        self._homes[key] = home
        home.num_keys += 1
        if len(self._homes) > self._max_keys:
            self._forget(next(iter(self._homes)))

    def _forget(self, key: bytes) -> None:
        self._homes.pop(key).num_keys -= 1


def _order(key: bytes, backends: list[Backend]) -> list[Backend]:
    """Rendezvous hashing: a replica that leaves or comes changes nothing in how the others follow each other."""
    return sorted(backends, key=lambda backend: hashlib.blake2b(key + backend.url.encode(), digest_size=8).digest(), reverse=True)


class ImageKey:
    """Finds the key of a body while it arrives: the hash of the begin of its first image's payload, as base64. Linear in the bytes fed.

    `held` is all that was fed: nothing of it can be sent before the key is known.
    """

    def __init__(self) -> None:
        self.held = bytearray()
        self.begins_at: int | None = None  # the payload
        self._searched = 0

    def feed(self, chunk: bytes) -> bytes | None:
        """The key as soon as 64 KiB of the payload, or its end, are there. The same however a body is split."""
        self.held += chunk
        if self.begins_at is None:
            header = HEADER.search(self.held, self._searched)
            if header is None:
                self._searched = max(self._searched, len(self.held) - HEADER_BYTES)
                return None
            self.begins_at = self._searched = header.end()
        limit = self.begins_at + HASHED_BYTES
        end = self.held.find(b'"', self._searched, limit)
        if end < 0 and len(self.held) < limit:
            self._searched = len(self.held)
            return None
        return hashlib.sha256(self.held[self.begins_at : end if end >= 0 else limit]).digest()


async def read_key(request: web.BaseRequest) -> tuple[bytes | None, bytearray]:
    """The key of a request, and what had to be read of its body to know it. A body that takes too long to show its image has no key:
    the replica decides how long it may take."""
    session = request.headers.get(SESSION_HEADER)
    if session:
        return hashlib.sha256(b"session:" + session.encode("utf-8", "surrogateescape")).digest(), bytearray()
    image = ImageKey()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(KEY_SECONDS):
            while len(image.held) < SCANNED_BYTES or image.begins_at is not None:
                chunk = await request.content.readany()
                if not chunk:
                    break
                key = image.feed(chunk)
                if key is not None:
                    return key, image.held
    return None, image.held


async def body_of(held: bytearray, request: web.BaseRequest) -> AsyncIterator[bytes]:
    """The body from its begin on: what was read, then what arrives."""
    if held:
        yield bytes(held)
        held.clear()
    while chunk := await request.content.readany():
        yield chunk


def passed(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Headers without those of one connection."""
    named = {name.strip().lower() for line in headers.getall("Connection", ()) for name in line.split(",")}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in HOP_BY_HOP | named)


def forwarded(request: web.Request) -> CIMultiDict[str]:
    """Headers of a request for a replica, which believes this proxy, and so learns whose it is: who sent it here stands last."""
    headers = passed(request.headers)
    senders = [*headers.getall("X-Forwarded-For", ()), request.remote or ""]
    headers["X-Forwarded-For"] = ", ".join(senders)
    headers.setdefault("X-Forwarded-Proto", request.scheme)
    return headers


class Proxy:
    """The HTTP side: takes requests, asks `Balancer` where to, copies both ways."""

    def __init__(self, urls: Sequence[str], bound: float = BOUND):
        self.balancer = Balancer(urls, bound=bound)
        self._session: aiohttp.ClientSession

    def app(self) -> web.Application:
        """Answers as soon as every replica was asked for its health once."""
        app = web.Application(middlewares=[through_door])
        app.cleanup_ctx.append(self._run)
        app.router.add_get(HEALTH, self._health)
        app.router.add_route("*", "/{path:.*}", self._handle)
        return app

    async def _run(self, app: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=ADDED_BY_CLIENT,
        )
        async with self._session:
            await asyncio.gather(*(self._poll(backend) for backend in self.balancer.backends))
            watchers = [asyncio.create_task(self._watch(backend)) for backend in self.balancer.backends]
            yield
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)

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

    async def _health(self, request: web.Request) -> web.Response:
        fields = "url", "healthy", "num_in_flight", "num_keys", "num_taken"
        backends = self.balancer.backends
        healthy = any(backend.healthy for backend in backends)
        states = [dict(zip(fields, (b.url, b.healthy, b.num_in_flight, b.num_keys, b.num_taken), strict=True)) for b in backends]
        return web.json_response({"status": "ok" if healthy else "unavailable", "backends": states}, status=200 if healthy else 503)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        key, held = await read_key(request)
        for _ in self.balancer.backends:
            backend = self.balancer.take(key)
            if backend is None:
                break
            try:
                return await self._forward(request, held, backend)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:  # not a byte was sent
                if _is_full(error):
                    return error_response(FULL)
                backend.healthy = False
            finally:
                self.balancer.release(backend)
        return error_response(NONE_LEFT)

    async def _forward(self, request: web.Request, held: bytearray, backend: Backend) -> web.StreamResponse:
        """Raises the errors of connecting, with `held` and the rest of the body untouched."""
        url = URL(f"{backend.url}{request.rel_url.raw_path_qs}", encoded=True)
        data = body_of(held, request) if request.body_exists else None
        try:
            upstream = await self._session.request(request.method, url, headers=forwarded(request), data=data, allow_redirects=False)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            raise
        except aiohttp.ClientError as error:
            logger.warning("%s: %r", backend.url, error)
            return error_response(DIED)
        async with upstream:
            return await self._answer(request, upstream)

    async def _answer(self, request: web.Request, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(status=upstream.status, reason=upstream.reason, headers=passed(upstream.headers))
        await response.prepare(request)
        try:
            while chunk := await _next_chunk(upstream):
                await response.write(chunk)
        except aiohttp.ClientPayloadError as error:
            logger.warning("%s: %r", upstream.url.origin(), error)
            if upstream.content_type == "text/event-stream":
                await response.write(b"data: " + error_body(DIED) + b"\n\n")
            elif request.transport is not None:
                request.transport.abort()  # an end would look like the whole answer
        return response


def _is_full(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in NO_FILES


async def _next_chunk(upstream: aiohttp.ClientResponse) -> bytes:
    """The next chunk as the replica cut it, b"" at the end. Raises ClientPayloadError alone, which no write to a client does."""
    try:
        while True:
            chunk, ends_chunk = await upstream.content.readchunk()
            if chunk or not ends_chunk:
                return chunk
    except aiohttp.ClientConnectionError as error:
        raise aiohttp.ClientPayloadError(str(error)) from error


def make_runner(proxy: Proxy) -> web.AppRunner:
    """Bodies stay compressed if they are; a client that goes ends its request on the replica."""
    return web.AppRunner(
        proxy.app(), handler_cancellation=True, auto_decompress=False, access_log=None, shutdown_timeout=DRAIN_SECONDS,
        keepalive_timeout=CLIENT_IDLE_SECONDS,
    )


async def serve(args: argparse.Namespace) -> None:
    """Runs until SIGINT or SIGTERM; then takes no new connection and lets running requests end for 30 s."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    urls = list(dict.fromkeys(args.backends))
    runner = make_runner(Proxy(urls, args.bound))
    await runner.setup()
    tls = None
    if args.ssl_certfile:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(args.ssl_certfile, args.ssl_keyfile)
    listener = socket.socket(fileno=args.fd) if args.fd is not None else socket.create_server((args.host, args.port))
    make_http, door = runner.server, Door.for_open_files()
    assert make_http is not None
    accepting = await asyncio.get_running_loop().create_server(
        lambda: Connection(door, make_http()), sock=listener, ssl=tls, backlog=BACKLOG
    )
    print(f"routing on {'https' if tls else 'http'}://{address_of(listener)} to {len(urls)} backends", flush=True)
    await stop.wait()
    accepting.close()
    await runner.cleanup()


def address_of(listener: socket.socket) -> str:
    """Host and port as in a URL."""
    host, port, *_ = listener.getsockname()
    return f"[{host}]:{port}" if listener.family is socket.AF_INET6 else f"{host}:{port}"


def backend_url(text: str) -> str:
    """`http://host:port`, or with a path; the end is without a slash."""
    if not re.fullmatch(r"https?://[^/?#\s]+[^?#\s]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a URL such as http://host:8001")
    return text.rstrip("/")


def bound(text: str) -> float:
    """Above 1, or no replica might have room."""
    if not (value := float(text)) > 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 1")
    return value


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser("server.route", description="Sends requests that share images or a session to one of several servers.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on")
    parser.add_argument("--backends", type=backend_url, nargs="+", required=True, metavar="URL", help="the servers")
    parser.add_argument("--bound", type=bound, default=BOUND, help="most requests of a replica: this times the mean, and always 4")
    parser.add_argument("--fd", type=int, help="listen on this bound socket, which is inherited, instead of --host and --port")
    parser.add_argument("--ssl-certfile", help="serve https with this certificate (PEM); default: http")
    parser.add_argument("--ssl-keyfile", help="its private key, if the certificate's file does not hold it")
    return parser


def main() -> None:
    """Entry point."""
    args = make_parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    raise_file_limit()
    uvloop.run(serve(args))


if __name__ == "__main__":
    main()

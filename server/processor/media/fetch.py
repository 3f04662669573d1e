"""Download of media by http(s) and file URLs, with protection against server-side request forgery.

A URL is parsed once, both for the check and for the connection; its host is resolved once and the address checked. Redirects are checked
like the first URL."""

import asyncio
import contextlib
import functools
import ipaddress
import os
import re
import socket
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from engine.wire.arena import ArenaTooSmall
from engine.wire.config import EngineConfig
from server.errors import RequestError

GRACE_S = 5.0  # before the minimum speed applies
MAX_REDIRECTS = 3
MAX_CONCURRENT = 64
MAX_URL_CHARACTERS = 8192
MAX_ORIGIN_CHARACTERS = 300  # scheme, host and port; a host has 253 at most
ORIGIN_END = re.compile("[?#]")
CONTROL = re.compile("[\x00-\x1f]")
READ_BYTES = 1 << 18
REDIRECTS = frozenset({301, 302, 303, 307, 308})
NAT64 = ipaddress.ip_network("64:ff9b::/96")
GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")  # allocated global addresses, which exclude every notation of internal IPv4 addresses

FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

not_allowed = functools.partial(RequestError, 400, code="media_not_allowed")
unavailable = functools.partial(RequestError, 422, code="media_unavailable")
Write = Callable[[bytes], None]
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Outside(OSError):
    """The path leads outside the folder."""


class ForbiddenAddress(OSError):
    """The host has no globally routable address."""


def is_public(address: Address) -> bool:
    """Return whether the address, and any IPv4 address embedded in it, is globally routable."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if address in NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None and not is_public(inner):
            return False
        if address.ipv4_mapped is not None or address in NAT64:
            return True
        if address not in GLOBAL_UNICAST:
            return False
    return address.is_global and not address.is_multicast


def parse_url(text: str) -> URL:
    """Parse a URL. RequestError 400 for a malformed one, and for one that is slow to parse, such as a long Unicode host."""
    text = text.strip()
    origin = ORIGIN_END.split("/".join(text.split("/", 3)[:3]), 1)[0]
    with contextlib.suppress(ValueError):
        if len(text) <= MAX_URL_CHARACTERS and len(origin) <= MAX_ORIGIN_CHARACTERS and not CONTROL.search(text):
            return URL(text)
    raise not_allowed("its URL is malformed or longer than 8,192 characters")


class Resolver(AbstractResolver):
    """Resolver that returns only public addresses, unless private ones are allowed; connections use exactly the checked addresses. It has
    its own thread pool: in the event loop's small pool, slow names would delay all other work."""

    def __init__(self, timeout: float, allow_private: bool = False) -> None:
        self._timeout = timeout
        self._allow_private = allow_private
        self._pool = ThreadPoolExecutor(MAX_CONCURRENT, "resolve")

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET) -> list[ResolveResult]:
        lookup = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM, family=family)
        async with asyncio.timeout(self._timeout):
            found = await asyncio.get_running_loop().run_in_executor(self._pool, lookup)
        numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        results = [
            ResolveResult(hostname=host, host=str(address[0]), port=port, family=kind, proto=proto, flags=numeric)
            for kind, _, proto, _, address in found
            if self._allow_private or is_public(ipaddress.ip_address(str(address[0]).split("%")[0]))
        ]
        if not results:
            raise ForbiddenAddress("not globally routable")
        return results

    async def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class Fetcher:
    """Downloads media. Create and close it inside a running event loop."""

    def __init__(self, config: EngineConfig):
        self._max_bytes = config.max_download_bytes
        self._timeout = config.download_timeout
        self._bytes_per_s = config.download_pace_bytes
        self._allow_private = config.allow_private_media
        domains = config.allowed_media_domains
        self._domains = None if domains is None else {name.strip().lower() for name in domains.split(",")}
        folder = config.allowed_local_media_path
        self._folder = None if folder is None else Path(os.path.realpath(folder))
        resolver = Resolver(config.download_connect_timeout, self._allow_private)
        connector = aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False, limit=MAX_CONCURRENT)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(None, sock_connect=config.download_connect_timeout, sock_read=config.download_connect_timeout),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"Accept": "image/*, */*;q=0.8", "Accept-Encoding": "identity", "User-Agent": "engine"},
        )

    async def close(self) -> None:
        await self._session.close()

    async def download(self, url: str, write: Write, max_bytes: int | None = None) -> None:
        """Download an http(s) URL and pass its pieces to `write`. RequestError 400 (not allowed), 413 (too large) or 422; also raises what
        `write` raises."""
        try:
            async with asyncio.timeout(self._timeout):
                await self._follow(url, write, max_bytes or self._max_bytes)
        except ForbiddenAddress:
            raise not_allowed("its host has no globally routable address") from None
        except TimeoutError:
            raise unavailable("it could not be fetched in time") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, RequestError | ArenaTooSmall):
                raise
            if isinstance(error.__cause__, ForbiddenAddress):
                raise not_allowed("its host has no globally routable address") from None
            raise unavailable("it could not be fetched") from None

    async def _follow(self, url: str, write: Write, max_bytes: int) -> None:
        target = self._check(parse_url(url))
        for _ in range(1 + MAX_REDIRECTS):
            async with self._session.get(target, allow_redirects=False) as response:
                location = response.headers.get("Location")
                if response.status in REDIRECTS and location is not None:
                    target = self._check(target.join(parse_url(location)))
                    continue
                if response.status != 200:
                    raise unavailable(f"its server answered with status {response.status}")
                await self._read(response, write, max_bytes)
                return
        raise unavailable(f"it redirects more than {MAX_REDIRECTS} times")

    def _check(self, url: URL) -> URL:
        host = url.host
        if url.scheme not in ("http", "https") or not host:
            raise not_allowed("its URL is not an http(s) URL with a host")
        if url.user is not None or url.password is not None:
            raise not_allowed("its URL contains credentials")
        if self._domains is not None and host.lower() not in self._domains:
            raise not_allowed("its host is not among the allowed media domains")
        if not self._allow_private:
            _check_literal(host)
        return url

    async def _read(self, response: aiohttp.ClientResponse, write: Write, max_bytes: int) -> None:
        if response.content_length is not None and response.content_length > max_bytes:
            raise too_large(max_bytes)
        num_bytes, loop = 0, asyncio.get_running_loop()
        started = loop.time()
        async for piece in response.content.iter_chunked(READ_BYTES):
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                raise too_large(max_bytes)
            if num_bytes < self._bytes_per_s * (loop.time() - started - GRACE_S):
                raise TimeoutError
            write(piece)

    def read_local(self, url: str, max_bytes: int | None = None) -> bytes:
        """Return the content of a file URL below the allowed folder. Runs in a pool thread. RequestError 400, 413 or 422."""
        if self._folder is None:
            raise not_allowed("file URLs are not allowed on this server")
        parsed = parse_url(url)
        if parsed.host not in (None, "", "localhost"):
            raise not_allowed("its file URL names another host")
        try:
            descriptor = open_within(self._folder, Path(os.path.normpath(parsed.path)))
        except Outside:
            raise not_allowed("its path is outside the allowed folder") from None
        except (OSError, ValueError, RuntimeError):  # the last one for links that form a circle
            raise unavailable("it could not be read") from None
        try:
            return _read_regular(descriptor, max_bytes or self._max_bytes)
        finally:
            os.close(descriptor)


def too_large(max_bytes: int) -> RequestError:
    return RequestError(413, f"it is larger than {max_bytes} bytes", code="media_too_large")


def _read_regular(descriptor: int, max_bytes: int) -> bytes:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise unavailable("it is not a regular file")
    if status.st_size > max_bytes:
        raise too_large(max_bytes)
    with os.fdopen(descriptor, "rb", closefd=False) as file:
        return file.read(max_bytes)


def open_within(folder: Path, path: Path) -> int:
    """Return a descriptor of a file whose real path is below `folder`, itself a real path; links created since the check are not followed.
    Raise Outside or another OSError."""
    real = path.resolve()
    if not real.is_relative_to(folder):
        raise Outside
    *parents, name = real.parts
    current = os.open(parents[0] if parents else "/", FOLDER)
    try:
        for parent in parents[1:]:
            below = os.open(parent, FOLDER, dir_fd=current)
            os.close(current)
            current = below
        return os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=current)  # a FIFO must not block
    finally:
        os.close(current)


def _check_literal(host: str) -> None:
    """Check a host that is a literal address, which the resolver never sees. Unusual spellings of IPv4 are rejected."""
    if ":" in host or host.replace(".", "").isdigit():
        with contextlib.suppress(ValueError):
            if is_public(ipaddress.ip_address(host.split("%")[0])):
                return
        raise ForbiddenAddress("not globally routable")

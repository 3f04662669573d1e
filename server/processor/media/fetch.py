"""Download of media by http(s) URLs and reading of file URLs, with protection against server-side request forgery.

The address of every connection is checked when its socket is created: it is the one that is connected to, whatever the name or redirect."""

import asyncio
import functools
import ipaddress
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import aiohttp
from yarl import URL

from engine.wire.arena import ArenaTooSmall
from engine.wire.config import EngineConfig
from server.errors import RequestError

MAX_REDIRECTS = 3
MAX_CONCURRENT, MAX_PER_HOST = 64, 16
MAX_URL_CHARACTERS = 8192
MAX_ORIGIN_CHARACTERS = 300  # scheme, host and port; a longer host in Unicode takes seconds to parse
READ_BYTES = 1 << 18
REDIRECTS = frozenset({301, 302, 303, 307, 308})
NAT64 = ipaddress.ip_network("64:ff9b::/96")
GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")  # excludes the other notations of IPv4 addresses

not_allowed = functools.partial(RequestError, 400, code="media_not_allowed")
unavailable = functools.partial(RequestError, 422, code="media_unavailable")


class ForbiddenAddress(OSError):
    """The address is not globally routable."""


def is_public(host: str) -> bool:
    """Return whether a literal address, or the IPv4 address embedded in it by NAT64, is globally routable. Other notations of IPv4
    addresses are not."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address in NAT64:
            return is_public(str(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)))
        if address not in GLOBAL_UNICAST or address.sixtofour is not None:
            return False
    return address.is_global and not address.is_multicast


def parse_url(text: str) -> URL:
    """RequestError 400 for a malformed URL, or one that is slow to parse."""
    text = text.strip()
    try:
        if len(text) <= MAX_URL_CHARACTERS and len("/".join(text.split("/", 3)[:3])) <= MAX_ORIGIN_CHARACTERS:
            return URL(text)
    except ValueError:
        pass
    raise not_allowed("its URL is malformed or longer than 8,192 characters")


class Fetcher:
    """Downloads media. Create and close it inside a running event loop."""

    def __init__(self, config: EngineConfig):
        self._max_bytes = config.max_download_bytes
        self._allow_private = config.allow_private_media
        domains = config.allowed_media_domains
        self._domains = None if domains is None else {name.strip().lower() for name in domains.split(",")}
        folder = config.allowed_local_media_path
        self._folder = None if folder is None else Path(folder).resolve()
        self._timeout, wait = config.download_timeout, config.download_connect_timeout
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=MAX_CONCURRENT, limit_per_host=MAX_PER_HOST, socket_factory=self._socket),
            timeout=aiohttp.ClientTimeout(None, sock_connect=wait, sock_read=wait),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"Accept": "image/*, */*;q=0.8", "Accept-Encoding": "identity", "User-Agent": "engine"},
        )

    async def close(self) -> None:
        await self._session.close()

    async def download(self, url: str, write: Callable[[bytes], None], max_bytes: int | None = None) -> None:
        """Download an http(s) URL and pass its pieces to `write`. RequestError 400 (not allowed), 413 (too large) or 422; also raises what
        `write` raises."""
        try:
            async with asyncio.timeout(self._timeout):
                await self._follow(url, write, max_bytes or self._max_bytes)
        except TimeoutError:
            raise unavailable("it could not be fetched in time") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, RequestError | ArenaTooSmall):
                raise
            if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ForbiddenAddress):
                raise not_allowed("its host has no globally routable address") from None
            raise unavailable("it could not be fetched") from None

    async def _follow(self, url: str, write: Callable[[bytes], None], max_bytes: int) -> None:
        num_left, target = max_bytes, parse_url(url)
        for _ in range(1 + MAX_REDIRECTS):
            if self._domains is not None and target.host not in self._domains:
                raise not_allowed("its host is not among the allowed media domains")
            async with self._session.get(target, allow_redirects=False) as response:
                if response.status in REDIRECTS:
                    target = target.join(parse_url(response.headers.get("Location", "")))
                    continue
                if response.status != 200:
                    raise unavailable(f"its server answered with status {response.status}")
                async for piece in response.content.iter_chunked(READ_BYTES):
                    num_left -= len(piece)
                    if num_left < 0:
                        raise too_large(max_bytes)
                    write(piece)
                return
        raise unavailable(f"it redirects more than {MAX_REDIRECTS} times")

    def _socket(self, info: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, _, address = info
        if not (self._allow_private or is_public(str(address[0]))):
            raise ForbiddenAddress("not globally routable")
        return socket.socket(family, kind, protocol)

    def read_local(self, url: str, max_bytes: int | None = None) -> bytes:
        """Return the content of a file URL below the allowed folder. Runs in a pool thread. RequestError 400, 413 or 422."""
        parsed, max_bytes = parse_url(url), max_bytes or self._max_bytes
        if self._folder is None or parsed.host not in (None, "", "localhost"):
            raise not_allowed("file URLs are not allowed on this server")
        try:
            path = Path(parsed.path).resolve()
            if not path.is_relative_to(self._folder):
                raise not_allowed("its path is outside the allowed folder")
            with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:  # a FIFO must not block
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise unavailable("it is not a regular file")
                if status.st_size > max_bytes:
                    raise too_large(max_bytes)
                return file.read(max_bytes)
        except (OSError, ValueError, RuntimeError) as error:  # the last one for links that form a circle
            raise error if isinstance(error, RequestError) else unavailable("it could not be read") from None


def too_large(max_bytes: int) -> RequestError:
    return RequestError(413, f"it is larger than {max_bytes} bytes", code="media_too_large")

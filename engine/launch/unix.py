"""HTTP clients of a server on a Unix socket."""

import contextlib
import ssl
from collections.abc import AsyncIterator

import httpx


class UnixClients:
    """Clients of one connection each, kept between requests: httpx searches a pool of connections for every request."""

    def __init__(self) -> None:
        self._idle: list[httpx.AsyncClient] = []
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # unused, but slow to make

    @contextlib.asynccontextmanager
    async def client(self, path: str) -> AsyncIterator[httpx.AsyncClient]:
        """Lend a client of the server at `path` (always the same one); no other request uses it meanwhile.

        The client is closed if the block raises or is cancelled, since httpx may then never free its connection.
        """
        client, is_free = self._idle.pop() if self._idle else self._new(path), False
        try:
            yield client
            is_free = True
        finally:
            if is_free:
                self._idle.append(client)
            else:
                await client.aclose()

    async def close(self) -> None:
        for client in self._idle:
            await client.aclose()

    def _new(self, path: str) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(uds=path, limits=httpx.Limits(max_connections=1), verify=self._tls)
        return httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=None)

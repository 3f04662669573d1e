"""Forwarding of requests of an ASGI server to a server on a Unix socket."""

import asyncio
import functools
from collections.abc import AsyncIterator

import aiohttp
from multidict import CIMultiDict
from starlette.types import Receive, Scope, Send
from yarl import URL

STOPS = b'{"error":{"message":"The server is shutting down.","type":"server_error","param":null,"code":"shutting_down"}}'
HOP = (b"connection", b"date")  # the server in front sends its own


class Forwarder:
    """ASGI application that sends each request to a server on a Unix socket, and streams the answer to the client."""

    def __init__(self, path: str):
        self._path = path

    @functools.cached_property
    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(self._path, limit=0), timeout=aiohttp.ClientTimeout(), auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(), skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )  # fmt: skip

    async def close(self) -> None:
        await self._session.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request. It is aborted if the client disconnects."""
        is_read = asyncio.Event()
        relay, watch = asyncio.create_task(self._relay(scope, receive, send, is_read)), asyncio.create_task(_left(receive, is_read))
        try:
            await asyncio.wait((relay, watch), return_when=asyncio.FIRST_COMPLETED)
            if relay.done():
                relay.result()
        finally:
            relay.cancel()
            watch.cancel()

    async def _relay(self, scope: Scope, receive: Receive, send: Send, is_read: asyncio.Event) -> None:
        target = (scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")).decode("latin-1")
        headers = CIMultiDict((name.decode(), value.decode("utf-8", "surrogateescape")) for name, value in scope["headers"])
        is_chunked = headers.popall("Transfer-Encoding", None) is not None  # set again for a body without a length
        body = _body(receive, is_read) if is_chunked or "Content-Length" in headers else None
        if body is None:
            is_read.set()
        url = URL(f"http://engine{target}", encoded=True)
        try:
            response = await self._session.request(scope["method"], url, headers=headers, data=body, allow_redirects=False)
        except aiohttp.ClientConnectionError:
            await send({"type": "http.response.start", "status": 503, "headers": [(b"content-type", b"application/json")]})
            await send({"type": "http.response.body", "body": STOPS})
            return
        async with response:
            kept = [(name.lower(), value) for name, value in response.raw_headers if name.lower() not in HOP]
            await send({"type": "http.response.start", "status": response.status, "headers": kept})
            async for data in response.content.iter_any():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body"})


async def _body(receive: Receive, is_read: asyncio.Event) -> AsyncIterator[bytes]:
    while not is_read.is_set():
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client disconnected")
        if not message.get("more_body"):
            is_read.set()
        yield message["body"]


async def _left(receive: Receive, is_read: asyncio.Event) -> None:
    await is_read.wait()
    while (await receive())["type"] != "http.disconnect":
        pass

"""Forwarding of requests of an ASGI server to a server on a Unix socket."""

import asyncio
from collections.abc import AsyncIterator

import httpx
from starlette.types import Receive, Scope, Send

from engine.launch.unix import UnixClients

STOPS = b'{"error":{"message":"The server is shutting down.","type":"server_error","param":null,"code":"shutting_down"}}'
HOP = (b"connection", b"date")  # the server in front sends its own


class Forwarder:
    """ASGI application that sends each request to a server on a Unix socket, and streams the answer to the client."""

    def __init__(self, path: str):
        self._path, self._clients = path, UnixClients()

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
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        url = httpx.URL("http://engine").copy_with(raw_path=scope["raw_path"] + query)
        has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
        body = _body(receive, is_read) if has_body else None
        if body is None:
            is_read.set()
        async with self._clients.client(self._path) as client:
            await _exchange(client, client.build_request(scope["method"], url, headers=scope["headers"], content=body), send)


async def _exchange(client: httpx.AsyncClient, request: httpx.Request, send: Send) -> None:
    try:
        response = await client.send(request, stream=True)
    except httpx.TransportError:
        await send({"type": "http.response.start", "status": 503, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": STOPS})
        return
    try:
        headers = [(name, value) for name, value in response.headers.raw if name.lower() not in HOP]
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        async for data in response.aiter_raw():
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body"})
    finally:
        await response.aclose()


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

"""A replica forwards requests to the engine beside it."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.proxy import Forwarder
from tests.eventually import eventually_async


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope, receive)
    if scope["path"] == "/endless":
        assert (await receive())["type"] == "http.request"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        assert (await receive())["type"] == "http.disconnect"
        LEFT.set()
        return
    body = await request.body()
    response = Response(b"%s %s %d" % (scope["raw_path"], scope["query_string"], len(body)), 418, {"x-key": request.headers["x-key"]})
    await response(scope, receive, send)


LEFT = asyncio.Event()


async def test_requests_are_forwarded(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    server = uvicorn.Server(uvicorn.Config(echo, uds=path, log_level="error"))
    serving = asyncio.create_task(server.serve())
    await eventually_async(lambda: server.started, "a server")
    forwarder = Forwarder(path)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(forwarder), base_url="http://replica") as client:
        answers = await asyncio.gather(*(client.post("/a%2Fb?c=d", content=bytes(300_000), headers={"x-key": str(i)}) for i in range(5)))
        for index, answer in enumerate(answers):
            assert (answer.status_code, answer.content, answer.headers["x-key"]) == (418, b"/a%2Fb c=d 300000", str(index))
        messages = iter([{"type": "http.request"}, {"type": "http.disconnect"}])
        begun = asyncio.Event()

        async def receive() -> Any:
            if (message := next(messages))["type"] == "http.disconnect":
                await begun.wait()
            return message

        async def send(message: Any) -> None:
            if message.get("body"):
                begun.set()

        scope = {"type": "http", "method": "POST", "path": "/endless", "raw_path": b"/endless", "query_string": b"", "headers": []}
        await forwarder(scope, receive, send)
        await LEFT.wait()
        server.should_exit = True
        await serving
        assert (await client.get("/", headers={"x-key": ""})).status_code == 503
        await forwarder.session.close()

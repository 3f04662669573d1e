"""The proxy under attack, and as a process: limits, secrets, a bounded part of the bodies, TLS."""

import asyncio
import errno
import json
import resource
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from engine.config import EngineConfig
from server.http.connection import ConnectionLimiter
from server.route import SCANNED_BYTES, Body, Budget
from tests.eventually import HANG_GUARD_S
from tests.unit.server.routing import Replica, patient_proxy, routed  # noqa: F401

pytestmark = pytest.mark.usefixtures("patient_proxy")
SECRET = "sekret"
KEY = b"Authorization: Bearer " + SECRET.encode()
MIB = 1 << 20


async def exchange(url: str, data: bytes) -> tuple[int, dict[str, Any]]:
    """Status and JSON of the answer to these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", URL(url).port)
    writer.write(data)
    async with asyncio.timeout(HANG_GUARD_S):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        body = await reader.readexactly(length)
    writer.close()
    return int(head.split()[1]), json.loads(body)


async def test_the_proxy_refuses_in_its_own_words(caplog: pytest.LogCaptureFixture) -> None:
    """Fails if a key stands in the log, or if a body is awaited from a client that has no key."""

    async def refuse(request: web.Request) -> web.StreamResponse:
        assert not request.body_exists
        return web.json_response({"error": {}}, status=401)

    async with routed(Replica("a", refuse), api_keys=[SECRET]) as running:
        for data, status in (
            (b"GET /v1/models HTTP/1.1\r\n" + KEY + b"\0\r\n\r\n", 400),
            (b"GET /v1/models HTTP/1.1\r\n" + KEY + b"\r\nX: " + b"x" * 70_000, 431),
            (b"GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: b\r\n" + KEY + b"\r\n\r\n", 400),
            (b"POST /v1/models HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n" + KEY + b"\r\n\r\n0\r\n\r\n", 501),
        ):
            answered, error = await exchange(running.url, data)
            assert answered == status and error["error"].keys() == {"message", "type", "param", "code"}
            assert SECRET not in json.dumps(error)
        post = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n"
        assert (await exchange(running.url, post))[0] == 401
    assert SECRET not in caplog.text and "Traceback" not in caplog.text


async def test_bodies_without_an_image_are_held_within_a_budget() -> None:
    budget, data = Budget(4 * MIB), b" " * (1 << 16)

    async def pieces() -> AsyncIterator[dict[str, object]]:
        for _ in range(8):
            yield {"type": "http.request", "body": data, "more_body": True}
        yield {"type": "http.request", "body": b"", "more_body": False}

    bodies = []
    for _ in range(100):
        bodies.append(Body(cast(Any, pieces().__anext__), budget))
        assert await bodies[-1].find_image() == b""
    held = [len(body.held) for body in bodies]
    assert held[0] == SCANNED_BYTES and max(held[50:]) == len(data)
    assert sum(body.num_counted for body in bodies) == 4 * MIB - budget.num_free and budget.num_free == 0
    for body in bodies:
        assert sum([len(piece) async for piece in body.all()]) == 8 * len(data)
    assert budget.num_free == 4 * MIB


async def test_a_full_file_table_is_not_a_dead_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    async with routed(Replica("a")) as running:
        proxy = running.proxy

        def fail(*arguments: object, **options: object) -> None:
            raise aiohttp.ClientConnectorError(cast(Any, None), OSError(errno.EMFILE, "Too many open files"))

        with monkeypatch.context() as patch:
            patch.setattr(proxy._session, "request", fail)
            patch.setattr(proxy._session, "get", fail)
            async with running.client.post(running.url, data=b"{}") as answer:
                assert answer.status == 503 and "as many connections" in await answer.text()
            await proxy._poll(proxy.balancer.backends[0])
        assert proxy.balancer.backends[0].healthy and proxy.balancer.backends[0].num_in_flight == 0
        assert await running.ask() == "a"


def test_connections_fit_the_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each client takes a connection to a replica too."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (1000, 1000))
    assert ConnectionLimiter(EngineConfig(), 64, 2).max_connections == (1000 - 64 - 64) // 2
    assert ConnectionLimiter(EngineConfig(max_connections=5), 64, 2).max_connections == 5
    monkeypatch.setattr("resource.getrlimit", lambda _: (64, 64))
    assert ConnectionLimiter(EngineConfig(), 64, 2).max_connections == 1


async def test_the_proxy_ends_tls_and_raises_its_limit_of_files(certificate: Path) -> None:
    command = [sys.executable, "-m", "server.route", "--port", "0", "--ssl-certfile", str(certificate), "--backends", "http://127.0.0.1:1"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 256)),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = (await asyncio.to_thread(process.stdout.readline)).split()[2]
        trusted = ssl.create_default_context(cafile=certificate)
        assert url.startswith("https://127.0.0.1:")
        async with aiohttp.ClientSession() as client, client.get(f"{url}/health", ssl=trusted) as answer:
            assert answer.status == 503 and (await answer.json())["status"] == "unavailable"
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (256, 256)
    finally:
        process.terminate()
        process.wait()

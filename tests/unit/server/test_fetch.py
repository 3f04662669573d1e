"""Fetching: a client cannot make the server read what the network or the file system would not show to the client itself."""

import asyncio
import contextlib
import dataclasses
import functools
import ipaddress
import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from yarl import URL

from engine.arena import ArenaFull, ArenaTooSmall
from engine.config import EngineConfig
from engine.messages import MediaRef
from server.checkpoint import Checkpoint
from server.errors import RequestError
from server.processor import fetch
from server.processor.fetch import GRACE_S, Fetcher, Resolver, is_public
from server.processor.image import Image
from server.processor.inspect import Allowance
from server.processor.request import release_all
from tests.eventually import HANG_GUARD_S, eventually_async
from tests.unit.server.in_process import virtual
from tests.unit.server.loading import Loading
from tests.unit.server.stack import ROOT

PRIVATE = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "255.255.255.255", "224.0.0.1",
    "240.0.0.1", "::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "2002:a00:1::",
    "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2001:db8::1", "fec0::1", "::127.0.0.1", "64:ff9b:1::7f00:1",
    "::ffff:0:7f00:1",
]  # fmt: skip
PUBLIC = ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]


def test_which_addresses_are_public() -> None:
    for address in PRIVATE + PUBLIC:
        assert is_public(ipaddress.ip_address(address)) == (address in PUBLIC), address


@dataclasses.dataclass
class Site:
    """A web site on this host and a count of the requests that it got."""

    url: str = ""
    hits: int = 0


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    made = Site()

    async def handle(request: web.Request) -> web.StreamResponse:
        made.hits += 1
        kind = request.match_info["kind"]
        if kind.startswith("hop"):
            left = int(kind[3:])
            raise web.HTTPFound(f"/hop{left - 1}" if left > 1 else "/data")
        if kind == "inside":
            raise web.HTTPFound("http://[::1]:1/x")
        if kind == "file":
            raise web.HTTPFound("file:///etc/passwd")
        if kind == "missing":
            raise web.HTTPNotFound
        if kind == "silent":
            await asyncio.Event().wait()
        if kind == "endless":
            response = web.StreamResponse()
            await response.prepare(request)
            for _ in range(100):
                await response.write(b"x" * 1000)
            return response
        return web.Response(body=b"payload")

    app = web.Application()
    app.router.add_get("/{kind}", handle)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listener).start()
    made.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    yield made
    await runner.cleanup()


async def download(url: str, **settings: object) -> bytes:
    fetcher = Fetcher(EngineConfig(**settings))  # type: ignore[arg-type]
    pieces: list[bytes] = []
    try:
        await fetcher.download(url, pieces.append)
    finally:
        await fetcher.close()
    return b"".join(pieces)


async def status_of(url: str, **settings: object) -> int:
    with pytest.raises(RequestError) as caught:
        await download(url, **settings)
    assert "127." not in caught.value.info.message and "::1" not in caught.value.info.message
    return caught.value.info.status


async def test_private_hosts_need_permission(site: Site) -> None:
    port = site.url.rsplit(":", 1)[1]
    hosts = ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "2130706433", "127.1", "0x7f.1", "0", "127.0.0.1."]
    for host in hosts:
        assert await status_of(f"http://{host}:{port}/data") in (400, 422), host
    assert site.hits == 0
    assert await download(f"{site.url}/data", allow_private_media=True) == b"payload"


async def test_what_was_checked_is_what_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the resolver hands out a private address next to public ones, or leaves the resolution to the connection."""
    answers = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in ("10.0.0.1", "8.8.8.8", "127.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: list(answers))
    results = await Resolver(5.0).resolve("mixed.example", 80)
    assert [result["host"] for result in results] == ["8.8.8.8"]
    assert all(result["flags"] & socket.AI_NUMERICHOST for result in results)
    answers[:] = answers[:1]
    assert await status_of("http://rebound.example/x") == 400


async def test_a_name_that_moves_inside(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a name server that returns an outer address and then an inner one, or an outer host that redirects to an inner one, gets
    us to ask the inner one: here 127.0.0.2 counts as outer."""
    answers = iter(["127.0.0.2", "127.0.0.1"])
    outer = socket.create_server(("127.0.0.2", 0))
    runner = web.AppRunner(web.Application())
    runner.app.router.add_get("/{kind}", functools.partial(_redirect_or_answer, site.url))
    await runner.setup()
    await web.SockSite(runner, outer).start()
    monkeypatch.setattr(fetch, "is_public", lambda address: str(address) == "127.0.0.2")
    resolve = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **options: resolve(next(answers), *rest, **options))
    url = f"http://moves.example:{outer.getsockname()[1]}"
    try:
        assert await download(f"{url}/data") == b"outer"
        assert await status_of(f"{url}/data") == 400
        assert await status_of(f"http://127.0.0.2:{outer.getsockname()[1]}/inside") == 400
    finally:
        await runner.cleanup()
    assert site.hits == 0


async def _redirect_or_answer(inner: str, request: web.Request) -> web.Response:
    if request.path == "/inside":
        raise web.HTTPFound(f"{inner}/data")
    return web.Response(body=b"outer")


def test_a_real_name_server_that_changes_its_answer() -> None:
    """Fails if between the check and the connection a name is resolved again: here by the system's resolver and our own name server."""
    alone = ["unshare", "--map-root-user", "--net", "--mount"]
    if shutil.which("ip") is None or subprocess.run([*alone, "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs a network namespace of its own")
    command = [*alone, sys.executable, "-m", "tests.unit.server.rebinding"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert told["inner"] == 0 and told["outer"] == told["ends"]["fetched"] > 0 and set(told["ends"]) == {"fetched", "400"}, told


async def test_slow_names_hold_up_nobody(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a few names that do not resolve keep all others from being resolved."""
    resolve, release, num_waiting = socket.getaddrinfo, threading.Event(), 0

    def getaddrinfo(host: str, *arguments: Any, **options: Any) -> Any:
        nonlocal num_waiting
        if host == "slow.example":
            num_waiting += 1
            release.wait(HANG_GUARD_S)
        return resolve("127.0.0.1", *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    fetcher = Fetcher(EngineConfig(allow_private_media=True, download_connect_timeout=HANG_GUARD_S))
    slow = [asyncio.create_task(fetcher.download(f"http://slow.example/{i}", lambda piece: None)) for i in range(8)]
    await eventually_async(lambda: num_waiting == 8, "every slow name in the resolver")
    pieces: list[bytes] = []
    await fetcher.download(site.url.replace("127.0.0.1", "quick.example") + "/data", pieces.append)
    assert b"".join(pieces) == b"payload" and not any(task.done() for task in slow)
    for task in slow:
        task.cancel()
    assert all(isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*slow, return_exceptions=True))
    release.set()
    await fetcher.close()


async def test_a_name_that_does_not_resolve_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a client hears anything but a 422, or hears it never."""
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: release.wait(HANG_GUARD_S) or [])
    assert await status_of("http://slow.example/", download_connect_timeout=1) == 422
    release.set()


async def test_redirects_are_few_and_checked(site: Site) -> None:
    assert await download(f"{site.url}/hop3", allow_private_media=True) == b"payload"
    assert await status_of(f"{site.url}/hop4", allow_private_media=True) == 422
    assert await status_of(f"{site.url}/file", allow_private_media=True) == 400
    assert await status_of(f"{site.url}/inside", allow_private_media=True, allowed_media_domains="127.0.0.1") == 400


async def test_domains(site: Site) -> None:
    assert await download(f"{site.url}/data", allow_private_media=True, allowed_media_domains="x.org, 127.0.0.1") == b"payload"
    for allowed in ("x.org", "0.0.1", "127.0.0.1.x.org"):
        assert await status_of(f"{site.url}/data", allow_private_media=True, allowed_media_domains=allowed) == 400


async def test_odd_urls() -> None:
    for url in ("http://", "http:///x", "http://user:pw@x.org/", "http://x:99999/", "http://[::1", "ftp://x.org/", "http://x y/"):
        assert await status_of(url) in (400, 422), url


async def test_a_url_of_many_characters_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    monkeypatch.setattr(fetch, "URL", lambda text: parsed.append(text) or URL(text))
    fetcher = Fetcher(EngineConfig(allowed_local_media_path="."))
    for start in ("http://{}/x", " HTTP://u@{}", "h\ttp://x.org/{}", "http://{}?x#y", "file://{}/x", "file://x.org/{}"):
        url = start.format(chr(0xFDFA) * 30_000)
        with pytest.raises(RequestError) as caught:
            if start.startswith("file"):
                fetcher.read_local(url)
            else:
                await fetcher.download(url, bytearray().extend)
        assert caught.value.info.status == 400
    await fetcher.close()
    assert not parsed


async def test_size_status_and_time(site: Site) -> None:
    assert await status_of(f"{site.url}/endless", allow_private_media=True, max_download_bytes=50_000) == 413
    assert await status_of(f"{site.url}/data", allow_private_media=True, max_download_bytes=6) == 413
    assert await status_of(f"{site.url}/missing", allow_private_media=True) == 422
    for limit in ("download_timeout", "download_connect_timeout"):
        assert await status_of(f"{site.url}/silent", allow_private_media=True, **{limit: 1}) == 422


@virtual
async def test_a_download_that_drips_is_given_up() -> None:
    """Fails if a server that sends a byte now and then keeps a slot until the end of the time, or if one that keeps the pace loses it."""

    async def read(num_bytes: int, pace: int) -> tuple[int, float]:
        """Bytes that were read of a response that has so many per second, and the seconds that took."""

        async def drip(size: int) -> AsyncIterator[bytes]:
            for _ in range(100):
                await asyncio.sleep(1)
                yield b"x" * num_bytes

        response: Any = SimpleNamespace(content_length=None, content=SimpleNamespace(iter_chunked=drip))
        fetcher, found, loop = Fetcher(EngineConfig(download_pace_bytes=pace)), bytearray(), asyncio.get_running_loop()
        started = loop.time()
        with contextlib.suppress(TimeoutError):
            await fetcher._read(response, found.extend, 1 << 20)
        await fetcher.close()
        return len(found), loop.time() - started

    num_read, seconds = await read(1, 1000)
    assert num_read < 10 and seconds <= GRACE_S + 1
    assert await read(999, 1000) == (999 * 100, pytest.approx(100))
    assert (await read(900, 1000))[0] < 900 * 60


async def test_one_request_does_not_hold_all_slots(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    made, most, running = Loading(checkpoint, allow_private_media=True), 0, 0

    async def download(self: Fetcher, url: str, write: object, max_bytes: object) -> None:
        nonlocal most, running
        running += 1
        most = max(most, running)
        for _ in range(10):  # others would begin meanwhile
            await asyncio.sleep(0)
        running -= 1
        raise RequestError(422, "it could not be fetched")

    monkeypatch.setattr(Fetcher, "download", download)
    allowance = Allowance(1 << 30, 5)
    images = [Image(made.tools, MediaRef(url="http://tar.example/pit")) for _ in range(128)]
    loads = [image.load(i, MediaRef(url="http://tar.example/pit"), allowance) for i, image in enumerate(images)]
    failures = await asyncio.gather(*loads, return_exceptions=True)
    assert most == 5 and all(isinstance(failure, RequestError | ArenaFull) for failure in failures)
    await release_all(images)
    await made.close()


async def test_an_item_that_outgrows_the_arena_is_too_large(site: Site) -> None:
    """Fails if the sink's error is taken for one of the network: the client would hear 422 instead of 413."""

    def full(piece: bytes) -> None:
        raise ArenaTooSmall("never fits")

    fetcher = Fetcher(EngineConfig(allow_private_media=True))
    with pytest.raises(ArenaTooSmall):
        await fetcher.download(f"{site.url}/data", full)
    await fetcher.close()


async def test_odd_file_urls() -> None:
    for root in (None, "."):
        fetcher = Fetcher(EngineConfig(allowed_local_media_path=root))
        for url in ("file://[::1", "file://[x]/y", "file://other.host/x", "file:///\0"):
            with pytest.raises(RequestError) as caught:
                fetcher.read_local(url)
            assert caught.value.info.status in (400, 422), url
        await fetcher.close()

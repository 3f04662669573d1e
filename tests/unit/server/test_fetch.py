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
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from engine.arena import ArenaFull, ArenaTooSmall
from engine.config import EngineConfig
from engine.messages import MediaRef
from server.checkpoint import Checkpoint
from server.errors import RequestError
from server.processor import fetch
from server.processor.fetch import Fetcher, Resolver, is_public
from server.processor.image import Image
from server.processor.inspect import Allowance
from server.processor.request import release_all
from tests.unit.server.loading import Loading
from tests.unit.server.stack import ROOT

PRIVATE = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "255.255.255.255", "224.0.0.1",
    "240.0.0.1", "::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "2002:a00:1::",
    "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2001:db8::1", "fec0::1", "::127.0.0.1", "64:ff9b:1::7f00:1",
    "::ffff:0:7f00:1",
]  # fmt: skip
PUBLIC = ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses(address: str) -> None:
    """Red if an address of this host or its networks, however dressed up, counts as public."""
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses(address: str) -> None:
    """Red if ordinary hosts can no longer be fetched from."""
    assert is_public(ipaddress.ip_address(address))


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
        if kind == "slow":
            await asyncio.sleep(2)
        if kind == "drip":
            response = web.StreamResponse()
            await response.prepare(request)
            with contextlib.suppress(ConnectionError):
                for _ in range(50):
                    await response.write(b"x")
                    await asyncio.sleep(0.05)
            return response
        if kind == "endless":
            response = web.StreamResponse()
            await response.prepare(request)
            for _ in range(100):
                await response.write(b"x" * 1000)
            return response
        return web.Response(body=b"payload")

    app = web.Application()
    app.router.add_get("/{kind}", handle)
    runner = web.AppRunner(app)
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
    """Red if a name or a literal that leads to a private address is connected to without --allow-private-media."""
    port = site.url.rsplit(":", 1)[1]
    hosts = ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "2130706433", "127.1", "0x7f.1", "0", "127.0.0.1."]
    for host in hosts:
        assert await status_of(f"http://{host}:{port}/data") in (400, 422), host
    assert site.hits == 0
    assert await download(f"{site.url}/data", allow_private_media=True) == b"payload"


async def test_what_was_checked_is_what_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if the resolver hands out a private address next to public ones, or leaves the resolution to the connection."""
    answers = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in ("10.0.0.1", "8.8.8.8", "127.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: list(answers))
    results = await Resolver(5.0).resolve("mixed.example", 80)
    assert [result["host"] for result in results] == ["8.8.8.8"]
    assert all(result["flags"] & socket.AI_NUMERICHOST for result in results)
    answers[:] = answers[:1]
    assert await status_of("http://rebound.example/x") == 400


async def test_a_name_that_moves_inside(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a name server that first tells an outer address and then an inner one, or an outer host that redirects to an inner one, gets
    us to ask the inner one: here 127.0.0.2 counts as outer."""
    told = iter(["127.0.0.2", "127.0.0.1"])
    outer = socket.create_server(("127.0.0.2", 0))
    runner = web.AppRunner(web.Application())
    runner.app.router.add_get("/{kind}", functools.partial(_redirect_or_answer, site.url))
    await runner.setup()
    await web.SockSite(runner, outer).start()
    monkeypatch.setattr(fetch, "is_public", lambda address: str(address) == "127.0.0.2")
    resolve = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **options: resolve(next(told), *rest, **options))
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
    """Red if between the check and the connection a name is resolved again: here by the system's resolver and a name server of our own."""
    alone = ["unshare", "--map-root-user", "--net", "--mount"]
    if shutil.which("ip") is None or subprocess.run([*alone, "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs a network namespace of its own")
    command = [*alone, sys.executable, "-m", "tests.unit.server.rebinding"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    told = json.loads(done.stdout)
    assert told["inner"] == 0 and told["outer"] == told["ends"]["fetched"] > 0 and set(told["ends"]) == {"fetched", "400"}, told


async def test_slow_names_hold_up_nobody(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a few names that do not resolve keep all others from being resolved."""
    resolve, release = socket.getaddrinfo, threading.Event()

    def getaddrinfo(host: str, *arguments: Any, **options: Any) -> Any:
        if host == "slow.example":
            release.wait(20)
        return resolve("127.0.0.1", *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    fetcher = Fetcher(EngineConfig(allow_private_media=True, download_connect_timeout=1))
    slow = [asyncio.create_task(fetcher.download(f"http://slow.example/{i}", lambda piece: None)) for i in range(8)]
    await asyncio.sleep(0.1)
    pieces: list[bytes] = []
    await asyncio.wait_for(fetcher.download(site.url.replace("127.0.0.1", "quick.example") + "/data", pieces.append), 5)
    assert b"".join(pieces) == b"payload"
    failures = await asyncio.wait_for(asyncio.gather(*slow, return_exceptions=True), 10)
    release.set()
    await fetcher.close()
    assert all(isinstance(failure, RequestError) and failure.info.status == 422 for failure in failures)


async def test_redirects_are_few_and_checked(site: Site) -> None:
    """Red if a redirect escapes the checks of the first URL, or if there may be more than three."""
    assert await download(f"{site.url}/hop3", allow_private_media=True) == b"payload"
    assert await status_of(f"{site.url}/hop4", allow_private_media=True) == 422
    assert await status_of(f"{site.url}/file", allow_private_media=True) == 400
    assert await status_of(f"{site.url}/inside", allow_private_media=True, allowed_media_domains="127.0.0.1") == 400


async def test_domains(site: Site) -> None:
    """Red if the list of allowed domains is ignored or matched loosely."""
    assert await download(f"{site.url}/data", allow_private_media=True, allowed_media_domains="x.org, 127.0.0.1") == b"payload"
    for allowed in ("x.org", "0.0.1", "127.0.0.1.x.org"):
        assert await status_of(f"{site.url}/data", allow_private_media=True, allowed_media_domains=allowed) == 400


@pytest.mark.parametrize(
    "url", ["http://", "http:///x", "http://user:pw@x.org/", "http://x:99999/", "http://[::1", "ftp://x.org/", "http://x y/"]
)
async def test_odd_urls(url: str) -> None:
    """Red if a URL that parsers disagree on is connected to, or raises anything but a client's error."""
    assert await status_of(url) in (400, 422)


@pytest.mark.parametrize("scheme", ["http", " HTTP", "h\tttp", "file"])
@pytest.mark.parametrize("where", ["{}/x", "u@{}", "{}?x#y", "x.org/{}"])
async def test_a_url_of_many_characters_is_not_parsed(scheme: str, where: str) -> None:
    """Red if a host of a few kilobytes, each character of which stands for many, keeps the processor busy for seconds."""
    started = time.monotonic()
    fetcher = Fetcher(EngineConfig(allowed_local_media_path="."))
    with pytest.raises(RequestError) as caught:
        url = f"{scheme}://{where.format(chr(0xFDFA) * 30_000)}"
        await (fetcher.download(url, bytearray().extend) if scheme != "file" else asyncio.to_thread(fetcher.read_local, url))
    await fetcher.close()
    assert caught.value.info.status == 400 and time.monotonic() - started < 0.3


async def test_size_status_and_time(site: Site) -> None:
    """Red if a download may be larger or slower than allowed, or if another status than 200 counts as an image."""
    assert await status_of(f"{site.url}/endless", allow_private_media=True, max_download_bytes=50_000) == 413
    assert await status_of(f"{site.url}/data", allow_private_media=True, max_download_bytes=6) == 413
    assert await status_of(f"{site.url}/missing", allow_private_media=True) == 422
    for limit in ("download_timeout", "download_connect_timeout"):
        assert await status_of(f"{site.url}/slow", allow_private_media=True, **{limit: 1}) == 422


async def test_a_download_that_drips_is_given_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a server that sends a byte now and then keeps a slot until the end of the time."""
    monkeypatch.setattr(fetch, "GRACE_S", 0.5)
    started = time.monotonic()
    assert await status_of(f"{site.url}/drip", allow_private_media=True) == 422
    assert time.monotonic() - started < 3
    assert len(await download(f"{site.url}/drip", allow_private_media=True, download_pace_bytes=1)) == 50


async def test_one_request_does_not_hold_all_slots(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a request of many addresses that do not answer keeps everybody else's waiting."""
    made, most, running = Loading(checkpoint, allow_private_media=True), 0, 0

    async def download(self: Fetcher, url: str, write: object, max_bytes: object) -> None:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
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
    """Red if the sink's error is taken for one of the network: the client would hear 422 instead of 413."""

    def full(piece: bytes) -> None:
        raise ArenaTooSmall("never fits")

    fetcher = Fetcher(EngineConfig(allow_private_media=True))
    with pytest.raises(ArenaTooSmall):
        await fetcher.download(f"{site.url}/data", full)
    await fetcher.close()


@pytest.mark.parametrize("url", ["file://[::1", "file://[x]/y", "file://other.host/x", "file:///\0"])
@pytest.mark.parametrize("root", [None, "."])
async def test_odd_file_urls(url: str, root: str | None) -> None:
    """Red if a file URL that cannot be parsed is a bug of ours (500) instead of the client's error."""
    fetcher = Fetcher(EngineConfig(allowed_local_media_path=root))
    with pytest.raises(RequestError) as caught:
        fetcher.read_local(url)
    await fetcher.close()
    assert caught.value.info.status in (400, 422)

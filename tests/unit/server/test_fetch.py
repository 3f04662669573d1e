"""Fetching: a client cannot make the server read what the network or the file system would not show to the client itself."""

import asyncio
import contextlib
import dataclasses
import functools
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from engine.wire.arena import ArenaTooSmall
from engine.wire.config import EngineConfig
from server.errors import RequestError
from server.processor.media import fetch
from server.processor.media.fetch import Fetcher, is_public
from tests.eventually import eventually_async

PRIVATE = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "255.255.255.255", "224.0.0.1",
    "240.0.0.1", "::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "2002:7f00:1::", "2002:a00:1::",
    "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2001:db8::1", "fec0::1", "::127.0.0.1", "64:ff9b:1::7f00:1",
    "::ffff:0:7f00:1",
]  # fmt: skip
PUBLIC = ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "64:ff9b::808:808"]


def test_which_addresses_are_public() -> None:
    for address in PRIVATE + PUBLIC:
        assert is_public(address) == (address in PUBLIC), address


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
        if kind in (
            moves := {"hop1": "/data", "hop2": "/hop1", "hop3": "/hop2", "hop4": "/hop3", "inside": INSIDE, "file": "file:///etc/x"}
        ):
            raise web.HTTPFound(moves[kind])
        if kind == "silent":
            await asyncio.Event().wait()
        if kind == "endless":
            response = web.StreamResponse()
            await response.prepare(request)
            for _ in range(100):
                await response.write(b"x" * 1000)
            return response
        return web.Response(body=b"payload", status=404 if kind == "missing" else 200)

    async with serve(handle, "127.0.0.1") as made.url:
        yield made


@contextlib.asynccontextmanager
async def serve(handler: Callable[[web.Request], Awaitable[web.StreamResponse]], address: str) -> AsyncIterator[str]:
    """The URL of a site at this address of this host."""
    app = web.Application()
    app.router.add_get("/{kind}", handler)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    listener = socket.create_server((address, 0))
    await web.SockSite(runner, listener).start()
    yield f"http://{address}:{listener.getsockname()[1]}"
    await runner.cleanup()


INSIDE = "http://[::1]:1/x"


async def download(url: str, **settings: object) -> bytes:
    fetcher = Fetcher(EngineConfig(**settings))
    pieces: list[bytes] = []
    try:
        await fetcher.download(url, pieces.append)
    finally:
        await fetcher.close()
    return b"".join(pieces)


async def status_of(url: str, **settings: object) -> int:
    """Of a URL that is refused; a file's URL is read."""
    fetcher = Fetcher(EngineConfig(**settings))
    with pytest.raises(RequestError) as caught:
        fetcher.read_local(url) if url.startswith("file:") else await fetcher.download(url, bytearray().extend)
    await fetcher.close()
    assert "127." not in caught.value.info.message and "::1" not in caught.value.info.message
    return caught.value.info.status


async def test_private_hosts_need_permission(site: Site) -> None:
    port = site.url.rsplit(":", 1)[1]
    hosts = ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "2130706433", "127.1", "0x7f.1", "0", "127.0.0.1."]
    for host in hosts:
        assert await status_of(f"http://{host}:{port}/data") in (400, 422), host
    assert site.hits == 0
    assert await download(f"{site.url}/data", allow_private_media=True) == b"payload"


async def test_a_name_that_moves_inside(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server returns an outer address, then an inner one, or the outer host redirects; 127.0.0.2 counts as outer."""

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/inside":
            raise web.HTTPFound(f"{site.url}/data")
        return web.Response(body=b"outer")

    answers = iter(["127.0.0.2", "127.0.0.1"])
    resolve = socket.getaddrinfo
    async with serve(answer, "127.0.0.2") as outer:
        monkeypatch.setattr(fetch, "is_public", lambda address: address == "127.0.0.2")
        monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **options: resolve(next(answers), *rest, **options))
        moving = outer.replace("127.0.0.2", "moves.example")
        assert await download(f"{moving}/data") == b"outer"
        assert await status_of(f"{moving}/data") == await status_of(f"{outer}/inside") == 400
    assert site.hits == 0


async def test_redirects_and_domains(site: Site) -> None:
    allowed = functools.partial(status_of, allow_private_media=True)
    assert await download(f"{site.url}/hop3", allow_private_media=True) == b"payload"
    assert (await allowed(f"{site.url}/hop4"), await allowed(f"{site.url}/file")) == (422, 422)
    assert await allowed(f"{site.url}/inside", allowed_media_domains="127.0.0.1") == 400
    assert await download(f"{site.url}/data", allow_private_media=True, allowed_media_domains="x.org, 127.0.0.1") == b"payload"
    for domains in ("x.org", "0.0.1", "127.0.0.1.x.org"):
        assert await allowed(f"{site.url}/data", allowed_media_domains=domains) == 400


async def test_odd_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if such a URL is connected to or ends in a 500, or if a host of many characters, which takes seconds, is parsed."""
    for url in ("http://", "http:///x", "http://user:pw@x.org/", "http://x:99999/", "http://[::1", "ftp://x.org/", "http://x y/"):
        assert await status_of(url) in (400, 422), url
    for root in (None, "."):
        for url in ("file://[::1", "file://[x]/y", "file://other.host/x", "file:///\0"):
            assert await status_of(url, allowed_local_media_path=root) in (400, 422), url
    monkeypatch.setattr(fetch, "URL", None)  # it fails where one is parsed
    for start in ("http://{}/x", " HTTP://u@{}", "h\ttp://x.org/{}", "http://{}?x#y", "file://{}/x", "file://x.org/{}"):
        assert await status_of(start.format(chr(0xFDFA) * 30_000), allowed_local_media_path=".") == 400


async def test_size_status_and_time(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[str, int, dict[str, object]]] = [
        ("endless", 413, {"max_download_bytes": 50_000}), ("data", 413, {"max_download_bytes": 6}), ("missing", 422, {}),
        ("silent", 422, {"download_timeout": 1}),
    ]  # fmt: skip
    for kind, status, settings in limits:
        assert await status_of(f"{site.url}/{kind}", allow_private_media=True, **settings) == status, kind
    monkeypatch.setattr(EngineConfig, "download_connect_timeout", 1)
    assert await status_of(f"{site.url}/silent", allow_private_media=True) == 422


async def test_one_host_does_not_hold_all_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MAX_PER_HOST", 2)
    waiting, may_answer = 0, asyncio.Event()

    async def wait(request: web.Request) -> web.Response:
        nonlocal waiting
        waiting += 1
        await may_answer.wait()
        return web.Response(body=b"payload")

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=b"payload")

    fetcher = Fetcher(EngineConfig(allow_private_media=True))
    async with serve(wait, "127.0.0.1") as slow, serve(answer, "127.0.0.2") as quick:
        tasks = [asyncio.create_task(fetcher.download(f"{slow}/{i}", bytearray().extend)) for i in range(6)]
        await eventually_async(lambda: waiting == 2, "two requests at the slow host")
        await fetcher.download(f"{quick}/x", bytearray().extend)
        assert waiting == 2
        may_answer.set()
        await asyncio.gather(*tasks)
    await fetcher.close()


async def test_an_item_that_outgrows_the_arena_is_too_large(site: Site) -> None:
    """Fails if the sink's error is taken for one of the network: 422 instead of 413."""

    def full(piece: bytes) -> None:
        raise ArenaTooSmall("never fits")

    fetcher = Fetcher(EngineConfig(allow_private_media=True))
    with pytest.raises(ArenaTooSmall):
        await fetcher.download(f"{site.url}/data", full)
    await fetcher.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a file, and a secret next to it."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/file").write_bytes(b"secret")
    folder = tmp_path / "root"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub/file").write_bytes(b"inside")
    return folder


async def test_only_what_lies_below_is_read(root: Path) -> None:
    (root / "link").symlink_to("sub/file")
    (root / "a file").write_bytes(b"inside")
    (root / "out").symlink_to("../secret")
    (root / "file").symlink_to("/etc/passwd")
    (root / "process").symlink_to("/proc/self/exe")  # a link that no path explains
    (root / "circle").symlink_to("circle")
    os.mkfifo(root / "fifo")
    fetcher = Fetcher(EngineConfig(allowed_local_media_path=str(root)))
    for path in ("sub/file", "./sub//file", "link", "a%20file"):
        assert fetcher.read_local(f"file://{root}/{path}") == b"inside", path
    await fetcher.close()
    inside = ("missing", "sub/file/x", "sub/file%00.txt", "circle", "fifo")
    outside = ("..", "../secret/file", "../root-2/file", "../missing", "sub/../../secret/file", "out/file", "file", "process")
    for path in (*inside, *outside):
        assert await status_of(f"file://{root}/{path}", allowed_local_media_path=str(root)) == (422 if path in inside else 400), path

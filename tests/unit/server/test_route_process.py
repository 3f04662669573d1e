"""`python -m server.route` as a process of its own: what it costs, and TLS."""

import asyncio
import resource
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from bench.proxy import MIB, Measured


def test_the_proxy_is_quick() -> None:
    """Red if the begin of a large body waits for more than the hash of its first 64 KiB, or a chunk costs more than it should.

    The best of several: other processes want the two cores, too."""
    with Measured() as proxy:
        assert any(proxy.bodies(10, 30 * MIB)["first_byte_ms_best"] <= 2 for _ in range(10))
        assert proxy.chunks(8, 2000)["cpu_us_per_chunk"] <= 40


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A key and a certificate of 127.0.0.1 in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("makes its certificate with openssl")
    path = tmp_path / "certificate.pem"
    subject = ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", path, "-out", tmp_path / "alone"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *files]
    subprocess.run(command, check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + (tmp_path / "alone").read_bytes())
    return path


async def test_the_proxy_ends_tls(certificate: Path) -> None:
    """Red if a client cannot reach replicas by https where `--ssl-certfile` is given."""
    command = [sys.executable, "-m", "server.route", "--port", "0", "--ssl-certfile", str(certificate), "--backends", "http://127.0.0.1:1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        url = (await asyncio.to_thread(process.stdout.readline)).split()[2]
        trusted = ssl.create_default_context(cafile=certificate)
        assert url.startswith("https://127.0.0.1:")
        async with aiohttp.ClientSession() as client, client.get(f"{url}/health", ssl=trusted) as answer:
            assert answer.status == 503 and (await answer.json())["status"] == "unavailable"
    finally:
        process.terminate()
        process.wait()


@pytest.mark.parametrize(("most", "is_full"), [(64, True), (256, False)])
async def test_more_clients_than_open_files_are_no_fault_of_the_replicas(most: int, is_full: bool) -> None:
    """Red if a proxy that may open no further file takes its replicas for dead, and refuses those that it could serve, or if it opens no
    more than the few of the default although it may."""
    num_clients, may_answer = 40, asyncio.Event()
    passed: list[web.Request] = []

    async def answer_late(request: web.Request) -> web.Response:
        if request.path != "/health":
            passed.append(request)
            await may_answer.wait()
        return web.Response(text="served")

    runner = web.AppRunner(web.Application(), access_log=None, shutdown_timeout=0)
    runner.app.router.add_route("*", "/{path:.*}", answer_late)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    backend = f"http://127.0.0.1:{runner.addresses[0][1]}"
    command = [sys.executable, "-m", "server.route", "--port", "0", "--backends", backend]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, most)),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = (await asyncio.to_thread(process.stdout.readline)).split()[2]
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

            async def ask() -> tuple[int, str]:
                try:
                    async with client.post(url, data=b"{}") as answer:
                        return answer.status, await answer.text()
                except aiohttp.ClientOSError:  # libuv resets a client for whom there is no open file
                    return 503, "as many connections"

            asking = [asyncio.create_task(ask()) for _ in range(num_clients)]
            async with asyncio.timeout(60):
                while len(passed) + sum(task.done() for task in asking) < num_clients:  # what is not passed on is refused at once
                    await asyncio.sleep(0.01)
            may_answer.set()
            answers = await asyncio.gather(*asking)
            refused = [text for status, text in answers if status == 503]
            assert bool(refused) == is_full and len(refused) < num_clients and all("as many connections" in text for text in refused)
            assert [text for status, text in answers if status == 200] == ["served"] * (num_clients - len(refused))
            assert await ask() == (200, "served")
    finally:
        process.terminate()
        process.wait()
        await runner.cleanup()

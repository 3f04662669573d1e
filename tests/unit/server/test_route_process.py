"""`python -m server.route` as a process of its own: what it costs, and TLS."""

import asyncio
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from bench.proxy import MIB, Measured


def test_the_proxy_is_quick() -> None:
    """Red if the begin of a large body waits for more than the hash of its first 64 KiB, or a chunk costs more than it should.

    The best of several: other processes want the two cores, too."""
    with Measured() as proxy:
        assert min(proxy.bodies(10, 30 * MIB)["first_byte_ms_best"] for _ in range(3)) <= 2
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


def test_a_bound_that_leaves_no_room_is_refused() -> None:
    """Red if a request could find no replica at all although all are healthy."""
    ended = subprocess.run(
        [sys.executable, "-m", "server.route", "--bound", "1", "--backends", "http://a"], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2 and "--bound: 1 is not above 1" in ended.stderr

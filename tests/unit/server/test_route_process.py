"""`python -m server.route` as a process: TLS and the limit of open files."""

import asyncio
import resource
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest


def certificate(folder: Path) -> Path:
    """A key and a certificate of 127.0.0.1 in one file."""
    path = folder / "certificate.pem"
    subject = ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", path, "-out", folder / "alone"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *files]
    subprocess.run(command, check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + (folder / "alone").read_bytes())
    return path


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
async def test_the_proxy_ends_tls_and_raises_its_limit_of_files(tmp_path: Path) -> None:
    """Fails if a client cannot reach replicas by https where `--ssl-certfile` is given, or if the proxy opens no more files than the few
    of the default although it may."""
    file = certificate(tmp_path)
    command = [sys.executable, "-m", "server.route", "--port", "0", "--ssl-certfile", str(file), "--backends", "http://127.0.0.1:1"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 256)),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = (await asyncio.to_thread(process.stdout.readline)).split()[2]
        trusted = ssl.create_default_context(cafile=file)
        assert url.startswith("https://127.0.0.1:")
        async with aiohttp.ClientSession() as client, client.get(f"{url}/health", ssl=trusted) as answer:
            assert answer.status == 503 and (await answer.json())["status"] == "unavailable"
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (256, 256)
    finally:
        process.terminate()
        process.wait()

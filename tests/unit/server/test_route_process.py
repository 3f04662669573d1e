"""`python -m server.route` as a process: TLS and the limit of open files."""

import asyncio
import resource
import ssl
import subprocess
import sys
from pathlib import Path

import aiohttp


async def test_the_proxy_ends_tls_and_raises_its_limit_of_files(certificate: Path) -> None:
    """Fails if a client cannot reach replicas by https where `--ssl-certfile` is given, or if the proxy opens no more files than the few
    of the default although it may."""
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

"""`deploy/haproxy/haproxy.cfg` with the haproxy binary."""

import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from tests.eventually import eventually

FILE = Path(__file__).parents[2] / "deploy/haproxy/haproxy.cfg"
HAPROXY = shutil.which("haproxy")

pytestmark = [pytest.mark.replicas, pytest.mark.skipif(HAPROXY is None, reason="runs haproxy")]


class Engine(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        text = server.name.encode()
        self.send_response(503 if self.path == "/health" and not server.is_healthy else 200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: object) -> None:
        """Says nothing."""


class Servers(ThreadingHTTPServer):
    def __init__(self, name: str):
        super().__init__(("127.0.0.1", 0), Engine)
        self.name, self.is_healthy = name, True
        threading.Thread(target=self.serve_forever, daemon=True).start()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[str, list[Servers]]]:
    engines, port = [Servers("a"), Servers("b")], free_port()
    text = FILE.read_text().replace("bind :8000", f"bind 127.0.0.1:{port}").replace("/run/haproxy.sock", str(tmp_path / "s"))
    for engine, address in zip(engines, ("10.0.0.1:8000", "10.0.0.2:8000"), strict=True):
        text = text.replace(address, f"127.0.0.1:{engine.server_port}")
    (tmp_path / "haproxy.cfg").write_text(text)
    assert HAPROXY is not None
    process = subprocess.Popen([HAPROXY, "-db", "-f", tmp_path / "haproxy.cfg"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return httpx.get(url).status_code < 600
        except httpx.TransportError:
            return False

    eventually(answers, "haproxy answers")
    yield url, engines
    process.terminate()
    process.wait()
    for engine in engines:
        engine.shutdown()
        engine.server_close()


def test_the_file_is_good() -> None:
    assert HAPROXY is not None
    ended = subprocess.run([HAPROXY, "-c", "-f", FILE], capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and not re.search("WARNING|ALERT", ended.stderr), ended.stderr


def test_sessions_stay_and_leave_an_engine_that_is_not_healthy(running: tuple[str, list[Servers]]) -> None:
    url, (first, _) = running

    def homes() -> list[str]:
        return [httpx.get(url, headers={"x-session-id": f"session {index}"}).text for index in range(40)]

    before = homes()
    assert set(before) == {"a", "b"} and homes() == before
    first.is_healthy = False
    eventually(lambda: set(homes()) == {"b"}, "sessions leave the engine that is not healthy")
    first.is_healthy = True
    eventually(lambda: homes() == before, "sessions return")

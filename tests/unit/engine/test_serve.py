"""What the launcher says when it is ready, and what it refuses to start."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from engine import serve
from engine.serve import bind, size_arenas
from engine.wire.config import GIB, MIB, EngineConfig

SIZES = [(GIB, True, (64, 128)), (4 * GIB, True, (256, 512)), (500 * GIB, True, (1024, 2048)), (500 * GIB, False, (64, 192))]


@pytest.mark.parametrize(("memory", "has_gpu", "sizes"), SIZES)
def test_arenas_follow_the_memory(memory: int, has_gpu: bool, sizes: tuple[int, int]) -> None:
    config = size_arenas(EngineConfig(), memory, has_gpu)
    assert (config.api_arena_bytes, config.processor_arena_bytes) == tuple(size * MIB for size in sizes)


def test_arenas_that_are_too_large_are_refused_by_their_flags() -> None:
    asked = EngineConfig(api_arena_bytes=3 * GIB)
    assert size_arenas(asked, 8 * GIB, True) == msgspec.structs.replace(asked, processor_arena_bytes=GIB)
    with pytest.raises(ValueError, match=r"--api-arena-bytes and --processor-arena-bytes take 3.5 GiB.* 4.0 GiB"):
        size_arenas(asked, 4 * GIB, True)


def test_an_unusable_address_is_reported_before_processes_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "make_runtime", None)
    monkeypatch.setattr(serve, "_on_interrupt", lambda handler: None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        used = int(other.getsockname()[1])
        for config, flag in (
            (EngineConfig(port=used), f"--port {used}"),
            (EngineConfig(host="no-such-host.invalid", port=0), "--host no-such-host.invalid"),
            (EngineConfig(host="1.2.3.4", port=0), "--host 1.2.3.4"),
        ):
            with pytest.raises(OSError, match=flag):
                serve.serve_one(config)


def refusal(*flags: str, **environment: str) -> str:
    command = [sys.executable, "-m", "engine.serve", "--port", "0", *flags]
    ended = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and not ended.stdout and len(ended.stderr.splitlines()) == 1, ended.stderr
    return ended.stderr


def test_an_unusable_address_is_one_line() -> None:
    assert "--host" in refusal("--host", "1.2.3.4")


def test_a_socket_that_nobody_serves_refuses_connections() -> None:
    with bind("127.0.0.1", 0) as listener, socket.socket() as client:
        assert client.connect_ex(listener.getsockname()) != 0


def test_a_path_that_is_too_long_for_sockets_is_one_line(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    assert "TMPDIR" in refusal(TMPDIR=str(long)) and not list(long.iterdir())

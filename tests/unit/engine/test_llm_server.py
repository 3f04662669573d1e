"""The server process of an LLM: the reason of a failed start, of an end, and whoever stops it waits."""

import asyncio
from pathlib import Path

import pytest

from engine.launch import process
from engine.launch.process import ServerProcess
from engine.launch.supervise import ChildDied
from engine.wire.config import EngineConfig


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Commands of a shell that stand for the server."""
    lines: list[str] = []
    monkeypatch.setattr(process, "command_of", lambda *_: ["sh", "-c", "\n".join(lines)])
    return lines


async def test_a_failed_start_and_an_end_have_the_reason_of_the_child(script: list[str]) -> None:
    for end, kind, reason in (
        ("echo 'no such model'; exit 2", ValueError, "no such model"),
        ("echo 'worker-0: no memory'; exit 1", ChildDied, "no memory"),
        ("kill -9 $$", ChildDied, "was killed"),
    ):
        script[:] = [end]
        with pytest.raises(kind, match=reason):
            await ServerProcess(EngineConfig()).start()
        script[:] = ["echo unix:/run/http.sock", end]
        server = ServerProcess(EngineConfig())
        await server.start()
        assert server.path == "/run/http.sock"
        lost = await server.lost(OSError("broken"))
        assert isinstance(lost, ChildDied) and reason in str(lost)


async def test_whoever_stops_it_waits_for_its_end_even_if_another_gives_up(script: list[str], tmp_path: Path) -> None:
    (end := tmp_path / "end").touch()
    script[:] = [f"trap 'while [ -e {end} ]; do :; done; exit 0' TERM", "echo unix:x", "while :; do sleep 0.01; done"]
    server = ServerProcess(EngineConfig())
    await server.start()
    stops = [asyncio.create_task(server.stop()) for _ in range(2)]
    for _ in range(10):
        await asyncio.sleep(0)
    stops[0].cancel()
    assert server._process is not None and server._process.returncode is None and not stops[1].done()
    end.unlink()
    await stops[1]
    assert server._process.returncode == 0
    assert stops[0].cancelled() and await server.lost(OSError()) is not None

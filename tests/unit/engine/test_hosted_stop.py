"""An engine within a program that is stopped while it starts: whoever stops it waits until all processes have ended."""

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from engine import hosted
from engine.launch.config import EngineConfig
from engine.launch.supervise import ChildDied
from tests.eventually import eventually_async


class ScriptedSupervisor:
    """Its processes never become ready, and end when the test lets them."""

    def __init__(self) -> None:
        self.is_waited_for = self.is_ending = self.is_stopped = False
        self.may_end = threading.Event()

    def wait_ready(self, roles: set[str], is_stopping: Callable[[], bool]) -> None:
        self.is_waited_for = True
        while not is_stopping():
            self.may_end.wait(0.01)
        raise ChildDied("stopped")

    def stop(self) -> None:
        self.is_ending = True
        assert self.may_end.wait(60)
        self.is_stopped = True


async def idle(*_: object) -> None:
    await asyncio.Event().wait()


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> ScriptedSupervisor:
    supervisor = ScriptedSupervisor()
    client = SimpleNamespace(refuse_all=lambda reason: None)
    api = SimpleNamespace(arena=None, pump=idle, tell_the_launcher=idle, client=client)
    endpoint = SimpleNamespace(run_dir="", close=lambda: None)
    fakes = {
        "Supervisor": lambda: supervisor, "size_arenas": lambda config, memory: config, "start_engine": lambda *_: None,
        "make_runtime": lambda *_: SimpleNamespace(arena_fds=()), "Child": lambda *_, **__: endpoint, "AsyncInbox": lambda *_: endpoint,
        "Api": lambda child: api, "warm_up": lambda *_: None,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(hosted, name, fake)
    return supervisor


async def test_whoever_stops_an_engine_waits_for_its_processes(supervisor: ScriptedSupervisor) -> None:
    """Ctrl-C during the start cancels it and then closes the engine."""
    engine = hosted.HostedEngine(EngineConfig())
    starting = asyncio.create_task(engine.start())
    await eventually_async(lambda: supervisor.is_waited_for, "the wait for ready processes")
    starting.cancel()
    await eventually_async(lambda: supervisor.is_ending, "the end of the processes")
    closing = asyncio.create_task(engine.stop())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not closing.done() and not starting.done()
    supervisor.may_end.set()
    await closing
    assert supervisor.is_stopped and starting.done() and starting.cancelled()


async def test_cancelled_stop_goes_on(supervisor: ScriptedSupervisor) -> None:
    engine = hosted.HostedEngine(EngineConfig())
    stopping = asyncio.create_task(engine.stop())
    await eventually_async(lambda: supervisor.is_ending, "the end of the processes")
    stopping.cancel()
    supervisor.may_end.set()
    await engine.stop()
    assert supervisor.is_stopped

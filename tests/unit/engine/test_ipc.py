"""Messages between processes, and the heap of a process that is ready."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.wire.guests import HEADER
from engine.wire.ipc import AsyncInbox, Outbox
from engine.wire.messages import Abort
from tests.eventually import HANG_GUARD_S

Link = tuple[AsyncInbox[Abort], Outbox[Abort]]


@pytest.fixture
async def link(tmp_path: Path) -> AsyncIterator[Link]:
    inbox = AsyncInbox(str(tmp_path), "processor", Abort)
    outbox = Outbox(str(tmp_path), "processor")
    yield inbox, outbox
    outbox.close()
    inbox.close()


async def test_messages_arrive_in_order_whether_or_not_a_receiver_waits(link: Link) -> None:
    inbox, outbox = link
    sent = received = 0
    for burst in [1, 2, 1, 1, 17, 1, 3, 1] * 40:
        waiting = asyncio.create_task(inbox.recv())
        if burst != 2:  # otherwise the messages are sent before a receiver waits
            await asyncio.sleep(0)
        for _ in range(burst):
            outbox.send(Abort(sent))
            sent += 1
        for i in range(burst):
            assert (await asyncio.wait_for(inbox.recv() if i else waiting, HANG_GUARD_S)).rid == received
            received += 1
    assert inbox._inbox.recv_ready() is None


async def test_messages_of_a_thread_arrive_in_order(link: Link, tmp_path: Path) -> None:
    def send() -> None:
        outbox = Outbox(str(tmp_path), "processor")
        for rid in range(2000):
            outbox.send(Abort(rid))
        outbox.close()

    thread = threading.Thread(target=send)
    thread.start()
    for rid in range(2000):
        assert (await asyncio.wait_for(link[0].recv(), HANG_GUARD_S)).rid == rid
    thread.join()


async def test_a_message_that_was_not_taken_goes_to_the_next_receiver(link: Link) -> None:
    inbox, outbox = link
    for rid in range(20):
        waiting = asyncio.create_task(inbox.recv())
        await asyncio.sleep(0)
        waiting.cancel()
        outbox.send(Abort(rid))
        assert (await asyncio.wait_for(inbox.recv(), HANG_GUARD_S)).rid == rid


async def test_an_empty_inbox_does_not_wake_the_loop(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    wakes = []
    wake = AsyncInbox._wake
    monkeypatch.setattr(AsyncInbox, "_wake", lambda self: (wakes.append(1), wake(self)))
    inbox, outbox = link
    for rid in range(100):
        outbox.send(Abort(rid))
        await asyncio.wait_for(inbox.recv(), HANG_GUARD_S)
    waiting = asyncio.create_task(inbox.recv())
    wakes.clear()
    for _ in range(1000):
        await asyncio.sleep(0)
    assert len(wakes) < 10
    waiting.cancel()


def test_a_process_that_is_ready_has_a_settled_heap(tmp_path: Path) -> None:
    """Full garbage collections, during which no client is served, skip what was imported."""
    code = """
import gc, sys
modules = [[] for _ in range(60_000)]  # stands in for what imports leave
from engine.wire.config import EngineConfig
from engine.wire.child import Child, Runtime
runtime = Runtime(EngineConfig(), "torch", "cpu", sys.argv[1], (0, 0), 0, 0, "", ("demo",), 1)
Child("scheduler", runtime).ready()
print(gc.get_freeze_count(), len(gc.get_objects()))
"""
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, timeout=HANG_GUARD_S)
    num_settled, num_left = map(int, run.stdout.split())
    assert num_settled > 50_000 > 100 * num_left


def test_a_guest_has_a_settled_heap() -> None:
    code = "import gc, sys; from engine.wire.guests import serve; modules = [[] for _ in range(60_000)];"
    code += "serve(lambda _: b'%d' % gc.get_freeze_count(), sys.stdin.buffer, sys.stdout.buffer)"
    job = HEADER.pack(1, 0) + b"?"
    run = subprocess.run([sys.executable, "-c", code], input=job, capture_output=True, check=True, timeout=HANG_GUARD_S)
    assert run.stdout[: HEADER.size] == HEADER.pack(0, 0) and int(run.stdout[2 * HEADER.size :]) > 50_000

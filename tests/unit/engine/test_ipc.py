"""Messages between processes, and the heap of a process that is ready."""

import asyncio
import io
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine.helper import frame_of, read_frame
from engine.ipc import AsyncInbox, Outbox
from engine.messages import Abort

HANG_GUARD_S = 60


async def test_messages_arrive_in_order_whether_or_not_a_receiver_waits(tmp_path: Path) -> None:
    """Red if a message that arrives between two looks at the socket is noticed only with the next one, or never."""
    inbox: AsyncInbox[Abort] = AsyncInbox(str(tmp_path), "processor", Abort)
    outbox: Outbox[Abort] = Outbox(str(tmp_path), "processor")
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
    outbox.close()
    inbox.close()


async def test_messages_of_a_thread_arrive_in_order(tmp_path: Path) -> None:
    """Red if the receiver misses a wake-up while the sender goes on."""
    inbox: AsyncInbox[Abort] = AsyncInbox(str(tmp_path), "processor", Abort)

    def send() -> None:
        outbox: Outbox[Abort] = Outbox(str(tmp_path), "processor")
        for rid in range(2000):
            outbox.send(Abort(rid))
        outbox.close()

    thread = threading.Thread(target=send)
    thread.start()
    for rid in range(2000):
        assert (await asyncio.wait_for(inbox.recv(), HANG_GUARD_S)).rid == rid
    thread.join()
    inbox.close()


async def test_a_message_that_was_not_taken_goes_to_the_next_receiver(tmp_path: Path) -> None:
    """Red if a receiver that is cancelled while it waits takes a message along."""
    inbox: AsyncInbox[Abort] = AsyncInbox(str(tmp_path), "processor", Abort)
    outbox: Outbox[Abort] = Outbox(str(tmp_path), "processor")
    for rid in range(20):
        waiting = asyncio.create_task(inbox.recv())
        await asyncio.sleep(0)
        waiting.cancel()
        outbox.send(Abort(rid))
        assert (await asyncio.wait_for(inbox.recv(), HANG_GUARD_S)).rid == rid
    outbox.close()
    inbox.close()


async def test_an_empty_inbox_does_not_wake_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if the socket stays readable for the event loop although no message is left: the loop would keep a core busy."""
    wakes = []
    wake = AsyncInbox._wake
    monkeypatch.setattr(AsyncInbox, "_wake", lambda self: (wakes.append(1), wake(self)))
    inbox: AsyncInbox[Abort] = AsyncInbox(str(tmp_path), "processor", Abort)
    outbox: Outbox[Abort] = Outbox(str(tmp_path), "processor")
    for rid in range(100):
        outbox.send(Abort(rid))
        await asyncio.wait_for(inbox.recv(), HANG_GUARD_S)
    waiting = asyncio.create_task(inbox.recv())
    wakes.clear()
    for _ in range(1000):
        await asyncio.sleep(0)
    assert len(wakes) < 10
    waiting.cancel()
    outbox.close()
    inbox.close()


def test_a_process_that_is_ready_has_a_settled_heap(tmp_path: Path) -> None:
    """Red if full garbage collections still visit everything that was imported: no client is served meanwhile."""
    code = """
import gc, sys
modules = [[] for _ in range(60_000)]  # stands in for what imports leave
from engine.config import EngineConfig
from engine.ipc import Child, Runtime
runtime = Runtime(EngineConfig(), "torch", "cpu", sys.argv[1], (0, 0), 0, 0, "", ("demo",), 1)
Child("scheduler", runtime).ready()
print(gc.get_freeze_count(), len(gc.get_objects()))
"""
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, timeout=HANG_GUARD_S)
    num_settled, num_left = map(int, run.stdout.split())
    assert num_settled > 50_000 > 100 * num_left


def test_a_helper_has_a_settled_heap() -> None:
    """Red if each child of a grammar compiler pays for a full garbage collection."""
    code = "import gc; from engine.helper import answer_questions; modules = [[] for _ in range(60_000)];"
    code += "answer_questions(lambda _: b'%d' % gc.get_freeze_count())"
    run = subprocess.run([sys.executable, "-c", code], input=frame_of(b"?"), capture_output=True, check=True, timeout=HANG_GUARD_S)
    frames = io.BytesIO(run.stdout)
    assert read_frame(frames) == b"" and int(read_frame(frames) or 0) > 50_000

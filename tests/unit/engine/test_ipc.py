"""How processes talk to each other, and what a process does when it is ready."""

import asyncio
import io
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from engine.helper import frame_of, read_frame
from engine.ipc import AsyncInbox, Outbox
from engine.messages import Abort

MANY = 2000


async def test_messages_come_in_order_whether_or_not_somebody_waits(tmp_path: Path) -> None:
    """Red if a message that comes between two looks at the socket is noticed only with the next one, or never."""
    inbox: AsyncInbox[Abort] = AsyncInbox(str(tmp_path), "processor", Abort)

    def send() -> None:
        outbox: Outbox[Abort] = Outbox(str(tmp_path), "processor")
        for rid in range(MANY):
            outbox.send(Abort(rid))
            if rid % 97 == 0:
                time.sleep(0.002)
        outbox.close()

    thread = threading.Thread(target=send)
    thread.start()
    for rid in range(MANY):
        assert (await asyncio.wait_for(inbox.recv(), 5)).rid == rid
        if rid % 501 == 0:
            await asyncio.sleep(0.02)  # several come meanwhile
    thread.join()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(inbox.recv(), 0.05)
    inbox.close()


async def test_a_message_that_nobody_took_is_there_for_the_next_who_asks(tmp_path: Path) -> None:
    """Red if who is cancelled while waiting takes a message along."""
    inbox: AsyncInbox[Abort] = AsyncInbox(str(tmp_path), "processor", Abort)
    outbox: Outbox[Abort] = Outbox(str(tmp_path), "processor")
    for rid in range(20):
        waiting = asyncio.create_task(inbox.recv())
        await asyncio.sleep(0)
        waiting.cancel()
        outbox.send(Abort(rid))
        assert (await asyncio.wait_for(inbox.recv(), 5)).rid == rid
    outbox.close()
    inbox.close()


def test_the_loop_is_not_kept_busy_by_what_was_read(tmp_path: Path) -> None:
    """Red if the socket stays readable for the event loop although nothing has come: a core would be lost."""
    code = """
import asyncio, sys, time, uvloop
from engine.ipc import AsyncInbox, Outbox
from engine.messages import Abort

async def main():
    inbox = AsyncInbox(sys.argv[1], "processor", Abort)
    outbox = Outbox(sys.argv[1], "processor")
    for rid in range(100):
        outbox.send(Abort(rid))
        await inbox.recv()
    waiting = asyncio.create_task(inbox.recv())
    before = time.process_time()
    await asyncio.sleep(1.0)
    print(time.process_time() - before)
    waiting.cancel()

uvloop.run(main())
"""
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60)
    assert float(run.stdout) < 0.2


def test_a_process_that_is_ready_has_a_settled_heap(tmp_path: Path) -> None:
    """Red if full garbage collections go on looking at everything that was imported: nobody is served meanwhile."""
    code = """
import gc, sys
import torch
from engine.config import EngineConfig
from engine.ipc import Child, Runtime
runtime = Runtime(EngineConfig(), "torch", "cpu", sys.argv[1], (0, 0), 0, 0, "", ("demo",), 1)
Child("scheduler", runtime).ready()
print(gc.get_freeze_count(), len(gc.get_objects()))
"""
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60)
    num_settled, num_left = map(int, run.stdout.split())
    assert num_settled > 50_000 > 100 * num_left


def test_a_helper_has_a_settled_heap() -> None:
    """Red if the children of a compiler of grammars pay for a full garbage collection: then good grammars are "too slow to follow"."""
    code = "import gc, torch; from engine.helper import answer_questions; answer_questions(lambda _: b'%d' % gc.get_freeze_count())"
    run = subprocess.run([sys.executable, "-c", code], input=frame_of(b"?"), capture_output=True, check=True, timeout=60)
    frames = io.BytesIO(run.stdout)
    assert read_frame(frames) == b"" and int(read_frame(frames) or 0) > 50_000

"""Decoders that are killed from outside: the file is not blamed."""

import asyncio
import signal
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine.helper import Helper, HelperDied
from server.errors import RequestError
from server.processor.decoder import Decoded
from server.processor.decoders import Decoders, HelperPool, VideoDecoders
from server.processor.video_jobs import Clip, VideoAnswer

ENCODED: Any = SimpleNamespace(offset=0, used=1)
CLIP = Clip(1, 1.0, 2, 2)


class ScriptedHelper:
    """A helper whose process ends with these codes, one per question, and then answers. 0: it does not answer in time."""

    def __init__(self, answer: object, *codes: int):
        self.codes = list(codes)
        self._answer = msgspec.msgpack.encode(answer)

    async def ask(self, question: bytes, timeout: float) -> bytes:
        if self.codes:
            code = self.codes.pop(0)
            raise HelperDied(code) if code else TimeoutError
        return self._answer


async def test_a_decoder_that_crashes_or_hangs_is_the_files_fault() -> None:
    for kind in (VideoDecoders, Decoders):
        for code in (-signal.SIGSEGV, 0):
            with pytest.raises(RequestError) as caught:
                await ask(kind, code)
            assert caught.value.info.status == 422


def pool_of(helper: ScriptedHelper) -> HelperPool:
    pool = HelperPool.__new__(HelperPool)
    pool._all = pool._idle = [helper]  # type: ignore[assignment,list-item]
    pool._free = asyncio.Semaphore(1)
    return pool


def decoders_with(kind: type[Any], helper: ScriptedHelper) -> Any:
    made = kind.__new__(kind)
    made._pool, made._timeout, made._is_installed = pool_of(helper), 60, True
    return made


async def ask(kind: type[Any], *codes: int) -> tuple[object, list[int]]:
    """What a decoder of this kind returns for a file whose processes end so, and the codes that are left."""
    is_video = kind is VideoDecoders
    helper = ScriptedHelper(VideoAnswer(CLIP) if is_video else Decoded(2, 2), *codes)
    made = decoders_with(kind, helper)
    return await (made.look(ENCODED) if is_video else made.read_header(ENCODED)), helper.codes


async def test_a_killed_decoder_is_asked_again_once() -> None:
    """A decoder that the kernel killed for lack of memory made an honest file a 422."""
    for kind in (VideoDecoders, Decoders):
        answer, left = await ask(kind, -signal.SIGKILL)
        assert answer is not None and not left
        with pytest.raises(RequestError, match="killed 2 times") as caught:
            await ask(kind, -signal.SIGKILL, -signal.SIGKILL)
        assert (caught.value.info.status, caught.value.info.code) == (503, "overloaded")
        assert caught.value.info.retry_after


async def test_how_a_helper_ended_is_known() -> None:
    """The process is killed after its end is noticed, which must not look as if that had ended it."""
    for number in (signal.SIGKILL, signal.SIGSEGV):
        helper, end = Helper("engine.helper"), f"sys.stdin.buffer.read(4); os.kill(os.getpid(), {number})"
        helper._command = (sys.executable, "-c", f"import os, sys; sys.stdout.buffer.write(bytes(4)); sys.stdout.flush(); {end}")
        with pytest.raises(HelperDied) as caught:
            await helper.ask(b"question", 60)
        assert caught.value.is_killed == (number == signal.SIGKILL)

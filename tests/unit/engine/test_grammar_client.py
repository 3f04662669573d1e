"""Verdicts on grammars depend on the grammar alone; the jobs of guests run in order, and end by themselves or with their guest."""

import asyncio
import gc
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from engine.wire.grammar import Compiled, Grammar
from engine.wire.guests import GuestDied, GuestPool
from server.errors import RequestError
from server.processor.grammar import AnswerGrammars
from tests.eventually import HANG_GUARD_S

GRAMMAR = Grammar("regex", "a+")
DONE = Compiled(b"data")


class ScriptedPool:
    """Answers jobs as scripted; an exception is raised. None waits for `may_answer`."""

    def __init__(self, *answers: Compiled | Exception | None):
        self.answers = list(answers)
        self.is_asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def ask(self, *_: object, **__: object) -> bytes:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            self.is_asked.set()
            await self.may_answer.wait()
        return msgspec.msgpack.encode(answer or DONE)


def grammars_of(*answers: Compiled | Exception | None) -> AnswerGrammars:
    allocator: Any = SimpleNamespace(allocate=lambda size: SimpleNamespace(append=lambda data: None))
    grammars = AnswerGrammars(Path(), 5, allocator, "", None)
    grammars.pool = cast(Any, ScriptedPool(*answers))
    return grammars


def request_with_a_grammar() -> Any:
    submit = SimpleNamespace(grammar=GRAMMAR, grammar_field="regex", prompt="", output=SimpleNamespace(calls="none"))
    return SimpleNamespace(submit=submit, regions={})


@pytest.mark.parametrize(("failure", "status"), [(TimeoutError(), 503), (GuestDied(), 400)], ids=["wall-clock", "died"])
async def test_interrupted_compilation_may_be_repeated(failure: Exception, status: int) -> None:
    grammars, request = grammars_of(failure, DONE), request_with_a_grammar()
    with pytest.raises(RequestError) as error:
        await grammars.prepare(request)
    assert error.value.info.status == status and bool(error.value.info.retry_after) == (status == 503)
    assert error.value.info.message.startswith("regex: ")
    await grammars.prepare(request)
    assert request.regions


async def test_equal_grammars_are_compiled_once() -> None:
    grammars, requests = grammars_of(None), [request_with_a_grammar() for _ in range(3)]  # another job would find no answer
    tasks = [asyncio.create_task(grammars.prepare(request)) for request in requests[:2]]
    await asyncio.wait_for(cast(Any, grammars.pool).is_asked.wait(), HANG_GUARD_S)
    cast(Any, grammars.pool).may_answer.set()
    await asyncio.gather(*tasks, grammars.prepare(requests[2]))
    assert all(request.regions for request in requests)


async def test_a_known_grammar_waits_for_no_other() -> None:
    grammars, request = grammars_of(DONE, None), request_with_a_grammar()
    await grammars.prepare(request)
    other = request_with_a_grammar()
    other.submit.grammar = Grammar("regex", "b")
    task = asyncio.create_task(grammars.prepare(other))
    await asyncio.wait_for(cast(Any, grammars.pool).is_asked.wait(), HANG_GUARD_S)
    await asyncio.wait_for(grammars.prepare(request), HANG_GUARD_S)
    cast(Any, grammars.pool).may_answer.set()
    await task


async def test_the_guest_of_a_failed_job_is_replaced() -> None:
    pool = GuestPool(1, "tests.unit.engine.echoing_guest", memory=1 << 32)
    try:
        assert await pool.ask(b"x", HANG_GUARD_S) == b"x"
        for job in (b"burn", *(b"%d" % number for number in (signal.SIGSEGV, signal.SIGKILL))):
            with pytest.raises(GuestDied):
                await pool.ask(job, HANG_GUARD_S, 0.1)
        with pytest.raises(TimeoutError):
            await pool.ask(b"%d" % signal.SIGSTOP, 0.1)
        assert await pool.ask(b"x", HANG_GUARD_S) == b"x"
    finally:
        await pool.close()


class FakeGuest:
    """Works until `may_end` is set."""

    def __init__(self) -> None:
        self.order: list[bytes] = []
        self.may_end = asyncio.Event()

    async def ask(self, job: bytes, *_: object) -> bytes:
        self.order.append(job)
        await self.may_end.wait()
        return job


class DyingGuest(FakeGuest):
    async def ask(self, job: bytes, *_: object) -> bytes:
        await super().ask(job)
        raise GuestDied


def pool_of(*fakes: FakeGuest) -> GuestPool:
    pool = GuestPool(len(fakes), "", memory=0)
    pool.guests, pool.idle = cast(Any, [*fakes]), cast(Any, [*fakes])
    return pool


async def test_the_error_of_a_cancelled_job_is_silent() -> None:
    """A pool that ends with the engine kills guests that work, and nobody awaits their answers."""
    unheard: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    guest = DyingGuest()
    task = asyncio.create_task(pool_of(guest).ask(b"", 60))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    guest.may_end.set()
    await asyncio.wait([task])
    assert guest.order and task.cancelled()
    del task
    gc.collect()
    assert not unheard


async def test_jobs_run_in_their_order() -> None:
    guest = FakeGuest()
    pool = pool_of(guest)
    tasks = [asyncio.create_task(pool.ask(b"%d" % number, 60)) for number in range(5)]
    await asyncio.sleep(0)
    tasks.pop(2).cancel()
    guest.may_end.set()
    await asyncio.wait_for(asyncio.gather(*tasks), HANG_GUARD_S)
    assert guest.order == [b"0", b"1", b"3", b"4"] and pool.idle == [guest]


async def test_a_client_that_leaves_ends_no_job() -> None:
    """Red if a call returns, or its guest gets another job, while the job may still write to memory that the caller frees."""
    guest = FakeGuest()
    pool = pool_of(guest)
    leaver, last = (asyncio.create_task(pool.ask(job, 60)) for job in (b"first", b"last"))
    while not guest.order:
        await asyncio.sleep(0)
    for _ in range(3):
        leaver.cancel()
        await asyncio.sleep(0)
    assert not leaver.done() and guest.order == [b"first"]
    guest.may_end.set()
    assert await asyncio.wait_for(last, HANG_GUARD_S) == b"last"
    assert leaver.cancelled()

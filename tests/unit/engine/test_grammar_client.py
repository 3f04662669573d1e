"""Verdicts on grammars depend on the grammar alone; the jobs of guests are ordered by client, and end by themselves or with their guest."""

import asyncio
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from engine import guests
from engine.grammar.client import QUICK_S, SMALL_BYTES, Compiled, GrammarCompiler, GrammarError
from engine.guests import MAX_CLIENTS, GuestDied, GuestKilled, GuestPool
from engine.wire.grammar import Grammar
from server.errors import RequestError
from server.grammar.answer import AnswerGrammars
from tests.eventually import HANG_GUARD_S

GRAMMAR = Grammar("regex", "a+")
LATE = GuestDied(-signal.SIGPROF)
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


def compiler_of(*answers: Compiled | Exception | None) -> GrammarCompiler:
    compiler = GrammarCompiler(Path(), 5)
    compiler.pool = cast(Any, ScriptedPool(*answers))
    return compiler


@pytest.mark.parametrize("failure", [TimeoutError(), GuestKilled(-9)], ids=["wall-clock", "killed"])
async def test_interrupted_compilation_is_repeated(failure: Exception) -> None:
    compiler = compiler_of(failure, DONE)
    with pytest.raises(type(failure)):
        await compiler.compile(GRAMMAR)
    assert await compiler.compile(GRAMMAR) == b"data"


async def test_the_answer_for_a_client_that_has_left_is_remembered() -> None:
    """Red if a cancelled request cancels its compilation, or if the same grammar is compiled twice at a time."""
    compiler = compiler_of(None)
    leaver, other = (asyncio.create_task(compiler.compile(GRAMMAR)) for _ in range(2))
    pool = cast(Any, compiler.pool)
    await asyncio.wait_for(pool.is_asked.wait(), HANG_GUARD_S)
    leaver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaver
    pool.may_answer.set()
    assert await other == await compiler.compile(GRAMMAR) == b"data"


async def test_verdicts_on_a_grammar_are_remembered() -> None:
    for deaths, words in (((LATE, LATE), "limit of 5 s CPU time"), ((GuestDied(-signal.SIGSEGV),), "too deep or too large")):
        compiler = compiler_of(*deaths)
        for _ in range(2):  # another job would find no answer
            with pytest.raises(GrammarError, match=words):
                await compiler.compile(GRAMMAR)


async def test_interrupted_compilation_answers_503() -> None:
    grammars = compiler_of(TimeoutError())
    submit = SimpleNamespace(
        grammar=GRAMMAR, grammar_field="regex", client=b"", prompt="", tools=(), output=SimpleNamespace(calls="none"), params=None
    )
    unused: Any = None
    with pytest.raises(RequestError) as error:
        await AnswerGrammars(grammars, unused, unused, "", None).prepare(cast(Any, SimpleNamespace(submit=submit)))
    assert error.value.info.status == 503 and error.value.info.retry_after and error.value.info.message.startswith("regex: ")


@pytest.mark.parametrize("forks", [False, True])
async def test_how_a_job_ended_is_known(forks: bool) -> None:
    pool = GuestPool(1, "tests.unit.engine.echoing_guest", memory=1 << 32, forks=forks)
    try:
        assert await pool.ask(b"x", HANG_GUARD_S) == b"x"
        first = pool.guests[0].process
        for job, is_late in ((b"burn", True), (b"%d" % signal.SIGSEGV, False)):
            with pytest.raises(GuestDied) as death:
                await pool.ask(job, HANG_GUARD_S, 0.1)
            assert death.value.is_late == is_late and not isinstance(death.value, GuestKilled)
        assert (pool.guests[0].process is first) == forks
        for number in (signal.SIGKILL, signal.SIGTERM):
            with pytest.raises(GuestKilled):
                await pool.ask(b"%d" % number, HANG_GUARD_S)
        with pytest.raises(TimeoutError):
            await pool.ask(b"%d" % signal.SIGSTOP, 0.1)
        assert await pool.ask(b"x", HANG_GUARD_S) == b"x"
    finally:
        await pool.close()


class FakeGuest:
    """Works for one second of the `clock`, or until `may_end` is set."""

    def __init__(self, clock: Any):
        self.clock, self.order, self.may_end = clock, [], None  # type: ignore[var-annotated]

    async def ask(self, job: bytes, *_: object) -> bytes:
        self.order.append(job)
        await (self.may_end.wait() if self.may_end else asyncio.sleep(0))
        self.clock.now += 1
        return job


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(guests, "time", clock)
    return clock


def pool_of(*fakes: FakeGuest) -> GuestPool:
    pool = GuestPool(len(fakes), "", memory=0)
    pool.guests, pool.idle = cast(Any, [*fakes]), cast(Any, [*fakes])
    return pool


async def test_the_client_that_has_used_least_is_next(clock: Any) -> None:
    guest = FakeGuest(clock)
    pool = pool_of(guest)

    def ask(client: bytes, size: int) -> asyncio.Task[bytes]:
        return asyncio.create_task(pool.ask(client + b"%d" % size, 60, client=client, size=size))

    sizes = ((b"d", 1), (b"a", 5), (b"a", 7), (b"a", 6), (b"b", 100), (b"b", 90), (b"c", 95))
    tasks, leaver = [ask(client, size) for client, size in sizes], ask(b"e", 1)
    await asyncio.sleep(0)
    leaver.cancel()
    await asyncio.gather(*tasks)
    assert guest.order == [b"d1", b"a5", b"b90", b"c95", b"a6", b"b100", b"a7"]
    assert leaver.cancelled() and pool.idle == [guest]


async def test_a_client_that_leaves_ends_no_job(clock: Any) -> None:
    """Red if a call returns, or its guest gets another job, while the job may still write to memory that the caller frees."""
    guest = FakeGuest(clock)
    guest.may_end = asyncio.Event()
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


async def test_large_jobs_leave_a_guest_to_small_ones(clock: Any) -> None:
    large, small = FakeGuest(clock), FakeGuest(clock)
    large.may_end = asyncio.Event()
    pool = pool_of(small, large)  # the last one is taken first
    waiting = [asyncio.create_task(pool.ask(b"large", 60, is_large=True)) for _ in range(2)]
    while not large.order:
        await asyncio.sleep(0)
    assert await asyncio.wait_for(pool.ask(b"small", 60), HANG_GUARD_S) == b"small"
    large.may_end.set()
    assert await asyncio.gather(*waiting) == [b"large"] * 2


async def test_what_is_remembered_of_clients_is_bounded(clock: Any) -> None:
    pool = pool_of(FakeGuest(clock))
    pool._assign, assign = (lambda: None), pool._assign  # type: ignore[method-assign]
    pool._used[b"heavy"] = 10**6
    for number in range(3 * MAX_CLIENTS):
        task = asyncio.create_task(pool.ask(b"", 60, client=b"%d" % number))
        await asyncio.sleep(0)
        pool._waiting.append((b"z", 1 << 60, True, asyncio.get_running_loop().create_future()))  # others always wait
        assign()
        await task
        pool._waiting.clear()
    assert len(pool._used) <= MAX_CLIENTS
    assert pool._used[b"heavy"] == 10**6


async def test_small_grammars_are_not_large_jobs() -> None:
    """A small one that exceeds its CPU time becomes a large one."""
    asked: list[tuple[int, bool, float]] = []

    class Pool:
        async def ask(self, job: bytes, wall: float, seconds: float, *, size: int, is_large: bool, **__: object) -> bytes:
            asked.append((size, is_large, seconds))
            if not is_large:
                raise LATE
            return msgspec.msgpack.encode(DONE)

    compiler = compiler_of()
    compiler.pool = cast(Any, Pool())
    grammars = [Grammar("regex", "a"), Grammar("regex", "a" * SMALL_BYTES)]
    for grammar in grammars:
        assert await compiler.compile(grammar) == b"data"
    small, large = (len(msgspec.msgpack.encode(grammar)) for grammar in grammars)
    assert asked == [(small, False, QUICK_S), (small, True, 5), (large, True, 5)]

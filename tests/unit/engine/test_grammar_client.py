"""Verdicts on grammars depend on the grammar alone; clients that share a helper process take turns."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from engine import helper
from engine.grammar.client import SMALL_CHARACTERS, Compiled, CompilerBusy, GrammarCompiler, GrammarError, Question
from engine.grammar.compile import MAX_TOKEN_S, follow
from engine.helper import MAX_CLIENTS, ChildStopped, HelperDied, Turns, answer_in_child
from engine.wire.params import Grammar
from server.errors import RequestError
from server.processor.intake import Intake
from tests.eventually import HANG_GUARD_S

GRAMMAR = Grammar("regex", "a+")
STOPPED = Compiled(is_stopped=True)


class ScriptedHelper:
    """Answers questions as scripted; an exception is raised."""

    def __init__(self, *answers: Compiled | Exception):
        self.answers = list(answers)

    async def ask(self, question: bytes, timeout: float) -> bytes:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return msgspec.msgpack.encode(answer)


def compiler_of(small: ScriptedHelper, large: ScriptedHelper) -> GrammarCompiler:
    compiler = GrammarCompiler(Path(), 5)
    compiler._small.helper, compiler._large.helper = cast(Any, small), cast(Any, large)
    return compiler


@pytest.mark.parametrize("failure", [TimeoutError(), HelperDied(-9), STOPPED], ids=["wall-clock", "helper killed", "child stopped"])
async def test_interrupted_compilation_is_repeated(failure: Compiled | Exception) -> None:
    """Red if a schema stays refused because its compiler was interrupted once."""
    compiler = compiler_of(ScriptedHelper(failure, Compiled(b"data")), ScriptedHelper(failure))
    with pytest.raises(CompilerBusy):
        await compiler.compile(GRAMMAR)
    assert await compiler.compile(GRAMMAR) == b"data"


async def test_the_answer_for_a_client_that_has_left_is_remembered() -> None:
    """Red if a cancelled request cancels its compilation: the process's answer would be lost, or read as that of the next question."""
    is_asked, may_answer = asyncio.Event(), asyncio.Event()

    class Waiting(ScriptedHelper):
        async def ask(self, question: bytes, timeout: float) -> bytes:
            answer = await super().ask(question, timeout)
            is_asked.set()
            await may_answer.wait()
            return answer

    compiler = compiler_of(Waiting(Compiled(b"data")), ScriptedHelper())
    leaver = asyncio.create_task(compiler.compile(GRAMMAR))
    await asyncio.wait_for(is_asked.wait(), HANG_GUARD_S)
    leaver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaver
    may_answer.set()
    assert await compiler.compile(GRAMMAR) == b"data"  # a second question would find no answer


async def test_refusal_for_cpu_time_is_remembered() -> None:
    compiler = compiler_of(ScriptedHelper(Compiled(error="late", is_late=True)), ScriptedHelper(Compiled(error="limit", is_late=True)))
    for _ in range(2):  # a second question would find no answer
        with pytest.raises(GrammarError, match="limit"):
            await compiler.compile(GRAMMAR)


async def test_interrupted_compilation_answers_503() -> None:
    grammars = compiler_of(ScriptedHelper(STOPPED), ScriptedHelper(STOPPED))
    submit = SimpleNamespace(
        grammar=GRAMMAR, grammar_field="regex", client=b"", prompt="", tools=(), output=SimpleNamespace(calls="none"), params=None
    )
    prompts = SimpleNamespace(template="")
    intake = SimpleNamespace(_grammars=grammars, _prompts=prompts)
    with pytest.raises(RequestError) as error:
        await Intake._compile(cast(Any, intake), cast(Any, SimpleNamespace(submit=submit)))
    assert error.value.info.status == 503 and error.value.info.retry_after and error.value.info.message.startswith("regex: ")


def burn() -> bytes:
    while True:
        pass


def end_by(number: signal.Signals) -> Callable[[], bytes]:
    def work() -> bytes:
        os.kill(os.getpid(), number)
        return b"not reached"

    return work


def test_child_that_exceeds_cpu_time_is_told_from_one_that_was_stopped() -> None:
    with pytest.raises(TimeoutError):
        answer_in_child(burn, cpu_seconds=0.1, wall_seconds=60)
    for number, wall_seconds in ((signal.SIGSTOP, 0.1), (signal.SIGKILL, 60), (signal.SIGTERM, 60)):
        with pytest.raises(ChildStopped):
            answer_in_child(end_by(number), cpu_seconds=60, wall_seconds=wall_seconds)
    with pytest.raises(EOFError):
        answer_in_child(end_by(signal.SIGSEGV), cpu_seconds=60, wall_seconds=60)
    assert answer_in_child(lambda: b"answer", cpu_seconds=60, wall_seconds=60) == b"answer"


@pytest.mark.parametrize(("slow", "is_refused"), [([1.0, 0.0], False), ([1.0, 1.0, 1.0], True)])
def test_one_slow_measurement_refuses_no_grammar(monkeypatch: pytest.MonkeyPatch, slow: list[float], is_refused: bool) -> None:
    measured = iter(slow)
    monkeypatch.setattr("engine.grammar.compile.slowest_token", lambda grammar: next(measured))
    assert min(filter(None, slow)) > MAX_TOKEN_S
    if is_refused:
        with pytest.raises(ValueError, match="too long to follow"):
            follow(cast(Any, None))
    else:
        follow(cast(Any, None))
    assert not list(measured)


async def test_the_client_that_has_used_least_is_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one client, small questions come before large ones."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(helper, "time", clock)
    turns, order = Turns(), []

    async def ask(client: bytes, size: int) -> None:
        async with turns.take(client, size):
            order.append((client, size))
            await asyncio.sleep(0)  # the others begin to wait
            clock.now += 1

    leaver = asyncio.create_task(ask(b"d", 1))
    tasks = [asyncio.create_task(ask(b"a", size)) for size in (5, 7, 6)]
    tasks += [asyncio.create_task(ask(client, size)) for client, size in ((b"b", 100), (b"b", 90), (b"c", 95))]
    late = asyncio.create_task(ask(b"e", 1))
    await asyncio.sleep(0)
    late.cancel()
    await asyncio.gather(leaver, *tasks)
    assert order == [(b"d", 1), (b"a", 5), (b"b", 90), (b"c", 95), (b"a", 6), (b"b", 100), (b"a", 7)]


async def test_a_client_that_leaves_passes_its_turn_on() -> None:
    """The client is cancelled between getting its turn and using it."""
    turns, holds = Turns(), asyncio.Event()

    async def ask() -> None:
        async with turns.take(b"", 1):
            await holds.wait()

    first, leaver, last = (asyncio.create_task(ask()) for _ in range(3))
    await asyncio.sleep(0)
    holds.set()
    while not first.done():
        await asyncio.sleep(0)
    leaver.cancel()  # it has its turn, and has not begun
    await asyncio.wait_for(last, HANG_GUARD_S)
    assert leaver.cancelled()


async def test_small_grammars_do_not_wait_for_large_ones() -> None:
    release = asyncio.Event()

    class Small:
        async def ask(self, question: bytes, timeout: float) -> bytes:
            text = msgspec.msgpack.decode(question, type=Question).grammar.text
            return msgspec.msgpack.encode(Compiled(error="late", is_late=True) if text == "slow" else Compiled(b"done"))

    class Large:
        async def ask(self, question: bytes, timeout: float) -> bytes:
            await release.wait()
            return msgspec.msgpack.encode(Compiled(b"done"))

    compiler = GrammarCompiler(Path(), 5)
    compiler._small.helper, compiler._large.helper = cast(Any, Small()), cast(Any, Large())
    waiting = [asyncio.create_task(compiler.compile(Grammar("regex", text))) for text in ("slow", "a" * (SMALL_CHARACTERS + 1))]
    assert await asyncio.wait_for(compiler.compile(Grammar("regex", "a")), 60) == b"done"
    assert not any(task.done() for task in waiting)
    release.set()
    assert await asyncio.gather(*waiting) == [b"done", b"done"]


async def test_what_is_remembered_of_clients_is_bounded() -> None:
    """Clients choose how many they are."""
    turns = Turns()
    async with turns.take(b"heavy", 1):
        pass
    turns._used[b"heavy"] = 10**6
    for number in range(3 * MAX_CLIENTS):
        turns._is_taken = False
        turns._pass_on = lambda: None  # others always wait
        async with turns.take(b"%d" % number, 1):
            pass
    assert len(turns._used) <= MAX_CLIENTS
    assert turns._used[b"heavy"] == 10**6

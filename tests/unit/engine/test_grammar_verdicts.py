"""A verdict on a grammar is remembered only if it depends on the grammar alone, not on the load of the machine."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from engine.grammar.client import Compiled, CompilerBusy, GrammarCompiler, GrammarError
from engine.grammar.compile import MAX_TOKEN_S, follow
from engine.helper import ChildStopped, HelperDied, answer_in_child
from engine.params import Grammar
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

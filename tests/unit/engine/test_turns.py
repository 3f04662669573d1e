"""Clients that share a helper process take turns; small grammars do not wait for large ones."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from engine import helper
from engine.grammar.client import SMALL_CHARACTERS, Compiled, GrammarCompiler, Question
from engine.helper import MAX_CLIENTS, Turns
from engine.params import Grammar
from tests.eventually import HANG_GUARD_S


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
        turns._pass_on = lambda: None  # type: ignore[method-assign]  # others always wait
        async with turns.take(b"%d" % number, 1):
            pass
    assert len(turns._used) <= MAX_CLIENTS
    assert turns._used[b"heavy"] == 10**6

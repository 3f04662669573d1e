"""Asks compiler processes for grammars. Small ones have a process of their own, which starts at once; the other one starts with the first
that is large, or slow."""

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from engine.helper import Helper, HelperDied
from engine.params import Grammar

COMPILE_S, QUICK_S = 5.0, 1.0
GRACE_S = 10.0  # for a process to end its compilation
SMALL_CHARACTERS = 1 << 12
CACHE_BYTES = 64 << 20
ENTRY_BYTES = 1 << 12  # what an entry counts beside its data


class Question(msgspec.Struct, frozen=True, array_like=True):

    grammar: Grammar
    seconds: float


class Compiled(msgspec.Struct, frozen=True):
    """A compiled grammar as xgrammar serialises it, or why there is none."""

    data: bytes = b""
    error: str | None = None
    is_late: bool = False  # it took longer than it was allowed


class GrammarError(ValueError):
    """A grammar that cannot be had; its text is for the client."""


class Lane:
    """A process. Next is the client that has had the least of its time since it was last idle, and of its grammars the smallest."""

    def __init__(self, model_folder: Path, seconds: float):
        self.helper = Helper("engine.grammar.compile", str(model_folder))
        self._seconds = seconds
        self._is_taken = False
        self._used: Counter[bytes] = Counter()  # milliseconds by client
        self._waiting: list[tuple[bytes, int, asyncio.Future[None]]] = []

    async def start(self) -> None:
        """Before the first question."""
        async with self.turn(b"", 0):
            await self.helper.start()

    @contextlib.asynccontextmanager
    async def turn(self, client: bytes, size: int) -> AsyncIterator[None]:
        """For tasks that are not cancelled."""
        if self._is_taken:
            came = asyncio.get_running_loop().create_future()
            self._waiting.append((client, size, came))
            await came
        self._is_taken, started = True, time.monotonic()
        try:
            yield
        finally:
            self._used[client] += int(1e3 * (time.monotonic() - started))
            if self._waiting:
                following = min(self._waiting, key=lambda waiting: (self._used[waiting[0]], waiting[1]))
                self._waiting.remove(following)
                following[2].set_result(None)
            else:
                self._is_taken = False
                self._used.clear()

    async def ask(self, grammar: Grammar) -> Compiled:
        """In a turn."""
        question = msgspec.msgpack.encode(Question(grammar, self._seconds))
        try:
            return msgspec.msgpack.decode(await self.helper.ask(question, self._seconds + GRACE_S), type=Compiled)
        except (TimeoutError, HelperDied):
            return Compiled(error="it cannot be compiled")


class GrammarCompiler:
    """Results, refusals too, are kept."""

    def __init__(self, model_folder: Path):
        self._small, self._large = Lane(model_folder, QUICK_S), Lane(model_folder, COMPILE_S)
        self._cache: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._cached_bytes = 0
        self._tasks: set[asyncio.Task[Compiled]] = set()

    async def start(self) -> None:
        """Before the first grammar: it takes seconds."""
        with contextlib.suppress(RuntimeError):  # it is closed meanwhile, or the first grammar tells its client
            await self._small.start()

    async def compile(self, grammar: Grammar, client: bytes = b"") -> bytes:
        """For rank 0. GrammarError, which is a 400, if it is none or takes too long; RuntimeError if no process starts."""
        task = asyncio.create_task(self._compile(grammar, client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        compiled = await asyncio.shield(task)  # whoever asked may leave, but the answer has to be read
        if compiled.error is not None:
            raise GrammarError(compiled.error)
        return compiled.data

    async def close(self) -> None:
        await self._small.helper.close()
        await self._large.helper.close()

    async def _compile(self, grammar: Grammar, client: bytes) -> Compiled:
        for lane in (self._small, self._large):
            if grammar not in self._cache and (lane is self._large or len(grammar.text) <= SMALL_CHARACTERS):
                async with lane.turn(client, len(grammar.text)):
                    if grammar not in self._cache:  # by somebody who asked for the same
                        compiled = await lane.ask(grammar)
                        if lane is self._large or not compiled.is_late:
                            self._remember(grammar, compiled)
        self._cache.move_to_end(grammar)
        return self._cache[grammar]

    def _remember(self, grammar: Grammar, compiled: Compiled) -> None:
        self._cache[grammar] = compiled
        self._cached_bytes += _cost(grammar, compiled)
        while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
            self._cached_bytes -= _cost(*self._cache.popitem(last=False))


def _cost(grammar: Grammar, compiled: Compiled) -> int:
    return ENTRY_BYTES + len(grammar.text) + len(compiled.data)

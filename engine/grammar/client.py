"""Asks compiler processes for grammars. Small ones have a process of their own; the other starts with the first large or slow grammar."""

import asyncio
import contextlib
from collections import OrderedDict
from pathlib import Path

import msgspec

from engine.helper import WALL_S, Helper, HelperDied, Turns
from engine.wire.params import Grammar

QUICK_S = 1.0  # CPU time of a small grammar before it counts as a large one
GRACE_S = 10.0  # for a process that ends its compilation in time
SMALL_CHARACTERS = 1 << 12
CACHE_BYTES = 64 << 20
ENTRY_BYTES = 1 << 12  # beside its data


class Question(msgspec.Struct, frozen=True, array_like=True):
    grammar: Grammar
    cpu_seconds: float


class Compiled(msgspec.Struct, frozen=True):
    """A grammar as xgrammar serialises it, or why there is none."""

    data: bytes = b""
    error: str | None = None
    is_late: bool = False  # it exceeds the limit of CPU time
    is_stopped: bool = False  # the compilation was killed, or exceeded its wall-clock limit: no verdict on the grammar


class GrammarError(ValueError):
    """The grammar cannot be compiled. Its text is for the client."""


class CompilerBusy(RuntimeError):
    """A compilation was killed or exceeded its wall-clock limit. Another attempt may succeed."""


class Lane:
    """A process for one compilation at a time, which clients take in turns. `seconds` limits its CPU time."""

    def __init__(self, model_folder: Path, seconds: float):
        self.helper = Helper("engine.grammar.compile", str(model_folder))
        self.turns = Turns()
        self._seconds = seconds

    async def start(self) -> None:
        """Before the first question."""
        async with self.turns.take(b"", 0):
            await self.helper.start()

    async def ask(self, grammar: Grammar) -> Compiled:
        """In a turn."""
        question = msgspec.msgpack.encode(Question(grammar, self._seconds))
        try:
            return msgspec.msgpack.decode(await self.helper.ask(question, WALL_S + GRACE_S), type=Compiled)
        except (TimeoutError, HelperDied):
            return Compiled(is_stopped=True)


class GrammarCompiler:
    """Caches results, also refusals, but nothing that depends on the machine's load. `seconds` limits the CPU time of a grammar."""

    def __init__(self, model_folder: Path, seconds: float):
        self._small, self._large = Lane(model_folder, min(QUICK_S, seconds)), Lane(model_folder, seconds)
        self._cache: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._cached_bytes = 0
        self._tasks: set[asyncio.Task[Compiled]] = set()

    async def start(self) -> None:
        """Takes seconds, which the first grammar would wait."""
        with contextlib.suppress(RuntimeError):  # it is closed meanwhile, or the first grammar tells its client
            await self._small.start()

    async def compile(self, grammar: Grammar, client: bytes = b"") -> bytes:
        """The compiled grammar for rank 0. Raises GrammarError, CompilerBusy, or RuntimeError if no process starts."""
        task = asyncio.create_task(self._compile(grammar, client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        compiled = await asyncio.shield(task)  # the answer has to be read, also if nobody waits
        if compiled.is_stopped:
            raise CompilerBusy("the compilation of the grammar was interrupted because the server is busy")
        if compiled.error is not None:
            raise GrammarError(compiled.error)
        return compiled.data

    async def close(self) -> None:
        """Ends the processes."""
        await self._small.helper.close()
        await self._large.helper.close()

    async def _compile(self, grammar: Grammar, client: bytes) -> Compiled:
        for lane in (self._small, self._large):
            if grammar not in self._cache and (lane is self._large or len(grammar.text) <= SMALL_CHARACTERS):
                async with lane.turns.take(client, len(grammar.text)):
                    if grammar not in self._cache:  # by somebody who asked for the same
                        compiled = await lane.ask(grammar)
                        if not compiled.is_stopped and (lane is self._large or not compiled.is_late):
                            self._remember(grammar, compiled)
        if grammar not in self._cache:
            return Compiled(is_stopped=True)
        self._cache.move_to_end(grammar)
        return self._cache[grammar]

    def _remember(self, grammar: Grammar, compiled: Compiled) -> None:
        self._cache[grammar] = compiled
        self._cached_bytes += _cost(grammar, compiled)
        while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
            self._cached_bytes -= _cost(*self._cache.popitem(last=False))


def _cost(grammar: Grammar, compiled: Compiled) -> int:
    return ENTRY_BYTES + len(grammar.text) + len(compiled.data)

"""Asks the compiler process for grammars. Used by the processor, one object in its event loop:

    grammars = GrammarCompiler(model_folder)
    data = await grammars.compile(Grammar("json_schema", text))    # GrammarError (a ValueError) is the client's fault: a 400
    await grammars.close()

`data` goes into the processor arena; its Region, with the token behind which the grammar holds (`</think>`, if the answer begins with
thoughts), is the `grammar` of the EngineRequest. The process starts with the first grammar and is ended if a compilation takes too long.
"""

import asyncio
from collections import OrderedDict
from pathlib import Path

import msgspec

from engine.helper import Helper, HelperDied
from engine.params import Grammar

COMPILE_S = 5.0
CACHE_BYTES = 64 << 20
ENTRY_BYTES = 1 << 12  # what an entry counts beside its data


class Compiled(msgspec.Struct, frozen=True):
    """A compiled grammar as xgrammar serialises it, or why there is none."""

    data: bytes = b""
    error: str | None = None


class GrammarError(ValueError):
    """A grammar that cannot be had; its text is for the client."""


class GrammarCompiler:
    """One compilation at a time; results, refusals too, are kept."""

    def __init__(self, model_folder: Path):
        self._helper = Helper("engine.grammar.compile", str(model_folder))
        self._lock = asyncio.Lock()
        self._cache: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._cached_bytes = 0
        self._tasks: set[asyncio.Task[Compiled]] = set()

    async def compile(self, grammar: Grammar) -> bytes:
        """The compiled grammar for rank 0. GrammarError if it is none, or takes too long; RuntimeError if the process does not start."""
        task = asyncio.create_task(self._compile(grammar))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        compiled = await asyncio.shield(task)  # whoever asked may leave, but the answer has to be read
        if compiled.error is not None:
            raise GrammarError(compiled.error)
        return compiled.data

    async def close(self) -> None:
        """Ends the process."""
        await self._helper.close()

    async def _compile(self, grammar: Grammar) -> Compiled:
        async with self._lock:
            if grammar in self._cache:
                self._cache.move_to_end(grammar)
                return self._cache[grammar]
            compiled = await self._ask(grammar)
            self._remember(grammar, compiled)
            return compiled

    async def _ask(self, grammar: Grammar) -> Compiled:
        try:
            return msgspec.msgpack.decode(await self._helper.ask(msgspec.msgpack.encode(grammar), COMPILE_S), type=Compiled)
        except TimeoutError:
            return Compiled(error=f"it takes longer than {COMPILE_S:.0f} s to compile")
        except HelperDied:
            return Compiled(error="it is too deep or too large to compile")

    def _remember(self, grammar: Grammar, compiled: Compiled) -> None:
        self._cache[grammar] = compiled
        self._cached_bytes += _cost(grammar, compiled)
        while self._cached_bytes > CACHE_BYTES:
            self._cached_bytes -= _cost(*self._cache.popitem(last=False))


def _cost(grammar: Grammar, compiled: Compiled) -> int:
    return ENTRY_BYTES + len(grammar.text) + len(compiled.data)

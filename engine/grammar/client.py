"""Compilation of grammars in a guest process, with a cache of the results."""

import asyncio
import contextlib
import hashlib
from pathlib import Path

import msgspec
from cachetools import LRUCache

from engine.wire.grammar import Grammar
from engine.wire.guests import GuestDied, GuestPool

WALL_S = 70.0  # wall-clock limit of a compilation, reached only on a busy machine
MEMORY_BYTES = 4 << 30  # exceeding it fails the compilation
CACHE_BYTES = 64 << 20
ENTRY_BYTES = 1 << 12  # in addition to its data
MAX_WAITING = 256


class Compiled(msgspec.Struct, frozen=True):
    """A grammar as serialised by xgrammar, or the reason why it cannot be compiled."""

    data: bytes = b""
    error: str | None = None


class GrammarError(ValueError):
    """The grammar cannot be compiled. Its text is for the client."""


class GrammarCompiler:
    """Compiles grammars one by one; caches what does not depend on the machine's load. `seconds`: CPU time limit per grammar."""

    def __init__(self, model_folder: Path, seconds: float):
        self.pool = GuestPool(1, "engine.grammar.compile", str(model_folder), memory=MEMORY_BYTES)
        self._seconds = seconds
        self._cache: LRUCache[bytes, Compiled] = LRUCache(CACHE_BYTES, lambda compiled: ENTRY_BYTES + len(compiled.data))  # by hash
        self._turn = asyncio.Lock()
        self._num_waiting = 0

    async def compile(self, grammar: Grammar) -> bytes:
        """Return the compiled grammar for rank 0. Raises GrammarError; TimeoutError, after which another attempt may succeed; or
        RuntimeError if no process starts."""
        job = msgspec.msgpack.encode(grammar)
        key = hashlib.sha256(job).digest()
        if (compiled := self._cache.get(key)) is None:
            if self._num_waiting >= MAX_WAITING:
                raise TimeoutError
            self._num_waiting += 1
            try:
                async with self._turn:
                    compiled = self._cache.get(key) or await self._compile(key, job)
            finally:
                self._num_waiting -= 1
        if compiled.error is not None:
            raise GrammarError(compiled.error)
        return compiled.data

    async def _compile(self, key: bytes, job: bytes) -> Compiled:
        try:
            compiled = msgspec.msgpack.decode(await self.pool.ask(job, WALL_S, self._seconds), type=Compiled)
        except GuestDied:
            words = f"the grammar exceeds the compiler's limits of {self._seconds:g} s CPU time, memory or depth"
            raise GrammarError(words) from None
        with contextlib.suppress(ValueError):  # it is larger than the cache
            self._cache[key] = compiled
        return compiled

"""Compilation of grammars in guest processes, with a cache of the results."""

import asyncio
import contextlib
import hashlib
from pathlib import Path

import msgspec
from cachetools import LRUCache

from engine.guests import GuestDied, GuestKilled, GuestPool
from engine.wire.grammar import Grammar

QUICK_S = 1.0  # CPU time after which a small grammar is treated as a large one
WALL_S = 70.0  # wall-clock limit of a compilation, reached only on a busy machine
NUM_GUESTS = 2  # one of them never compiles large grammars
MEMORY_BYTES = 4 << 30  # limit per guest; exceeding it fails the compilation
SMALL_BYTES = 1 << 12
CACHE_BYTES = 64 << 20
ENTRY_BYTES = 1 << 12  # in addition to its data


class Compiled(msgspec.Struct, frozen=True):
    """A grammar as serialised by xgrammar, or the reason why it cannot be compiled."""

    data: bytes = b""
    error: str | None = None


class GrammarError(ValueError):
    """The grammar cannot be compiled. Its text is for the client."""


class GrammarCompiler:
    """Compiles grammars and caches results and rejections, but nothing that depends on the machine's load. `seconds`: CPU time limit per
    grammar."""

    def __init__(self, model_folder: Path, seconds: float):
        self.pool = GuestPool(NUM_GUESTS, "engine.grammar.compile", str(model_folder), memory=MEMORY_BYTES, forks=True)
        self._seconds = seconds
        self._cache: LRUCache[bytes, Compiled] = LRUCache(CACHE_BYTES, lambda compiled: ENTRY_BYTES + len(compiled.data))  # by hash
        self._tasks: dict[bytes, asyncio.Task[Compiled]] = {}

    async def start(self) -> None:
        """Start a guest, which takes seconds, before the first grammar."""
        with contextlib.suppress(RuntimeError, TimeoutError):  # the pool has been closed, or the first grammar reports the error
            await self.compile(Grammar("regex", "a"))

    async def compile(self, grammar: Grammar, client: bytes = b"") -> bytes:
        """Return the compiled grammar for rank 0. Raises GrammarError; GuestKilled or TimeoutError, after which another attempt may
        succeed; or RuntimeError if no process starts."""
        job = msgspec.msgpack.encode(grammar)
        key = hashlib.sha256(job).digest()
        if (compiled := self._cache.get(key)) is None:
            if key not in self._tasks:
                task = self._tasks[key] = asyncio.create_task(self._compile(key, job, client))
                task.add_done_callback(lambda done: self._end(key, done))
            compiled = await asyncio.shield(self._tasks[key])  # the result is cached even if this client disconnects
        if compiled.error is not None:
            raise GrammarError(compiled.error)
        return compiled.data

    async def close(self) -> None:
        await self.pool.close()

    async def _compile(self, key: bytes, job: bytes, client: bytes) -> Compiled:
        is_large = len(job) > SMALL_BYTES
        while True:
            seconds = self._seconds if is_large else min(QUICK_S, self._seconds)
            try:
                data = await self.pool.ask(job, WALL_S, seconds, client=client, size=len(job), is_large=is_large)
                compiled = msgspec.msgpack.decode(data, type=Compiled)
            except GuestKilled:
                raise
            except GuestDied as death:
                if death.is_late and not is_large:
                    is_large = True
                    continue
                limit = f"the grammar exceeds the compiler's limit of {seconds:g} s CPU time (--grammar-timeout)"
                compiled = Compiled(error=limit if death.is_late else "the grammar is too deep or too large to compile")
            with contextlib.suppress(ValueError):  # it is larger than the cache
                self._cache[key] = compiled
            return compiled

    def _end(self, key: bytes, done: asyncio.Task[Compiled]) -> None:
        """Forget the task. Its error is read here because all of its clients may have left."""
        del self._tasks[key]
        if not done.cancelled():
            done.exception()

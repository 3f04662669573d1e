"""Asks the compiler process for grammars. Used by the processor, one object in its event loop:

    grammars = GrammarCompiler(model_folder)
    data = await grammars.compile(Grammar("json_schema", text))    # GrammarError (a ValueError) is the client's fault: a 400
    await grammars.close()

`data` goes into the processor arena; its Region, with the token behind which the grammar holds (`</think>`, if the answer begins with
thoughts), is the `grammar` of the EngineRequest. The process starts with the first grammar and is ended if a compilation takes too long.
"""

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from pathlib import Path

import msgspec

from engine.config import child_environment
from engine.grammar.frames import LENGTH_BYTES, Compiled, frame_of
from engine.params import Grammar

START_S = 120.0  # importing takes seconds on a busy machine
COMPILE_S = 5.0
CACHE_BYTES = 64 << 20
ENTRY_BYTES = 1 << 12  # what an entry counts beside its data


class GrammarError(ValueError):
    """A grammar that cannot be had; its text is for the client."""


class GrammarCompiler:
    """One compilation at a time; results, refusals too, are kept."""

    def __init__(self, model_folder: Path):
        self._folder = model_folder
        self._process: Process | None = None
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
        process, self._process = self._process, None
        if process is not None:
            await _end(process)

    async def _compile(self, grammar: Grammar) -> Compiled:
        async with self._lock:
            if grammar in self._cache:
                self._cache.move_to_end(grammar)
                return self._cache[grammar]
            process = self._process or await self._start()
            compiled = await self._ask(process, grammar)
            self._remember(grammar, compiled)
            return compiled

    async def _start(self) -> Process:
        command = sys.executable, "-m", "engine.grammar.compile", str(self._folder)
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, env=child_environment(), start_new_session=True)
        try:
            async with asyncio.timeout(START_S):
                await _receive(process)
        except (TimeoutError, asyncio.IncompleteReadError) as problem:
            await _end(process)
            raise RuntimeError("the grammar compiler does not start") from problem
        self._process = process
        return process

    async def _ask(self, process: Process, grammar: Grammar) -> Compiled:
        assert process.stdin is not None
        try:
            async with asyncio.timeout(COMPILE_S):
                process.stdin.write(frame_of(msgspec.msgpack.encode(grammar)))
                await process.stdin.drain()
                return msgspec.msgpack.decode(await _receive(process), type=Compiled)
        except TimeoutError:
            await self.close()
            return Compiled(error=f"it takes longer than {COMPILE_S:.0f} s to compile")
        except (asyncio.IncompleteReadError, ConnectionError):
            await self.close()
            return Compiled(error="it is too deep or too large to compile")

    def _remember(self, grammar: Grammar, compiled: Compiled) -> None:
        self._cache[grammar] = compiled
        self._cached_bytes += _cost(grammar, compiled)
        while self._cached_bytes > CACHE_BYTES:
            self._cached_bytes -= _cost(*self._cache.popitem(last=False))


async def _receive(process: Process) -> bytes:
    assert process.stdout is not None
    head = await process.stdout.readexactly(LENGTH_BYTES)
    return await process.stdout.readexactly(int.from_bytes(head, "little"))


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        process.kill()
    await process.wait()


def _cost(grammar: Grammar, compiled: Compiled) -> int:
    return ENTRY_BYTES + len(grammar.text) + len(compiled.data)

"""Grammars of requests with tools: calls in the notation of the model's template, or other allowed answers.

required, named ──▶ calls, nothing else
auto, strict    ──▶ text with calls in it, each by its schema
auto, a format  ──▶ the format, or calls
"""

import asyncio
import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
from cachetools import LRUCache

from engine.wire.grammar import Compiled, CompiledGrammar, Grammar
from engine.wire.guests import GuestDied, GuestPool
from engine.wire.params import OutputOptions
from server.errors import RequestError, overloaded
from server.processor.media.sources import RegionAllocator
from server.processor.request import Request, tools_of

Json = dict[str, Any]
XML_MARK = "<function="  # in a template: the coder models' notation of calls
MAX_WHITESPACE = 1  # consecutive characters, as models write JSON
WALL_S = 70.0  # wall-clock limit of a compilation, reached only on a busy machine
MEMORY_BYTES = 4 << 30  # exceeding it fails the compilation
CACHE_BYTES = 64 << 20
ENTRY_BYTES = 1 << 12  # in addition to its data


class AnswerGrammars:
    """Compiles grammars one by one in a guest, and caches the results. `seconds`: CPU time limit per grammar;
    `think_end`: the token that ends reasoning."""

    def __init__(self, model_folder: Path, seconds: float, allocator: RegionAllocator, template: str, think_end: int | None) -> None:
        self.pool = GuestPool(1, "engine.grammar.compile", str(model_folder), memory=MEMORY_BYTES)
        self._seconds, self._allocator, self._template, self._think_end = seconds, allocator, template, think_end
        self._cache: LRUCache[bytes, Compiled] = LRUCache(CACHE_BYTES, lambda compiled: ENTRY_BYTES + len(compiled.data))  # by hash
        self._turn = asyncio.Lock()

    async def prepare(self, request: Request) -> None:
        """Compile the answer's grammar, if any, and write it to the arena. RequestError 400 or 503."""
        submit = request.submit
        grammar = answer_grammar(submit.grammar, tools_of(submit), submit.output, self._template)
        if grammar is None:
            return
        field, job = submit.grammar_field or "tools", msgspec.msgpack.encode(grammar)
        key = hashlib.sha256(job).digest()
        try:
            compiled = self._cache.get(key) or await self._compile(key, job)
        except GuestDied:
            compiled = Compiled(error=f"the grammar exceeds the compiler's limits of {self._seconds:g} s CPU time, memory or depth")
        except TimeoutError:
            raise overloaded(f"{field}: the compilation of the grammar was interrupted because the server is busy") from None
        if compiled.error is not None:
            raise RequestError(400, f"{field}: {compiled.error}", field, "invalid_value")
        region = request.regions["grammar"] = self._allocator.allocate(len(compiled.data))
        region.append(compiled.data)

    async def _compile(self, key: bytes, job: bytes) -> Compiled:
        async with self._turn:
            if (compiled := self._cache.get(key)) is None:
                compiled = msgspec.msgpack.decode(await self.pool.ask(job, WALL_S, self._seconds), type=Compiled)
                with contextlib.suppress(ValueError):  # it is larger than the cache
                    self._cache[key] = compiled
            return compiled

    def of(self, request: Request) -> CompiledGrammar:
        return CompiledGrammar(request.regions["grammar"].wire(), self._think_end if request.answers[0].text.is_thinking else None)


def answer_grammar(request_grammar: Grammar | None, tools: list[Json], options: OutputOptions, template: str) -> Grammar | None:
    """Return the grammar of an answer: `request_grammar` combined with tool calls."""
    if options.calls == "none" or not tools:
        return request_grammar
    is_xml = XML_MARK in template
    functions = [tool["function"] for tool in tools if options.called in (None, tool["function"]["name"])]
    tags = [_tag(function, is_xml) for function in functions]
    calls: Json = {"tags": tags, "stop_after_first": options.calls == "one" or options.called is not None}
    only_calls = {**calls, "type": "tags_with_separator", "separator": "\n", "at_least_one": True}
    if options.must_call:
        return _grammar(only_calls)
    if request_grammar is not None:
        return _grammar(only_calls, request_grammar)
    if any(function.get("strict") for function in functions):
        return _grammar({**calls, "type": "triggered_tags", "triggers": ["<tool_call>"]})
    return None


def _grammar(content: Json, otherwise: Grammar | None = None) -> Grammar:
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": content}), otherwise)


def _tag(function: Json, is_xml: bool) -> Json:
    schema = function.get("parameters") or {"type": "object"}
    content: Json = {"type": "json_schema", "json_schema": schema}
    if is_xml:
        begin, end = f"<tool_call>\n<function={function['name']}>\n", "\n</function>\n</tool_call>"
        content["style"] = "qwen_xml"
    else:
        begin, end = f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": ', "}\n</tool_call>"
        content["max_whitespace_cnt"] = MAX_WHITESPACE
    return {"type": "tag", "begin": begin, "content": content, "end": end}

"""Grammars of requests with tools: calls in the notation of the model's template, or other allowed answers.

    required, named ──▶ calls, nothing else
    auto, strict    ──▶ text with calls in it, each by its schema
    auto, a format  ──▶ the format, or calls
"""

import json
from typing import Any

from engine.grammar.client import GrammarCompiler, GrammarError
from engine.wire.grammar import CompiledGrammar, Grammar
from engine.wire.params import OutputOptions
from server.errors import RequestError, overloaded
from server.processor.request import Request, tools_of
from server.region import RegionAllocator

Json = dict[str, Any]
XML_MARK = "<function="  # in a template: the coder models' notation of calls
MAX_WHITESPACE = 1  # consecutive characters, as models write JSON


class AnswerGrammars:
    """`think_end`: the token that ends reasoning."""

    def __init__(self, compiler: GrammarCompiler, allocator: RegionAllocator, template: str, think_end: int | None) -> None:
        self.compiler = compiler
        self._allocator, self._template, self._think_end = allocator, template, think_end

    async def prepare(self, request: Request) -> None:
        """Compile the answer's grammar, if any, and write it to the arena. RequestError 400 or 503."""
        submit = request.submit
        grammar = answer_grammar(submit.grammar, tools_of(submit), submit.output, self._template)
        if grammar is None:
            return
        field = submit.grammar_field or "tools"
        try:
            data = await self.compiler.compile(grammar)
        except GrammarError as error:
            raise RequestError(400, f"{field}: {error}", field, "invalid_value") from None
        except TimeoutError:
            raise overloaded(f"{field}: the compilation of the grammar was interrupted because the server is busy") from None

        region = request.regions["grammar"] = self._allocator.allocate(len(data))
        region.append(data)

    def of(self, request: Request) -> CompiledGrammar | None:
        region = request.regions.get("grammar")
        if region is None:
            return None
        return CompiledGrammar(region.wire(), self._think_end if request.answers[0].text.is_thinking else None)


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
        return _grammar({"type": "or", "elements": [_format_of(request_grammar), only_calls]})
    if any(function.get("strict") for function in functions):
        return _grammar({**calls, "type": "triggered_tags", "triggers": ["<tool_call>"]})
    return None


def _grammar(content: Json) -> Grammar:
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": content}))


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


def _format_of(grammar: Grammar) -> Json:
    match grammar.kind:
        case "json_schema":
            return {"type": "json_schema", "json_schema": json.loads(grammar.text), "max_whitespace_cnt": MAX_WHITESPACE}
        case "regex":
            return {"type": "regex", "pattern": grammar.text}
        case _:
            return {"type": "grammar", "grammar": grammar.text}

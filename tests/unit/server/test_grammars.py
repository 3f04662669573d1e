"""Grammars through the processor, and what those of requests with tools accept."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import xgrammar

from engine.grammar.compile import read_vocabulary
from engine.wire.grammar import Compiled, Grammar
from engine.wire.ipc import Outbox
from engine.wire.messages import (
    ChatPrompt,
    EngineRequest,
    RequestOutput,
    Stages,
    Submit,
    ToProcessor,
)
from engine.wire.params import OutputOptions, SamplingParams
from server.processor.grammar import AnswerGrammars, answer_grammar
from server.processor.text.calls import CallSplitter
from tests.eventually import eventually
from tests.unit.engine.test_grammar_compile import accepts
from tests.unit.server.conftest import StackOf
from tests.unit.server.stack import FakeScheduler, Stack

MESSAGES = b'[{"role": "user", "content": "hi"}]'
FIRST_RID = 1 << 40  # none of the api's: it ignores answers to these
SHAPE = {"response_format": {"type": "json_object"}}


def submit(stack: Stack, *grammars: Grammar | None, first: int = FIRST_RID) -> None:
    processor: Outbox[ToProcessor] = Outbox(stack.run_dir, "processor")
    for rid, grammar in enumerate(grammars, first):
        processor.send(Submit(rid, ChatPrompt(MESSAGES), [], SamplingParams(), OutputOptions(), Stages(), grammar=grammar))
    processor.close()


def test_grammars_reach_the_scheduler(stack: Stack, model_folder: Path) -> None:
    """Fails if a region is lost, if a grammar that cannot be compiled passes, or is not passed on."""
    found: dict[int, bytes | None] = {}

    def script(scheduler: FakeScheduler, request: EngineRequest) -> None:
        found[request.rid - FIRST_RID] = None if request.grammar is None else scheduler.bytes_at(request.grammar.region)
        scheduler.send([RequestOutput(request.rid, [5], "stop", stages=Stages())], [request.rid])

    stack.script = script
    submit(stack, Grammar("regex", "[ab]+c"), Grammar("regex", "(["), None, Grammar("regex", "[ab]+c"))
    eventually(lambda: len(found) == 3, "three requests")
    assert found.keys() == {0, 2, 3} and found[2] is None and found[0] == found[3]
    assert all(request.grammar is None or request.grammar.after is None for request in stack.scheduler.requests)
    vocabulary = read_vocabulary(model_folder)
    matcher = xgrammar.GrammarMatcher(xgrammar.CompiledGrammar.deserialize_json((found[0] or b"").decode(), vocabulary))
    assert matcher.accept_string("abbac") and not matcher.accept_string("c")


def test_a_grammar_holds_after_the_thoughts(stack_of: StackOf, thinking_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def compile(self: AnswerGrammars, key: bytes, job: bytes) -> Compiled:
        return Compiled(b"compiled")

    monkeypatch.setattr(AnswerGrammars, "_compile", compile)
    stack = stack_of(thinking_folder)
    for fields in (SHAPE, {"regex": "a+"}):
        assert stack.chat("x", **fields).status_code == 200
    grammars = [request.grammar for request in stack.scheduler.requests[-2:]]
    end = read_vocabulary(thinking_folder).decoded_vocab.index(b"</think>")
    assert [grammar and grammar.after for grammar in grammars] == [end] * 2
    stack.recover()


@pytest.mark.faults
def test_a_guest_of_each_kind_starts_and_ends_with_the_processor(model_folder: Path) -> None:
    stack = Stack(model_folder)
    pid = stack.processes["processor"].pid

    def children() -> list[int]:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    eventually(lambda: len(children()) == 2, "the compiler and the decoder")
    guests = children()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not any(Path(f"/proc/{guest}/stat").exists() for guest in guests), "the end of the guests")
    stack.close()


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "g"}},
]
LOOSE: list[dict[str, Any]] = [{"type": "function", "function": {"name": "g"}}]
F = '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'
G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
OBJECT = Grammar("json_schema", '{"type": "object"}')
XML = "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>"
BAD = F.replace("1", '"x"')


def options(calls: str = "all", **others: Any) -> OutputOptions:
    return OutputOptions(calls=calls, **others)


CASES = [
    ("required", options(must_call=True), None, [F, G, f"{F}\n{G}"], ["hello", "", BAD, f"{F} more", F[:-3]]),
    ("required, one", options("one", must_call=True), None, [F, G], [f"{F}\n{G}", "hello"]),
    ("named", options(must_call=True, called="g"), None, [G], [F, f"{G}\n{G}", "hello"]),
    ("auto, strict", options(), None, ["hello", f"hello {F}", F, G, "a <tool", f"{F}\n{G}"], [BAD, f"hello {BAD}"]),
    ("auto, a format", options(), OBJECT, ['{"a":1}', F, f"{F}\n{G}"], ["hello", BAD, f'{{"a":1}}{F}']),
    ("auto, choices", options(), Grammar("ebnf", 'root ::= "yes" | "no"'), ["yes", "no", G], ["maybe", "hello"]),
    ("auto, a pattern", options(), Grammar("regex", "a+"), ["aa", G], ["b"]),
    ("auto, rules", options(), Grammar("ebnf", 'root ::= "ab"'), ["ab", G], ["a"]),
]  # fmt: skip


def test_what_an_answer_may_be() -> None:
    for name, asked, told, good, bad in CASES:
        grammar = answer_grammar(told, TOOLS, asked, "a template")
        assert grammar is not None
        assert [text for text in (*good, *bad) if accepts(grammar, text, is_whole=True)] == good, name


def test_the_other_notation() -> None:
    grammar = answer_grammar(None, TOOLS, options(must_call=True), "... <function=example_function_name> ...")
    assert grammar is not None and accepts(grammar, XML, is_whole=True)
    assert not accepts(grammar, F) and not accepts(grammar, XML.replace("1", "x"))
    splitter = CallSplitter({}, False)
    assert "".join(delta.arguments for delta in splitter.push(XML)[1]) == '{"n": 1}'


def test_what_needs_no_grammar() -> None:
    assert answer_grammar(None, LOOSE, options(), "") is None
    assert answer_grammar(None, [], options("none"), "") is None
    assert answer_grammar(Grammar("regex", "a"), TOOLS, options("none"), "") == Grammar("regex", "a")

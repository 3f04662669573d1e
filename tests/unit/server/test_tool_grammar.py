"""Grammars of requests with tools, by the matcher that holds answers to them: what a client could not read is never written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xgrammar

from engine.grammar.compile import compiled
from engine.grammar.vocabulary import read_vocabulary
from engine.params import Grammar, OutputOptions
from server.errors import RequestError
from server.processor.calls import CallSplitter
from server.processor.grammar import answer_grammar

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "g"}},
]
LOOSE: list[dict[str, Any]] = [{"type": "function", "function": {"name": "g"}}]
F = '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'
G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
XML = "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>"
BAD = F.replace("1", '"x"')


@pytest.fixture(scope="module")
def accepts(model_folder: Path) -> Callable[[Grammar | None, str], bool]:
    tokens = read_vocabulary(model_folder)
    compiler = xgrammar.GrammarCompiler(tokens)

    def check(grammar: Grammar | None, text: str) -> bool:
        """Whether the text, and nothing after it, may be an answer."""
        assert grammar is not None
        answer = compiled(compiler, grammar)
        assert answer.error is None, answer.error
        matcher = xgrammar.GrammarMatcher(xgrammar.CompiledGrammar.deserialize_json(answer.data.decode(), tokens))
        return matcher.accept_string(text) and matcher.accept_token(tokens.stop_token_ids[0])

    return check


def options(calls: str = "all", **others: Any) -> OutputOptions:
    return OutputOptions(calls=calls, **others)  # type: ignore[arg-type]


CASES = [
    ("required", options(must_call=True), None, [F, G, f"{F}\n{G}"], ["hello", "", BAD, f"{F} more", F[:-3]]),
    ("required, one", options("one", must_call=True), None, [F, G], [f"{F}\n{G}", "hello"]),
    ("named", options(must_call=True, called="g"), None, [G], [F, f"{G}\n{G}", "hello"]),
    ("auto, strict", options(), None, ["hello", f"hello {F}", F, G, "a <tool", f"{F}\n{G}"], [BAD, f"hello {BAD}"]),
    ("auto, a format", options(), Grammar("json_object"), ['{"a":1}', F, f"{F}\n{G}"], ["hello", BAD, f'{{"a":1}}{F}']),
    ("auto, choices", options(), Grammar("choice", '["yes", "no"]'), ["yes", "no", G], ["maybe", "hello"]),
    ("auto, a pattern", options(), Grammar("regex", "a+"), ["aa", G], ["b"]),
    ("auto, rules", options(), Grammar("ebnf", 'root ::= "ab"'), ["ab", G], ["a"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "asked", "told", "good", "bad"), CASES, ids=[case[0] for case in CASES])
def test_what_an_answer_may_be(
    accepts: Any, name: str, asked: OutputOptions, told: Grammar | None, good: list[str], bad: list[str]
) -> None:
    grammar = answer_grammar(told, TOOLS, asked, "a template")
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


def test_the_other_notation(accepts: Any) -> None:
    """Red if a model is held to a notation that its template does not show, or if the calls in it cannot be read."""
    grammar = answer_grammar(None, TOOLS, options(must_call=True), "... <function=example_function_name> ...")
    assert accepts(grammar, XML) and not accepts(grammar, F)
    assert not accepts(grammar, XML.replace("1", "x"))
    splitter = CallSplitter({}, False)
    assert "".join(delta.arguments for delta in splitter.push(XML)[1]) == '{"n": 1}'


def test_what_needs_no_grammar() -> None:
    """Red if every request with tools waits for a compilation."""
    assert answer_grammar(None, LOOSE, options(), "") is None
    assert answer_grammar(None, [], options("none"), "") is None
    assert answer_grammar(Grammar("regex", "a"), TOOLS, options("none"), "") == Grammar("regex", "a")


def test_tools_beside_a_structural_tag_are_a_400() -> None:
    with pytest.raises(RequestError) as caught:
        answer_grammar(Grammar("structural_tag", "{}"), TOOLS, options(), "")
    assert caught.value.info.param == "tools"

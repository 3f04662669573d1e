"""What the compiler of grammars makes of one, by the matcher that holds answers to it: nothing that is no JSON, nothing that is left out
in silence, nothing that holds all others up."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xgrammar

from engine.grammar.compile import compiled
from engine.grammar.vocabulary import read_vocabulary
from engine.params import Grammar
from models.demo import CHECKPOINT

Accepts = Callable[[Grammar, str], bool]
BOUNDED = {"type": "string", "maxLength": 3}
THING = {"type": "object", "properties": {"a": BOUNDED, "b": {"type": "string"}}, "required": ["a", "b"]}
REFERRED = {"$defs": {"x": {"type": "string"}}, "properties": {"a": {"$ref": "#/$defs/x", "maxLength": 1}}}


@pytest.fixture(scope="module")
def compiler() -> xgrammar.GrammarCompiler:
    return xgrammar.GrammarCompiler(read_vocabulary(Path(CHECKPOINT)), cache_enabled=False)


def accepts(compiler: xgrammar.GrammarCompiler, grammar: Grammar, text: str) -> bool:
    """Whether an answer may begin like this."""
    answer = compiled(compiler, grammar)
    assert answer.error is None, answer.error
    tokens = read_vocabulary(Path(CHECKPOINT))
    matcher = xgrammar.GrammarMatcher(xgrammar.CompiledGrammar.deserialize_json(answer.data.decode(), tokens))
    return bool(matcher.accept_string(text))


@pytest.mark.parametrize("choice", ["👍", 'a "quoted" \\ text', "Grüße", "two\nlines"])
def test_a_choice_is_written_as_it_is(compiler: xgrammar.GrammarCompiler, choice: str) -> None:
    """Red if a character becomes two halves, which no client can read."""
    assert accepts(compiler, Grammar("choice", json.dumps([choice, "b"])), choice)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (BOUNDED, '"abc"', '"\x01'),
        (BOUNDED, '"é漢👍"', '"abcd'),
        ({"type": ["string", "null"], "minLength": 2}, "null", '"\t'),
        ({"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": {"type": "integer"}}, '{"ab":1}', '{"\x02'),
        (THING, '{"a":"x","b":"\\n"}', '{"a":"\x01'),
        ({"type": "string", "maxLength": 5000}, '"a"', '"\x01'),
    ],
)
def test_strings_are_json_whatever_bounds_them(compiler: xgrammar.GrammarCompiler, schema: dict[str, Any], good: str, bad: str) -> None:
    """Red if a control character gets into an answer, also into the arguments of a call."""
    tag = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</a>"}
    of_call = Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": tag}))
    plain = Grammar("json_schema", json.dumps(schema))
    assert accepts(compiler, plain, good) and not accepts(compiler, plain, bad)
    assert accepts(compiler, of_call, "<a>" + good.replace(":", ": ").replace(",", ", ")) and not accepts(compiler, of_call, "<a>" + bad)


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, "uniqueItems"),
        ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, "allOf"),
        ({"allOf": [{"type": "integer"}], "minimum": 5}, "allOf beside minimum"),
        ({"not": {"type": "integer"}}, "not"),
        ({"type": "array", "contains": {"const": 1}}, "contains"),
        ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 7}, "pattern beside maxLength"),
        ({"type": "string", "format": "date", "pattern": "^2"}, "pattern beside format"),
        ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
        ({"type": "object", "dependentRequired": {"b": ["a"]}}, "dependentRequired"),
        (REFERRED, "$ref beside maxLength"),
        ({"$ref": "http://example.com/x.json"}, "$ref"),
        ({"type": "array", "items": {"anyOf": [{"type": "object", "properties": {"deep": {"if": {}}}}]}}, "if"),
    ],
)
def test_what_would_not_hold_is_refused(compiler: xgrammar.GrammarCompiler, schema: dict[str, Any], name: str) -> None:
    """Red if an answer may break the schema that it was asked to follow, and nobody is told."""
    error = compiled(compiler, Grammar("json_schema", json.dumps(schema))).error
    assert error is not None and name in error


def test_what_libraries_write_is_taken(compiler: xgrammar.GrammarCompiler) -> None:
    """Red if annotations, references and unions as pydantic writes them are refused."""
    schema = {
        "$defs": {"Colour": {"enum": ["red", "blue"], "title": "Colour", "type": "string"}},
        "properties": {
            "colour": {"allOf": [{"$ref": "#/$defs/Colour"}], "default": "red", "description": "as older ones write a default"},
            "other": {"$ref": "#/$defs/Colour", "default": "blue", "title": "Other"},
            "size": {"anyOf": [{"minimum": 1, "multipleOf": 2, "type": "integer"}, {"type": "null"}], "title": "Size"},
            "tags": {"items": {"type": "string"}, "uniqueItems": False, "type": "array"},
        },
        "required": ["colour", "other", "size", "tags"], "title": "Thing", "type": "object", "additionalProperties": False,
    }  # fmt: skip
    assert accepts(compiler, Grammar("json_schema", json.dumps(schema)), '{"colour":"red","other":"blue","size":4,"tags":["a"]}')


@pytest.mark.parametrize("pattern", ["([a-z]+[a-z]+){1,200}x", "([a-z]+[a-z]+[a-z]+){1,400}x", "(.*.*.*){1,100}=(.*.*.*){1,100}"])
def test_what_takes_long_to_follow_is_refused(compiler: xgrammar.GrammarCompiler, pattern: str) -> None:
    """Red if a pattern of thirty characters, which compiles at once, makes rank 0 stand still for seconds at every token."""
    error = compiled(compiler, Grammar("regex", pattern)).error
    assert error is not None and "too long to follow" in error


GUIDANCE = """%llguidance {}

start: n " is " a
n[capture]: N
N: /[0-9]{2}/
a[capture="b"]: %json {
  "type": "object", "properties": {"x": {"enum": [1]}, "y": {"enum": ["a"]}}, "required": ["x", "y"], "additionalProperties": false,
  "x-guidance": {"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "}
}
"""


def test_lark(compiler: xgrammar.GrammarCompiler) -> None:
    """Red if what outlines and guidance send is taken for EBNF, also beside tools, if white space goes on for ever, or if a limit of theirs
    is left out in silence."""
    grammars = [Grammar("ebnf", GUIDANCE), Grammar("ebnf", 'root ::= [0-9] [0-9] " is {\\"x\\": 1, \\"y\\": \\"a\\"}"')]
    grammars.append(Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": {"type": "grammar", "grammar": GUIDANCE}})))
    for grammar in grammars:
        assert accepts(compiler, grammar, '12 is {"x": 1, "y": "a"}')
        assert not accepts(compiler, grammar, '12 is {"x":  ') and not accepts(compiler, grammar, "1 ")
    assert accepts(compiler, Grammar("ebnf", 'start: "(" NUMBER+ ")"\nNUMBER: /[0-9]/'), "(123)")
    for attribute in ("temperature=0.5", 'capture, stop="\\n"', "max_tokens=3"):
        error = compiled(compiler, Grammar("ebnf", f"start: n\nn[{attribute}]: /a/")).error
        assert error is not None and attribute.rpartition(", ")[2].partition("=")[0] in error
    assert "uniqueItems" in (compiled(compiler, Grammar("ebnf", 'start: %json {"uniqueItems": true}')).error or "")

"""What the compiler of grammars makes of one, by the matcher that holds answers to it: nothing that is no JSON, nothing that is left out
in silence, nothing that holds all others up."""

import json
from pathlib import Path
from typing import Any

import pytest
import xgrammar

from engine.grammar.compile import compiled
from engine.grammar.vocabulary import read_vocabulary
from engine.params import Grammar
from models.demo import CHECKPOINT

TOKENS = read_vocabulary(Path(CHECKPOINT))
COMPILER = xgrammar.GrammarCompiler(TOKENS, cache_enabled=False)
BOUNDED = {"type": "string", "maxLength": 3}
THING = {"type": "object", "properties": {"a": BOUNDED, "b": {"type": "string"}}, "required": ["a", "b"]}
REFERRED = {"$defs": {"x": {"type": "string"}}, "properties": {"a": {"$ref": "#/$defs/x", "maxLength": 1}}}


def accepts(grammar: Grammar, text: str, is_whole: bool = False) -> bool:
    """Whether an answer may begin like this, or be this."""
    answer = compiled(COMPILER, grammar)
    assert answer.error is None, answer.error
    matcher = xgrammar.GrammarMatcher(xgrammar.CompiledGrammar.deserialize_json(answer.data.decode(), TOKENS))
    return bool(matcher.accept_string(text)) and (not is_whole or bool(matcher.accept_token(TOKENS.stop_token_ids[0])))


def refusal(kind: Any, text: str) -> str:
    return compiled(COMPILER, Grammar(kind, text)).error or ""


@pytest.mark.parametrize("choice", ["👍", 'a "quoted" \\ text', "Grüße", "two\nlines"])
def test_a_choice_is_written_as_it_is(choice: str) -> None:
    """Red if a character becomes two surrogates."""
    assert accepts(Grammar("choice", json.dumps([choice, "b"])), choice)


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
def test_strings_are_json_whatever_bounds_them(schema: dict[str, Any], good: str, bad: str) -> None:
    """Red if a control character gets into an answer or the arguments of a call."""
    tag = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</a>"}
    of_call = Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": tag}))
    plain = Grammar("json_schema", json.dumps(schema))
    assert accepts(plain, good) and not accepts(plain, bad)
    assert accepts(of_call, "<a>" + good.replace(":", ": ").replace(",", ", ")) and not accepts(of_call, "<a>" + bad)


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
def test_what_would_not_hold_is_refused(schema: dict[str, Any], name: str) -> None:
    """Otherwise an answer may break its schema without notice."""
    assert name in refusal("json_schema", json.dumps(schema))


def test_what_libraries_write_is_taken() -> None:
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
    assert accepts(Grammar("json_schema", json.dumps(schema)), '{"colour":"red","other":"blue","size":4,"tags":["a"]}')


@pytest.mark.parametrize("pattern", ["([a-z]+[a-z]+){1,200}x", "([a-z]+[a-z]+[a-z]+){1,400}x", "(.*.*.*){1,100}=(.*.*.*){1,100}"])
def test_what_takes_long_to_follow_is_refused(pattern: str) -> None:
    """These compile at once, and would take rank 0 seconds per token."""
    assert "too long to follow" in refusal("regex", pattern)


GUIDANCE = """%llguidance {}

start: n " is " a
n[capture]: N
N: /[0-9]{2}/
a[capture="b"]: %json {
  "type": "object", "properties": {"x": {"enum": [1]}, "y": {"enum": ["a"]}}, "required": ["x", "y"], "additionalProperties": false,
  "x-guidance": {"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "}
}
"""


def test_lark() -> None:
    """What outlines and guidance send is no EBNF; limits that cannot hold are refused."""
    grammars = [Grammar("ebnf", GUIDANCE), Grammar("ebnf", 'root ::= [0-9] [0-9] " is {\\"x\\": 1, \\"y\\": \\"a\\"}"')]
    grammars.append(Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": {"type": "grammar", "grammar": GUIDANCE}})))
    for grammar in grammars:
        assert accepts(grammar, '12 is {"x": 1, "y": "a"}')
        assert not accepts(grammar, '12 is {"x":  ') and not accepts(grammar, "1 ")
    assert accepts(Grammar("ebnf", 'start: "(" NUMBER+ ")"\nNUMBER: /[0-9]/'), "(123)")
    for attribute in ("temperature=0.5", 'capture, stop="\\n"', "max_tokens=3"):
        assert attribute.rpartition(", ")[2].partition("=")[0] in refusal("ebnf", f"start: n\nn[{attribute}]: /a/")
    assert "uniqueItems" in refusal("ebnf", 'start: %json {"uniqueItems": true}')

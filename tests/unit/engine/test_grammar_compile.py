"""What the compiler makes of a grammar, by the matcher that holds answers to it."""

import json
from pathlib import Path
from typing import Any

import pytest
import xgrammar

from engine.grammar.compile import compiled, read_vocabulary
from engine.wire.grammar import Grammar
from engine.wire.params import OutputOptions
from models.demo import CHECKPOINT
from server.processor.grammar import answer_grammar

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
        ({"allOf": [{"type": "integer"}], "minimum": 5}, "allOf with minimum"),
        ({"not": {"type": "integer"}}, "not"),
        ({"type": "array", "contains": {"const": 1}}, "contains"),
        ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 7}, "pattern with maxLength"),
        ({"type": "string", "format": "date", "pattern": "^2"}, "pattern with format"),
        ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
        ({"type": "object", "dependentRequired": {"b": ["a"]}}, "dependentRequired"),
        (REFERRED, "$ref with maxLength"),
        ({"$ref": "http://example.com/x.json"}, "$ref"),
        ({"type": "array", "items": {"anyOf": [{"type": "object", "properties": {"deep": {"if": {}}}}]}}, "if"),
    ],
)
def test_what_would_not_hold_is_refused(schema: dict[str, Any], name: str) -> None:
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
    for attribute in ("temperature=0.5", 'capture="n", temperature=0', "priority=1"):
        assert attribute.rpartition(", ")[2].partition("=")[0] in refusal("ebnf", f"start: n\nn[{attribute}]: /a/")
    limited = 'start: n "temperature=1"\nn[capture, stop="\\n", max_tokens=9]: /[^x]+/'
    assert accepts(Grammar("ebnf", limited), "ab\ntemperature=1", is_whole=True)
    assert "uniqueItems" in refusal("ebnf", 'start: %json {"uniqueItems": true}')


MOST = "9" * 20
OBJECT = {"type": "object"}
NUMBERS = {  # schema -> numbers that it must accept, and numbers that are too long
    "integer": ({"type": "integer"}, ["0", "-7", MOST, f"-{MOST}"], [f"{MOST}9", "1" + "0" * 20]),
    "number": ({"type": "number"}, ["0.5", MOST, f"-1.{MOST[1:]}", f"{MOST}.{MOST[1:]}e-308", "1E+5"], [f"{MOST}99", f"1.{MOST}9"]),
    "minimum": ({"type": "integer", "minimum": 3}, ["3", "10", MOST], [f"{MOST}9"]),
    "free value": ({}, ["12", MOST, f"1.{MOST[1:]}"], [f"{MOST}9", f"1.{MOST}9"]),
}


def is_answer(kind: Any, grammar: dict[str, Any], text: str) -> bool:
    return accepts(Grammar(kind, json.dumps(grammar)), text, is_whole=True)


def call_grammar(schema: dict[str, Any], template: str) -> dict[str, Any]:
    """Grammar of a required call with one parameter `n`."""
    parameters = {"type": "object", "properties": {"n": schema}, "required": ["n"]}
    tools = [{"function": {"name": "f", "parameters": parameters}}]
    grammar = answer_grammar(None, tools, OutputOptions(calls="all", must_call=True), template)
    assert grammar is not None
    tag = json.loads(grammar.text)
    return tag


@pytest.mark.parametrize(("schema", "good", "long"), NUMBERS.values(), ids=NUMBERS)
def test_numbers_have_at_most_20_digits(schema: dict[str, Any], good: list[str], long: list[str]) -> None:
    of_array = {"a": {"type": "array", "items": schema}}
    nested = {"type": "object", "properties": of_array, "required": ["a"]}
    call, xml_call = call_grammar(schema, ""), call_grammar(schema, "<function=")
    for texts, expected in ((good, True), (long, False)):
        for text in texts:
            assert is_answer("json_schema", schema, text) is expected, text
            assert is_answer("json_schema", nested, f'{{"a":[{text}]}}') is expected, text
            written = f'<tool_call>\n{{"name": "f", "arguments": {{"n": {text}}}}}\n</tool_call>'
            assert is_answer("structural_tag", call, written) is expected, text
            if schema:  # a free value is text in this notation
                written = f"<tool_call>\n<function=f>\n<parameter=n>\n{text}\n</parameter>\n</function>\n</tool_call>"
                assert is_answer("structural_tag", xml_call, written) is expected, text


def test_free_json_is_limited_too() -> None:
    assert is_answer("json_schema", OBJECT, f'{{"number":{MOST}}}') and not is_answer("json_schema", OBJECT, f'{{"number":{MOST}9}}')


def test_digits_of_strings_and_of_other_grammars_are_not_limited() -> None:
    long = "1" * 40
    assert is_answer("json_schema", {"type": "string", "pattern": "^[1-9][0-9]*$"}, f'"{long}"')
    assert is_answer("json_schema", {"enum": ["[1-9] [0-9]*", 'a"[1-9] [0-9]*']}, '"[1-9] [0-9]*"')
    assert is_answer("json_schema", {"type": "string"}, f'"{long}"')
    elements = [{"type": "regex", "pattern": "0|[1-9][0-9]*"}, {"type": "grammar", "grammar": "root ::= [1-9] [0-9]*"}]
    own = {"type": "or", "elements": elements}
    assert is_answer("structural_tag", {"type": "structural_tag", "format": own}, long)

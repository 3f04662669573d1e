"""What the compiler makes of a grammar, by the matcher that holds answers to it."""

import json
from pathlib import Path
from typing import Any

import pytest
import xgrammar

from engine.grammar.compile import compiled, read_vocabulary
from engine.wire.grammar import Grammar
from models.demo import CHECKPOINT
from server.api.schema.formats import _grammar_of

TOKENS = read_vocabulary(Path(CHECKPOINT))
COMPILER = xgrammar.GrammarCompiler(TOKENS, cache_enabled=False)
BOUNDED = {"type": "string", "maxLength": 3}
THING = {"type": "object", "properties": {"a": BOUNDED, "b": {"type": "string"}}, "required": ["a", "b"]}


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
    assert accepts(_grammar_of("choice", [choice, "b"]), choice)


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
    grammars.append(Grammar("regex", "x", otherwise=Grammar("ebnf", GUIDANCE)))
    for grammar in grammars:
        assert accepts(grammar, '12 is {"x": 1, "y": "a"}')
        assert not accepts(grammar, '12 is {"x":  ') and not accepts(grammar, "1 ")
    assert accepts(Grammar("ebnf", 'start: "(" NUMBER+ ")"\nNUMBER: /[0-9]/'), "(123)")
    assert "priority" in refusal("ebnf", "start: n\nn[priority=1]: /a/") and "'temperature'" in refusal(
        "ebnf", "start: n\nn[temperature=1]: /a/"
    )
    limited = 'start: n "temperature=1"\nn[capture, stop="\\n", max_tokens=9]: /[^x]+/'
    assert accepts(Grammar("ebnf", limited), "ab\ntemperature=1", is_whole=True)

"""Numbers of a JSON schema have at most 20 digits before and after the point and three in the exponent."""

import json
from typing import Any

import pytest
import xgrammar

from engine.grammar.compile import MAX_DIGITS, bounded
from engine.params import Grammar, OutputOptions
from server.processor.grammar import answer_grammar
from tests.unit.engine.test_grammar_compile import accepts

MOST = "9" * MAX_DIGITS
NUMBERS = {  # schema -> numbers that it must accept, and numbers that are too long
    "integer": ({"type": "integer"}, ["0", "-7", MOST, f"-{MOST}"], [f"{MOST}9", "1" + "0" * MAX_DIGITS]),
    "number": ({"type": "number"}, ["0.5", MOST, f"-1.{MOST}", f"{MOST}.{MOST}e-308", "1E+5"], [f"{MOST}9", f"1.{MOST}9", "1e1000"]),
    "minimum": ({"type": "integer", "minimum": 3}, ["3", "10", MOST], [f"{MOST}9"]),
    "maximum": ({"type": "integer", "maximum": -12}, ["-12", f"-{MOST}"], [f"-{MOST}9"]),
    "negative minimum": ({"type": "integer", "minimum": -5}, ["-5", "0", MOST], [f"{MOST}9"]),
    "number with a minimum": ({"type": "number", "minimum": 0.5}, ["0.5", "77.25", MOST], [f"{MOST}9"]),
    "number with a maximum": ({"type": "number", "exclusiveMaximum": 0}, ["-0.5", f"-{MOST}"], [f"-{MOST}9"]),
    "free value": ({}, ["12", MOST, f"1.{MOST}"], [f"{MOST}9", f"1.{MOST}9"]),
    "reference": ({"$ref": "#/$defs/n", "$defs": {"n": {"type": ["integer", "null"]}}}, ["null", MOST], [f"{MOST}9"]),
}


def is_answer(kind: Any, grammar: dict[str, Any], text: str) -> bool:
    return accepts(Grammar(kind, json.dumps(grammar)), text, is_whole=True)


def call_grammar(schema: dict[str, Any], template: str) -> dict[str, Any]:
    """Grammar of a required call with one parameter `n`."""
    parameters = {"type": "object", "properties": {"n": schema}, "required": ["n"], "$defs": schema.get("$defs", {})}
    tools = [{"function": {"name": "f", "parameters": parameters}}]
    grammar = answer_grammar(None, tools, OutputOptions(calls="all", must_call=True), template)
    assert grammar is not None
    tag: dict[str, Any] = json.loads(grammar.text)
    return tag


@pytest.mark.parametrize(("schema", "good", "long"), NUMBERS.values(), ids=NUMBERS)
def test_numbers_have_at_most_20_digits(schema: dict[str, Any], good: list[str], long: list[str]) -> None:
    """Also in arrays of objects and in the arguments of calls in both notations."""
    of_array = {"a": {"type": "array", "items": schema}}
    nested = {"type": "object", "properties": of_array, "required": ["a"], "$defs": schema.get("$defs", {})}
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
    assert is_answer("json_object", {}, f'{{"number":{MOST}}}') and not is_answer("json_object", {}, f'{{"number":{MOST}9}}')


def test_digits_of_strings_and_of_other_grammars_are_not_limited() -> None:
    long = "1" * 40
    assert is_answer("json_schema", {"type": "string", "pattern": "^[1-9][0-9]*$"}, f'"{long}"')
    assert is_answer("json_schema", {"enum": ["[1-9] [0-9]*", 'a"[1-9] [0-9]*']}, '"[1-9] [0-9]*"')
    assert is_answer("json_schema", {"type": "string"}, f'"{long}"')
    elements = [{"type": "regex", "pattern": "0|[1-9][0-9]*"}, {"type": "grammar", "grammar": "root ::= [1-9] [0-9]*"}]
    own = {"type": "or", "elements": elements}
    assert is_answer("structural_tag", {"type": "structural_tag", "format": own}, long)


def test_time_with_endless_fraction_is_limited() -> None:
    schema = {"type": "string", "format": "date-time"}
    assert is_answer("json_schema", schema, '"2024-01-01T00:00:00.123456Z"')
    assert not is_answer("json_schema", schema, f'"2024-01-01T00:00:00.{MOST}9Z"')


def test_rules_without_numbers_stay_as_they_are() -> None:
    schema = {"type": "object", "properties": {"[1-9] [0-9]*": {"type": "array", "items": {"type": "string", "format": "hostname"}}}}
    text = str(xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=False, separators=(",", ":")))
    new_text = bounded(xgrammar.Grammar.from_ebnf(text))
    changed = {old for old, new in zip(text.splitlines(), new_text.splitlines(), strict=True) if old != new}
    assert {line.partition(" ")[0] for line in changed} <= {"basic_integer", "basic_number_2", "basic_number_3", "basic_number_5"}

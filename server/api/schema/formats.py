"""Fields of requests that constrain the answer by a grammar."""

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import from_json

from engine.wire.grammar import Grammar
from engine.wire.params import NotEmpty
from server.api.schema.validate import BY_TYPE, Open, Strict, bad_value

KINDS = {"json_": "json_schema", "json_object": "json_schema", "grammar": "ebnf"}  # of members of `structured_outputs`, if not their name
ANY_OBJECT = {"type": "object"}


def _parsed(value: object) -> object:
    return from_json(value) if isinstance(value, str) else value


JsonObject = Annotated[dict[str, Any], BeforeValidator(_parsed, json_schema_input_type=str | dict[str, Any])]
Choices = Annotated[list[NotEmpty], Field(min_length=1, fail_fast=True)]


class PlainFormat(Strict):
    type: Literal["text", "json_object"]


class NamedSchema(Strict):
    of: JsonObject = Field(alias="schema")


class SchemaFormat(Strict):
    """Format with a schema in `json_schema` or as its sibling."""

    type: Literal["json_schema"]
    json_schema: NamedSchema | None = None
    of: JsonObject | None = Field(alias="schema", default=None)


AnswerFormat = Annotated[PlainFormat | SchemaFormat, BY_TYPE] | None


class StructuredOutputs(Strict):
    """vLLM's object, of which exactly one member is set."""

    json_: JsonObject | None = Field(alias="json", default=None)
    regex: NotEmpty | None = None
    choice: Choices | None = None
    grammar: NotEmpty | None = None
    json_object: bool | None = None


class GrammarFields(Open):
    regex: NotEmpty | None = None
    ebnf: NotEmpty | None = None
    json_schema: JsonObject | None = None
    guided_grammar: NotEmpty | None = None  # the guidance library sends it
    response_format: AnswerFormat = None
    structured_outputs: StructuredOutputs | None = None


def read_grammar(request: GrammarFields) -> tuple[Grammar | None, str]:
    """Return the grammar and the field that contains it. RequestError 400 for several grammars, or values that are none."""
    values = {"regex": request.regex, "ebnf": request.ebnf, "json_schema": request.json_schema}
    grammars = {kind: _grammar_of(kind, value) for kind, value in values.items() if value is not None}
    if request.guided_grammar is not None:
        grammars["guided_grammar"] = _grammar_of("ebnf", request.guided_grammar)
    if request.structured_outputs is not None:
        members = [(name, value) for name, value in request.structured_outputs if value not in (None, False)]
        if len(members) != 1:
            raise bad_value("structured_outputs", "must have one of json, regex, choice, grammar and json_object")
        name, value = members[0]
        grammar = _grammar_of(KINDS.get(name, name), ANY_OBJECT if name == "json_object" else value)
        grammars[f"structured_outputs.{name.strip('_')}"] = grammar
    grammars |= _of_response_format(request.response_format)
    if len(set(grammars.values())) > 1:  # the guidance library sends the same grammar in two fields
        raise bad_value(list(grammars)[1], f"excludes {next(iter(grammars))}: an answer can follow one of them only")
    return next(((grammar, name) for name, grammar in grammars.items()), (None, ""))


def _of_response_format(shape: PlainFormat | SchemaFormat | None) -> dict[str, Grammar]:
    if shape is None or isinstance(shape, PlainFormat):
        is_json = shape is not None and shape.type == "json_object"
        return {"response_format": _grammar_of("json_schema", ANY_OBJECT)} if is_json else {}
    schema, path = shape.of if shape.json_schema is None else shape.json_schema.of, "response_format.json_schema.schema"
    if schema is None:
        raise bad_value(path, "is missing")
    return {path: _grammar_of("json_schema", schema)}


def _grammar_of(kind: Any, value: Any) -> Grammar:
    if kind == "choice":
        texts = (json.dumps(one, ensure_ascii=False) for one in value)  # JSON strings are valid EBNF
        return Grammar("ebnf", "root ::= " + " | ".join(texts))
    return Grammar(kind, value if isinstance(value, str) else json.dumps(value))

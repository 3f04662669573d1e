"""Grammar of an answer from the fields of three dialects."""

import json
from typing import Any

from engine.wire.grammar import Grammar
from server.api.schema.requests import GRAMMARS, GenerationRequest, PlainFormat, StructuralTag
from server.api.schema.validate import bad_value

# Kinds of grammars by members of `structured_outputs`.
MEMBERS = {
    "json_": "json_schema", "json_object": "json_schema", "regex": "regex", "choice": "choice", "grammar": "ebnf",
    "structural_tag": "structural_tag",
}  # fmt: skip
ANY_OBJECT = {"type": "object"}
ALREADY = ("disable_any_whitespace", "disable_fallback")  # accepted: the default here, or not applicable


def read_grammar(request: GenerationRequest) -> tuple[Grammar | None, str]:
    """Return the grammar and the field that contains it. RequestError 400 for several grammars, or values that are none."""
    values = {name: getattr(request, name) for name in GRAMMARS}
    grammars = {name: _grammar_of(GRAMMARS[name][0], value) for name, value in values.items() if value is not None}
    if request.structured_outputs is not None:
        members = {name: value for name, value in request.structured_outputs if value not in (None, False) and name not in ALREADY}
        if len(members) != 1 or not members.keys() <= MEMBERS.keys():
            raise bad_value("structured_outputs", "must have one of json, regex, choice, grammar, json_object and structural_tag")
        for name, value in members.items():
            value = ANY_OBJECT if name == "json_object" else value
            grammars[f"structured_outputs.{name.strip('_')}"] = _grammar_of(MEMBERS[name], value)
    grammars |= _of_response_format(request)
    if len(set(grammars.values())) > 1:  # the guidance library sends the same grammar in two fields
        raise bad_value(list(grammars)[1], f"excludes {next(iter(grammars))}: an answer can follow one of them only")
    return next(((grammar, name) for name, grammar in grammars.items()), (None, ""))


def _of_response_format(request: GenerationRequest) -> dict[str, Grammar]:
    shape = request.response_format
    if shape is None or isinstance(shape, PlainFormat):
        is_json = shape is not None and shape.type == "json_object"
        return {"response_format": _grammar_of("json_schema", ANY_OBJECT)} if is_json else {}
    if isinstance(shape, StructuralTag):
        return {"response_format": _grammar_of("structural_tag", shape.model_dump())}
    schema, path = shape.of if shape.json_schema is None else shape.json_schema.of, "response_format.json_schema.schema"
    if schema is None:
        raise bad_value(path, "is missing")
    return {path: _grammar_of("json_schema", schema)}


def _grammar_of(kind: Any, value: Any) -> Grammar:
    if kind == "choice":
        texts = (json.dumps(one, ensure_ascii=False) for one in value)  # JSON strings are valid EBNF
        return Grammar("ebnf", "root ::= " + " | ".join(texts))
    return Grammar(kind, value if isinstance(value, str) else json.dumps(value))

"""Grammar of an answer from the fields of three dialects."""

import json
from collections.abc import Iterator
from typing import Any

from engine.grammar.schema import check as check_schema
from engine.wire.grammar import Grammar
from server.api.schema.requests import GRAMMARS, ChatRequest, GenerationRequest, PlainFormat, StructuralTag
from server.api.schema.validate import bad_value

CUT_OFF = "the answer was cut off by the token limit before its grammar was complete: raise max_tokens"
# Kinds of grammars by members of `structured_outputs`.
MEMBERS = {
    "json_": "json_schema", "json_object": "json_schema", "regex": "regex", "choice": "choice", "grammar": "ebnf",
    "structural_tag": "structural_tag",
}  # fmt: skip
ANY_OBJECT = {"type": "object"}
ALREADY = ("disable_any_whitespace", "disable_fallback")  # accepted: the default here, or not applicable


def read_grammar(request: GenerationRequest) -> tuple[Grammar | None, str]:
    """Return the grammar and the field that contains it. RequestError 400 for several grammars, an invalid one, or a strict
    function whose parameters cannot be enforced."""
    values = {name: getattr(request, name) for name in GRAMMARS}
    grammars = {name: _grammar_of(GRAMMARS[name][0], value, name) for name, value in values.items() if value is not None}
    if request.structured_outputs is not None:
        members = {name: value for name, value in request.structured_outputs if value not in (None, False) and name not in ALREADY}
        if len(members) != 1 or not members.keys() <= MEMBERS.keys():
            raise bad_value("structured_outputs", "must have one of json, regex, choice, grammar, json_object and structural_tag")
        for name, value in members.items():
            value = ANY_OBJECT if name == "json_object" else value
            grammars["structured_outputs"] = _grammar_of(MEMBERS[name], value, f"structured_outputs.{name.strip('_')}")
    if (grammar := _of_response_format(request)) is not None:
        grammars["response_format"] = grammar
    if len(set(grammars.values())) > 1:  # the guidance library sends the same grammar in two fields
        raise bad_value(list(grammars)[1], f"excludes {next(iter(grammars))}: an answer can follow one of them only")
    for tool in request.functions if isinstance(request, ChatRequest) and request.uses_tools else ():
        if tool.function.strict:
            _check_schema(tool.function.parameters, "tools", f"the parameters of the strict function '{tool.function.name}': ")
    return next(((grammar, name) for name, grammar in grammars.items()), (None, ""))


def _of_response_format(request: GenerationRequest) -> Grammar | None:
    shape = request.response_format
    if shape is None or isinstance(shape, PlainFormat):
        return Grammar("json_schema", json.dumps(ANY_OBJECT)) if shape is not None and shape.type == "json_object" else None
    if isinstance(shape, StructuralTag):
        return _grammar_of("structural_tag", shape.model_dump(), "response_format")
    schema = shape.of if shape.json_schema is None else shape.json_schema.of
    if schema is None:
        raise bad_value("response_format.json_schema.schema", "is missing")
    return _grammar_of("json_schema", schema, "response_format.json_schema.schema")


def _grammar_of(kind: Any, value: Any, path: str) -> Grammar:
    if kind in ("json_schema", "structural_tag"):
        for place, schema in _schemas_of(value, path) if kind == "structural_tag" else ((path, value),):
            _check_schema(schema, place)
        if kind == "structural_tag" and "structures" in value:
            value = _present_form(value)
    return Grammar(kind, value if isinstance(value, str) else json.dumps(value))


def _present_form(tag: dict[str, Any]) -> dict[str, Any]:
    """Convert a structural tag from the older form with `structures` and `triggers`."""
    structures: list[Any] = tag["structures"] if isinstance(tag["structures"], list) else []
    tags = [{"begin": one.get("begin"), "content": {"type": "json_schema", "json_schema": one.get("schema", {})}, "end": one.get("end")}
            for one in structures if isinstance(one, dict)]  # fmt: skip
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}}


def _schemas_of(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield the schemas in a structural tag of either form, with their paths."""
    if isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _schemas_of(inner, f"{path}[{index}]")
    for key, inner in value.items() if isinstance(value, dict) else ():
        if key in ("json_schema", "schema"):
            yield f"{path}.{key}", inner
        else:
            yield from _schemas_of(inner, f"{path}.{key}")


def _check_schema(schema: object, path: str, subject: str = "") -> None:
    """Raise RequestError 400 that names the path: the compiler sees only the combined grammar."""
    try:
        check_schema(schema)
    except ValueError as problem:
        raise bad_value(path, f"{subject}{problem}") from None

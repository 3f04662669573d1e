"""What an answer must follow, as the fields of three dialects say it. Used by `generation.py`."""

import json
from collections.abc import Iterator
from typing import Any

from engine.grammar.schema import check as check_schema
from engine.params import Grammar
from server.api.schema import ChatRequest, GenerationRequest
from server.http.validate import bad_value

SIMPLE_FIELDS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf", "json_schema")
ALREADY = ("disable_any_whitespace", "disable_fallback")  # what they ask for is done, or cannot come up
KINDS = {
    "json": "json_schema", "guided_json": "json_schema", "json_schema": "json_schema", "regex": "regex", "guided_regex": "regex",
    "choice": "choice", "guided_choice": "choice", "grammar": "ebnf", "guided_grammar": "ebnf", "ebnf": "ebnf",
    "json_object": "json_object", "structural_tag": "structural_tag",
}  # fmt: skip


def read_grammar(request: GenerationRequest) -> tuple[Grammar | None, str]:
    """The grammar of a request, and the field that holds it. RequestError 400 for several, or for one that cannot be read."""
    found = {name: getattr(request, name) for name in SIMPLE_FIELDS if getattr(request, name) is not None}
    grammars: dict[str, Grammar | None] = {name: _grammar_of(name, value, name) for name, value in found.items()}
    if request.structured_outputs is not None:
        grammars["structured_outputs"] = _of_structured_outputs(request.structured_outputs)
    if request.response_format is not None:
        grammars["response_format"] = _of_response_format(request.response_format)
    told = {name: grammar for name, grammar in grammars.items() if grammar is not None}
    if len(told) > 1:
        raise bad_value(list(told)[1], f"excludes {next(iter(told))}: an answer can follow one of them only")
    return next(((grammar, name) for name, grammar in told.items()), (None, ""))


def check_strict_tools(request: ChatRequest) -> None:
    """RequestError 400 for a function that no grammar could hold its calls to."""
    for tool in request.tools or () if request.uses_tools else ():
        if tool.function.strict:
            _check_schema(tool.function.parameters, "tools", f"the parameters of the strict function '{tool.function.name}': ")


def _of_response_format(value: object) -> Grammar | None:
    fields: dict[str, Any] = value if isinstance(value, dict) else {}
    kind = fields.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_object")
    if kind == "json_schema":
        inner = fields.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else fields.get("schema")
        if schema is None:
            raise bad_value("response_format.json_schema.schema", "is missing")
        return _grammar_of("json_schema", schema, "response_format.json_schema.schema")
    if kind == "structural_tag":
        return _grammar_of("structural_tag", value, "response_format")
    raise bad_value("response_format", "must be an object of type 'text', 'json_object', 'json_schema' or 'structural_tag'")


def _of_structured_outputs(value: object) -> Grammar | None:
    """vLLM's: one of several members is set."""
    if not isinstance(value, dict):
        raise bad_value("structured_outputs", "must be an object")
    told = {name: inner for name, inner in value.items() if inner not in (None, False) and name not in ALREADY}
    if len(told) != 1 or next(iter(told)) not in ("json", "regex", "choice", "grammar", "json_object", "structural_tag"):
        raise bad_value("structured_outputs", "must have one of json, regex, choice, grammar, json_object and structural_tag")
    name, inner = next(iter(told.items()))
    return _grammar_of(name, inner, f"structured_outputs.{name}")


def _grammar_of(name: str, value: Any, path: str) -> Grammar:
    kind = KINDS[name]
    if kind == "json_object":
        return Grammar("json_object")
    if kind == "choice":
        if not (isinstance(value, list) and value and all(isinstance(entry, str) and entry for entry in value)):
            raise bad_value(path, "must be a list of texts that are not empty")
        return Grammar("choice", json.dumps(value))
    if kind in ("json_schema", "structural_tag"):
        told = _object_of(value, path)
        for place, schema in _schemas_of(told, path) if kind == "structural_tag" else ((path, told),):
            _check_schema(schema, place)
        return Grammar(kind, json.dumps(told))  # type: ignore[arg-type]
    if not isinstance(value, str) or not value:
        raise bad_value(path, "must be a text that is not empty")
    return Grammar(kind, value)  # type: ignore[arg-type]


def _schemas_of(tag: dict[str, Any], path: str) -> Iterator[tuple[str, object]]:
    """Where a structural tag has schemas, in its present form or in the older one of `structures`."""
    waiting: list[tuple[str, object]] = [(path, tag)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, list):
            waiting += ((f"{place}[{index}]", inner) for index, inner in enumerate(value))
        for key, inner in value.items() if isinstance(value, dict) else ():
            if key in ("json_schema", "schema"):
                yield f"{place}.{key}", inner
            else:
                waiting.append((f"{place}.{key}", inner))


def _check_schema(schema: object, path: str, subject: str = "") -> None:
    """Here, because in a grammar of an answer beside tools the compiler does not see which part is whose."""
    try:
        check_schema(schema)
    except ValueError as problem:
        raise bad_value(path, f"{subject}{problem}") from None
    except RecursionError:
        raise bad_value(path, f"{subject}it is too deep") from None


def _object_of(value: Any, path: str) -> dict[str, Any]:
    """Objects come as they are, or as text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise bad_value(path, "must be an object, or the JSON of one") from None
    if not isinstance(value, dict):
        raise bad_value(path, "must be an object, or the JSON of one")
    return value

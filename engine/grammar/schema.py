"""Unsupported parts of JSON schemas: the grammar compiler would silently ignore them."""

from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]

REFUSED = frozenset({
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas", "dependencies",
    "$dynamicRef", "$recursiveRef",
})  # fmt: skip
ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$defs", "definitions",
    "$schema", "$id",
})  # fmt: skip
LENGTHS = ("minLength", "maxLength")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
MAPS = ("properties", "patternProperties", "$defs", "definitions")
SINGLE = ("items", "additionalProperties", "additionalItems", "unevaluatedItems", "unevaluatedProperties", "propertyNames")


def check(schema: object) -> None:
    """Raise ValueError for a keyword that the grammar would not enforce."""
    if not isinstance(schema, dict):
        return
    for keyword in REFUSED & schema.keys():
        raise ValueError(f"the keyword {keyword} is not supported")
    if schema.get("uniqueItems") is True:
        raise ValueError("the keyword uniqueItems is not supported")
    reference = schema.get("$ref")
    if reference is not None and not (isinstance(reference, str) and reference.startswith("#")):
        raise ValueError("a $ref must lead to a part of the same schema")
    for keyword in ("$ref", "allOf"):
        others = schema.keys() - ANNOTATIONS - {keyword}
        if keyword in schema and others:
            raise ValueError(f"{keyword} with {min(others)} is not supported")
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        raise ValueError("allOf of several schemas is not supported")
    if "pattern" in schema and (others := {*LENGTHS, "format"} & schema.keys()):
        raise ValueError(f"pattern with {min(others)} is not supported")
    if "multipleOf" in schema and schema.get("type") != "integer":
        raise ValueError("multipleOf is only supported for type integer")
    for part in parts_of(schema):
        check(part)


def parts_of(schema: Json) -> Iterator[Any]:
    for name, value in schema.items():
        if name in SINGLE:
            yield value
        elif name in LISTS and isinstance(value, list):
            yield from value
        elif name in MAPS and isinstance(value, dict):
            yield from value.values()

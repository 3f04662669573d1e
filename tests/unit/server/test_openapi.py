"""The OpenAPI document and its page, from the real api process."""

import re

import jsonschema
import pytest

from server.api.openapi import OPERATIONS, describe
from server.http.app import ENDPOINTS
from tests.unit.server.stack import Stack


def test_every_path_is_described(stack: Stack) -> None:
    """Red if an endpoint is added and not published, or if something is published that is not there."""
    document = stack.http.get("/openapi.json").json()
    assert document["paths"].keys() >= ENDPOINTS.keys()
    for operation in OPERATIONS:
        path = operation.path.replace("{name}", "test-model")
        other = "POST" if operation.method == "get" else "GET"
        assert operation.method in document["paths"][operation.path]
        refused = stack.http.request(other, path)
        methods = [found.method.upper() for found in OPERATIONS if found.path == operation.path]
        assert refused.status_code == (405 if other not in methods else 200) and (
            other in methods or set(refused.headers["allow"].split(", ")) >= set(methods)
        )


def test_examples_are_valid(stack: Stack) -> None:
    """Red if what the page shows is not what the schema says; `tests/clients` sends them to the demo model."""
    document = stack.http.get("/openapi.json").json()
    for operation in OPERATIONS:
        if operation.models:
            content = document["paths"][operation.path]["post"]["requestBody"]["content"]["application/json"]
            schema = {**content["schema"], "components": document["components"]}
            jsonschema.Draft202012Validator(schema).validate(operation.example)
            assert content["examples"]["example"]["value"] == operation.example


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("best_of", 2), ("stop_token_ids", [4000]), ("model", "other"), ("stop", ["a"] * 5), ("tool_choice", "any"),
        ("prompt_logprobs", True),
    ],
)  # fmt: skip
def test_the_schemas_know_what_pydantic_does_not(name: str, bad: object) -> None:
    schemas = {"components": describe(("m",), 4000, 128)["components"], "$ref": "#/components/schemas/ChatRequest"}
    valid = {"messages": [{"role": "user", "content": "x"}]}
    jsonschema.Draft202012Validator(schemas).validate(valid)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schemas).validate({**valid, name: bad})


def test_the_page(stack: Stack) -> None:
    """Red if an operation is not on it, if it needs scripts, or if it loads anything from elsewhere."""
    answer = stack.http.get("/docs")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src ; style-src 'sha256-")
    for operation in OPERATIONS:
        assert f"{operation.method.upper()} {operation.path}" in answer.text
    assert "<script" not in answer.text and not re.findall(r'(?:src|href)="(?:https?:)?//', answer.text)

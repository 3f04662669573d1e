"""The OpenAPI document, from the real api process. `tests/clients` asks by it."""

from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from server.api.main import ENDPOINTS
from tests.unit.server.stack import Stack

HELLO = [{"role": "user", "content": "hello"}]
STATUS = {"/health", "/health/live", "/ping", "/metrics", "/load", "/version", "/server_info", "/v1/models"}
REST = {"/", "/health_generate", "/openapi.json", "/v1/models/{name}", "/reset_prefix_cache", "/flush_cache"}
NATIVE = {"/get_model_info", "/model_info", "/get_server_info"}


@pytest.fixture(scope="module")
def document(running_stack: Stack) -> Any:
    return running_stack.http.get("/openapi.json").json()


def operations(document: Any) -> Iterator[tuple[str, Any]]:
    for path, methods in document["paths"].items():
        yield from ((path, operation) for operation in methods.values())


def parts(value: Any) -> Iterator[tuple[str, Any]]:
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield str(key), inner
        yield from parts(inner)


def test_every_route_is_described(document: Any) -> None:
    assert document["paths"].keys() == ENDPOINTS.keys() | STATUS | REST | NATIVE
    ids = [operation["operationId"] for _, operation in operations(document)]
    assert len(set(ids)) == len(ids) and all(name.isidentifier() for name in ids)
    for path, operation in operations(document):
        assert operation["summary"] and operation["responses"].keys() >= {"200", "4XX", "5XX"}
        if path in ENDPOINTS:
            assert operation["requestBody"]["content"]["application/json"]["schema"]


def test_the_document_is_one_that_generators_read(document: Any) -> None:
    assert document["openapi"].startswith("3.1") and len(document["components"]["schemas"]) > 50
    for name, schema in document["components"]["schemas"].items():
        assert name.isidentifier()
        jsonschema.Draft202012Validator.check_schema(schema)
        assert all(isinstance(inner, dict) for inner in schema.get("properties", {}).values())
    for key, value in parts(document):
        assert key != "default"
        assert key != "enum" or not [one for one in value if isinstance(one, list | dict)]
        assert key != "$ref" or value.removeprefix("#/components/schemas/") in document["components"]["schemas"]


def test_requests_are_what_the_document_says(document: Any) -> None:
    for name, valid, broken in (
        ("ChatRequest", {"stop": "x"}, {"stop": 5}),
        ("ChatRequest", {"tool_choice": {"type": "function", "function": {"name": "f"}}}, {"tool_choice": "any"}),
        ("ChatRequest", {"response_format": {"type": "json_object"}}, {"response_format": {"type": "xml"}}),
        ("ChatRequest", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, {"messages": "hello"}),
        ("CompletionRequest", {"prompt": [[1, 2], "x"]}, {"prompt": 5}),
        ("ResponsesRequest", {"input": [{"role": "user", "content": "x"}]}, {"input": [{"type": "item_reference"}]}),
    ):
        validator = jsonschema.Draft202012Validator({"components": document["components"], "$ref": f"#/components/schemas/{name}"})
        assert validator.is_valid({"messages": HELLO, "prompt": "x", "input": "x"} | valid)
        assert not validator.is_valid({"messages": HELLO, "prompt": "x", "input": "x"} | broken)

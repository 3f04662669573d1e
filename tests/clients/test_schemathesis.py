"""What is published is true: requests that schemathesis makes of the OpenAPI document, valid and broken, against the demo model."""

import json
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from server.api.chat.status import StatusRoutes
from server.api.main import ENDPOINTS
from tests.e2e.serving import Engine

schemathesis = pytest.importorskip("schemathesis")
positive_data_acceptance = pytest.importorskip("schemathesis.specs.openapi.checks").positive_data_acceptance

NUM_EXAMPLES = 12  # of each operation and mode
MAX_TOKENS = 3
OPERATIONS = [("POST", path) for path in ENDPOINTS]
ROUTES = [route for route in StatusRoutes(cast(Any, None)).routes()]
OPERATIONS += [(route.method.upper(), route.path_format) for route in ROUTES]
OPERATIONS += [("GET", "/openapi.json"), ("GET", "/")]
# What an answer must follow: no schema tells what a schema, a regular expression or a grammar is. And what makes answers long.
REMOVED = (
    "model", "response_format", "structured_outputs", "regex", "ebnf",
    "json_schema", "output_config", "text", "timeout", "min_tokens", "max_completion_tokens",
)  # fmt: skip

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def published(engine: Engine) -> Any:
    return schemathesis.openapi.from_url(f"{engine.url}/openapi.json")


def requests_of(published: Any, method: str, path: str, mode: str, check: Any) -> None:
    strategy = published[path][method].as_strategy(generation_mode=schemathesis.GenerationMode[mode])

    @given(case=strategy)
    @settings(
        max_examples=NUM_EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )  # fmt: skip
    def run(case: Any) -> None:
        check(case)

    run()


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_what_is_valid_is_no_fault_of_the_server(published: Any, engine: Engine, method: str, path: str) -> None:
    statuses = set()

    def check(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body = shortened(path, case.body)
        if case.path_parameters:
            case.path_parameters["name"] = engine.client.get("/v1/models").json()["data"][0]["id"]
        response = case.call(timeout=60)
        assert response.status_code < 500, (response.status_code, response.text[:500], json.dumps(case.body)[:1500])
        case.validate_response(response, excluded_checks=[positive_data_acceptance])  # no schema tells which fields exclude each other
        statuses.add(response.status_code)

    requests_of(published, method, path, "POSITIVE", check)
    assert 200 in statuses


@pytest.mark.parametrize("path", ENDPOINTS)
def test_what_is_broken_is_refused(published: Any, path: str) -> None:
    def check(case: Any) -> None:
        response = case.call(timeout=60)
        assert 400 <= response.status_code < 500, (response.status_code, response.text[:500], json.dumps(case.body)[:1500])
        case.validate_response(response)

    requests_of(published, "POST", path, "NEGATIVE", check)


def shortened(path: str, body: dict[str, Any]) -> dict[str, Any]:
    if path == "/generate":
        return {"text": "x", "stream": body.get("stream"), "sampling_params": {"max_new_tokens": MAX_TOKENS}}
    kept = {name: value for name, value in body.items() if name not in REMOVED}
    if path == "/v1/embeddings":  # either of them must be there
        kept = {**kept, "input": "x", "messages": None}
    turns = kept.get("messages") or []
    turns[:] = [turn if turn.get("content") else {"role": "user", "content": "x"} for turn in turns or [{}]]
    return kept | {"max_output_tokens" if path.startswith("/v1/responses") else "max_tokens": MAX_TOKENS}

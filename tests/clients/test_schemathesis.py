"""What is published is true: requests that schemathesis makes of the OpenAPI document, valid and broken, against the demo model."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from server.api.openapi import OPERATIONS, PICTURE, Operation
from tests.e2e.serving import Engine

schemathesis = pytest.importorskip("schemathesis")

NUM_EXAMPLES = 12  # of each operation and mode
MAX_TOKENS = 3
# What an answer must follow: no schema tells what a schema, a regular expression or a grammar is, nor that there may be one only.
GRAMMARS = (
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf"),
    *("json_schema", "output_config", "text"),
)
BLOCKS_OF_ROLES = {
    "system": ("text",),
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}


@pytest.fixture(scope="module")
def published(engine: Engine) -> Any:
    """The document as the client reads it, where `modes` are chosen by each test."""
    return schemathesis.openapi.from_url(f"{engine.url}/openapi.json")


def names(operations: list[Operation]) -> list[str]:
    return [f"{operation.method} {operation.path}" for operation in operations]


WITH_BODY = [operation for operation in OPERATIONS if operation.models]


def requests_of(published: Any, operation: Operation, mode: str, check: Any) -> None:
    """Calls `check` with cases of a mode: as many as are made."""
    strategy = published[operation.path][operation.method.upper()].as_strategy(generation_mode=schemathesis.GenerationMode[mode])

    @given(case=strategy)
    @settings(
        max_examples=NUM_EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )  # fmt: skip
    def run(case: Any) -> None:
        check(case)

    run()


@pytest.mark.parametrize("operation", OPERATIONS, ids=names(list(OPERATIONS)))
def test_what_is_valid_is_answered(published: Any, operation: Operation) -> None:
    """Red if a request that the document allows is refused, or if an answer is none that it names."""

    def check(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body = repair(operation.path, integers(case.body))
        response = case.call(timeout=60)
        if response.status_code == 400 and response.json()["error"].get("code") == "context_length_exceeded":
            return  # what was made is longer than the model's context
        assert response.status_code in (200, 422), (response.status_code, response.text[:500], json.dumps(case.body)[:1500])
        case.validate_response(response)

    requests_of(published, operation, "POSITIVE", check)


@pytest.mark.parametrize("operation", WITH_BODY, ids=names(WITH_BODY))
def test_what_is_broken_is_refused(published: Any, operation: Operation) -> None:
    """Red if a request that the document forbids is answered, or answered with anything but what was wrong."""

    def check(case: Any) -> None:
        response = case.call(timeout=60)
        assert 400 <= response.status_code < 500, (response.status_code, response.text[:500], json.dumps(case.body)[:1500])
        case.validate_response(response)

    requests_of(published, operation, "NEGATIVE", check)


@pytest.mark.parametrize("operation", WITH_BODY, ids=names(WITH_BODY))
def test_examples_work_on_the_demo_model(engine: Engine, operation: Operation) -> None:
    answer = engine.client.post(operation.path, json=operation.example)
    assert answer.status_code == 200, answer.text


def integers(value: Any) -> Any:
    """JSON Schema takes 5.0 for an integer; the server does not, like OpenAI's."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [integers(entry) for entry in value]
    return {name: integers(entry) for name, entry in value.items()} if isinstance(value, dict) else value


def repair(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Short answers, pictures that are some, and what no schema says of fields that stand beside each other."""
    for name in (*GRAMMARS, "timeout", "min_tokens", "logit_bias", "continue_final_message", "add_generation_prompt"):
        body.pop(name, None)
    body["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = MAX_TOKENS
    if body.get("max_completion_tokens") is not None:
        body["max_completion_tokens"] = MAX_TOKENS
    if not body.get("stream"):
        body.pop("stream_options", None)
    if path != "/v1/completions" and body.get("top_logprobs") is not None:
        body["logprobs"] = True
    if body.get("bad_words"):  # of a few tokens each
        body["bad_words"] = [word[:4] for word in body["bad_words"]]
    if body.get("mm_processor_kwargs"):
        repair_part(body["mm_processor_kwargs"])
    if isinstance(body.get("text_1"), list):  # as many as of the others, or one
        body["text_1"] = body["text_1"][:1]
    for name in ("query", "documents", "text_1", "text_2"):
        items = body.get(name)
        for item in items if isinstance(items, list) else [items]:
            repair_turn(item if isinstance(item, dict) else {}, is_blocks=False)
    repair_tools(body)
    turns = body.get("input" if path == "/v1/responses" else "messages")
    for turn in turns if isinstance(turns, list) else ():
        repair_turn(turn, is_blocks=path.startswith("/v1/messages"))
    return body


def repair_tools(body: dict[str, Any]) -> None:
    """Names of their own, parameters that a grammar can be made of, and a choice among them."""
    for i, tool in enumerate(body.get("tools") or ()):
        function = tool.get("function", tool)
        function["name"] = f"tool_{i}"
        for name in ("parameters", "input_schema"):
            if isinstance(function.get(name), dict):
                function[name] = {"type": "object"}
    choice = body.get("tool_choice")
    if not body.get("tools"):
        body.pop("tool_choice", None)
    elif isinstance(choice, dict):
        choice.get("function", choice)["name"] = "tool_0"


def repair_turn(turn: dict[str, Any], is_blocks: bool) -> None:
    """Parts that its role may have, and pictures."""
    for name in ("content", "output"):
        parts = turn.get(name)
        if not isinstance(parts, list):
            continue
        if is_blocks:
            parts = [part for part in parts if part["type"] in BLOCKS_OF_ROLES[turn["role"]]]
        elif turn.get("role") == "assistant":
            parts = [part for part in parts if part.get("type") != "input_image"]
        turn[name] = parts
        for part in parts:
            repair_part(part)


def repair_part(part: dict[str, Any]) -> None:
    if "image_url" in part:
        part["image_url"] = {"url": PICTURE, "detail": "low"} if isinstance(part["image_url"], dict) else PICTURE
    for name in ("min_pixels", "max_pixels"):
        part.pop(name, None)
    if part.get("type") == "image":
        part["source"] = {"type": "url", "url": PICTURE}
    for inner in part["content"] if isinstance(part.get("content"), list) else ():
        repair_part(inner)

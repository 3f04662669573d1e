"""What is published is true: requests that schemathesis makes of the OpenAPI document, valid and broken, against the demo model."""

import json
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from server.http.app import ENDPOINTS
from server.openai.status import Status
from tests.e2e.serving import Engine

schemathesis = pytest.importorskip("schemathesis")

NUM_EXAMPLES = 12  # of each operation and mode
MAX_TOKENS = 3
VOCABULARY = 768
OPERATIONS = [("POST", path) for path in ENDPOINTS]
ROUTES = [route for route in Status(cast(Any, None), lambda: False).routes() if route.include_in_schema]
OPERATIONS += [(method, route.path_format) for route in ROUTES for method in route.methods or ()]
OPERATIONS += [("GET", "/openapi.json"), ("GET", "/")]
# A grey square, 32 pixels wide.
PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAACAAAAAgCAIAAAD8GO2jAAAAKElEQVR42u3NQQEAAAQEMCS/6Erw2wqsk9SnqWcCgUAgEAgEAoHgygK+PQHAs0oJ"
    "IwAAAABJRU5ErkJggg=="
)
VIDEOS = ("video_url", "input_video", "video")  # that can be read are large
# What an answer must follow: no schema tells what a schema, a regular expression or a grammar is, nor that there may be one only. And
# fields that go with some prompts or answers only.
REMOVED = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf",
    "json_schema", "output_config", "text", "prompt_logprobs", "truncate_prompt_tokens", "timeout", "min_tokens", "logit_bias",
    "continue_final_message", "add_generation_prompt",
)  # fmt: skip

pytestmark = pytest.mark.clients
BLOCKS_OF_ROLES = {
    "system": ("text",),
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}


@pytest.fixture(scope="module")
def published(engine: Engine) -> Any:
    """The document as the client reads it, where `modes` are chosen by each test."""
    return schemathesis.openapi.from_url(f"{engine.url}/openapi.json")


def requests_of(published: Any, method: str, path: str, mode: str, check: Any) -> None:
    """Calls `check` with cases of a mode: as many as are made."""
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
def test_what_is_valid_is_answered(published: Any, engine: Engine, method: str, path: str) -> None:
    """Red if a request that the document allows is refused, or if an answer is none that it names."""

    def check(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body = repair(path, integers(case.body))
        if case.path_parameters:
            case.path_parameters["name"] = engine.client.get("/v1/models").json()["data"][0]["id"]
        response = case.call(timeout=60)
        if response.status_code == 400 and response.json()["error"].get("code") == "context_length_exceeded":
            return  # what was made is longer than the model's context
        assert response.status_code in (200, 422), (response.status_code, response.text[:500], json.dumps(case.body)[:1500])
        case.validate_response(response)

    requests_of(published, method, path, "POSITIVE", check)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_what_is_broken_is_refused(published: Any, path: str) -> None:
    """Red if a request that the document forbids is answered, or answered with anything but what was wrong."""

    def check(case: Any) -> None:
        response = case.call(timeout=60)
        assert 400 <= response.status_code < 500, (response.status_code, response.text[:500], json.dumps(case.body)[:1500])
        case.validate_response(response)

    requests_of(published, "POST", path, "NEGATIVE", check)


def integers(value: Any) -> Any:
    """JSON Schema takes 5.0 for an integer; the server does not, like OpenAI's."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [integers(entry) for entry in value]
    return {name: integers(entry) for name, entry in value.items()} if isinstance(value, dict) else value


def repair(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Short answers, pictures that are some, ids of the vocabulary, and what no schema says of fields that stand beside each other."""
    body.pop("model", None)
    if path == "/generate":
        told = {name: body[name] for name in ("stream", "return_logprob", "top_logprobs_num", "logprob_start_len") if name in body}
        prompt_logprobs = {"logprob_start_len": -1} if body.get("stream") else {}  # a stream has none
        return {**told, **prompt_logprobs, "text": "x", "sampling_params": {"max_new_tokens": MAX_TOKENS}}
    for name in REMOVED:
        body.pop(name, None)
    is_response = path.startswith("/v1/responses")
    body["max_output_tokens" if is_response else "max_tokens"] = MAX_TOKENS
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
    for name in {"tokens", "stop_token_ids", "allowed_token_ids", "prompt", "input"} & body.keys():
        body[name] = in_vocabulary(body[name])
    if path == "/v1/completions":
        prompt = body["prompt"] or "x"
        body["prompt"] = [entry or "x" for entry in prompt] if isinstance(prompt, list) and not isinstance(prompt[0], int) else prompt
    if path == "/v1/embeddings":
        body.pop("dimensions", None)
        if body.get("messages") is None:
            body.setdefault("input", "x")
        else:
            body.pop("input", None)
    repair_tools(body)
    turns = body.get("input" if is_response else "messages")
    for turn in turns if isinstance(turns, list) else ():
        repair_turn(turn, is_blocks=path.startswith("/v1/messages"))
    return body


def in_vocabulary(value: Any) -> Any:
    """The same with token ids that there are."""
    if isinstance(value, list):
        return [in_vocabulary(entry) for entry in value]
    return value % VOCABULARY if isinstance(value, int) else value


def repair_tools(body: dict[str, Any]) -> None:
    """Of functions alone: names of their own, parameters that a grammar can be made of, and a choice among them."""
    if body.get("tools"):
        body["tools"] = [tool for tool in body["tools"] if tool.get("type") in ("function", None) or "input_schema" in tool]
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
        if choice.get("type") == "custom":
            del body["tool_choice"]
        else:
            choice.get("function", choice)["name"] = "tool_0"


def repair_turn(turn: dict[str, Any], is_blocks: bool) -> None:
    """Parts that its role may have, content where it must be, and pictures."""
    if turn.get("role") in ("user", "system", "developer") and turn.get("content") is None:
        turn["content"] = "x"
    for name in ("content", "output"):
        parts = turn.get(name)
        if not isinstance(parts, list):
            continue
        if is_blocks:
            parts = [part for part in parts if part["type"] in BLOCKS_OF_ROLES[turn["role"]]]
        elif turn.get("role") == "assistant":
            parts = [part for part in parts if part.get("type") != "input_image"]
        parts = [part for part in parts if part.get("type") not in VIDEOS]
        turn[name] = parts or "x"
        for part in parts:
            repair_part(part)


def repair_part(part: dict[str, Any]) -> None:
    if "image_url" in part:
        part["image_url"] = {"url": PICTURE, "detail": "low"} if isinstance(part["image_url"], dict) else PICTURE
    for name in ("min_pixels", "max_pixels", "num_frames", "uuid"):  # beside each other, `fps`, or what another request has sent
        part.pop(name, None)
    if part.get("type") == "image":
        part["source"] = {"type": "url", "url": PICTURE}
    if isinstance(part.get("content"), list):
        part["content"] = [inner for inner in part["content"] if inner.get("type") not in VIDEOS]
        for inner in part["content"]:
            repair_part(inner)

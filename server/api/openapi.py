"""`GET /openapi.json`: what the endpoints take, as the schemas that check it say, with examples. Routed to by `server/http/app.py`.

What pydantic cannot tell of a field, because a validator or other code looks at it, stands in FIELDS. What no single field shows (tools
that a choice must name, a grammar that must be one) is in descriptions only.
"""

import json
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from engine.config import VERSION
from server.api import fields, messages, responses
from server.api.generation import Service
from server.api.messages import CountRequest, MessagesRequest
from server.api.pooling import MAX_INPUTS, EmbeddingRequest, RerankRequest, ScoreRequest
from server.api.responses import ResponsesRequest
from server.api.schema import MAX_PROMPTS, MAX_STOPS, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

Schema = dict[str, Any]

# A grey square, 32 pixels wide.
PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAACAAAAAgCAIAAAD8GO2jAAAAKElEQVR42u3NQQEAAAQEMCS/6Erw2wqsk9SnqWcCgUAgEAgEAoHgygK+PQHAs0oJ"
    "IwAAAABJRU5ErkJggg=="
)
MESSAGES = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PICTURE}}, {"type": "text", "text": "What is this?"}]}]
ITEMS = [{"role": "user", "content": [{"type": "input_image", "image_url": PICTURE}, {"type": "input_text", "text": "What is this?"}]}]
BLOCKS = [
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE.partition(",")[2]}},
    {"type": "text", "text": "What is this?"},
]
TURNS = [{"role": "user", "content": BLOCKS}]

NAME = {"type": "string", "minLength": 1}
ANY_OBJECT = {"type": "object"}
NULL = {"type": "null"}
JSON_OBJECT = {"anyOf": [{"type": "string", "description": "the JSON of an object"}, ANY_OBJECT, NULL]}
TEXT_OR_NULL = {"anyOf": [NAME, NULL]}
CHOICES = {"anyOf": [{"type": "array", "items": NAME, "minItems": 1}, NULL]}
URL = {"anyOf": [{"type": "string", "pattern": r"^([Dd][Aa][Tt][Aa]:|[Hh][Tt][Tt][Pp][Ss]?://|[Ff][Ii][Ll][Ee]://)"}, NULL]}


def _only(kind: str, **properties: Schema) -> Schema:
    """An object of this type with these members."""
    members = {"type": {"const": kind}, **properties}
    return {"type": "object", "properties": members, "required": list(members)}


NAMED_FUNCTION = {"type": "object", "properties": {"name": NAME}, "required": ["name"]}
KINDS_OF_CHOICE = {"enum": ["none", "auto", "required", None]}
STRUCTURED = {"json": JSON_OBJECT, "regex": TEXT_OR_NULL, "choice": CHOICES, "grammar": TEXT_OR_NULL, "json_object": {"type": "boolean"}}
FORMATS = [
    {"type": "object", "properties": {"type": {"enum": ["text", "json_object"]}}, "required": ["type"]},
    _only("json_schema", json_schema={"type": "object", "properties": {"schema": ANY_OBJECT}, "required": ["schema"]}),
    _only("structural_tag"),
]
FIELDS: dict[str, Schema] = {
    "response_format": {"anyOf": [*FORMATS, NULL]},
    "structured_outputs": {
        "anyOf": [{"type": "object", "properties": STRUCTURED, "minProperties": 1, "additionalProperties": False}, NULL]
    },
    "guided_json": JSON_OBJECT,
    "json_schema": JSON_OBJECT,
    "guided_regex": TEXT_OR_NULL,
    "guided_grammar": TEXT_OR_NULL,
    "regex": TEXT_OR_NULL,
    "ebnf": TEXT_OR_NULL,
    "guided_choice": CHOICES,
    "stop": {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": NAME, "maxItems": MAX_STOPS}, NULL]},
    "ChatRequest.tool_choice": {"anyOf": [KINDS_OF_CHOICE, _only("function", function=NAMED_FUNCTION)]},
    "ResponsesRequest.tool_choice": {"anyOf": [KINDS_OF_CHOICE, _only("function", name=NAME)]},
    "ChatRequest.chat_template_kwargs": {
        "anyOf": [{"type": "object", "properties": {"enable_thinking": {"type": "boolean"}, "add_vision_id": {"type": "boolean"}},
                   "additionalProperties": False}, NULL]
    },
    "ImagePart.image_url": {"anyOf": [{"$ref": "#/components/schemas/ImageUrl"}, URL]},
    "ImageUrl.url": URL,
    "InputImage.image_url": URL["anyOf"][0],
    "UrlSource.url": URL["anyOf"][0],
    "CalledFunction.arguments": {"anyOf": [{"type": "string"}, ANY_OBJECT]},
}  # fmt: skip
CONTENT_OR_ROLE = [
    {"properties": {"role": {"enum": ["assistant", "tool"]}}},
    {"properties": {"content": {"not": NULL}}, "required": ["content"]},
]


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of a path; a request with a body has a schema and an example."""

    method: str
    path: str
    summary: str
    models: tuple[type[BaseModel], ...] = ()  # one of them
    example: object = None
    answers: tuple[str, ...] = ("application/json",)
    limited: tuple[dict[str, tuple[object, ...]], ...] = (fields.LIMITED,)  # fields beside those of the schema


STREAMED = ("application/json", "text/event-stream")
OPERATIONS = (
    Operation(
        "post", "/v1/chat/completions", "An answer to messages with text and images", (ChatRequest,),
        {"messages": MESSAGES, "max_tokens": 16}, STREAMED,
    ),
    Operation(
        "post", "/v1/completions", "How a text, or token ids, may go on", (CompletionRequest,), {"prompt": "What number", "max_tokens": 8},
        STREAMED,
    ),
    Operation(
        "post", "/v1/responses", "The same as chat completions in OpenAI's newer dialect", (ResponsesRequest,),
        {"input": ITEMS, "max_output_tokens": 16}, STREAMED, (responses.LIMITED, fields.LIMITED),
    ),
    Operation(
        "post", "/v1/messages", "The same in Anthropic's dialect", (MessagesRequest,), {"messages": TURNS, "max_tokens": 16}, STREAMED,
        (messages.LIMITED, fields.LIMITED),
    ),
    Operation(
        "post", "/v1/messages/count_tokens", "How long a prompt in Anthropic's dialect is", (CountRequest,), {"messages": TURNS},
        limited=(messages.LIMITED, fields.LIMITED),
    ),
    Operation("post", "/v1/embeddings", "A vector of a text, or of messages with images", (EmbeddingRequest,), {"input": "a cat"}),
    *(
        Operation(
            "post", path, "Documents by how well they answer a query", (RerankRequest,),
            {"query": "Which one is grey?", "documents": ["a cat", {"content": [{"type": "image_url", "image_url": {"url": PICTURE}}]}]},
        )
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    *(
        Operation(
            "post", path, "How well one text answers another", (ScoreRequest,), {"text_1": "a pet", "text_2": ["a cat", "a car"]},
        )
        for path in ("/score", "/v1/score")
    ),
    Operation("post", "/tokenize", "Token ids of messages, or of a text", (ChatRequest, TokenizeRequest), {"messages": MESSAGES}),
    Operation("post", "/detokenize", "The text of token ids", (DetokenizeRequest,), {"tokens": [5, 6, 7]}),
    Operation("post", "/reset_prefix_cache", "Later requests find no beginning computed", answers=()),
    Operation("post", "/flush_cache", "Later requests find nothing, embeddings of images included", answers=("text/plain",)),
    Operation("get", "/v1/models", "What is served"),
    Operation("get", "/v1/models/{name}", "One of them"),
    Operation("get", "/health", "Whether the engine makes progress"),
    Operation("get", "/health/live", "Whether the server lives"),
    Operation("get", "/ping", "As /health"),
    Operation("post", "/ping", "As /health"),
    Operation("get", "/metrics", "Numbers for Prometheus", answers=("text/plain",)),
    Operation("get", "/load", "Choices that clients wait for"),
    Operation("get", "/version", "The version of the server"),
    Operation("get", "/server_info", "Its settings, without secrets, and its latest numbers"),
    Operation("get", "/tokenizer_info", "The tokenizer's settings and the chat template"),
    Operation("get", "/openapi.json", "This description"),
    Operation("get", "/docs", "This description as a page", answers=("text/html",)),
    Operation("get", "/", "A page to try the model", answers=("text/html",)),
)  # fmt: skip


class Description:
    """The document, made once."""

    def __init__(self, service: Service):
        checkpoint = service.checkpoint
        self.document = describe(service.model_names, checkpoint.vocab_size, checkpoint.hidden_size)
        self._content = json.dumps(self.document).encode()

    async def show(self, request: Request) -> Response:
        return Response(self._content, media_type="application/json")


def describe(model_names: tuple[str, ...], vocab_size: int, hidden_size: int) -> Schema:
    """OpenAPI 3.1 of a server that serves these names."""
    models = {model for operation in OPERATIONS for model in operation.models}
    _, definitions = models_json_schema([(model, "validation") for model in models], ref_template="#/components/schemas/{model}")
    schemas = definitions["$defs"]
    for schema in schemas.values():
        _correct(schema["title"], schema, vocab_size)
    _correct_embeddings(schemas["EmbeddingRequest"], vocab_size, hidden_size)
    for operation in OPERATIONS:
        for model in operation.models:
            _add_limited(schemas[model.__name__], operation)
            schemas[model.__name__]["properties"]["model"] = {"enum": [*model_names, "", None]}
    paths: Schema = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, model_names)
    licence = {"name": "Apache-2.0", "identifier": "Apache-2.0"}
    info = {"title": "A small serving engine for Qwen3-VL", "version": VERSION, "license": licence}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": {**schemas, "Error": ERROR}}}


TEXT = {"type": "string"}
ERROR = {
    "type": "object",
    "properties": {"error": {"type": "object", "properties": {"type": TEXT, "message": TEXT}, "required": ["type", "message"]}},
    "required": ["error"],
}


def _correct(title: str, schema: Schema, vocab_size: int) -> None:
    """Puts in what pydantic does not know."""
    properties = schema.get("properties", {})
    for name, value in properties.items():
        found = FIELDS.get(f"{title}.{name}", FIELDS.get(name) if title.endswith("Request") else None)
        if found is not None:
            properties[name] = deepcopy(found)
        elif name in ("stop_token_ids", "allowed_token_ids", "tokens"):
            array = value if "items" in value else value["anyOf"][0]
            array["items"]["exclusiveMaximum"] = vocab_size
    if title == "CompletionRequest":
        token_ids = {"type": "array", "items": {"type": "integer", "minimum": 0, "exclusiveMaximum": vocab_size}, "minItems": 1}
        batches = ({"type": "array", "items": items, "minItems": 1, "maxItems": MAX_PROMPTS} for items in (NAME, token_ids))
        properties["prompt"] = {"anyOf": [NAME, token_ids, *batches]}
    if title == "Message" and "tool_call_id" in properties:
        schema["anyOf"] = CONTENT_OR_ROLE


def _correct_embeddings(schema: Schema, vocab_size: int, hidden_size: int) -> None:
    properties = schema["properties"]
    token_ids = {"type": "array", "items": {"type": "integer", "minimum": 0, "exclusiveMaximum": vocab_size}, "minItems": 1}
    inputs = {"type": "array", "items": {"anyOf": [TEXT, token_ids]}, "minItems": 1, "maxItems": MAX_INPUTS}
    properties["input"] = {"anyOf": [TEXT, token_ids, inputs]}
    properties["dimensions"]["anyOf"][0]["maximum"] = hidden_size
    is_input = {"required": ["input"], "properties": {"messages": NULL}}
    schema["anyOf"] = [is_input, {"required": ["messages"], "properties": {"messages": {"not": NULL}, "input": False}}]


def _add_limited(schema: Schema, operation: Operation) -> None:
    """Fields that are not implemented, with the values that they may have."""
    for limited in operation.limited:
        for name, allowed in limited.items():
            schema["properties"].setdefault(name, {"enum": [*allowed, None]})


def _operation(operation: Operation, model_names: tuple[str, ...]) -> Schema:
    error = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    schemas = {"application/json": ANY_OBJECT, "text/event-stream": {}}
    answer = {kind: {"schema": schemas.get(kind, TEXT)} for kind in operation.answers}
    said: Schema = {
        "summary": operation.summary,
        "operationId": f"{operation.method}{operation.path}",
        "responses": {
            "200": {"description": "The answer", "content": answer},
            "4XX": {"description": "The request's fault", **error},
            "5XX": {"description": "The server's fault, or its state", **error},
        },
    }
    if operation.path.startswith("/health") or operation.path == "/ping":
        said["responses"]["503"] = {"description": "It does not", "content": {"application/json": {"schema": ANY_OBJECT}}}
    if "{name}" in operation.path:
        said["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"enum": list(model_names)}}]
    if operation.models:
        references = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in operation.models]
        schema = references[0] if len(references) == 1 else {"anyOf": references}
        content = {"schema": schema, "examples": {"example": {"value": operation.example}}}
        said["requestBody"] = {"required": True, "content": {"application/json": content}}
    return said

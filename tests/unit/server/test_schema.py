"""The request schema: what is accepted, what is refused and which field the refusal names."""

import hashlib
import json
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest

from engine.wire.grammar import Grammar
from engine.wire.messages import API_ARENA, ErrorInfo, MediaRef, Region
from engine.wire.params import MAX_BAD_WORDS, MAX_BIASED, MAX_LOGIT_EDITS, MAX_STOP_IDS, PARAMETERS
from server.api.chat.completions import read_conversation
from server.api.chat.endpoint import sampling_params
from server.api.dialects import anthropic, responses
from server.api.http.scan import Scanner
from server.api.schema.formats import read_grammar
from server.api.schema.requests import EFFORTS, ChatRequest, CompletionRequest, GenerationRequest
from server.api.schema.validate import OFF, REFUSED, check, read_object
from server.checkpoint import SamplingDefaults
from server.errors import RequestError

SEED = 5
DEFAULTS = SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20)
VOCAB_SIZE = 5000
TOOLS = [{"type": "function", "function": {"name": "f"}}]
URL = "https://x.org/a"
HELLO = [{"role": "user", "content": "hello"}]


def read_messages(request: ChatRequest, scanner: Scanner, offset: int = 0) -> tuple[list[dict[str, object]], list[Any]]:
    body: Any = SimpleNamespace(scanner=scanner, region=SimpleNamespace(offset=offset), credentials=b"")
    return read_conversation(request, request.messages, body)


def parse(**fields: object) -> ChatRequest:
    return parse_body(json.dumps({"messages": HELLO, **fields}).encode())


def parse_body(body: bytes, model: type[GenerationRequest] = ChatRequest) -> Any:
    request = check(model, read_object(body))
    request.check_together(VOCAB_SIZE)
    return request


def user(content: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content}]}


def image(url: object, **extra: object) -> dict[str, object]:
    return user([{"type": "image_url", "image_url": url, **extra}])


def refusal(model: type[GenerationRequest] = ChatRequest, **fields: object) -> ErrorInfo:
    needed = {"messages": HELLO} if model is ChatRequest else {}
    with pytest.raises(RequestError) as caught:
        request = parse_body(json.dumps({**needed, **fields}).encode(), model)
        if isinstance(request, ChatRequest):
            read_messages(request, Scanner("nonce", 4))
        pytest.fail(f"accepted: {str(fields)[:200]}")
    return caught.value.info


NAN = float("nan")
BAD: dict[str, list[object]] = {
    "temperature": ["hot", NAN, float("inf"), True], "max_tokens": [True, "5", 5.5, 1 << 64], "max_completion_tokens": [0, 1 << 63],
    "n": [0, 17, True], "stop": [["a"] * 129, 3], "stream": ["false", 1], "logprobs": [0, 1],
    "top_logprobs": [5], "enable_thinking": ["no"], "chat_template_kwargs": ["x", {str(i): 1 for i in range(65)}],
    "continue_final_message": [True], "tools": [TOOLS * 2], "tool_choice": ["required"],
    "logit_bias": [{"x": 5}, {str(VOCAB_SIZE): 5}, [5]], "bad_words": ["x", ["x"] * 65], "messages": [[], "hello", HELLO * 10_001],
    "mm_processor_kwargs": [5],
}  # fmt: skip


PART = "messages[0].content[0]"
CALL = "messages[1].tool_calls[0].function"


BAD_INSIDE: list[tuple[str, dict[str, object]]] = [
    ("stop", {"stop": ""}), ("stop[0]", {"stop": [5]}),
    ("stop_token_ids[1]", {"stop_token_ids": [3, VOCAB_SIZE]}),
    ("stream_options.include_usage", {"stream_options": {"include_usage": 7}}), ("logit_bias[1]", {"logit_bias": {"1": 101}}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}), ("min_tokens", {"min_tokens": 6, "max_tokens": 5}),
    ("tools[0].function.name", {"tools": [{"type": "function", "function": {"name": ""}}]}),
    *(("tools[0].function.parameters", {"tools": [{"type": "function", "function": {"name": "g", "parameters": {"properties": bad}}}]})
      for bad in ([1], "x", True, {"a": 1})),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}),
    ("continue_final_message", {"continue_final_message": True, "add_generation_prompt": True}),
    ("mm_processor_kwargs.crop_size", {"mm_processor_kwargs": {"crop_size": 2}}),
    ("messages[0].role", {"messages": [{"role": "", "content": "x"}]}), ("messages[0]", {"messages": [{"role": "user"}]}),
    ("messages[0].content", user(5)), (PART, user(["x"])), (PART + ".text", user([{"type": "text"}])),
    (PART + ".video_url.url", user([{"type": "video_url", "video_url": "x"}])),
    (PART + ".image_url", image(None)), (PART + ".image_url", user([{"type": "image_url"}])),
    (PART + ".image_url", image({})), (PART + ".video_url", user([{"type": "video_url", "video_url": {}}])),
    (PART + ".image_url.url", image({"url": 5})), (PART + ".min_pixels", image(URL, min_pixels="5")),
    (PART + ".image_url.max_pixels", image({"url": URL, "max_pixels": 0})),
    *((PART + ".image_url.url", image(url)) for url in ("ftp://x/y", "/etc/passwd", "javascript:x", "", "nonce", "blob:x")),
    (CALL, {"messages": [*HELLO, {"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}]}),
    (CALL + ".arguments", {"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]}),
    ("messages[1].function_call", {"messages": [*HELLO, {"role": "assistant", "function_call": {"name": "f"}}]}),
]  # fmt: skip


def test_a_bad_value_is_a_400_that_names_the_field() -> None:
    for name, fields in [*((name, {name: value}) for name, values in BAD.items() for value in values), *BAD_INSIDE]:
        info = refusal(**fields)
        assert (info.status, info.param) == (400, name) and name in info.message, (name, str(fields)[:200], info)


def test_very_many_bad_values_are_one_error() -> None:
    """Red if an error is made of each: a body of 2 MB took 1.3 GB and two seconds."""
    many: list[dict[str, object]] = [user([1] * 100_000), {"chat_template_kwargs": {str(i): "x" for i in range(40_000)}}]
    for fields in many:
        body = json.dumps({"messages": HELLO, **fields}).encode()
        tracemalloc.start()
        with pytest.raises(RequestError):
            parse_body(body)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 10e6


def test_what_is_no_json_object_is_a_400() -> None:
    nested = b'{"messages": ' + b"[" * 1000 + b"]" * 1000 + b"}"
    for body in (b"", b"{", b"[]", b"null", b'"x"', nested, b'{"x": ' + b"[" * 100_000, b"\xff\xfe"):
        with pytest.raises(RequestError) as caught:
            parse_body(body)
        assert caught.value.info.status == 400, body[:20]
        assert body is not nested or "recursion limit" in caught.value.info.message


def test_fields_that_change_nothing_are_accepted() -> None:
    parse(
        store=True, metadata={"a": "b"}, user="me", service_tier="auto", parallel_tool_calls=True, n=1, logprobs=False, seed=None,
        enable_thinking=None, max_tokens=None, tools=[], tool_choice="auto", response_format={"type": "text"}, presence_penalty=0.0,
        logit_bias=None, frequency_penalty=0, repetition_penalty=1.0, stop=None, top_k=0, stream_options=None, top_logprobs=0,
    )  # fmt: skip
    for given, stops in ((None, []), ("x", ["x"]), (["x", "y"], ["x", "y"]), ([], [])):
        assert parse(stop=given).stop == stops
    for prompt, prompts in (("x", ["x"]), (["x", "y"], ["x", "y"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])):
        assert parse_body(json.dumps({"prompt": prompt}).encode(), CompletionRequest).prompts == prompts


def test_defaults_come_from_the_checkpoint() -> None:
    params = sampling_params(parse(), DEFAULTS, SEED)
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.max_tokens) == (0.7, 0.8, 20, 0.0, None)
    params = sampling_params(parse(temperature=0, top_k=-1, max_tokens=5, max_completion_tokens=6), DEFAULTS, SEED)
    assert (params.temperature, params.top_k, params.max_tokens) == (0, 0, 6)
    assert [sampling_params(parse(**fields), DEFAULTS, 5).seed for fields in ({}, {"seed": 7})] == [5, 7]
    recommended = SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20, min_p=0.2, repetition_penalty=1.05)
    for fields, expected in (({}, (0.2, 1.05)), ({"min_p": 0, "repetition_penalty": 1}, (0, 1))):
        params = sampling_params(parse(**fields), recommended, SEED)
        assert (params.min_p, params.repetition_penalty) == expected


def test_every_sampling_parameter_has_limits_and_reaches_the_sampler() -> None:
    values = {"logit_bias": {"7": -100, "8": 0.5}, "stop_token_ids": [3, 4], "allowed_token_ids": [5], "ignore_eos": True}
    for name, parameter in PARAMETERS.items():
        value = values.get(name, ["x"] if name == "bad_words" else 1 if parameter.default in (None, 0) else 0.5)
        params = sampling_params(parse(**{name: value}), DEFAULTS, SEED)
        expected = {"logit_bias": ((7, -100), (8, 0.5)), "bad_words": ()}.get(name, tuple(value) if isinstance(value, list) else value)
        assert getattr(params, name) == expected, name
        for kind, bound in parameter.bounds.items():
            if kind[1] in "et" and not isinstance(value, list | dict):
                step = 0 if kind[1] == "t" else 1
                assert refusal(**{name: bound - step if kind[0] == "g" else bound + step}).param == name, (name, kind)
    assert sampling_params(parse(logprobs=True, top_logprobs=20), DEFAULTS, SEED).logprobs == 20
    assert [sampling_params(parse(logprobs=flag), DEFAULTS, SEED).logprobs for flag in (True, False)] == [0, None]
    assert MAX_BIASED + MAX_STOP_IDS + MAX_BAD_WORDS + 8 < MAX_LOGIT_EDITS


def test_images_in_any_message_become_indices() -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be kind"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": "https://x.org/a", "uuid": "u"}, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": None, "reasoning": "hm"},
        {"role": "tool", "content": "42", "tool_call_id": "c", "name": "n"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "FILE:///b", "detail": "low"}}]},
    ]
    shown, media = read_messages(parse(messages=messages), Scanner("nonce", 4))
    name = hashlib.sha256(2 * hashlib.sha256().digest() + b"u").digest()
    assert media == [MediaRef(url="https://x.org/a", name=name), MediaRef(url="FILE:///b", cap=512 * 512)]
    assert shown == [
        {"role": "system", "content": [{"type": "text", "text": "be kind"}]},
        {"role": "user", "content": [{"type": "image", "media": 0}, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        {"role": "tool", "content": "42"},
        {"role": "user", "content": [{"type": "image", "media": 1}]},
    ]


def test_references_are_honoured_in_urls_only() -> None:
    uri = "data:image/png;base64,QUJD"
    messages = [{"role": "user", "content": [{"type": "text", "text": uri}, {"type": "image_url", "image_url": {"url": uri}}]}]
    body = json.dumps({"messages": messages}).encode()
    scanner = Scanner("nonce", 4)
    scanner.feed(body)
    request = parse_body(scanner.json())
    _, media = read_messages(request, scanner, 4096)
    assert scanner.used == {1}
    assert media == [MediaRef(Region(API_ARENA, 4096 + body.rindex(b"QUJD"), 4))]


def test_refused_fields() -> None:
    names = "audio functions input_ids lora_path prompt_embeds stop_regex use_beam_search"
    assert {*names.split()} <= REFUSED
    for name in REFUSED:
        model, needed = (ChatRequest, {"messages": HELLO}) if name not in ChatRequest.model_fields else (CompletionRequest, {"prompt": "x"})
        for value in OFF if name not in model.model_fields else ():
            parse_body(json.dumps({**needed, name: value}).encode(), model)
        for value in ("something", 17, ["x"], {"a": 1}):
            info = refusal(model, **needed, **{name: value})
            assert (info.status, info.param) == (400, name)


CODES: list[tuple[str, dict[str, object]]] = [
    ("invalid_type", {"messages": None}), ("invalid_value", {"max_tokens": 0}), ("invalid_value", user([{"type": "audio"}])),
    ("missing_required_parameter", {"tools": [{"type": "function"}]}), ("unsupported_parameter", {"lora_path": "x"}),
]  # fmt: skip


def test_an_error_says_its_kind() -> None:
    for code, fields in CODES:
        assert refusal(**fields).code == code, fields


def test_one_table_of_efforts() -> None:
    for effort, thinks in EFFORTS.items():
        assert parse(reasoning_effort=effort, verbosity="low").template_kwargs == {"enable_thinking": thinks}
    assert parse(reasoning_effort="high", enable_thinking=False).template_kwargs == {"enable_thinking": False}
    assert parse(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}).template_kwargs == {"enable_thinking": True}
    assert parse().template_kwargs == {}
    scanner, value = Scanner("nonce", 4), {"messages": HELLO, "max_tokens": 5}
    for effort in ("low", "medium", "high", "xhigh", "max"):
        asked = check(anthropic.MessagesRequest, {**value, "output_config": {"effort": effort}}).chat_body(scanner)
        response = check(responses.ResponsesRequest, {"input": "x", "reasoning": {"effort": effort}}).chat_body(scanner)
        assert asked["reasoning_effort"] == response["reasoning"].effort == effort


BAD_COMPLETIONS: list[tuple[str, dict[str, object]]] = [
    ("prompt", {}), *(("prompt", {"prompt": one}) for one in ("", [], [[]], 5, [True], ["a", 5], [VOCAB_SIZE], [[-1]], ["x"] * 129)),
    ("suffix", {"suffix": "y"}), ("logprobs", {"logprobs": 21}), ("logprobs", {"logprobs": True}),
    ("max_tokens", {"max_tokens": -1, "echo": True}), ("echo", {"echo": 1}),
]  # fmt: skip


def test_bad_completions() -> None:
    for name, fields in BAD_COMPLETIONS:
        info = refusal(CompletionRequest, **fields if name == "prompt" else {"prompt": "x", **fields})
        assert info.status == 400 and str(info.param).startswith(name), fields


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
HELD = Grammar("json_schema", json.dumps(SCHEMA))
CHOICE, REGEX = Grammar("ebnf", 'root ::= "a" | "b"'), Grammar("regex", "a+")
OBJECT = Grammar("json_schema", '{"type": "object"}')
GRAMMARS: list[tuple[Grammar | None, dict[str, object]]] = [
    (HELD, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}}),
    (HELD, {"json_schema": SCHEMA}), (HELD, {"json_schema": json.dumps(SCHEMA)}),
    (HELD, {"structured_outputs": {"json": SCHEMA, "regex": None}}), (CHOICE, {"structured_outputs": {"choice": ["a", "b"]}}),
    (OBJECT, {"response_format": {"type": "json_object"}}),
    (REGEX, {"structured_outputs": {"regex": "a+"}}),
    (CHOICE, {"guided_grammar": CHOICE.text, "structured_outputs": {"grammar": CHOICE.text}}),  # as the guidance library
    (Grammar("ebnf", 'root ::= "a"'), {"ebnf": 'root ::= "a"'}), (REGEX, {"response_format": {"type": "text"}, "regex": "a+"}),
    (None, {"response_format": {"type": "text"}}), (None, {}),
]  # fmt: skip
BAD_GRAMMARS: list[tuple[str, dict[str, object]]] = [
    ("response_format", {"response_format": {"type": "xml"}}), ("response_format", {"response_format": "json"}),
    ("response_format.json_schema.schema", {"response_format": {"type": "json_schema"}}), ("json_schema", {"json_schema": "{"}),
    ("structured_outputs.choice[1]", {"structured_outputs": {"choice": ["a", 5]}}), ("regex", {"regex": ""}),
    ("structured_outputs", {"structured_outputs": {"xml": 1}}),
    ("structured_outputs", {"structured_outputs": {"json": {}, "regex": "a"}}),
    ("response_format", {"regex": "a", "response_format": {"type": "json_object"}}),
]  # fmt: skip


def test_grammars_by_all_their_names() -> None:
    for expected, fields in GRAMMARS:
        assert read_grammar(parse(**fields))[0] == expected, fields
    for name, fields in BAD_GRAMMARS:
        with pytest.raises(RequestError) as caught:
            read_grammar(parse(**fields))
        assert (caught.value.info.status, caught.value.info.param) == (400, name), fields


def test_limits_on_pixels() -> None:
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": "https://a", "max_pixels": 100}, "max_pixels": 200, "min_pixels": 50},
        {"type": "image_url", "image_url": {"url": "https://a", "detail": "low", "max_pixels": 9}},
        {"type": "image_url", "image_url": {"url": "https://a", "detail": "high"}},
    ]
    request = parse(messages=[{"role": "user", "content": parts}], mm_processor_kwargs={"min_pixels": 7, "max_pixels": 8})
    _, media = read_messages(request, Scanner("nonce", 4))
    assert [(ref.min_pixels, ref.max_pixels, ref.cap) for ref in media] == [(50, 100, None), (7, 9, 512 * 512), (7, 8, None)]

"""The request schema: what is accepted, what is refused and which field the refusal names."""

import hashlib
import json
import logging
import re
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest

from engine.messages import API_ARENA, MediaRef, Region
from engine.params import MAX_BAD_WORDS, MAX_LOGIT_EDITS, Grammar
from server.api.chat.conversation import Conversation, read_conversation
from server.api.chat.media import ProcessorKwargs
from server.api.chat.schema import EFFORTS, ChatRequest, CompletionRequest, GenerationRequest
from server.api.endpoint import sampling_params
from server.api.fields import HARMLESS, LIMITED, UnknownFields
from server.api.grammar import read_grammar
from server.api.messages import endpoint as messages
from server.api.messages.schema import MessagesRequest
from server.api.responses import endpoint as responses
from server.api.responses.schema import ResponsesRequest
from server.checkpoint import SamplingDefaults
from server.errors import RequestError
from server.http.scan import Scanner
from server.http.validate import check, read_object

SEED = 5
DEFAULTS = SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20)
VOCAB_SIZE = 5000
TOOLS = [{"type": "function", "function": {"name": "f"}}]
HELLO = [{"role": "user", "content": "hello"}]


def read_messages(request: ChatRequest, scanner: Scanner, offset: int = 0, limits: ProcessorKwargs | None = None) -> Conversation:
    body: Any = SimpleNamespace(scanner=scanner, region=SimpleNamespace(offset=offset), credentials=b"")
    return read_conversation(request.messages, body, None, limits)


def parse(**fields: object) -> ChatRequest:
    return parse_body(json.dumps({"messages": HELLO, **fields}).encode(), UnknownFields())


def parse_body(body: bytes, unknown: UnknownFields, model: type[GenerationRequest] = ChatRequest) -> Any:
    """As an endpoint does it."""
    request = check(model, read_object(body))
    unknown.check(request.model_extra or {})
    request.check_together(VOCAB_SIZE)
    return request


def image(url: object, **extra: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": url, **extra}]}]


ARGUMENTS = "messages[1].tool_calls[0].function.arguments"
BAD = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": float("nan")}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": 1 << 63}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": -5}, "max_completion_tokens"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": ""}, "stop[0]"),
    ({"stop": "a" * 4097}, "stop[0]"),
    ({"stop": 3}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stream": "perhaps"}, "stream"),
    ({"stream_options": {"include_usage": 7}}, "stream_options.include_usage"),
    ({"chat_template_kwargs": {"tools": True}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"enable_thinking": "{{ x }}"}}, "chat_template_kwargs.enable_thinking"),
    ({"n": 17}, "n"),
    ({"n": 0}, "n"),
    ({"priority": "high"}, "priority"),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tools": TOOLS, "tool_choice": "perhaps"}, "tool_choice"),
    ({"tools": TOOLS * 2}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5.5}, "max_tokens"),
    ({"temperature": True}, "temperature"),
    ({"n": True}, "n"),
    ({"stream": "false"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"user": 5}, "user"),
    ({"stop_token_ids": [3, VOCAB_SIZE]}, "stop_token_ids[1]"),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
    ({"stop": [5]}, "stop[0]"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"logprobs": 0}, "logprobs"),
    ({"enable_thinking": "no"}, "enable_thinking"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"messages": image({"url": "https://x.org/a", "max_pixels": 0})}, "messages[0].content[0].image_url.max_pixels"),
    ({"messages": image({"url": "https://x.org/a", "resized_height": 64})}, "messages[0].content[0].image_url.resized_height"),
    ({"messages": image({"url": "https://x.org/a"}, min_pixels="5")}, "messages[0].content[0].min_pixels"),
    ({"mm_processor_kwargs": {"crop_size": 2}}, "mm_processor_kwargs.crop_size"),
    ({"mm_processor_kwargs": {"fps": 2.0, "num_frames": 3}}, "mm_processor_kwargs"),
    ({"media_io_kwargs": {"audio": {}}}, "media_io_kwargs.audio"),
    ({"messages": image({"url": "https://x.org/a", "detail": "ultra"})}, "messages[0].content[0].image_url.detail"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {"x": 5}}, "logit_bias"),
    ({"logit_bias": {str(VOCAB_SIZE): 5}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({"bad_words": "x"}, "bad_words"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"bad_words": ["x"] * 65}, "bad_words"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": HELLO * 10_001}, "messages"),
    ({"max_tokens": 1 << 64}, "max_tokens"),
    ({"max_completion_tokens": 1 << 63}, "max_completion_tokens"),
    ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "audio_url", "audio_url": {"url": "x"}}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": "x"}]}]}, "messages[0].content[0].video_url.url"),
    ({"messages": [{"role": "user", "content": [{"type": "video", "video": []}]}]}, "messages[0].content[0].video"),
    ({"messages": image({"url": 5})}, "messages[0].content[0].image_url.url"),
    ({"messages": image(None)}, "messages[0].content[0].image_url"),
    ({"messages": [*HELLO, {"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}]}, "messages[1].tool_calls[0].function"),
    ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]}, ARGUMENTS),
    ({"messages": [*HELLO, {"role": "assistant", "function_call": {"name": "f"}}]}, "messages[1].function_call"),
]


@pytest.mark.parametrize(("fields", "name"), BAD, ids=[f"{name}-{i}" for i, (_, name) in enumerate(BAD)])
def test_a_bad_value_is_a_400_that_names_the_field(fields: dict[str, object], name: str) -> None:
    """Red if a validation is lost, or if its message stops naming the field."""
    with pytest.raises(RequestError) as caught:
        read_messages(parse(**fields), Scanner("nonce", 4))
    assert caught.value.info.status == 400
    assert caught.value.info.param == name
    assert name in caught.value.info.message
    assert not re.search(r"Input should|pydantic|\bTrue\b|\bFalse\b|\bNone\b|valid (string|integer|list)", caught.value.info.message)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": "text"}, "response_format: must be an object of type 'text', "),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]: content parts are of type 'text', "),
        ({"messages": [{"role": "user", "content": {"type": "list"}}]}, "messages[0].content: must be a string"),
    ],
)
def test_the_type_of_an_object_is_no_kind_of_json(fields: dict[str, object], words: str) -> None:
    """Red if a text is judged as an object whose `type` is "text"."""
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert caught.value.info.message.startswith(words)


def test_very_many_bad_values_are_one_error() -> None:
    """Red if an error is made of each: a body of 2 MB took 1.3 GB and two seconds."""
    for fields in (
        {"messages": [{"role": "user", "content": [1] * 100_000}]},
        {"messages": HELLO, "chat_template_kwargs": {str(i): "x" for i in range(40_000)}},
    ):
        tracemalloc.start()
        body = json.dumps(fields).encode()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        with pytest.raises(RequestError):
            parse_body(body, UnknownFields())
        peak = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
        assert peak < 10e6


def test_what_is_no_json_object_is_a_400() -> None:
    """Red if a malformed body escapes as another error than our own, or recurses."""
    nested = b'{"messages": ' + b"[" * 1000 + b"]" * 1000 + b"}"
    for body in (b"", b"{", b"[]", b"null", b'"x"', nested, b'{"x": ' + b"[" * 100_000, b"\xff\xfe"):
        with pytest.raises(RequestError) as caught:
            parse_body(body, UnknownFields())
        assert caught.value.info.status == 400, body[:20]


def test_depth_is_no_lack_of_validity() -> None:
    """Red if a client with a deep schema is told that its JSON is none."""
    with pytest.raises(RequestError) as caught:
        read_object(b'{"x": ' + b"[" * 300 + b"]" * 300 + b"}")
    assert "nested too deeply" in caught.value.info.message


DEFAULTS_OF_CLIENTS = {
    "store": True, "metadata": {"a": "b"}, "user": "me", "service_tier": "auto", "parallel_tool_calls": True, "n": 1, "logprobs": False,
    "enable_thinking": None, "max_tokens": None, "tools": [], "tool_choice": "auto",
    "response_format": {"type": "text"}, "presence_penalty": 0.0, "logit_bias": None,
    "frequency_penalty": 0, "repetition_penalty": 1.0, "stop": None, "seed": None, "top_k": 0, "stream_options": None,
    "top_logprobs": 0,
}  # fmt: skip


def test_fields_that_change_nothing_are_accepted() -> None:
    """Red if a client that sends the usual defaults is refused."""
    parse(**DEFAULTS_OF_CLIENTS)


def test_an_unknown_field_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """Red if unknown fields are refused, not logged, or logged for every request; clients must not be able to fill the log."""
    unknown = UnknownFields()
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            parse_body(json.dumps({"messages": HELLO, "frobnicate": 1}).encode(), unknown)
        assert caplog.text.count("frobnicate") == 1
        for i in range(1000):
            unknown.check({f"field{i}": 1})
    assert len(caplog.records) <= 100


def test_defaults_come_from_the_checkpoint() -> None:
    """Red if a silent request stops using generation_config.json, or if a given value loses against it."""
    params = sampling_params(parse(), DEFAULTS, SEED)
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.max_tokens) == (0.7, 0.8, 20, 0.0, None)
    params = sampling_params(
        parse(temperature=0, top_p=0.5, top_k=-1, min_p=0.1, seed=7, max_tokens=5, max_completion_tokens=6), DEFAULTS, SEED
    )
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed, params.max_tokens) == (0, 0.5, 0, 0.1, 7, 6)
    assert [sampling_params(parse(**fields), DEFAULTS, 5).seed for fields in ({}, {"seed": 7})] == [5, 7]
    recommended = SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20, min_p=0.2, repetition_penalty=1.05)
    for fields, expected in (({}, (0.2, 1.05)), ({"min_p": 0, "repetition_penalty": 1}, (0, 1))):
        params = sampling_params(parse(**fields), recommended, SEED)
        assert (params.min_p, params.repetition_penalty) == expected


def test_what_changes_logits_reaches_the_sampler() -> None:
    """Red if a field is read and then dropped."""
    fields: dict[str, Any] = {
        "presence_penalty": -2, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {"7": -100, "8": 0.5}, "min_tokens": 3,
        "logprobs": True,
    }  # fmt: skip
    params = sampling_params(parse(**fields), DEFAULTS, SEED)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (-2, 0.5, 1.1)
    assert (params.logit_bias, params.min_tokens, params.logprobs) == (((7, -100), (8, 0.5)), 3, 0)
    assert sampling_params(parse(logprobs=True, top_logprobs=20), DEFAULTS, SEED).logprobs == 20
    assert sampling_params(parse(logprobs=False), DEFAULTS, SEED).logprobs is None
    most = sampling_params(parse(logit_bias={str(i): 1 for i in range(500)}, stop_token_ids=list(range(256)), min_tokens=1), DEFAULTS, SEED)
    assert len(most.logit_bias) + len(most.stop_token_ids) + MAX_BAD_WORDS + 8 < MAX_LOGIT_EDITS


@pytest.mark.parametrize(("given", "expected"), [(None, []), ("x", ["x"]), (["x", "y"], ["x", "y"]), ([], [])])
def test_stop_takes_every_form(given: object, expected: list[str]) -> None:
    """Red if a form of `stop` that OpenAI allows is lost."""
    assert parse(stop=given).stop == expected


def test_images_in_any_message_become_indices() -> None:
    """Red if URL forms, extra keys, roles or the order of images and text are lost on the way to the processor."""
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be kind"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": "https://x.org/a", "uuid": "u"}, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": None, "reasoning": "hm"},
        {"role": "tool", "content": "42", "tool_call_id": "c", "name": "n"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "FILE:///b", "detail": "low"}}]},
    ]
    conversation = read_messages(parse(messages=messages), Scanner("nonce", 4))
    name = hashlib.sha256(2 * hashlib.sha256().digest() + b"u").digest()
    assert conversation.media == [MediaRef(url="https://x.org/a", name=name), MediaRef(url="FILE:///b", cap=512 * 512)]
    assert conversation.messages == [
        {"role": "system", "content": [{"type": "text", "text": "be kind"}]},
        {"role": "user", "content": [{"type": "image", "media": 0}, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        {"role": "tool", "content": "42"},
        {"role": "user", "content": [{"type": "image", "media": 1}]},
    ]


def test_references_are_honoured_in_urls_only() -> None:
    """Red if a text that is a data URI is treated as media, or if a payload's place in the arena is computed wrongly."""
    uri = "data:image/png;base64,QUJD"
    messages = [{"role": "user", "content": [{"type": "text", "text": uri}, {"type": "image_url", "image_url": {"url": uri}}]}]
    body = json.dumps({"messages": messages}).encode()
    scanner = Scanner("nonce", 4)
    scanner.feed(body)
    request = parse_body(scanner.json(memoryview(b"")), UnknownFields())
    conversation = read_messages(request, scanner, 4096)
    assert conversation.used_references == {1}
    assert conversation.media == [MediaRef(Region(API_ARENA, 4096 + body.rindex(b"QUJD"), 4))]


def test_other_urls_are_refused() -> None:
    """Red if a URL without a loader is accepted."""
    for url in ("ftp://x/y", "/etc/passwd", "javascript:x", "", "nonce", "blob:x"):
        with pytest.raises(RequestError) as caught:
            read_messages(parse(messages=image({"url": url})), Scanner("nonce", 4))
        assert (caught.value.info.status, caught.value.info.param) == (400, "messages[0].content[0].image_url.url"), url


# Every field of the request bodies of the three dialects, as they publish them.
BOTH = """
model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options temperature top_p user
use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs logprob_token_ids
bad_words echo add_special_tokens response_format structured_outputs priority request_id session_id return_tokens_as_token_ids
return_token_ids routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params
vllm_xargs
repetition_detection thinking_token_budget stream_interval
regex ebnf json_schema stop_regex no_stop_trim lora_path session_params return_hidden_states return_routed_experts routed_experts_start_len
return_cached_tokens_details custom_params custom_logit_processor images_config bootstrap_host bootstrap_port bootstrap_room routed_dp_rank
disagg_prefill_dp_rank data_parallel_rank rid extra_key ngram_corpus_id
"""
CHAT = """
messages audio function_call functions max_completion_tokens metadata modalities moderation parallel_tool_calls prediction prompt_cache_key
prompt_cache_options prompt_cache_retention reasoning_effort safety_identifier service_tier store tool_choice tools top_logprobs verbosity
web_search_options
include_reasoning add_generation_prompt continue_final_message documents chat_template chat_template_kwargs media_io_kwargs
mm_processor_kwargs return_prompt_text
separate_reasoning stream_reasoning return_prompt_token_ids return_meta_info task max_dynamic_patch min_dynamic_patch use_audio_in_video
input_ids
"""
COMPLETION = "prompt best_of suffix prompt_embeds custom_labels"


@pytest.mark.parametrize(("model", "names"), [(ChatRequest, BOTH + CHAT), (CompletionRequest, BOTH + COMPLETION)])
def test_every_field_of_the_dialects_is_decided(model: type[GenerationRequest], names: str) -> None:
    """Red if a field that other servers know is ignored here because nobody thought of it."""
    assert not {name for name in names.split() if name not in model.model_fields and name not in LIMITED and name not in HARMLESS}
    assert not LIMITED.keys() & HARMLESS


def test_limited_fields() -> None:
    """Red if a value that would change the answer passes, if one that changes nothing is refused, or if the refusal does not list the
    allowed values."""
    for name, allowed in LIMITED.items():
        model, needed = (ChatRequest, {"messages": HELLO}) if name not in ChatRequest.model_fields else (CompletionRequest, {"prompt": "x"})
        for value in (*allowed, None):
            parse_body(json.dumps({**needed, name: value}).encode(), UnknownFields(), model)
        for value in ("something", 17, ["x"], {"a": 1}):
            with pytest.raises(RequestError) as caught:
                parse_body(json.dumps({**needed, name: value}).encode(), UnknownFields(), model)
            info = caught.value.info
            assert (info.status, info.param) == (400, name)
            assert all(json.dumps(one) in info.message for one in allowed), info.message


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"messages": None}, "invalid_type", ""), ({"max_tokens": 0}, "integer_below_min_value", ""),
        ({"n": 99}, "integer_above_max_value", ""),
        ({"temperature": -0.5}, "decimal_below_min_value", ""), ({"stop": ["a"] * 5}, "array_above_max_length", ""),
        ({"messages": []}, "array_below_min_length", ""), ({"stop": [""]}, "string_below_min_length", ""),
        ({"seed": "x"}, "invalid_type", ""),
        ({"tools": [{"type": "function"}]}, "missing_required_parameter", ""), ({"tool_choice": "required"}, "invalid_value", ""),
        ({"lora_path": "x"}, "unsupported_parameter", "is not supported by this server: leave it out."),
        ({"best_of": 2}, "unsupported_value", "best_of: may only be 1 on this server; or leave it out."),
        ({"messages": [{"role": "user", "content": {}}]}, "invalid_value", "must be a string or a list of parts"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "invalid_value", "'video_url' or 'video', not 'audio'"),
    ],
)  # fmt: skip
def test_an_error_says_its_kind(fields: dict[str, object], code: str, words: str) -> None:
    """Red if a program cannot tell one mistake from another, or if a person reads half a sentence."""
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert caught.value.info.code == code and caught.value.info.message.endswith(words)


def test_one_table_of_efforts(caplog: pytest.LogCaptureFixture) -> None:
    """Red if an effort that clients send is refused, if it outweighs what says more, or if the three dialects differ."""
    for effort, thinks in EFFORTS.items():
        assert parse(reasoning_effort=effort, verbosity="low").template_kwargs == {"enable_thinking": thinks}
    assert parse(reasoning_effort="high", enable_thinking=False).template_kwargs == {"enable_thinking": False}
    assert parse(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}).template_kwargs == {"enable_thinking": True}
    assert parse().template_kwargs == {} and parse().remarks == []
    scanner, value = Scanner("nonce", 4), {"messages": HELLO, "max_tokens": 5}
    for effort in ("low", "medium", "high", "xhigh", "max"):
        asked = messages.chat_body(check(MessagesRequest, {**value, "output_config": {"effort": effort}}), scanner)
        response = responses.chat_body(check(ResponsesRequest, {"input": "x", "reasoning": {"effort": effort}}), scanner)
        assert asked["reasoning_effort"] == response["reasoning_effort"] == effort
    unknown = UnknownFields()
    with caplog.at_level(logging.INFO):
        for words in parse(reasoning_effort="high").remarks * 2:
            unknown.once(words)
    assert caplog.text.count("effort 'high'") == 1


BAD_COMPLETIONS = [
    ({}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt"), ({"prompt": 5}, "prompt"),
    ({"prompt": [True]}, "prompt"), ({"prompt": ["a", 5]}, "prompt"), ({"prompt": [VOCAB_SIZE]}, "prompt"), ({"prompt": [[-1]]}, "prompt"),
    ({"prompt": ["x"] * 129}, "prompt"), ({"prompt": "x", "suffix": "y"}, "suffix"), ({"prompt": "x", "best_of": 2}, "best_of"),
    ({"prompt": "x", "logprobs": 21}, "logprobs"), ({"prompt": "x", "logprobs": True}, "logprobs"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"), ({"prompt": "x", "echo": 1}, "echo"),
    ({"prompt": "x", "max_tokens": -1, "echo": True}, "max_tokens"), ({"prompt": "x", "max_tokens": 0, "echo": False}, "max_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "name"), BAD_COMPLETIONS, ids=range(len(BAD_COMPLETIONS)))
def test_bad_completions(fields: dict[str, object], name: str) -> None:
    """Red if a prompt of another form gets to the tokenizer, or if something of it is ignored."""
    with pytest.raises(RequestError) as caught:
        parse_body(json.dumps(fields).encode(), UnknownFields(), CompletionRequest)
    assert (caught.value.info.status, caught.value.info.param) == (400, name)


@pytest.mark.parametrize(
    ("prompt", "prompts"), [("x", ["x"]), (["x", "y"], ["x", "y"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])]
)
def test_prompts_of_every_form(prompt: object, prompts: list[object]) -> None:
    """Red if one list of ids is taken for several prompts, or the other way round."""
    assert parse_body(json.dumps({"prompt": prompt}).encode(), UnknownFields(), CompletionRequest).prompts == prompts


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
GRAMMARS = [
    ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}}, "schema"),
    ({"guided_json": SCHEMA}, "schema"),
    ({"guided_json": json.dumps(SCHEMA)}, "schema"),
    ({"json_schema": json.dumps(SCHEMA)}, "schema"),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, "schema"),
    ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar("choice", '["a", "b"]')),
    ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True, "disable_fallback": True}}, Grammar("regex", "a")),
    ({"guided_choice": ["a", "b"]}, Grammar("choice", '["a", "b"]')),
    ({"guided_regex": "a+"}, Grammar("regex", "a+")),
    ({"regex": "a+"}, Grammar("regex", "a+")),
    ({"ebnf": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
    ({"guided_grammar": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
    ({"response_format": {"type": "text"}, "regex": "a+"}, Grammar("regex", "a+")),
    ({"response_format": {"type": "text"}}, None),
    ({}, None),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), GRAMMARS, ids=range(len(GRAMMARS)))
def test_grammars_by_all_their_names(fields: dict[str, object], expected: Grammar | str | None) -> None:
    """Red if one of the dialects' names for a grammar is read otherwise than the others, or ignored."""
    grammar = read_grammar(parse(**fields))[0]
    assert grammar == (Grammar("json_schema", json.dumps(SCHEMA)) if expected == "schema" else expected)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"), ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format.json_schema.schema"),
        ({"guided_json": "{"}, "guided_json"), ({"guided_json": []}, "guided_json"), ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 5]}, "guided_choice"), ({"regex": ""}, "regex"), ({"regex": 5}, "regex"), ({"ebnf": {}}, "ebnf"),
        ({"structured_outputs": {}}, "structured_outputs"), ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
    ],
)  # fmt: skip
def test_bad_grammars(fields: dict[str, object], name: str) -> None:
    """Red if a grammar that nobody can follow is dropped, or if one of two is."""
    with pytest.raises(RequestError) as caught:
        read_grammar(parse(**fields))
    assert (caught.value.info.status, caught.value.info.param) == (400, name)


def test_limits_on_pixels() -> None:
    """Red if the limit that stands nearest to an image loses, or if `detail: low` does not make it small."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": "https://a", "max_pixels": 100}, "max_pixels": 200, "min_pixels": 50},
        {"type": "image_url", "image_url": {"url": "https://a", "detail": "low"}},
        {"type": "image_url", "image_url": {"url": "https://a", "detail": "low", "max_pixels": 9}},
        {"type": "image_url", "image_url": {"url": "https://a", "detail": "high"}},
    ]
    request = parse(messages=[{"role": "user", "content": parts}], mm_processor_kwargs={"min_pixels": 7, "max_pixels": 8})
    media = read_messages(request, Scanner("nonce", 4), limits=request.mm_processor_kwargs).media
    assert [(ref.min_pixels, ref.max_pixels) for ref in media] == [(50, 100), (7, 8), (7, 9), (7, 8)]
    assert [ref.cap for ref in media] == [None, 512 * 512, 512 * 512, None]
    media = read_messages(request, Scanner("nonce", 4)).media
    assert (media[3].min_pixels, media[3].max_pixels) == (None, None)

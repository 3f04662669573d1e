"""Requests as vLLM, SGLang and OpenAI document and test them, and the keys that their answers must have."""

from typing import Any

from tokenizers import Tokenizer

from tests.e2e.serving import data_uri, picture
from tests.unit.server.stack import Stack
from tests.unit.server.test_stack_fields import TOP, ended, tell

URL = data_uri(picture(1, 64, 64))
CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
HELLO = [{"role": "user", "content": "hello"}]
PNG = {"type": "image_url", "image_url": {"url": URL}, "uuid": "u1"}
SLOT = "<|vision_start|><|image_pad|><|vision_end|>"
MESSAGE, CHOICE = "choices.0.message", "choices.0"
NONE = type(None)


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


# Path, fields, and expected members: by their path, with a value or a type.
ACCEPTED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (CHAT, {"stop": [f"{i}!" for i in range(32)]}, {f"{CHOICE}.finish_reason": "stop"}),
    (CHAT, {"stream_options": {}}, {"object": "chat.completion"}),
    (CHAT, {}, {f"{MESSAGE}.reasoning": None, f"{MESSAGE}.reasoning_content": None, f"{CHOICE}.matched_stop": None}),
    (CHAT, {}, {"prompt_logprobs": None, "prompt_token_ids": None}),
    (CHAT, {"prompt_logprobs": -1}, {"prompt_logprobs": list}),
    (CHAT, {"messages": [{"role": "boss", "content": "x"}]}, {f"{MESSAGE}.role": "assistant"}),
    (CHAT, {"messages": user({**PNG, "modalities": "multi-images"})}, {f"{MESSAGE}.content": str}),
    (CHAT, {"messages": user({"type": "image_url", "uuid": "u1", "image_url": {}})}, {f"{MESSAGE}.content": str}),
    (CHAT, {"messages": user({"type": "image_url", "uuid": "u1"})}, {f"{MESSAGE}.content": str}),
    (CHAT, {"messages": user({"type": "image", "image": URL})}, {f"{MESSAGE}.content": str}),
    (CHAT, {"messages": user({"type": "file", "file": {"filename": "a.png", "file_data": URL}})}, {f"{MESSAGE}.content": str}),
    (CHAT, {"frobnicate": 1, "store": True}, {f"{MESSAGE}.content": str}),
    (TEXT, {"prompt": "x", "echo": True, "logprobs": 0, "prompt_logprobs": 1}, {f"{CHOICE}.prompt_logprobs": list, f"{CHOICE}.text": str}),
    (TEXT, {"prompt": "x"}, {f"{CHOICE}.prompt_logprobs": None, f"{CHOICE}.prompt_token_ids": None}),
    (GENERATE, {"text": "x", "sampling_params": {"max_new_tokens": 0}}, {"text": "", "meta_info.completion_tokens": 0}),
    (GENERATE, {"text": "x"}, {"meta_info.matched_stop": int, "meta_info.finish_reason.type": "stop"}),
    (GENERATE, {"text": "x", "return_logprob": True, "return_text_in_logprobs": True}, {"meta_info.output_token_logprobs.0.2": str}),
    (GENERATE, {"text": "x", "return_logprob": True, "top_logprobs_num": 1}, {"meta_info.output_token_logprobs.0.2": None}),
    ("/v1/tokenize", {"prompt": "x"}, {"count": 1, "tokens.0": int}), ("/tokenize", {"prompt": ""}, {"tokens": []}),
    ("/detokenize", {"tokens": []}, {"text": ""}), ("/v1/detokenize", {"tokens": [70]}, {"text": "g"}),
]  # fmt: skip


def member(value: Any, path: str) -> Any:
    for step in path.split("."):
        value = value[int(step)] if isinstance(value, list) else value[step]
    return value


def test_what_peers_accept(stack: Stack, tokenizer: Tokenizer) -> None:
    stack.script = tell(ended(tokenizer, "so"))
    for path, fields, expected in ACCEPTED:
        answer = stack.http.post(path, json={**({"messages": HELLO} if path == CHAT else {}), **fields})
        assert answer.status_code == 200, (path, str(fields)[:200], answer.text)
        for place, value in expected.items():
            found = member(answer.json(), place)
            assert isinstance(found, value) if isinstance(value, type) else found == value, (path, str(fields)[:200], place, found)


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("/score", {"query": "x", "items": ["y"], "label_token_ids": [5]}, 400, "label_token_ids: this server does not support"),
    (CHAT, {"model": "gpt-x"}, 404, "This server has: test-model, other-name"),
    (CHAT, {"messages": user({"type": "image_url", "image_url": {"url": "cat.jpg"}})}, 400, "such as 'data:image/jpeg;base64,/9j/4AAQ...'"),
    ("/v1/files", {}, 404, "There is no route /v1/files"),
]  # fmt: skip


def test_errors_that_help(stack: Stack) -> None:
    for path, fields, status, words in REFUSED:
        answer = stack.http.post(path, json={**({"messages": HELLO} if path == CHAT else {}), **fields})
        assert answer.status_code == status and words in answer.json()["error"]["message"], answer.text


def test_variables_of_the_template(stack: Stack, tokenizer: Tokenizer) -> None:
    assert stack.chat("x", chat_template_kwargs={"frobnicate": [{"a": "<|im_end|>"}], "add_generation_prompt": False}).status_code == 200
    assert tokenizer.decode(stack.prompt(), skip_special_tokens=False).endswith("<|im_start|>assistant\n")


def test_the_token_itself_is_the_first_likely_one(stack: Stack, tokenizer: Tokenizer) -> None:
    stack.script = tell(ended(tokenizer, "so"))
    (first, *_) = stack.http.post(TEXT, json={"prompt": "x", "logprobs": TOP}).json()["choices"][0]["logprobs"]["top_logprobs"]
    assert list(first.values()) == [0.0, -1.0, -2.0]

"""SGLang's own dialect through the real api and processor, as its clients and those of reinforcement learning send it."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.e2e.serving import data_uri, picture
from tests.unit.server.stack import Stack, answer_ids

URL = data_uri(picture(1, 96, 64))
SLOT = "<|vision_start|><|image_pad|><|vision_end|>"
IDS = [70, 71, 72]


@pytest.fixture(autouse=True)
def three_tokens(stack: Stack) -> None:
    stack.script = answer_ids(IDS, reason="length")


def ask(stack: Stack, **fields: Any) -> Any:
    answer = stack.http.post("/generate", json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_document_a_batch_and_a_stream(stack: Stack) -> None:
    answer = ask(stack, text="hello", sampling_params={"max_new_tokens": 3, "temperature": 0.5, "sampling_seed": 7})
    params = stack.last.params
    assert (params.max_tokens, params.temperature, params.seed) == (3, 0.5, 7)
    assert (answer["text"], answer["output_ids"]) == ("ghi", IDS)
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 3} and meta["completion_tokens"] == 3 and meta["e2e_latency"] > 0
    for several in (ask(stack, text=["a", "b"]), ask(stack, input_ids=[[65], [66]])):
        assert [one["text"] for one in several] == ["ghi", "ghi"]
    lines = [line for line in stack.http.post("/generate", json={"text": "a", "stream": True}).text.splitlines() if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert lines[-1] == "data: [DONE]" and [event["text"] for event in events] == ["g", "gh", "ghi"]
    assert events[-1]["output_ids"] == IDS and [event["meta_info"]["finish_reason"] is None for event in events] == [True, True, False]


def test_ids_and_texts_with_pictures(stack: Stack, tokenizer: Tokenizer) -> None:
    text = f"{SLOT} and {SLOT} what?"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    prompts, hashes = [], []
    for fields in (
        {"text": text, "image_data": [URL, URL]}, {"input_ids": ids, "image_data": [URL, URL]},
        {"input_ids": ids, "image_data": [URL.partition(",")[2], URL]}, {"input_ids": [ids], "image_data": [[URL, URL]]},
        {"input_ids": None, "image_data": [URL, URL]},
    ):  # fmt: skip
        ask(stack, **{**fields, **({"input_ids": prompts[0]} if "text" not in fields and fields["input_ids"] is None else {})})
        prompts.append(stack.prompt())
        hashes.append([image.hash for image in stack.last.images])
    assert all(prompt == prompts[0] for prompt in prompts) and all(found == hashes[0] for found in hashes)
    assert len(hashes[0]) == 2 and len(prompts[0]) > len(ids)
    ask(stack, text=[f"{SLOT} a", "b"], image_data=[URL, None])
    assert sorted(len(request.images) for request in stack.scheduler.requests[-2:]) == [0, 1]


def test_bad_requests(stack: Stack) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "text"), ({"text": "a", "input_ids": [1]}, "text"), ({"text": ""}, "text"), ({"input_ids": [10**6]}, "input_ids"),
        ({"text": "a", "image_data": URL}, "text"), ({"text": SLOT}, "text"), ({"text": "a", "image_data": 5}, "image_data"),
        ({"text": ["a", "b"], "image_data": [URL]}, "image_data"), ({"text": SLOT, "image_data": "x.png"}, "image_data[0]"),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params"), ({"text": "a", "video_data": "x"}, "video_data"),
        ({"text": "a", "return_hidden_states": True}, "return_hidden_states"), ({"text": "a", "sampling_params": {"n": 99}}, "n"),
        ({"text": "a", "logprobs": 5}, "logprobs"),
    ]  # fmt: skip
    for fields, param in cases:
        answer = stack.http.post("/generate", json=fields)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_what_its_clients_ask_first(stack: Stack) -> None:
    assert stack.http.get("/health_generate").json() == {"status": "ok"}

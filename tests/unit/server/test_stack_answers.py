"""Several answers, Anthropic's dialect, and reasoning, through the real api and processor."""

import base64
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image
from tokenizers import Tokenizer

from engine.wire.messages import EngineRequest, ErrorInfo, RequestOutput
from engine.wire.stats import Stages
from server.api.chat.format import NO_REASONING
from server.api.http.body import MAX_TEXT_BYTES
from server.processor.text.output_text import ThinkTokens
from tests.unit.server.pictures import PLAIN, save
from tests.unit.server.stack import FakeScheduler, Stack, StackOf, answer_ids
from tests.unit.server.test_stack import chunks_of, ids_of, image, uri, user

WORDS = ("one", "two and", "three or more")


@pytest.fixture
def interleaved(stack: Stack, tokenizer: Tokenizer) -> None:
    def script(scheduler: FakeScheduler, request: EngineRequest) -> None:
        answers = [ids_of(tokenizer, words) for words in WORDS[: request.n]]
        longest = max(map(len, answers))
        for step in range(longest):
            outputs = [
                RequestOutput(request.rid, [ids[step]], "stop" if step == len(ids) - 1 else None, stages=Stages(), index=index)
                for index, ids in enumerate(answers)
                if step < len(ids)
            ]
            scheduler.send(outputs, [request.rid] if step == longest - 1 else [])

    stack.script = script


@pytest.mark.usefixtures("interleaved")
def test_answers_in_documents(stack: Stack) -> None:
    before = len(stack.scheduler.requests)
    for stop, expected in ((None, WORDS), (" and", ("one", "two", "three or more"))):
        answer = stack.chat([image(uri(PLAIN["4:2:0"]))], n=3, stop=stop).json()
        choices = [(choice["index"], choice["message"]["content"]) for choice in answer["choices"]]
        assert choices == list(enumerate(expected))
    request, _ = stack.scheduler.requests[before:]
    assert request.n == 3 and answer["usage"]["prompt_tokens"] == len(stack.scheduler.prompt(request))
    answer = stack.http.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2}).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == list(enumerate([*WORDS[:2], *WORDS[:2]]))


@pytest.mark.usefixtures("interleaved")
def test_streams_interleave(stack: Stack) -> None:
    choices = [chunk["choices"][0] for chunk in chunks_of(stack.chat("x", n=3, stream=True).text)]
    for index, words in enumerate(WORDS):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": "", **NO_REASONING}
        assert "".join(choice["delta"].get("content", "") for choice in own) == words
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]
    order = [choice["index"] for choice in choices]
    assert order != sorted(order)


def test_a_stop_string_waits_for_min_tokens(stack: Stack, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "stop stop stop stop")
    stack.script = answer_ids(ids)
    for least in (0, len(ids) // 2):
        (choice,) = stack.chat("x", stop="stop", min_tokens=least).json()["choices"]
        assert choice["message"]["content"].rstrip() == tokenizer.decode(ids[:least]).rstrip()
        assert choice["stop_reason"] == "stop"


def test_an_error_ends_all_answers(stack: Stack) -> None:

    def script(scheduler: FakeScheduler, request: EngineRequest) -> None:
        scheduler.send([RequestOutput(request.rid, [65], "stop", stages=Stages(), index=0)], [])
        error = ErrorInfo(422, "Image 1: it cannot be decoded.")
        scheduler.send([RequestOutput(request.rid, [], error=error, index=1)], [request.rid])

    stack.script = script
    for stream in (False, True):
        response = stack.chat("x", n=2, stream=stream)
        assert response.text.count("it cannot be decoded") == 1 and response.status_code == (200 if stream else 422)


def test_a_text_that_looks_like_an_image_is_put_back(stack: Stack) -> None:
    for num_bytes in (100, 900):
        data = base64.b64encode(os.urandom(num_bytes)).decode()
        call = {"type": "tool_use", "id": "t", "name": "f", "input": {"data": data}}
        told = {"type": "function", "function": {"name": "f", "arguments": {"data": data}}}
        counts = []
        for path, turn in (("/v1/messages/count_tokens", {"content": [call]}), ("/tokenize", {"content": "", "tool_calls": [told]})):
            answer = stack.http.post(path, json={"messages": [*user("x"), {"role": "assistant", **turn}, *user("y")]}).json()
            counts.append(answer.get("input_tokens", answer.get("count")))
        assert counts[0] and counts[0] == counts[1]


def test_a_large_image_is_no_text(stack: Stack) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (1300, 1900, 3), dtype=np.uint8)
    data = base64.b64encode(save(Image.fromarray(noise), "PNG")).decode()
    assert len(data) > MAX_TEXT_BYTES
    image = {"type": "image", "source": {"data": data, "type": "base64", "media_type": "image/png"}}
    body = {"model": "test-model", "max_tokens": 3, "messages": user([image])}
    answer = stack.http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] > 2000
    refused = stack.http.post("/v1/messages", json={**body, "messages": user(data)})
    assert refused.status_code == 413 and refused.json()["error"]["type"] == "request_too_large"


OUTPUT = "Hm, ein 🙂.\n</think>\n\nGrüße!"
THOUGHTS, ANSWER = "Hm, ein 🙂.\n", "Grüße!"


@pytest.fixture
def thinker(stack_of: StackOf, thinking_folder: Path) -> Iterator[Stack]:
    running = stack_of(thinking_folder)
    yield running
    running.settle()


@pytest.fixture(scope="module")
def end(tokenizer: Tokenizer) -> int:
    token_id: int = tokenizer.token_to_id("<|im_end|>")
    return token_id


@pytest.fixture(scope="module")
def num_thoughts(tokenizer: Tokenizer) -> int:
    return len(ids_of(tokenizer, OUTPUT.split("</think>")[0])) + 1


def deltas(stack: Stack) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in chunks_of(stack.chat("x", stream=True).text)]


def joined(parts: list[dict[str, Any]], name: str) -> str:
    return "".join(part.get(name) or "" for part in parts)


def test_openai_python_reads_a_document(thinker: Stack, tokenizer: Tokenizer, end: int, num_thoughts: int) -> None:
    thinker.script = answer_ids([*ids_of(tokenizer, OUTPUT), end])
    client = openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0)
    answer: Any = client.chat.completions.create(model="test-model", messages=user("x"))
    message = answer.choices[0].message
    assert message.model_extra == {"reasoning": THOUGHTS, "reasoning_content": THOUGHTS}
    assert (message.content, answer.choices[0].finish_reason) == (ANSWER, "stop")
    assert answer.usage.completion_tokens_details.reasoning_tokens == num_thoughts
    assert answer.usage.completion_tokens == len(ids_of(tokenizer, OUTPUT)) + 1
    thinker.script = answer_ids(ids_of(tokenizer, "on and on"), reason="length")
    (choice,) = thinker.chat("x").json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"], choice["message"]["reasoning"]) == ("length", None, "on and on")


def test_a_stream_has_one_chunk_per_token(thinker: Stack, tokenizer: Tokenizer, end: int, num_thoughts: int) -> None:
    ids = ids_of(tokenizer, OUTPUT)
    for step in (1, 4, 100):
        thinker.script = answer_ids([*ids, end], step=step)
        role, *tokens = deltas(thinker)
        assert role == {"role": "assistant", "content": "", **NO_REASONING} and len(tokens) == len(ids) + 1
        assert all(part.keys() == {"reasoning", "reasoning_content"} for part in tokens[:num_thoughts])
        assert all(part == NO_REASONING | {"content": part["content"]} for part in tokens[num_thoughts:])
        assert joined(tokens, "reasoning") == joined(tokens, "reasoning_content") == THOUGHTS
        assert joined(tokens, "content") == ANSWER
    thinker.script = answer_ids([*ids, end])
    chunks = chunks_of(thinker.chat("x", stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}).text)
    counts = [chunk["usage"].get("completion_tokens_details", {}).get("reasoning_tokens") for chunk in chunks]
    assert counts == [None, *range(1, num_thoughts), *[num_thoughts] * (len(chunks) - num_thoughts)]


def test_an_answer_without_its_thoughts(thinker: Stack, tokenizer: Tokenizer, end: int, num_thoughts: int) -> None:
    thinker.script = answer_ids([*ids_of(tokenizer, OUTPUT), end])
    answer = thinker.chat("x", include_reasoning=False).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": ANSWER, "refusal": None, **NO_REASONING}
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_thoughts
    shown = [chunk["choices"][0]["delta"] for chunk in chunks_of(thinker.chat("x", include_reasoning=False, stream=True).text)]
    assert joined(shown, "reasoning") == joined(shown, "reasoning_content") == "" and joined(shown, "content") == ANSWER


def test_a_thinking_budget(thinker: Stack, stack: Stack, tokenizer: Tokenizer, end: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler gets the token to force and, unless the prompt ends in it, the one that begins the thoughts."""
    start, stop = tokenizer.token_to_id("<think>"), tokenizer.token_to_id("</think>")
    for one, fields, budget, ids in (
        (thinker, {"thinking_token_budget": 5, "allowed_token_ids": [7]}, 5, (stop,)),
        (thinker, {"reasoning": {"max_tokens": 0}}, 0, (stop,)),
        (stack, {"thinking_token_budget": 5}, 5, (start, stop)), (stack, {}, None, ()),
    ):  # fmt: skip
        one.script = answer_ids([end])
        assert one.chat("x", **fields).status_code == 200
        params = one.last.params
        assert (params.thinking_token_budget, params.think_ids) == (budget, ids)
        assert params.allowed_token_ids == ((7, stop) if "allowed_token_ids" in fields else ())
    assert stack.chat("x", thinking_token_budget=-1).json()["error"]["param"] == "thinking_token_budget"
    monkeypatch.setattr(ThinkTokens, "end", None)
    refused = stack.chat("x", thinking_token_budget=1)
    assert refused.status_code == 400 and "no token that ends its reasoning" in refused.json()["error"]["message"]


def test_other_answers_know_nothing_of_thoughts(stack: Stack, tokenizer: Tokenizer, end: int) -> None:
    stack.script = answer_ids([end])
    answer = stack.chat("<think>").json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "", "refusal": None, **NO_REASONING}
    assert answer["usage"].keys() == {"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"}
    stack.script = answer_ids([*ids_of(tokenizer, "\nok"), end])
    assert all(delta == NO_REASONING | {"content": delta["content"]} for delta in deltas(stack)[1:-1])

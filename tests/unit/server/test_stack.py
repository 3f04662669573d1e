"""The real api and processor around a scripted scheduler: the straight path, as clients of the API see it."""

import base64
import json
from typing import Any

import openai
from tokenizers import Tokenizer

from engine.wire.messages import EngineRequest, ErrorInfo, RequestOutput
from engine.wire.stats import Stages
from tests.eventually import eventually
from tests.unit.server.stack import FakeScheduler, Stack, answer_ids, hold


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def uri(data: bytes, mime: str = "image/jpeg") -> str:
    return f"data:{mime};base64," + base64.b64encode(data).decode()


def user(content: object) -> list[Any]:
    return [{"role": "user", "content": content}]


def image(url: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


def chunks_of(text: str) -> list[Any]:
    lines = [line for line in text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines), "no comments, no event: lines"
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_openai_python_reads_a_stream(stack: Stack, client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "Grüße, 世界! 🙂")
    stack.script = answer_ids([*ids, tokenizer.token_to_id("<|im_end|>")])
    question: Any = user("x")
    chunks = [*client.chat.completions.create(model="test-model", messages=question, stream=True, stream_options={"include_usage": True})]
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "")
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks[1:-2]]
    assert len(texts) == len(ids) and "".join(texts) == "Grüße, 世界! 🙂"
    assert chunks[-2].choices[0].finish_reason == "stop" and chunks[-1].choices == []
    usage: Any = chunks[-1].usage
    assert (usage.completion_tokens, usage.prompt_tokens_details.cached_tokens) == (len(ids) + 1, 3)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1


def test_a_stream_without_options(stack: Stack, tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "several tokens of one step")
    stack.script = answer_ids(ids, step=4)
    response = stack.chat("x", stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = chunks_of(response.text)
    assert all(chunk.keys() == {"id", "object", "created", "model", "choices"} for chunk in chunks)
    assert len(chunks) == 1 + len(ids) and chunks[-1]["choices"][0]["finish_reason"]  # role; tokens, the last one with its finish


def test_continuous_usage_and_timings(stack: Stack, tokenizer: Tokenizer) -> None:
    stack.script = answer_ids(ids_of(tokenizer, "one two"))
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chunks_of(stack.chat("x", stream=True, stream_options=options, timings=True).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] > 1
    assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1
    assert {"receive_ms", "prepare_ms", "queue_ms", "prefill_ms", "reply_ms", "device_encode_ms"} <= chunks[-1]["timings"].keys()
    assert stack.chat("x", timings=True).json()["timings"]["prepare_ms"] > 0 and "timings" not in stack.chat("x").json()


def test_a_stop_string_ends_the_request(stack: Stack, tokenizer: Tokenizer) -> None:
    stack.script = answer_ids(ids_of(tokenizer, "text END"), reason="length")
    choice = stack.chat("x", stop="END").json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], stack.scheduler.aborted) == ("text ", "stop", [])

    def script(scheduler: FakeScheduler, request: EngineRequest) -> None:
        hold(scheduler, request)
        for token_id in ids_of(tokenizer, "keep this END and never this"):
            scheduler.send([RequestOutput(request.rid, [token_id])], [])

    stack.script = script
    choice = stack.chat("x", stop=["END", "zzz"]).json()["choices"][0]
    assert choice["message"]["content"].endswith("keep this ") and choice["finish_reason"] == "stop"
    eventually(lambda: stack.scheduler.aborted == [stack.last.rid])


def test_engine_errors_before_and_after_the_first_token(stack: Stack) -> None:
    error = ErrorInfo(422, "An image could not be decoded.", code="invalid_image")

    def refuse(scheduler: FakeScheduler, request: EngineRequest) -> None:
        scheduler.send([RequestOutput(request.rid, [], error=error)], [request.rid])

    def fail_later(scheduler: FakeScheduler, request: EngineRequest) -> None:
        scheduler.send([RequestOutput(request.rid, [65], stages=Stages())], [])
        refuse(scheduler, request)

    stack.script = refuse
    for stream in (False, True):
        response = stack.chat("x", stream=stream)
        assert (response.status_code, response.json()["error"]["code"]) == (422, "invalid_image")
    stack.script = fail_later
    assert stack.chat("x").status_code == 422
    lines = stack.chat("x", stream=True).text.strip().split("\n\n")
    assert json.loads(lines[-1][6:])["error"]["message"] == error.message
    stack.script = lambda scheduler, request: scheduler.send([], [request.rid])
    response = stack.chat("x")
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")


def metrics_of(stack: Stack) -> dict[str, float]:
    lines = [line for line in stack.http.get("/metrics").text.split("\n") if line and not line.startswith("#")]
    values = (line.rsplit(" ", 1) for line in lines)
    return {name.replace('model_name="test-model",', "").replace('{model_name="test-model"}', ""): float(value) for name, value in values}

"""Large answers are made in threads, in slices: the event loop and other threads run in between."""

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pybase64
import pytest
from starlette.responses import Response
from tokenizers import Tokenizer

from engine.messages import Event, TokenPrompt
from server.api.chat.schema import MAX_IDS, DetokenizeRequest
from server.api.endpoint import Job
from server.api.pooling import endpoint as pooling
from server.errors import RequestError
from server.http.client import Stream
from server.http.reply import LARGE_NUMBERS, GatheredReply
from server.http.validate import check
from server.processor.detokenize import NUM_AT_ONCE, TokenTable
from server.processor.prompt import PromptBuilder

HIDDEN = 4096


async def thread_of(*events: Event) -> threading.Thread:
    """The thread in which the answer of these events is made."""
    stream = Stream([(1, index) for index in range(len(events))])
    threads: list[threading.Thread] = []

    def show(events: list[Event]) -> Response:
        threads.append(threading.current_thread())
        return Response()

    reply = GatheredReply(stream, None, None, 0, None, show=show)
    making = asyncio.create_task(reply.respond(None))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    for event in events:
        stream.push(event)
    await making
    return threads[0]


async def test_large_answers_leave_the_event_loop() -> None:
    """Answers of `/v1/embeddings` were serialised on the event loop: 3.3 s for 1,000 vectors."""
    here = threading.current_thread()
    small = Event(1, "text", 1, finish_reason="stop", pooled=bytes(4 * HIDDEN))
    assert await thread_of(small) is here
    for large in (
        [Event(1, "", 1, finish_reason="stop", pooled=bytes(4 * HIDDEN), index=index) for index in range(5)],
        [Event(1, "", finish_reason="stop", prompt_ids=[1] * (LARGE_NUMBERS + 1))],
        [Event(1, "x" * (LARGE_NUMBERS + 1), finish_reason="stop")],
    ):
        assert await thread_of(*large) is not here


@pytest.mark.parametrize("format", ["float", "base64"])
def test_vectors_are_written_one_by_one(monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    """One call that writes all vectors keeps the interpreter from other threads."""
    written: list[object] = []

    def encode(value: Any) -> bytes:
        written.append(value.get("embedding"))
        return json.dumps(value).encode()

    monkeypatch.setattr(pooling, "encode", encode)
    vectors = [np.random.default_rng(seed).normal(size=8).astype(np.float32) for seed in range(3)]
    job = Job(None, [], echo={"format": format, "dimensions": 4})  # type: ignore[arg-type]
    shown = pooling.EmbeddingsEndpoint.show(SimpleNamespace(_entry=pooling.EmbeddingsEndpoint._entry), job, vectors, {"model": "m"})  # type: ignore[arg-type]
    answer = json.loads(bytes(shown.body))
    assert shown.media_type == "application/json"
    assert (answer["object"], answer["model"], [entry["index"] for entry in answer["data"]]) == ("list", "m", [0, 1, 2])
    assert len(written) == 4
    for vector, entry in zip(vectors, answer["data"], strict=True):
        found = entry["embedding"] if format == "float" else np.frombuffer(pybase64.b64decode(entry["embedding"]), np.float32)
        assert np.allclose(found, vector[:4] / np.linalg.norm(vector[:4]), atol=1e-7)


def test_the_text_of_ids_is_the_tokenizers(tokenizer: Tokenizer, table: TokenTable) -> None:
    """Ids are decoded in slices, which must not cut a character."""
    ids = tokenizer.encode("naïve 日本語 👩‍👩‍👧 <|im_end|>", add_special_tokens=False).ids
    for some in (ids, [], [table.texts.index(None)], ids * (2 * NUM_AT_ONCE // len(ids) + 1)):
        assert table.text_of(some) == tokenizer.decode(some, skip_special_tokens=False)


def test_ids_are_counted_before_they_are_decoded() -> None:
    """Two million ids were decoded on the event loop before their number was checked."""
    with pytest.raises(RequestError, match="at most") as caught:
        check(DetokenizeRequest, {"tokens": [1] * (MAX_IDS + 1)})
    assert caught.value.info.status == 400


def test_a_prompt_of_too_many_ids_is_refused_by_its_length(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = PromptBuilder(checkpoint)
    monkeypatch.setattr(prompts, "_placeholders", None)  # which looks at each id
    with pytest.raises(RequestError, match="it has 11 tokens") as caught:
        prompts.encode(TokenPrompt([1] * 11), [], limit=10)
    assert caught.value.info.code == "context_length_exceeded"


def test_ids_count_as_work() -> None:
    """A prompt of ids was always prepared on the event loop."""
    assert PromptBuilder.size(SimpleNamespace(), TokenPrompt([1] * 20_000)) == 20_000  # type: ignore[arg-type]

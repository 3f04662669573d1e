"""Requests that are made to cost seconds are refused before the work is done; large answers are made in threads, in slices."""

import json
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tokenizers import Tokenizer

from engine.wire.messages import ChatPrompt, Logprob, Submit
from server.api.http.streaming import Scores
from server.api.schema import validate
from server.api.schema.validate import MAX_VALUES, read_object
from server.checkpoint import Checkpoint
from server.errors import RequestError
from server.processor.text.output_text import NUM_AT_ONCE, TokenTable
from server.processor.text.prompt import PromptBuilder
from tests.unit.server.in_process import MIB, hold, serving, settle, virtual
from tests.unit.server.raw_http import packets, request_of
from tests.unit.server.stack import Stack

MESSAGES = b'{"messages": [{"role": "user", "content": "x"}], "ignored": %s}'
COSTLY = {
    "empty lists": b"[" + b"[]," * (MAX_VALUES + 1) + b"0]",
    "nested lists": b"[" + b",".join([b"[" * 100 + b"]" * 100] * (MAX_VALUES // 100 + 1)) + b"]",
    "objects": b"[" + b'{"a":{}},' * (MAX_VALUES // 3 + 1) + b"0]",
    "members": b"{" + b",".join(b'"%x":0' % i for i in range(MAX_VALUES + 1)) + b"}",
}


def test_too_many_values_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "from_json", None)
    for name, value in COSTLY.items():
        with pytest.raises(RequestError) as caught:
            read_object(MESSAGES % value)
        assert caught.value.info.status == 413, name


LONG = "x" * MIB
LISTS: dict[str, dict[str, Any]] = {
    "/rerank": {"query": LONG, "documents": ["x"] * 1000},
    "/score": {"text_1": {"content": [{"type": "text", "text": LONG}]}, "text_2": ["x"] * 1000},
    "/v1/embeddings": {"input": ["x"] * 1000, "instruction": LONG},
    "/generate": {"text": ["x"] * 128, "regex": "(" + LONG + ")"},
}


@virtual
async def test_text_that_prompts_share_counts_for_each(model_folder: Path) -> None:
    """Fails if the copies of a shared text are made before they are counted: 1,000 of 1 MiB stopped all streams."""
    with serving(model_folder) as api:
        api.script = hold
        for path, fields in LISTS.items():
            tracemalloc.start()
            wire = await api.ask(*packets(request_of(json.dumps(fields).encode(), path)))
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            ((status, error),) = wire.answers
            assert status == 413 and b"exceed 16 MiB" in error and not api.submits, path
            assert peak < 100 * MIB, path
        many = {"query": "x" * 1000, "documents": ["x" * 4000] * 1000}
        wire = await api.ask(*packets(request_of(json.dumps(many).encode(), "/rerank")))
        assert len(api.submits) == 1000
        wire.leave()
        await settle()


def test_log_probabilities_take_little_memory() -> None:
    part = [Logprob(1, b"word", -1.0, [(i, b"other", -2.0) for i in range(20)]) for _ in range(256)]
    scores = Scores()
    tracemalloc.start()
    for _ in range(48):
        scores.add(part)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 30 * 21 * 256 * 48 and sum(1 for _ in scores) == 256 * 48


def test_a_prompt_that_never_fits_is_not_tokenized(checkpoint: Checkpoint) -> None:
    builder, num_characters, limit = PromptBuilder(checkpoint), 0, 4096
    encode = builder.tokenizer.encode_batch_fast

    def count(texts: list[str], **options: Any) -> Any:
        nonlocal num_characters
        num_characters += sum(map(len, texts))
        return encode(texts, **options)

    builder.tokenizer = cast(Any, SimpleNamespace(encode_batch_fast=count))
    text = "word " * 200_000
    for prompt in (text, ChatPrompt(json.dumps([{"role": "user", "content": text}]).encode())):
        with pytest.raises(RequestError, match=f"more than {limit} tokens") as caught:
            builder.encode(prompt, [], limit)
        assert caught.value.info.code == "context_length_exceeded"
        assert num_characters < 20 * limit
    assert len(builder.encode("word " * 5000, [])) >= 5000


def test_many_inputs_are_prepared_between_messages(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    intake = stack.local.processor._intake
    accept, waiting = intake.accept, list[int]()

    def accept_and_count(submit: Submit) -> None:
        accept(submit)
        waiting.append(sum(not request.is_in_scheduler for request in intake.requests.values()))

    monkeypatch.setattr(intake, "accept", accept_and_count)
    response = stack.http.post("/v1/embeddings", json={"input": [str(number) for number in range(200)]})
    assert response.status_code == 200, response.text
    assert len(waiting) == 200
    assert max(waiting) < 20


def test_the_text_of_ids_is_the_tokenizers(tokenizer: Tokenizer, table: TokenTable) -> None:
    ids = tokenizer.encode("naïve 日本語 👩‍👩‍👧 <|im_end|>", add_special_tokens=False).ids
    for some in (ids, [], [table.texts.index(None)], ids * (2 * NUM_AT_ONCE // len(ids) + 1)):
        assert table.text_of(some) == tokenizer.decode(some, skip_special_tokens=False)


def test_a_prompt_of_too_many_ids_is_refused_by_its_length(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = PromptBuilder(checkpoint)
    monkeypatch.setattr(prompts, "_kinds", None)  # which looks at each id
    with pytest.raises(RequestError, match="it has 11 tokens") as caught:
        prompts.encode([1] * 11, [], limit=10)
    assert caught.value.info.code == "context_length_exceeded"

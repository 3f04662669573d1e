"""The real api and processor of a checkpoint that thinks: reasoning and content as clients of the API see them, streamed and not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from tests.unit.server.stack import Stack, StackOf, answer_ids
from tests.unit.server.test_stack import chunks_of, ids_of

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
    """Tokens of OUTPUT up to the end marker."""
    return len(ids_of(tokenizer, OUTPUT.split("</think>")[0])) + 1


def deltas(stack: Stack) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in chunks_of(stack.chat("x", stream=True).text)]


def joined(parts: list[dict[str, Any]], name: str) -> str:
    return "".join(part.get(name, "") for part in parts)


def test_openai_python_reads_a_document(thinker: Stack, tokenizer: Tokenizer, end: int, num_thoughts: int) -> None:
    """Red if a document mixes the parts, lacks one of the two names, or does not count the thoughts."""
    thinker.scheduler.script = answer_ids([*ids_of(tokenizer, OUTPUT), end])
    client = openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0)
    answer: Any = client.chat.completions.create(model="test-model", messages=[{"role": "user", "content": "x"}])
    message = answer.choices[0].message
    assert message.model_extra == {"reasoning": THOUGHTS, "reasoning_content": THOUGHTS}
    assert (message.content, answer.choices[0].finish_reason) == (ANSWER, "stop")
    assert answer.usage.completion_tokens_details.reasoning_tokens == num_thoughts
    assert answer.usage.completion_tokens == len(ids_of(tokenizer, OUTPUT)) + 1


def test_a_stream_has_one_chunk_per_token(thinker: Stack, tokenizer: Tokenizer, end: int, num_thoughts: int) -> None:
    """Red if tokens are merged or left out at the boundary, if a chunk has both parts, if a chunk of the thoughts has content, or if the
    count of thoughts goes on behind them, or stands in the usage before there is one."""
    ids = ids_of(tokenizer, OUTPUT)
    for step in (1, 4, 100):
        thinker.scheduler.script = answer_ids([*ids, end], step=step)
        role, *tokens, finish = deltas(thinker)
        assert role == {"role": "assistant", "content": ""} and finish == {} and len(tokens) == len(ids)
        assert all(part.keys() == {"reasoning", "reasoning_content"} for part in tokens[:num_thoughts])
        assert all(part.keys() == {"content"} for part in tokens[num_thoughts:])
        assert joined(tokens, "reasoning") == joined(tokens, "reasoning_content") == THOUGHTS
        assert joined(tokens, "content") == ANSWER
    thinker.scheduler.script = answer_ids([*ids, end])
    chunks = chunks_of(thinker.chat("x", stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}).text)
    counts = [chunk["usage"].get("completion_tokens_details", {}).get("reasoning_tokens") for chunk in chunks]
    assert counts == [None, *range(1, num_thoughts), *[num_thoughts] * (len(chunks) - num_thoughts)]


def test_thoughts_without_an_answer(thinker: Stack, tokenizer: Tokenizer, end: int) -> None:
    """Red if an answer that was cut off in its thoughts, or ended with them, has content, or loses thoughts."""
    for output, ends in (("on and on", []), ("on and on</think>\n\n", [end])):
        thinker.scheduler.script = answer_ids([*ids_of(tokenizer, output), *ends], reason="stop" if ends else "length")
        choice = thinker.chat("x").json()["choices"][0]
        assert choice["finish_reason"] == ("stop" if ends else "length")
        assert choice["message"]["content"] is None and choice["message"]["reasoning"] == "on and on"
        parts = deltas(thinker)
        assert joined(parts, "reasoning") == "on and on" and joined(parts, "content") == ""


def test_a_model_that_opens_its_thoughts_itself(stack: Stack, tokenizer: Tokenizer, end: int) -> None:
    """Red if a first `<think>` is shown, or if one that a client typed does what the model's does."""
    thinking = [*ids_of(tokenizer, "<think>\n" + OUTPUT), end]
    for ids, content, reasoning in ((thinking, ANSWER, THOUGHTS), (thinking[1:], f"\n{OUTPUT}", None)):
        stack.scheduler.script = answer_ids(ids)
        message = stack.chat("<think>\n").json()["choices"][0]["message"]
        assert message["content"] == content
        assert message.get("reasoning") == message.get("reasoning_content") == reasoning


def test_other_answers_know_nothing_of_thoughts(stack: Stack, tokenizer: Tokenizer, end: int) -> None:
    """Red if the answer of a model that does not think has a field more than OpenAI's, or null for an empty text."""
    stack.scheduler.script = answer_ids([end])
    answer = stack.chat("<think>").json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "", "refusal": None}
    assert answer["usage"].keys() == {"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"}
    stack.scheduler.script = answer_ids([*ids_of(tokenizer, "\nok"), end])
    assert all(delta.keys() == {"content"} for delta in deltas(stack)[1:-1])

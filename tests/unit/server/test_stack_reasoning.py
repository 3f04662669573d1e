"""The real api and processor of a checkpoint that thinks: reasoning and content as clients of the API see them, streamed and not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from tests.unit.server.stack import Stack, StackOf, answer_ids
from tests.unit.server.test_stack import chunks_of, ids_of, user

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
    """Red if tokens are merged or left out at the boundary, if a chunk has both parts, or if the count goes on."""
    ids = ids_of(tokenizer, OUTPUT)
    for step in (1, 4, 100):
        thinker.script = answer_ids([*ids, end], step=step)
        role, *tokens, finish = deltas(thinker)
        assert role == {"role": "assistant", "content": ""} and finish == {} and len(tokens) == len(ids)
        assert all(part.keys() == {"reasoning", "reasoning_content"} for part in tokens[:num_thoughts])
        assert all(part.keys() == {"content"} for part in tokens[num_thoughts:])
        assert joined(tokens, "reasoning") == joined(tokens, "reasoning_content") == THOUGHTS
        assert joined(tokens, "content") == ANSWER
    thinker.script = answer_ids([*ids, end])
    chunks = chunks_of(thinker.chat("x", stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}).text)
    counts = [chunk["usage"].get("completion_tokens_details", {}).get("reasoning_tokens") for chunk in chunks]
    assert counts == [None, *range(1, num_thoughts), *[num_thoughts] * (len(chunks) - num_thoughts)]


def test_other_answers_know_nothing_of_thoughts(stack: Stack, tokenizer: Tokenizer, end: int) -> None:
    """Red if one has a field more than OpenAI's, or null for an empty text."""
    stack.script = answer_ids([end])
    answer = stack.chat("<think>").json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "", "refusal": None}
    assert answer["usage"].keys() == {"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"}
    stack.script = answer_ids([*ids_of(tokenizer, "\nok"), end])
    assert all(delta.keys() == {"content"} for delta in deltas(stack)[1:-1])

"""LiteLLM, as an OpenAI-compatible provider, against the demo model."""

from typing import Any

import pytest

from tests.clients.asking import question
from tests.e2e.serving import Engine

litellm = pytest.importorskip("litellm")

pytestmark = pytest.mark.clients


def ask(engine: Engine, **fields: Any) -> Any:
    fields = {"messages": question(), "temperature": 0, "max_tokens": 8, **fields}
    return litellm.completion(model="openai/demo", api_base=f"{engine.url}/v1", api_key="none", max_retries=0, **fields)


def test_an_answer_and_a_stream(engine: Engine) -> None:
    answer = ask(engine)
    assert answer.choices[0].message.content == "472" and answer.usage.completion_tokens > 0
    chunks = list(ask(engine, stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].message.content == "472" and whole.usage.prompt_tokens == answer.usage.prompt_tokens


def test_a_context_that_is_too_long_is_told_apart(engine: Engine) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        ask(engine, messages=[{"role": "user", "content": "word " * 20_000}])
    with pytest.raises(litellm.BadRequestError):
        ask(engine, temperature=-1)

"""LangChain's ChatOpenAI, on both of its endpoints, against the demo model."""

from typing import Any

import pytest

from tests.clients.asking import Reading, question
from tests.e2e.serving import Engine

langchain_openai = pytest.importorskip("langchain_openai")

pytestmark = pytest.mark.clients


def model(engine: Engine, **fields: Any) -> Any:
    fields = {"temperature": 0, "max_tokens": 8, **fields}
    return langchain_openai.ChatOpenAI(model="demo", base_url=f"{engine.url}/v1", api_key="none", max_retries=0, **fields)


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_an_answer_and_a_stream(engine: Engine, use_responses_api: bool) -> None:
    chat = model(engine, use_responses_api=use_responses_api)
    answer = chat.invoke(question())
    assert answer.text == "472" and answer.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.text for chunk in chat.stream(question())) == "472"


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(engine: Engine, method: str) -> None:
    reading = model(engine, max_tokens=120).with_structured_output(Reading, method=method).invoke(question())
    assert isinstance(reading, Reading)


def test_a_context_that_is_too_long_is_told_apart(engine: Engine) -> None:
    from langchain_core.exceptions import ContextOverflowError

    with pytest.raises(ContextOverflowError):
        model(engine).invoke("word " * 20_000)

"""Pydantic AI's agents, on both of OpenAI's endpoints, against the demo model."""

from typing import Any

import pytest

from tests.clients.asking import NUMBER, Reading
from tests.e2e.serving import Engine

pydantic_ai = pytest.importorskip("pydantic_ai")

pytestmark = pytest.mark.clients


def agent(engine: Engine, kind: str = "OpenAIChatModel", max_tokens: int = 8, **fields: Any) -> Any:
    from pydantic_ai.models import openai
    from pydantic_ai.providers.openai import OpenAIProvider

    model = getattr(openai, kind)("demo", provider=OpenAIProvider(base_url=f"{engine.url}/v1", api_key="none"))
    return pydantic_ai.Agent(model, model_settings={"temperature": 0, "max_tokens": max_tokens}, **fields)


def question() -> list[Any]:
    return [pydantic_ai.BinaryContent(NUMBER.read_bytes(), media_type="image/png"), "What number is in picture 1?"]


@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
async def test_an_answer_and_a_stream(engine: Engine, kind: str) -> None:
    asker = agent(engine, kind)
    answer = await asker.run(question())
    assert answer.output == "472"
    async with asker.run_stream(question()) as stream:
        assert await stream.get_output() == "472"


@pytest.mark.parametrize("is_native", [False, True])
async def test_structured_output(engine: Engine, is_native: bool) -> None:
    kind = pydantic_ai.NativeOutput(Reading) if is_native else Reading
    answer = await agent(engine, max_tokens=120, output_type=kind).run(question())
    assert isinstance(answer.output, Reading)

"""instructor, in the modes that a server must help with, against the demo model."""

import openai
import pytest

from tests.clients.asking import Reading, question
from tests.e2e.serving import Engine

instructor = pytest.importorskip("instructor")

pytestmark = pytest.mark.clients


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_an_object_at_the_first_try(engine: Engine, mode: str) -> None:
    plain = openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode[mode])
    reading = client.chat.completions.create(
        model="demo", messages=question(), response_model=Reading, temperature=0, max_tokens=120, max_retries=0
    )
    assert isinstance(reading, Reading)

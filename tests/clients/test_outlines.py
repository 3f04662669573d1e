"""outlines, in the mode that it has for vLLM, against the demo model."""

import re
from typing import Any, Literal

import openai
import pytest

from tests.clients.asking import NUMBER, Reading
from tests.e2e.serving import Engine

outlines = pytest.importorskip("outlines")

pytestmark = pytest.mark.clients
LARK = 'start: "(" NUMBER ("+" NUMBER)* ")"\nNUMBER: /[0-9]{1,2}/\n'


@pytest.fixture(scope="module")
def model(engine: Engine) -> Any:
    return outlines.from_vllm(openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0), "demo")


def test_every_kind_of_grammar(model: Any) -> None:
    from PIL import Image

    picture = Image.open(NUMBER)
    picture.format = "PNG"
    prompt = ["What number is in picture 1?", outlines.inputs.Image(picture)]
    assert Reading.model_validate_json(model(prompt, Reading, max_tokens=60))
    assert model(prompt, Literal["472", "473"], max_tokens=8, temperature=0) == "472"
    assert re.fullmatch("[a-c]{3}", model(prompt, outlines.types.regex("[a-c]{3}"), max_tokens=8))
    said = model(prompt, outlines.types.CFG(LARK), max_tokens=200, extra_body={"bad_words": ["+"]})
    assert re.fullmatch(r"\(\d{1,2}\)", said), said

"""guidance, whose VLLMModel sends its grammars in Lark, against the demo model."""

import re
from typing import Any

import pytest

from tests.e2e.serving import Engine

guidance = pytest.importorskip("guidance")
experimental = pytest.importorskip("guidance.models.experimental")

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def model(engine: Engine) -> Any:
    return experimental.VLLMModel("demo", base_url=f"{engine.url}/v1", api_key="none", echo=False)


def ask(model: Any, node: Any) -> Any:
    with guidance.user():
        asked = model + "How are you?"
    with guidance.assistant():
        return asked + node


def test_expressions_choices_and_schemas(model: Any) -> None:
    found = ask(model, guidance.gen("number", regex="[0-9]{3}") + " and " + guidance.select(["left", "right"], name="side"))
    assert re.fullmatch("[0-9]{3}", found["number"]) and found["side"] in ("left", "right")
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
    assert re.sub(r"\s", "", ask(model, guidance.json("answer", schema=schema))["answer"]) in ('{"a":"x"}', '{"a":"y"}')


def test_what_no_grammar_holds_is_refused_by_name(model: Any) -> None:
    with pytest.raises(Exception, match="'temperature'"):
        ask(model, guidance.gen("word", regex="[a-z]{3}", temperature=0.5))

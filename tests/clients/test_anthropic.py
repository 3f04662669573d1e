"""Anthropic's own client, sync and async, against the demo model."""

import base64
from typing import Any

import anthropic
import pytest

from tests.clients.asking import DAYS, NUMBER
from tests.e2e.serving import Engine

pytestmark = pytest.mark.clients

TOOLS: list[Any] = [
    {"name": "forecast", "description": "of days", "input_schema": DAYS},
    {"name": "now", "input_schema": {"type": "object"}},
]


@pytest.fixture(scope="module")
def client(engine: Engine) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=engine.url, api_key="none", max_retries=0)


def picture() -> dict[str, Any]:
    data = base64.b64encode(NUMBER.read_bytes()).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def question(text: str = "What number is in picture 1?") -> list[Any]:
    return [{"role": "user", "content": [picture(), {"type": "text", "text": text}]}]


def asked(**fields: Any) -> dict[str, Any]:
    """Arguments of the client, which knows no temperature any more; the server does."""
    extra = {"temperature": 0, **fields.pop("extra_body", {})}
    return {"model": "demo", "messages": question(), "max_tokens": 8, "extra_body": extra, **fields}


def test_an_answer_and_a_stream(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(**asked())
    assert [(block.type, block.text) for block in answer.content] == [("text", "472")]
    assert (answer.role, answer.type, answer.model, answer.stop_reason) == ("assistant", "message", "demo", "end_turn")
    assert answer.usage.output_tokens > 0 and answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) > 0
    with client.messages.stream(**asked()) as stream:
        assert "".join(stream.text_stream) == "472"
        final = stream.get_final_message()
    assert [block.text for block in final.content] == ["472"] and final.stop_reason == "end_turn"
    total = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) == total
    assert final.usage.output_tokens == answer.usage.output_tokens
    assert client.messages.count_tokens(model="demo", messages=question()).input_tokens == total


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("choice", [{"type": "tool", "name": "forecast"}, {"type": "any", "disable_parallel_tool_use": True}])
def test_calls_that_must_come(client: anthropic.Anthropic, choice: Any, is_streamed: bool) -> None:
    fields = asked(tools=TOOLS, tool_choice=choice, max_tokens=120, extra_body={"seed": 1})
    if is_streamed:
        with client.messages.stream(**fields) as stream:
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(**fields)
    assert [block.type for block in answer.content] == ["tool_use"] and answer.stop_reason in ("tool_use", "max_tokens")
    call: Any = answer.content[0]
    assert call.name == "forecast" or (choice["type"] == "any" and call.name == "now")
    if answer.stop_reason == "tool_use" and call.name == "forecast":
        assert type(call.input["days"]) is int and call.input["unit"] in ("C", "F")


def test_errors_are_the_clients_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.create(**asked(extra_body={"temperature": -1}))
    assert isinstance(bad.value.body, dict) and bad.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**asked(model="another"))
    assert isinstance(missing.value.body, dict) and missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**asked(messages=[{"role": "user", "content": "word " * 20_000}]))

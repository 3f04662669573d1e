"""OpenAI's own client, sync and async, against the demo model."""

import json
from typing import Any

import openai
import pytest

from tests.clients.asking import TOOLS, Reading, question
from tests.e2e.serving import Engine

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def client(engine: Engine) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "demo", "messages": question(), "temperature": 0, "max_tokens": 8, **fields})


def test_an_answer_and_a_stream(client: openai.OpenAI) -> None:
    answer = ask(client)
    assert answer.choices[0].message.content == "472" and answer.choices[0].finish_reason == "stop"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in ask(client, stream=True))
    assert text == "472"


NAMED: dict[str, Any] = {"type": "function", "function": {"name": "forecast"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("choice", "parallel"), [("required", False), (NAMED, True), (NAMED, False)])
def test_calls_that_must_come(client: openai.OpenAI, choice: Any, parallel: bool, stream: bool) -> None:
    asked = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel, "max_tokens": 120, "seed": 1}
    if stream:
        with client.chat.completions.stream(model="demo", messages=question(), temperature=0, **asked) as events:  # type: ignore[arg-type]
            message, reason = (end := events.get_final_completion().choices[0]).message, end.finish_reason
    else:
        message, reason = (end := ask(client, **asked).choices[0]).message, end.finish_reason
    assert message.tool_calls and len(message.tool_calls) == 1 and not message.content
    call = message.tool_calls[0]
    assert call.function.name in ("forecast", "now") if choice == "required" else call.function.name == "forecast"
    if reason == "tool_calls" and call.function.name == "forecast":
        arguments = json.loads(call.function.arguments)
        assert type(arguments["days"]) is int and arguments["unit"] in ("C", "F")
    assert reason in ("tool_calls", "length")


def test_parse(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model="demo", messages=question(), temperature=0, max_tokens=60, response_format=Reading)
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Reading) and answer.choices[0].finish_reason == "stop"
    assert "\n" not in (answer.choices[0].message.content or "")


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, messages=[{"role": "user", "content": "word " * 20_000}])
    assert caught.value.code == "context_length_exceeded" and caught.value.request_id
    with pytest.raises(openai.NotFoundError):
        ask(client, model="another")
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, n=17)
    assert caught.value.param == "n" and "16" in json.dumps(caught.value.body)

"""OpenAI's own client on `/v1/responses`, sync and async, against the demo model."""

import json
from typing import Any

import openai
import pytest

from tests.clients.asking import DAYS, Reading, data_url
from tests.e2e.serving import Engine

pytestmark = pytest.mark.clients

TOOLS: list[Any] = [
    {"type": "function", "name": "forecast", "parameters": DAYS, "strict": True},
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
NAMED: Any = {"type": "function", "name": "forecast"}


@pytest.fixture(scope="module")
def client(engine: Engine) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0)


def picture() -> dict[str, Any]:
    return {"type": "input_image", "image_url": data_url()}


def question(text: str = "What number is in picture 1?") -> list[Any]:
    return [{"role": "user", "content": [picture(), {"type": "input_text", "text": text}]}]


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "input": question(), "temperature": 0, "max_output_tokens": 8, **fields}


def test_an_answer_and_a_stream(client: openai.OpenAI) -> None:
    answer = client.responses.create(**asked(instructions="Be short."))
    assert answer.output_text == "472" and answer.status == "completed" and answer.instructions == "Be short."
    assert answer.usage is not None and answer.usage.input_tokens > 16 and answer.usage.output_tokens > 0
    with client.responses.stream(**asked(instructions="Be short.")) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == "472" and final.status == "completed"
    assert final.usage is not None and final.usage.total_tokens == answer.usage.total_tokens


def test_parse(client: openai.OpenAI) -> None:
    fields = asked(max_output_tokens=60)
    assert isinstance(client.responses.parse(**fields, text_format=Reading).output_parsed, Reading)
    with client.responses.stream(**fields, text_format=Reading) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Reading)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_calls_that_must_come(client: openai.OpenAI, choice: Any, is_streamed: bool) -> None:
    fields = asked(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, max_output_tokens=120, extra_body={"seed": 1})
    if is_streamed:
        with client.responses.stream(**fields) as stream:
            deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
            answer: Any = stream.get_final_response()
    else:
        answer, deltas = client.responses.create(**fields), None
    (call,) = answer.output
    assert call.type == "function_call" and (call.name == "forecast" or (choice == "required" and call.name == "now"))
    assert deltas is None or "".join(deltas) == call.arguments
    if answer.status == "completed" and call.name == "forecast":
        arguments = json.loads(call.arguments)
        assert type(arguments["days"]) is int and arguments["unit"] in ("C", "F")


def test_the_next_turn(client: openai.OpenAI) -> None:
    first = client.responses.create(**asked(tools=TOOLS, tool_choice=NAMED, max_output_tokens=120))
    call: Any = first.output[-1]
    history: list[Any] = [*question(), *(item.model_dump(exclude_none=True) for item in first.output)]
    lengths = []
    for output in ("see", [{"type": "input_text", "text": "see"}, picture()]):
        result = {"type": "function_call_output", "call_id": call.call_id, "output": output}
        answer = client.responses.create(**asked(input=[*history, result, *question()], tools=TOOLS))
        assert answer.status in ("completed", "incomplete") and answer.output and answer.usage is not None
        lengths.append(answer.usage.input_tokens)
    assert lengths[1] > lengths[0] + 16


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as missing:
        client.responses.create(**asked(previous_response_id="resp_1"))
    assert missing.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**asked(input="word " * 20_000))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**asked(model="another"))

"""OpenAI's own client, sync and async, against the demo model."""

import json
import math
import re
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


def complete(client: openai.OpenAI, prompt: Any, **fields: Any) -> list[Any]:
    return client.completions.create(**{"model": "demo", "prompt": prompt, "temperature": 0, **fields}).choices


def test_an_answer_and_a_stream(client: openai.OpenAI) -> None:
    answer = ask(client)
    assert answer.choices[0].message.content == "472" and answer.choices[0].finish_reason == "stop"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in ask(client, stream=True))
    assert text == "472"


async def test_async(engine: Engine) -> None:
    async with openai.AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(model="demo", messages=question(), temperature=0, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "472"
        assert [model.id async for model in client.models.list()] == ["demo"]


def test_log_probabilities(client: openai.OpenAI) -> None:
    """Red if they are not those of a distribution, or if greedy does not take the most likely token."""
    entries = ask(client, logprobs=True, top_logprobs=20).choices[0].logprobs.content
    for entry in entries:
        assert entry.logprob == entry.top_logprobs[0].logprob and entry.token == entry.top_logprobs[0].token
        assert 0 < sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1.001
    streamed = [chunk.choices[0].logprobs for chunk in ask(client, logprobs=True, top_logprobs=20, stream=True)]
    assert [entry.token for part in streamed if part for entry in part.content] == [entry.token for entry in entries]


def test_a_bias_decides(client: openai.OpenAI, engine: Engine) -> None:
    """Red if what a client adds to logits does not change what is drawn."""
    five = engine.client.post("/tokenize", json={"prompt": "5"}).json()["tokens"][0]
    forced = ask(client, logit_bias={str(five): 100}, max_tokens=3, extra_body={"ignore_eos": True})
    assert forced.choices[0].message.content == "555"
    assert "4" not in ask(client, extra_body={"bad_words": ["4"]}).choices[0].message.content
    assert set(ask(client, extra_body={"allowed_token_ids": [five], "ignore_eos": True}).choices[0].message.content) == {"5"}
    assert ask(client, extra_body={"min_tokens": 8}).usage.completion_tokens == 8


NAMED: dict[str, Any] = {"type": "function", "function": {"name": "forecast"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("choice", "parallel"), [("required", False), (NAMED, True), (NAMED, False)])
def test_calls_that_must_come(client: openai.OpenAI, choice: Any, parallel: bool, stream: bool) -> None:
    """Any model calls what it must under a grammar. Red if it does not, if the arguments break their schema, or if a stream differs."""
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
    """Red if the client's own way from a class to a schema and back does not end in an object."""
    answer = client.chat.completions.parse(model="demo", messages=question(), temperature=0, max_tokens=60, response_format=Reading)
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Reading) and answer.choices[0].finish_reason == "stop"
    assert "\n" not in (answer.choices[0].message.content or "")


def test_grammars(client: openai.OpenAI) -> None:
    grammars: list[tuple[dict[str, object], str]] = [
        ({"guided_regex": "[a-c]{3}x"}, "[a-c]{3}x"), ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"ebnf": 'root ::= "a" | "bc"'}, "a|bc"),
    ]  # fmt: skip
    for fields, pattern in grammars:
        answer = ask(client, max_tokens=30, extra_body=fields).choices[0]
        assert re.fullmatch(pattern, answer.message.content) and answer.finish_reason == "stop"
        assert re.fullmatch(pattern, complete(client, "x", max_tokens=30, extra_body=fields)[0].text)


def test_several_answers(client: openai.OpenAI) -> None:
    """Red if answers share their draws, if a seed does not repeat them, or if the prompt is computed or counted for each."""
    asked = {"n": 4, "temperature": 3, "top_p": 1, "seed": 5, "max_tokens": 12, "extra_body": {"top_k": 0}}
    first, again = (ask(client, **asked) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) > 1 and texts == [choice.message.content for choice in again.choices]
    assert first.usage.prompt_tokens == ask(client).usage.prompt_tokens
    streamed = [""] * 4
    for chunk in ask(client, **asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_completions_as_evaluations_ask_for_them(client: openai.OpenAI, engine: Engine) -> None:
    """lm-eval's log-likelihood: one token more, or none, the prompt's log-probabilities, cut at the length of the context.

    Red if a continuation is more or less likely than what the model says of it token by token."""
    context, continuation = "What number is", " in picture 1?"
    ids = engine.client.post("/tokenize", json={"prompt": context + continuation}).json()["tokens"]
    num_context = engine.client.post("/tokenize", json={"prompt": context}).json()["count"]
    found = complete(client, ids, max_tokens=1, logprobs=1, echo=True)[0].logprobs.token_logprobs
    assert len(found) == len(ids) + 1
    alone = complete(client, ids, max_tokens=0, logprobs=1, echo=True)[0]
    assert alone.text == context + continuation
    assert alone.logprobs.token_logprobs == [None, *(pytest.approx(value, abs=1e-4) for value in found[1:-1])]
    singly = 0.0
    for i in range(num_context, len(ids)):
        singly += complete(client, ids[:i], max_tokens=1, logprobs=0, logit_bias={str(ids[i]): 100})[0].logprobs.token_logprobs[0]
    assert sum(found[num_context:-1]) == pytest.approx(singly, abs=1e-3)


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, messages=[{"role": "user", "content": "word " * 20_000}])
    assert caught.value.code == "context_length_exceeded" and caught.value.request_id
    with pytest.raises(openai.NotFoundError):
        ask(client, model="another")
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, n=17)
    assert caught.value.param == "n" and "16" in json.dumps(caught.value.body)

"""Several answers to one request: one prompt, one set of images, and streams that interleave by index."""

import openai
import pytest
from tokenizers import Tokenizer

from engine.messages import (
    EngineRequest,
    ErrorInfo,
    RequestOutput,
)
from engine.stats import Stages
from tests.unit.server.pictures import PLAIN
from tests.unit.server.stack import FakeScheduler, Stack, answer_ids
from tests.unit.server.test_stack import chunks_of, ids_of, image, uri

WORDS = ("one", "two and", "three or more")


@pytest.fixture
def interleaved(stack: Stack, tokenizer: Tokenizer) -> None:
    """A token of every answer a step, until each has said its words."""
    answers = [ids_of(tokenizer, words) for words in WORDS]

    def script(scheduler: FakeScheduler, request: EngineRequest) -> None:
        longest = max(len(ids) for ids in answers[: request.n])
        for step in range(longest):
            outputs = [
                RequestOutput(request.rid, [ids[step]], "stop" if step == len(ids) - 1 else None, stages=Stages(), index=index)
                for index, ids in enumerate(answers[: request.n])
                if step < len(ids)
            ]
            scheduler.send(outputs, [request.rid] if step == longest - 1 else [])

    stack.scheduler.script = script


@pytest.mark.usefixtures("interleaved")
def test_answers_of_a_chat(stack: Stack, client: openai.OpenAI) -> None:
    """Red if answers change places or are lost, if the engine gets a request for each, or if the prompt is counted more than once."""
    before = len(stack.scheduler.requests)
    content = [image(uri(PLAIN["4:2:0"]))]
    answer = client.chat.completions.create(model="test-model", messages=[{"role": "user", "content": content}], n=3)  # type: ignore[misc,list-item]
    assert [(choice.index, choice.message.content) for choice in answer.choices] == list(enumerate(WORDS))
    (request,) = stack.scheduler.requests[before:]
    assert request.n == 3 and answer.usage is not None
    assert answer.usage.prompt_tokens == len(stack.scheduler.prompt(request))
    assert answer.usage.completion_tokens > answer.usage.prompt_tokens_details.cached_tokens  # type: ignore[union-attr]


@pytest.mark.usefixtures("interleaved")
def test_streams_interleave(stack: Stack) -> None:
    """Red if a choice lacks its role or its end, or if anything follows that."""
    chunks = chunks_of(stack.chat("x", n=3, stream=True).text)
    parts = [[c["choices"][0] for c in chunks if c["choices"][0]["index"] == i] for i in range(3)]  # type: ignore[index]
    for choices, words in zip(parts, WORDS, strict=True):
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in choices) == words
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    order = [chunk["choices"][0]["index"] for chunk in chunks]  # type: ignore[index]
    assert order != sorted(order)


@pytest.mark.usefixtures("interleaved")
def test_answers_of_completions(client: openai.OpenAI) -> None:
    """Red if the choices are not in the order of the prompts, and of each prompt's answers."""
    answer = client.completions.create(model="test-model", prompt=["a", "b"], n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate([*WORDS[:2], *WORDS[:2]]))


@pytest.mark.usefixtures("interleaved")
def test_a_stop_string_ends_its_answer_only(stack: Stack) -> None:
    """Red if the other answers end with the one that found it."""
    choices = stack.chat("x", n=3, stop=" and").json()["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["one", "two", "three or more"]


def test_a_stop_string_waits_for_min_tokens(stack: Stack, tokenizer: Tokenizer) -> None:
    """Red if the field reaches the sampler, but not those who look for stop strings."""
    ids = ids_of(tokenizer, "stop stop stop stop")
    stack.scheduler.script = answer_ids(ids)
    for least in (0, len(ids) // 2):
        (choice,) = stack.chat("x", stop="stop", min_tokens=least).json()["choices"]
        assert choice["message"]["content"].rstrip() == tokenizer.decode(ids[:least]).rstrip()
        assert choice["stop_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_ends_all_answers(stack: Stack, tokenizer: Tokenizer, stream: bool) -> None:
    """Red if a client waits for answers that will never come, or hears of one error several times."""

    def script(scheduler: FakeScheduler, request: EngineRequest) -> None:
        scheduler.send([RequestOutput(request.rid, ids_of(tokenizer, "x"), "stop", stages=Stages(), index=0)], [])
        error = ErrorInfo(422, "Image 1: it cannot be decoded.")
        scheduler.send([RequestOutput(request.rid, [], error=error, index=1)], [request.rid])

    stack.scheduler.script = script
    response = stack.chat("x", n=2, stream=stream)
    assert response.text.count("it cannot be decoded") == 1
    assert response.status_code == (200 if stream else 422)


def test_priority_reaches_the_scheduler(stack: Stack) -> None:
    assert stack.chat("x", priority=-3).status_code == 200
    assert stack.scheduler.requests[-1].priority == -3

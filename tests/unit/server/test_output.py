"""Outputs of the engine become events: what is long does not hold up what is short."""

import asyncio
from array import array
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
from tokenizers import Tokenizer

from engine.arena import Arena, create_memfd
from engine.messages import ChatPrompt, EngineOutputs, Event, Events, RequestOutput, Submit
from engine.params import OutputOptions, PromptLogprobs, SamplingParams, TokenLogprobs
from engine.stats import Stages
from server.processor.detokenize import TokenTable
from server.processor.output import Output
from server.processor.reasoning import OutputText, ThinkTokens
from server.processor.request import SLICE, Answer, Request
from server.processor.room import Room

NUM_PROMPT = 5 * SLICE + 7


class Sent:
    """An outbox that remembers."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def send(self, message: Events) -> None:
        self.events += message.events


class Tools:
    num_decoded = 0

    def __init__(self, room: Room):
        self.room = room


@pytest.fixture
def room() -> Iterator[Room]:
    arena = Arena(create_memfd("test", 1 << 20), 1 << 20)
    yield Room(arena, lambda: True)
    assert arena.is_empty()


def request(room: Room, tokenizer: Tokenizer, rid: int, num_top: int | None) -> Request:
    params = SamplingParams(logprobs=1, prompt_logprobs=num_top)
    submit = Submit(rid, ChatPrompt(b""), [], params, OutputOptions(), Stages())
    answer = Answer(OutputText(TokenTable(tokenizer), ThinkTokens(None, None), OutputOptions()))
    made = Request(submit, [], [answer], is_in_scheduler=True, num_prompt_tokens=NUM_PROMPT)
    made.prompt = room.take(4 * NUM_PROMPT)
    made.prompt.append(array("i", [70] * NUM_PROMPT).tobytes())
    return made


def drawn(rid: int, reason: Any = "stop") -> RequestOutput:
    scores = PromptLogprobs(1, 0, np.zeros(NUM_PROMPT - 1, np.float32).tobytes(), b"", b"")
    return RequestOutput(rid, [71], reason, None, 0, Stages(), [TokenLogprobs(-1.0, [71], [-1.0])], scores)


@pytest.mark.parametrize("is_abandoned", [False, True])
async def test_a_long_prompts_scores_let_others_pass(room: Room, tokenizer: Tokenizer, is_abandoned: bool) -> None:
    """Red if they go out at once, after the end, to a client that left, or if their memory is given back too early."""
    requests = {1: request(room, tokenizer, 1, 0), 2: request(room, tokenizer, 2, None)}
    sent = Sent()
    async with asyncio.TaskGroup() as tasks:
        output = Output(requests, cast(Any, Tools(room)), cast(Any, sent), cast(Any, Sent()), tasks)
        output.forward(EngineOutputs([drawn(1, None)], []))
        await asyncio.sleep(0)
        requests[1].is_ended = is_abandoned
        output.forward(EngineOutputs([drawn(1), drawn(2)], [1, 2]))
        assert [event.rid for event in sent.events] == [1, 2] and sent.events[1].finish_reason == "stop"
    first = [event for event in sent.events if event.rid == 1]
    assert not requests
    if is_abandoned:
        assert len(first) == 1
        return
    sizes = [len(event.logprobs) for event in first]
    assert sizes == [*[SLICE] * 5, 7, 1, 1] and [event.num_tokens for event in first] == [0] * 6 + [1, 2]
    assert [event.finish_reason for event in first] == [None] * 7 + ["stop"]
    assert first[0].logprobs[0].logprob is None and first[0].num_prompt_tokens == NUM_PROMPT

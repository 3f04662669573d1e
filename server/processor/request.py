"""State of one request in the processor."""

import asyncio
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from engine.wire.arena import GrowingRegion
from engine.wire.messages import ChatPrompt, EngineRequest, ErrorInfo, Event, ImageSource, RequestOutput, Submit
from engine.wire.stats import TokenDetails
from server.errors import PROMPT, error_of, forget_frames
from server.processor.media.sources import RegionAllocator, release_all, together
from server.processor.media.video import Medium
from server.processor.text.output_text import OutputText
from server.processor.text.scores import PromptScores, named

Prepared = EngineRequest | Event | ErrorInfo  # for the scheduler; the only event of a request that is only counted; or its error


@dataclass(slots=True)
class AnswerState:
    text: OutputText
    echo: str = ""  # the prompt's text, which the answer starts with
    num_tokens: int = 0
    details: TokenDetails = field(default_factory=TokenDetails)
    is_ended: bool = False  # the last event has been sent


@dataclass(slots=True)
class Request:
    submit: Submit
    media: list[Medium]
    answers: list[AnswerState]
    scores: PromptScores | None = None
    task: asyncio.Task[Prepared] | None = None  # while it is prepared
    regions: dict[str, GrowingRegion] = field(default_factory=dict)  # regions of its EngineRequest; the prompt's token ids under "prompt"
    is_in_scheduler: bool = False
    is_ended: bool = False  # all its answers have ended or were aborted
    awaits_memory: bool = False  # for its payloads
    pixels: dict[int, ImageSource] = field(default_factory=dict)  # of its files, by item
    decoding: asyncio.Task[None] | None = None  # the latest task that decodes files
    num_prompt_tokens: int = 0

    async def decode(self, indexes: Sequence[int], allocator: RegionAllocator) -> dict[int, ImageSource]:
        """Decode these items (ascending), files, to one region, waiting for its memory. RequestError or ArenaTooSmall."""
        items = [(medium, k) for medium in self.media for k in range(len(medium.visual.lengths))]
        if lacking := [index for index in indexes if index not in self.pixels]:
            region = await allocator.reserve(sum(items[index][0].item_bytes for index in lacking))
            self.regions[f"pixels {len(self.regions)}"] = region
            offset, works = region.offset, []
            for medium, group in itertools.groupby((items[index] for index in lacking), key=operator.itemgetter(0)):
                mine = [k for _, k in group]
                works.append(medium.decode(mine, offset))
                offset += len(mine) * medium.item_bytes
            self.pixels.update(zip(lacking, itertools.chain(*await together(*works)), strict=True))
        return {index: self.pixels[index] for index in indexes}

    def end(self, answer: AnswerState) -> None:
        answer.is_ended = True
        self.is_ended = all(answer.is_ended for answer in self.answers)

    def error_of(self, failure: BaseException) -> ErrorInfo:
        """Return the error for the client after a failure to prepare it, with its dialect's field names."""
        error = error_of(failure)
        forget_frames(failure)
        return msgspec.structs.replace(error, param=self.submit.prompt_field) if error.param == PROMPT else error

    def is_stop_token(self, token_id: int) -> bool:
        return token_id in self.submit.params.stop_token_ids or token_id in self.answers[0].text.table.specials

    def with_token(self, event: Event, answer: AnswerState, output: RequestOutput, index: int) -> Event:
        """Return the event with the requested id and log-probabilities of its token."""
        wants_ids = self.submit.output.token_ids
        if not (output.logprobs or wants_ids):
            return event
        token_id, spelling = output.token_ids[index], answer.text.table.spelling
        found = output.logprobs[index : index + 1]
        logprobs = [named(spelling, token_id, one.logprob, zip(one.top_ids, one.top_logprobs, strict=True)) for one in found]
        prompt_ids = self.prompt_ids if wants_ids and answer.num_tokens == 1 else []
        return msgspec.structs.replace(event, token_ids=[token_id] if wants_ids else [], logprobs=logprobs, prompt_ids=prompt_ids)

    @property
    def prompt_ids(self) -> list[int]:
        return list(np.frombuffer(self.regions["prompt"].view, np.int32).tolist())

    async def release(self, allocator: RegionAllocator) -> None:
        """Free the request's memory as soon as no thread or guest uses it."""
        if self.decoding is not None:
            self.decoding.cancel()
            await asyncio.wait([self.decoding])
        await release_all(self.media)
        for region in self.regions.values():
            allocator.free(region)


def tools_of(submit: Submit) -> list[dict[str, Any]]:
    """Return the tools whose calls are parsed from the answers."""
    if submit.output.calls == "none" or not isinstance(submit.prompt, ChatPrompt) or submit.prompt.tools is None:
        return []
    tools: list[dict[str, Any]] = msgspec.json.decode(submit.prompt.tools)
    return tools

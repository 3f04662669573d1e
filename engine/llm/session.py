"""Requests to one engine from its own process: what `LLM` and `AsyncLLM` have in common.

Ask ──▶ JSON ──▶ Endpoint of server/api ──▶ Submit ──▶ processor ─ ─ ▶ Events ──▶ RequestOutput
"""

import asyncio
import contextlib
import itertools
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeVar

import msgspec
import numpy as np
import pybase64

from engine.hosted import HostedEngine
from engine.launch.flags import read_flags
from engine.launch.supervise import ChildDied
from engine.llm.inputs import CHAT, COMPLETIONS, EMBEDDINGS, WITH_PICTURES, Ask, words_of
from engine.llm.outputs import CompletionOutput, EmbeddingOutput, EmbeddingRequestOutput, RequestOutput, ToolCall
from engine.wire.messages import Event
from server.api.endpoint import Endpoint, GatheringEndpoint, Job
from server.errors import RequestError
from server.http.body import read_body
from server.http.client import Stream
from server.http.sse import Choice

RETRY_S = 0.05
DEFAULTS = {"log_level": "warning"}

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Session:
    """Of the event loop in which it is started. Each request is checked as over HTTP: RequestError, a ValueError; ChildDied when the engine
    is gone. At most `num_places` are under way; more wait."""

    def __init__(self, flags: dict[str, Any]):
        """Raises ValueError for a bad flag, OSError."""
        config, notes = read_flags(words_of(DEFAULTS | flags))
        for note in notes:
            warnings.warn(note, stacklevel=4)
        if config.dp != 1 or config.plan:
            raise ValueError("an LLM is one engine: --dp and --plan are for engine.serve")
        self.num_places = min(config.max_queued_requests, 2 * config.max_num_seqs)
        self._places = asyncio.Semaphore(self.num_places)
        self._ids = itertools.count()
        self._endpoints: dict[str, Endpoint] = {}
        self._engine = HostedEngine(config)

    async def start(self) -> None:
        """Until the engine is ready. Raises ValueError, OSError or ChildDied."""
        await self._engine.start()
        self._endpoints = {path: self._engine.api.endpoint(path) for path in (CHAT, COMPLETIONS, EMBEDDINGS, WITH_PICTURES)}

    async def close(self) -> None:
        """Ends every process."""
        self._endpoints = {}
        await self._engine.stop()

    async def stream(self, ask: Ask) -> AsyncIterator[RequestOutput]:
        """What has been said so far, as it grows. Whoever stops reading ends the engine's work."""
        async with self._places, contextlib.aclosing(self._grow(ask)) as growth:
            async for growing in growth:
                yield growing.output()

    async def answer(self, ask: Ask) -> RequestOutput:
        async with self._places, contextlib.aclosing(self._grow(ask)) as growth:
            *_, last = [growing async for growing in growth]  # the same one, each time
        return last.output()

    async def embed(self, ask: Ask) -> EmbeddingRequestOutput:
        async with self._places, self._asked(ask) as (stream, job, events):
            events += [event async for event in self._events(stream, [])]
        endpoint = self._endpoints[EMBEDDINGS]
        assert isinstance(endpoint, GatheringEndpoint)
        shown = msgspec.json.decode(bytes(endpoint.answer(job, events).body))["data"][0]["embedding"]
        vector = np.frombuffer(pybase64.b64decode(shown), np.float32).tolist()
        return EmbeddingRequestOutput(str(next(self._ids)), EmbeddingOutput(vector), events[0].num_prompt_tokens)

    async def map(self, answer: Callable[[Item], Awaitable[Answer]], items: list[Item], note: Callable[[Answer], object]) -> list[Answer]:
        """Of all items in their order; `note` hears of each when it is there. The first error ends all."""
        answers: dict[int, Answer] = {}
        left = iter(enumerate(items))

        async def work(left: Iterable[tuple[int, Item]]) -> None:
            for index, item in left:
                answers[index] = await answer(item)
                note(answers[index])

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(len(items), self.num_places)):
                    group.create_task(work(left))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [answers[index] for index in range(len(items))]

    async def _grow(self, ask: Ask) -> AsyncGenerator["Growing", None]:
        async with self._asked(ask) as (stream, _, events):
            growing = Growing(str(next(self._ids)), ask.prompt, stream)
            async for event in self._events(stream, events):
                growing.add(event)
                yield growing

    @contextlib.asynccontextmanager
    async def _asked(self, ask: Ask) -> AsyncIterator[tuple[Stream, Job, list[Event]]]:
        """With the first events. Waits while the engine is full."""
        value = await asyncio.to_thread(ask.value) if ask.reads_files else ask.value()
        data = msgspec.json.encode(value)
        while True:
            stream, job = await self._submit(ask.path, data)
            try:
                events = await stream.next()
                if (error := events[0].error) is None or error.code != "overloaded":
                    yield stream, job, events
                    return
            finally:
                self._engine.api.client.close(stream)
            await asyncio.sleep(RETRY_S)

    async def _submit(self, path: str, data: bytes) -> tuple[Stream, Job]:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": data}

        while True:
            self._check_alive()
            service = self._endpoints[path].service
            try:
                with service.client.reading():
                    body = await read_body(receive, len(data), None, service.arena, service.config, service.client)
                    return await self._endpoints[path].submit(body)
            except RequestError as error:
                if error.info.code != "overloaded":
                    raise
            await asyncio.sleep(RETRY_S)

    async def _events(self, stream: Stream, first: list[Event]) -> AsyncIterator[Event]:
        """Until the end."""
        events = first
        while True:
            for event in events:
                if event.error is not None:
                    self._check_alive()
                    raise RequestError.of(event.error)
                yield event
            if not stream.open:
                return
            events = await stream.next()

    def _check_alive(self) -> None:
        if self._engine.death is not None:
            raise ChildDied(self._engine.death)
        if not self._endpoints:
            raise RuntimeError("the engine is not running")


class Growing:
    """The answers to one prompt."""

    def __init__(self, request_id: str, prompt: Any, stream: Stream):
        self._request_id, self._prompt = request_id, prompt
        self._choices = {answer: Choice(number) for answer, number in stream.choices.items()}

    def add(self, event: Event) -> None:
        choice = self._choices[event.rid, event.index]
        choice.note(event)
        choice.note_text(event)

    def output(self) -> RequestOutput:
        choices = list(self._choices.values())
        usage, is_finished = choices[0].usage, all(choice.finish_reason is not None for choice in choices)
        said = [_completion(choice) for choice in choices]
        first = choices[0]
        return RequestOutput(
            self._request_id, self._prompt, said, list(first.prompt_ids), list(first.prompt_logprobs) or None, usage.num_prompt,
            usage.num_cached, is_finished,
        )  # fmt: skip


def _joined(pieces: list[str]) -> str:
    """Join pieces of text, also in the list itself, so that the next call joins only what has come since."""
    if len(pieces) > 1:
        pieces[:] = ["".join(pieces)]
    return pieces[0] if pieces else ""


def _completion(choice: Choice) -> CompletionOutput:
    return CompletionOutput(
        index=choice.index,
        text=_joined(choice.content),
        reasoning=_joined(choice.reasoning),
        tool_calls=[ToolCall(call.id, call.name, _joined(call.pieces)) for call in choice.calls],
        logprobs=list(choice.logprobs) or None,
        token_ids=list(choice.token_ids),
        num_tokens=choice.usage.num_generated,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
    )

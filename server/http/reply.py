"""The answer to one accepted request: waits for its events and writes SSE or JSON. Made by `server/api`, run by the ASGI server.

    first event ──▶ error: JSON with its status
               └──▶ headers ──▶ one chunk a token, all that have gathered in one write ──▶ finish, usage, [DONE]

The client may leave at any time, also before the first event: a watcher listens for that and the engine is told to stop.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.messages import (
    ErrorInfo,
    Event,
)
from engine.stats import Stages
from server.http.client import Client, Stream
from server.http.direct import direct_reader
from server.http.guards import error_response
from server.http.log import Record, record_of
from server.http.metrics import Metrics
from server.http.sse import Choice, Format, Usage, stage_times, timings_json

SSE_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
LARGE_LOGPROBS = 1024  # from here on a document is made in a thread
WRITE_S = 5
CLIENT_CLOSED_REQUEST = 499  # for metrics only, nobody is there to read it


async def watch_for_disconnect(receive: Receive, stream: Stream) -> None:
    """Ends the stream's waiting when the client closes its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.disconnect()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyOptions:
    """How the client wants its answer, and when its body came."""

    model: str
    created: int
    started: float  # first and last byte of the body
    received: float
    deadline: float | None  # of the engine's work; the last of the answer may take WRITE_S more
    is_streamed: bool
    include_usage: bool
    continuous_usage: bool
    timings: bool
    num_images: int


class Reply:
    """An ASGI response, run once. Gives its stream back to the client table however it ends."""

    def __init__(self, stream: Stream, client: Client, metrics: Metrics, format: Callable[..., Format], options: ReplyOptions):
        self._stream = stream
        self._client = client
        self._metrics = metrics
        self._options = options
        self._format = format(options.created, options.model, options.include_usage, options.continuous_usage)
        self._choices = {answer: Choice(number) for answer, number in stream.choices.items()}
        self._stages = Stages(received=options.received)
        self._reason = "disconnect"  # unless all choices end
        self._has_first_token = False
        self._has_status = False  # a stream's headers are out
        self._record = Record("")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(watch_for_disconnect(receive, self._stream))
        self._record = record_of(scope)
        self._stream.address = (scope.get("client") or ("",))[0]
        try:
            async with asyncio.timeout_at(None if self._options.deadline is None else self._options.deadline + WRITE_S):
                await self._write(scope, receive, send)
        except (ClientDisconnect, TimeoutError):
            if (reader := direct_reader(scope)) is not None:
                reader.abort()  # it may still be there and read too slowly
            if not self._has_status:
                self._metrics.note_response(CLIENT_CLOSED_REQUEST)
        finally:
            watcher.cancel()
            self._client.close(self._stream)
            self._metrics.note_finish(self._reason, time.monotonic() - self._options.received)
            total = self._total()
            self._record.num_prompt, self._record.num_cached = total.num_prompt, total.num_cached
            self._record.num_generated, self._record.num_images = total.num_generated, self._options.num_images

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = await self._stream.next()
        if events[0].error is not None:
            await self._refuse(events[0].error, scope, receive, send)
        elif self._options.is_streamed:
            await self._write_stream(events, send)
        else:
            await self._write_document(events, scope, receive, send)

    async def _refuse(self, error: ErrorInfo, scope: Scope, receive: Receive, send: Send) -> None:
        self._reason = "error"
        self._record.reason = error.message
        self._metrics.note_refusal(error)
        await error_response(error, scope)(scope, receive, send)

    async def _write_stream(self, events: list[Event], send: Send) -> None:
        self._metrics.note_response(200)
        self._has_status = True
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        chunks: list[bytes] = []
        while True:
            self._note_progress(events)
            error = None
            for event in events:
                if event.error is None:
                    self._append_chunks(chunks, event)
                else:
                    error = event.error
            is_last = error is not None or not self._stream.open
            if error is not None:
                self._reason = "error"
                self._record.reason = error.message
                chunks.append(self._format.error_chunk(error))
            elif is_last:
                chunks.append(self._format.end(self._total(), self._timings()))
            await send({"type": "http.response.body", "body": b"".join(chunks), "more_body": not is_last})
            if is_last:
                return
            chunks.clear()
            events = await self._stream.next()

    def _append_chunks(self, chunks: list[bytes], event: Event) -> None:
        choice = self._choices[event.rid, event.index]
        if not choice.usage.num_prompt:
            choice.usage.num_prompt, choice.usage.num_cached = event.num_prompt_tokens, event.num_cached_tokens
            chunks.append(self._format.first_chunk(choice))
        is_token = event.num_tokens > choice.usage.num_generated and event.finish_reason is None
        choice.note(event)
        if event.text or is_token or event.calls or event.logprobs:
            chunks.append(self._format.token_chunk(choice, event))
        if choice.finish_reason is not None:
            self._reason = choice.finish_reason
            chunks.append(self._format.finish_chunk(choice, self._timings()))

    async def _write_document(self, events: list[Event], scope: Scope, receive: Receive, send: Send) -> None:
        while True:
            self._note_progress(events)
            for event in events:
                if event.error is not None:
                    await self._refuse(event.error, scope, receive, send)
                    return
                choice = self._choices[event.rid, event.index]
                choice.note(event)
                choice.note_text(event)
            if not self._stream.open:
                break
            events = await self._stream.next()
        choices = list(self._choices.values())
        self._reason = choices[-1].finish_reason or "error"
        self._metrics.note_response(200)
        arguments = choices, self._total(), self._timings()
        if sum(len(choice.logprobs) for choice in choices) > LARGE_LOGPROBS:
            body = await asyncio.to_thread(self._format.document, *arguments)
        else:
            body = self._format.document(*arguments)
        await Response(body, media_type="application/json")(scope, receive, send)

    def _total(self) -> Usage:
        """A prompt counts once, however many answers it gets."""
        total = Usage()
        for (_, index), choice in self._choices.items():
            total.add(choice.usage, with_prompt=index == 0)
        return total

    def _note_progress(self, events: list[Event]) -> None:
        """Measures the first token and, of each choice, the gaps between the following ones."""
        now = time.monotonic()
        for event in events if len(events) == 1 else {(event.rid, event.index): event for event in events}.values():
            choice = self._choices[event.rid, event.index]
            num_tokens = event.num_tokens - choice.usage.num_generated
            if choice.last_time:
                self._metrics.note_tokens(num_tokens, now - choice.last_time)
            elif num_tokens > 0 and not self._has_first_token:
                self._has_first_token = True
                self._record.first_token = now
                self._stages = next((event.stages for event in events if event.stages is not None), self._stages)
                self._stages.sent = now
                self._metrics.note_first_token(now - self._options.received, stage_times(self._stages, self._options.started))
            if num_tokens > 0:
                choice.last_time = now

    def _timings(self) -> dict[str, object]:
        """The `timings` member of a response that asked for it."""
        return {"timings": timings_json(self._stages, self._options.started)} if self._options.timings else {}


class GatheredReply:
    """An ASGI response, run once: waits for the one event of every choice, then answers with what `show` makes of them, in the choices'
    order. Gives its stream back however it ends."""

    def __init__(self, stream: Stream, client: Client, metrics: Metrics, num_images: int, show: Callable[[list[Event]], Response]):
        self._stream = stream
        self._client = client
        self._metrics = metrics
        self._num_images = num_images
        self._show = show

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(watch_for_disconnect(receive, self._stream))
        try:
            events = await self._gather()
        except ClientDisconnect:
            self._metrics.note_response(CLIENT_CLOSED_REQUEST)
            return
        finally:
            watcher.cancel()
            self._client.close(self._stream)
        record = record_of(scope)
        record.num_images = self._num_images
        if events[-1].error is not None:
            record.reason = events[-1].error.message
            self._metrics.note_refusal(events[-1].error)
            await error_response(events[-1].error, scope)(scope, receive, send)
            return
        record.num_prompt = sum(event.num_prompt_tokens for event in events)
        self._metrics.note_response(200)
        await self._show(events)(scope, receive, send)

    async def _gather(self) -> list[Event]:
        """Of all choices; an error comes at once, and is the last."""
        found: dict[int, Event] = {}
        while self._stream.open:
            for event in await self._stream.next():
                if event.error is not None:
                    return [event]
                found[self._stream.choices[event.rid, event.index]] = event
        return [found[number] for number in range(len(found))]

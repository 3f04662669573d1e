"""Response to one accepted request: waits for its events and writes SSE or JSON. If the client disconnects, the request is aborted."""

import asyncio
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.wire.messages import ErrorInfo, Event, Submit
from engine.wire.stats import Stages
from server.api.http.connection import connection_of
from server.api.http.metrics import Metrics
from server.api.http.middleware import Record, error_response, record_of
from server.api.http.registry import RequestRegistry, Stream
from server.api.http.streaming import Choice, Format, MakeFormat, ReplyOptions, Usage, stage_times, timings_json
from server.errors import ABORTED, error_of

Show = Callable[[list[Event]], Response]  # makes a response of one event per choice, in order

SSE_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
WRITE_S = 5
PING_S = 10  # without a chunk
CLIENT_CLOSED_REQUEST = 499  # for metrics only: the client has disconnected


class Asked(Protocol):
    model: str | None
    timeout: float | None


class Reply(ABC):
    """ASGI response to a request with one Submit per prompt; `begin` must be called first. The stream is always closed. A client that has
    not read the response WRITE_S after the deadline is disconnected."""

    _stream: Stream
    _registry: RequestRegistry
    _metrics: Metrics

    def __init__(self, request: Asked, submits: list[Submit]):
        self.request, self.submits = request, submits
        self._record = Record("")
        self._has_status = False  # a stream's headers have been sent

    @property
    def num_images(self) -> int:
        return sum(len(submit.media) for submit in self.submits)

    def begin(self, stream: Stream, registry: RequestRegistry, metrics: Metrics) -> None:
        self._stream, self._registry, self._metrics = stream, registry, metrics

    @abstractmethod
    async def respond(self, send: Send) -> Response | ErrorInfo | None:
        """Wait for the events. Return the response to send, or None if a stream has been written. ClientDisconnect."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        deadline = self.submits[0].deadline
        self._record = record_of(scope)
        try:
            async with asyncio.timeout_at(None if deadline is None else deadline + WRITE_S):
                await self._answer(scope, receive, send)
                await connection_of(scope).flow.drain()
        except (ClientDisconnect, TimeoutError):
            connection_of(scope).abort()  # the client may still be connected and read too slowly
            if not self._has_status:
                self._metrics.note_response(CLIENT_CLOSED_REQUEST)
        finally:
            watcher.cancel()
            self._registry.close(self._stream)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self.respond(send)
        if isinstance(response, ErrorInfo):
            self._record.reason = response.message
            self._metrics.note_refusal(response)
            response = error_response(response, scope)
        elif response is not None:
            self._metrics.note_response(200)
        if response is not None:
            await response(scope, receive, send)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._stream.disconnect()


class GeneratedReply(Reply):
    _format: Format

    def __init__(self, request: Asked, submits: list[Submit], *, format: MakeFormat, options: ReplyOptions):
        super().__init__(request, submits)
        self._options, self._make_format = options, format
        self._choices: dict[tuple[int, int], Choice] = {}
        self._stages = Stages(received=options.received)
        self._reason = "disconnect"  # replaced when all choices have ended
        self._has_first_token = False

    async def respond(self, send: Send) -> Response | ErrorInfo | None:
        events = await self._stream.next()
        self._format = self._make_format(self._options)
        self._choices = {answer: Choice(number) for answer, number in self._stream.choices.items()}
        if self._options.is_streamed and events[0].error is None:
            await self._write_stream(events, send)
            return None
        return await self._gather(events)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._note_end()

    def _note_end(self) -> None:
        now = time.monotonic()
        self._metrics.note_finish(self._reason, now - self._options.received)
        if self._has_first_token:
            lengths = [choice.usage.num_generated for choice in self._choices.values()]
            self._metrics.note_work(self._total().num_prompt, lengths, self._stages, now)

    async def _write_stream(self, events: list[Event], send: Send) -> None:
        self._metrics.note_response(200)
        self._has_status = True
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        loop, quiet_until = asyncio.get_running_loop(), 0.0
        while True:
            error = next((event.error for event in events if event.error is not None), None)
            chunks: list[bytes] = []
            try:
                self._note_progress(events)
                for event in events:
                    if event.error is None:
                        self._append_chunks(chunks, event)
            except Exception as failure:  # it ends this request only
                error = error_of(failure)
            is_last = error is not None or not self._stream.open
            if error is not None:
                self._reason = "error"
                self._record.reason = error.message
                self._metrics.note_error(error)
                chunks.append(self._format.error_chunk(error))
            elif is_last:
                chunks.append(self._format.end(self._total(), self._extra()))
            body = b"".join(chunks)
            if not body and loop.time() >= quiet_until:
                body = self._format.ping
            if body or is_last:
                await send({"type": "http.response.body", "body": body, "more_body": not is_last})
                quiet_until = loop.time() + PING_S
            if is_last:
                return
            try:
                async with asyncio.timeout_at(quiet_until):
                    events = await self._stream.next()
            except TimeoutError:
                events = []

    def _append_chunks(self, chunks: list[bytes], event: Event) -> None:
        choice = self._choices[event.rid, event.index]
        if not choice.usage.num_prompt:
            choice.usage.num_prompt, choice.usage.num_cached = event.num_prompt_tokens, event.num_cached_tokens
            choice.prompt_ids = event.prompt_ids
            chunks.append(self._format.first_chunk(choice))
        is_token = not self._options.drops_empty and event.num_tokens > choice.usage.num_generated
        choice.note(event)
        event = self._shown(event)
        self._reason = choice.finish_reason or self._reason
        if event.text or is_token or event.calls or event.logprobs or event.token_ids or choice.finish_reason:
            chunks.append(self._format.token_chunk(choice, event, self._extra() if choice.finish_reason else {}))

    async def _gather(self, events: list[Event]) -> Response | ErrorInfo:
        while True:
            self._note_progress(events)
            for event in events:
                if event.error is not None:
                    self._reason = "error"
                    return event.error
                choice = self._choices[event.rid, event.index]
                choice.note(event)
                choice.note_text(self._shown(event))
            if not self._stream.open:
                break
            events = await self._stream.next()
        choices = list(self._choices.values())
        self._reason = choices[-1].finish_reason or "error"
        document = functools.partial(self._format.document, choices, self._total(), self._extra())
        has_scores = any(choice.logprobs or choice.prompt_scores for choice in choices)  # serialised in a thread, as they may be many
        return Response(await asyncio.to_thread(document) if has_scores else document(), media_type="application/json")

    def _shown(self, event: Event) -> Event:
        hides = event.is_reasoning and self._options.hides_reasoning
        return msgspec.structs.replace(event, text="", is_reasoning=False) if hides else event

    def _total(self) -> Usage:
        """Return the total usage. A prompt counts once for all of its answers."""
        total = Usage()
        for (_, index), choice in self._choices.items():
            total.add(choice.usage, with_prompt=index == 0)
        return total

    def _note_progress(self, events: list[Event]) -> None:
        now = time.monotonic()
        for event in events if len(events) == 1 else {(event.rid, event.index): event for event in events}.values():
            choice = self._choices[event.rid, event.index]
            num_tokens = event.num_tokens - choice.usage.num_generated
            if choice.last_time:
                self._metrics.note_tokens(num_tokens, now - choice.last_time)
            elif num_tokens > 0 and not self._has_first_token:
                self._has_first_token = True
                self._stages = next((event.stages for event in events if event.stages is not None), self._stages)
                self._stages.sent = now
                self._metrics.note_first_token(now - self._options.received, stage_times(self._stages, self._options.started))
            if num_tokens > 0:
                choice.last_time = now

    def _extra(self) -> dict[str, object]:
        extra: dict[str, object] = {}
        if self._registry.weight_version:
            extra["metadata"] = {"weight_version": self._stages.weight_version or self._registry.weight_version}
        if not self._options.timings:
            return extra
        last = max(choice.last_time for choice in self._choices.values())
        generation = max(0.0, last - self._stages.sent) if self._has_first_token else 0.0
        return extra | {"timings": {**timings_json(self._stages, self._options.started), "generation_ms": round(1000 * generation, 3)}}


class GatheredReply(Reply):
    """Response made by `show`, in a thread, from the single events of all choices, in order. An error is returned immediately."""

    def __init__(self, request: Asked, submits: list[Submit], show: Show):
        super().__init__(request, submits)
        self._show = show

    async def respond(self, send: Send) -> Response | ErrorInfo | None:
        found: dict[int, Event] = {}
        while self._stream.open:
            for event in await self._stream.next():
                if event.error is not None or event.finish_reason == "abort":
                    return event.error or ABORTED
                found[self._stream.choices[event.rid, event.index]] = event
        return await asyncio.to_thread(self._show, [found[number] for number in range(len(found))])

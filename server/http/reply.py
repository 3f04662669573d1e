"""The answer to one accepted chat request: waits for its events and writes SSE or JSON. Made by `server/api`, run by the ASGI server.

    first event ──▶ error: JSON with its status
               └──▶ headers ──▶ one chunk a token, all that have gathered in one write ──▶ finish, usage, [DONE]

The client may leave at any time, also before the first event: a watcher listens for that and the engine is told to stop.
"""

import asyncio
import time
from dataclasses import dataclass

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.messages import ErrorInfo, Event, Stages
from server.errors import error_body
from server.http.client import Client, Stream, is_terminal
from server.http.metrics import Metrics
from server.http.sse import DONE, ChunkFormatter, Usage, completion_json, error_chunk, message_json, stage_times, timings_json

SSE_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
CLIENT_CLOSED_REQUEST = 499  # for metrics only, nobody is there to read it


def error_response(info: ErrorInfo) -> Response:
    """An error before the headers are out."""
    headers = {} if info.retry_after is None else {"Retry-After": str(info.retry_after)}
    return Response(error_body(info), info.status, headers, "application/json")


async def watch_for_disconnect(receive: Receive, stream: Stream) -> None:
    """Ends the stream's waiting when the client closes its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.disconnect()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyOptions:
    """How the client wants its answer, and when its body came."""

    model: str
    completion_id: str
    created: int
    started: float  # first and last byte of the body
    received: float
    is_streamed: bool
    include_usage: bool
    continuous_usage: bool
    timings: bool


class Reply:
    """An ASGI response, run once. Gives its stream back to the client table however it ends."""

    def __init__(self, stream: Stream, client: Client, metrics: Metrics, options: ReplyOptions):
        self._stream = stream
        self._client = client
        self._metrics = metrics
        self._options = options
        self._usage = Usage()
        self._stages = Stages(received=options.received)
        self._reason = "disconnect"  # unless a terminal event comes first
        self._last_time = 0.0  # when the last tokens came
        self._has_status = False  # a stream's headers are out

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(watch_for_disconnect(receive, self._stream))
        try:
            events = await self._stream.next()
            if events[0].error is not None:
                self._reason = "error"
                await self._refuse(events[0].error, scope, receive, send)
            elif self._options.is_streamed:
                await self._write_stream(events, send)
            else:
                await self._write_document(events, scope, receive, send)
        except ClientDisconnect:
            if not self._has_status:
                self._metrics.note_response(CLIENT_CLOSED_REQUEST)
        finally:
            watcher.cancel()
            self._client.close(self._stream)
            self._metrics.note_finish(self._reason, time.monotonic() - self._options.received)

    async def _refuse(self, error: ErrorInfo, scope: Scope, receive: Receive, send: Send) -> None:
        self._metrics.note_response(error.status)
        await error_response(error)(scope, receive, send)

    async def _write_stream(self, events: list[Event], send: Send) -> None:
        options = self._options
        formatter = ChunkFormatter(options.completion_id, options.created, options.model, options.include_usage, options.continuous_usage)
        self._metrics.note_response(200)
        self._has_status = True
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        chunks = [formatter.role_chunk(Usage(events[0].num_prompt_tokens, events[0].num_cached_tokens))]
        while True:
            self._note_progress(events)
            for event in events:
                self._append_chunks(chunks, event, formatter)
            is_last = is_terminal(events[-1])
            await send({"type": "http.response.body", "body": b"".join(chunks), "more_body": not is_last})
            if is_last:
                return
            chunks.clear()
            events = await self._stream.next()

    def _append_chunks(self, chunks: list[bytes], event: Event, formatter: ChunkFormatter) -> None:
        is_token = event.num_tokens > self._usage.num_generated and event.finish_reason is None
        self._usage.note(event)
        if event.text or is_token:
            chunks.append(formatter.token_chunk(event.text, event.is_reasoning, self._usage))
        if event.error is not None:
            self._reason = "error"
            chunks.append(error_chunk(event.error))
        elif event.finish_reason is not None:
            self._reason = event.finish_reason
            timings = self._timings()
            chunks += (formatter.finish_chunk(event.finish_reason, self._usage, timings), formatter.usage_chunk(self._usage, timings), DONE)

    async def _write_document(self, events: list[Event], scope: Scope, receive: Receive, send: Send) -> None:
        options = self._options
        content: list[str] = []
        reasoning: list[str] = []
        while True:
            self._note_progress(events)
            for event in events:
                self._usage.note(event)
                (reasoning if event.is_reasoning else content).append(event.text)
            last = events[-1]
            if is_terminal(last):
                break
            events = await self._stream.next()
        self._reason = last.finish_reason or "error"
        if last.error is not None:
            await self._refuse(last.error, scope, receive, send)
            return
        self._metrics.note_response(200)
        message = message_json("".join(content), "".join(reasoning), self._usage)
        body = completion_json(options.completion_id, options.created, options.model, message, self._reason, self._usage, self._timings())
        await Response(body, media_type="application/json")(scope, receive, send)

    def _note_progress(self, events: list[Event]) -> None:
        """Measures the first token and the gaps between the following ones."""
        now = time.monotonic()
        num_tokens = events[-1].num_tokens - self._usage.num_generated
        if self._last_time:
            self._metrics.note_tokens(num_tokens, now - self._last_time)
        elif num_tokens > 0:
            stages = next((event.stages for event in events if event.stages is not None), self._stages)
            stages.sent = now
            self._stages = stages
            self._metrics.note_first_token(now - self._options.received, stage_times(stages, self._options.started))
        if num_tokens > 0:
            self._last_time = now

    def _timings(self) -> dict[str, object]:
        """The `timings` member of a response that asked for it."""
        return {"timings": timings_json(self._stages, self._options.started)} if self._options.timings else {}

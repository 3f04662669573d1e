"""Output of the scheduler: conversion of tokens to text, and decoding of requested pixels.

EngineOutputs ──▶ tokens ──▶ text, stop strings ──▶ Events ──▶ api
             ├──▶ wanted ──▶ request.decode ──▶ Pixels ──▶ scheduler
             └──▶ released ──▶ memory is given back
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from engine.wire.ipc import Outbox
from engine.wire.messages import (
    Abort,
    CallDelta,
    EngineOutputs,
    Event,
    Events,
    FinishReason,
    Pixels,
    RequestOutput,
    ToScheduler,
    WantedPixels,
)
from engine.wire.reports import Numbers
from server.errors import ABORTED, error_of
from server.processor.media.sources import RegionAllocator
from server.processor.request import AnswerState, Request


@dataclass(slots=True)
class Output:
    """Sends events for the scheduler's outputs, and removes requests that the scheduler has released."""

    requests: dict[int, Request]
    allocator: RegionAllocator
    num_decoded: Callable[[], int]  # files of media
    api: Outbox[Events]
    scheduler: Outbox[ToScheduler]
    tasks: asyncio.TaskGroup  # a failure in it ends the process

    def forward(self, message: EngineOutputs) -> None:
        events: list[Event] = []
        for output in message.outputs:
            request = self.requests.get(output.rid)
            if request is not None:
                with self._guard(request, events):
                    self._append_events(events, request, request.answers[output.index], output)
        for rid in message.released:
            self._release(rid, events)
        for wanted in message.wanted:
            self._decode(wanted)
        stats = message.stats
        if stats is not None:
            stats = msgspec.structs.replace(stats, images_decoded=self.num_decoded())
        if events or message.heartbeat:
            self.api.send(Events(events, [], stats, message.heartbeat))

    @contextlib.contextmanager
    def _guard(self, request: Request, events: list[Event]) -> Iterator[None]:
        """Context in which an exception ends this request only."""
        try:
            yield
        except Exception as failure:
            request.is_ended = True
            events.append(Event(request.submit.rid, error=error_of(failure)))
            self.scheduler.send(Abort(request.submit.rid))

    def _append_events(self, events: list[Event], request: Request, answer: AnswerState, output: RequestOutput) -> None:
        """Append one event per token. An answer's first event has the scores of the prompt; its last is terminal and has the last token."""
        if request.is_ended or answer.is_ended:
            return
        is_first, first = bool(output.token_ids) and not answer.num_tokens, len(events)
        self._append_tokens(events, request, answer, output)
        if is_first and request.scores is not None:
            events[first] = request.scores.added_to(events[first], request.prompt_ids, output.report)

    def _append_tokens(self, events: list[Event], request: Request, answer: AnswerState, output: RequestOutput) -> None:
        if request.submit.params.max_tokens == 0:  # only the echo is requested: the sampled token is not shown
            output = msgspec.structs.replace(output, token_ids=[], logprobs=[], finish_reason=output.finish_reason and "length")
        final = None if output.error is not None else output.finish_reason
        hides_end = final == "stop" and not request.submit.output.include_stop  # a stop token is not part of the text
        for i, token_id in enumerate(output.token_ids):
            is_last = final is not None and i == len(output.token_ids) - 1
            text, is_stopped = answer.text.push(token_id, is_hidden=is_last and hides_end and request.is_stop_token(token_id))
            answer.num_tokens += 1
            if output.details is not None:
                answer.details.note(output.details, i)
            ends = final if is_last else None
            if is_stopped:
                self._stop_early(request, answer, output)
                event = _full_event(request, output, text, answer.text.calls, "stop", answer.text.stop_string)
            elif ends:
                event = _finish(request, answer, output, text, ends)
            else:
                event = _event(request, answer, output, text)
            events.append(request.with_token(event, answer, output, i))
            if is_stopped:
                return
        if output.error is not None:
            request.is_ended = True
            events.append(Event(output.rid, error=output.error))
        elif final is not None and not output.token_ids:
            events.append(_finish(request, answer, output, "", final))

    def _stop_early(self, request: Request, answer: AnswerState, output: RequestOutput) -> None:
        """End an answer at a stop string. The scheduler stops computing it, unless it has already ended it."""
        request.end(answer)
        if output.finish_reason is None and output.error is None:
            self.scheduler.send(Abort(output.rid, index=output.index))

    def _release(self, rid: int, events: list[Event]) -> None:
        """Release a request: the engine no longer uses its regions. If the engine aborted it without an event, send one."""
        request = self.requests[rid]
        if not request.is_ended:
            request.is_ended = True
            events.append(Event(rid, error=ABORTED))

        async def drop() -> None:
            await request.release(self.allocator)
            del self.requests[rid]

        self.tasks.create_task(drop())

    def _decode(self, wanted: WantedPixels) -> None:
        """Decode files of a request. One that has ended needs no answer."""
        request = self.requests.get(wanted.rid)
        if request is not None and not request.is_ended:
            request.decoding = self.tasks.create_task(self._answer(wanted, request, request.decoding))

    async def _answer(self, wanted: WantedPixels, request: Request, previous: "asyncio.Task[None] | None") -> None:
        try:
            if previous is not None:
                await previous
            pixels = Pixels(wanted.rid, await request.decode(wanted.indexes, self.allocator))
        except Exception as failure:
            pixels = Pixels(wanted.rid, error=request.error_of(failure))
        self.scheduler.send(pixels)


def _event(request: Request, answer: AnswerState, output: RequestOutput, text: str) -> Event:
    if answer.num_tokens == 1:
        return _full_event(request, output, text, answer.text.calls)
    content = answer.text
    return Event(output.rid, text, answer.num_tokens, content.is_reasoning, calls=content.calls, index=output.index)


def _full_event(
    request: Request,
    output: RequestOutput,
    text: str,
    calls: list[CallDelta],
    reason: FinishReason | None = None,
    stop_reason: int | str | None = None,
) -> Event:
    """Return the first or last event of an answer, which has the counts for the usage."""
    answer = request.answers[output.index]
    echo, answer.echo = answer.echo, ""
    return Event(
        output.rid,
        echo + text,
        answer.num_tokens,
        answer.text.is_reasoning,
        reason,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=output.num_cached_tokens,
        stages=output.stages,
        calls=calls,
        stop_reason=stop_reason,
        index=output.index,
        report=output.report if isinstance(output.report, Numbers) else None,
        details=answer.details,
    )


def _finish(request: Request, answer: AnswerState, output: RequestOutput, text: str, reason: FinishReason) -> Event:
    """Return the terminal event. Held-back text is shown unless it completes a stop string."""
    request.end(answer)
    calls = answer.text.calls
    rest, is_stopped = answer.text.flush(is_cut=reason != "stop")
    last = output.token_ids[-1] if output.token_ids else None
    stop_token = last if reason == "stop" and last in request.submit.params.stop_token_ids else None
    stop_reason = answer.text.stop_string if is_stopped else stop_token
    return _full_event(request, output, text + rest, calls + answer.text.calls, "stop" if is_stopped else reason, stop_reason)

"""The processor process: media, prompts and detokenisation. `python -m server.processor RUNTIME.json`, started by the launcher.

    Payload ──▶ base64 ┬▶ Upcoming ──────────────────▶ scheduler
                       ▼ hash
    Submit ──▶ prepare: media + prompt ──▶ EngineRequest ──▶ scheduler
                                                                 │
    Events ◀── text, stop strings ◀── EngineOutputs ◀────────────┤
               decode ──▶ Pixels ──▶ scheduler    ◀── wanted ◀───┘

A request's regions of our arena live until the scheduler has released it and nothing is decoded, or until it fails before it gets there.
"""

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from engine.arena import Arena
from engine.ipc import AsyncInbox, Child, Outbox
from engine.messages import (
    API_ARENA,
    PROCESSOR_ARENA,
    Abort,
    EngineOutputs,
    EngineRequest,
    ErrorInfo,
    Event,
    Events,
    FinishReason,
    ImageSource,
    ImageSpan,
    Payload,
    Region,
    RequestOutput,
    Submit,
    ToProcessor,
    ToScheduler,
    WantedPixels,
)
from server.arrivals import Arrivals
from server.checkpoint import read_checkpoint
from server.detokenize import TokenTable
from server.errors import RequestError, error_of, error_type, overloaded
from server.media import Beginning, LoadedImage, MediaLoader
from server.prompt import PromptBuilder
from server.reasoning import OutputText, ThinkTokens
from server.region import Holdings
from server.wanted import PixelMaker
from server.warm import warm_up

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005  # pool threads leave the interpreter to the event loop sooner than by default
LARGE_MESSAGES_BYTES = 1 << 14  # from here on tokenising leaves the event loop
LARGE_MESSAGES_AT_ONCE = 2  # the largest take seconds and a gigabyte or two each
ABORTED = ErrorInfo(503, "The engine gave this request up.", error_type(503), code="aborted", retry_after=1)


@dataclass(slots=True)
class Request:
    """A request of this process, from Submit until nothing of it is left here."""

    submit: Submit
    holdings: Holdings
    begun: dict[int, Beginning]
    text: OutputText
    task: asyncio.Task[EngineRequest] | None = None  # while it is prepared
    images: list[LoadedImage] = field(default_factory=list)
    decodings: dict[int, asyncio.Task[ImageSource]] = field(default_factory=dict)  # by index: files whose pixels the scheduler wants
    is_in_scheduler: bool = False
    is_ended: bool = False  # its terminal event is out, or nobody wants it
    num_prompt_tokens: int = 0
    num_tokens: int = 0


class Processor:
    """Single-threaded but for the pools of its parts. `run` is its loop."""

    def __init__(self, child: Child):
        self._config = child.config
        self._max_model_len = child.runtime.max_model_len  # until the scheduler says what the KV pool holds
        self._checkpoint = read_checkpoint(Path(child.runtime.model_folder))
        self._arena = Arena(child.runtime.arena_fds[PROCESSOR_ARENA], child.arena_size(PROCESSOR_ARENA))
        self._inbox: AsyncInbox[ToProcessor] = AsyncInbox(child.run_dir, "processor", ToProcessor)
        self._api: Outbox[Events] = Outbox(child.run_dir, "api")
        self._scheduler: Outbox[ToScheduler] = Outbox(child.run_dir, "scheduler")
        bodies = child.arena_view(API_ARENA)
        warm_up(self._arena, bodies)
        self._loader = MediaLoader(child.config, self._checkpoint, bodies)
        self._pixels = PixelMaker(self._loader, self._scheduler, lambda: len(self._requests) + len(self._arrivals) > 1)
        self._prompts = PromptBuilder(self._checkpoint)
        self._tokens = TokenTable(self._prompts.tokenizer)
        self._think = ThinkTokens.of(self._prompts.tokenizer)
        self._large_prompts = ThreadPoolExecutor(LARGE_MESSAGES_AT_ONCE, "prompt")
        self._arrivals = Arrivals(self._arena, self._loader, self._scheduler)
        self._requests: dict[int, Request] = {}

    async def run(self) -> None:
        """Handles messages until it is cancelled."""
        try:
            while True:
                message = await self._inbox.recv()
                match message:
                    case Payload():
                        self._arrivals.begin(message.rid, message.payload)
                    case Submit():
                        self._accept(message)
                    case Abort():
                        self._abort(message)
                    case EngineOutputs():
                        self._forward(message)
        finally:
            self._large_prompts.shutdown(wait=False, cancel_futures=True)
            await self._loader.close()

    # ---- in: a request is prepared ---------------------------------------------------------------------------------------------------

    def _accept(self, submit: Submit) -> None:
        if len(self._requests) >= self._config.max_queued_requests:
            error = overloaded("The server has as many requests as it can queue.").info
            self._refuse(submit.rid, [Event(submit.rid, error=error)], submit.body)
            return
        for media in submit.media:
            if media.payload is not None:
                self._arrivals.begin(submit.rid, media.payload)
        arrival = self._arrivals.pop(submit.rid)
        request = Request(submit, arrival.holdings, arrival.begun, OutputText(self._tokens, self._think, submit.stop))
        self._requests[submit.rid] = request
        request.task = asyncio.create_task(self._build(request))
        request.task.add_done_callback(lambda task: _when_ended(request.begun.values(), lambda: self._hand_over(request, task)))

    def _refuse(self, rid: int, events: list[Event], body: int | None) -> None:
        """Ends an arrival that does not become a request."""

        def drop() -> None:
            self._drop(self._arrivals.pop(rid).holdings)
            self._send(events, body)

        _when_ended(self._arrivals.get(rid).begun.values(), drop)

    async def _build(self, request: Request) -> EngineRequest:
        """Images load in the pools while the prompt is rendered and tokenised here."""
        submit = request.submit
        try:
            async with asyncio.TaskGroup() as group:
                loads = [group.create_task(self._load(request, i)) for i in range(len(submit.media))]
                encode = group.create_task(self._encode(submit))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        request.images = images = [load.result() for load in loads]
        prompt = self._prompts.expand(encode.result(), [image.num_tokens for image in images])
        num_prompt = len(prompt.ids)
        self._check_length(num_prompt)
        region = request.holdings.take(4 * num_prompt)
        region.append(prompt.ids.tobytes())
        request.num_prompt_tokens = num_prompt
        request.text.read_prompt(prompt.ids)
        spans = [
            ImageSpan(image.hash, start, image.num_tokens, image.grid, image.source)
            for image, start in zip(images, prompt.starts, strict=True)
        ]
        room = self._max_model_len - num_prompt
        limit = submit.params.max_tokens
        params = msgspec.structs.replace(submit.params, max_tokens=room if limit is None else min(limit, room))
        submit.stages.submitted = time.monotonic()
        wire = Region(PROCESSOR_ARENA, region.offset, region.used)
        return EngineRequest(submit.rid, wire, spans, params, submit.stages, submit.cache_salt)

    async def _load(self, request: Request, index: int) -> LoadedImage:
        return await self._loader.load(index, request.submit.media[index], request.holdings, request.begun)

    async def _encode(self, submit: Submit) -> list[int]:
        def job() -> list[int]:
            return self._prompts.encode(msgspec.json.decode(submit.messages), len(submit.media), submit.template_kwargs)

        if len(submit.messages) < LARGE_MESSAGES_BYTES:
            return job()
        return await asyncio.get_running_loop().run_in_executor(self._large_prompts, job)

    def _check_length(self, num_prompt: int) -> None:
        if num_prompt >= self._max_model_len:
            text = f"The prompt has {num_prompt} tokens; the context of this server holds {self._max_model_len}, answer included."
            raise RequestError(400, text, "messages", "context_length_exceeded")

    def _hand_over(self, request: Request, task: asyncio.Task[EngineRequest]) -> None:
        """A prepared request goes to the scheduler; of one that failed, or that nobody waits for, nothing remains here."""
        submit = request.submit
        request.task = None
        error: ErrorInfo | None = None
        if not task.cancelled():
            failure = task.exception()
            error = None if failure is None else error_of(failure)
        if task.cancelled() or error is not None or request.is_ended:
            self._drop(request.holdings)
            del self._requests[submit.rid]
        else:
            request.is_in_scheduler = True
            self._scheduler.send(task.result())
        self._send([Event(submit.rid, error=error)] if error is not None else [], submit.body)

    def _send(self, events: list[Event], body: int | None) -> None:
        bodies = [] if body is None else [body]
        if events or bodies:
            self._api.send(Events(events, bodies))

    def _abort(self, message: Abort) -> None:
        """The client left: whatever stage the request is in, it ends without a further event."""
        if message.body is not None:
            self._refuse(message.rid, [], message.body)
            return
        rid = message.rid
        request = self._requests.get(rid)
        if request is None or request.is_ended:
            return
        request.is_ended = True
        if request.is_in_scheduler:
            self._scheduler.send(Abort(rid))
        elif request.task is not None:
            request.task.cancel()

    # ---- out: tokens become text -----------------------------------------------------------------------------------------------------

    def _forward(self, message: EngineOutputs) -> None:
        """One Events for everything that a step brought."""
        events: list[Event] = []
        for output in message.outputs:
            request = self._requests.get(output.rid)
            if request is not None and not request.is_ended:
                self._append_events(events, request, output)
        for rid in message.released:
            self._release(rid, events)
        for wanted in message.wanted:
            self._decode(wanted)
        stats = message.stats
        if stats is not None:
            self._max_model_len = stats.max_model_len
            stats = msgspec.structs.replace(stats, images_decoded=self._loader.num_decoded)
        if events or message.heartbeat:
            self._api.send(Events(events, [], stats, message.heartbeat))
        if stats is not None and not self._requests and not self._arrivals:
            self._arena.check()
            assert self._arena.is_empty(), "a request's region was lost in the arena"

    def _append_events(self, events: list[Event], request: Request, output: RequestOutput) -> None:
        """One event a token; the last one of a request is terminal and carries the last token, so that an end token is no extra event."""
        final = None if output.error is not None else output.finish_reason
        hidden = request.submit.params.stop_token_ids if final == "stop" else ()  # a stop token ends the text, it is no part of it
        for i, token_id in enumerate(output.token_ids):
            is_last = final is not None and i == len(output.token_ids) - 1
            text, is_stopped = request.text.push(token_id, is_hidden=is_last and token_id in hidden)
            request.num_tokens += 1
            if is_stopped:
                self._stop_early(request, output)
                events.append(_full_event(request, output, text, "stop"))
                return
            if final is not None and is_last:
                events.append(_finish(request, output, text, final))
                return
            is_first = request.num_tokens == 1
            events.append(_full_event(request, output, text) if is_first else _event(request, text))
        if output.error is not None:
            request.is_ended = True
            events.append(Event(request.submit.rid, error=output.error))
        elif final is not None:
            events.append(_finish(request, output, "", final))

    def _stop_early(self, request: Request, output: RequestOutput) -> None:
        """A stop string was found: the scheduler need not go on, unless it has ended the request itself."""
        request.is_ended = True
        if output.finish_reason is None and output.error is None:
            self._scheduler.send(Abort(request.submit.rid))

    def _release(self, rid: int, events: list[Event]) -> None:
        """The engine is done with the request's regions. A request that it gave up without a word still gets its terminal event."""
        request = self._requests[rid]
        if not request.is_ended:
            request.is_ended = True
            events.append(Event(rid, error=ABORTED))

        def drop() -> None:
            self._drop(request.holdings)
            del self._requests[rid]

        _when_ended(request.decodings.values(), drop)

    def _decode(self, wanted: WantedPixels) -> None:
        """The scheduler has to encode an image that stayed a file. If the request has ended, it knows or will know without an answer."""
        rid, index = wanted.rid, wanted.index
        request = self._requests.get(rid)
        if request is None or request.is_ended:
            return
        request.decodings[index] = self._pixels.make(wanted, request.images[index], request.holdings)

    def _drop(self, holdings: Holdings) -> None:
        holdings.drop_all()
        self._pixels.note_room()


def _when_ended(tasks: Iterable[asyncio.Task[Any]], then: Callable[[], None]) -> None:
    """Calls `then` when no pool thread reads or writes for these images any more: at once, unless nobody has waited for them."""
    running = [task for task in tasks if not task.done()]
    if not running:
        then()
        return
    for task in running:
        task.cancel()
    asyncio.gather(*running, return_exceptions=True).add_done_callback(lambda _: then())


def _event(request: Request, text: str) -> Event:
    """An event between the first and the last."""
    return Event(request.submit.rid, text, request.num_tokens, request.text.is_reasoning)


def _full_event(request: Request, output: RequestOutput, text: str, reason: FinishReason | None = None) -> Event:
    """The first or last event of a request: with the counts that its usage needs."""
    rid, num_tokens, num_prompt = request.submit.rid, request.num_tokens, request.num_prompt_tokens
    return Event(rid, text, num_tokens, request.text.is_reasoning, reason, None, num_prompt, output.num_cached_tokens, output.stages)


def _finish(request: Request, output: RequestOutput, text: str, reason: FinishReason) -> Event:
    """The terminal event: what was held back is shown, unless it completes a stop string."""
    request.is_ended = True
    if reason in ("abort", "error"):
        return Event(request.submit.rid, error=ABORTED)
    rest, is_stopped = request.text.flush()
    return _full_event(request, output, text + rest, "stop" if is_stopped else reason)


async def serve(child: Child) -> None:
    """Runs until SIGTERM or until the launcher is gone; a broken invariant is raised."""
    processor = Processor(child)
    loop = asyncio.get_running_loop()
    running = asyncio.create_task(processor.run())
    loop.add_signal_handler(signal.SIGTERM, running.cancel)
    child.on_orphaned(lambda: stop_from_thread(loop, running))
    child.ready()
    with contextlib.suppress(asyncio.CancelledError):
        await running


def stop_from_thread(loop: asyncio.AbstractEventLoop, running: asyncio.Task[None]) -> None:
    loop.call_soon_threadsafe(running.cancel)


def main() -> None:
    """Entry point of the processor process."""
    child = Child.attach("processor")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides when to stop
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        uvloop.run(serve(child))
    except Exception as error:
        child.failed(f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main()

"""Intake of requests: images and prompt are prepared, then the request is sent to the scheduler.

Payload ──▶ image.start ─┐
Submit ──▶ image.load, prompt ──▶ EngineRequest ──▶ scheduler
                 └──▶ an error, and the body is returned to the api
"""

import asyncio
import contextlib
import time
from array import array
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.wire.arena import ArenaFull, ArenaTooSmall, GrowingRegion
from engine.wire.config import EngineConfig, num_cpus
from engine.wire.ipc import Outbox
from engine.wire.messages import (
    TIMED_OUT,
    Abort,
    AnyRef,
    EngineRequest,
    ErrorInfo,
    Event,
    Events,
    MediaRef,
    Payload,
    Submit,
    ToScheduler,
    VideoRef,
)
from engine.wire.params import Prompt
from server.checkpoint import Checkpoint
from server.errors import RequestError, error_of, forget_frames, overloaded
from server.processor.grammar import AnswerGrammars
from server.processor.media.image import Image, Images
from server.processor.media.sources import RegionAllocator, release_all, together
from server.processor.media.video import Medium, Videos
from server.processor.request import AnswerState, Prepared, Request, tools_of
from server.processor.text.output_text import OutputText, ThinkTokens, TokenTable
from server.processor.text.prompt import MAX_TOKENS, PromptBuilder, too_long
from server.processor.text.scores import PromptScores

MAX_PROMPT_SCORES = 1 << 18  # log-probabilities of a request's prompts, alternatives included; each prompt has an equal share
LARGE_MESSAGES_BYTES = 1 << 14  # larger prompts are tokenised in a thread
LARGE_MESSAGES_AT_ONCE = max(1, min(2, num_cpus() // 2))  # the largest take seconds and up to 2 GB each


@dataclass
class Intake:
    """Preparation of requests, from the api's message to the scheduler's."""

    requests: dict[int, Request]
    allocator: RegionAllocator
    images: Images
    videos: Videos
    api: Outbox[Events]
    scheduler: Outbox[ToScheduler]
    tasks: asyncio.TaskGroup  # a failure in it ends the process
    config: EngineConfig
    checkpoint: InitVar[Checkpoint]
    model_folder: InitVar[Path]
    max_model_len: int

    def __post_init__(self, checkpoint: Checkpoint, model_folder: Path) -> None:
        self._prompts = PromptBuilder(checkpoint)
        self._tokens = TokenTable(self._prompts.tokenizer)
        self._think = ThinkTokens.of(self._prompts.tokenizer)
        seconds, template = self.config.grammar_timeout, self._prompts.template.source
        self.grammars = AnswerGrammars(model_folder, seconds, self.allocator, template, self._think.end)
        self._large_prompts = ThreadPoolExecutor(LARGE_MESSAGES_AT_ONCE, "prompt")
        self._early: dict[int, dict[int, Image]] = {}  # images of announced requests by the offset of their payload
        self._turn = asyncio.Lock()  # of requests that wait for memory for their payloads

    @property
    def num_holders(self) -> int:
        """Number of requests that hold memory, including announced ones without a Submit."""
        return len(self.requests) + len(self._early)

    async def close(self) -> None:
        await self.grammars.pool.close()
        self._large_prompts.shutdown(wait=False, cancel_futures=True)

    def begin(self, message: Payload) -> None:
        """Start an image of a body that is still arriving. A Submit follows, or an Abort with the body."""
        self._note_arrival(message.rid)
        image = Image(self.images, MediaRef(message.payload))
        self._early.setdefault(message.rid, {})[message.payload.offset] = image
        image.start()

    def accept(self, submit: Submit) -> None:
        if len(self.requests) >= self.config.max_queued_requests:
            self._give_up(submit.rid, submit.body, overloaded("The server's request queue is full.").info)
            return
        try:
            answers = self._answers(submit)
        except Exception as failure:  # it ends this request only
            self._give_up(submit.rid, submit.body, error_of(failure))
            return
        self._note_arrival(submit.rid)
        early = self._early.pop(submit.rid, {})
        media = [self._medium(ref, early) for ref in submit.media]
        scores = None if submit.params.prompt_logprobs is None else PromptScores(submit, self._tokens)
        request = Request(submit, media, answers, scores)
        self.requests[submit.rid] = request
        request.task = asyncio.create_task(self._prepare(request))
        self.tasks.create_task(self._hand_over(request, request.task, list(early.values())))

    def _answers(self, submit: Submit) -> list[AnswerState]:
        functions = [tool["function"] for tool in tools_of(submit)]
        schemas = {function["name"]: (function.get("parameters") or {}).get("properties") or {} for function in functions}
        return [AnswerState(OutputText(self._tokens, self._think, submit.output, schemas)) for _ in range(submit.n)]

    def abort(self, message: Abort) -> None:
        """End a request whose client has disconnected, without a further event."""
        request = self.requests.get(message.rid)
        if message.body is not None:
            self._give_up(message.rid, message.body)
        elif request is not None and not request.is_ended:
            request.is_ended = True
            if request.is_in_scheduler:
                self.scheduler.send(Abort(message.rid))
            elif request.task is not None:
                request.task.cancel()

    def _medium(self, ref: AnyRef, early: dict[int, Image]) -> Medium:
        def image_of(ref: MediaRef) -> Image:
            image = (early.pop(ref.payload.offset, None) if ref.payload else None) or Image(self.images, ref)
            image.file.ref = ref  # an early one has no limits
            return image

        if isinstance(ref, VideoRef):
            return self.videos.make(ref, image_of)
        image = image_of(ref)
        image.start()
        return image

    def _note_arrival(self, rid: int) -> None:
        if rid not in self._early:
            self.images.early.arm(is_idle=not self.num_holders)

    def _give_up(self, rid: int, body: int | None, error: ErrorInfo | None = None) -> None:
        async def end() -> None:
            await release_all(self._early.get(rid, {}).values())
            self._early.pop(rid, None)
            self._send_event(None if error is None else Event(rid, error=error), body)

        self.tasks.create_task(end())

    async def _prepare(self, request: Request) -> Prepared:
        """Prepare a request. Errors are returned, not raised: a task keeps the stack of an exception."""
        deadline = request.submit.deadline
        try:
            async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()) as scope:
                await self._take_payloads(request)
                return await self._build(request)
        except Exception as failure:
            if isinstance(failure, TimeoutError) and scope.expired():
                forget_frames(failure)
                return error_of(ArenaFull()) if request.awaits_memory else TIMED_OUT
            return request.error_of(failure)

    async def _take_payloads(self, request: Request) -> None:
        """Take memory for all payloads. A request that lacks some waits for its turn without any."""
        for i, medium in enumerate(request.media):
            medium.index = i
        if all([medium.start() for medium in request.media]):
            return
        if sum(medium.num_bytes for medium in request.media) > self.allocator.inputs.size:
            raise ArenaTooSmall
        request.awaits_memory = True
        await release_all(request.media)
        async with self._turn:
            for medium in request.media:
                while not medium.start():
                    await self.allocator.wait()
        request.awaits_memory = False

    async def _build(self, request: Request) -> EngineRequest | Event:
        """Build the scheduler's request, or the event of a request that is only counted. Images load in the pools while the prompt is
        rendered and tokenised."""
        submit, media = request.submit, request.media
        size = self._prompts.size(submit.prompt)

        async def encode() -> tuple[list[int], str]:
            if size < LARGE_MESSAGES_BYTES:
                return self._encode(request)
            return await asyncio.get_running_loop().run_in_executor(self._large_prompts, self._encode, request)

        works: list[Coroutine[Any, Any, Any]] = [encode(), *(medium.load() for medium in media)]
        if submit.grammar is not None or submit.output.calls != "none":
            works.append(self.grammars.prepare(request))
        (ids, echo), *_ = await together(*works)
        for answer in request.answers:
            answer.echo = echo
        prompt = self._prompts.expand(ids, [medium.visual for medium in media])
        num_prompt = len(prompt.ids)
        if submit.is_counted_only:
            counted = [] if isinstance(submit.prompt, list) else prompt.ids.tolist()
            return Event(submit.rid, echo, finish_reason="stop", num_prompt_tokens=num_prompt, prompt_ids=counted)
        if num_prompt >= self.max_model_len:
            raise too_long(self.max_model_len, str(num_prompt))
        num_top = submit.params.prompt_logprobs
        if num_top is not None and submit.num_prompts * submit.n * num_prompt * (1 + num_top) > MAX_PROMPT_SCORES:
            words = f"The log-probabilities of the prompts exceed {MAX_PROMPT_SCORES:,}, the limit: ask for fewer, or send fewer prompts."
            raise RequestError(400, words, code="invalid_value")
        request.regions["prompt"] = self._put(prompt.ids)
        request.num_prompt_tokens = num_prompt
        for answer in request.answers:
            answer.text.read_prompt(prompt.ids)
        changes: dict[str, Any] = {"bad_words": self._prompts.bad_words(submit.output.bad_words)}
        if submit.params.thinking_token_budget is not None:
            changes |= self._thinking(request)
        if submit.pooled_words is not None:
            changes |= {"max_tokens": 1, "pooled_ids": self._prompts.first_tokens(submit.pooled_words)}
        submit.stages.submitted = time.monotonic()
        spans = [span for medium, starts in zip(media, prompt.starts, strict=True) for span in medium.spans(starts)]
        return EngineRequest.of(
            submit,
            prompt=request.regions["prompt"].wire(),
            images=spans,
            params=msgspec.structs.replace(submit.params, **changes),
            grammar=self.grammars.of(request) if "grammar" in request.regions else None,
        )

    def _put(self, ids: "array[int]") -> GrowingRegion:
        region = self.allocator.allocate(4 * len(ids))
        region.append(ids.tobytes())
        return region

    def _encode(self, request: Request) -> tuple[list[int], str]:
        """Return the encoded prompt, and its text if requested."""
        submit = request.submit
        if submit.is_counted_only and isinstance(submit.prompt, list):  # only its text is requested
            return submit.prompt, self._tokens.text_of(submit.prompt)
        prompt = submit.prompt
        limit = MAX_TOKENS if submit.is_counted_only else self.max_model_len
        ids = self._prompts.encode(prompt, [medium.kind for medium in request.media], limit, submit.pooled_words is not None)
        return ids, self._echo(prompt) if submit.output.echo else ""

    def _echo(self, prompt: Prompt) -> str:
        if isinstance(prompt, list):
            return self._tokens.text_of(prompt)
        return prompt if isinstance(prompt, str) else ""

    def _thinking(self, request: Request) -> dict[str, tuple[int | None, ...]]:
        """Return the parameters of a thinking budget. RequestError 400 if the model does not think."""
        start, end, allowed, name = self._think.start, self._think.end, request.submit.params.allowed_token_ids, "thinking_token_budget"
        if end is None:
            raise RequestError(400, f"{name}: the model has no token that ends its reasoning.", name, "unsupported_parameter")
        ids = (end,) if request.answers[0].text.is_thinking else (start, end)
        return {"think_ids": ids, "allowed_token_ids": (*allowed, end) if allowed else ()}

    async def _hand_over(self, request: Request, task: asyncio.Task[Prepared], strays: list[Image]) -> None:
        """Send a prepared request to the scheduler, or release it if it failed or was aborted. Also release `strays`: payloads elsewhere in
        the body that look like images."""
        rid, prepared = request.submit.rid, None
        await asyncio.wait([task])
        with contextlib.suppress(asyncio.CancelledError):  # by `abort`, which has removed the request
            prepared = task.result()
        request.task = None
        await release_all(strays)
        if isinstance(prepared, EngineRequest) and not request.is_ended:
            request.is_in_scheduler = True
            self.scheduler.send(prepared)
        else:
            await request.release(self.allocator)
            del self.requests[rid]
        if isinstance(prepared, ErrorInfo):
            prepared = Event(rid, error=prepared)
        self._send_event(prepared if isinstance(prepared, Event) else None, request.submit.body)

    def _send_event(self, event: Event | None, body: int | None) -> None:
        if event is not None or body is not None:
            self.api.send(Events([event] if event else [], [] if body is None else [body]))

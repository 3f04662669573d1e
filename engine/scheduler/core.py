"""Request life cycle between plans: arrival, results, ends, releases. No sockets and no tensors.

A plan has "landed" when its results are processed. Each request has one terminal output; its resources are released when its last plan
has landed.
"""

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

import msgspec
import numpy as np
import numpy.typing as npt

from engine.scheduler import policy
from engine.scheduler.blocks import BlockHasher
from engine.scheduler.policy import PlannedStep
from engine.scheduler.request import Request, Status, snapshot_points
from engine.scheduler.state import State, is_idle
from engine.wire.adapters import AdapterRead
from engine.wire.messages import (
    DEPTH,
    TIMED_OUT,
    EngineOutputs,
    EngineRequest,
    ErrorInfo,
    FinishReason,
    ImageSource,
    Pixels,
    RequestOutput,
    StepResult,
    TokenLogprobs,
)
from engine.wire.reports import joined
from engine.wire.stats import EngineStats, TokenDetails

UNREADABLE = ErrorInfo(422, "An image could not be decoded.", code="invalid_image")
LACKS_MEMORY = ErrorInfo(503, "The media memory of the server was full for too long.", code="overloaded", retry_after=5)
OUT_OF_MEMORY = ErrorInfo(503, "The engine ran out of memory.", code="out_of_memory", retry_after=1)
QUICK_MS = 3.0  # device time of a quick step: the host needs 1 to 2 ms from the end of a step to the launch of the step after next


class Proposer:
    """Interface for tokens proposed for running requests, which steps verify. This class proposes none; others override its methods."""

    def offer(self, state: State) -> None:
        """Before a plan: set `Request.proposed` where the results are complete, and hold back rows that should get some later."""

    def take(self, request: Request, proposed: list[int]) -> None:
        """Take the tokens that workers proposed before a request's newest ones."""

    def release(self, request: Request) -> None:
        """Release the state of a request that has ended."""


class SchedulerCore:
    def __init__(
        self,
        state: State,
        num_ranks: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        proposer: Proposer | None = None,
    ):
        self.state = state
        self.proposer = proposer or Proposer()
        self._num_ranks = num_ranks
        self._capacity = min(max_model_len, state.blocks.num_blocks * state.blocks.block_size - state.limits.num_lookahead)
        self._eos_token_ids = eos_token_ids
        self._deadlines: list[tuple[float, int]] = []  # heap of (time, rid)
        self._requests: dict[int, list[Request]] = {}  # answers not yet released
        self._in_flight: deque[PlannedStep] = deque()
        self.depth = DEPTH  # target number of plans in flight; one more after a quick step, or if the device waits for launches
        self._outputs: list[RequestOutput] = []
        self._released: list[int] = []
        self._num_arrived = self._num_prompt_tokens = 0
        self._last_progress = 0.0  # time of the first arrival, or of the last plan, landing or pixels

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def add(self, wire: EngineRequest, prompt_ids: npt.NDArray[np.int32]) -> None:
        """Add a request and copy its ids. Reject one that can never run."""
        error = self._find_problem(wire, len(prompt_ids))
        if error is not None:
            self._outputs += [RequestOutput(wire.rid, [], error=error, index=index) for index in range(wire.n)]
            self._released.append(wire.rid)
            return
        if is_idle(self.state):
            self._last_progress = time.monotonic()
        self._num_prompt_tokens += len(prompt_ids)
        sources = {span.hash: span.source for span in wire.images if span.source.encoding != "file"}
        requests = [self._make_request(wire, prompt_ids, sources, index) for index in range(wire.n)]
        self._requests[wire.rid] = list(requests)
        if any(span.source.encoding == "file" for span in wire.images) and (
            lacking := policy.lacking_pixels(self.state, requests[0], policy.num_cached_tokens(self.state, requests[0]))
        ):
            self.state.want_pixels(requests, lacking)
        for request in requests:
            if request not in self.state.loading:
                self.state.add(request)
        if wire.deadline is not None:
            heapq.heappush(self._deadlines, (wire.deadline, wire.rid))

    def expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            for request in self._live(heapq.heappop(self._deadlines)[1]):
                self._fail(request, LACKS_MEMORY if request in self.state.loading else TIMED_OUT)

    def abort(self, rid: int | None, index: int | None = None) -> None:
        """End all answers or one without an output. Unknown or ended requests are ignored. None: end every request with an output."""
        for request in self._live(rid):
            if index is None or request.index == index:
                self._outputs += [RequestOutput(request.rid, [], "abort", index=request.index)] if rid is None else []
                self._end(request)

    def take(self, awaited: Pixels | AdapterRead) -> None:
        """Continue the requests that waited for it, or end them with an error. Ended requests are ignored."""
        if isinstance(awaited, AdapterRead):
            self._last_progress = time.monotonic()
            self.state.adapters.note_read(awaited)
            if not awaited.is_readable:
                self._fail_all(self.state.adapters.error_of)
            return
        pixels, requests = awaited, self._live(awaited.rid)
        if not requests:
            return
        self._last_progress = time.monotonic()
        if pixels.error is None:
            self.state.take_pixels(requests, {requests[0].images[index].hash: source for index, source in pixels.sources.items()})
            return
        for request in requests:
            self._fail(request, pixels.error)

    def forget_all(self, images: bool) -> None:
        """Empty the prefix cache and, if `images`, drop the unpinned embeddings."""
        self.state.blocks.forget_all()
        if images:
            self.state.images.forget_unpinned()

    def note_progress(self) -> None:
        self._last_progress = time.monotonic()

    def next_step(self) -> PlannedStep | None:
        """Plan a step, which the caller must send to every rank; None if nothing can run now."""
        self.proposer.offer(self.state)
        step = policy.plan(self.state)
        if step is not None:
            self._last_progress = now = time.monotonic()
            self._in_flight.append(step)
            for request in step.requests:
                request.wire.stages.admitted = request.wire.stages.admitted or now
        return step

    def collect(self, result: StepResult) -> None:
        self._in_flight[result.step - self._in_flight[0].plan.step].results.append(result)
        while self._in_flight and len(self._in_flight[0].results) == self._num_ranks:
            landed = self._in_flight.popleft()
            is_quick = max(rank.encode_ms + rank.forward_ms for rank in landed.results) < QUICK_MS
            self.depth = DEPTH + (is_quick or any(rank.is_late for rank in landed.results))
            self._land(landed)
            self._last_progress = time.monotonic()

    def take_outputs(self, stats: EngineStats | None, heartbeat: float) -> EngineOutputs:
        outputs = EngineOutputs(self._outputs, self._released, stats, heartbeat, self.state.wanted)
        self._outputs, self._released, self.state.wanted = [], [], []
        return outputs

    @property
    def has_outputs(self) -> bool:
        return bool(self._outputs or self._released or self.state.wanted)

    def alive_at(self, now: float) -> float:
        """Return the time of the last progress; `now` if the engine is idle or waits for the processor."""
        return self._last_progress if self._in_flight or not is_idle(self.state) else now

    def stats(self) -> EngineStats:
        state = self.state
        return msgspec.structs.replace(
            state.counters,
            max_model_len=self._capacity,
            num_running=len(state.running),
            num_waiting=len(state.waiting) + len(state.loading),
            num_blocks=state.blocks.num_blocks,
            num_free_blocks=state.blocks.num_free,
            num_pinned_images=state.images.num_pinned,
            image_cache_bytes=state.images.used_bytes,
            image_cache_budget=state.images.budget_bytes,
            steps=state.num_steps,
            prompt_tokens=self._num_prompt_tokens,
            images_evicted=state.images.num_evicted,
        )

    def _find_problem(self, wire: EngineRequest, num_prompt: int) -> ErrorInfo | None:
        if (error := self.state.adapters.error_of(wire)) is not None:
            return error
        if num_prompt + 1 > self._capacity:
            words = f"The prompt has {num_prompt} tokens; with one token of output {self._capacity} is the most that fits."
            return ErrorInfo(400, words, code="context_length_exceeded")
        limits = self.state.limits
        largest = min(limits.max_num_encoder_tokens, self.state.images.budget_bytes // limits.bytes_per_image_token)
        for span in wire.images:
            if span.length > largest:
                words = f"An image takes {span.length} tokens; the limit is {largest} (--max-num-encoder-tokens)."
                return ErrorInfo(400, words, code="context_length_exceeded")
        return None

    def _make_request(
        self, wire: EngineRequest, prompt_ids: npt.NDArray[np.int32], sources: dict[bytes, ImageSource], index: int
    ) -> Request:
        most = self._capacity - len(prompt_ids)
        params = wire.params.of_answer(index)
        max_tokens = most if params.max_tokens is None else min(most, max(1, params.max_tokens))
        token_ids = np.empty(len(prompt_ids) + max_tokens, dtype=np.int32)
        token_ids[: len(prompt_ids)] = prompt_ids
        hasher = BlockHasher(self.state.blocks.block_size, wire.images, wire.namespace)
        self._num_arrived += 1
        is_stateful = self.state.limits.snapshot_blocks > 0
        return Request(
            wire=wire,
            token_ids=token_ids,
            num_known=len(prompt_ids),
            max_tokens=max_tokens,
            eos_ids=self._eos_token_ids,
            hasher=hasher,
            params=params,
            order=self._num_arrived,
            index=index,
            sources=sources,
            is_stateful=is_stateful,
            snapshot_points=snapshot_points(len(prompt_ids), wire.images, self.state.blocks.block_size) if is_stateful else (),
        )

    def _live(self, rid: int | None) -> list[Request]:
        requests = self._requests.values() if rid is None else [self._requests.get(rid, [])]
        return [request for siblings in requests for request in siblings if request.status is not Status.STOPPING]

    def _land(self, step: PlannedStep) -> None:
        results = step.results
        self._fail_images({step.made[image_id] for result in results for image_id in result.failed_images}, UNREADABLE)
        if any(result.out_of_memory for result in results):
            self._give_up(step)
        rank0 = next(result for result in results if result.rank == 0)
        token_ids, logprobs, counts = iter(rank0.token_ids), iter(rank0.logprobs), iter(rank0.num_tokens)
        num_sampled = 0
        for index, (request, chunk) in enumerate(zip(step.requests, step.plan.chunks, strict=True)):
            ids: list[int] = []
            known: list[TokenLogprobs] = []
            if chunk.sample:
                num_sampled += 1
                count = next(counts) if rank0.num_tokens else 1
                ids = list(islice(token_ids, count))
                if rank0.logprobs:
                    known = [entry for entry in islice(logprobs, count) if entry is not None]
            kept, reason = self.state.land(request, chunk, ids)
            if request.status is Status.STOPPING:
                self._release_if_landed(request)
                continue
            if chunk.sample:
                self.proposer.take(request, rank0.proposed[num_sampled - 1] if rank0.proposed else [])
            details = None
            if chunk.proposed:
                details = TokenDetails(len(chunk.proposed), min(len(ids) - 1, len(kept)))
                self.state.counters.count_drafts(details)
            if step.requests[index + 1 : index + 2] != [request]:
                _note_stages(request, chunk.sample, results)
            if index in rank0.reports:
                rank0.reports[index].add_to(request.reports)
            if chunk.sample and (error := rank0.failed_samples.get(num_sampled - 1)) is not None:
                for answer in self._live(request.rid):  # the error ends the request for its client
                    self._fail(answer, error)
            elif kept:
                self._deliver(request, kept, known[: len(kept)], reason, details)

    def _deliver(
        self,
        request: Request,
        token_ids: list[int],
        logprobs: list[TokenLogprobs],
        reason: FinishReason | None,
        details: TokenDetails | None,
    ) -> None:
        stages, num_cached = None, max(0, request.num_cached)
        is_first = request.num_known == request.num_prompt + len(token_ids)
        report = joined(request.reports) if is_first else None
        if not request.wire.stages.first_token:
            stages = request.wire.stages
            stages.first_token, stages.weight_version = time.monotonic(), self.state.weight_version
        output = RequestOutput(request.rid, token_ids, reason, None, num_cached, stages, logprobs, report, request.index, details)
        self._outputs.append(output)
        if reason is not None:
            self._end(request)

    def _give_up(self, step: PlannedStep) -> None:
        """Fail all running requests after a step that was not computed. The caches drop its images."""
        self.state.forget_images(set(step.made.values()))
        for rid in {request.rid for request in (*step.requests, *self.state.running)}:
            for request in self._live(rid):
                self._fail(request, OUT_OF_MEMORY)

    def _fail_images(self, digests: set[bytes], error: ErrorInfo) -> None:
        if digests:
            self.state.forget_images(digests)
            self._fail_all(lambda wire: error if any(span.hash in digests for span in wire.images) else None)

    def _fail_all(self, error_of: Callable[[EngineRequest], ErrorInfo | None]) -> None:
        for request in self._live(None):
            if (error := error_of(request.wire)) is not None:
                self._fail(request, error)

    def _fail(self, request: Request, error: ErrorInfo) -> None:
        self._outputs.append(RequestOutput(request.rid, [], error=error, index=request.index))
        self._end(request)

    def _end(self, request: Request) -> None:
        """Plan no further chunks; resources are released when the plans in flight have landed."""
        self.state.stop(request)
        self._release_if_landed(request)

    def _release_if_landed(self, request: Request) -> None:
        if request.num_in_flight == 0:
            self.state.release(request)
            self.proposer.release(request)
            siblings = self._requests[request.rid]
            siblings.remove(request)
            if not siblings:
                del self._requests[request.rid]
                self._released.append(request.rid)


def _note_stages(request: Request, sampled: bool, results: Sequence[StepResult]) -> None:
    stages = request.wire.stages
    if stages.first_token:
        return
    stages.launched = stages.launched or min(result.launched for result in results)
    stages.decode_ms += max(result.decode_ms for result in results)
    stages.encode_ms += max(result.encode_ms for result in results)
    stages.forward_ms += max(result.forward_ms for result in results)
    if sampled:
        stages.prefilled = max(result.done for result in results)

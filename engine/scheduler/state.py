"""State that the policy decides on, and its invariants. Core and policy change requests, blocks and images only by the methods of `State`.

add ──▶ waiting ──▶ start ──▶ running ──▶ stop ──▶ stopping ──▶ release
           ▲                     │
           └────── preempt ◀─────┘

A request that needs pixels of files is outside the queue until the processor has sent them.
"""

from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.scheduler.adapters import AdapterDirectory
from engine.scheduler.blocks import BlockPool
from engine.scheduler.images import ImageDirectory, ImageEntry
from engine.scheduler.request import Request, Status
from engine.wire.messages import Chunk, FinishReason, ImageSource, StepPlan, WantedPixels
from engine.wire.stats import EngineStats
from engine.wire.step_sizes import StepSizes
from engine.wire.updates import FIRST_VERSION


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one step. `bytes_per_image_token` is for the workers' cache."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_mixed_tokens: int | None  # None: `StepSizes.max_mixed_prefill`
    max_num_encoder_tokens: int
    mixed_step_tokens: int  # exceeded only if many more tokens wait
    bytes_per_image_token: int
    step_sizes: StepSizes
    prefix_cache: bool = True
    snapshot_blocks: int = 0  # blocks per snapshot of a row's recurrent states; 0: the model has none
    num_lookahead: int = 0  # tokens after a row for which it has blocks


@dataclass(slots=True)
class State:
    """Scheduler state. `running` and `waiting` are sorted by `Request.order`."""

    limits: Limits
    blocks: BlockPool
    images: ImageDirectory
    adapters: AdapterDirectory
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    loading: set[Request] = field(default_factory=set)  # until their pixels arrive
    is_open: bool = True  # otherwise only requests that have already started may start, after a preemption
    weight_version: str = FIRST_VERSION
    stopping: set[Request] = field(default_factory=set)
    free_rows: list[int] = field(default_factory=list)
    wanted: list[WantedPixels] = field(default_factory=list)  # not sent yet
    saving: list[list[int]] = field(default_factory=list)  # snapshot blocks written by plans in flight
    counters: EngineStats = field(default_factory=EngineStats)  # only its totals are used
    num_proposed: int = 0  # tokens per row that workers propose after the next step
    num_steps: int = 0

    def add(self, request: Request) -> None:
        request.status = Status.WAITING
        insort(self.waiting, request, key=_order)

    def may_start(self, request: Request) -> bool:
        return (self.is_open or request.has_started) and self.adapters.may_start(request.wire)

    def start(self, request: Request, hits: Sequence[int], num_equal: int) -> None:
        """Give a waiting request a row and its prefix from `hits`. Another sequence branched off after `num_equal` blocks."""
        self.waiting.remove(request)
        insort(self.running, request, key=_order)
        self.blocks.acquire(hits)
        request.status, request.row, request.blocks = Status.RUNNING, self.free_rows.pop(), list(hits)
        request.slot = self.adapters.acquire(request.wire)
        request.leader, request.num_shared_blocks = None, 0
        request.branch_point = num_equal * self.blocks.block_size
        request.num_computed, request.num_committed = len(hits) * self.blocks.block_size, len(hits)
        while request.first_needed < len(request.images) and request.images[request.first_needed].end <= request.num_computed:
            request.first_needed += 1
        for index in range(request.first_needed, len(request.images)):
            if request.images[index].hash not in request.sources:
                self._pin(request, index)
                self.counters.images_hit += 1
        if request.num_cached < 0:  # the prefix of further answers was computed for the first one
            request.num_cached = 0 if request.index else min(request.num_computed, request.num_prompt)
            self.counters.cached_prompt_tokens += request.num_cached
            self.counters.images_skipped += 0 if request.index else request.first_needed

    def preempt(self, request: Request) -> None:
        """Return a request to its place in the queue; it recomputes what the prefix cache evicts."""
        self.running.remove(request)
        self._take_all(request)
        request.num_computed = request.num_committed = request.first_needed = 0
        request.proposed, request.num_proposed, request.is_held = (), 0, False
        self.add(request)
        self.counters.preemptions += 1

    def stop(self, request: Request) -> None:
        """Stop a request. It keeps its resources until its plans in flight have landed."""
        queue = self.loading if request in self.loading else self.running if request.status is Status.RUNNING else self.waiting
        queue.remove(request)
        request.status = Status.STOPPING
        self.stopping.add(request)

    def release(self, request: Request) -> None:
        """Release everything, and the reference to another request."""
        self.stopping.remove(request)
        self._take_all(request)
        request.leader = None

    def follow(self, request: Request, leader: Request, num_shared_blocks: int) -> None:
        request.leader, request.num_shared_blocks = leader, num_shared_blocks

    def want_pixels(self, requests: Sequence[Request], indexes: list[int]) -> None:
        """Set new or waiting answers to one request aside until the pixels of these files arrive."""
        for request in requests:
            if request in self.waiting:
                self.waiting.remove(request)
        self.loading.update(requests)
        self.wanted.append(WantedPixels(requests[0].rid, indexes))

    def take_pixels(self, requests: Sequence[Request], sources: dict[bytes, ImageSource]) -> None:
        requests[0].sources.update(sources)
        for request in self.loading.intersection(requests):
            self.loading.remove(request)
            self.add(request)

    def pin_images(self, request: Request, indexes: Sequence[int]) -> list[tuple[int, ImageEntry]]:
        """Pin these images. Return those missing on the device, by index, with space reserved; the caller has checked that there is
        enough."""
        for index in indexes:  # first, so that `reserve` evicts none of them
            if index not in request.pins and self.images.get(request.images[index].hash) is not None:
                self._pin(request, index)
                self.counters.images_hit += 1
        lacking = []
        for index in indexes:
            if index not in request.pins:
                span = request.images[index]
                if self.images.get(span.hash) is None:
                    entry = self.images.reserve(span.hash, span.length * self.limits.bytes_per_image_token)
                    lacking.append((index, entry))
                else:
                    self.counters.images_hit += 1
                self._pin(request, index)
        return lacking

    def unpin_image(self, request: Request, index: int) -> None:
        """Unpin an image whose last token is planned; no effect if the request was preempted since."""
        if index in request.pins:
            request.pins.remove(index)
            self.images.unpin(request.images[index].hash)

    def forget_images(self, digests: set[bytes]) -> None:
        """Remove wrong embeddings from the caches, whichever requests have pinned them."""
        for request in (*self.running, *self.stopping):
            for index in [index for index in request.pins if request.images[index].hash in digests]:
                self.unpin_image(request, index)
        for digest in digests:
            self.images.forget(digest)

    def advance(self, request: Request, chunk: Chunk, num_images: int) -> None:
        request.blocks.extend(chunk.blocks)
        if chunk.snapshot:
            self.saving.append(chunk.snapshot)
        request.num_computed = chunk.start + chunk.length - len(chunk.proposed)
        request.num_sampled += chunk.sample
        request.num_proposed = self.num_proposed if chunk.sample else 0
        request.first_needed += num_images
        request.num_in_flight += 1

    def note_plan(self, plan: StepPlan) -> None:
        self.num_steps += 1
        self.counters.images_encoded += len(plan.encodes)
        self.counters.computed_tokens += sum([chunk.length for chunk in plan.chunks])

    def land(self, request: Request, chunk: Chunk, sampled: list[int]) -> tuple[list[int], FinishReason | None]:
        """Land a chunk that sampled these ids; all but the last were proposed. Return the ids up to an end, and the finish
        reason if the request ends."""
        request.num_in_flight -= 1
        if chunk.snapshot:
            self._keep_snapshot(request, chunk)
        if request.status is Status.STOPPING:
            return [], None
        kept, reason = sampled, None
        for i, token_id in enumerate(sampled):
            reason = request.append(token_id)
            if reason is not None:
                kept = sampled[: i + 1]
                break
        self.counters.generated_tokens += len(kept)
        num_computed = chunk.start + chunk.length - len(chunk.proposed)
        if chunk.sample:
            request.num_sampled -= 1
            request.proposed = ()
            num_computed += len(kept) - 1
        if request.status is Status.RUNNING:
            request.num_computed = max(request.num_computed, num_computed)
            self._commit(request, num_computed)
        return kept, reason

    def _pin(self, request: Request, index: int) -> None:
        self.images.pin(request.images[index].hash)
        request.pins.add(index)

    def _commit(self, request: Request, num_computed: int) -> None:
        full = num_computed // self.blocks.block_size
        if full <= request.num_committed:
            return
        if self.limits.prefix_cache:
            request.name_blocks(num_computed)
            for i in range(request.num_committed, full):
                self.blocks.commit(request.blocks[i], request.hasher.links[i])
        request.num_committed = full

    def _keep_snapshot(self, request: Request, chunk: Chunk) -> None:
        self.saving.remove(chunk.snapshot)
        end = chunk.start + chunk.length
        if request.status is Status.RUNNING:
            request.name_blocks(end)
            self.blocks.commit_snapshot(chunk.snapshot, request.hasher.links[end // self.blocks.block_size - 1])
        else:
            self.blocks.release(chunk.snapshot)

    def _take_all(self, request: Request) -> None:
        """Release row, blocks and pins. Plans in flight may still use them: workers execute in plan order."""
        for index in request.pins:
            self.images.unpin(request.images[index].hash)
        request.pins.clear()
        self.blocks.release(request.blocks)
        request.blocks = []
        if request.row >= 0:
            self.free_rows.append(request.row)
            self.adapters.release(request.wire)
            request.row = request.slot = -1


def is_idle(state: State) -> bool:
    """Return whether no request is running, or may start."""
    may_start = bool(state.waiting) if state.is_open else any(request.has_started for request in state.waiting)
    return not (state.running or state.stopping or may_start or any(request.has_started for request in state.loading))


def _order(request: Request) -> int:
    return request.order

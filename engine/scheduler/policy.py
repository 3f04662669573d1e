"""Scheduling policy: state in, `StepPlan` out. No clock, no sockets, no tensors.

One rule covers prefill, chunked prefill and decode: `num_computed` approaches `num_tokens` within the step's token budget, oldest request
first. If a chunk lacks a KV block or space for an embedding, the youngest running request is preempted.

A request waits until its adapter has a slot; others may pass it.

A shared prefix is computed once: a request waits while an older request computes its prefix. Younger requests may pass it; it keeps its
place in the order, a row and its blocks.

A request that starts has the pixels of every image that it must encode, or pins the embedding. One whose embeddings or prefix were evicted
since it arrived, or that was preempted, leaves the queue until the processor has sent the pixels.
"""

import math
from dataclasses import dataclass, field
from itertools import islice

from engine.scheduler.images import ImageEntry
from engine.scheduler.request import Request, Status
from engine.scheduler.state import State
from engine.wire.messages import Admit, Chunk, Encode, ImageSpan, StepPlan, StepResult, VisualRef
from models.cache.spec import SPARE_ROWS

STEP_PART_WORTH_WAITING = 1 / 16  # least prefix to wait for, as a share of a step's tokens: waiting may cost a step with little work
PIXELS_PER_TOKEN = 4096  # four times those of an image that is not resized
MOST_FOUND = 65_536  # cached tokens of requests that start in one plan: matching and acquiring their blocks takes 6 to 20 ms
FEW_STEPS, MANY_STEPS = 2, 16  # steps with decodes over which a short prompt, and many waiting tokens, are spread
MIN_CHAINED = 8  # tokens of a chunk that is followed by another one in the same step; exceeds a convolution's inputs


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan, and the scheduler's data about it until all ranks have sent their results."""

    plan: StepPlan
    requests: list[Request]  # of plan.chunks
    made: dict[int, bytes]  # image id -> hash of an encoded image
    results: list[StepResult] = field(default_factory=list)


def plan(state: State) -> PlannedStep | None:
    """Return the next step, or None if nothing can run now. The state changes as if the step had been sent."""
    step = _StepBuilder(state)
    step.fill()
    return step.finish()


class _StepBuilder:
    """Builder of one step. A request may be preempted only until it gets a chunk; victims are younger than the requester."""

    def __init__(self, state: State):
        self.state = state
        self.limits = state.limits
        self.admits: list[Admit] = []
        self.encodes: list[Encode] = []
        self.made: dict[int, bytes] = {}
        self.prefills: list[tuple[Request, Chunk]] = []
        self.decodes: list[tuple[Request, Chunk]] = []
        self.unpins: list[tuple[Request, int]] = []
        self.num_encoder_tokens = 0
        self.num_chained = 0  # chunks followed by another one of the same request
        self.is_open = True  # False once a waiting request cannot start
        self.num_passed = 0  # waiting requests that others may overtake: they await a prefix or a slot
        self.num_reserved_rows = 0  # rows kept for those of them that await a prefix
        self.num_reserved_blocks = 0  # blocks kept for all of them
        self.due: set[Request] = set()  # running requests that decode: their tokens are reserved
        state.adapters.begin_plan()
        self.num_read = 0  # cached tokens read by requests that start
        num_lacking = 0
        for request in state.running:
            if not request.is_decoding:
                num_lacking += request.num_tokens - request.num_computed
            elif request.wants_tokens:
                self.due.add(request)
        self.budget = prefill_budget(state, len(self.due), num_lacking)

    def fill(self) -> None:
        """Continue running requests, then start waiting ones if this needs no preemption."""
        i = 0
        while i < len(self.state.running):
            request = self.state.running[i]
            if self.state.waiting:
                i += self._admit_waiting(request.order)
            if request in self.due:
                self._decode(request)
            elif not request.is_decoding:
                self.budget -= self._compute(request, min(self.budget, request.num_tokens - request.num_computed))
            i += request.status is Status.RUNNING  # unless it has preempted itself
        self._admit_waiting(math.inf)

    def finish(self) -> PlannedStep | None:
        """Finish the plan. Images whose last token is computed are unpinned only now."""
        for request, index in self.unpins:
            self.state.unpin_image(request, index)
        members = self.prefills + self.decodes
        if not members:
            return None
        step = StepPlan(
            step=self.state.num_steps,
            evict=self.state.images.take_evicted(),
            admits=self.admits,
            encodes=self.encodes,
            chunks=[chunk for _, chunk in members],
            loads=self.state.adapters.take_loads(),
            num_proposed=self.state.num_proposed,
        )
        self.state.note_plan(step)
        return PlannedStep(step, [request for request, _ in members], self.made)

    def _admit_waiting(self, before: float) -> int:
        """Start waiting requests that precede `before` and return their number. A request that cannot start blocks all later ones."""
        num_running = len(self.state.running)
        while (request := self._next_waiting(before)) is not None:
            if not self.state.may_start(request):
                self.num_passed += 1
            elif request.awaits_prefix or self._find_leader(request):
                self.num_passed, self.num_reserved_rows = self.num_passed + 1, self.num_reserved_rows + 1
                self.num_reserved_blocks += self.state.blocks.num_needed(request.num_tokens) - request.num_shared_blocks
            else:
                self.is_open = request.num_in_flight == 0 and self._admit(request)
        return len(self.state.running) - num_running

    def _next_waiting(self, before: float) -> Request | None:
        waiting, i = self.state.waiting, self.num_passed
        if not self.is_open or self.budget <= 0 or i == len(waiting) or len(self.state.free_rows) <= self.num_reserved_rows:
            return None
        return waiting[i] if waiting[i].order < before else None

    def _find_leader(self, request: Request) -> bool:
        """Return whether to wait for an older request that computes much of this prefix (for another answer to it: any block)."""
        size = self.state.blocks.block_size
        usual = max(size, int(STEP_PART_WORTH_WAITING * self.limits.max_num_batched_tokens))
        for other in self.state.running if self.limits.prefix_cache and request.params.uses_prefixes else []:
            if other.order > request.order:
                break  # the oldest request never waits, so every wait ends
            worth = size if other.wire is request.wire else usual
            if other.num_known - other.num_committed * size < worth:
                continue  # it decodes, or has little left to compute
            num_shared = min(request.num_tokens - 1, request.num_shared_with(other)) // size
            if (num_shared - other.num_committed) * size >= worth:
                self.state.follow(request, other, num_shared)
                return True
        return False

    def _admit(self, request: Request) -> bool:
        blocks = self.state.blocks
        equal = _prefix_hits(self.state, request)
        hits, snapshot = _with_states(self.state, request, equal)
        needed = blocks.num_needed(request.num_tokens + self.limits.num_lookahead) - len(hits) + blocks.num_unheld(hits)
        if needed > blocks.num_free - self.num_reserved_blocks:
            return False
        start = len(hits) * blocks.block_size
        if lacking := lacking_pixels(self.state, request, start):
            self.state.want_pixels([request], lacking)
            return True
        if self.num_read and self.num_read + start > MOST_FOUND:
            return False
        length, _ = self._fit_images(request, start, min(self.budget, request.num_tokens - start))
        if length == 0:  # no space for an embedding: starting a request preempts no other
            return False
        self.num_read += start
        self.state.start(request, hits, len(equal))
        output_ids = request.token_ids[request.num_prompt : request.num_known].tolist()
        self.admits.append(
            Admit.of(
                request.wire, row=request.row, output_ids=output_ids, blocks=list(hits), params=request.params, snapshot=snapshot,
                slot=request.slot,
            )
        )  # fmt: skip
        self.budget -= self._compute(request, length)
        return True

    def _decode(self, request: Request) -> None:
        """Schedule the last token, already deducted from the budget, and proposed tokens that fit without preemption."""
        proposed = request.proposed
        if proposed:
            proposed = proposed[: max(0, min(self.budget, request.max_tokens - request.num_output - 1))]
            proposed = proposed if self._fits(request, 1 + len(proposed)) else ()
        if self._schedule(request, 1 + len(proposed), proposed):
            self.budget -= len(proposed)

    def _compute(self, request: Request, length: int) -> int:
        """Schedule chunks of at most `length` known tokens and return their length. A prompt continues after a snapshot in the same
        step."""
        done = more = self._schedule(request, length)
        while more and request.is_stateful and (rest := self._chainable(request, more, length - done)):
            self.num_chained += 1
            more = self._schedule(request, rest)
            done += more
        return done

    def _chainable(self, request: Request, before: int, length: int) -> int:
        """Return the number of tokens that can follow a chunk in this step without preemption; a single last token would be a decode
        row."""
        if self.num_chained == SPARE_ROWS or before < MIN_CHAINED or request.num_tokens - request.num_computed < 2:
            return 0
        length, _ = self._fit_images(request, request.num_computed, length)
        return length if self._fits(request, length) else 0

    def _schedule(self, request: Request, length: int, proposed: tuple[int, ...] = ()) -> int:
        """Add a chunk of at most `length` tokens, preempting younger requests (finally itself) for space. Return its length, or 0."""
        if (point := request.next_snapshot(request.num_computed, request.num_computed + length)) is not None:
            length = point - request.num_computed
        while length > 0:
            fitting, starved = self._fit_images(request, request.num_computed, length)
            if fitting == 0 and not starved:
                return 0  # encoder budget used up
            if fitting and (new_blocks := self.state.blocks.alloc(self._num_lacking(request, fitting))) is not None:
                self._add_chunk(request, fitting, new_blocks, proposed)
                return fitting
            if self.state.saving:
                return 0  # snapshot blocks are released when their steps land
            victim = self.state.running[-1]
            self.state.preempt(victim)
            if victim is request:
                return 0
        return 0

    def _num_lacking(self, request: Request, length: int) -> int:
        """Return the number of blocks to allocate for a chunk and the tokens that may be proposed after it."""
        return max(0, self.state.blocks.num_needed(request.num_computed + length + self.limits.num_lookahead) - len(request.blocks))

    def _fits(self, request: Request, length: int) -> bool:
        return self._num_lacking(request, length) <= self.state.blocks.num_free - self.num_reserved_blocks

    def _fit_images(self, request: Request, start: int, length: int) -> tuple[int, bool]:
        """Cut a chunk before the first image that does not fit; also return whether cache space is lacking."""
        if request.first_needed == len(request.images):
            return length, False
        end = start + length
        encoder_tokens, used = self.num_encoder_tokens, self.state.images.pinned_bytes
        seen: set[bytes] = set()
        for span in request.images[request.first_needed :]:
            if span.start >= end:
                break
            if span.end <= start or span.hash in seen:
                continue
            seen.add(span.hash)
            entry = self.state.images.get(span.hash)
            size = span.length * self.limits.bytes_per_image_token
            used += size if entry is None or entry.pins == 0 else 0
            if used > self.state.images.budget_bytes:
                return max(0, span.start - start), True
            if entry is not None:
                continue
            cost = _encoder_cost(request, span)
            if encoder_tokens > 0 and encoder_tokens + cost > self.limits.max_num_encoder_tokens:
                return max(0, span.start - start), False
            if span.end > end and span.length <= length and span.start - start >= max(1, length // 2):
                return span.start - start, False  # end the chunk before an image that the next chunk can hold whole
            encoder_tokens += cost
        return length, False

    def _add_chunk(self, request: Request, length: int, new_blocks: list[int], proposed: tuple[int, ...]) -> None:
        start, end = request.num_computed, request.num_computed + length
        visual: list[VisualRef] = []
        num_images = 0
        if request.first_needed < len(request.images):
            visual, num_images = self._take_images(request, start, end)
        sample = end - len(proposed) == request.num_tokens
        chunk = Chunk(request.row, start, length, sample, new_blocks, visual, proposed, self._snapshot_blocks(request, start, end))
        (self.decodes if chunk.is_decode else self.prefills).append((request, chunk))
        self.state.advance(request, chunk, num_images)

    def _snapshot_blocks(self, request: Request, start: int, end: int) -> list[int]:
        if request.next_snapshot(start, end) != end or not self.limits.prefix_cache:
            return []
        num_blocks, links = self.limits.snapshot_blocks, request.hasher.links
        last = end // self.state.blocks.block_size - 1
        if last < len(links) and self.state.blocks.snapshot(links[last]):
            return []
        has_space = num_blocks <= self.state.blocks.num_free - self.num_reserved_blocks
        return (self.state.blocks.alloc(num_blocks) or []) if has_space else []

    def _take_images(self, request: Request, start: int, end: int) -> tuple[list[VisualRef], int]:
        """Pin or encode the images that overlap the chunk; also return the number of images that end in it."""
        images, first = request.images, request.first_needed
        overlapping = range(first, next((i for i in range(first, len(images)) if images[i].start >= end), len(images)))
        for index, entry in self.state.pin_images(request, overlapping):
            self._make(request, images[index], entry)
        refs, num_done = [], 0
        for index in overlapping:
            span, held = images[index], self.state.images.get(images[index].hash)
            assert held is not None
            begin, stop = max(start, span.start), min(end, span.end)
            refs.append(VisualRef(held.image_id, begin, stop - begin, begin - span.start))
            if span.end <= end:
                self.unpins.append((request, index))
                num_done += 1
        return refs, num_done

    def _make(self, request: Request, span: ImageSpan, entry: ImageEntry) -> None:
        self.made[entry.image_id] = span.hash
        self.encodes.append(Encode(entry.image_id, request.sources[span.hash], span.grid, request.tower_slot))
        self.num_encoder_tokens += _encoder_cost(request, span)
        request.wire.stages.images_encoded += 1


def prefill_budget(state: State, num_decodes: int, num_lacking: int) -> int:
    """Return the prompt tokens that a step with so many decodes may compute; running requests lack `num_lacking` tokens.

    Chunks alongside decodes are small: streams hardly wait, and a chunk uses weights that the decodes read anyway. The chunk grows with the
    number of waiting prompt tokens: up to `mixed_step_tokens` with the decodes, beyond that only if very many wait. The step has an
    efficient size, and the chunk is at least half of it.
    """
    limits = state.limits
    if num_decodes == 0:
        return limits.max_num_batched_tokens
    sizes = limits.step_sizes
    startable = islice(state.waiting, len(state.free_rows))
    lacking = num_lacking + sum(request.num_tokens for request in startable)
    usual = min(limits.mixed_step_tokens, sizes.smallest_step(num_decodes + lacking // FEW_STEPS))
    size = max(usual, sizes.largest_step(num_decodes + lacking // MANY_STEPS))
    chunk = max(size - num_decodes, size // 2, 1)
    return min(chunk, limits.max_num_mixed_tokens or sizes.max_mixed_prefill, limits.max_num_batched_tokens - num_decodes)


def _encoder_cost(request: Request, span: ImageSpan) -> int:
    """Return the cost in encoder tokens. An image that is much reduced is charged by its pixels, since a step holds them all."""
    source = request.sources[span.hash]
    return max(span.length, source.num_frames * source.height * source.width // PIXELS_PER_TOKEN)


def lacking_pixels(state: State, request: Request, num_computed: int) -> list[int]:
    """Return the files, each once, whose pixels a request needs after `num_computed` tokens. It needs none of images whose embeddings
    it can pin: pinned ones take at most half of the cache, and leave space for its largest image."""
    lacking: dict[bytes, int] = {}
    if all(span.hash in request.sources for span in request.images):
        return []
    largest = max(span.length for span in request.images) * state.limits.bytes_per_image_token
    left = min(state.images.budget_bytes // 2, state.images.budget_bytes - largest) - state.images.pinned_bytes
    relied: set[bytes] = set()
    for index, span in enumerate(request.images):
        if span.end <= num_computed or span.hash in request.sources or span.hash in relied:
            continue
        entry = state.images.get(span.hash)
        size = entry.num_bytes if entry is not None and not entry.pins else 0
        if entry is None or size > left:
            lacking.setdefault(span.hash, index)
        else:
            relied.add(span.hash)
            left -= size
    return list(lacking.values())


def num_cached_tokens(state: State, request: Request) -> int:
    return len(_with_states(state, request, _prefix_hits(state, request))[0]) * state.blocks.block_size


def _with_states(state: State, request: Request, hits: list[int]) -> tuple[list[int], list[int]]:
    """Return the longest prefix of these blocks that ends with a snapshot, and the snapshot's blocks; all blocks if the model has no
    states."""
    if not request.is_stateful:
        return hits, []
    for num_blocks in range(min(len(hits), len(request.hasher.links)), 0, -1):
        if snapshot := state.blocks.snapshot(request.hasher.links[num_blocks - 1]):
            return hits[:num_blocks], snapshot
    return [], []


def _prefix_hits(state: State, request: Request) -> list[int]:
    """Return the cached blocks of the prefix; at least one token remains to be computed for its logits."""
    if not state.limits.prefix_cache or not request.params.uses_prefixes:
        return []
    ids = request.known_ids()
    usable = min(request.num_tokens - 1, len(ids)) // state.blocks.block_size
    return state.blocks.match(request.hasher.chain(ids, usable))

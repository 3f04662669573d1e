"""Who computes what in the next step: state in, `StepPlan` out. No clock, no sockets, no tensors; called by `main`.

One rule for prefill, chunked prefill and decode: `num_computed` chases `num_tokens` within the step's token budget, oldest request
first. What a chunk lacks (a KV block, room for an embedding) is taken from the youngest running request by preemption.

A prefix is computed once, also when requests that share it come together: one whose beginning an older one is computing waits until that
is in the cache. Younger ones may pass it meanwhile; it keeps its place in the order, a row and its blocks.

An image that came as a file has no pixels until the policy wants them, which it does when the image has to be encoded. A waiting request
waits for them as for a prefix; a running one (its image was evicted behind its back) computes what lies before the image, and then stalls.
Either ends, whoever else waits for what: the processor always answers, and waits for room only for so long.

An image whose embedding has left the device for the host is restored: it takes room there, but neither pixels nor encoder budget.
"""

import math
from bisect import insort
from dataclasses import dataclass

from engine.messages import Admit, Chunk, Encode, ImageSpan, Restore, StepPlan, VisualRef, WantedPixels
from engine.scheduler.budget import prefill_budget
from engine.scheduler.images import ImageEntry
from engine.scheduler.request import Request, Status
from engine.scheduler.state import State

# Least part of a step's tokens that is worth waiting for: the wait may cost a step that does little, and that takes about as long.
STEP_PART_WORTH_WAITING = 1 / 16


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan for the workers, and what the scheduler must remember until its result is in."""

    plan: StepPlan
    requests: list[Request]  # of plan.chunks, in their order
    encoded: dict[int, bytes]  # image id -> hash


def plan(state: State) -> PlannedStep | None:
    """The next step, or None if nothing can run now. Mutates the state as if the step had been sent."""
    step = _StepBuilder(state)
    step.fill()
    return step.finish()


def release(state: State, request: Request) -> None:
    """Takes row, blocks and pins from a request. Plans in flight may still use them: workers execute in plan order."""
    _unpin(state, request)
    state.blocks.release(request.blocks)
    request.blocks = []
    if request.row >= 0:
        state.free_rows.append(request.row)
        request.row = -1


def preempt(state: State, request: Request) -> None:
    """Sends a running request back to its place in the queue; it recomputes what the prefix cache forgets."""
    state.running.remove(request)
    release(state, request)
    request.status = Status.WAITING
    request.num_computed = request.num_committed = request.first_needed = 0
    position = sum(other.arrival < request.arrival for other in state.waiting)
    state.waiting.insert(position, request)
    state.counters.preemptions += 1


def commit(state: State, request: Request, num_computed: int) -> None:
    """Offers the full blocks up to `num_computed` to the directory: called when the result of the step that computed them is in."""
    if not state.limits.prefix_cache or not request.blocks:
        return
    request.hasher.extend(request.known_ids())
    full = min(num_computed // state.blocks.block_size, len(request.hasher.links), len(request.blocks))
    for i in range(request.num_committed, full):
        state.blocks.commit(request.blocks[i], request.hasher.links[i])
    request.num_committed = max(request.num_committed, full)


def unpin_image(state: State, request: Request, digest: bytes) -> None:
    """Drops a request's pins on one image, because its embedding turned out to be wrong."""
    for index in [index for index in request.pins if request.images[index].hash == digest]:
        state.images.unpin(digest)
        request.pins.discard(index)


def _unpin(state: State, request: Request) -> None:
    for index in request.pins:
        state.images.unpin(request.images[index].hash)
    request.pins.clear()


class _StepBuilder:
    """Collects one step. A request is only ever preempted before it has a chunk in the step: victims are younger than whoever asks."""

    def __init__(self, state: State):
        self.state = state
        self.limits = state.limits
        self.admits: list[Admit] = []
        self.restores: list[Restore] = []
        self.encodes: list[Encode] = []
        self.encoded: dict[int, bytes] = {}
        self.prefills: list[tuple[Request, Chunk]] = []
        self.decodes: list[tuple[Request, Chunk]] = []
        self.unpins: list[tuple[Request, int]] = []
        self.num_encoder_tokens = 0
        self.is_open = True  # until a waiting request cannot start
        self.num_passed = 0  # waiting requests that await a prefix or pixels; each keeps a row
        self.num_reserved_blocks = 0  # and these blocks
        num_decodes = sum(request.is_decoding and request.wants_tokens for request in state.running)
        self.budget = prefill_budget(state, num_decodes)

    def fill(self) -> None:
        """Chunks that fit the budget, by arrival: running requests go on, waiting ones start if nobody must be preempted for it."""
        i = 0
        while i < len(self.state.running):
            request = self.state.running[i]
            i += self._admit_waiting(request.arrival)
            if request.is_decoding:
                if request.wants_tokens:
                    self._schedule(request, 1)  # taken off the budget at the start
            elif request.num_tokens > request.num_computed:
                self.budget -= self._schedule(request, self.budget)
            i += request.status is Status.RUNNING  # not: it has preempted itself
        self._admit_waiting(math.inf)

    def finish(self) -> PlannedStep | None:
        """The plan, prefill chunks first; images whose last token is computed lose their pin now, not earlier."""
        for request, index in self.unpins:
            if index in request.pins:
                request.pins.remove(index)
                self.state.images.unpin(request.images[index].hash)
        members = self.prefills + self.decodes
        if not members:
            return None
        for request, _ in members:
            request.num_in_flight += 1
        evict, saves = self.state.images.take_evicted()
        step = StepPlan(
            step=self.state.num_steps,
            saves=saves,
            evict=evict,
            admits=self.admits,
            restores=self.restores,
            encodes=self.encodes,
            chunks=[chunk for _, chunk in members],
        )
        self.state.num_steps += 1
        self.state.counters.images_encoded += len(self.encodes)
        self.state.counters.images_restored += len(self.restores)
        self.state.counters.computed_tokens += sum(chunk.length for chunk in step.chunks)
        return PlannedStep(step, [request for request, _ in members], self.encoded)

    def _admit_waiting(self, before: float) -> int:
        """First chunks of waiting requests that arrived before `before`, and their number. One that cannot start holds up all behind it."""
        num_running = len(self.state.running)
        while (request := self._next_waiting(before)) is not None:
            if request.awaited or request.awaits_prefix or self._find_leader(request) or self._lacks_pixels(request):
                self.num_passed += 1
                self.num_reserved_blocks += self.state.blocks.num_needed(request.num_tokens) - request.num_shared_blocks
            else:
                self.is_open = request.num_in_flight == 0 and self._admit(request)
        return len(self.state.running) - num_running

    def _next_waiting(self, before: float) -> Request | None:
        waiting, i = self.state.waiting, self.num_passed
        if not self.is_open or self.budget <= 0 or i == len(waiting) or len(self.state.free_rows) <= i:
            return None
        return waiting[i] if waiting[i].arrival < before else None

    def _find_leader(self, request: Request) -> bool:
        """Looks for an older request that is computing so much of this one's beginning that waiting for it is better."""
        size = self.state.blocks.block_size
        worth = max(size, int(STEP_PART_WORTH_WAITING * self.limits.max_num_batched_tokens))
        for other in self.state.running if self.limits.prefix_cache and request.uses_prefixes else []:
            if other.arrival > request.arrival:
                break  # the oldest never waits, so every wait ends
            if other.num_known - other.num_committed * size < worth:
                continue  # it decodes: told without a comparison
            num_shared = min(request.num_tokens - 1, request.num_shared_with(other)) // size
            if (num_shared - other.num_committed) * size >= worth:
                request.leader, request.num_shared_blocks = other, num_shared
                return True
        return False

    def _lacks_pixels(self, request: Request) -> bool:
        """Whether a request that could start has to encode a file behind what is cached of its beginning. It is asked for then."""
        if all(span.hash in request.sources for span in request.images):
            return False
        self._want_pixels(request, len(self._prefix_hits(request)) * self.state.blocks.block_size)
        return bool(request.awaited)

    def _want_pixels(self, request: Request, num_computed: int) -> None:
        """Asks for all files at once that are to be encoded for tokens from `num_computed` on, each once in the life of the request."""
        for index, span in enumerate(request.images):
            is_known = span.hash in request.sources or span.hash in request.awaited or self.state.images.knows(span.hash)
            if _end(span) > num_computed and not is_known:
                request.awaited.add(span.hash)
                self.state.wanted.append(WantedPixels(request.rid, index))

    def _admit(self, request: Request) -> bool:
        blocks = self.state.blocks
        hits = self._prefix_hits(request)
        needed = blocks.num_needed(request.num_tokens) - len(hits) + blocks.num_unheld(hits)
        if needed > blocks.num_free - self.num_reserved_blocks:
            return False
        blocks.acquire(hits)
        request.blocks = list(hits)
        request.num_computed = len(hits) * blocks.block_size
        request.num_committed = len(hits)
        length, _ = self._fit_images(request, min(self.budget, request.num_tokens - request.num_computed))
        if length == 0:  # no room for its next embedding beside the pinned ones: wait, nobody is preempted for a newcomer
            blocks.release(request.blocks)
            request.blocks, request.num_computed, request.num_committed = [], 0, 0
            return False
        self._start(request)
        self.budget -= self._schedule(request, length)
        return True

    def _start(self, request: Request) -> None:
        self.state.waiting.remove(request)
        insort(self.state.running, request, key=lambda other: other.arrival)
        request.status = Status.RUNNING
        request.leader, request.num_shared_blocks = None, 0
        request.row = self.state.free_rows.pop()
        if request.num_cached < 0:
            request.num_cached = min(request.num_computed, request.num_prompt)
            self.state.counters.cached_prompt_tokens += request.num_cached
            self.state.counters.images_skipped += sum(s.start + s.length <= request.num_computed for s in request.images)
        while request.first_needed < len(request.images) and _end(request.images[request.first_needed]) <= request.num_computed:
            request.first_needed += 1
        output_ids = request.token_ids[request.num_prompt : request.num_known].tolist()
        spans = [(s.start, *s.grid) for s in request.images]
        self.admits.append(Admit(request.row, request.wire.prompt, output_ids, spans, request.blocks.copy(), request.params))

    def _prefix_hits(self, request: Request) -> list[int]:
        """Cached blocks of the beginning; at least one token is always left to compute, for its logits."""
        if not self.limits.prefix_cache or not request.uses_prefixes:
            return []
        ids = request.known_ids()
        usable = min(request.num_tokens - 1, len(ids)) // self.state.blocks.block_size
        if request.leader is not None:
            request.hasher.adopt(request.leader.hasher, request.num_shared_blocks)
        return self.state.blocks.match(request.hasher.chain(ids, usable))

    def _schedule(self, request: Request, budget: int) -> int:
        """Adds a chunk of at most `budget` tokens, preempting younger requests (at last itself) for what it lacks. Its length, or 0."""
        length = min(budget, request.num_tokens - request.num_computed)
        while length > 0:
            fitting, starved = self._fit_images(request, length)
            if fitting == 0 and not starved:
                return 0  # the step's encoder budget is used up, or there are no pixels
            new_blocks = self._blocks_for(request, fitting) if fitting else None
            if new_blocks is not None:
                self._add_chunk(request, fitting, new_blocks)
                return fitting
            victim = self.state.running[-1]
            preempt(self.state, victim)
            if victim is request:
                return 0
        return 0

    def _blocks_for(self, request: Request, length: int) -> list[int] | None:
        needed = self.state.blocks.num_needed(request.num_computed + length) - len(request.blocks)
        return self.state.blocks.alloc(needed) if needed > 0 else []

    def _fit_images(self, request: Request, length: int) -> tuple[int, bool]:
        """Cuts a chunk before the first image that cannot be had now. Also returns whether what it lacks is cache room."""
        start, end = request.num_computed, request.num_computed + length
        encoder_tokens, used = self.num_encoder_tokens, self.state.images.pinned_bytes
        seen: set[bytes] = set()
        for span in request.images[request.first_needed :]:
            if span.start >= end:
                break
            if _end(span) <= start or span.hash in seen:
                continue
            seen.add(span.hash)
            entry, is_known = self.state.images.get(span.hash), self.state.images.knows(span.hash)
            if not is_known and span.hash not in request.sources:
                self._want_pixels(request, start)
                return max(0, span.start - start), False
            size = span.length * self.limits.bytes_per_image_token
            used += size if entry is None or entry.pins == 0 else 0
            if used > self.state.images.budget_bytes:
                return max(0, span.start - start), True
            if is_known:
                continue
            if encoder_tokens > 0 and encoder_tokens + span.length > self.limits.max_num_encoder_tokens:
                return max(0, span.start - start), False
            if _end(span) > end and span.length <= length and span.start - start >= max(1, length // 2):
                return span.start - start, False  # a chunk prefers to end on an image's end
            encoder_tokens += span.length
        return length, False

    def _add_chunk(self, request: Request, length: int, new_blocks: list[int]) -> None:
        start, end = request.num_computed, request.num_computed + length
        request.blocks.extend(new_blocks)
        visual = self._take_images(request, start, end)
        sample = end == request.num_tokens
        chunk = Chunk(request.row, start, length, sample, new_blocks, visual)
        is_decode_row = sample and length == 1 and not visual
        (self.decodes if is_decode_row else self.prefills).append((request, chunk))
        request.num_computed = end
        request.num_drawn += sample

    def _take_images(self, request: Request, start: int, end: int) -> list[VisualRef]:
        """Pins and, where needed, plans to restore or encode the images that overlap the chunk; lets go of those that end in it after
        this step."""
        refs = []
        overlapping = [i for i in range(request.first_needed, len(request.images)) if request.images[i].start < end]
        self._pin_known(request, overlapping)  # before any eviction that `reserve` may do
        for index in overlapping:
            span = request.images[index]
            if index not in request.pins:
                self._pin_new(request, index)
            entry = self.state.images.get(span.hash)
            assert entry is not None
            first, last = max(start, span.start), min(end, _end(span))
            refs.append(VisualRef(entry.image_id, first, last - first, first - span.start))
            if _end(span) <= end:
                self.unpins.append((request, index))
                request.first_needed = index + 1
        return refs

    def _pin_known(self, request: Request, indexes: list[int]) -> None:
        """What is on the device stays there, and what is on the host stays there until it is restored."""
        for index in indexes:
            digest = request.images[index].hash
            if self.state.images.get(digest) is None:
                self.state.images.host.hold(digest)
            elif index not in request.pins:
                self.state.images.pin(digest)
                request.pins.add(index)
                self.state.counters.images_hit += 1

    def _pin_new(self, request: Request, index: int) -> None:
        span = request.images[index]
        if self.state.images.get(span.hash) is None:
            entry = self.state.images.reserve(span.hash, span.length * self.limits.bytes_per_image_token)
            assert entry is not None, "room was counted before"
            self._plan_new(request, span, entry)
        else:
            self.state.counters.images_hit += 1
        self.state.images.pin(span.hash)
        request.pins.add(index)

    def _plan_new(self, request: Request, span: ImageSpan, entry: ImageEntry) -> None:
        """An embedding that the device lacks comes from the host's copy or from the tower."""
        if entry.host_offset is not None:
            self.restores.append(Restore(entry.image_id, entry.host_offset, span.length))
            return
        self.encodes.append(Encode(entry.image_id, request.sources[span.hash], span.grid))
        self.encoded[entry.image_id] = span.hash
        self.num_encoder_tokens += span.length
        request.wire.stages.images_encoded += 1


def _end(span: ImageSpan) -> int:
    return span.start + span.length
